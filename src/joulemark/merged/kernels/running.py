"""Runs a kernel where its input lies."""

from __future__ import annotations

from torch import Tensor

from joulemark.merged.kernels import emulate, launch
from joulemark.merged.kernels.kernel import Kernel


def run(
    kernel: Kernel, x: Tensor, weights: Tensor, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The sequence's output, on the GPU where x lies there, else emulated.

    Args:
        kernel: what to run.
        x: [batch, channels, *size], channels-last, or bricks where the kernel's ``layout`` says so.
        weights: what the kernel's ``pack`` gave, on x's device.
        residual: [batch, out_channels, *out], where the description adds one.
        out: where to; by default a new tensor.

    Raises:
        ValueError: tensors that the kernel would misread.
        KernelError: it cannot be compiled or launched; emulated, it left its memory or came to a deadlock.
    """
    return (launch if x.is_cuda else emulate).run(kernel, x, weights, residual, out)
