"""The analysis of traces, and the difference of two, as text for a terminal or in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from joulemark.metrics import format_value
from joulemark.records import Json, Table
from joulemark.report.escape import printable, shorten
from joulemark.report.formats import percent, table_of

_SHOWN = 10
_SHOWN_GAPS = 5
_NAME_WIDTH = 32

_CAUSE_TITLES = {
    "framework": "framework, between launches",
    "launch_call": "in the launch call",
    "queued": "launched, not begun",
    "copy": "in a copy call",
    "synchronize": "in a synchronizing call",
    "runtime_call": "in another runtime call",
    "input": "waiting for input",
    "outside_operators": "host outside operators",
    "profiler": "the profiler itself",
    "tail": "tail of the iteration",
    "unknown": "host not recorded",
}


def tables(document: Mapping[str, Json]) -> Iterator[Table]:
    """Of the document of :func:`joulemark.trace.analyse_files`, or of :func:`joulemark.trace.diff`."""
    if "base" in document:
        yield from _diff_tables(document)
        return
    for entry in document["files"]:
        yield from _file_tables(entry)


def _file_tables(entry: Mapping[str, Any]) -> list[Table]:
    """One file of the document as tables: its figures with all findings, then what they are made of."""
    if entry["error"]:
        return [Table((), (), title=entry["path"], notes=(f"not read: {entry['error']}",))]
    parts = (
        _summary(entry),
        _idle(entry),
        _iterations(entry),
        _shares("operator", entry["operators"]),
        _shares("module", entry["modules"] or []),
        _copies(entry),
        _gaps(entry),
    )
    return [part for part in parts if part.rows]


def _seconds(value: float | None) -> str:
    return format_value(value, "s", 4)


def _percent(value: float | None) -> str:
    return percent(value, 2)


def _count(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _notices(entry: Mapping[str, Any]) -> Iterator[str]:
    for finding in entry["findings"]:
        remedy = f": {finding['remedy']}" if finding["remedy"] else ""
        yield f"{'INCOMPLETE' if finding['flags'] else 'note'}: {finding['message']}{remedy}"
    if "iterations" in entry["notes"]:
        yield f"iterations: {entry['notes']['iterations']}"


def _summary(entry: Mapping[str, Any]) -> Table:
    depth, latency = entry["queue_depth"] or {}, entry["launch_latency_s"] or {}
    rows = [
        ("device span, first to last event", _seconds(entry["span_s"])),
        ("kernel time (sum)", _seconds(entry["kernel_time_s"])),
        ("kernel busy (union)", _seconds(entry["kernel_busy_s"])),
        ("… of the span", _percent(entry["kernel_busy_fraction"])),
        ("device busy (union, with copies)", _seconds(entry["busy_s"])),
        ("… of the span", _percent(entry["gpu_busy_fraction"])),
        ("exposed overhead in the span", _seconds(entry["exposed_overhead_s"])),
        ("kernels", _count(entry["kernels"])),
        ("kernel launch calls", _count(entry["launches"])),
        ("copies", _count(entry["copies"])),
        ("launch latency, median", _seconds(latency.get("median"))),
        ("launch latency, 95th percentile", _seconds(latency.get("p95"))),
        ("queue depth, mean", _count(depth.get("mean"))),
        ("queue depth, maximum", _count(depth.get("max"))),
        ("operators on the host", _count(entry["host_operators"])),
    ]
    if entry["unattributed_kernels"]:
        rows.append(("unattributed kernels", _count(entry["unattributed_kernels"])))
    if entry["invalid_events"]:
        rows.append(("device events with invalid times", _count(entry["invalid_events"])))
    title = entry["path"] if entry["complete"] else f"{entry['path']} (INCOMPLETE)"
    return table_of(title, ("figure", "value"), rows, tuple(_notices(entry)))


def _idle(entry: Mapping[str, Any]) -> Table:
    causes = [(cause, value) for cause, value in (entry["idle_s"] or {}).items() if value]
    total = sum(value for _, value in causes)
    rows = [
        (_CAUSE_TITLES.get(cause, cause), _seconds(value), _percent(value / total))
        for cause, value in sorted(causes, key=lambda item: -item[1])
    ]
    return table_of("why the device was idle in its span", ("cause", "time", "share"), rows)


def _iterations(entry: Mapping[str, Any]) -> Table:
    rows = [
        (
            row["name"],
            _seconds(row["wall_s"]),
            _seconds(row["busy_s"]),
            _seconds(row["exposed_overhead_s"]),
            _seconds(row["host_issue_s"]),
            _percent(row["hidden_ratio"]),
            _count(row["kernels"]),
        )
        for row in entry["iterations"][:_SHOWN]
    ]
    columns = ("iteration", "wall", "busy", "exposed overhead", "host issue", "hidden", "kernels")
    return table_of("iterations", columns, rows, _more(entry["iterations"], _SHOWN))


def _more(entries: Sequence[Any], shown: int) -> tuple[str, ...]:
    left = len(entries) - shown
    return (f"and {left} more (--json has them all)",) if left > 0 else ()


def _shares(what: str, entries: Sequence[Mapping[str, Any]]) -> Table:
    total = sum(row["device_time_s"] for row in entries)
    rows = [
        (
            row["name"],
            _seconds(row["device_time_s"]),
            _percent(row["device_time_s"] / total if total else None),
            _count(row["kernels"]),
            _count(row["copies"]),
        )
        for row in entries[:_SHOWN]
    ]
    columns = (what, "device time", "share", "kernels", "copies")
    return table_of(f"device time by {what}", columns, rows, _more(entries, _SHOWN))


def _copies(entry: Mapping[str, Any]) -> Table:
    rows = [
        (
            row["name"],
            _count(row["copies"]),
            _seconds(row["time_s"]),
            format_value(row["bytes"], "B", 4),
            "n/a" if row["bandwidth_bytes_per_s"] is None else f"{row['bandwidth_bytes_per_s'] / 1e9:.4g} GB/s",
        )
        for row in entry["copy_kinds"]
    ]
    return table_of("copies and sets", ("copy or set", "count", "time", "bytes", "bandwidth"), rows)


def _gaps(entry: Mapping[str, Any]) -> Table:
    rows = []
    nothing = "n/a" if entry["host_operators"] is None else "outside operators and calls"
    for gap in entry["idle_gaps"][:_SHOWN_GAPS]:
        cause = max(gap["idle_s"], key=gap["idle_s"].get, default="unknown")
        host = gap["host"][0]["name"] if gap["host"] else nothing
        at = f"{_seconds(gap['start_s'])} on device {gap['device']}"
        before = shorten(printable(gap["before"]), _NAME_WIDTH)
        rows.append((_CAUSE_TITLES.get(cause, cause), _seconds(gap["duration_s"]), at, host, before))
    columns = ("cause", "idle for", "at", "host in", "ended by")
    return table_of("longest idle gaps", columns, rows, numeric={1, 2})


def _diff_tables(difference: Mapping[str, Json]) -> Iterator[Table]:
    """The difference of two traces as tables."""
    per = "means per iteration" if difference["basis"] == "iteration" else "whole traces"
    state = "" if difference["complete"] else " (INCOMPLETE)"
    title = f"{difference['base']['path']} → {difference['new']['path']}, {per}{state}"
    notes = tuple(f"{key}: {note}" for key, note in difference["notes"].items())
    yield _changes(title, "figure", difference["metrics"], notes)
    causes = [{**row, "name": _CAUSE_TITLES.get(row["name"], row["name"])} for row in difference["idle"]]
    yield from _unless_empty(_changes("why the device was idle", "cause", causes, unit="s"))
    yield from _unless_empty(_changes("device time by operator", "operator", difference["operators"], unit="s"))
    for side in ("new", "base"):
        rows = difference[f"only_in_{side}"]
        yield from _unless_empty(_changes(f"operators only in {side}", "operator", rows, unit="s"))


def _unless_empty(table: Table) -> Iterator[Table]:
    if table.rows:
        yield table


def _changes(
    title: str, what: str, rows: Sequence[Mapping[str, Any]], notes: tuple[str, ...] = (), unit: str = ""
) -> Table:
    shown = [_change(row, unit) for row in rows[:_SHOWN]]
    return table_of(title, (what, "base", "new", "change", "new / base"), shown, (*notes, *_more(rows, _SHOWN)))


def _change(row: Mapping[str, Any], unit: str) -> tuple[str, ...]:
    is_time = unit == "s" or row["name"].endswith("_s")
    show = _seconds if is_time else _percent if row["name"].endswith(("_ratio", "_fraction")) else _count
    change = row["change"]
    signed = "n/a" if change is None else f"{'+' if change > 0 else ''}{show(change)}"
    ratio = "n/a" if row["ratio"] is None else f"{row['ratio']:.3f}"
    return row["name"], show(row["base"]), show(row["new"]), signed, ratio
