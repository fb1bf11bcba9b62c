"""What changed between two traces, by operator and by cause of idle time, schema ``joulemark/trace-diff/1``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from joulemark.errors import ConfigurationError
from joulemark.records import Json
from joulemark.trace.breakdown import CAUSES

DIFF_SCHEMA = "joulemark/trace-diff/1"

_PER_ITERATION = (
    "wall_s",
    "busy_s",
    "exposed_overhead_s",
    "copy_only_s",
    "host_issue_s",
    "hidden_ratio",
    "launches",
    "kernels",
)
_PER_TRACE = ("span_s", "busy_s", "kernel_time_s", "exposed_overhead_s", "gpu_busy_fraction", "launches", "kernels")


def diff(document_a: Mapping[str, Json], document_b: Mapping[str, Json]) -> dict[str, Json]:
    """Compares the single file of one analysis (base) with that of another (new).

    Where both have iterations, figures are means per iteration; else they are of the whole traces. A figure that
    one side lacks has no ratio. Incomplete traces are compared, and ``complete`` is false.

    Returns:
        ``base`` and ``new`` (``path``, ``complete``, ``error``), ``basis``, ``metrics``, ``operators`` and ``idle``
        (rows of ``name``, ``base``, ``new``, ``change``, ``ratio``; the largest change first, but metrics in a fixed
        order), ``only_in_base`` and ``only_in_new`` (operators), ``notes``.

    Raises:
        ConfigurationError: a document does not hold exactly one file.
    """
    base, new = _single(document_a), _single(document_b)
    iterations = bool(base["iterations"]) and bool(new["iterations"])
    figures = _iteration_figures if iterations else _trace_figures
    names = _PER_ITERATION if iterations else _PER_TRACE
    a, b = figures(base, names), figures(new, names)
    operators_a, operators_b = _operators(base, iterations), _operators(new, iterations)
    both = [name for name in operators_a if name in operators_b]
    sides = [{key: side[key] for key in ("path", "complete", "error")} for side in (base, new)]
    return {
        "schema": DIFF_SCHEMA,
        "base": sides[0],
        "new": sides[1],
        "complete": bool(base["complete"] and new["complete"]),
        "basis": "iteration" if iterations else "trace",
        "metrics": [_row(name, a.get(name), b.get(name)) for name in names],
        "operators": _by_change(_row(name, operators_a[name], operators_b[name]) for name in both),
        "only_in_base": _by_change(_row(n, operators_a[n], None) for n in operators_a if n not in operators_b),
        "only_in_new": _by_change(_row(n, None, operators_b[n]) for n in operators_b if n not in operators_a),
        "idle": _by_change(_row(cause, a["idle_s"].get(cause), b["idle_s"].get(cause)) for cause in CAUSES),
        "notes": _notes(base, new, iterations),
    }


def _single(document: Mapping[str, Json]) -> Mapping[str, Any]:
    files = document["files"]
    if len(files) != 1:
        raise ConfigurationError(f"a trace diff takes one file on each side, not {len(files)}", "give --diff A B")
    entry: Mapping[str, Any] = files[0]
    return entry


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _iteration_figures(entry: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    rows = entry["iterations"]
    figures: dict[str, Any] = {name: _mean([row[name] for row in rows]) for name in names}
    idle = [row["idle_s"] or {} for row in rows]
    return {**figures, "idle_s": {cause: _mean([row.get(cause) for row in idle]) for cause in CAUSES}}


def _trace_figures(entry: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {**{name: entry[name] for name in names}, "idle_s": entry["idle_s"] or {}}


def _operators(entry: Mapping[str, Any], iterations: bool) -> dict[str, float]:
    key = "device_time_per_iteration_s" if iterations else "device_time_s"
    return {row["name"]: row[key] for row in entry["operators"] or []}


def _row(name: str, base: float | None, new: float | None) -> dict[str, Json]:
    known = base is not None and new is not None
    return {
        "name": name,
        "base": base,
        "new": new,
        "change": new - base if base is not None and new is not None else None,
        "ratio": new / base if known and base and new is not None else None,
    }


def _by_change(rows: Any) -> list[dict[str, Json]]:
    """The largest change first; a row of one side alone counts with its whole value."""
    chosen = [row for row in rows if row["base"] or row["new"]]

    def size(row: Mapping[str, Json]) -> float:
        return abs(float(row["new"] or 0.0) - float(row["base"] or 0.0))

    return sorted(chosen, key=lambda row: (-size(row), row["name"]))


def _notes(base: Mapping[str, Any], new: Mapping[str, Any], iterations: bool) -> dict[str, str]:
    notes = {}
    for side, entry in (("base", base), ("new", new)):
        if entry["error"]:
            notes[side] = f"not read: {entry['error']}"
        elif not entry["complete"]:
            flagged = "; ".join(finding["message"] for finding in entry["findings"] if finding["flags"])
            notes[side] = f"incomplete: {flagged}"
        elif entry["busy_s"] is None:
            notes[side] = "no GPU events: its GPU figures are not measured"
    if not iterations:
        notes["basis"] = "not both traces have iterations: figures are of the whole traces, which may differ in length"
    return notes
