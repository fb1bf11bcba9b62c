"""Concatenations over channels without a pass of their own: who makes a part writes it into the joined tensor.

With channels innermost a part is some channels of each position, so a kernel that is told how far positions lie apart
writes it in place (:mod:`joulemark.merged.writers`), and a pooling, which reads its input anyway, copies that to its
place. In the graph one node makes the room, empty, each writer takes its part of that and gives it back, and the node
in the place of the concatenation, which reads the room and all parts, copies those that lie elsewhere. So whoever reads
the joined tensor comes behind all who write it, and a part that came out otherwise, of another size say, is simply
copied. What a compiler is to see stays torch's operator.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import TensorMetadata

from joulemark.merged import writers
from joulemark.merged.alternatives import Settled, like, settle
from joulemark.merged.branches import SECONDS
from joulemark.merged.compiling import seen_by_compiler
from joulemark.merged.fitting import fitted, readers
from joulemark.merged.graph import module_of
from joulemark.merged.pooling import Keeping, Pooling
from joulemark.merged.seams import FORMATS
from joulemark.merged.setting import Setting
from joulemark.merged.trying import has_triton
from joulemark.merged.writers import Writer, writer_of

_CATS = (torch.cat, torch.concat)
_TORCHS, _COPIED, _WRITTEN, _KEPT = "torch.cat", "copying", "writing in place", "copying while pooling"
_WORTH = 0.99
"""Share of the time with torch.cat that it may take: it holds the joined tensor's memory for longer."""


class Room(nn.Module):
    """An empty tensor for the parts of a concatenation.

    Args:
        writer: of one part; None where there is a part itself to tell the shape.
        channels: of all parts.
    """

    def __init__(self, writer: Writer | None, channels: int) -> None:
        super().__init__()
        self.writer, self.channels = writer, channels

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, *size] of the writer's output for x, else of x, uninitialized."""
        batch, _, *size = x.shape if self.writer is None else self.writer.shape_of(x)
        made: Tensor = torch.empty(
            (batch, self.channels, *size), dtype=x.dtype, device=x.device, memory_format=FORMATS[x.dim()]
        )
        return made


class Joined(nn.Module):
    """Parts side by side in the channels.

    Args:
        channels: of each part.
    """

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, room: Tensor, *parts: Tensor) -> Tensor:
        """The concatenation: the room, with what does not lie there yet copied into it.

        Args:
            room: what a :class:`Room` made, some parts of it written.
            parts: [batch, channels, *size] each.
        """
        if seen_by_compiler() or not writers.on_gpu(room):
            return torch.cat(parts, 1)
        pairs = list(zip(parts, room.split(self.channels, 1), strict=True))
        if any((part.shape, part.dtype) != (place.shape, place.dtype) for part, place in pairs):
            return torch.cat(parts, 1)
        absent = [(part, place) for part, place in pairs if not _lies(part, place)]
        with writers.its_device(room):
            _copy(absent)
        return room


def _lies(part: Tensor, place: Tensor) -> bool:
    """Whether a part is what lies at its place."""
    here, there = ((one.data_ptr(), one.shape, one.stride()) for one in (part, place))
    return here == there


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy parts to their places, several in one launch."""
    if not pairs:
        return
    from joulemark.merged import copies

    arranged = [(part.contiguous(memory_format=FORMATS[part.dim()]), place) for part, place in pairs]
    for first in range(0, len(arranged), copies.MOST):
        copies.copied(arranged[first : first + copies.MOST])


def flatten_concatenations(graph: fx.GraphModule) -> int:
    """Concatenations of what nothing else reads than another one, as a part of that; how many there were."""
    count = 0
    for node in list(graph.graph.nodes):
        parts = _parts(node)
        inner = [one for one in parts if _parts(one) and set(one.users) == {node} and parts.count(one) == 1]
        if not inner:
            continue
        flat = [part for one in parts for part in (_parts(one) if one in inner else [one])]
        node.args, node.kwargs = (flat, 1), {}
        for one in inner:
            graph.graph.erase_node(one)
        count += len(inner)
    if count:
        graph.recompile()
    return count


def _parts(node: fx.Node) -> list[fx.Node]:
    """What a node joins over channels, all of one format; nothing where it does not."""
    if node.op != "call_function" or node.target not in _CATS or not node.args:
        return []
    dimension = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    given = node.args[0]
    if not isinstance(given, (list, tuple)) or set(node.kwargs) - {"dim"} or len(node.args) > 2:
        return []
    whole = isinstance(dimension, int) and all(isinstance(one, fx.Node) for one in given)
    meta = node.meta.get("tensor_meta")
    if not whole or not isinstance(meta, TensorMetadata) or len(meta.shape) not in FORMATS:
        return []
    parts = list(cast("list[fx.Node]", given))
    formats = {_format_of(one) for one in parts}
    return parts if formats == {_format_of(node)} and cast(int, dimension) % len(meta.shape) == 1 else []


def _format_of(node: fx.Node) -> tuple[torch.dtype, int] | None:
    meta = node.meta.get("tensor_meta")
    return (meta.dtype, len(meta.shape)) if isinstance(meta, TensorMetadata) else None


@dataclass(frozen=True)
class Concatenation:
    """What became of one.

    Args:
        name: of its node.
        how: in one clause.
        settled: what was measured.
    """

    name: str
    how: str
    settled: Settled


@dataclass(frozen=True)
class _Part:
    """What is joined.

    Args:
        node: whose value it is.
        writer: the node that may write it in place; None without.
        pooling: a node that may copy it to its place; None without.
    """

    node: fx.Node
    writer: fx.Node | None
    pooling: fx.Node | None

    @property
    def channels(self) -> int:
        """Its own."""
        return int(self.node.meta["tensor_meta"].shape[1])

    @property
    def made_of(self) -> fx.Node:
        """What its writer reads; itself without one."""
        return self.node if self.writer is None else cast(fx.Node, self.writer.args[0])

    @property
    def key(self) -> tuple[object, ...]:
        """What the time that it takes depends on."""
        shape = tuple(self.made_of.meta["tensor_meta"].shape)
        return (shape, self.channels, *(_key(one) for one in (self.writer, self.pooling)))


def _key(node: fx.Node | None) -> list[tuple[str, object]] | None:
    """The settings of a node's module."""
    held = {} if node is None else vars(module_of(node))
    plain = (bool, int, str, tuple)
    return sorted((name, value) for name, value in held.items() if isinstance(value, plain)) or None


def join(graph: fx.GraphModule, setting: Setting) -> list[Concatenation]:
    """Join parts without torch's operator where that is measured to be faster.

    Args:
        graph: with shapes, whose segments have their paths.
        setting: for what.
    """
    found: list[Concatenation] = []
    if not has_triton():
        return found
    for node in list(graph.graph.nodes):
        parts = _joinable(node)
        if not parts:
            continue
        meta = node.meta["tensor_meta"]
        what = ("join", tuple(meta.shape), meta.dtype, *(one.key for one in parts))
        settled = settle(what, _Ways(parts, setting.device).by_name(), setting, _WORTH)
        if settled.best != _TORCHS:
            _replace(graph, node, parts, settled.best == _KEPT, len(found))
        found.append(Concatenation(node.name, _told(parts, settled.best), settled))
    if found:
        graph.graph.lint()
        graph.delete_all_unused_submodules()
        graph.recompile()
    return found


def _told(parts: list[_Part], way: str) -> str:
    if way == _TORCHS:
        return "by torch's operator"
    written = sum(one.writer is not None or (way == _KEPT and one.pooling is not None) for one in parts)
    return f"{written} of {len(parts)} parts written in place" if written else "by kernels of ours that copy"


def _joinable(node: fx.Node) -> list[_Part]:
    """The parts of a concatenation over channels; nothing where torch's operator has to do it."""
    nodes = _parts(node)
    if len(nodes) < 2 or len(set(nodes)) < len(nodes):
        return []
    able = [_writer_behind(one, node) for one in nodes]
    late = set(itertools.dropwhile(lambda one: one is not node, node.graph.nodes))
    others = [*nodes, *able]
    return [_Part(one, by, _pooling_of(one, others, late)) for one, by in zip(nodes, able, strict=True)]


def _writer_behind(part: fx.Node, reader: fx.Node) -> fx.Node | None:
    """The node whose output a part is, fitted or cropped perhaps where sizes are odd, read by nothing else."""
    if set(readers(part)) != {reader}:
        return None
    if writer_of(part) is not None:
        return part
    source = part.args[0] if part.args else None
    same = isinstance(source, fx.Node) and part.target in (fitted, operator.getitem) and _of_one_shape(source, part)
    return _writer_behind(cast(fx.Node, source), part) if same else None


def _of_one_shape(one: fx.Node, other: fx.Node) -> bool:
    metas = [node.meta.get("tensor_meta") for node in (one, other)]
    shapes = [tuple(meta.shape) for meta in metas if isinstance(meta, TensorMetadata)]
    return len(shapes) == 2 and shapes[0] == shapes[1]


def _pooling_of(part: fx.Node, others: List[fx.Node | None], late: set[fx.Node]) -> fx.Node | None:
    """A pooling that reads a part and may leave a copy of it in time; none that is asked for something else."""
    for user in part.users:
        module = module_of(user)
        free = user not in others and user not in late and not user.kwargs
        if isinstance(module, Pooling) and module.keeps and free:
            return user
    return None


class _Ways:
    """A concatenation with its writers and poolings, of random inputs.

    Args:
        parts: that are joined.
        device: of the inputs.
    """

    def __init__(self, parts: list[_Part], device: torch.device) -> None:
        self.parts, self.device = parts, device
        self.joined = Joined(tuple(one.channels for one in parts))
        self.inputs: dict[fx.Node, Tensor] = {}

    def by_name(self) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
        """Calls that give the joined tensor and what is pooled."""
        name = _COPIED if all(one.writer is None for one in self.parts) else _WRITTEN
        kept = any(one.pooling is not None and one.writer is None for one in self.parts)
        ours = {_KEPT: partial(self._written, True)} if kept else {}
        return {_TORCHS: self._apart, **ours, name: partial(self._written, False)}

    def _given(self, part: _Part) -> Tensor:
        """What a part is, or is made of; not before it is wanted, what was measured before needs none."""
        if part.made_of not in self.inputs:
            self.inputs[part.made_of] = like(part.made_of, self.device)
        return self.inputs[part.made_of]

    def _apart(self) -> tuple[Tensor, ...]:
        made = [self._made(one) for one in self.parts]
        return (torch.cat(made, 1), *self._pooled(self.parts))

    def _written(self, keeping: bool) -> tuple[Tensor, ...]:
        batch, _, *size = self.parts[0].node.meta["tensor_meta"].shape
        x = self._given(self.parts[0])
        room = torch.empty((batch, sum(self.joined.channels), *size), dtype=x.dtype, device=x.device,
                           memory_format=FORMATS[x.dim()])  # fmt: skip
        made, pooled, left = [], [], []
        for part, place in zip(self.parts, room.split(self.joined.channels, 1), strict=True):
            if keeping and part.pooling is not None and part.writer is None:
                smaller, copy = Keeping(cast(Pooling, module_of(part.pooling)))(self._given(part), place)
                made.append(copy)
                pooled.append(smaller)
            else:
                made.append(self._made(part, place))
                left.append(part)
        return (self.joined(room, *made), *pooled, *self._pooled(left))

    def _made(self, part: _Part, place: Tensor | None = None) -> Tensor:
        writer = None if part.writer is None else writer_of(part.writer)
        return self._given(part) if writer is None else writer(self._given(part), out=place)

    def _pooled(self, parts: list[_Part]) -> list[Tensor]:
        """What poolings give of parts that they might copy."""
        able = [one for one in parts if one.pooling is not None and one.writer is None]
        return [cast(Pooling, module_of(cast(fx.Node, one.pooling)))(self._given(one)) for one in able]


def _replace(graph: fx.GraphModule, node: fx.Node, parts: list[_Part], keeping: bool, number: int) -> None:
    """Put the nodes of the module's description in the place of a concatenation."""
    channels = tuple(one.channels for one in parts)
    room = _room(graph, node, parts, keeping, number)
    made = []
    for at, part in enumerate(parts):
        copied, value = keeping and part.pooling is not None and part.writer is None, part.node
        if part.writer is not None or copied:
            first = cast(fx.Node, part.pooling if copied else part.writer)
            with graph.graph.inserting_before(first):
                place = graph.graph.call_function(torch.narrow, (room, 1, sum(channels[:at]), channels[at]))
            if copied:
                value = _keep(graph, first, part.node, place, f"keeping_{number}_{at}")
            else:
                first.kwargs = {"out": place}
        made.append(value)
    graph.add_submodule(f"joined_{number}", Joined(channels))
    with graph.graph.inserting_before(node):
        new = graph.graph.call_module(f"joined_{number}", (room, *made))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.graph.erase_node(node)


def _room(graph: fx.GraphModule, node: fx.Node, parts: list[_Part], keeping: bool, number: int) -> fx.Node:
    """The node that makes the room, before the first that needs it."""
    needs: dict[fx.Node, _Part] = {one.writer: one for one in parts if one.writer is not None}
    if keeping:
        needs |= {one.pooling: one for one in parts if one.pooling is not None and one.writer is None}
    needs |= {node: parts[0]} if not needs else {}
    first = next(one for one in graph.graph.nodes if one in needs)
    part = needs[first]
    writer = writer_of(first) if first is part.writer else None
    graph.add_submodule(f"room_{number}", Room(writer, sum(one.channels for one in parts)))
    with graph.graph.inserting_before(first):
        room: fx.Node = graph.graph.call_module(f"room_{number}", (part.made_of,))
    room.meta[SECONDS] = 0.0  # it launches nothing
    return room


def _keep(graph: fx.GraphModule, pooling: fx.Node, source: fx.Node, place: fx.Node, name: str) -> fx.Node:
    """Let a pooling copy its input; the node of that copy."""
    graph.add_submodule(name, Keeping(cast(Pooling, module_of(pooling))))
    with graph.graph.inserting_before(pooling):
        both = graph.graph.call_module(name, (source, place))
        pooled, copy = (graph.graph.call_function(operator.getitem, (both, one)) for one in range(2))
    both.meta, pooled.meta, copy.meta = dict(pooling.meta), dict(pooling.meta), dict(source.meta)
    pooling.replace_all_uses_with(pooled)
    graph.graph.erase_node(pooling)
    return cast(fx.Node, copy)
