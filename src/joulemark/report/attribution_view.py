"""Counters of each kernel class, operator and module as text for a terminal or in Markdown, with a roofline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from joulemark.attribution.roofline import ends_of
from joulemark.attribution.stored import POOLED
from joulemark.metrics import format_value
from joulemark.records import Json, Table
from joulemark.report.escape import printable, shorten_apart
from joulemark.report.formats import percent, table_of
from joulemark.report.names import kernel_titles
from joulemark.utilization.kernels import TITLES

_SHOWN, _NAME_WIDTH = 15, 56
_POOLED = "too short to tell apart (pooled)"
_ROOFS = {"dram": "DRAM", "tensor": "tensor pipe"}
_COLUMNS = ("launches", "time", "share", "tensor pipe", "issue slots", "DRAM read", "DRAM written", "own rate")


def tables(document: Mapping[str, Json]) -> Iterator[Table]:
    """Clock and totals, then classes, roofline, kernels, operators and modules."""
    yield _summary(document)
    yield classes_table(document)
    if document["roofline"] is not None:
        yield roofline_table(document)
    kernels = document["kernels"]
    titles = kernel_titles([str(one["name"]) for one in kernels[:_SHOWN]], _NAME_WIDTH)
    yield _rows(kernels, "kernels", "kernel", lambda one: titles[str(one["name"])], _some)
    if document["operators"] is not None:
        yield _rows(document["operators"], "operators", "operator", lambda one: str(one["operator"]), _some)
    if document["modules"] is not None:
        yield _rows(document["modules"], "modules (forward calls)", "module", lambda one: str(one["module"]), _some)


def class_title(entry: Mapping[str, Any]) -> str:
    """What a reader calls a class."""
    if entry["class"] == POOLED:
        return _POOLED
    title, uses = TITLES[entry["class"]], entry["uses_tensor_cores"]
    if entry["class"] == "tensor_gemm" or uses is False:
        return title
    return f"{title}, {'on' if uses else 'perhaps on'} tensor cores"


def classes_table(document: Mapping[str, Any]) -> Table:
    """Classes of kernels with their counters."""
    return _rows(document["classes"], f"classes of kernels | {document['label']}", "class", class_title, len)


def placed(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Classes that a roofline can show: with FLOP and bytes, under measured roofs."""
    return [one for one in document["classes"] if _is_placed(document, one)]


def _is_placed(document: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Whether there are roofs, and both its FLOP and its bytes can be told from none."""
    return document["roofline"] is not None and entry["roofline"] is not None and not _untold(entry)


def _untold(entry: Mapping[str, Any]) -> str:
    """What of a class with FLOP and bytes cannot be told from none; nothing where all can."""
    place = entry["roofline"]["flop_per_byte"]
    least, most = ends_of(entry).get("flop_per_byte", (place, place))
    untold = {"FLOP": not least > 0, "DRAM bytes": most == math.inf}
    return " and ".join(what for what, is_so in untold.items() if is_so)


def unplaced(document: Mapping[str, Any]) -> Iterator[str]:
    """What a roofline cannot show, and why."""
    if document["roofline"] is None:
        yield f"no roofline: {document['notes'].get('roofline', 'its roofs were not measured')}"
        return
    for entry in document["classes"]:
        point = entry["roofline"]
        if point is None:
            yield f"{class_title(entry)}: its tensor cycles or DRAM bytes were not counted, or it moved none"
        elif not _is_placed(document, entry):
            rate = format_value(point["bytes_per_s"], "B/s", 3)
            untold = f"its {_untold(entry)} cannot be told from none"
            yield f"{class_title(entry)}: {untold}; its kernels move {rate} of DRAM"


def overview_table(name: str, document: Mapping[str, Any]) -> Table:
    """Classes of a recorded step, each under its roof.

    Args:
        name: of the step.
        document: of it.
    """
    columns = ("class", "time", "share", "of its roof", "roof", "FLOP/B", "FLOP/s", "DRAM", "tensor pipe",
               "issue slots")  # fmt: skip
    rows = [(class_title(entry), *_under(document, entry)) for entry in document["classes"]]
    return table_of(name, columns, rows, (), (1, 2, 3, 5, 6, 7, 8, 9))


def _under(document: Mapping[str, Any], entry: Mapping[str, Any]) -> Iterator[str]:
    yield from (_s(entry["time_s"]), percent(entry["time_share"]))
    if _is_placed(document, entry):
        point = entry["roofline"]
        yield from (percent(point["of_roof"]), _ROOFS[point["bound_by"]], f"{point['flop_per_byte']:.3g}")
        yield format_value(point["flop_per_s"], "FLOP/s", 3)
    else:
        yield from ("n/a",) * 4
    yield "n/a" if entry["roofline"] is None else format_value(entry["roofline"]["bytes_per_s"], "B/s", 3)
    yield from (_share(entry["counters"].get(name)) for name in ("pipe_tensor", "issue_active"))


def largest(document: Mapping[str, Any], most: int = 3) -> str:
    """The classes that take most time in a few words: ``elementwise 24 % (86 % of the DRAM's roof); …``."""
    said = []
    for entry in sorted(document["classes"], key=lambda one: -one["time_share"])[:most]:
        point = entry["roofline"] if _is_placed(document, entry) else None
        under = f" ({percent(point['of_roof'], 0)} of the {_ROOFS[point['bound_by']]}'s roof)" if point else ""
        said.append(f"{class_title(entry)} {percent(entry['time_share'], 0)}{under}")
    return "; ".join(said) or "no kernel was recorded"


def _summary(document: Mapping[str, Any]) -> Table:
    steps, windows, facts = document["steps"], document["clock"]["windows"], document["facts"]
    worst = max(one["uncertainty_s"] for one in windows)
    off = max((abs(one["check"]["best_s"]) for one in windows if one["check"]["telling"]), default=None)
    rows = [
        ("GPU", str(facts.get("gpu", "n/a"))),
        ("steps, in windows", f"{steps['recorded']}, {len(windows)}"),
        ("step without instruments, with both", f"{_s(steps['plain_s'])}, {_s(steps['recorded_s'])}"),
        ("slower beside both", _slower(steps)),
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


def _slower(steps: Mapping[str, Json]) -> str:
    if steps["slowdown"] is None:
        return "n/a"
    ends, bare = steps["slowdown_interval"], steps["slowdown_from_bare"]
    interval = "" if ends is None else f" [{ends[0]:+.1%}, {ends[1]:+.1%}]"
    return f"{steps['slowdown']:+.1%}{interval}" + ("" if bare is None else f"; {bare:+.1%} than a bare process")


def _some(entries: Sequence[Any]) -> int:
    return min(len(entries), _SHOWN)


def _rows(entries: Sequence[Mapping[str, Any]], title: str, first: str, label: Any, shown: Any) -> Table:
    n = shown(entries)
    shown_as = [printable(label(one)) for one in entries[:n]]
    short = shorten_apart(shown_as, _NAME_WIDTH)
    rows = tuple((short[name], *_figures(one)) for name, one in zip(shown_as, entries[:n], strict=True))
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


def roofline_table(document: Mapping[str, Any]) -> Table:
    """Classes under the roofs, where these were measured."""
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
