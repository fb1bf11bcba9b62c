"""Training series of stored runs as one document: plateaus, levels beside published ones, and a waterfall per cell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from joulemark.metrics import LEVELS
from joulemark.records import Case, Json, Record, Run
from joulemark.utilization.curves import THROUGHPUT, best_equipped_last, by_batch, plateau_of, points_of
from joulemark.utilization.plateau import Plateau
from joulemark.utilization.refine import Refined, refine
from joulemark.utilization.waterfall import Waterfall, class_shares, no_tensor_share, waterfall_of

SCHEMA = "joulemark/utilization/1"

PUBLISHED: Mapping[str, Json] = {
    "source": "Delestrac et al., Multi-Level Analysis of GPU Utilization in ML Training Workloads, DATE 2024",
    "tensor_active_fraction": 0.052,
    "issue_slot_fraction": 0.5,
    "meaning": "upper limits of what was seen there over training workloads whose GPU was busy all the time",
}
"""What the figures at the plateau stand beside."""

_CURVES = ("gpu_busy_fraction", *LEVELS)
"""Levels whose own plateau is looked for."""
_BESIDE = ("tensor_active_fraction", "dram_fraction", "sm_active_fraction")
_WORK = ("step_flops", "counted_flops", "achieved_flop_per_s", "peak_flop_per_s", "peak_fraction")


@dataclass(frozen=True)
class _Cell:
    """One batch size of a series: its records, of one or several runs; the best equipped tells the details."""

    batch: int
    records: tuple[Record, ...]

    @property
    def last(self) -> Record:
        return self.records[-1]


@dataclass(frozen=True)
class _Series:
    """A case without its batch size, and what was measured of it.

    Args:
        did_not_fit: the smallest batch that did not; None where all did.
        eager_flops: batch → FLOP of the same step in eager mode.
    """

    case: Case
    cells: tuple[_Cell, ...]
    did_not_fit: int | None
    eager_flops: Mapping[int, float]

    def plateau(self, metric: str) -> Plateau | None:
        """Of a metric over the batch sizes that have it; None where none has, or a pipe is never used."""
        measured = {cell.batch: cell.records for cell in self.cells}
        used = any(level > 0 for point in points_of(measured, metric) for level in point.processes)
        return plateau_of(measured, self.did_not_fit, metric) if used else None


def document_of(runs: Sequence[Run], per_kernel: Mapping[str, Json] | None = None) -> dict[str, Json]:
    """The document of ``joulemark utilization --json`` (``docs/schema/utilization.schema.json``).

    A series is what differs in its batch size alone. A plateau is that of one run where one has enough batch sizes
    (:func:`joulemark.utilization.curves.plateau_of`); of a cell that several runs measured, the best equipped one tells
    the details.

    Args:
        runs: as read from the store.
        per_kernel: case_id → counters of each of its kernels (:func:`joulemark.utilization.read_files`).
    """
    return {
        "schema": SCHEMA,
        "published": dict(PUBLISHED),
        "runs": [_run_entry(run) for run in runs],
        "series": [_series_entry(one, per_kernel or {}) for one in _series_of(runs)],
    }


def _run_entry(run: Run) -> dict[str, Json]:
    counters = {one.tiers.get("counters") for one in run.environments.values()}
    return {
        "file": Path(run.path).name,
        "run_id": run.run_id,
        "completed": run.completed,
        "wall_s": run.wall_s,
        "counters": counters.pop() if len(counters) == 1 else None,
        **({"simulated": True} if run.simulated else {}),
    }


def _series_of(runs: Sequence[Run]) -> Iterator[_Series]:
    """Series of training cases in the order of the runs; batch sizes rise."""
    groups: dict[str, list[Record]] = {record.case.series.case_id: [] for record in _training(runs)}
    flops: dict[str, dict[int, float]] = {}
    for record in _training(best_equipped_last(runs)):
        case = record.case
        groups[case.series.case_id].append(record)
        work = record.value("step_flops")
        if case.mode == "eager" and work is not None and case.batch_size is not None:
            flops.setdefault(_regardless(case), {})[case.batch_size] = work
    for members in groups.values():
        measured, did_not_fit = by_batch(members)
        if measured:
            cells = tuple(_Cell(batch, found) for batch, found in measured.items())
            case = members[0].case
            yield _Series(case.series, cells, did_not_fit, flops.get(_regardless(case), {}))


def _training(runs: Iterable[Run]) -> Iterator[Record]:
    for run in runs:
        yield from (one for one in run.records if one.case.phase == "train" and one.case.batch_size is not None)


def _regardless(case: Case) -> str:
    """What decides a step's FLOP besides its batch: neither the mode nor the function that swept it."""
    return replace(case, mode="eager", batch_size=None, benchmark=None, input=None).case_id


def _series_entry(series: _Series, per_kernel: Mapping[str, Json]) -> dict[str, Json]:
    case = series.case
    throughput = series.plateau(THROUGHPUT)
    curves = {level: found for level in _CURVES if (found := series.plateau(level)) is not None}
    return {
        **case.series_to_json(),
        "batch_sizes": [cell.batch for cell in series.cells],
        "did_not_fit": series.did_not_fit,
        "throughput_plateau": None if throughput is None else throughput.to_json(),
        "level_plateaus": {level: found.to_json() for level, found in curves.items()},
        "at_plateau": _at_plateau(series, throughput),
        "elasticity": _elasticities(series.cells),
        "cells": [_cell_entry(cell, series, per_kernel.get(cell.last.case_id)) for cell in series.cells],
    }


def _at_plateau(series: _Series, plateau: Plateau | None) -> dict[str, Json]:
    """Means over the batch sizes from the knee on; without a knee, of the largest one, and it says so."""
    knee = None if plateau is None else plateau.knee
    chosen = [cell for cell in series.cells if knee is not None and cell.batch >= knee] or [series.cells[-1]]
    entry: dict[str, Json] = {
        "reached": knee is not None,
        "batch_sizes": [cell.batch for cell in chosen],
    }
    for level in ("tensor_active_fraction", "issue_slot_fraction", "sm_active_fraction", "dram_fraction"):
        values = [value for cell in chosen if (value := cell.last.value(level)) is not None]
        entry[level] = fmean(values) if values else None
    shares = [share[0] for cell in chosen if (share := no_tensor_share(cell.last)) is not None]
    entry["no_tensor_share"] = fmean(shares) if shares else None
    missing = [name for name, value in entry.items() if value is None]
    notes = series.cells[-1].last.notes
    entry["notes"] = {name: notes.get(name, _NOT_COLLECTED) for name in missing}
    return entry


_NOT_COLLECTED = "not collected: --bench-collect timing,profiler,counters gives it"


def _elasticities(cells: Sequence[_Cell]) -> list[Json]:
    """Elasticity d ln(throughput) / d ln(peak memory) of neighbouring batch sizes; null where it stays."""
    out: list[Json] = []
    for small, large in pairwise(cells):
        rates, sizes = (
            [cell.last.value(name) or 0.0 for cell in (small, large)]
            for name in ("throughput_per_s", "peak_memory_bytes")
        )
        value = None
        if min(*rates, *sizes) > 0 and sizes[0] != sizes[1]:
            value = math.log(rates[1] / rates[0]) / math.log(sizes[1] / sizes[0])
        out.append({"from_batch": small.batch, "to_batch": large.batch, "value": value})
    return out


def _cell_entry(cell: _Cell, series: _Series, counted: Json) -> dict[str, Json]:
    refined = None if counted is None else refine(cell.last, counted)
    record = cell.last if refined is None else refined.record
    own = record.value("step_flops")
    found = waterfall_of(record, series.eager_flops.get(cell.batch) if own is None else None)
    share = no_tensor_share(record)
    memory = record.value("peak_memory_bytes")
    return {
        "batch_size": cell.batch,
        "case_id": record.case_id,
        "outcome": record.outcome,
        "step_s": _step_times(record),
        "throughput_per_s": record.value("throughput_per_s"),
        "peak_memory_bytes": memory,
        "memory_per_sample_bytes": None if memory is None else memory / cell.batch,
        "levels": {level: record.value(level) for level in _CURVES if record.value(level) is not None},
        "tiers": {level: record.metrics[level].tier for level in _CURVES if record.value(level) is not None},
        "work": {name: record.value(name) for name in _WORK},
        "phases": _phases(record),
        "no_tensor_share": None if share is None else {"certain": share[0], "at_most": share[1]},
        "class_shares": dict(class_shares(record)),
        "per_kernel": None if refined is None else _per_kernel(refined),
        "counters_overhead": record.value("counters_overhead"),
        "tiers_beside": _tiers_beside(record),
        "waterfall": found.to_json() if isinstance(found, Waterfall) else None,
        "notes": {} if isinstance(found, Waterfall) else {"waterfall": found},
        "findings": [one.code for one in record.findings],
    }


def _per_kernel(refined: Refined) -> dict[str, Json]:
    levels = {level: {"value": value, "seen": seen} for level, (value, seen) in refined.levels.items()}
    bound = {bar: {"time_s": time, "seen": seen} for bar, (time, seen) in refined.dram_bound.items()}
    return {"levels": levels, "moved": list(refined.moved), "dram_bound": bound}


def _step_times(record: Record) -> dict[str, float | None]:
    """The same step in three processes: their spread is what the waterfall cannot explain."""
    timeline = (record.tables.get("timeline") or [{}])[0]
    plain, counted = timeline.get("plain_s"), record.samples.get("uncounted_step_s")
    return {
        "timing": record.value("device_time_s"),
        "profiler": float(plain) if isinstance(plain, (int, float)) else None,
        "counters": median(counted) if counted else None,
    }


def _phases(record: Record) -> dict[str, dict[str, Json]]:
    """Phase → level → value, by the best instrument."""
    out: dict[str, dict[str, Json]] = {}
    rows = record.tables.get("levels", ())
    best = rows[0]["tier"] if rows else None
    for row in rows:
        if row["phase"] != "step" and row["tier"] == best:
            out.setdefault(str(row["phase"]), {})[str(row["level"])] = row["value"]
    return out


def _tiers_beside(record: Record) -> list[Json]:
    """Levels that two instruments read in the same minute, side by side."""
    rows = [row for row in record.tables.get("levels", ()) if row["phase"] == "step" and row["level"] in _BESIDE]
    tiers = dict.fromkeys(str(row["tier"]) for row in rows)
    if len(tiers) < 2:
        return []
    return [
        {"level": level, **{tier: value for tier in tiers for value in _value(rows, level, tier)}} for level in _BESIDE
    ]


def _value(rows: Sequence[Mapping[str, Json]], level: str, tier: str) -> list[Json]:
    return [row["value"] for row in rows if row["level"] == level and row["tier"] == tier]
