"""From what the ranks of a data-parallel case measured to the figures of the whole (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from joulemark.findings import throttled
from joulemark.measure.value import value_of
from joulemark.records import Finding, Json, Measurement, Value

STEP_TIMES = ("device_time_s", "host_time_s")
_ENERGY = ("energy_j", "energy_window_s", "energy_steps")


def join_answers(answers: Sequence[Json]) -> Json:
    """One answer for all ranks, on rank 0's.

    Args:
        answers: of the measuring processes, in order of rank; all of them measured the same passes.
    """
    ranks = [[Measurement.from_json(one) for one in answer["measurements"]] for answer in answers]
    joined = [_JOIN.get(passes[0].name, _of_rank_zero)(passes) for passes in zip(*ranks, strict=True)]
    findings = [one for answer in answers for one in answer["findings"]]
    static = [answer.get("static_power_w") for answer in answers]
    return {
        **answers[0],
        "measurements": [one.to_json() for one in joined],
        "findings": [*{str(one): one for one in findings}.values()],
        "static_power_w": None if None in static else sum(static),
        "window_utc": [min(one["window_utc"][0] for one in answers), max(one["window_utc"][1] for one in answers)],
    }


def _of_rank_zero(ranks: Sequence[Measurement]) -> Measurement:
    return replace(ranks[0], findings=_all_findings(ranks))


def _timed(ranks: Sequence[Measurement]) -> Measurement:
    """A step is done when its last rank has done it: per step the longest of the ranks' times."""
    first = ranks[0]
    values, samples = dict(first.values), {name: list(one) for name, one in first.samples.items()}
    for name in STEP_TIMES:
        if name not in first.values:
            continue
        each = [one.samples[name] for one in ranks]
        samples[name] = [max(times) for times in zip(*each, strict=True)]
        samples |= {f"rank{rank}_{name}": times for rank, times in enumerate(each)}
        values[name] = value_of(samples[name], name, first.values[name].tier)
    peaks = [one.values["peak_memory_bytes"] for one in ranks if "peak_memory_bytes" in one.values]
    if peaks:
        values["peak_memory_bytes"] = max(peaks, key=lambda one: one.value or 0.0)
    if "throughput_per_s" in first.values:
        values["throughput_per_s"] = _throughput(ranks, values)
    return replace(first, values=values, samples=samples, findings=_all_findings(ranks))


def _throughput(ranks: Sequence[Measurement], values: Mapping[str, Value]) -> Value:
    """Items of all ranks over the time of the step."""
    own = ranks[0].values
    name = next(name for name in STEP_TIMES if name in own)
    per_rank, time_s = own["throughput_per_s"], values[name]
    own_time_s = own[name].value
    assert per_rank.value is not None
    assert own_time_s is not None
    assert time_s.value is not None
    items = per_rank.value * own_time_s * len(ranks)
    interval = None
    if time_s.interval is not None and time_s.interval[0] > 0:
        interval = (items / time_s.interval[1], items / time_s.interval[0])
    return Value(items / time_s.value, "1/s", interval, time_s.confidence, time_s.n, time_s.tier)


def _powered(ranks: Sequence[Measurement]) -> Measurement:
    """Power adds over the boards; energy per item is the mean of the ranks', each over its own items.

    Bounds of intervals are combined alike: ranks run the same steps, so their scatter is not independent.
    On a CPU, whose sensors see all ranks, rank 0 alone brings figures: its energy is that of all items.
    """
    first = ranks[0]
    measured = [one for one in ranks if "power_w" in one.values]
    if len(measured) == 1 and measured[0] is first:
        return _shared_sensor(first, len(ranks))
    if len(measured) < len(ranks):
        rank, lacking = next((rank, one) for rank, one in enumerate(ranks) if "power_w" not in one.values)
        missing = {name: f"rank {rank}: {why}" for name, why in lacking.missing.items()}
        return Measurement(first.name, missing=missing, conditions=first.conditions)
    values = dict(first.values)
    values["power_w"] = _combined([one.values["power_w"] for one in ranks], sum)
    energies = [one.values["energy_per_item_j"] for one in ranks]
    values["energy_per_item_j"] = _combined(energies, lambda all_of: sum(all_of) / len(all_of))
    samples = {
        f"rank{rank}_{name}": one.samples[name]
        for rank, one in enumerate(ranks)
        for name in _ENERGY
        if name in one.samples
    }
    findings = (*_all_findings(ranks), *_throttled(ranks[1:]))
    return replace(first, values=values, samples=samples, findings=findings)


def _shared_sensor(first: Measurement, world_size: int) -> Measurement:
    energy = first.values["energy_per_item_j"]
    whole = _combined([energy], lambda only: only[0] / world_size)
    return replace(first, values={**first.values, "energy_per_item_j": whole})


def _combined(values: Sequence[Value], combine: Callable[[list[float]], float]) -> Value:
    """Values and, where all have one, both bounds of their intervals."""
    known = [one.value for one in values if one.value is not None]
    bounds = [one.interval for one in values if one.interval is not None]
    interval = None
    if len(bounds) == len(values):
        interval = (combine([lo for lo, _ in bounds]), combine([hi for _, hi in bounds]))
    return replace(values[0], value=combine(known), interval=interval, n=min(one.n for one in values))


def _all_findings(ranks: Sequence[Measurement]) -> tuple[Finding, ...]:
    return tuple(dict.fromkeys(finding for one in ranks for finding in one.findings))


def _throttled(others: Sequence[Measurement]) -> list[Finding]:
    """What the conditions of the ranks after rank 0 say; rank 0's are the record's own."""
    return [
        replace(finding, message=f"rank {rank}: {finding.message}")
        for rank, one in enumerate(others, 1)
        for finding in throttled(one.conditions)
    ]


_JOIN: dict[str, Callable[[Sequence[Measurement]], Measurement]] = {
    "latency": _timed,
    "steady": _timed,
    "power": _powered,
}
