"""Counters of each kernel class, operator and module as text for a terminal or in Markdown, with a roofline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from joulemark.metrics import format_value
from joulemark.records import Json, Table
from joulemark.report.escape import printable, shorten
from joulemark.report.formats import percent, table_of
from joulemark.utilization.kernels import TITLES

_SHOWN, _NAME_WIDTH = 15, 56
_POOLED = "too short to tell apart (pooled)"
_COLUMNS = ("launches", "time", "share", "tensor pipe", "issue slots", "DRAM read", "DRAM written", "own rate")


def tables(document: Mapping[str, Json]) -> Iterator[Table]:
    """Clock and totals, then classes, roofline, kernels, operators and modules."""
    yield _summary(document)
    yield _rows(document["classes"], f"classes of kernels | {document['label']}", "class", class_title, len)
    if document["roofline"] is not None:
        yield _roofline(document)
    yield _rows(document["kernels"], "kernels", "kernel", lambda one: str(one["name"]), _some)
    yield _rows(document["operators"], "operators", "operator", lambda one: str(one["operator"]), _some)
    if document["modules"] is not None:
        yield _rows(document["modules"], "modules (forward calls)", "module", lambda one: str(one["module"]), _some)


def class_title(entry: Mapping[str, Any]) -> str:
    """What a reader calls a class."""
    title = _POOLED if entry["class"] == "pooled" else TITLES[entry["class"]]
    return f"{title}, on tensor cores" if entry["class"] == "attention" and entry["uses_tensor_cores"] else title


def _summary(document: Mapping[str, Any]) -> Table:
    steps, windows, facts = document["steps"], document["clock"]["windows"], document["facts"]
    worst = max(one["uncertainty_s"] for one in windows)
    off = max((abs(one["check"]["best_s"]) for one in windows if one["check"]["telling"]), default=None)
    rows = [
        ("GPU", str(facts.get("gpu", "n/a"))),
        ("steps, in windows", f"{steps['recorded']}, {len(windows)}"),
        ("step without instruments, with both", f"{_s(steps['plain_s'])}, {_s(steps['recorded_s'])}"),
        ("sample", _s(document["sampling"]["interval_s"])),
        ("standard error of the clocks", _s(worst)),
        ("best offset by the counts (largest of all windows)", _s(off)),
        *(
            (f"kernels' {name} over the run's", f"{one['ratio']:.4f}")
            for name, one in document["counters"].items()
            if one["ratio"] is not None and name in ("pipe_tensor", "dram_read_bytes", "dram_write_bytes")
        ),
    ]
    notes = [f"{one['message']} ({one['remedy']})" if one["remedy"] else one["message"] for one in document["findings"]]
    notes += [f"{name}: {reason}" for name, reason in document["notes"].items()]
    return table_of(f"attribution | {document['label']}", ("figure", "value"), rows, notes)


def _some(entries: Sequence[Any]) -> int:
    return min(len(entries), _SHOWN)


def _rows(entries: Sequence[Mapping[str, Any]], title: str, first: str, label: Any, shown: Any) -> Table:
    n = shown(entries)
    rows = tuple((shorten(printable(label(one)), _NAME_WIDTH), *_figures(one)) for one in entries[:n])
    notes = ["± half the 95 % interval; own rate: share of the time in kernels with a rate of their own"]
    if len(entries) > n:
        notes.append(f"and {len(entries) - n} more (--json has them all)")
    return table_of(title, (first, *_COLUMNS), rows, notes)


def _figures(entry: Mapping[str, Any]) -> Iterable[str]:
    counters, levels = entry["counters"], entry["by_level"]
    return (
        f"{entry['launches']:.4g}",
        _s(entry["time_s"]),
        percent(entry["time_share"]),
        _share(counters.get("pipe_tensor")),
        _share(counters.get("issue_active")),
        _bytes(counters.get("dram_read_bytes")),
        _bytes(counters.get("dram_write_bytes")),
        percent(levels.get("place", 0.0) + levels.get("kernel", 0.0), 0),
    )


def _share(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "n/a"
    half = "" if cell["interval"] is None else f" ±{(cell['interval'][1] - cell['interval'][0]) * 50:.1f}"
    return f"{cell['value'] * 100:.1f}{half} %"


def _bytes(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "n/a"
    value = format_value(cell["value"], "B", 3)
    if cell["interval"] is None or not cell["value"]:
        return value
    return f"{value} ±{(cell['interval'][1] - cell['interval'][0]) / 2 / cell['value']:.1%}"


def _s(value: float | None) -> str:
    return format_value(value, "s", 3)


def _roofline(document: Mapping[str, Any]) -> Table:
    roofs = document["roofline"]
    rows = []
    for entry in document["classes"]:
        point = entry["roofline"]
        if point is not None:
            rows.append(
                (
                    class_title(entry),
                    f"{point['flop_per_byte']:.3g}",
                    format_value(point["flop_per_s"], "FLOP/s"),
                    format_value(point["roof_flop_per_s"], "FLOP/s"),
                    percent(point["of_roof"]),
                    format_value(point["bytes_per_s"], "B/s"),
                    point["bound_by"],
                )
            )
    peaks = [format_value(roofs["flop_per_s"], "FLOP/s"), format_value(roofs["bytes_per_s"], "B/s")]
    notes = (
        f"roofs, both measured here: {peaks[0]} by a large product, {peaks[1]} by reading and writing a large array",
        "FLOP: tensor cycles × the product's FLOP per cycle, and 64 per instruction of the FMA pipe, which is the most",
    )
    columns = ("class", "FLOP/B", "FLOP/s", "roof", "of it", "DRAM", "roof of")
    return table_of("roofline", columns, rows, notes, range(1, 6))
