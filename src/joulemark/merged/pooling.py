"""Maxima and means over windows, by one kernel in Triton on a GPU.

torch's maximum on a GPU writes where each was found too, eight bytes for a number of two, though nothing reads that
here. What a compiler is to see stays torch's operator.
"""

# mypy: disallow-subclassing-any=False
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from joulemark.merged import writers
from joulemark.merged.compiling import seen_by_compiler
from joulemark.merged.graph import module_of
from joulemark.merged.sequence import Shape
from joulemark.merged.trying import compile_at_once, has_triton, told

_MODULES = {nn.MaxPool2d: True, nn.MaxPool3d: True, nn.AvgPool2d: False, nn.AvgPool3d: False}
_OPERATORS = {(2, True): F.max_pool2d, (3, True): F.max_pool3d, (2, False): F.avg_pool2d, (3, False): F.avg_pool3d}
_MOST_TAPS = 64


class Pooling(nn.Module):
    """The largest of each window, or its mean, of a channels-last tensor.

    Args:
        largest: else the mean.
        kernel, stride, padding: per dimension.
        counted: whether a mean counts the zeros around the image.
    """

    def __init__(self, largest: bool, kernel: Shape, stride: Shape, padding: Shape, counted: bool = True) -> None:
        super().__init__()
        self.largest, self.kernel, self.stride, self.padding, self.counted = largest, kernel, stride, padding, counted
        self.own = has_triton()

    def forward(self, x: Tensor, out: Tensor | None = None, beside: Tensor | None = None) -> Tensor:
        """[batch, channels, *size] → the same of fewer positions.

        Args:
            x: channels-last.
            out: where to, some channels of a channels-last tensor; what this returns is elsewhere where no kernel runs,
                or its size is another one.
            beside: where x is copied to too, as ``out``, where :meth:`keeps`.
        """
        if not self.runs(x):
            return self.in_operators(x)
        from joulemark.merged.windows import pooled

        out = out if out is not None and out.shape == self.shape_of(x) else None
        with writers.its_device(x):
            return pooled(x, self.largest, self.kernel, self.stride, self.padding, self.counted, out, beside)

    @property
    def kind(self) -> tuple[object, ...]:
        """The same for poolings that do the same."""
        return self.largest, self.kernel, self.stride, self.padding, self.counted

    def runs(self, x: Tensor) -> bool:
        """Whether the kernel does it."""
        able = self.own and writers.on_gpu(x) and x.dtype != torch.float64
        return able and not seen_by_compiler()

    @property
    def keeps(self) -> bool:
        """Whether its kernel can copy its input: all that a window's stride holds is in the window."""
        sizes = zip(self.kernel, self.stride, self.padding, strict=True)
        return self.own and all(k >= s + p for k, s, p in sizes)

    @property
    def writes(self) -> bool:
        """Whether it can write into some channels of another tensor."""
        return self.own

    def shape_of(self, x: Tensor) -> Shape:
        """Of the output for x."""
        windows = zip(x.shape[2:], self.kernel, self.stride, self.padding, strict=True)
        return (*x.shape[:2], *((n + 2 * p - k) // s + 1 for n, k, s, p in windows))

    def prove(self, like: Tensor) -> str | None:
        """Try the kernel on a small tensor; where it fails or is wrong, torch's operator stands in from then on.

        Args:
            like: [2, channels, *size] of the device and the format.

        Returns:
            Why the kernel is not used; None where it is.
        """
        try:
            out, expected = self(like), self.in_operators(like)
            torch.testing.assert_close(out, expected)
        except Exception as error:  # a compiler of kernels raises anything; torch's operator does the same
            self.own = False
            return told(error)[:200]
        return None

    def in_operators(self, x: Tensor) -> Tensor:
        """The same in torch's operators."""
        operator: Any = _OPERATORS[len(self.kernel), self.largest]
        more = {} if self.largest else {"count_include_pad": self.counted}
        out: Tensor = operator(x, self.kernel, self.stride, self.padding, **more)
        return out


class Keeping(nn.Module):
    """A pooling that leaves a copy of its input too, which it reads anyway.

    Args:
        pooling: that can.
    """

    def __init__(self, pooling: Pooling) -> None:
        super().__init__()
        self.pooling = pooling

    def forward(self, x: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """What the pooling gives, and x: at its place where a kernel runs and it fits."""
        if place.shape != x.shape or place.dtype != x.dtype or not self.pooling.runs(x):
            return self.pooling(x), x
        return self.pooling(x, beside=place), place


def pooling_of(node: fx.Node) -> Pooling | None:
    """What a node does to its input; None where it is no pooling, or one of a kind that no kernel has."""
    module: Any = module_of(node)
    largest = _MODULES.get(type(module))
    if largest is None or len(node.args) != 1 or node.kwargs or module.ceil_mode:
        return None
    dimensions = 2 if isinstance(module, (nn.MaxPool2d, nn.AvgPool2d)) else 3
    kernel, stride, padding = (_each(one, dimensions) for one in (module.kernel_size, module.stride, module.padding))
    if prod(kernel) > _MOST_TAPS:
        return None
    if largest:
        plain = _each(module.dilation, dimensions) == (1,) * dimensions and not module.return_indices
        return Pooling(True, kernel, stride, padding) if plain else None
    if module.divisor_override is not None:
        return None
    return Pooling(False, kernel, stride, padding, module.count_include_pad)


def replace_poolings(graph: fx.GraphModule, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Put a :class:`Pooling` in the place of each; its kernel is tried once for those of a kind and as many channels.

    Args:
        graph: with shapes.
        device, dtype: of its tensors.

    Returns:
        Per pooling, as the model calls it, what became of it.
    """
    poolings = _found(graph)
    if not poolings:
        return {}
    kinds: dict[tuple[object, int], Pooling] = {}
    for _, made, channels in poolings:
        kinds.setdefault((made.kind, channels), made)
    compile_at_once(_trials(kinds, device, dtype), device)
    whys = {kind: _proved(one, kind[1], device, dtype) for kind, one in kinds.items()}
    became: dict[str, str] = {}
    for number, (node, made, channels) in enumerate(poolings):  # of nodes: a pooling may be called more than once
        why, made.own = whys[made.kind, channels], kinds[made.kind, channels].own
        became[str(node.target)] = "by one kernel" if why is None else f"by torch's operator ({why})"
        node.target = f"pooling_{number}"
        graph.add_submodule(node.target, made)
    graph.delete_all_unused_submodules()
    graph.recompile()
    return became


def _found(graph: fx.GraphModule) -> list[tuple[fx.Node, Pooling, int]]:
    """Poolings of a graph, and their channels."""
    found = []
    for node in graph.graph.nodes:
        made = pooling_of(node)
        meta = cast(fx.Node, node.args[0]).meta.get("tensor_meta") if made is not None else None
        if made is None or meta is None or len(meta.shape) != 2 + len(made.kernel):  # an image without a batch
            continue
        found.append((node, made, int(meta.shape[1])))
    return found


def _trials(
    kinds: Mapping[tuple[object, int], Pooling], device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[object, Callable[[], object]]]:
    """What each pooling's kernel is compiled for, and its trial."""
    for (kind, channels), one in kinds.items():
        if one.own:
            from joulemark.merged.windows import compiled_for

            yield (kind, compiled_for(channels)), partial(_proved, copy(one), channels, device, dtype)


def _proved(pooling: Pooling, channels: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel of a pooling is not used; None where it is."""
    size = [3 * taps + 1 for taps in pooling.kernel]
    like = torch.linspace(-1, 1, 2 * channels * prod(size), device=device).to(dtype).view(2, channels, *size)
    return pooling.prove(like)


def _each(value: object, dimensions: int) -> Shape:
    return (value,) * dimensions if isinstance(value, int) else tuple(cast("tuple[int, ...]", value))
