"""Per-kernel counters as text for a terminal or in Markdown: totals, classes of kernels, the longest kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from joulemark.metrics import format_value
from joulemark.records import Json, Table
from joulemark.report.formats import percent, table_of
from joulemark.report.names import kernel_titles
from joulemark.utilization.kernels import TITLES

_SHOWN = 15
_NAME_WIDTH = 56

_LEVELS = (
    ("sm_active_fraction", "SM active"),
    ("issue_slot_fraction", "issue slots"),
    ("tensor_active_fraction", "tensor pipe"),
    ("fp64_active_fraction", "FP64 pipe"),
    ("l1_fraction", "L1"),
    ("l2_fraction", "L2"),
    ("dram_fraction", "DRAM"),
)


def tables(document: Mapping[str, Json]) -> list[Table]:
    """Of the document of :func:`joulemark.utilization.read_files`.

    The files with what is wrong with them, then totals, classes and kernels of those that were read.
    """
    found = [_files(document["files"])]
    if document["totals"]["launches"]:
        found += [_totals(document), _classes(document), _kernels(document)]
    return found


def _files(entries: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (entry["path"], entry["status"].replace("_", " "), _count(entry["launches"]), ", ".join(entry["gpus"]) or "n/a")
        for entry in entries
    ]
    notes = [note for entry in entries for note in _file_notes(entry)]
    return table_of("counters", ("file", "state", "launches", "GPU"), rows, notes, {2})


def _file_notes(entry: Mapping[str, Any]) -> Iterator[str]:
    if entry["error"]:
        yield f"not read: {entry['error']}"
    for finding in entry["findings"]:
        yield f"{finding['message']}: {finding['remedy']}" if finding["remedy"] else finding["message"]


def _totals(document: Mapping[str, Any]) -> Table:
    totals = document["totals"]
    time, idle = totals["time_s"], totals["no_tensor_time_s"]
    share = idle / time if time and idle is not None else None
    rows = [
        ("launches", _count(totals["launches"])),
        ("kernel time (sum)", _seconds(time)),
        (f"… in kernels that use no tensor core (by {totals['no_tensor_source']})", percent(share, 2)),
        ("DRAM read", _bytes(totals["dram_read_bytes"])),
        ("DRAM written", _bytes(totals["dram_write_bytes"])),
        ("L2 traffic", _bytes(totals["l2_bytes"])),
        ("L1 traffic", _bytes(totals["l1_bytes"])),
        ("warp instructions", _count(totals["instructions"])),
        *(
            (f"{title}, mean over time", percent(totals[name], 2))
            for name, title in _LEVELS
            if totals[name] is not None
        ),
    ]
    reasons = {**document["notes"], **totals["notes"]}
    shown = ("time_s", "no_tensor_time_s", "dram_read_bytes", "dram_write_bytes", "tensor_active_fraction")
    notes = [f"{name}: {reasons[name]}" for name in shown if name in reasons]
    notes.append("each kernel was profiled alone (replayed, serialized): shares are of its own time, not of a step")
    return table_of("totals", ("figure", "value"), rows, notes)


def _classes(document: Mapping[str, Any]) -> Table:
    rows = [(TITLES[entry["class"]], *_figures(entry)) for entry in document["classes"]]
    return table_of("time by class of kernel", ("class", *_COLUMNS), rows)


def _kernels(document: Mapping[str, Any]) -> Table:
    entries = document["kernels"]
    titles = kernel_titles([entry["name"] for entry in entries[:_SHOWN]], _NAME_WIDTH)
    rows = [(titles[entry["name"]], _class(entry), *_figures(entry)) for entry in entries[:_SHOWN]]
    notes = []
    if any(entry["class_source"] == "counters" for entry in entries[:_SHOWN]):
        notes.append("*: the class is by the tensor counters, against what the name says")
    if len(entries) > _SHOWN:
        notes.append(f"and {len(entries) - _SHOWN} more (--json has them all)")
    columns = ("kernel", "class", *_COLUMNS)
    return table_of("time by kernel", columns, rows, notes, range(2, len(columns)))


_COLUMNS = ("launches", "time", "share", "tensor pipe", "DRAM read", "DRAM written")


def _class(entry: Mapping[str, Any]) -> str:
    return f"{entry['class']}{'*' if entry['class_source'] == 'counters' else ''}"


def _figures(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _count(entry["launches"]),
        _seconds(entry["time_s"]),
        percent(entry["time_share"], 2),
        percent(entry["tensor_active_fraction"], 2),
        _bytes(entry["dram_read_bytes"]),
        _bytes(entry["dram_write_bytes"]),
    )


def _seconds(value: float | None) -> str:
    return format_value(value, "s", 4)


def _bytes(value: float | None) -> str:
    return format_value(value, "B", 4)


def _count(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.0f}"
