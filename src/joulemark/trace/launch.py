"""Who launched what: device work joined to calls and operators, launch latency, queue depth."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from joulemark.trace.events import (
    KERNEL,
    MODULE,
    OPERATOR,
    Calls,
    Codes,
    DeviceEvents,
    Ints,
    Mask,
    Ranges,
    Small,
    Trace,
)
from joulemark.trace.intervals import Intervals, innermost, union

OTHER_CALL, LAUNCH, GRAPH_LAUNCH, COPY_CALL, SYNCHRONIZE = 0, 1, 2, 3, 4
"""Kinds of calls into the runtime or driver."""

NO_OWNER, OUTSIDE_OPERATORS, GRAPH = -1, -2, -3
"""Owners of device work that is no operator's: launch unknown, launched outside any operator, replayed from a graph."""

OWNER_NAMES = {NO_OWNER: "unattributed", OUTSIDE_OPERATORS: "outside any operator", GRAPH: "graph launch"}

_CALL_KINDS = (
    (re.compile(r"GraphLaunch"), GRAPH_LAUNCH),
    (re.compile(r"Launch(Cooperative)?(Multi)?Kernel|KernelLaunch|LaunchGrid|LaunchByPtr"), LAUNCH),
    (re.compile(r"Mem(ory)?(cpy|Copy|set|Fill)", re.IGNORECASE), COPY_CALL),
    (re.compile(r"Synchronize"), SYNCHRONIZE),
)
_BEGIN_CAPTURE = re.compile(r"StreamBeginCapture")
_END_CAPTURE = re.compile(r"StreamEndCapture")
_COMMUNICATION = re.compile(r"nccl|rccl|oneccl|mscclpp|nvshmem", re.IGNORECASE)


def call_kind(name: str) -> int:
    """The kind of a call by its name, over CUDA, HIP and their drivers."""
    return next((kind for pattern, kind in _CALL_KINDS if pattern.search(name)), OTHER_CALL)


@dataclass(frozen=True)
class Matching:
    """Device events joined to the host.

    Args:
        call_kinds: per call its kind.
        captured: per call whether it was recorded into a graph under capture, and so issued no work.
        outermost: per launching call the row of the launching call around it (a runtime call may make a driver call),
            its own row without one; -1 for other calls.
        call: per device event the row of the call that issued it, -1 when none was found.
        owner: per device event the row of the operator that launched it, or NO_OWNER, OUTSIDE_OPERATORS, GRAPH.
        module: per device event the row of the module's forward range, -1 for none.
    """

    call_kinds: Small
    captured: Mask
    outermost: Codes
    call: Codes
    owner: Codes
    module: Codes

    @property
    def launches(self) -> Mask:
        """Per call whether it launched kernels: outermost kernel and graph launches that were not captured."""
        rows = np.arange(self.outermost.size)
        launching: Mask = self.outermost == rows
        return launching & ~self.captured


def _name_mask(trace: Trace, pattern: re.Pattern[str]) -> Mask:
    return np.array([pattern.search(name) is not None for name in trace.names], np.bool_)


def _kinds_of_calls(trace: Trace) -> Small:
    if not len(trace.calls):
        return np.empty(0, np.int8)
    used = np.unique(trace.calls.name)
    kinds = np.zeros(len(trace.names), np.int8)
    for code in used:
        kinds[code] = call_kind(trace.name(code))
    result: Small = kinds[trace.calls.name]
    return result


def communication_kernels(trace: Trace) -> Mask:
    """Per device event whether it is a kernel of a communication library."""
    if not len(trace.device):
        return np.empty(0, np.bool_)
    found: Mask = _name_mask(trace, _COMMUNICATION)[trace.device.name]
    found &= trace.device.kind == KERNEL
    return found


def _captured(trace: Trace) -> Mask:
    """Calls between a begin and an end of stream capture on their thread."""
    calls = trace.calls
    captured = np.zeros(len(calls), np.bool_)
    if not len(calls):
        return captured
    begins = _name_mask(trace, _BEGIN_CAPTURE)[calls.name]
    ends = _name_mask(trace, _END_CAPTURE)[calls.name]
    for lane in np.unique(calls.lane[begins]):
        here = calls.lane == lane
        closing = calls.start[ends & here]
        for start in calls.start[begins & here]:
            after = closing[closing > start]
            end = after[0] if after.size else np.iinfo(np.int64).max
            captured |= here & (calls.start > start) & (calls.start < end)
    return captured


def _outermost(calls: Calls, kinds: Small) -> Codes:
    """Per launching call the outermost one around it on its thread, see :class:`Matching`."""
    outermost = np.full(len(calls), -1, np.int32)
    launching = np.isin(kinds, (LAUNCH, GRAPH_LAUNCH))
    for lane in np.unique(calls.lane[launching]):
        rows = np.flatnonzero(launching & (calls.lane == lane))
        reach = np.maximum.accumulate(calls.end[rows])
        first = np.ones(rows.size, np.bool_)
        first[1:] = (calls.start[rows][1:] >= reach[:-1]) | (calls.end[rows][1:] > reach[:-1])
        outermost[rows] = rows[first][np.cumsum(first) - 1]
    return outermost


def _calls_by_correlation(calls: Calls, eligible: Mask, device: DeviceEvents) -> Codes:
    """Per device event the eligible call with its correlation id: of several the last that began before it."""
    rows = np.flatnonzero(eligible & (calls.correlation >= 0))
    result = np.full(len(device), -1, np.int32)
    if not rows.size or not len(device):
        return result
    rows = rows[np.lexsort((calls.start[rows], calls.correlation[rows]))]
    ids = calls.correlation[rows]
    first = np.searchsorted(ids, device.correlation, "left")
    count = np.searchsorted(ids, device.correlation, "right") - first
    found = (count > 0) & (device.correlation >= 0)
    result[found] = rows[first[found]]
    for event in np.flatnonzero(found & (count > 1)):
        same = rows[first[event] : first[event] + count[event]]
        before = same[calls.start[same] <= device.start[event]]
        result[event] = before[-1] if before.size else same[0]
    return result


def _operators_at(ranges: Ranges, chosen: Mask, lane: Codes, time: Ints) -> Codes:
    """Row of the innermost chosen range on a lane at a time, -1 for none."""
    result = np.full(time.size, -1, np.int32)
    for number in np.unique(lane):
        rows = np.flatnonzero(chosen & (ranges.lane == number))
        if rows.size:
            here = lane == number
            inner = innermost(ranges.start[rows], ranges.end[rows]).at(time[here])
            result[here] = np.where(inner >= 0, rows[np.maximum(inner, 0)], -1)
    return result


def _operators_by_external(ranges: Ranges, external: Ints) -> Codes:
    """Row of the operator with an external id, -1 for none."""
    rows = np.flatnonzero((ranges.kind == OPERATOR) & (ranges.external > 0))
    if not rows.size:
        return np.full(external.size, -1, np.int32)
    rows = rows[np.argsort(ranges.external[rows], kind="stable")]
    ids = ranges.external[rows]
    index = np.minimum(np.searchsorted(ids, external), ids.size - 1)
    return np.where((ids[index] == external) & (external > 0), rows[index], -1).astype(np.int32)


@dataclass(frozen=True)
class _FlowSource:
    """Where the arrow to a device event begins: per device event a lane and a time, lane -1 for none."""

    lane: Codes
    time: Ints


def _flow_sources(trace: Trace, wanted: npt.NDArray[np.intp]) -> _FlowSource:
    """For some device events the host end of the arrow that ends on them."""
    flows, device = trace.flows, trace.device
    lane, time = np.full(wanted.size, -1, np.int32), np.zeros(wanted.size, np.int64)
    places = {(int(device.lane[event]), int(device.start[event])): i for i, event in enumerate(wanted)}
    arriving = np.flatnonzero(flows.arrives & np.isin(flows.at, device.start[wanted]))
    reached: dict[int, list[int]] = {}
    for row in arriving:
        index = places.get((int(flows.lane[row]), int(flows.at[row])))
        if index is not None:
            reached.setdefault(int(flows.id[row]), []).append(index)
    for row in np.flatnonzero(~flows.arrives & np.isin(flows.id, list(reached))):
        for index in reached[int(flows.id[row])]:
            lane[index], time[index] = flows.lane[row], flows.at[row]
    return _FlowSource(lane, time)


def _calls_at(calls: Calls, source: _FlowSource) -> Codes:
    """Row of the call that begins at a lane and time, -1 for none."""
    near = np.flatnonzero(np.isin(calls.start, source.time[source.lane >= 0]))
    places = {(int(calls.lane[row]), int(calls.start[row])): int(row) for row in near}
    rows = [places.get((int(lane), int(at)), -1) for lane, at in zip(source.lane, source.time, strict=True)]
    return np.array(rows, np.int32)


def match(trace: Trace) -> Matching:
    """Joins device events to the calls and operators that issued them.

    By correlation id first (one graph launch owns many kernels); where a trace has none, by its flow arrows.
    The operator is the innermost one around the call on the call's thread; the external id is asked only where
    that finds none, for a graph launch may carry the id of an operator that ran long before.
    """
    calls, ranges, device = trace.calls, trace.ranges, trace.device
    kinds = _kinds_of_calls(trace)
    issuing = np.isin(kinds, (LAUNCH, GRAPH_LAUNCH, COPY_CALL))
    call = _calls_by_correlation(calls, issuing, device)
    missing = call < 0
    if missing.any():
        call[missing] = _calls_by_correlation(calls, ~issuing, device.take(missing))
    flow_operator = np.full(len(device), -1, np.int32)
    unmatched = np.flatnonzero(call < 0)
    if unmatched.size and trace.flows.id.size:
        source = _flow_sources(trace, unmatched)
        call[unmatched] = _calls_at(calls, source)
        flow_operator[unmatched] = _operators_at(ranges, ranges.kind == OPERATOR, source.lane, source.time)
    owner = _owners(trace, kinds, call, flow_operator)
    known = call >= 0
    module = np.full(len(device), -1, np.int32)
    if known.any():
        row = call[known]
        module[known] = _operators_at(ranges, ranges.kind == MODULE, calls.lane[row], calls.start[row])
    return Matching(kinds, _captured(trace), _outermost(calls, kinds), call, owner, module)


def _owners(trace: Trace, kinds: Small, call: Codes, flow_operator: Codes) -> Codes:
    """Per device event the operator that launched it, see :class:`Matching`."""
    calls, ranges, device = trace.calls, trace.ranges, trace.device
    owner = np.where(flow_operator >= 0, flow_operator, _operators_by_external(ranges, device.external))
    known = call >= 0
    if known.any():
        row = call[known]
        around = _operators_at(ranges, ranges.kind == OPERATOR, calls.lane[row], calls.start[row])
        by_id = _operators_by_external(ranges, calls.external[row])
        found = np.where(around >= 0, around, by_id)
        found = np.where(found >= 0, found, OUTSIDE_OPERATORS)
        owner[known] = np.where(kinds[row] == GRAPH_LAUNCH, GRAPH, found)
    return owner.astype(np.int32)


def launch_latencies(trace: Trace, matching: Matching) -> tuple[Ints, Ints]:
    """Start of a kernel minus start of its launch call, in ps.

    Returns:
        Latencies of kernels with a launch of their own and, apart, of the first kernel of each graph launch.
    """
    device = trace.device
    rows = np.flatnonzero((device.kind == KERNEL) & (matching.call >= 0))
    call = matching.call[rows]
    latency = device.start[rows] - trace.calls.start[call]
    kinds = matching.call_kinds[call]
    graph = kinds == GRAPH_LAUNCH
    _, first = np.unique(call[graph], return_index=True)
    return latency[kinds == LAUNCH], latency[graph][first]


@dataclass(frozen=True)
class QueueDepth:
    """Launches issued minus kernels begun, over the time of a device.

    Args:
        mean: weighted by time over the span.
        maximum: of kernels waiting at once.
        empty_fraction: share of the span in which nothing waited.
        edges, depth: the step function itself: ``depth[i]`` kernels wait from ``edges[i]`` to ``edges[i + 1]`` (ps).
    """

    mean: float
    maximum: int
    empty_fraction: float
    edges: Ints
    depth: Ints


def queue_depth(trace: Trace, matching: Matching, chosen: Mask, span: tuple[int, int]) -> QueueDepth | None:
    """Queue depth of the chosen device events over a span (ps); None when no kernel among them has a known launch.

    A graph launch queues all its kernels at once. A kernel that seems to begin before its launch never waited.
    """
    rows = np.flatnonzero(chosen & (trace.device.kind == KERNEL) & (matching.call >= 0))
    if not rows.size or span[1] <= span[0]:
        return None
    issued, begun = trace.calls.start[matching.call[rows]], trace.device.start[rows]
    waits = begun > issued
    issued, begun = np.clip(issued[waits], *span), np.clip(begun[waits], *span)
    time = np.concatenate([[span[0]], issued, begun])
    change = np.concatenate([[0], np.ones(issued.size, np.int64), -np.ones(begun.size, np.int64)])
    edges, where = np.unique(time, return_inverse=True)
    depth = np.cumsum(np.bincount(where, change, edges.size).astype(np.int64))
    length = np.diff(np.append(edges, span[1]))
    total = span[1] - span[0]
    return QueueDepth(
        mean=float((begun - issued).sum() / total),
        maximum=int(depth.max()),
        empty_fraction=float(length[depth == 0].sum() / total),
        edges=edges,
        depth=depth,
    )


_BLOCKED_RATIO = 10
"""A call that takes this many times the median of its name, while a device works throughout, waits for the device."""


def blocked(trace: Trace, matching: Matching, busy: list[Intervals]) -> Intervals:
    """When the host waited for a device: in synchronizing calls, and in launches and copies that a full queue held up.

    A launch returns at once until about a thousand launches wait; from then on it lasts until the device has
    finished a kernel. A copy from pageable memory waits for the work before it. Both look like issue time and are not.

    Args:
        busy: kernel time of each device; copies are left out, for a copy call would wait for its own copy.
    """
    calls, kinds = trace.calls, matching.call_kinds
    length = calls.end - calls.start
    waits = kinds == SYNCHRONIZE
    for code in np.unique(calls.name[np.isin(kinds, (LAUNCH, GRAPH_LAUNCH, COPY_CALL))]):
        same = np.flatnonzero(calls.name == code)
        long = same[length[same] > _BLOCKED_RATIO * np.median(length[same])]
        for device in busy:
            covered = device.within(calls.start[long], calls.end[long])
            waits[long] |= covered >= 0.95 * length[long]
    return union(calls.start[waits], calls.end[waits])
