"""Stored sweeps with the profiler pass as one strict-JSON document, schema ``joulemark/tandem/1``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from joulemark.errors import ConfigurationError
from joulemark.metrics import PROFILER, find
from joulemark.records import Case, Environment, Finding, Json, Record, Row, Run, Value
from joulemark.tandem import in_turns, turns
from joulemark.tandem.crossover import Crossover, Point, find_crossover
from joulemark.tandem.in_turns import EVEN, FEW

SCHEMA = "joulemark/tandem/1"
METRICS = (
    "device_time_s",
    "host_issue_unprofiled_s",
    "host_reference_s",
    "exposed_overhead_unprofiled_s",
    *PROFILER,
    "peak_memory_bytes",
)
"""Figures of each row."""

_MEASURED = ("ok", "flagged")
_BURST, _QUEUE = 4, 1000
"""Steps of a burst, at most (:meth:`joulemark.collect.timing.CudaTimer.burst`); launches that a queue holds, about."""
_ALIKE = 0.05
"""How far two processes' times of the same work may be apart."""
_UNRECONCILED = ("kernels_and_launches_differ", "kernels_differ_between_iterations", "profiler_steps_lost")


def tandem_document(runs: Sequence[Run]) -> dict[str, Json]:
    """What stored sweeps say about the tandem of CPU and GPU (``docs/schema/tandem.schema.json``).

    Of a case that was measured in several runs one with a profile tells before one without, then the newest.

    Args:
        runs: in any order; of runs that began at one time the last is the newest.

    Raises:
        ConfigurationError: no record of the runs has figures of the profiler pass.
    """
    runs = sorted(runs, key=lambda one: one.started_utc or 0.0)
    records = _one_of_each(one for run in runs for one in run.records if one.outcome in _MEASURED)
    profiled = [one for one in records.values() if _profiled(one)]
    if not profiled:
        raise ConfigurationError(
            "no record holds the busy time of a profiled step on a GPU",
            "measure on a GPU with --bench-collect timing,profiler",
        )
    wanted = {one.case.series.case_id for one in profiled if one.case.batch_size is not None}
    groups: dict[str, list[Record]] = {}
    for record in records.values():
        key = record.case.series.case_id
        if key in wanted:
            groups.setdefault(key, []).append(record)
    issued, worked = (_rows_of(records.values(), table) for table in (turns.TABLE, turns.BUSY_TABLE))
    found = [_series(sorted(group, key=_batch_of), issued, worked) for group in groups.values()]
    modules = {_module(one.case) for one in profiled if one.case.batch_size is None}
    cells = [one for one in records.values() if one.case.batch_size is None and _module(one.case) in modules]
    used = {one.run_id for group in (*groups.values(), cells) for one in group}
    used |= {run_id for run_id, rows in issued.items() for one in found if _of_series(rows, one["rows"])}
    return {
        "schema": SCHEMA,
        "runs": [_run(run) for run in runs if run.run_id in used],
        "series": found,
        "against_eager": _against_eager(found),
        "cells": [_row(one, None) for one in cells],
    }


def _one_of_each(found: Iterable[Record]) -> dict[str, Record]:
    """Case → the record that tells most of it: with a profile before without, then the last."""
    records: dict[str, Record] = {}
    for one in found:
        before = records.get(one.case_id)
        if before is None or _profiled(one) or not _profiled(before):
            records[one.case_id] = one
    return records


def _profiled(record: Record) -> bool:
    return record.value("gpu_busy_s") is not None


def exit_code(document: Mapping[str, Json]) -> int:
    """3 when launches and kernels of a profile do not agree, else 0."""
    rows = [*document["cells"], *(row for one in document["series"] for row in one["rows"])]
    return 3 if any(row["kernels_reconciled"] is False for row in rows) else 0


def _module(case: Case) -> str:
    """The benchmark's file of a case that is a function: its other cells are what a profiled one is compared with."""
    return case.workload.rpartition(".")[0]


def _batch_of(record: Record) -> int:
    return record.case.batch_size or 0


def _run(run: Run) -> dict[str, Json]:
    environment = next(iter(run.environments.values()), Environment({}))
    facts = environment.facts
    return {
        "file": Path(run.path).name,
        "run_id": run.run_id,
        "started_utc": run.started_utc,
        "completed": run.completed,
        "gpus": [one.get("name") for one in environment.gpus] or None,
        "driver": facts.get("driver"),
        "torch": facts.get("torch"),
        **({"simulated": True} if run.simulated else {}),
    }


def _rows_of(records: Iterable[Record], table: str) -> dict[str, list[Row]]:
    """Run → what its tables of this name hold, in the order of the runs."""
    found: dict[str, list[Row]] = {}
    for one in records:
        if rows := one.tables.get(table):
            found.setdefault(one.run_id, []).extend(rows)
    return found


def _of_series(turns_of_run: Iterable[Row], rows: Iterable[Mapping[str, Json]]) -> list[Row]:
    """Those of the cases of a series."""
    cases = {row["case_id"] for row in rows}
    return [one for one in turns_of_run if one["case_id"] in cases]


def _series(
    records: Sequence[Record], issued: Mapping[str, list[Row]], worked: Mapping[str, list[Row]]
) -> dict[str, Json]:
    """One model in one mode over its batch sizes.

    Args:
        issued: run → tables ``issue_turns``; a series counts by the last run that has its cases.
        worked: run → tables ``busy_turns``.
    """
    speed_s = _fastest_reference(records)
    rows = [_row(one, speed_s) for one in records]
    crossover = crossover_of(records)
    turned = [_of_series(one, rows) for one in issued.values()]
    profiled = [_of_series(worked.get(run_id, ()), rows) for run_id in issued]
    return {
        **records[0].case.series_to_json(),
        "rows": rows,
        "crossover": crossover.to_json(),
        "crossover_at_one_speed": None if speed_s is None else crossover_of(records, speed_s).to_json(),
        "crossover_profiled": _crossover(records, "host_issue_s").to_json(),
        "memory": _memory(records, crossover),
        "host_issue_per_operator": _evenness(rows, "host_issue_per_operator_s"),
        "host_issue_per_operator_unprofiled": _evenness(rows, "host_issue_per_operator_unprofiled_s"),
        "host_issue_per_operator_at_one_speed": _evenness(rows, "host_issue_per_operator_at_one_speed_s"),
        "host_issue_per_operator_in_turns": in_turns.issue(rows, turned),
        "exposed_from_twice_the_crossover": _exposed_beyond(rows, crossover),
        "exposed_rises": _rises(rows),
        "exposed_in_turns": in_turns.exposed(rows, turned, profiled),
    }


def _fastest_reference(records: Sequence[Record]) -> float | None:
    """The host's issue time of the reference work in the cell that found it fastest, in s; None where none has it."""
    known = [value for one in records if (value := one.value("host_reference_s"))]
    return min(known, default=None)


def _at_speed(record: Record, speed_s: float | None) -> list[float] | None:
    """Issue times as the host would have had them at one speed, in s: each scaled by the reference beside it."""
    issue, reference = (record.samples.get(name) for name in ("host_issue_unprofiled_s", "host_reference_s"))
    if speed_s is None or not issue or not reference or len(issue) != len(reference):
        return None
    return [one * speed_s / beside for one, beside in zip(issue, reference, strict=True)]


def _row(record: Record, speed_s: float | None) -> dict[str, Json]:
    """One cell: its figures, what follows from them, and the idle time of a profiled step by cause.

    Args:
        speed_s: issue time of the host's reference work at the speed that the series is compared at, in s.
    """
    at_speed, operators = _at_speed(record, speed_s), record.value("operators_per_step")
    notes = dict(record.notes)
    figures = {name: record.metrics.get(name) or Value(None, find(name).unit) for name in METRICS}
    for name, value in figures.items():
        if value.value is None:
            notes.setdefault(name, "not measured in this run")
    derived = {
        "exposed_share": _over(record, "exposed_overhead_unprofiled_s", "device_time_s"),
        "exposed_share_profiled": _over(record, "exposed_overhead_s", "gpu_busy_s", add=True),
        "hidden_ratio_unprofiled": _complement(
            _over(record, "exposed_overhead_unprofiled_s", "host_issue_unprofiled_s")
        ),
        "host_issue_per_operator_unprofiled_s": _over(record, "host_issue_unprofiled_s", "operators_per_step"),
        "host_issue_per_operator_at_one_speed_s": median(at_speed) / operators if at_speed and operators else None,
        "process_drift": _process_drift(record),
        "kernels_reconciled": _reconciled(record),
    }
    for name, number in derived.items():
        if number is None:
            notes[name] = "one of the figures that it is made of was not measured"
    known = {*figures, *derived}
    return {
        "label": record.case.label,
        "batch_size": record.case.batch_size,
        "params": dict(record.case.params),
        "case_id": record.case_id,
        "run_id": record.run_id,
        "outcome": record.outcome,
        "metrics": {name: value.to_json() for name, value in figures.items()},
        **derived,
        "idle_s": idle_by_cause(record),
        "findings": [one.to_json() for one in record.findings],
        "notes": {name: why for name, why in notes.items() if name in known},
    }


def _over(record: Record, upper: str, lower: str, add: bool = False) -> float | None:
    """A figure over another; with ``add`` over the sum of both."""
    top, bottom = record.value(upper), record.value(lower)
    if top is None or bottom is None:
        return None
    whole = bottom + top if add else bottom
    return top / whole if whole else None


def _complement(share: float | None) -> float | None:
    return None if share is None else 1 - share


def _process_drift(record: Record) -> float | None:
    """Unprofiled step in the process that profiles over the step in the process that times, minus 1."""
    plain, step = record.samples.get("plain_step_s"), record.value("device_time_s")
    return median(plain) / step - 1 if plain and step else None


def _reconciled(record: Record) -> bool | None:
    """Whether each profiled step has the kernels that its launches ask for; None without a profile."""
    if record.value("kernels_per_step") is None or record.value("launches_per_step") is None:
        return None
    return not any(one.code in _UNRECONCILED for one in record.findings)


def idle_by_cause(record: Record) -> dict[str, float]:
    """Medians over the profiled steps of the idle time by cause, in s; causes that never occurred are left out."""
    prefix, suffix = "idle_", "_s"
    return {
        name.removeprefix(prefix).removesuffix(suffix): median(values)
        for name, values in record.samples.items()
        if name.startswith(prefix) and name.endswith(suffix) and values
    }


def crossover_of(records: Sequence[Record], speed_s: float | None = None) -> Crossover:
    """Where the device's time reaches the unprofiled host's; with ``speed_s`` at one speed of the host.

    Batches at which the host waited for a full queue of launches are left out, and a finding names them.
    """
    held = [_batch_of(one) for one in records if _held_up(one)]
    found = _crossover([one for one in records if not _held_up(one)], "host_issue_unprofiled_s", speed_s)
    if not held:
        return found
    listed = ", ".join(map(str, held))
    message = f"at batch {listed} the host waited for a full queue of launches, so its own issue time is not known"
    return replace(found, findings=(*found.findings, Finding("queue_full", message, "left out of the crossover")))


def _held_up(record: Record) -> bool:
    """Whether a burst has more launches than the queue holds, and issuing took as long as the device's work."""
    launches, busy_s, issue_s = map(record.value, ("launches_per_step", "gpu_busy_s", "host_issue_unprofiled_s"))
    if not (launches and busy_s and issue_s) or launches * _BURST <= _QUEUE:
        return False
    return abs(issue_s / busy_s - 1) <= _ALIKE


def _crossover(records: Iterable[Record], host: str, speed_s: float | None = None) -> Crossover:
    """Where the device's time reaches the host's; with ``speed_s`` at one speed of the host."""
    points = []
    for record in records:
        device_s = record.samples.get("gpu_busy_s")
        host_s = record.samples.get(host) if speed_s is None else _at_speed(record, speed_s)
        if device_s and host_s and min(device_s) > 0 and min(host_s) > 0:
            points.append(Point(_batch_of(record), device_s, host_s))
    return find_crossover(points)


def _memory(records: Sequence[Record], crossover: Crossover) -> dict[str, Json]:
    """Peak memory at the crossover, straight between its neighbours, against that at the smallest batch."""
    known = [(_batch_of(one), one.value("peak_memory_bytes")) for one in records]
    sizes = [(batch, float(value)) for batch, value in known if value is not None]
    first = sizes[0] if sizes else None
    at = None if crossover.batch is None else _between(sizes, crossover.batch)
    return {
        "smallest_batch": None if first is None else first[0],
        "at_smallest_bytes": None if first is None else first[1],
        "at_crossover_bytes": at,
        "ratio": None if at is None or first is None or not first[1] else at / first[1],
        "note": None if at is not None else f"crossover {crossover.describe()}",
    }


def _between(points: Sequence[tuple[float, float]], x: float) -> float | None:
    for (low, below), (high, above) in pairwise(points):
        if low <= x <= high:
            return below + (above - below) * (x - low) / (high - low)
    return None


def _evenness(rows: Sequence[Mapping[str, Json]], name: str) -> dict[str, Json]:
    """How much a figure differs from its median over the batches."""
    known = {row["batch_size"]: row["metrics"][name]["value"] if name in METRICS else row[name] for row in rows}
    values = {batch: value for batch, value in known.items() if value}
    found: dict[str, Json] = {"limit": EVEN, "batches": [*values]}
    if len(values) < 2:
        unknown = dict.fromkeys(("median_s", "largest_deviation", "batch", "even"))
        return {**found, **unknown, "note": "fewer than two batch sizes have it"}
    middle = median(values.values())
    batch = max(values, key=lambda one: abs(values[one] / middle - 1))
    deviation = values[batch] / middle - 1
    even = abs(deviation) <= EVEN
    return {**found, "median_s": middle, "largest_deviation": deviation, "batch": batch, "even": even, "note": None}


def _exposed_beyond(rows: Sequence[Mapping[str, Json]], crossover: Crossover) -> dict[str, Json]:
    """The largest exposed share of the unprofiled step from twice the crossover on.

    Where the smallest batch is past the crossover already, that batch stands for it.
    """
    start = crossover.batch if crossover.verdict == "crossover" else crossover.smallest_batch
    if crossover.verdict not in ("crossover", "below") or start is None:
        start = None
    shares = {
        row["batch_size"]: row["exposed_share"]
        for row in rows
        if start is not None and row["batch_size"] >= 2 * start and row["exposed_share"] is not None
    }
    largest = max(shares.values(), default=None)
    return {
        "from_batch": None if start is None else 2 * start,
        "batches": [*shares],
        "largest_share": largest,
        "limit": FEW,
        "holds": None if largest is None else largest < FEW,
        "note": None if largest is not None else f"no such batch was measured; crossover {crossover.describe()}",
    }


def _rises(rows: Sequence[Mapping[str, Json]]) -> list[list[int]]:
    """Pairs of neighbouring batches between which the exposed overhead rises beyond both intervals."""
    known = [
        (row["batch_size"], row["metrics"]["exposed_overhead_unprofiled_s"]["interval"])
        for row in rows
        if row["metrics"]["exposed_overhead_unprofiled_s"]["interval"] is not None
    ]
    return [[low, high] for (low, one), (high, two) in pairwise(known) if two[0] > one[1]]


def _against_eager(series: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """Exposed overhead of each other mode over eager's, at the smallest batch that both have."""
    names = ("workload", "phase", "dtype", "layout", "input", "gpu_model", "world_size", "benchmark")

    def key(one: Mapping[str, Json]) -> tuple[Json, ...]:
        return tuple(one[name] for name in names)

    eager = {key(one): one for one in series if one["mode"] == "eager" and not one["params"]}
    out = []
    for one in series:
        base = eager.get(key(one))
        if base is None or one["mode"] == "eager" or one["params"]:
            continue
        found = _ratio_at_smallest(base["rows"], one["rows"])
        if found is not None:
            out.append({**{name: one[name] for name in names}, "mode": one["mode"], **found})
    return out


def _ratio_at_smallest(
    base: Sequence[Mapping[str, Json]], other: Sequence[Mapping[str, Json]]
) -> dict[str, Json] | None:
    metric = "exposed_overhead_unprofiled_s"
    rows = {row["batch_size"]: row["metrics"][metric] for row in base if row["metrics"][metric]["value"] is not None}
    both = [row for row in other if row["batch_size"] in rows and row["metrics"][metric]["value"] is not None]
    if not both:
        return None
    batch = both[0]["batch_size"]
    old, new = rows[batch], both[0]["metrics"][metric]
    interval = None
    if old["interval"] and new["interval"] and old["interval"][0] > 0:
        corners = [top / bottom for top in new["interval"] for bottom in old["interval"]]
        interval = [min(corners), max(corners)]
    ratio = new["value"] / old["value"] if old["value"] > 0 else None
    return {
        "batch_size": batch,
        "eager_s": old["value"],
        "mode_s": new["value"],
        "ratio": ratio,
        "interval": interval,
        "note": None if ratio is not None else "eager has no exposed overhead",
    }
