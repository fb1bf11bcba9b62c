"""Whether a trace holds all that happened: launches against kernels, clocks, times, and the file itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from joulemark.records import Finding
from joulemark.trace.events import KERNEL, Trace
from joulemark.trace.launch import GRAPH_LAUNCH, Matching

SKEW_TOLERANCE_PS = 1_000_000
"""A kernel may seem to begin up to 1 µs before its launch: profilers stamp in whole microseconds."""

_LOSS_IN_LOG = re.compile(r"drop|exceed|overflow|out of memory|buffer limit|lost", re.IGNORECASE)
_STOPPED_EARLY = re.compile(r"stopped early\? = [1-9]")


def findings(trace: Trace, matching: Matching) -> list[Finding]:
    """Everything that a reader of this trace's figures must know; those that flag make the trace incomplete."""
    checks = (_file, _times, _launches, _replays, _orphans, _skew, _sides, _log)
    return [finding for check in checks for finding in check(trace, matching)]


def is_complete(found: list[Finding]) -> bool:
    """Whether no finding flags the trace."""
    return not any(finding.flags for finding in found)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _file(trace: Trace, _: Matching) -> Iterator[Finding]:
    damage = trace.damage
    if damage.cut:
        yield Finding(
            "trace_cut", damage.cut, "record again and let the export finish; figures are of the part read", True
        )
    if damage.skipped_events:
        message = f"{_plural(damage.skipped_events, 'event')} could not be decoded"
        yield Finding("trace_malformed", message, "export again; the file is no valid JSON there", True)
    if damage.repaired_events:
        message = (
            f"{_plural(damage.repaired_events, 'event')} with what JSON forbids (inf, NaN, N/A …), read all the same"
        )
        yield Finding("trace_repaired", message)
    if damage.trailer_cut:
        yield Finding("trace_trailer_cut", "the file ends behind its events, before its last entries")
    if damage.unpaired_events:
        message = f"{_plural(damage.unpaired_events, 'begin/end event')} of another tracer were not read"
        yield Finding("trace_begin_end_events", message)


def _times(trace: Trace, _: Matching) -> Iterator[Finding]:
    damage, device = trace.damage, trace.device
    if damage.invalid_device_events:
        others = damage.invalid_device_events - damage.invalid_kernels
        parts = [_plural(damage.invalid_kernels, "kernel")] if damage.invalid_kernels or not others else []
        parts += [f"{others} {'copies or sets' if others > 1 else 'copy or set'}"] if others else []
        host = f" (and {_plural(damage.invalid_host_events, 'host event')})" if damage.invalid_host_events else ""
        message = f"{' and '.join(parts)} with invalid timestamps{host}"
        yield Finding("invalid_timestamps", message, "record again; times and counts leave these events out", True)
    elif damage.invalid_host_events:
        message = f"{_plural(damage.invalid_host_events, 'host event')} with invalid timestamps"
        yield Finding("invalid_timestamps", message, "record again; host times leave these events out", True)
    zero = int(((device.kind == KERNEL) & (device.end == device.start)).sum())
    if zero:
        yield Finding("zero_duration_kernels", f"{_plural(zero, 'kernel')} of no duration (a coarse clock writes them)")


def _launches(trace: Trace, matching: Matching) -> Iterator[Finding]:
    """Launches whose work is not in the trace."""
    issued = np.isin(trace.calls.correlation, trace.damage.invalid_correlations)
    issued[matching.call[matching.call >= 0]] = True
    groups = matching.outermost[issued]
    lost = matching.launches.copy()
    lost[groups[groups >= 0]] = False
    if not lost.any():
        return
    names = Counter(trace.name(int(code)) for code in trace.calls.name[lost])
    calls = ", ".join(f"{name} {count}" for name, count in names.most_common(3))
    message = (
        f"{int(lost.sum())} of {_plural(int(matching.launches.sum()), 'kernel launch call')} without a kernel ({calls})"
    )
    remedy = "synchronize before the profiler stops, and profile in a fresh process"
    if trace.counter_ranges:
        message += f"; a counter profiler recorded {_plural(trace.counter_ranges, 'range')} in place of kernels"
        remedy = "record without the counter profiler"
    yield Finding("launches_without_kernels", message, remedy, True)


def _replays(trace: Trace, matching: Matching) -> Iterator[Finding]:
    """Replays that begin with the same kernel and yet count fewer kernels than most of their kind."""
    rows = np.flatnonzero((trace.device.kind == KERNEL) & (matching.call >= 0))
    rows = rows[matching.call_kinds[matching.call[rows]] == GRAPH_LAUNCH]
    if not rows.size:
        return
    _, first, count = np.unique(matching.call[rows], return_index=True, return_counts=True)
    opening, short = trace.device.name[rows[first]], 0
    for code in np.unique(opening):
        sizes = count[opening == code]
        usual = int(np.bincount(sizes).argmax())
        if (sizes == usual).mean() >= 0.6:
            short += int((sizes < usual).sum())
    if short:
        message = f"{_plural(short, 'graph replay')} with fewer kernels than most that begin with the same kernel"
        yield Finding("graph_replays_differ", message, "records may be lost, unless these are other graphs")


def _orphans(trace: Trace, matching: Matching) -> Iterator[Finding]:
    """Kernels whose launch is not in the trace.

    A stream runs its work in order, so a kernel before all of its stream's work with a known launch may have been
    launched before the recording began. Any other orphan means that records were lost.
    """
    device = trace.device
    orphans = (matching.call < 0) & (device.kind == KERNEL)
    if not orphans.any() or not len(trace.calls):
        return
    first_known: dict[int, int] = {}
    known = matching.call >= 0
    for lane in np.unique(device.lane[known]):
        first_known[int(lane)] = int(device.start[known & (device.lane == lane)].min())
    begun = int(trace.calls.start.min())
    late = 0
    for lane in np.unique(device.lane[orphans]):
        starts = device.start[orphans & (device.lane == lane)]
        late += int((starts > first_known.get(int(lane), begun)).sum())
    count, seconds = int(orphans.sum()), int((device.end - device.start)[orphans].sum()) / 1e12
    message = f"{_plural(count, 'kernel')} ({seconds:.6g} s) without a recorded launch"
    if late:
        message += f", {late} of them in the midst of the recording"
        yield Finding("kernels_without_launch", message, "records were lost: profile in a fresh process", True)
    else:
        yield Finding("kernels_without_launch", message + ": launched before the recording began")


def _skew(trace: Trace, matching: Matching) -> Iterator[Finding]:
    known = matching.call >= 0
    early = trace.calls.start[matching.call[known]] - trace.device.start[known]
    skewed = early > SKEW_TOLERANCE_PS
    if skewed.any():
        message = (
            f"{_plural(int(skewed.sum()), 'device event')} stamped before the launch, "
            f"by up to {int(early.max()) / 1e12:.3g} s: the clocks of host and device disagree"
        )
        yield Finding("clock_skew", message, "launch latency, queue depth and idle causes are off; record again", True)


def _sides(trace: Trace, _: Matching) -> Iterator[Finding]:
    if not len(trace.device) and not trace.damage.invalid_device_events:
        message = "no GPU events"
        if trace.counter_ranges:
            message += " (a counter profiler took their place)"
        yield Finding("no_gpu_events", message, "record with ProfilerActivity.CUDA on a machine with a GPU")
    if len(trace.device) and not len(trace.calls) and not len(trace.ranges):
        yield Finding(
            "no_host_events", "no host events: no launch is attributed", "record with ProfilerActivity.CPU too"
        )


def _log(trace: Trace, _: Matching) -> Iterator[Finding]:
    """What the profiler itself said about losses, in the file's header."""
    for line in _log_lines(trace.header):
        if _LOSS_IN_LOG.search(line) or _STOPPED_EARLY.search(line):
            yield Finding(
                "profiler_reports_loss", f"the profiler logged: {line[:200]}", "record fewer iterations", True
            )
            return


def _log_lines(header: Mapping[str, Any]) -> Iterator[str]:
    for level in ("WARNING", "ERROR"):
        lines = header.get(level)
        if isinstance(lines, list):
            yield from (line for line in lines if isinstance(line, str))
    counts = header.get("INFO")
    if isinstance(counts, list):
        yield from (line for line in counts if isinstance(line, str) and _STOPPED_EARLY.search(line))
