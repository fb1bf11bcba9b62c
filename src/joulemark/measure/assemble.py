"""From the Measurements of one case, of one or several processes, to its Record (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from joulemark.findings import findings_of
from joulemark.metrics import CORE, find
from joulemark.records import Case, Conditions, Finding, Measurement, Outcome, Record, Row, Value
from joulemark.stats import summarize


def assemble(
    case: Case,
    measurements: Sequence[Measurement],
    *,
    run_id: str,
    environment_id: str,
    outcome: Outcome,
    reason: str | None = None,
    gpu_uuid: str | None = None,
    nodeid: str | None = None,
    findings: Iterable[Finding] = (),
    window_utc: tuple[float, float] | None = None,
    static_power_w: float | None = None,
) -> Record:
    """Join what the passes saw; ``ok`` becomes ``flagged`` when a Finding says so.

    Args:
        static_power_w: power of the idle board with clocks up, in W, for the dynamic share of the energy.
    """
    groups: dict[int, list[Measurement]] = defaultdict(list)
    for one in measurements:
        groups[one.process].append(one)
    in_order = [group for _, group in sorted(groups.items())]
    per_process = [_figures(group) for group in in_order]
    metrics = _pool(per_process)
    conditions = _joined(one.conditions for one in measurements)
    why_not_dynamic = _add_dynamic_energy(metrics, static_power_w)
    _add_unprofiled_exposure(metrics)
    notes = _notes(measurements, metrics, outcome, reason) | why_not_dynamic
    for name in notes:
        metrics.setdefault(name, Value(None, _unit(name)))
    record = Record(
        case,
        run_id,
        outcome,
        environment_id,
        reason,
        gpu_uuid,
        nodeid,
        metrics,
        _samples(one for group in in_order for one in group),
        notes,
        _unique([*findings, *(finding for one in measurements for finding in one.findings)]),
        conditions,
        window_utc,
        tuple(window for one in measurements for window in one.windows_utc),
        tuple(_numbers(figures) for figures in per_process),
        _tables(measurements),
        _sample_counts(in_order),
    )
    return _judged(record) if outcome == "ok" else record


def _judged(record: Record) -> Record:
    """With what the rules say of it; flagged where one of them does."""
    found = _unique([*record.findings, *findings_of(record)])
    return replace(record, findings=found, outcome="flagged" if any(one.flags for one in found) else "ok")


def join(records: Sequence[Record]) -> Record:
    """One record of the same case measured in several runs: their processes, in the order of the runs.

    Args:
        records: at least one; the first whose outcome leaves no figures stands for all.
    """
    unmeasured = next((one for one in records if one.outcome not in ("ok", "flagged")), None)
    if unmeasured is not None or len(records) == 1:
        return unmeasured or records[0]
    first = records[0]
    names = dict.fromkeys(name for one in records for name in one.samples)
    windows = [one.window_utc for one in records if one.window_utc is not None]
    return replace(
        first,
        outcome="flagged" if any(one.outcome == "flagged" for one in records) else "ok",
        metrics=_pool([dict(one.metrics) for one in records]),
        samples={name: [x for one in records for x in one.samples.get(name, ())] for name in names},
        sample_counts={name: tuple(n for one in records for n in _counts(one, name)) for name in names},
        findings=_unique(finding for one in records for finding in one.findings),
        conditions=_joined(one.conditions for one in records),
        window_utc=(min(lo for lo, _ in windows), max(hi for _, hi in windows)) if windows else None,
        measured_windows_utc=tuple(window for one in records for window in one.measured_windows_utc),
        processes=tuple(process for one in records for process in one.processes),
    )


def _counts(record: Record, name: str) -> tuple[int, ...]:
    return tuple(len(one) for one in record.samples_by_process(name) or [record.samples.get(name, [])])


def _numbers(figures: Mapping[str, Value]) -> dict[str, float]:
    return {name: value.value for name, value in figures.items() if value.value is not None}


def _unit(name: str) -> str:
    return find(name).unit


def _figures(group: list[Measurement]) -> dict[str, Value]:
    """Figures of one process, with the clock and the temperature at which it saw them."""
    figures = {name: value for one in group for name, value in one.values.items()}
    _add_conditions(figures, next((one.conditions for one in group if one.conditions is not None), None))
    return figures


def _pool(per_process: list[dict[str, Value]]) -> dict[str, Value]:
    """One process speaks for itself; several give the median of their figures, their spread as interval."""
    if len(per_process) < 2:
        return dict(per_process[0]) if per_process else {}
    out: dict[str, Value] = {}
    for name in dict.fromkeys(name for figures in per_process for name in figures):
        values = [figures[name] for figures in per_process if name in figures]
        numbers = [value.value for value in values if value.value is not None]
        if not numbers:
            out[name] = values[0]
            continue
        summary = summarize(numbers)
        out[name] = Value(
            summary.median, values[0].unit, summary.interval, summary.confidence, summary.n, values[0].tier
        )
    return out


def _samples(measurements: Iterable[Measurement]) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {}
    for one in measurements:
        for name, values in one.samples.items():
            out.setdefault(name, []).extend(values)
    return out


def _tables(measurements: Sequence[Measurement]) -> dict[str, list[Row]]:
    out: dict[str, list[Row]] = {}
    for one in measurements:
        for name, rows in one.tables.items():
            out.setdefault(name, []).extend(rows)
    return out


def _sample_counts(groups: Sequence[list[Measurement]]) -> dict[str, tuple[int, ...]]:
    """How many samples of each name each process has: from these the pooled ones are told apart again."""
    per_process = [_samples(group) for group in groups]
    names = dict.fromkeys(name for samples in per_process for name in samples)
    return {name: tuple(len(samples.get(name, ())) for samples in per_process) for name in names}


def _joined(several: Iterable[Conditions | None]) -> Conditions | None:
    """The conditions of several processes as one: medians of their clocks, shares over all their samples."""
    known = [one for one in several if one is not None]
    if len(known) < 2:
        return known[0] if known else None
    samples = sum(one.n for one in known)
    names = sorted({name for one in known for name in one.reasons}) if samples else []
    return Conditions(
        _middle([one.sm_clock_hz for one in known]),
        _middle([one.memory_clock_hz for one in known]),
        _middle([one.max_sm_clock_hz for one in known]),
        max((one.temperature_c for one in known if one.temperature_c is not None), default=None),
        {name: sum(one.reasons.get(name, 0.0) * one.n for one in known) / samples for name in names},
        samples,
    )


def _middle(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return median(present) if present else None


def _add_conditions(metrics: dict[str, Value], conditions: Conditions | None) -> None:
    if conditions is None:
        return
    for name, value, unit in (
        ("sm_clock_hz", conditions.sm_clock_hz, "Hz"),
        ("memory_clock_hz", conditions.memory_clock_hz, "Hz"),
        ("temperature_c", conditions.temperature_c, "degC"),
    ):
        if value is not None:
            metrics[name] = Value(value, unit, n=conditions.n, tier="nvml")


def _add_dynamic_energy(metrics: dict[str, Value], static_power_w: float | None) -> dict[str, str]:
    """Energy above static power; where the step draws less than that, the reason why there is none."""
    name = "dynamic_energy_per_item_j"
    energy, power = metrics.get("energy_per_item_j"), metrics.get("power_w")
    if static_power_w is None or energy is None or power is None or not energy.value or not power.value:
        return {}
    if power.value < static_power_w:
        idle = f"the idle board with clocks up ({static_power_w:.1f} W)"
        return {name: f"the step drew {power.value:.1f} W, less than {idle}"}
    share = 1 - static_power_w / power.value
    metrics[name] = Value(energy.value * share, "J", None, energy.confidence, energy.n, energy.tier)
    return {}


def _add_unprofiled_exposure(metrics: dict[str, Value]) -> None:
    """The step's time without the profiler minus the device's busy time with it.

    The profiler slows the host and hardly a kernel, so this is the better estimate of the exposed overhead of the
    step that users run. Its interval holds where both of its parts hold (Bonferroni), within one process of each.
    """
    step, busy = metrics.get("device_time_s"), metrics.get("gpu_busy_s")
    if step is None or busy is None or step.value is None or busy.value is None:
        return
    interval = None
    if step.interval is not None and busy.interval is not None:
        interval = (step.interval[0] - busy.interval[1], step.interval[1] - busy.interval[0])
    confidence = max(0.0, step.confidence + busy.confidence - 1)
    metrics["exposed_overhead_unprofiled_s"] = Value(
        step.value - busy.value, "s", interval, confidence, min(step.n, busy.n), f"{step.tier} - {busy.tier}"
    )


def _notes(
    measurements: Sequence[Measurement], metrics: Mapping[str, Value], outcome: Outcome, reason: str | None
) -> dict[str, str]:
    """Why each figure that a record must name is missing."""
    notes = {name: why for one in measurements for name, why in one.missing.items() if name not in metrics}
    fallback = reason if outcome not in ("ok", "flagged") and reason else "no instrument of this run reads it"
    for name in CORE:
        if name not in metrics and name not in notes:
            notes[name] = fallback
    return notes


def _unique(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(dict.fromkeys(findings))
