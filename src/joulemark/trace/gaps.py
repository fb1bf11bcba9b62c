"""The longest idle stretches, and what the host was doing in them."""

from __future__ import annotations

import numpy as np

from joulemark.records import Json
from joulemark.trace.breakdown import CAUSES, DeviceTimeline
from joulemark.trace.events import ANNOTATION, MODULE, OPERATOR, PS_PER_S, Trace
from joulemark.trace.intervals import innermost
from joulemark.trace.launch import Matching

LONGEST = 10
_NAMES = 3


def longest_gaps(trace: Trace, matching: Matching, devices: list[DeviceTimeline], count: int = LONGEST) -> list[Json]:
    """The longest idle stretches between device events, the longest first.

    Returns:
        Per gap ``device``, ``start_s`` (since the device's first event), ``duration_s``, ``idle_s`` by cause,
        ``after`` and ``before`` (names of the device events around it), ``host`` (``name``, ``time_s`` of the
        operators and calls in which the host spent it, on the thread that launched the next work) and
        ``annotations`` (names of the user's ranges around it).
    """
    found: list[tuple[int, DeviceTimeline, int]] = []
    for line in devices:
        length = line.gap_end - line.gap_start
        length[[0, -1]] = 0
        rows = np.argsort(-length, kind="stable")[:count]
        found += [(int(length[row]), line, int(row)) for row in rows if length[row] > 0]
    found.sort(key=lambda item: (-item[0], item[1].device, item[2]))
    return [_gap(trace, matching, line, row) for _, line, row in found[:count]]


def _gap(trace: Trace, matching: Matching, line: DeviceTimeline, row: int) -> dict[str, Json]:
    start, end, event = int(line.gap_start[row]), int(line.gap_end[row]), int(line.gap_event[row])
    pieces = line.idle.gap == row
    cause = np.zeros(len(CAUSES), np.int64)
    np.add.at(cause, line.idle.cause[pieces], (line.idle.end - line.idle.start)[pieces])
    before = line.rows[trace.device.end[line.rows] <= start]
    last = before[np.argmax(trace.device.end[before])]
    call = int(matching.call[event])
    lane = int(trace.calls.lane[call]) if call >= 0 else None
    return {
        "device": line.device,
        "start_s": (start - line.span[0]) / PS_PER_S,
        "duration_s": (end - start) / PS_PER_S,
        "idle_s": {name: int(cause[code]) / PS_PER_S for code, name in enumerate(CAUSES) if cause[code]},
        "after": trace.name(int(trace.device.name[last])),
        "before": trace.name(int(trace.device.name[event])),
        "host": _host_activity(trace, start, end, lane),
        "annotations": _annotations(trace, start, end),
    }


def _host_activity(trace: Trace, start: int, end: int, lane: int | None) -> list[Json]:
    """Innermost operators and calls of a thread (of all, without one) between two times, the longest first."""
    total: dict[str, int] = {}
    ranges, calls = trace.ranges, trace.calls
    ran = (ranges.start < end) & (ranges.end > start) & (ranges.kind == OPERATOR)
    called = (calls.start < end) & (calls.end > start)
    lanes = np.unique(np.concatenate([ranges.lane[ran], calls.lane[called]])) if lane is None else [lane]
    for thread in lanes:
        some, others = ran & (ranges.lane == thread), called & (calls.lane == thread)
        begin = np.concatenate([ranges.start[some], calls.start[others]])
        finish = np.concatenate([ranges.end[some], calls.end[others]])
        name = np.concatenate([ranges.name[some], calls.name[others]])
        order = np.lexsort((-finish, begin))
        steps = innermost(begin[order], finish[order])
        bounds = np.clip(np.append(steps.edges, end), start, end)
        for value, length in zip(steps.values, np.diff(bounds), strict=True):
            if value >= 0 and length > 0:
                text = trace.name(int(name[order][value]))
                total[text] = total.get(text, 0) + int(length)
    longest = sorted(total.items(), key=lambda item: (-item[1], item[0]))[:_NAMES]
    return [{"name": name, "time_s": length / PS_PER_S} for name, length in longest]


def _annotations(trace: Trace, start: int, end: int) -> list[Json]:
    ranges = trace.ranges
    rows = (ranges.start < end) & (ranges.end > start) & ((ranges.kind == ANNOTATION) | (ranges.kind == MODULE))
    names = {trace.name(int(code)) for code in ranges.name[rows]}
    return [*sorted(names)[:_NAMES]]
