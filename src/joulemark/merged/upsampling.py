"""Transposed convolutions whose windows do not overlap, as decoders have them, by one kernel in Triton on a GPU.

Kernel and stride are one (U-Net's 2×2): nothing is added up, each position of the input makes a window of its own. What
a compiler is to see stays torch's operator.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from joulemark.merged import writers
from joulemark.merged.alternatives import Call, Settled, like, settle
from joulemark.merged.bricks import ACTIVATIONS
from joulemark.merged.compiling import seen_by_compiler
from joulemark.merged.graph import activation_of, called_once, module_of, only_user
from joulemark.merged.kernels.kernel import layout
from joulemark.merged.sequence import Activation, Shape
from joulemark.merged.setting import Setting
from joulemark.merged.trying import has_triton

_MODULES = {nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3}
_OPERATORS: dict[int, Callable[..., Tensor]] = {2: F.conv_transpose2d, 3: F.conv_transpose3d}
_TORCHS = "torch's operator"
_FORMATS = ("bf16", "fp16", "tf32")


class Upsampling(nn.Module):
    """``activation(transposed convolution + bias)`` of channels-last tensors, kernel and stride one.

    Args:
        weight: [inputs, outputs, *window].
        bias: [outputs].
        activation: of the result.
        tile: of the kernel (:func:`joulemark.merged.spread.tiles_for`); None without one, torch's operator runs then.
        alone: whether the kernel runs where nobody says where to write.
    """

    weight: Tensor
    bias: Tensor | None
    rows: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation = "none") -> None:
        super().__init__()
        self.window: Shape = tuple(weight.shape[2:])
        self.channels, self.activation = int(weight.shape[1]), activation
        self.tile: tuple[int, int] | None = None
        self.alone = False
        self.register_buffer("weight", weight.contiguous(memory_format=layout(len(self.window))))
        self.register_buffer("bias", bias)
        self.register_buffer("rows", None, persistent=False)

    @property
    def writes(self) -> bool:
        """Whether it can write into some channels of another tensor."""
        return self.tile is not None

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[batch, inputs, *size] → [batch, outputs, *size · window].

        Args:
            x: channels-last.
            out: where to, some channels of a channels-last tensor; what this returns is elsewhere where no kernel runs,
                or its size is another one.
        """
        if self.tile is None or seen_by_compiler() or not writers.on_gpu(x) or x.dtype != self.weight.dtype:
            return self.in_operators(x)
        if out is not None and out.shape == self.shape_of(x):
            return self.by_kernel(x, self.tile, out)
        return self.by_kernel(x, self.tile) if self.alone else self.in_operators(x)

    def shape_of(self, x: Tensor) -> Shape:
        """Of the output for x."""
        size = (n * w for n, w in zip(x.shape[2:], self.window, strict=True))
        return (x.shape[0], self.channels, *size)

    def by_kernel(self, x: Tensor, tile: tuple[int, int], out: Tensor | None = None) -> Tensor:
        """The output by the kernel in tiles of a size."""
        from joulemark.merged import spread

        memory = layout(len(self.window))
        if out is None:
            out = torch.empty(self.shape_of(x), dtype=x.dtype, device=x.device, memory_format=memory)
        rows = spread.arranged(self.weight) if self.rows is None else self.rows
        x = x.contiguous(memory_format=memory)
        with writers.its_device(x):
            return spread.spread(x, rows, self.bias, self.window, out, self.activation, tile)

    def in_operators(self, x: Tensor) -> Tensor:
        """The same in torch's operators."""
        y = _OPERATORS[len(self.window)](x, self.weight, self.bias, self.window)
        return ACTIVATIONS[self.activation](y)


@dataclass(frozen=True)
class Upsampled:
    """What became of one: as the model calls it, and what was measured."""

    name: str
    path: str | None
    settled: Settled


def replace_upsamplings(graph: fx.GraphModule, setting: Setting) -> list[Upsampled]:
    """Put an :class:`Upsampling` in the place of each transposed convolution that is one, and measure how it runs.

    Args:
        graph: with shapes.
        setting: for what; on a GPU, else nothing is replaced.
    """
    found: list[Upsampled] = []
    if setting.form not in _FORMATS or not has_triton():
        return found
    for node in list(graph.graph.nodes):
        if _is_upsampling(node):
            found.append(_replaced(graph, node, f"upsampling_{len(found)}", setting))
    if found:
        graph.graph.lint()
        graph.delete_all_unused_submodules()
        graph.recompile()
    return found


def _is_upsampling(node: fx.Node) -> bool:
    module: Any = module_of(node)
    dimensions = _MODULES.get(type(module))
    if dimensions is None or len(node.args) != 1 or node.kwargs or not called_once(node):
        return False
    meta = cast(fx.Node, node.args[0]).meta.get("tensor_meta")
    return (
        tuple(module.kernel_size) == tuple(module.stride)
        and not any((*module.padding, *module.output_padding))
        and tuple(module.dilation) == (1,) * dimensions
        and module.groups == 1
        and meta is not None
        and len(meta.shape) == 2 + dimensions  # else an image without a batch
        and meta.dtype == module.weight.dtype
    )


def _replaced(graph: fx.GraphModule, node: fx.Node, name: str, setting: Setting) -> Upsampled:
    """Put one in the place of a transposed convolution and its activation."""
    target, module = str(node.target), cast(Any, module_of(node))
    follower = only_user(node)
    activation = activation_of(follower)
    last = node if activation is None or follower is None else follower
    bias = None if module.bias is None else module.bias.detach()
    made = Upsampling(module.weight.detach(), bias, activation or "none")
    settled = _settled(made, cast(fx.Node, node.args[0]), setting)
    graph.add_submodule(name, made)
    with graph.graph.inserting_after(last):
        new = graph.graph.call_module(name, node.args)
    new.meta = dict(last.meta)
    last.replace_all_uses_with(new)
    for one in dict.fromkeys((last, node)):
        graph.graph.erase_node(one)
    return Upsampled(target, settled.best if made.alone else None, settled)


def _settled(made: Upsampling, source: fx.Node, setting: Setting) -> Settled:
    """How it runs: the kernel's fastest size, and whether that is faster than torch's operator."""
    from joulemark.merged.spread import arranged, tiles_for

    shape = tuple(source.meta["tensor_meta"].shape)
    sizes = tiles_for(shape[0] * prod(shape[2:]), made.channels * prod(made.window))
    paths = {f"spread {rows}x{columns}": (rows, columns) for rows, columns in sizes}
    x = cache(lambda: like(source, made.weight.device))  # what is known needs none
    made.rows = arranged(made.weight)
    ways: dict[str, Call] = {_TORCHS: lambda: made.in_operators(x())}
    ways |= {path: partial(lambda tile: made.by_kernel(x(), tile), tile) for path, tile in paths.items()}
    what = (tuple(made.weight.shape), made.activation, made.bias is not None, shape)
    settled = settle(("upsampling", *what), ways, setting)
    made.alone = settled.best in paths
    timed = {path: settled.times[path] for path in paths if path in settled.times}
    made.tile = paths.get(min(timed, key=timed.__getitem__, default=settled.best))
    made.rows = None if made.tile is None else made.rows
    return settled
