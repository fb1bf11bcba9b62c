"""Busy and idle time of each device, and what every idle stretch waited for."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from joulemark.trace.events import ANNOTATION, KERNEL, OPERATOR, OVERHEAD, Codes, Ints, Trace
from joulemark.trace.intervals import Intervals, Steps, distinct, innermost, overlay, split, union
from joulemark.trace.iterations import Iterations
from joulemark.trace.launch import (
    COPY_CALL,
    GRAPH_LAUNCH,
    LAUNCH,
    OTHER_CALL,
    SYNCHRONIZE,
    Matching,
    blocked,
    communication_kernels,
)

CAUSES = {
    "framework": "the host was inside an operator, before the next launch",
    "launch_call": "the host was inside the call that launched the next work",
    "queued": "the next work was launched and had not begun: launch latency, dependencies between streams",
    "copy": "the host was inside a copy or set call",
    "synchronize": "the host waited in a synchronizing call, or returned from it",
    "runtime_call": "the host was inside another call into the runtime or driver (allocation, event, capture)",
    "input": "the host waited for the data loader",
    "outside_operators": "the host ran outside any operator",
    "profiler": "the profiler itself was at work",
    "tail": "the device had done all work of the iteration, which had not ended",
    "unknown": "no host events were recorded",
}
"""Causes of idle time, with what each means."""

_CODE = {cause: code for code, cause in enumerate(CAUSES)}
_FRAMEWORK, _OUTSIDE, _INPUT, _TAIL = _CODE["framework"], _CODE["outside_operators"], _CODE["input"], _CODE["tail"]
_CAUSE_OF_CALL = {
    OTHER_CALL: "runtime_call",
    LAUNCH: "launch_call",
    GRAPH_LAUNCH: "launch_call",
    COPY_CALL: "copy",
    SYNCHRONIZE: "synchronize",
}
_OF_CALL = np.array([_CODE[_CAUSE_OF_CALL[kind]] for kind in sorted(_CAUSE_OF_CALL)])

# Over several threads the one that works hides the one that waits.
_RANK = np.zeros(len(CAUSES), np.int64)
for _rank, _cause in enumerate(("synchronize", "input", "framework", "runtime_call", "copy", "launch_call"), 1):
    _RANK[_CODE[_cause]] = _rank

OWN_INPUT = "joulemark.input"
"""Name of a range in which the host waits for its input; ``DataLoader`` marks its own."""
_INPUT_RANGE = re.compile(r"enumerate\(DataLoader\)|joulemark\.input\b|\[?DataLoader")


@dataclass(frozen=True)
class HostStates:
    """What the host did at each time.

    Args:
        lanes: per host thread a step function with values in the order of ``CAUSES``.
        all: the same over all threads: the busiest state counts.
        profiler: when the profiler itself was at work.
    """

    lanes: dict[int, Steps]
    all: Steps
    profiler: Intervals

    @property
    def recorded(self) -> bool:
        """Whether the trace has host events at all."""
        return bool(self.lanes)


def host_states(trace: Trace, matching: Matching) -> HostStates:
    """State of each host thread over time: operator, kind of call, waiting for input, or outside all of them."""
    ranges, calls = trace.ranges, trace.calls
    waits_for_input = np.array([_INPUT_RANGE.match(name) is not None for name in trace.names], np.bool_)
    is_input = (
        waits_for_input[ranges.name] & np.isin(ranges.kind, (ANNOTATION, OPERATOR))
        if len(ranges)
        else np.empty(0, bool)
    )
    is_operator = (ranges.kind == OPERATOR) & ~is_input
    lanes: dict[int, Steps] = {}
    for lane in np.unique(np.concatenate([ranges.lane[is_operator | is_input], calls.lane])):
        operators, inputs = is_operator & (ranges.lane == lane), is_input & (ranges.lane == lane)
        mine = calls.lane == lane
        state = np.concatenate([np.full(int(operators.sum()), _FRAMEWORK), _OF_CALL[matching.call_kinds[mine]]])
        start = np.concatenate([ranges.start[operators], calls.start[mine]])
        end = np.concatenate([ranges.end[operators], calls.end[mine]])
        loading = union(ranges.start[inputs], ranges.end[inputs])
        lanes[int(lane)] = _lane_states(start, end, state, loading)
    profiler = union(ranges.start[ranges.kind == OVERHEAD], ranges.end[ranges.kind == OVERHEAD])
    outside = Steps(np.empty(0, np.int64), np.empty(0, np.int32), _OUTSIDE)
    return HostStates(lanes, overlay(list(lanes.values()), _RANK, _OUTSIDE) if lanes else outside, profiler)


def _lane_states(start: Ints, end: Ints, state: Ints, loading: Intervals) -> Steps:
    """States of one thread: the innermost range or call; while the loader runs, operators are the loader's."""
    order = np.lexsort((-end, start))
    steps = innermost(start[order], end[order])
    values = np.where(steps.values >= 0, state[order][np.maximum(steps.values, 0)], _OUTSIDE).astype(np.int32)
    steps = Steps(steps.edges, values, _OUTSIDE) if start.size else Steps(steps.edges, steps.values, _OUTSIDE)
    if not len(loading):
        return steps
    edges = distinct(steps.edges, loading.start, loading.end)
    values = steps.at(edges)
    inside = loading.within(edges, edges + 1) > 0
    values[inside & ((values == _FRAMEWORK) | (values == _OUTSIDE))] = _INPUT
    return Steps(edges, values, _OUTSIDE)


@dataclass(frozen=True)
class Pieces:
    """Stretches of idle time of one device, each with one cause.

    Args:
        start, end: ps, in order of time.
        cause: in the order of ``CAUSES``.
        gap: number of the gap that the piece belongs to.
    """

    start: Ints
    end: Ints
    cause: Codes
    gap: Ints

    def seconds(self) -> dict[str, float]:
        """Seconds by cause, causes without any left out."""
        return _by_cause(self.cause, self.end - self.start)


def _by_cause(cause: Codes, length: Ints) -> dict[str, float]:
    total = np.zeros(len(CAUSES), np.int64)
    np.add.at(total, cause, length)
    return {name: int(total[code]) / 1e12 for name, code in _CODE.items() if total[code]}


@dataclass(frozen=True)
class DeviceTimeline:
    """Busy and idle time of one device.

    Args:
        device: its number.
        rows: of its events in the trace.
        span: (start, end) from the first to the last event, ps.
        busy: union of kernels, copies and sets.
        kernel_busy: union of kernels.
        compute_busy: union of kernels other than those of communication.
        gap_start, gap_end: idle stretches from before the first event to behind the last.
        gap_event: row of the event that ends each, -1 for none.
        idle: all idle stretches, by cause.
    """

    device: int
    rows: npt.NDArray[np.intp]
    span: tuple[int, int]
    busy: Intervals
    kernel_busy: Intervals
    compute_busy: Intervals
    gap_start: Ints
    gap_end: Ints
    gap_event: Ints
    idle: Pieces

    @property
    def inside(self) -> Pieces:
        """Idle stretches between the first and the last event of the device."""
        rows = (self.idle.start >= self.span[0]) & (self.idle.end <= self.span[1])
        return Pieces(self.idle.start[rows], self.idle.end[rows], self.idle.cause[rows], self.idle.gap[rows])


def timelines(trace: Trace, matching: Matching, iterations: Iterations) -> list[DeviceTimeline]:
    """Per device its busy time, and its idle time with causes, over its span and all iterations."""
    states = host_states(trace, matching)
    numbers = np.unique(trace.device.device)
    return [_timeline(trace, matching, iterations, states, int(number)) for number in numbers]


def _timeline(
    trace: Trace, matching: Matching, iterations: Iterations, states: HostStates, number: int
) -> DeviceTimeline:
    device = trace.device
    rows = np.flatnonzero(device.device == number)
    start, end = device.start[rows], device.end[rows]
    kernels = device.kind[rows] == KERNEL
    computes = kernels & ~communication_kernels(trace)[rows]
    busy = union(start, end)
    first, last = int(start.min()), int(end.max())
    lo, hi = first, last
    if len(iterations):
        lo, hi = min(lo, int(iterations.start[0])), max(hi, int(iterations.end[-1]))
    gap_start, gap_end = np.concatenate([[lo], busy.end]), np.concatenate([busy.start, [hi]])
    gap_event = np.concatenate([rows[np.searchsorted(start, busy.start, "left")], [-1]])
    edges = distinct(iterations.start, iterations.end, np.array([first, last]))
    return DeviceTimeline(
        device=number,
        rows=rows,
        span=(first, last),
        busy=busy,
        kernel_busy=union(start[kernels], end[kernels]),
        compute_busy=union(start[computes], end[computes]),
        gap_start=gap_start,
        gap_end=gap_end,
        gap_event=gap_event,
        idle=_causes(trace, matching, states, (gap_start, gap_end, gap_event), edges),
    )


def _causes(trace: Trace, matching: Matching, states: HostStates, gaps: tuple[Ints, Ints, Ints], edges: Ints) -> Pieces:
    """Cuts gaps into pieces of one cause each.

    The work that ends a gap names the thread to look at: until it began its launch call, that thread's state is
    the cause (where it was outside everything, the busiest state of all threads); then the call itself; then the
    work was queued. Pieces are cut at ``edges`` too, so that each lies in one window.
    """
    start, end, event = gaps
    call = np.where(event >= 0, matching.call[event] if len(trace.device) else -1, -1)
    launched = call >= 0
    called, returned = end.copy(), end.copy()
    called[launched] = np.clip(trace.calls.start[call[launched]], start[launched], end[launched])
    returned[launched] = np.clip(trace.calls.end[call[launched]], called[launched], end[launched])
    of_call = np.full(start.size, _CODE["unknown"])
    of_call[launched] = _OF_CALL[matching.call_kinds[call[launched]]]
    lane = np.full(start.size, -1)
    lane[launched] = trace.calls.lane[call[launched]]
    number = np.arange(start.size)
    before = _host_pieces(states, start, called, lane, number)
    queued = np.full(start.size, _CODE["queued"])
    parts = [before, (called, returned, of_call, number), (returned, end, queued, number)]
    piece_start, piece_end, cause, gap = (np.concatenate([part[i] for part in parts]) for i in range(4))
    piece_start, piece_end, parent = split(piece_start, piece_end, edges)
    order = np.argsort(piece_start, kind="stable")
    parent = parent[order]
    return Pieces(piece_start[order], piece_end[order], cause[parent].astype(np.int32), gap[parent])


_Part = tuple[Ints, Ints, Ints, Ints]


def _host_pieces(states: HostStates, start: Ints, end: Ints, lane: Ints, number: Ints) -> _Part:
    """Pieces of the stretches before a launch, by what the host did."""
    if not states.recorded:
        return start, end, np.full(start.size, _CODE["unknown"]), number
    done: list[_Part] = []
    open_ended: list[_Part] = []
    for thread in np.unique(lane):
        here = lane == thread
        steps = states.lanes.get(int(thread))
        part = _labelled(start[here], end[here], number[here], steps) if steps else None
        if part is None:
            open_ended.append((start[here], end[here], np.full(int(here.sum()), _OUTSIDE), number[here]))
            continue
        outside = part[2] == _OUTSIDE
        done.append(_rows(part, ~outside))
        open_ended.append(_rows(part, outside))
    rest = _concatenate(open_ended)
    done.append(_labelled(rest[0], rest[1], rest[3], states.all))
    return _profiler_marked(_concatenate(done), states.profiler)


def _labelled(start: Ints, end: Ints, number: Ints, steps: Steps) -> _Part:
    piece_start, piece_end, parent = split(start, end, steps.edges)
    return piece_start, piece_end, steps.at(piece_start).astype(np.int64), number[parent]


def _profiler_marked(part: _Part, profiler: Intervals) -> _Part:
    """Time in which the profiler itself worked, taken from what it delayed."""
    if not len(profiler):
        return part
    edges = distinct(profiler.start, profiler.end)
    start, end, parent = split(part[0], part[1], edges)
    cause = part[2][parent]
    delayed = np.isin(cause, (_FRAMEWORK, _OUTSIDE, _INPUT, _CODE["runtime_call"]))
    cause[delayed & (profiler.within(start, start + 1) > 0)] = _CODE["profiler"]
    return start, end, cause, part[3][parent]


def _rows(part: _Part, mask: npt.NDArray[np.bool_]) -> _Part:
    return part[0][mask], part[1][mask], part[2][mask], part[3][mask]


def _concatenate(parts: list[_Part]) -> _Part:
    return (
        np.concatenate([part[0] for part in parts]),
        np.concatenate([part[1] for part in parts]),
        np.concatenate([part[2] for part in parts]),
        np.concatenate([part[3] for part in parts]),
    )


@dataclass(frozen=True)
class IterationFigures:
    """Figures of all iterations, summed over devices; arrays have one row per iteration, times in ps.

    Args:
        wall: of the window, on one clock.
        busy: device time covered by work inside the window.
        exposed: device time of the window in which nothing ran.
        idle: exposed time by cause, shape (iterations, causes).
        host_issue: from the mark's begin to the end of its last launch or copy call, without the time in which
            the host waited for the device; -1 where nothing was issued.
        copy_only: device time of the window in which copies or sets ran and no kernel.
        launches, kernels: issued inside the mark, launched by the iteration.
        operators: outermost operators that issued device work inside the mark.
        operator_issue: median time in which the host was in one of them, without waiting for the device; -1 without.
    """

    wall: Ints
    busy: Ints
    exposed: Ints
    idle: npt.NDArray[np.int64]
    host_issue: Ints
    copy_only: Ints
    launches: Ints
    kernels: Ints
    operators: Ints
    operator_issue: Ints


def iteration_figures(
    trace: Trace, matching: Matching, iterations: Iterations, devices: list[DeviceTimeline]
) -> IterationFigures:
    """Busy and idle time of each iteration's window, and the host's time to issue it."""
    n = len(iterations)
    wall = iterations.end - iterations.start
    busy, kernel_busy, idle = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros((n, len(CAUSES)), np.int64)
    for line in devices:
        busy += line.busy.within(iterations.start, iterations.end)
        kernel_busy += line.kernel_busy.within(iterations.start, iterations.end)
        idle += _idle_of_windows(line, iterations)
    calls = trace.calls
    number = np.searchsorted(iterations.mark_start, calls.start, "right") - 1
    if n:
        number = np.where(calls.start < iterations.mark_end[np.maximum(number, 0)], number, -1)
    launches = _count(number[matching.launches], n)
    kernels = _count(iterations.of_event[trace.device.kind == KERNEL], n)
    waits = blocked(trace, matching, [line.kernel_busy for line in devices])
    host_issue = _host_issue(trace, matching, iterations, number, waits)
    operators, operator_issue = _operator_issue(trace, matching, number, waits, n)
    exposed = wall * len(devices) - busy
    return IterationFigures(
        wall, busy, exposed, idle, host_issue, busy - kernel_busy, launches, kernels, operators, operator_issue
    )


def _count(number: Ints | Codes, n: int) -> Ints:
    return np.bincount(number[number >= 0], minlength=n).astype(np.int64)[:n] if n else np.empty(0, np.int64)


def _idle_of_windows(line: DeviceTimeline, iterations: Iterations) -> npt.NDArray[np.int64]:
    """Idle time by window and cause; behind the window's last event it is the tail, unless the loader ran."""
    idle, n = line.idle, len(iterations)
    total = np.zeros((n, len(CAUSES)), np.int64)
    if not n:
        return total
    window = np.searchsorted(iterations.start, idle.start, "right") - 1
    inside = (window >= 0) & (idle.start < iterations.end[np.maximum(window, 0)])
    start, length, cause, window = (
        idle.start[inside],
        (idle.end - idle.start)[inside],
        idle.cause[inside],
        window[inside],
    )
    worked_until = iterations.start.copy()
    if len(line.busy):
        index = np.searchsorted(line.busy.start, iterations.end, "left") - 1
        worked_until = np.where(index >= 0, line.busy.end[np.maximum(index, 0)], iterations.start)
    has_work = worked_until > iterations.start
    tail = (start >= worked_until[window]) & has_work[window] & (cause != _INPUT)
    np.add.at(total, (window, np.where(tail, _TAIL, cause)), length)
    return total


def _issuing(matching: Matching, number: Ints) -> npt.NDArray[np.bool_]:
    """Calls inside a mark that gave the device work: launches and copies."""
    return np.isin(matching.call_kinds, (LAUNCH, GRAPH_LAUNCH, COPY_CALL)) & ~matching.captured & (number >= 0)


def _operator_issue(trace: Trace, matching: Matching, number: Ints, waits: Intervals, n: int) -> tuple[Ints, Ints]:
    """Per iteration the outermost operators that issued work, and the median of the host's time in one of them."""
    ranges, calls, issuing = trace.ranges, trace.calls, _issuing(matching, number)
    spent: list[list[int]] = [[] for _ in range(n)]
    for lane in np.unique(calls.lane[issuing]):
        rows = np.flatnonzero((ranges.kind == OPERATOR) & (ranges.lane == lane))
        if not rows.size:
            continue
        start, end = ranges.start[rows], ranges.end[rows]
        outer = np.concatenate([[True], start[1:] >= np.maximum.accumulate(end)[:-1]])
        start, end = start[outer], end[outer]
        mine = issuing & (calls.lane == lane)
        around = np.searchsorted(start, calls.start[mine], "right") - 1
        inside = (around >= 0) & (calls.start[mine] < end[np.maximum(around, 0)])
        used, first = np.unique(around[inside], return_index=True)
        length = end[used] - start[used] - waits.within(start[used], end[used])
        for iteration, one in zip(number[mine][inside][first], length, strict=True):
            spent[int(iteration)].append(int(one))
    medians = [int(np.median(one)) if one else -1 for one in spent]
    return np.array([len(one) for one in spent], np.int64), np.array(medians, np.int64)


def _host_issue(trace: Trace, matching: Matching, iterations: Iterations, number: Ints, waits: Intervals) -> Ints:
    """Time that the host needs to issue each iteration, see :class:`IterationFigures`."""
    n = len(iterations)
    issuing = _issuing(matching, number)
    last = np.full(n, np.iinfo(np.int64).min)
    np.maximum.at(last, number[issuing], trace.calls.end[issuing])
    issued = last >= iterations.mark_start
    end = np.where(issued, last, iterations.mark_start)
    waited = waits.within(iterations.mark_start, end)
    return np.where(issued, end - iterations.mark_start - waited, -1)
