"""The analysis of trace files as one strict-JSON document, schema ``joulemark/trace/1``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from joulemark.errors import UnreadableInput
from joulemark.records import Json
from joulemark.trace.breakdown import CAUSES, DeviceTimeline, IterationFigures, iteration_figures, timelines
from joulemark.trace.chrome import MODULE_PREFIX, read_trace
from joulemark.trace.completeness import findings, is_complete
from joulemark.trace.events import COPY, KERNEL, OPERATOR, PS_PER_S, SET, Ints, Trace
from joulemark.trace.gaps import longest_gaps
from joulemark.trace.iterations import Iterations, find_iterations
from joulemark.trace.launch import (
    GRAPH_LAUNCH,
    NO_OWNER,
    OWNER_NAMES,
    Matching,
    communication_kernels,
    launch_latencies,
    match,
    queue_depth,
)

SCHEMA = "joulemark/trace/1"

_NO_GPU = "no GPU events"
_NO_CALLS = "no calls into the CUDA or HIP runtime were recorded"
_SERIES = 100


@dataclass(frozen=True)
class Analysis:
    """A trace with everything that was derived from it."""

    trace: Trace
    matching: Matching
    iterations: Iterations
    devices: list[DeviceTimeline]
    figures: IterationFigures

    @property
    def has_device(self) -> bool:
        """Whether the trace holds usable device events."""
        return bool(self.devices)


def analyse(path: Path) -> Analysis:
    """Reads and analyses one trace.

    Raises:
        UnreadableInput: the file cannot be read, is empty or is no trace.
    """
    trace = read_trace(path)
    matching = match(trace)
    iterations = find_iterations(trace, matching)
    devices = timelines(trace, matching, iterations)
    return Analysis(trace, matching, iterations, devices, iteration_figures(trace, matching, iterations, devices))


def analyse_files(paths: Sequence[Path]) -> dict[str, Json]:
    """The document of ``joulemark trace --json`` (``docs/schema/trace.schema.json``).

    A file that cannot be read has ``error``, and nulls for its figures; the others are analysed all the same.
    """
    return {"schema": SCHEMA, "files": [_file_entry(Path(path)) for path in paths]}


def exit_code(document: Mapping[str, Json]) -> int:
    """2 when a file could not be read, else 3 when one is incomplete, else 0; for a diff its two sides count."""
    sides = document["files"] if "files" in document else [document["base"], document["new"]]
    if any(side["error"] for side in sides):
        return 2
    return 0 if all(side["complete"] for side in sides) else 3


def _shown_path(path: Path) -> str:
    return os.fsencode(path).decode("utf-8", "replace")


def _file_entry(path: Path) -> dict[str, Json]:
    try:
        analysis = analyse(path)
    except UnreadableInput as error:
        reason = str(error).encode("utf-8", "replace").decode()
        empty = dict.fromkeys(_FIELDS)
        return {
            **empty,
            "path": _shown_path(path),
            "error": reason,
            "complete": False,
            "notes": {"*": "the file could not be read"},
            "findings": [],
        }
    return {"path": _shown_path(path), "error": None, **file_document(analysis)}


def file_document(analysis: Analysis) -> dict[str, Json]:
    """One file's entry, without its path: the keys of ``_FIELDS`` in their order."""
    notes: dict[str, str] = {}
    found = findings(analysis.trace, analysis.matching)
    body = {name: section(analysis, notes) for name, section in _SECTIONS.items()}
    body.update({key: None for key in _FIELDS if key not in body})
    for section in (_totals, _counts, _latencies):
        body.update(section(analysis, notes))
    for finding in found:
        notes.setdefault(finding.code, finding.message)
    body.update(complete=is_complete(found), findings=[finding.to_json() for finding in found], notes=notes)
    return {key: body[key] for key in _FIELDS if key not in ("path", "error")}


def _seconds(ps: int | np.integer | float) -> float:
    return float(ps) / PS_PER_S


def _totals(analysis: Analysis, notes: dict[str, str]) -> dict[str, Json]:
    """Times over all devices: seconds add, fractions are means."""
    keys = (
        "span_s", "kernel_time_s", "kernel_busy_s", "compute_busy_s", "busy_s", "copy_time_s", "communication_time_s",
        "gpu_busy_fraction", "kernel_busy_fraction", "exposed_overhead_s", "idle_s",
    )  # fmt: skip
    if not analysis.has_device:
        notes.update(dict.fromkeys(keys, _NO_GPU))
        return dict.fromkeys(keys)
    trace, entries = analysis.trace, [_device_entry(analysis, line, {}) for line in analysis.devices]
    length = trace.device.end - trace.device.start
    idle = {cause: sum(entry["idle_s"][cause] for entry in entries) for cause in CAUSES}
    result: dict[str, Json] = {
        "span_s": sum(entry["span_s"] for entry in entries),
        "kernel_time_s": _seconds(length[trace.device.kind == KERNEL].sum()),
        "kernel_busy_s": sum(entry["kernel_busy_s"] for entry in entries),
        "compute_busy_s": sum(entry["compute_busy_s"] for entry in entries),
        "busy_s": sum(entry["busy_s"] for entry in entries),
        "copy_time_s": _seconds(length[trace.device.kind != KERNEL].sum()),
        "communication_time_s": _seconds(length[communication_kernels(trace)].sum()),
        "exposed_overhead_s": sum(entry["exposed_overhead_s"] for entry in entries),
        "idle_s": idle,
    }
    for key in ("gpu_busy_fraction", "kernel_busy_fraction"):
        values = [entry[key] for entry in entries if entry[key] is not None]
        result[key] = sum(values) / len(values) if values else None
        if not values:
            notes[key] = "all GPU events have no duration"
    return result


def _device_entry(analysis: Analysis, line: DeviceTimeline, notes: dict[str, str]) -> dict[str, Json]:
    kinds = analysis.trace.device.kind[line.rows]
    span, busy, kernel_busy = line.span[1] - line.span[0], line.busy.length, line.kernel_busy.length
    if not span:
        notes[f"devices.{line.device}.gpu_busy_fraction"] = "all its GPU events have no duration"
    return {
        "device": line.device,
        "name": _device_name(analysis.trace, line.device),
        "span_s": _seconds(span),
        "busy_s": _seconds(busy),
        "kernel_busy_s": _seconds(kernel_busy),
        "compute_busy_s": _seconds(line.compute_busy.length),
        "gpu_busy_fraction": busy / span if span else None,
        "kernel_busy_fraction": kernel_busy / span if span else None,
        "exposed_overhead_s": _seconds(span - busy),
        "kernels": int((kinds == KERNEL).sum()),
        "copies": int((kinds == COPY).sum()),
        "idle_s": dict.fromkeys(CAUSES, 0.0) | line.inside.seconds(),
    }


def _device_name(trace: Trace, number: int) -> str | None:
    properties = trace.header.get("deviceProperties")
    for entry in properties if isinstance(properties, list) else []:
        if isinstance(entry, dict) and entry.get("id") == number and isinstance(entry.get("name"), str):
            return str(entry["name"])
    return None


def _devices(analysis: Analysis, notes: dict[str, str]) -> Json:
    return [_device_entry(analysis, line, notes) for line in analysis.devices]


def _counts(analysis: Analysis, notes: dict[str, str]) -> dict[str, Json]:
    trace, matching = analysis.trace, analysis.matching
    kinds = trace.device.kind
    copies = kinds == COPY
    sizes = trace.device.size[copies]
    known = bool((sizes >= 0).all()) and analysis.has_device
    counts: dict[str, Json] = {
        "kernels": int((kinds == KERNEL).sum()),
        "copies": int(copies.sum()),
        "sets": int((kinds == SET).sum()),
        "copied_bytes": int(sizes.sum()) if known else None,
        "communication_kernels": int(communication_kernels(trace).sum()),
        "unattributed_kernels": int(((matching.owner == NO_OWNER) & (kinds == KERNEL)).sum()),
        "invalid_events": trace.damage.invalid_device_events,
        "events": trace.events,
        "host_operators": int((trace.ranges.kind == OPERATOR).sum()),
        "launches": int(matching.launches.sum()),
        "graph_launches": int((matching.launches & (matching.call_kinds == GRAPH_LAUNCH)).sum()),
        "captured_launches": int((matching.captured & (matching.call_kinds != 0)).sum()),
    }
    if not known:
        notes["copied_bytes"] = "no sizes of copies were recorded" if copies.any() else _NO_GPU
    if not len(trace.calls):
        for key in ("launches", "graph_launches", "captured_launches"):
            counts[key], notes[key] = None, _NO_CALLS
    if not len(trace.ranges) and not len(trace.calls):
        counts["host_operators"], notes["host_operators"] = None, "no host events"
    return counts


def _latencies(analysis: Analysis, notes: dict[str, str]) -> dict[str, Json]:
    own, graph = launch_latencies(analysis.trace, analysis.matching)
    why = _NO_GPU if not analysis.has_device else _NO_CALLS if not len(analysis.trace.calls) else "no such launches"
    result: dict[str, Json] = {}
    for key, values in (("launch_latency_s", own), ("graph_launch_latency_s", graph)):
        result[key] = _distribution(values)
        if result[key] is None:
            notes[key] = why
    return result


def _distribution(values: Ints) -> Json:
    if not values.size:
        return None
    low, middle, high = (_seconds(value) for value in np.quantile(values, (0.05, 0.5, 0.95)))
    return {
        "median": middle,
        "p05": low,
        "p95": high,
        "min": _seconds(values.min()),
        "max": _seconds(values.max()),
        "n": int(values.size),
    }


def _queue_depth(analysis: Analysis, notes: dict[str, str]) -> Json:
    """Launches issued minus kernels begun, over all devices, with a series of its means over equal stretches."""
    if not analysis.has_device:
        notes["queue_depth"] = _NO_GPU
        return None
    span = (min(line.span[0] for line in analysis.devices), max(line.span[1] for line in analysis.devices))
    everything = np.ones(len(analysis.trace.device), np.bool_)
    depth = queue_depth(analysis.trace, analysis.matching, everything, span)
    if depth is None:
        notes["queue_depth"] = "no kernel has a known launch"
        return None
    bounds = np.linspace(*span, _SERIES + 1)
    area = np.concatenate([[0.0], np.cumsum(depth.depth * np.diff(np.append(depth.edges, span[1])).astype(float))])
    index = np.searchsorted(depth.edges, bounds, "right") - 1
    until = area[index] + depth.depth[index] * (bounds - depth.edges[index])
    step = (span[1] - span[0]) / _SERIES
    return {
        "mean": depth.mean,
        "max": depth.maximum,
        "empty_fraction": depth.empty_fraction,
        "step_s": _seconds(step),
        "series": [max(0.0, float(value)) for value in np.diff(until) / step],
    }


def _shares(analysis: Analysis, group: npt.NDArray[np.int64], name_of: Callable[[int], str]) -> list[dict[str, Json]]:
    """Device time by group, the longest first; equal names are one group."""
    trace, of_event = analysis.trace, analysis.iterations.of_event
    length, kernel = trace.device.end - trace.device.start, trace.device.kind == KERNEL
    codes, inverse = np.unique(group, return_inverse=True)
    rows: dict[str, list[int]] = {}
    columns = [length, length * kernel, kernel, ~kernel, length * (of_event >= 0)]
    sums = [_sum_by(inverse, column, codes.size) for column in columns]
    for index, code in enumerate(codes):
        row = rows.setdefault(name_of(int(code)), [0] * len(columns))
        for column in range(len(columns)):
            row[column] += int(sums[column][index])
    n = len(analysis.iterations)
    entries: list[dict[str, Json]] = [
        {
            "name": name,
            "device_time_s": _seconds(row[0]),
            "kernel_time_s": _seconds(row[1]),
            "kernels": row[2],
            "copies": row[3],
            "device_time_per_iteration_s": _seconds(row[4] / n) if n else None,
        }
        for name, row in rows.items()
    ]
    return sorted(entries, key=lambda entry: (-entry["device_time_s"], entry["name"]))


def _sum_by(inverse: npt.NDArray[np.intp], values: npt.NDArray[np.int64], size: int) -> Ints:
    """Exact integer sums by group."""
    total = np.zeros(size, np.int64)
    np.add.at(total, inverse, values.astype(np.int64))
    return total


def _operators(analysis: Analysis, _: dict[str, str]) -> Json:
    owner, ranges, trace = analysis.matching.owner, analysis.trace.ranges, analysis.trace
    code = owner.astype(np.int64)
    code[owner >= 0] = ranges.name[owner[owner >= 0]]
    return _shares(analysis, code, lambda value: OWNER_NAMES[value] if value < 0 else trace.name(value))


def _modules(analysis: Analysis, notes: dict[str, str]) -> Json:
    module, trace = analysis.matching.module, analysis.trace
    if not (module >= 0).any():
        notes["modules"] = "no module ranges were recorded (profile with with_stack=True, or mark them)"
        return None
    code = module.astype(np.int64)
    code[module >= 0] = trace.ranges.name[module[module >= 0]]
    return _shares(
        analysis,
        code,
        lambda value: "outside any module" if value < 0 else trace.name(value).removeprefix(MODULE_PREFIX),
    )


def _kernel_names(analysis: Analysis, _: dict[str, str]) -> Json:
    device, trace = analysis.trace.device, analysis.trace
    rows = np.flatnonzero(device.kind == KERNEL)
    codes, inverse, count = np.unique(device.name[rows], return_inverse=True, return_counts=True)
    time = _sum_by(inverse, (device.end - device.start)[rows], codes.size)
    entries = [
        {"name": trace.name(int(code)), "time_s": _seconds(spent), "kernels": int(n)}
        for code, spent, n in zip(codes, time, count, strict=True)
    ]
    return sorted(entries, key=lambda entry: (-entry["time_s"], entry["name"]))


def _copy_kinds(analysis: Analysis, notes: dict[str, str]) -> Json:
    """Copies and sets by kind; their bandwidth is all bytes over all time, of those that have both."""
    device, trace, entries = analysis.trace.device, analysis.trace, []
    for code in np.unique(device.name[device.kind != KERNEL]):
        rows = (device.name == code) & (device.kind != KERNEL)
        size, length = device.size[rows], (device.end - device.start)[rows]
        both = (size >= 0) & (length > 0)
        spent = int(length[both].sum())
        bandwidth = float(size[both].sum()) / _seconds(spent) if spent else None
        if bandwidth is None:
            notes["copy_kinds.bandwidth_bytes_per_s"] = "copies without a duration or a size have no bandwidth"
        entries.append(
            {
                "name": trace.name(int(code)),
                "copies": int(rows.sum()),
                "time_s": _seconds(length.sum()),
                "bytes": int(size.sum()) if (size >= 0).all() else None,
                "bandwidth_bytes_per_s": bandwidth,
            }
        )
    return sorted(entries, key=lambda entry: (-entry["time_s"], entry["name"]))


def _launch_calls(analysis: Analysis, _: dict[str, str]) -> Json:
    """Calls by name, with what they issued: for a graph launch the kernels and time of each replay."""
    trace, matching = analysis.trace, analysis.matching
    device, calls, entries = trace.device, trace.calls, []
    known = matching.call >= 0
    count = np.bincount(matching.call[known & (device.kind == KERNEL)], minlength=len(calls))
    spent = _sum_by(matching.call[known].astype(np.intp), (device.end - device.start)[known], len(calls))
    issued = np.zeros(len(calls), np.bool_)
    issued[matching.call[known]] = True
    shown = (matching.launches | issued) & ~matching.captured
    for code in np.unique(calls.name[shown]):
        rows = np.flatnonzero(shown & (calls.name == code))
        entries.append(
            {
                "name": trace.name(int(code)),
                "calls": int(rows.size),
                "host_time_s": _seconds((calls.end - calls.start)[rows].sum()),
                "kernels": int(count[rows].sum()),
                "device_time_s": _seconds(spent[rows].sum()),
                "kernels_per_call": [int(count[rows].min()), int(count[rows].max())],
                "device_time_per_call_s": [_seconds(spent[rows].min()), _seconds(spent[rows].max())],
            }
        )
    return sorted(entries, key=lambda entry: (-entry["calls"], entry["name"]))


def _iterations(analysis: Analysis, notes: dict[str, str]) -> Json:
    iterations, figures = analysis.iterations, analysis.figures
    if iterations.note:
        notes["iterations"] = iterations.note
    return [_iteration(analysis, row, iterations.names[row], figures, notes) for row in range(len(iterations))]


def _iteration(
    analysis: Analysis, row: int, name: str, figures: IterationFigures, notes: dict[str, str]
) -> dict[str, Json]:
    iterations, devices = analysis.iterations, len(analysis.devices)
    issue = int(figures.host_issue[row])
    if issue < 0:
        why = _NO_CALLS if not len(analysis.trace.calls) else "nothing was launched in it"
        notes["iterations.host_issue_s"] = notes["iterations.hidden_ratio"] = why
    entry: dict[str, Json] = {
        "name": name,
        "wall_s": _seconds(figures.wall[row]),
        "mark_s": _seconds(iterations.mark_end[row] - iterations.mark_start[row]),
        "busy_s": _seconds(figures.busy[row]),
        "exposed_overhead_s": _seconds(figures.exposed[row]),
        "copy_only_s": _seconds(figures.copy_only[row]),
        "host_issue_s": _seconds(issue) if issue >= 0 else None,
        "hidden_ratio": 1 - float(figures.exposed[row]) / devices / issue if issue > 0 and devices else None,
        "launches": int(figures.launches[row]) if len(analysis.trace.calls) else None,
        "kernels": int(figures.kernels[row]),
        "operators": int(figures.operators[row]),
        "host_issue_per_operator_s": _operator_issue(int(figures.operator_issue[row]), notes),
        "idle_s": {cause: _seconds(figures.idle[row][code]) for code, cause in enumerate(CAUSES)},
    }
    if not devices:
        missing = ("busy_s", "exposed_overhead_s", "copy_only_s", "idle_s")
        entry.update(dict.fromkeys(missing))
        notes.update({f"iterations.{key}": _NO_GPU for key in (*missing, "hidden_ratio")})
    return entry


def _operator_issue(issue: int, notes: dict[str, str]) -> float | None:
    if issue < 0:
        notes["iterations.host_issue_per_operator_s"] = "no operator issued work in it, or none was recorded"
        return None
    return _seconds(issue)


def _idle_gaps(analysis: Analysis, _: dict[str, str]) -> Json:
    return longest_gaps(analysis.trace, analysis.matching, analysis.devices)


_SECTIONS: dict[str, Callable[[Analysis, dict[str, str]], Json]] = {
    "operators": _operators,
    "modules": _modules,
    "kernel_names": _kernel_names,
    "copy_kinds": _copy_kinds,
    "launch_calls": _launch_calls,
    "queue_depth": _queue_depth,
    "iterations": _iterations,
    "iteration_source": lambda analysis, _: analysis.iterations.source or None,
    "idle_gaps": _idle_gaps,
    "devices": _devices,
}

_FIELDS = (
    "path", "error", "complete", "notes", "findings", "events",
    "span_s", "kernel_time_s", "kernel_busy_s", "compute_busy_s", "busy_s", "copy_time_s", "communication_time_s",
    "gpu_busy_fraction", "kernel_busy_fraction", "exposed_overhead_s",
    "kernels", "copies", "sets", "copied_bytes", "communication_kernels", "launches", "graph_launches",
    "captured_launches", "host_operators", "unattributed_kernels", "invalid_events",
    "launch_latency_s", "graph_launch_latency_s", "queue_depth",
    "operators", "modules", "kernel_names", "copy_kinds", "launch_calls",
    "iteration_source", "iterations", "idle_s", "idle_gaps", "devices",
)  # fmt: skip
"""The keys of a file's entry, all of them always there."""
