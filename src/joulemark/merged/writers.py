"""What modules share whose kernels in Triton can write into some channels of a wider tensor."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx

from joulemark.merged.graph import module_of
from joulemark.merged.sequence import Shape


class Writer(Protocol):
    """A module that can write its output where it is told."""

    @property
    def writes(self) -> bool:
        """Whether it has a kernel that does."""

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The output for x, which is ``out`` where a kernel runs and that has the output's shape."""

    def shape_of(self, x: Tensor) -> Shape:
        """Of the output for x."""


def writer_of(node: fx.Node) -> Writer | None:
    """The module of a node that calls a writer with its input alone; None for any other."""
    module: Any = module_of(node)
    able = getattr(module, "writes", False) is True and len(node.args) == 1 and not node.kwargs
    return cast(Writer, module) if able else None


def on_gpu(x: Tensor) -> bool:
    """Whether kernels in Triton run on a tensor."""
    return bool(x.is_cuda)


def its_device(x: Tensor) -> Any:
    """A context in which kernels are launched on a tensor's GPU."""
    return torch.cuda.device(x.device if x.is_cuda else -1)
