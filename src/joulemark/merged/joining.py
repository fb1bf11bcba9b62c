"""Concatenations over channels without a pass of their own: who makes a part writes it into the joined tensor.

With channels innermost a part is some channels of each position, so a kernel that is told how far positions lie apart
writes it in place (:mod:`joulemark.merged.writers`). In the graph one node makes the room, empty, each writer takes its
part of that and gives it back, and the node in the place of the concatenation, which reads the room and all parts,
copies those that lie elsewhere. So whoever reads the joined tensor comes behind all who write it, and a part that came
out otherwise, on a CPU or of another size say, is simply copied. What a compiler is to see stays torch's operator.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import importlib.util
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import TensorMetadata

from joulemark.merged.alternatives import Settled, like, settle
from joulemark.merged.branches import SECONDS
from joulemark.merged.fitting import fitted, readers
from joulemark.merged.seams import FORMATS
from joulemark.merged.setting import Setting
from joulemark.merged.writers import Writer, writer_of

_CATS = (torch.cat, torch.concat)
_TORCHS, _WRITTEN = "torch.cat", "writing in place"
_WORTH = 0.99
"""Share of the time with torch.cat that it may take: it holds the joined tensor's memory for longer."""


class Room(nn.Module):
    """An empty tensor for the parts of a concatenation.

    Args:
        writer: of one part.
        channels: of all parts.
    """

    def __init__(self, writer: Writer, channels: int) -> None:
        super().__init__()
        self.writer, self.channels = writer, channels

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, *size] of the writer's output for x, uninitialized."""
        batch, _, *size = self.writer.shape_of(x)
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
        if torch.compiler.is_compiling():
            return torch.cat(parts, 1)
        places = room.split(self.channels, 1)
        absent = [(part, place) for part, place in zip(parts, places, strict=True) if not _lies(part, place)]
        fits = all((part.shape, part.dtype) == (place.shape, place.dtype) for part, place in absent)
        if len(absent) == len(parts) or not fits:
            return torch.cat(parts, 1)
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
    """What a node joins over channels; nothing where it does not."""
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
    return list(cast("list[fx.Node]", given)) if cast(int, dimension) % len(meta.shape) == 1 else []


@dataclass(frozen=True)
class Concatenation:
    """What became of one.

    Args:
        name: of its node.
        written: parts that are written in place; 0 where it stays torch's.
        parts: in all.
        settled: what was measured.
    """

    name: str
    written: int
    parts: int
    settled: Settled


@dataclass(frozen=True)
class _Plan:
    """A concatenation, its parts, and of each the node that may write it in place."""

    node: fx.Node
    parts: tuple[fx.Node, ...]
    writers: tuple[fx.Node | None, ...]

    @property
    def first(self) -> fx.Node:
        """The writer that comes first."""
        mine = {one for one in self.writers if one is not None}
        return next(node for node in self.node.graph.nodes if node in mine)

    @property
    def channels(self) -> tuple[int, ...]:
        """Of each part."""
        return tuple(int(one.meta["tensor_meta"].shape[1]) for one in self.parts)


def join(graph: fx.GraphModule, setting: Setting) -> list[Concatenation]:
    """Have parts written in place where that is measured to be faster.

    Args:
        graph: with shapes, whose segments have their paths.
        setting: for what.
    """
    found: list[Concatenation] = []
    if importlib.util.find_spec("triton") is None:
        return found
    for node in list(graph.graph.nodes):
        plan = _plan(node)
        if plan is None:
            continue
        settled = settle(_what(plan), _ways(plan, setting.device), setting, _WORTH)
        written = sum(one is not None for one in plan.writers) if settled.best == _WRITTEN else 0
        if written:
            _write_in_place(graph, plan, len(found))
        found.append(Concatenation(node.name, written, len(plan.parts), settled))
    if found:
        graph.graph.lint()
        graph.recompile()
    return found


def _plan(node: fx.Node) -> _Plan | None:
    """A concatenation that may be written in place; None for what is none."""
    parts = _parts(node)
    metas = [one.meta.get("tensor_meta") for one in parts]
    formats = {one.dtype if isinstance(one, TensorMetadata) else None for one in metas}
    if len(parts) < 2 or len(set(parts)) < len(parts) or formats != {node.meta["tensor_meta"].dtype}:
        return None
    writers = tuple(_writer_behind(one, node) for one in parts)
    return _Plan(node, tuple(parts), writers) if any(one is not None for one in writers) else None


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


def _what(plan: _Plan) -> tuple[object, ...]:
    """What the times depend on."""
    plain = (bool, int, str, tuple)
    modules: list[object] = []
    for one in plan.writers:
        own = {} if one is None else vars(cast(Any, writer_of(one)))
        source = None if one is None else tuple(cast(fx.Node, one.args[0]).meta["tensor_meta"].shape)
        modules.append((source, sorted((name, value) for name, value in own.items() if isinstance(value, plain))))
    meta = plan.node.meta["tensor_meta"]
    return ("join", tuple(meta.shape), meta.dtype, plan.channels, modules)


def _ways(plan: _Plan, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Both ways with their writers, of random inputs."""
    sources: dict[fx.Node, Tensor] = {}

    def given(node: fx.Node) -> Tensor:
        if node not in sources:
            sources[node] = like(node, device)
        return sources[node]

    def inputs() -> list[tuple[Writer | None, Tensor]]:
        pairs = zip(plan.parts, plan.writers, strict=True)
        return [
            (None, given(part)) if one is None else (writer_of(one), given(cast(fx.Node, one.args[0])))
            for part, one in pairs
        ]

    first = cast(Writer, writer_of(plan.first))
    room, joined = Room(first, sum(plan.channels)), Joined(plan.channels)

    def apart() -> Tensor:
        return torch.cat([x if writer is None else writer(x) for writer, x in inputs()], 1)

    def written() -> Tensor:
        made = room(given(cast(fx.Node, plan.first.args[0])))
        places = made.split(plan.channels, 1)
        pairs = zip(inputs(), places, strict=True)
        return cast(Tensor, joined(made, *(x if writer is None else writer(x, out) for (writer, x), out in pairs)))

    return {_TORCHS: apart, _WRITTEN: written}


def _write_in_place(graph: fx.GraphModule, plan: _Plan, number: int) -> None:
    """Put the nodes of the module's description in the place of a concatenation."""
    first, channels = plan.first, plan.channels
    graph.add_submodule(f"room_{number}", Room(cast(Writer, writer_of(first)), sum(channels)))
    graph.add_submodule(f"joined_{number}", Joined(channels))
    with graph.graph.inserting_before(first):
        room = graph.graph.call_module(f"room_{number}", (first.args[0],))
    room.meta[SECONDS] = 0.0  # it launches nothing
    for at, writer in enumerate(plan.writers):
        if writer is None:
            continue
        with graph.graph.inserting_before(writer):
            place = graph.graph.call_function(torch.narrow, (room, 1, sum(channels[:at]), channels[at]))
        writer.kwargs = {"out": place}
    with graph.graph.inserting_before(plan.node):
        made = graph.graph.call_module(f"joined_{number}", (room, *plan.parts))
    made.meta = dict(plan.node.meta)
    plan.node.replace_all_uses_with(made)
    graph.graph.erase_node(plan.node)
