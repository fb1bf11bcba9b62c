"""Per-kernel counters as one strict-JSON document: kernels, classes and levels, schema ``joulemark/counters/1``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from joulemark.errors import NotPermitted, UnreadableInput
from joulemark.records import Json
from joulemark.utilization.kernels import CLASSES, Classified, classify
from joulemark.utilization.ncu_csv import Export, Launch, Number, read_export

SCHEMA = "joulemark/counters/1"

_WHOLE = ".pct_of_peak_sustained_elapsed"
_SUMS: dict[str, tuple[str, ...]] = {
    "time_s": ("gpu__time_duration.sum", "gpu__time_duration.max", "gpu__time_duration.avg", "Duration"),
    "cycles": ("sm__cycles_elapsed.max", "gpc__cycles_elapsed.max", "Elapsed Cycles"),
    "instructions": ("smsp__inst_executed.sum", "sm__inst_executed.sum", "Executed Instructions"),
    "tensor_instructions": ("sm__inst_executed_pipe_tensor.sum", "smsp__inst_executed_pipe_tensor.sum"),
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    "l2_bytes": ("lts__t_bytes.sum",),
    "l1_bytes": ("l1tex__t_bytes.sum",),
}
"""Figures that add up over launches, and the counters that hold them, the first that was collected."""

_LEVELS: dict[str, tuple[str, ...]] = {
    "sm_active_fraction": (f"sm__cycles_active.avg{_WHOLE}",),
    "issue_slot_fraction": (
        f"smsp__issue_active.avg{_WHOLE}",
        f"sm__inst_issued.avg{_WHOLE}",
        f"smsp__inst_issued.avg{_WHOLE}",
        f"sm__inst_executed.avg{_WHOLE}",
        f"smsp__inst_executed.avg{_WHOLE}",
    ),
    "tensor_active_fraction": (
        f"sm__pipe_tensor_cycles_active.avg{_WHOLE}",
        f"sm__pipe_tensor_cycles_active.sum{_WHOLE}",
    ),
    "fp64_active_fraction": (f"sm__pipe_fp64_cycles_active.avg{_WHOLE}",),
    "l1_fraction": (f"l1tex__throughput.avg{_WHOLE}",),
    "l2_fraction": (f"lts__throughput.avg{_WHOLE}",),
    "dram_fraction": (f"dram__throughput.avg{_WHOLE}", f"gpu__dram_throughput.avg{_WHOLE}"),
}
"""Shares of peak over a launch's whole time, in percent as collected."""

_SUB_PARTITIONS = 4
"""Of an SM, on Volta and later: warp instructions that it can issue in a cycle."""
_FACTS = ("device__attribute_", "profiler__")
_FIELDS = (*_SUMS, *_LEVELS)


@dataclass(frozen=True)
class _Row:
    """A launch with its class and figures; a figure that was not collected is None."""

    launch: Launch
    kind: Classified
    figures: Mapping[str, float | None]


@dataclass(frozen=True)
class _Whole:
    """What every group refers to: the time of all launches, and why figures are null in all of them."""

    time_s: float | None
    notes: Mapping[str, str]


def read_files(paths: Sequence[Path]) -> dict[str, Json]:
    """The document of ``joulemark counters --json`` (``docs/schema/counters.schema.json``).

    Launches of all files are joined: time, bytes and instructions add up, shares of peak are means weighted by time.
    A file that cannot be read has ``error`` and counts for nothing.
    """
    rows: list[_Row] = []
    files = []
    for path in paths:
        entry, found = _file(Path(path))
        files.append(entry)
        rows += found
    whole = _Whole(_added(rows, "time_s"), _notes(rows))
    return {
        "schema": SCHEMA,
        "tier": "ncu",
        "files": files,
        "notes": dict(whole.notes),
        "units": _units(rows),
        "totals": _group(rows, whole),
        "classes": _groups(rows, whole, lambda row: {"class": row.kind.kernel_class}),
        "kernels": _groups(rows, whole, lambda row: {"name": row.launch.kernel, "class": row.kind.kernel_class}),
    }


def exit_code(document: Mapping[str, Json]) -> int:
    """2 when a file could not be read, else 3 when one is damaged, else 0."""
    states = {entry["status"] for entry in document["files"]}
    return 2 if states & {"unreadable", "no_permission"} else 3 if "damaged" in states else 0


def _file(path: Path) -> tuple[dict[str, Json], list[_Row]]:
    entry: dict[str, Json] = {
        "path": os.fsencode(path).decode("utf-8", "replace"),
        "status": "ok",
        "error": None,
        "findings": [],
        "gpus": [],
        "launches": None,
        "rows": None,
    }
    try:
        export = read_export(path)
    except (UnreadableInput, NotPermitted) as error:
        status = "no_permission" if isinstance(error, NotPermitted) else "unreadable"
        return {**entry, "status": status, "error": str(error).encode("utf-8", "replace").decode()}, []
    rows = [_row(launch) for launch in export.launches]
    entry.update(
        status="damaged" if any(one.flags for one in export.findings) else "ok",
        findings=[one.to_json() for one in export.findings],
        gpus=_gpus(export),
        launches=len(rows),
        rows=[_launch_entry(row) for row in rows],
    )
    return entry, rows


def _gpus(export: Export) -> list[str]:
    names = (launch.texts.get("device__attribute_display_name") for launch in export.launches)
    return sorted({name for name in names if name})


def _launch_entry(row: _Row) -> dict[str, Json]:
    launch = row.launch
    kept = {name: one.value for name, one in launch.readings.items() if not name.startswith(_FACTS)}
    return {
        "id": launch.number,
        "process": launch.process,
        "device": launch.device or None,
        "name": launch.kernel,
        "class": row.kind.kernel_class,
        **_provenance([row]),
        "counters": kept,
    }


def _provenance(rows: Sequence[_Row]) -> dict[str, Json]:
    kinds = [row.kind for row in rows]
    uses = {kind.uses_tensor_cores for kind in kinds}
    return {
        "class_source": "counters" if any(kind.source == "counters" for kind in kinds) else "name",
        "uses_tensor_cores": uses.pop() if len(uses) == 1 else None,
    }


def _row(launch: Launch) -> _Row:
    figures: dict[str, float | None] = {name: _first(launch, counters) for name, counters in _SUMS.items()}
    for name, counters in _LEVELS.items():
        percent = _first(launch, counters)
        figures[name] = None if percent is None else percent / 100
    if figures["issue_slot_fraction"] is None:
        figures["issue_slot_fraction"] = _issue_slots(launch, figures["instructions"])
    kind = classify(
        launch.kernel, figures["tensor_active_fraction"], figures["tensor_instructions"], figures["instructions"]
    )
    return _Row(launch, kind, figures)


def _first(launch: Launch, counters: Iterable[str]) -> Number | None:
    return next((value for name in counters if (value := launch.value(name)) is not None), None)


def _issue_slots(launch: Launch, instructions: float | None) -> float | None:
    """Warp instructions over what the sub-partitions could have issued in the launch's cycles."""
    slots = launch.value("smsp__cycles_elapsed.sum")
    if slots is None:
        per_sm = launch.value("sm__cycles_elapsed.sum")
        slots = None if per_sm is None else _SUB_PARTITIONS * per_sm
    return None if instructions is None or not slots else instructions / slots


def _groups(rows: Sequence[_Row], whole: _Whole, key: Callable[[_Row], dict[str, str]]) -> list[dict[str, Json]]:
    """Rows by key, the longest time first (by launches where times are missing)."""
    grouped: dict[tuple[str, ...], list[_Row]] = {}
    for row in rows:
        grouped.setdefault(tuple(key(row).values()), []).append(row)
    entries = [{**key(group[0]), **_provenance(group), **_group(group, whole)} for group in grouped.values()]
    return sorted(entries, key=lambda one: (-(one["time_s"] or 0.0), -one["launches"], CLASSES.index(one["class"])))


def _group(rows: Sequence[_Row], whole: _Whole) -> dict[str, Json]:
    """Figures of some launches: sums, and means of shares of peak, weighted by time (Σ t·u / Σ t)."""
    figures: dict[str, Json] = {"launches": len(rows), **{name: _added(rows, name) for name in _SUMS}}
    time = figures["time_s"]
    figures["time_share"] = time / whole.time_s if whole.time_s and time is not None else None
    figures["no_tensor_time_s"] = _no_tensor_time(rows)
    figures["no_tensor_source"] = _no_tensor_source(rows)
    figures.update({name: _weighted(rows, name) for name in _LEVELS})
    counters = _counter_sums(rows)
    notes = {name: _why(rows, name) for name, value in figures.items() if value is None and name not in whole.notes}
    notes.update({name: "not available for all launches" for name, value in counters.items() if value is None})
    return {**figures, "counters": counters, "notes": {} if "*" in whole.notes else notes}


def _why(rows: Sequence[_Row], name: str) -> str:
    if name == "no_tensor_time_s" and any(row.kind.uses_tensor_cores is None for row in rows):
        return "neither counters nor the name of a kernel say whether it uses tensor cores"
    missing = _missing(rows, name) if name in _FIELDS else 0
    if missing:
        return f"not available for {missing} of {len(rows)} launches"
    return "the time is not available for all launches, or is 0"


def _missing(rows: Sequence[_Row], name: str) -> int:
    return sum(row.figures[name] is None for row in rows)


def _no_tensor_time(rows: Sequence[_Row]) -> Number | None:
    """Time in kernels that use no tensor core; None where that is not known of all."""
    if not rows or any(row.kind.uses_tensor_cores is None for row in rows):
        return None
    return _sum([row.figures["time_s"] for row in rows if not row.kind.uses_tensor_cores])


def _no_tensor_source(rows: Sequence[_Row]) -> str:
    """What the time without tensor cores rests on: ``counters``, ``name`` or both; empty without rows."""
    told = {"counters" if row.kind.by_counters else "name" for row in rows}
    return " and ".join(sorted(told))


def _added(rows: Sequence[_Row], name: str) -> Number | None:
    return _sum([row.figures[name] for row in rows]) if rows else None


def _sum(values: Sequence[float | None]) -> Number | None:
    """The sum, exact for integers; None where a value is missing, because a part of a sum is no sum."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(known) if all(isinstance(value, int) for value in known) else math.fsum(known)


def _weighted(rows: Sequence[_Row], name: str) -> float | None:
    pairs = [(row.figures["time_s"], row.figures[name]) for row in rows]
    known = [(time, share) for time, share in pairs if time is not None and share is not None]
    total = math.fsum(time for time, _ in known)
    if len(known) < len(pairs) or not total:
        return None
    return math.fsum(time * share for time, share in known) / total


def _counter_sums(rows: Sequence[_Row]) -> dict[str, Json]:
    """Plain sums of every counter of kind ``.sum``, in base units; None where a launch lacks it."""
    names = {name: None for row in rows for name in row.launch.readings if _adds(name)}
    return {name: _sum([row.launch.value(name) for row in rows]) for name in names}


def _adds(name: str) -> bool:
    return name.endswith(".sum") and not name.startswith(_FACTS)


def _units(rows: Sequence[_Row]) -> dict[str, str]:
    units: dict[str, str] = {}
    for row in rows:
        for name, reading in row.launch.readings.items():
            if not name.startswith(_FACTS):
                units.setdefault(name, reading.unit)
    return units


def _notes(rows: Sequence[_Row]) -> dict[str, str]:
    """Why a figure is null in every group."""
    if not rows:
        return {"*": "no launch was read"}
    notes = {}
    for name in _FIELDS:
        if _missing(rows, name) == len(rows):
            notes[name] = f"{(_SUMS | _LEVELS)[name][0]} was not collected"
    if "time_s" in notes:
        notes.update(
            {name: notes["time_s"] for name in ("time_share", "no_tensor_time_s", *_LEVELS) if name not in notes}
        )
    return notes
