"""The four answers per workload, each with its figure, instrument and uncertainty, or why it is not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from joulemark.energy.units import GROUPS
from joulemark.metrics import batch_text, format_value
from joulemark.records import Json, Record, Value
from joulemark.report.evidence import CPU, Curve, Evidence, Workload
from joulemark.report.formats import capital
from joulemark.tandem import FEW, idle_by_cause
from joulemark.utilization.waterfall import class_shares, no_tensor_share

Tone = Literal["good", "bad", "unsure", "unknown"]

CAUSES: Mapping[str, str] = {
    "framework": "framework code on the host",
    "launch_call": "the calls that launch kernels",
    "queued": "launch latency",
    "copy": "the calls that copy",
    "synchronize": "synchronizing calls",
    "runtime_call": "other calls of the CUDA runtime",
    "input": "its input",
    "outside_operators": "Python outside operators",
    "profiler": "the profiler",
    "tail": "the end of the step",
    "unknown": "something that the trace does not show",
}
"""Cause of idle time → what the GPU waits for, in words."""

GROUP_TITLES: Mapping[str, str] = {
    "static": "static power", "issue": "instruction issue", "vector": "vector pipes", "integer": "integer pipes",
    "special": "special functions", "tensor": "tensor cores", "shared": "shared memory", "l1": "L1", "l2": "L2",
    "hbm": "HBM",
}  # fmt: skip
"""Part of the chip → what people call it."""

_SPLIT_REMEDY = "joulemark calibrate, then joulemark energy"
_COUNT_REMEDY = "--bench-collect timing,profiler,counters tells"
_LEVELS: Mapping[str, str] = {
    "issue_slot_fraction": "issue slots",
    "tensor_active_fraction": "tensor pipe",
    "dram_fraction": "DRAM",
}
"""What of a busy GPU can be near its peak → what a reader calls it."""
_LOADED = 0.6
"""Of its peak; below it for compute and memory alike Nsight Compute's rules look for latencies."""
_SURE, _EXPLAINED = 0.9, 0.1
_NAMED = 5
"""Parts of the chip that the energy's answer names."""


@dataclass(frozen=True)
class Answer:
    """One question of one workload.

    Args:
        question: ``waits``, ``works``, ``plateau`` or ``joules``.
        verdict: in a few words, to be read alone.
        text: one sentence with figures and their uncertainty.
        tone: ``good``, ``bad``, ``unsure`` or ``unknown``; never the only carrier of the verdict.
        source: the instruments behind it.
        brief: what of the text a terminal has room for.
    """

    question: Literal["waits", "works", "plateau", "joules"]
    verdict: str
    text: str
    tone: Tone
    source: str
    brief: str = ""


def answers_of(workload: Workload, evidence: Evidence) -> tuple[Answer, Answer, Answer, Answer]:
    """The answers about a workload's main configuration."""
    return waits(workload.main), works(workload.main), plateau(workload.main), joules(workload, evidence)


def is_answered(answers: tuple[Answer, ...]) -> bool:
    """Whether at least one of them is known."""
    return any(one.tone != "unknown" for one in answers)


@dataclass(frozen=True)
class Idle:
    """Share of an unprofiled step in which nothing runs on the GPU.

    Args:
        share: of the step; slightly negative by noise.
        interval: that holds where both intervals behind it hold; None where one is not known.
        tier: what told it.
    """

    share: float
    interval: tuple[float, float] | None
    tier: str


def idle_share(curve: Curve, batch: int) -> Idle | None:
    """By the profile's busy time against the unprofiled step, else by the step's own replay as a CUDA graph."""
    record = curve.record(batch, lambda one: one.value("exposed_overhead_unprofiled_s") is not None)
    step = None if record is None else record.metrics.get("device_time_s")
    if record is not None and step is not None and step.value:
        exposed = record.metrics["exposed_overhead_unprofiled_s"]
        assert exposed.value is not None
        ends = exposed.interval
        interval = None if ends is None else (ends[0] / step.value, ends[1] / step.value)
        return Idle(exposed.value / step.value, interval, "torch_profiler beside cuda_events")
    record = curve.record(batch, lambda one: one.value("device_time_graph_s") is not None)
    if record is None or not record.value("device_time_s"):
        return None
    step, replay = record.metrics["device_time_s"], record.metrics["device_time_graph_s"]
    assert step.value
    assert replay.value is not None
    return Idle(
        1 - replay.value / step.value, _replay_interval(step, replay), "cuda_events, step beside its CUDA graph"
    )


def _replay_interval(step: Value, replay: Value) -> tuple[float, float] | None:
    if step.interval is None or replay.interval is None or step.interval[0] <= 0:
        return None
    return 1 - replay.interval[1] / step.interval[0], 1 - replay.interval[0] / step.interval[1]


def waits(curve: Curve) -> Answer:
    """Is the GPU waiting for the framework, up to which batch, and for what?"""
    shares = {batch: found for batch in curve.batches if (found := idle_share(curve, batch)) is not None}
    if curve.case.gpu_model == CPU:
        return Answer("waits", "No GPU", "These cases were measured on a CPU.", "unknown", "")
    if not shares:
        record = curve.records[curve.batches[-1]][-1]
        why = record.notes.get("device_time_graph_s") or record.notes.get("gpu_busy_s")
        text = f"{_sentence(why)} " if why else ""
        way = "--bench-collect timing,profiler tells"
        return Answer("waits", "Not measured", f"{text}{way}.", "unknown", "", way)
    first, last = min(shares), max(shares)
    free_from = _free_from(shares)
    tiers = ", ".join(dict.fromkeys(one.tier for one in shares.values()))
    worst = f"{_percent(shares[first])} of a step is idle at batch {first}, {_percent(shares[last])} at {last}"
    brief = f"idle {whole_percent(max(shares[first].share, 0.0))} at batch {first}{_main_cause(curve, first)}"
    if free_from is None:
        verdict = f"Yes, up to batch {last}"
        return Answer("waits", verdict, f"It waits{_cause(curve, first)}: {worst}.", "bad", tiers, brief)
    if free_from == first:
        most = max(shares.values(), key=lambda one: one.share)
        return Answer("waits", "No", f"At most {_percent(most)} of a step is idle at any batch.", "good", tiers, brief)
    text = f"Below it the GPU waits{_cause(curve, first)}: {worst}."
    return Answer("waits", f"No, from batch {free_from} on", text, "good", tiers, brief)


def _free_from(shares: Mapping[int, Idle]) -> int | None:
    """The smallest batch from which on the idle share stays under the limit."""
    free = None
    for batch in sorted(shares, reverse=True):
        if shares[batch].share >= FEW:
            break
        free = batch
    return free


def whole_percent(share: float) -> str:
    """``71 %``."""
    return f"{100 * share:.0f} %"


def _percent(idle: Idle) -> str:
    text = f"{100 * max(idle.share, 0.0):.1f} %" if idle.share < 0.1 else f"{100 * idle.share:.0f} %"
    if idle.interval is None:
        return text
    lo, hi = (100 * max(end, 0.0) for end in idle.interval)
    return f"{text} [{lo:.1f}, {hi:.1f}]" if hi < 10 else f"{text} [{lo:.0f}, {hi:.0f}]"


def _causes_from(curve: Curve, batch: int) -> tuple[int, str, float] | None:
    """What the idle GPU waits for most: at the smallest profiled batch from this one on, the cause and its share."""
    for one in curve.batches[curve.batches.index(batch) :]:
        record = curve.record(one, lambda found: any(idle_by_cause(found).values()))
        if record is not None:
            causes = idle_by_cause(record)
            longest = max(causes, key=lambda name: causes[name])
            return one, CAUSES.get(longest, longest), causes[longest] / sum(causes.values())
    return None


def _cause(curve: Curve, batch: int) -> str:
    found = _causes_from(curve, batch)
    if found is None:
        return ""
    at = "" if found[0] == batch else f" at batch {found[0]}"
    return f", mainly for {found[1]} ({whole_percent(found[2])} of the idle time{at})"


def _main_cause(curve: Curve, batch: int) -> str:
    found = _causes_from(curve, batch)
    return "" if found is None else f", for {found[1]}"


def works(curve: Curve) -> Answer:
    """How much of a busy GPU works, at the measured batch next to the knee? And what fills the rest of the step?"""
    if curve.case.gpu_model == CPU:
        return Answer("works", "No GPU", "These cases were measured on a CPU.", "unknown", "")
    counted = [batch for batch in curve.batches if any(curve.value(batch, one) for one in _LEVELS)]
    if not counted:
        filled = _without_tensor_cores(curve, curve.plateau_batch)
        known = f"At batch {curve.plateau_batch} {filled}. " if filled else ""
        return Answer("works", "Not measured", f"{known}{_COUNT_REMEDY}.", "unknown", "", _COUNT_REMEDY)
    batch = min(counted, key=lambda one: abs(one - (curve.plateau_batch or one)))
    found = {one: value for one in _LEVELS if (value := curve.value(batch, one)) is not None}
    levels = {one: value.value or 0.0 for one, value in found.items()}
    highest = sorted(levels, key=lambda one: -levels[one])
    verdict = capital(", ".join(f"{_LEVELS[one]} {whole_percent(levels[one])}" for one in highest))
    active = curve.value(batch, "sm_active_fraction")
    resident = "" if active is None else f"SMs have work in {_share(active)} of the time; "
    parts = ", ".join(f"{_LEVELS[one]} {_share(found[one])}" for one in highest)
    filled = _without_tensor_cores(curve, batch)
    text = f"At batch {batch} {resident}of peak: {parts}{f'; {filled}' if filled else ''}."
    brief = f"of peak, batch {batch}" + ("" if active is None else f"; SMs active {whole_percent(active.value or 0.0)}")
    tiers = ", ".join(dict.fromkeys(value.tier or "" for value in found.values()))
    return Answer("works", verdict, text, "good" if levels[highest[0]] >= _LOADED else "bad", tiers, brief)


def _share(value: Value) -> str:
    """``31 % [30, 32]``; bare where the interval is no wider than the rounding."""
    ends = value.interval
    wide = ends is not None and whole_percent(ends[0]) != whole_percent(ends[1])
    return whole_percent(value.value or 0.0) + (_range(ends) if wide else "")


def _without_tensor_cores(curve: Curve, batch: int | None) -> str:
    """What of a step runs without tensor cores, and which kernels most; empty without a profile."""
    record = None if batch is None else curve.profiled(batch)
    if record is None:
        return ""
    share, classes = no_tensor_share(record), dict(class_shares(record))
    if share is None or not classes:
        return ""
    others = {name: part for name, part in classes.items() if name not in ("tensor_gemm", "attention")}
    most = max(others, key=lambda one: others[one], default=None)
    named = f", {most.replace('_', ' ')} first ({whole_percent(others[most])})" if most else ""
    return f"kernels without tensor cores fill {whole_percent(share[0])} of the step{named}"


def plateau(curve: Curve) -> Answer:
    """From which batch on is a bigger one useless?"""
    found = curve.plateau
    tier = ", ".join(dict.fromkeys(value.tier or "" for _, value in curve.line("throughput_per_s")))
    if found.verdict == "too_few_points":
        sizes = "1 batch size was" if len(curve.batches) == 1 else f"{len(curve.batches)} batch sizes were"
        text = f"{sizes} measured; four over two doublings are needed"
        return Answer("plateau", "Not known", f"{text}.", "unknown", "", text)
    if found.verdict == "not_reached":
        end = f"Not reached by batch {found.largest_batch:.0f}"
        limit = "larger ones do not fit into memory" if found.limited_by == "memory" else "larger ones were not tried"
        text = f"The last doubling still gains more than 5 % ({_gain(curve)}); {limit}."
        return Answer("plateau", end, text, "unsure", tier, _gain(curve))
    if found.verdict == "declines":
        text = f"Past batch {batch_text(found.declines_from)} throughput falls more than 5 % under its plateau."
        return Answer("plateau", f"Best near batch {batch_text(found.knee)}", text, "bad", tier)
    assert found.knee is not None
    assert found.interval is not None
    below, above = "≤ " if found.open_below else "", "≥ " if found.open_above else ""
    lo, hi = map(batch_text, found.interval)
    verdict = f"From batch {found.knee:.0f} [{below}{lo}, {above}{hi}] on"
    agree = (
        ""
        if (found.support or 1) >= _SURE
        else f" The curve bends softly: {whole_percent(found.support or 0)} of draws agree."
    )
    text = f"No doubling beyond it gains more than 5 %: {_rate(curve)}.{agree}"
    brief = f"{_rate(curve)} ({whole_percent(found.support or 0)} of draws agree)" if agree else _rate(curve)
    return Answer("plateau", verdict, text, "good" if not agree else "unsure", tier, brief)


def _gain(curve: Curve) -> str:
    (small, low), (large, high) = curve.positive("throughput_per_s")[-2:]
    assert low.value
    assert high.value
    return f"{high.value / low.value - 1:+.0%} from {small} to {large}"


def _rate(curve: Curve) -> str:
    batch = curve.plateau_batch
    assert batch is not None
    value, memory = curve.value(batch, "throughput_per_s"), curve.value(batch, "peak_memory_bytes")
    rate = "n/a" if value is None else format_value(value.value, "1/s")
    held = "" if memory is None else f" in {format_value(memory.value, 'B')} of memory"
    return f"{rate} items/s at batch {batch}{held}"


def joules(workload: Workload, evidence: Evidence) -> Answer:
    """Which part of the chip takes most energy?"""
    rows = evidence.energy_of(workload)
    if rows:
        return _split_answer(workload.main, *_nearest(rows, workload.main.plateau_batch))
    line = workload.main.line("energy_per_item_j")
    if not line:
        record = workload.main.records[workload.main.batches[-1]][-1]
        why = record.notes.get("energy_per_item_j") or "the energy was not asked for (--bench-collect power)"
        return Answer("joules", "Not measured", _sentence(why), "unknown", "", why)
    batch, value = min(line, key=lambda one: abs(one[0] - (workload.main.plateau_batch or one[0])))
    static = _static_share(workload.main, batch)
    text = f"{_figure(value)} per item{_power(workload.main, batch)} at batch {batch}"
    text += f", {whole_percent(static)} of it static power" if static is not None else ""
    text += f". Which unit takes the rest is not measured yet: {_SPLIT_REMEDY}."
    verdict = f"{format_value(value.value, 'J')} per item, not split"
    brief = "" if static is None else f"{whole_percent(static)} static"
    return Answer("joules", verdict, text, "unsure", value.tier or "", brief)


def _nearest(rows: list[tuple[int, Mapping[str, Json]]], batch: int | None) -> tuple[int, Mapping[str, Json]]:
    return min(rows, key=lambda one: abs(one[0] - (batch or one[0])))


def _split_answer(curve: Curve, batch: int, row: Mapping[str, Json]) -> Answer:
    split = row["split"]
    shares = group_shares(split)
    largest = sorted(shares, key=lambda one: -shares[one])[:_NAMED]
    named = [f"{GROUP_TITLES[one]} {whole_percent(shares[one])}" for one in largest]
    ranges = [share_interval(split, one) for one in largest]
    item = curve.value(batch, "energy_per_item_j")
    each = "" if item is None else f", {_figure(item)} per item"
    parts = ", ".join(f"{name}{_range(ends)}" for name, ends in zip(named, ranges, strict=True))
    residual = split["residual_share"]
    text = f"At batch {batch}{each}: {parts}. Not explained: {100 * residual:+.1f} % of it."
    elsewhere = _on_another_board(curve, row["gpu_uuid"])
    text += " The shares are of another board of this model." if elsewhere else ""
    close = ranges[0] is not None and ranges[1] is not None and ranges[1][1] >= ranges[0][0]
    tone: Tone = "unsure" if close or abs(residual) >= _EXPLAINED else "good"
    verdict = f"{capital(named[0])} or {named[1]}" if close else f"{capital(named[0])}, then {named[1]}"
    source = "energy model calibrated on another board" if elsewhere else "energy model calibrated on this GPU"
    return Answer("joules", verdict, text, tone, source, f"batch {batch}")


def _on_another_board(curve: Curve, uuid: str | None) -> bool:
    """Whether a split is of none of the boards that a curve was measured on."""
    from joulemark.environment import anonymous

    boards = {record.gpu_uuid for records in curve.records.values() for record in records}
    return uuid is not None and not boards & {uuid, anonymous(uuid)}


def _range(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f" [{100 * ends[0]:.0f}, {100 * ends[1]:.0f}]"


def share_interval(split: Mapping[str, Json], group: str) -> tuple[float, float] | None:
    """The 95 % interval of a part's share of the measured energy, where the document has one."""
    ends = split["share_intervals"].get(group)
    return None if ends is None else (ends[0], ends[1])


def group_shares(split: Mapping[str, Json]) -> dict[str, float]:
    """Part of the chip → its share of the measured energy, in the order of the energy model."""
    return {
        group: sum(split["parts"][group].values()) / split["measured_j"] for group in GROUPS if group in split["parts"]
    }


def _static_share(curve: Curve, batch: int) -> float | None:
    def has_both(record: Record) -> bool:
        return bool(record.value("energy_per_item_j") and record.value("dynamic_energy_per_item_j") is not None)

    record = curve.record(batch, has_both)
    if record is None:
        return None
    whole, dynamic = record.value("energy_per_item_j"), record.value("dynamic_energy_per_item_j")
    assert whole
    assert dynamic is not None
    return 1 - dynamic / whole


def _power(curve: Curve, batch: int) -> str:
    power = curve.value(batch, "power_w")
    return "" if power is None else f" at {format_value(power.value, 'W')}"


def _figure(value: Value) -> str:
    text = format_value(value.value, value.unit)
    if value.interval is None or not value.value:
        return text
    return f"{text} ±{50 * (value.interval[1] - value.interval[0]) / abs(value.value):.1f} %"


def _sentence(text: str) -> str:
    return f"{capital(text).rstrip('.')}."


def unanswered(evidence: Evidence) -> Iterator[str]:
    """What the answers lack, for the list of what was not measured."""
    if not evidence.of_kind("energy"):
        yield f"which part of the chip spends the energy: no document of joulemark energy was given ({_SPLIT_REMEDY})"
