"""A layer norm over channels as a module of its own, with channels behind the batch; by one kernel in Triton on a GPU.

Behind a convolution it becomes a part of that layer (:attr:`joulemark.merged.graph.Unit.norm`); elsewhere it runs as it
is here. What a compiler sees stays torch's operator.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from joulemark.merged.bricks import channel_norm
from joulemark.merged.compiling import seen_by_compiler
from joulemark.merged.kernels.kernel import layout
from joulemark.merged.trying import has_triton, told

_AGREES = {2: 2e-2, 4: 1e-5}
"""Bytes of a number → relative error up to which two ways agree."""


class ChannelNorm(nn.Module):
    """The norm of a channels-last tensor at each position.

    Args:
        affine: [2, channels], scale and shift.
        eps: what is added to the variance.
    """

    affine: Tensor

    def __init__(self, affine: Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("affine", affine)
        self.eps = eps
        self.own = affine.dtype != torch.float64 and has_triton()

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, *size] → the same."""
        if seen_by_compiler() or not (self.own and x.is_cuda):
            return channel_norm(x, self.affine, self.eps)
        from joulemark.merged.normalize import MOST_CHANNELS, normalized

        if x.shape[1] > MOST_CHANNELS:
            return channel_norm(x, self.affine, self.eps)
        x = x.contiguous(memory_format=layout(x.dim() - 2))
        with torch.cuda.device(x.device):
            return normalized(x, None, self.affine, self.eps, torch.empty_like(x))

    @property
    def kind(self) -> tuple[object, ...]:
        """What its kernel is compiled for."""
        return self.affine.shape[1], self.affine.dtype, self.eps

    def prove(self, run: Callable[[Tensor], Tensor] | None = None) -> str | None:
        """Try the kernel on a small tensor; where it fails or is wrong, torch's operator stands in from then on.

        Args:
            run: in place of the kernel.

        Returns:
            Why the kernel is not used; None where it is, and where there is none to try.
        """
        if run is None and not (self.own and self.affine.is_cuda):
            return None
        channels = self.affine.shape[1]
        x = torch.linspace(-1, 1, 2 * channels * 9, device=self.affine.device).to(self.affine.dtype)
        x = x.sin().view(2, channels, 3, 3)
        why = None
        try:
            out, expected = (run or self)(x).double(), channel_norm(x.double(), self.affine.double(), self.eps)
            error = float((out - expected).norm() / expected.norm().clamp_min(1e-30))
            if not error <= _AGREES[x.dtype.itemsize]:
                why = f"its kernel is {error:.2g} off"
        except Exception as error:  # a compiler of kernels raises anything; torch's operator does the same
            why = told(error)[:200]
        self.own = self.own and why is None
        return why
