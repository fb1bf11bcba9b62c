"""Which nodes of a graph run beside each other: its branches on several streams, each wait of one for another an event.

The kernels of one branch often leave multiprocessors idle that another's could use. Source of the idea: Ding, Zhu, Jia,
Pekhimenko, Han, *IOS: Inter-Operator Scheduler for CNN Acceleration* (MLSys 2021), which searches for the best stages
by measuring them. Here a list schedule, the longest way to the end first, is measured as a whole; its rule is that of
Topcuoglu, Hariri, Wu, *Performance-Effective and Low-Complexity Task Scheduling for Heterogeneous Computing* (IEEE
TPDS 2002): every node in turn goes to the stream on which it may begin first.

What runs it: :mod:`joulemark.merged.forks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import TensorMetadata
from torch.utils import _pytree as pytree

from joulemark.merged.cost import Rates
from joulemark.merged.graph import module_of
from joulemark.merged.in_place import changed_by
from joulemark.merged.kernels.description import Format

SECONDS = "seconds"
"""In a node's ``meta``: what it is known to take, None where it is not."""
START = -1
"""Of :attr:`Step.waits`: what the first stream held when the call began."""
STREAMS = 4
"""At most: the widest block of Inception-v4 has six branches, two of them pairs that begin late."""
WORTH = 0.02
"""Share of the time one by one that a schedule is predicted to save where it is worth a capture: a guess."""
_HAND_OVER = 0.25
"""What an event costs where nothing is known, in nodes: a guess."""
_VIEWS = frozenset(
    (
        *("getattr", "getitem", "size", "dim", "stride", "numel", "detach", "view", "view_as", "flatten", "unflatten"),
        *("squeeze", "unsqueeze", "permute", "transpose", "t", "movedim", "expand", "expand_as"),
        *("narrow", "chunk", "split", "unbind", "select", "fitted"),
    )
)
"""Functions and methods that launch nothing. Where one does all the same only the balance is a little off."""
_VIEWING = (nn.Flatten, nn.Unflatten, nn.Identity)


@dataclass(frozen=True)
class Step:
    """A node on its stream, in the order in which the host gives them out.

    Args:
        node: its number among the graph's nodes.
        stream: 0 for the one that is captured.
        waits: numbers of steps on other streams that its stream waits for first, those that are implied left out.
        recorded: whether another stream waits for it.
        clock: per stream, how many of its steps have ended before this one ends, itself counted.
        last_read: numbers of nodes whose values nothing reads after it.
    """

    node: int
    stream: int
    waits: tuple[int, ...]
    recorded: bool
    clock: tuple[int, ...]
    last_read: tuple[int, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """Nodes of a graph on streams: all but what it is given, what it keeps and what it returns.

    Args:
        steps: in order.
        streams: that they use.
        regions: how often the first stream forks and all others join it again.
        gain: share of the time one by one that it saves if kernels beside each other take no longer than alone.
    """

    steps: tuple[Step, ...]
    streams: int
    regions: int
    gain: float

    def __str__(self) -> str:
        plural = "" if self.regions == 1 else "s"
        return f"{self.regions} parallel region{plural} on {self.streams} streams"


def schedule(graph: fx.GraphModule, rates: Rates | None, form: Format | None, most: int = STREAMS) -> Schedule:
    """A schedule of a traced graph whose nodes know their shapes.

    Args:
        graph: in which :func:`joulemark.merged.in_place.keep_apart` has been at work.
        rates: of the device, for the time of what was not measured; None for as long a time for each node.
        form: of its convolutions.
        most: streams.
    """
    before = dependencies(graph)
    rates = rates if form is not None and rates is not None and form in rates.flop_per_s else None
    seconds = {node: _seconds(node, rates, form) for node in before}
    placed = _placed(before, seconds, most, _HAND_OVER if rates is None else rates.launch_s)
    order = sorted(before, key=lambda node: (placed.begin[node], seconds[node] > 0, placed.number[node]))
    numbers = {node: number for number, node in enumerate(graph.graph.nodes)}
    steps = _with_last_reads(_clocked(order, before, placed.stream, numbers), graph)
    total = sum(seconds.values())
    gain = 1.0 - placed.span / total if total else 0.0
    used = 1 + max((one.stream for one in steps), default=0)
    return Schedule(tuple(steps), used, _regions(steps), gain)


def dependencies(graph: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """Per node that is called, in order, the called nodes that it comes behind.

    These are the nodes that it reads, and one that has changed in place what it reads. That what is changed is read by
    nothing before, nor through a view, :func:`joulemark.merged.in_place.keep_apart` has seen to.
    """
    called = [node for node in graph.graph.nodes if node.op.startswith("call")]
    changes: dict[fx.Node, list[fx.Node]] = {}
    before: dict[fx.Node, list[fx.Node]] = {}
    for node in called:
        read = [one for one in node.all_input_nodes if one.op.startswith("call")]
        hidden = [change for one in node.all_input_nodes for change in changes.get(one, ())]
        before[node] = list(dict.fromkeys([*read, *hidden]))
        changed = changed_by(node, module_of)
        if changed is not None:
            changes.setdefault(changed, []).append(node)
    return before


def _seconds(node: fx.Node, rates: Rates | None, form: Format | None) -> float:
    """What a node takes alone, or 1 for each without rates; 0 for one that launches nothing."""
    if _is_view(node):
        return 0.0
    if rates is None or form is None:
        return 1.0
    known: float | None = node.meta.get(SECONDS)
    if known is not None:
        return known
    moved = sum(_bytes(one) for one in (node, *node.all_input_nodes))
    if not moved:  # numbers, of shapes say
        return 0.0
    return rates.launch_s + max(moved / rates.dram_bytes_per_s, _flops(node) / rates.flop_per_s[form])


def _is_view(node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(module_of(node), _VIEWING)
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name in _VIEWS


def _bytes(node: fx.Node) -> int:
    metas = pytree.tree_leaves(node.meta.get("tensor_meta"), is_leaf=lambda one: isinstance(one, TensorMetadata))
    return sum(prod(one.shape) * one.dtype.itemsize for one in metas if isinstance(one, TensorMetadata))


def _flops(node: fx.Node) -> float:
    """Of a layer with weights: of each output twice what makes it, but where these are packed, whose time is known."""
    weight, meta = getattr(module_of(node), "weight", None), node.meta.get("tensor_meta")
    if not isinstance(weight, torch.Tensor) or weight.dim() < 2 or not isinstance(meta, TensorMetadata):
        return 0.0
    return float(2 * weight[0].numel() * prod(meta.shape))


@dataclass(frozen=True)
class _Placed:
    stream: Mapping[fx.Node, int]
    begin: Mapping[fx.Node, float]
    number: Mapping[fx.Node, int]
    span: float


def _placed(
    before: Mapping[fx.Node, list[fx.Node]], seconds: Mapping[fx.Node, float], most: int, hand_over: float
) -> _Placed:
    """A stream and a time for each node.

    Where branches join, streams on which that may begin two hand-overs later count as equal: of them it is one that is
    read from, the lowest. So branches join again on the stream that they have left.
    """
    number = {node: place for place, node in enumerate(before)}
    ahead = _ahead(before, seconds)
    stream: dict[fx.Node, int] = {}
    begin: dict[fx.Node, float] = {}
    free = [0.0] * most
    for node in sorted(before, key=lambda one: (-ahead[one], number[one])):
        sources = {stream[one] for one in before[node]} or {0}
        ends = [(begin[one] + seconds[one], stream[one]) for one in before[node]] or [(0.0, 0)]
        ready = [max(end + (hand_over if other != s else 0.0) for end, other in ends) for s in range(most)]
        if not seconds[node]:
            stream[node] = max(ends)[1]
            begin[node] = max(ends)[0]
            continue
        starts = [max(*pair) for pair in zip(ready, free, strict=True)]
        least = min(starts) + (2 * hand_over if len(sources) > 1 else 0.0)
        chosen = min(range(most), key=lambda s: (starts[s] > least, s not in sources, s))
        stream[node], begin[node] = chosen, starts[chosen]
        free[chosen] = starts[chosen] + seconds[node]
    return _Placed(stream, begin, number, max(free))


def _ahead(before: Mapping[fx.Node, list[fx.Node]], seconds: Mapping[fx.Node, float]) -> dict[fx.Node, float]:
    """Per node the seconds of the longest way from its beginning to the end."""
    ahead = dict(seconds)
    for node in reversed(before):
        for one in before[node]:
            ahead[one] = max(ahead[one], seconds[one] + ahead[node])
    return ahead


def _clocked(
    order: list[fx.Node],
    before: Mapping[fx.Node, list[fx.Node]],
    stream: Mapping[fx.Node, int],
    numbers: Mapping[fx.Node, int],
) -> list[Step]:
    """Steps with the waits that are needed and no more, by vector clocks (Mattern 1989, Fidge 1988)."""
    streams = 1 + max(stream.values(), default=0)
    clocks = [(0,) * streams] * streams
    place: dict[fx.Node, int] = {}
    steps: list[Step] = []
    for node in order:
        mine = stream[node]
        open_ = [place[one] for one in before[node] if not _covers(clocks[mine], steps[place[one]])]
        implied = {one for one in open_ for other in open_ if one != other and _covers(steps[other].clock, steps[one])}
        needed = [one for one in open_ if one not in implied]
        # What a stream is first given follows what the call found: its memory may be read by what came before.
        waits = tuple(sorted(needed)) if needed or not mine or any(clocks[mine]) else (START,)
        clock = [max(counts) for counts in zip(clocks[mine], *(steps[one].clock for one in needed), strict=True)]
        clock[mine] += 1
        clocks[mine] = tuple(clock)
        for one in needed:
            steps[one] = replace(steps[one], recorded=True)
        place[node] = len(steps)
        steps.append(Step(numbers[node], mine, waits, False, clocks[mine]))
    return steps


def _covers(clock: tuple[int, ...], step: Step) -> bool:
    """Whether a step has ended by then."""
    return clock[step.stream] >= step.clock[step.stream]


def _with_last_reads(steps: list[Step], graph: fx.GraphModule) -> list[Step]:
    nodes = list(graph.graph.nodes)
    numbers = {node: number for number, node in enumerate(nodes)}
    returned = {numbers[one] for node in nodes if node.op == "output" for one in node.all_input_nodes}
    seen = set(returned)
    found: list[Step] = []
    for step in reversed(steps):
        read = dict.fromkeys([*(numbers[one] for one in nodes[step.node].all_input_nodes), step.node])
        found.append(replace(step, last_read=tuple(one for one in read if one not in seen)))
        seen.update(read)
    return found[::-1]


def _regions(steps: list[Step]) -> int:
    """Forks after which the first stream has waited for all that the others were given."""
    count, open_, given = 0, False, [0] * (len(steps[0].clock) if steps else 0)
    for step in steps:
        given[step.stream] = step.clock[step.stream]
        if step.stream and not open_:
            count, open_ = count + 1, True
        elif not step.stream:
            open_ = open_ and any(mine < theirs for mine, theirs in zip(step.clock, given, strict=True))
    return count
