"""The counters pass: steps beside hardware counters, and from what these saw to a Measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

from joulemark.collect.flops import calls_per_window, count_flops, product_of
from joulemark.collect.phases import phase_clock
from joulemark.collect.timing import Timer, is_out_of_memory
from joulemark.collect.torch_profiler import seconds_per_step
from joulemark.counter_series import CounterSeries, CounterSource
from joulemark.errors import DeviceError, Unsupported
from joulemark.measure.plan import Pass
from joulemark.measure.stages import Stages
from joulemark.measure.value import value_of
from joulemark.metrics import AMOUNTS, COUNTERS, LEVELS, find
from joulemark.records import Finding, Measurement, Row, Value
from joulemark.utilization.levels import COUNTS, SHARES, Counted, Stretch, levels_of, rows_of, total, unlike
from joulemark.workloads.base import Step

_MOST_STEPS = 5000
_FEWEST_WINDOWS = 2
"""Windows with the counters: an instrument that counts all at once has its one pass repeated."""
_GPM_S = 0.6
"""A shorter window than this says little by NVML's GPM: its samples are 0.1 s apart, and the first ones lag."""
_GPM_BESIDE_S = 0.42
"""Where it is not the best instrument: two of its samples behind the lag, and some room for a step that gets faster."""
_UNSEEN_S = 0.2
"""A window that is no longer is over before GPM's first sample of a run."""
_COVERED = 0.9
"""Share of the steps' time that samples must span: what they lack is not like what they hold, a step has phases."""
_AGREE = 0.03
"""Shares of peak by two instruments in the same minute may differ by this much."""
_TENSOR, _PLAIN = "pipe_tensor_cycles", "pipe_fma_instructions"
_LEVEL_OF = {_TENSOR: "tensor_active_fraction", _PLAIN: "fma_fraction"}
"""Counter of a unit that multiplies → its level."""


@dataclass(frozen=True)
class Reference:
    """A big product of a number format on this device: what the unit for it reaches.

    Args:
        dtype: number format.
        flop_per_s: reached, beside no counter.
        counter: of the unit's work (cycles or instructions); None where no instrument counts it.
        share: of the unit's peak meanwhile, 0 to 1.
        flop_per_count: FLOP per cycle or instruction of the unit.
        peak_counts_per_s: cycles or instructions that the unit could do in a second, at the clock of that time.
    """

    dtype: str
    flop_per_s: float
    counter: str | None = None
    share: float | None = None
    flop_per_count: float | None = None
    peak_counts_per_s: float | None = None


@dataclass
class Counting:
    """What a measuring process has for its counters; kept over its cases.

    Args:
        source: the best instrument that works here; None without any.
        reasons: each better instrument → why it is off, and what would give it.
        device: torch's name of the device.
        beside: an instrument of another kind, which reads the same levels in the same minute.
        references: by number format, measured with the first case that has it.
        opening_s: time that opening and proving them took, until a case has told it; None afterwards.
    """

    source: CounterSource | None
    reasons: Mapping[str, str]
    device: str
    beside: CounterSource | None = None
    references: dict[str, Reference] = field(default_factory=dict)
    opening_s: float | None = None

    @property
    def why(self) -> str:
        """Why there is no better instrument, one clause each."""
        return "; ".join(f"{tier}: {reason}" for tier, reason in self.reasons.items())


@dataclass
class Readings:
    """All that the pass has read of one step.

    Args:
        off_s: seconds per step of the windows without the counters, one before all others and one after.
        on_s: of each window with them, in between.
        counted: what the counters saw, one entry per group that could be counted, cut to the work.
        spans: (start, end) of the counted windows on ``time.perf_counter``.
        lost: group → why it could not be counted.
        beside: what the other instrument saw.
        flops: of one step, by torch's flop counter.
        reference: of the step's number format.
        missing: metric → why it was not read.
        stages: wall time of reading it all.
    """

    off_s: list[float] = field(default_factory=list)
    on_s: list[float] = field(default_factory=list)
    counted: list[Counted] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    beside: Counted | None = None
    flops: int | None = None
    reference: Reference | None = None
    missing: dict[str, str] = field(default_factory=dict)
    stages: Stages = field(default_factory=Stages)

    def uncounted(self, loop: _Loop) -> None:
        """A window without the counters."""
        with self.stages.of("uncounted windows"):
            self.off_s.append(loop.marked()[0])


def read_step(counting: Counting, timer: Timer, dtype: str | None, one: Pass, step: Step, step_s: float) -> Readings:
    """Run a step beside the counters, group by group, and without them before and after.

    Args:
        counting: instruments of this process.
        timer: of the device.
        dtype: number format of the case, for the reference; None where it has none.
        one: its budget is spread over the windows with and without the counters.
        step: to repeat.
        step_s: about its time, in s.

    Raises:
        Unsupported: a setup runs between the steps.
    """
    if step.setup is not None:
        raise Unsupported("a setup runs between the steps: counters cannot tell its work from theirs")
    seen = Readings()
    if counting.opening_s is not None:
        seen.stages.add("opening", counting.opening_s)
        counting.opening_s = None
    groups = () if counting.source is None else worth_counting(counting.source, counting.beside)
    turns = groups * math.ceil(_FEWEST_WINDOWS / len(groups)) if groups else ()
    window_s = max(one.budget_s / (len(turns) + 2), _least_s(counting.source, _GPM_S))
    loop = _Loop(step, timer, counting.device, _steps(window_s, step_s, one.min_samples), step_s)
    seen.uncounted(loop)
    loop.step_s = seen.off_s[0]
    for group in turns:
        _count_group(counting.source, group, loop, seen)
    _read_beside(counting, loop, seen)
    _read_work(counting, timer, dtype, step, seen)
    return seen


def worth_counting(source: CounterSource, beside: CounterSource | None) -> tuple[str, ...]:
    """Passes that tell what neither an earlier one nor the instrument beside tells; the first in any case.

    On a GH100 that leaves out the pass that would be run for the tensor pipe on FP64 alone, which GPM tells too.
    """
    known = set() if beside is None else {name for group in beside.groups for name in beside.counters(group)}
    first, *others = source.groups
    kept, known = [first], known | set(source.counters(first))
    for group in others:
        if not known >= set(source.counters(group)):
            kept.append(group)
            known |= set(source.counters(group))
    return tuple(kept)


def _least_s(source: CounterSource | None, gpm_s: float) -> float:
    """The shortest window from which an instrument tells anything, in s."""
    return gpm_s if source is not None and source.tier == "gpm" else 0.0


def _steps(window_s: float, step_s: float, fewest: int = 1) -> int:
    return max(fewest, min(_MOST_STEPS, math.ceil(window_s / max(step_s, 1e-9))))


@dataclass
class _Loop:
    """The same steady steps, again and again."""

    step: Step
    timer: Timer
    device: str
    steps: int
    step_s: float

    @property
    def expected_s(self) -> float:
        """About how long the loop takes, in s."""
        return self.steps * self.step_s

    def plain(self) -> float:
        """Seconds per step."""
        return seconds_per_step(lambda _: self.step.run(), None, self.steps, self.timer.synchronize)

    def marked(self) -> tuple[float, tuple[Stretch, ...]]:
        """Seconds per step, and when each phase ran."""
        marks = self.step.phases
        if marks is None:
            return self.plain(), ()
        clock = phase_clock(self.device)
        clock.begin()
        marks.listener = clock.mark
        try:
            seconds = self.plain()
        finally:
            marks.listener = None
        return seconds, tuple(Stretch(*one) for one in clock.read())


def _count_group(source: CounterSource | None, group: str, loop: _Loop, seen: Readings) -> None:
    """Count one group, or say why that came to nothing."""
    assert source is not None
    told: list[tuple[float, float, float, tuple[Stretch, ...]]] = []

    def run() -> None:
        start = time.perf_counter()
        seconds, stretches = loop.marked()
        told.append((start, time.perf_counter(), seconds, stretches))

    begin = time.perf_counter()
    try:
        series = source.record(group, run, loop.expected_s).at_work()
    except DeviceError as error:
        seen.lost[group] = str(error)
        return
    finally:
        _tell_stages(seen.stages, begin, told)
    if not len(series):
        seen.lost[group] = f"every sample of the group {group} reads 0: nothing was counted"
        return
    start, end, seconds, stretches = told[-1]
    covered = float(series.end_s[-1] - series.start_s[0]) / (seconds * loop.steps)
    if source.tier == "pm_sampling" and covered < _COVERED:
        seen.lost[group] = f"the samples of the group {group} cover {covered:.0%} of the steps: the others are lost"
        return
    seen.spans.append((start, end))
    seen.on_s.append(seconds)
    seen.counted.append(Counted(series, loop.steps, stretches))


def _tell_stages(stages: Stages, begin: float, told: list[tuple[float, float, float, tuple[Stretch, ...]]]) -> None:
    """What of a record came before its steps, between those that were run again, and after."""
    ends = [begin, *(end for _, end, _, _ in told)]
    for (start, end, _, _), before in zip(told, ends, strict=False):
        stages.add("before counting", start - before)
        stages.add("counted windows", end - start)
    stages.add("after counting", time.perf_counter() - ends[-1])


def _read_beside(counting: Counting, loop: _Loop, seen: Readings) -> None:
    """The last window without the counters, and on from it the run that the other instrument sees.

    That one takes its first sample when the window is over: it lags behind the work.
    """
    if counting.beside is None or loop.expected_s > _UNSEEN_S:
        _last_uncounted(loop, seen)
    if counting.beside is None:
        return
    in_run = len(seen.off_s) < 2 and bool(seen.on_s)
    total = _steps(_least_s(counting.beside, _GPM_BESIDE_S), min(seen.off_s + seen.on_s))
    rest = replace(loop, steps=max(1, total - loop.steps * in_run))

    def run() -> None:
        if in_run:
            _last_uncounted(loop, seen)
        with seen.stages.of("other instrument"):
            rest.plain()

    _record_beside(counting.beside, run, loop.steps * in_run + rest.steps, total * loop.step_s, seen)
    _last_uncounted(loop, seen)


def _last_uncounted(loop: _Loop, seen: Readings) -> None:
    """The window after those with the counters, once, if there were any."""
    if seen.on_s and len(seen.off_s) < 2:
        seen.uncounted(loop)


def _record_beside(
    beside: CounterSource, run: Callable[[], object], steps: int, expected_s: float, seen: Readings
) -> None:
    try:
        series = beside.record(beside.groups[0], run, expected_s).at_work()
    except DeviceError as error:
        seen.lost[beside.tier] = str(error)
        return
    if len(series):
        seen.beside = Counted(series, steps)


def _read_work(counting: Counting, timer: Timer, dtype: str | None, step: Step, seen: Readings) -> None:
    """FLOP of the step and the reference; out of memory here costs these figures alone."""
    with seen.stages.of("flop counter"), _lacking(seen, "step_flops"):
        seen.flops = count_flops(step.run)
    with seen.stages.of("reference"), _lacking(seen, "peak_flop_per_s"):
        seen.reference = _reference(counting, timer, dtype)


@contextmanager
def _lacking(seen: Readings, metric: str) -> Iterator[None]:
    """What cannot be had is missing with its reason."""
    try:
        yield
    except Unsupported as error:
        seen.missing[metric] = str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        seen.missing[metric] = "out of memory beside this step"


def _reference(counting: Counting, timer: Timer, dtype: str | None) -> Reference:
    if dtype is None:
        raise Unsupported("the case names no number format, so no unit to compare with")
    if dtype not in counting.references:
        counting.references[dtype] = _measure_reference(counting, timer, dtype)
    return counting.references[dtype]


def _measure_reference(counting: Counting, timer: Timer, dtype: str) -> Reference:
    """Time the product alone, then count it in the first group, which holds the pipes."""
    product = product_of(dtype, counting.device)
    calls = calls_per_window(product.run, timer.synchronize)

    def loop() -> float:
        return seconds_per_step(lambda _: product.run(), None, calls, timer.synchronize)

    each_s = loop()
    plain = Reference(dtype, product.flops / each_s)
    if counting.source is None:
        return plain
    try:
        series = counting.source.record(counting.source.groups[0], loop, calls * each_s).at_work()
    except DeviceError:
        return plain
    counter = _PLAIN if dtype == "fp32" else _TENSOR
    share, counts, peak = unit_work(series, counter)
    per_count = product.flops * calls / counts if counts else None
    return replace(plain, counter=counter, share=share, flop_per_count=per_count, peak_counts_per_s=peak)


def unit_work(series: CounterSeries, counter: str) -> tuple[float | None, float | None, float | None]:
    """Share of peak of a unit over a series, its counts, and the counts per second that its peak would be.

    The last is the clock times a constant of the chip, so that its ratio between two series is that of their clocks.
    """
    level = SHARES[_LEVEL_OF[counter]]
    share = series.mean(level) if level in series.values else None
    counts = total(series, counter)
    seconds = float(series.duration_s.sum())
    peak = counts / share / seconds if counts and share and seconds else None
    return share, counts, peak


def measurement_of(
    name: str, seen: Readings, counting: Counting, windows: tuple[tuple[float, float], ...] = ()
) -> Measurement:
    """The figures of the pass; each that is missing has its reason and what would give it.

    Args:
        windows: of the counted windows, in s since the Unix epoch.
    """
    values = {**_levels(seen), **_times(seen), **_work(seen)}
    rows = rows_of(seen.counted) + ([] if seen.beside is None else rows_of([seen.beside]))
    tables = {"levels": rows, "reference": _reference_rows(seen), "stages": seen.stages.rows()}
    return Measurement(
        name,
        values,
        {"uncounted_step_s": seen.off_s, "counted_step_s": seen.on_s},
        {metric: _why(metric, seen, counting) for metric in COUNTERS if metric not in values},
        tuple(_findings(seen, values)),
        windows_utc=windows,
        tables={table: entries for table, entries in tables.items() if entries},
    )


def _levels(seen: Readings) -> dict[str, Value]:
    """Each by the best instrument that gives it: what that one lacks, by the one beside it."""
    out: dict[str, Value] = {}
    for counted in (seen.counted, [] if seen.beside is None else [seen.beside]):
        for name, samples in levels_of(counted).items():
            out.setdefault(name, value_of(samples, name, counted[0].series.tier))
    return out


def _times(seen: Readings) -> dict[str, Value]:
    if not seen.on_s:
        return {}
    before, after = seen.off_s[0], seen.off_s[-1]
    shares = [(place + 1) / (len(seen.on_s) + 1) for place in range(len(seen.on_s))]
    costs = [on / (before + share * (after - before)) - 1 for on, share in zip(seen.on_s, shares, strict=True)]
    return {
        "counted_step_s": value_of(seen.on_s, "counted_step_s", "host_clock"),
        "counters_overhead": value_of(costs, "counters_overhead", "host_clock"),
    }


def _work(seen: Readings) -> dict[str, Value]:
    """FLOP by torch's counter and by the hardware's, and what part of the measured peak they come to."""
    out: dict[str, Value] = {}
    reference, flops = seen.reference, seen.flops
    if flops is not None:
        out["step_flops"] = Value(float(flops), "FLOP", n=1, tier="torch_flop_counter")
        speed = flops / median(seen.off_s)
        out["achieved_flop_per_s"] = Value(speed, "FLOP/s", n=len(seen.off_s), tier="host_clock")
        if reference is not None:
            out["peak_fraction"] = Value(speed / reference.flop_per_s, "1", n=len(seen.off_s), tier="host_clock")
    if reference is not None:
        out["peak_flop_per_s"] = Value(reference.flop_per_s, "FLOP/s", n=1, tier="host_clock")
        if reference.counter is not None and reference.flop_per_count is not None:
            per_step = [
                reference.flop_per_count * counts / one.steps
                for one in seen.counted
                if (counts := total(one.series, reference.counter)) is not None
            ]
            if per_step:
                out["counted_flops"] = value_of(per_step, "counted_flops", seen.counted[0].series.tier)
    return out


def _reference_rows(seen: Readings) -> list[Row]:
    """The reference beside the same unit in the steps, for the waterfall."""
    one = seen.reference
    if one is None:
        return []
    in_steps: tuple[float | None, float | None] = (None, None)
    holding = next((each.series for each in seen.counted if one.counter in each.series.values), None)
    if one.counter is not None and holding is not None:
        share, _, peak = unit_work(holding, one.counter)
        in_steps = (share, peak)
    return [
        {
            "dtype": one.dtype,
            "flop_per_s": one.flop_per_s,
            "counter": one.counter,
            "share": one.share,
            "flop_per_count": one.flop_per_count,
            "peak_counts_per_s": one.peak_counts_per_s,
            "step_share": in_steps[0],
            "step_peak_counts_per_s": in_steps[1],
        }
    ]


def _why(metric: str, seen: Readings, counting: Counting) -> str:
    """Why a figure is missing, and what would give it."""
    if metric in seen.missing:
        return seen.missing[metric]
    if metric in ("achieved_flop_per_s", "peak_fraction"):
        return seen.missing.get("step_flops") or seen.missing.get("peak_flop_per_s", "nothing to divide")
    if counting.source is None:
        return counting.why or "no hardware counters here"
    counter = _counter_of(metric, seen)
    said = next((one.series.missing[counter] for one in seen.counted if counter in one.series.missing), None)
    if said is None and seen.lost:
        said = "; ".join(f"{group}: {reason}" for group, reason in seen.lost.items())
    said = said or f"{counting.source.tier} does not count it"
    return f"{said} ({counting.why})" if counting.reasons and metric in (*LEVELS, *AMOUNTS) else said


def _counter_of(metric: str, seen: Readings) -> str:
    """The counter that a missing figure lacks."""
    if metric in COUNTS:
        return COUNTS[metric][0]
    if metric == "counted_flops" and seen.reference is not None and seen.reference.counter is not None:
        return seen.reference.counter
    own = {"l1_hit_fraction": "l1_sectors", "dram_read_fraction": "dram_throughput"}
    return SHARES.get(metric) or own.get(metric, metric)


def _findings(seen: Readings, values: Mapping[str, Value]) -> Iterator[Finding]:
    yield from unlike(seen.counted)
    for group, reason in seen.lost.items():
        yield Finding("counter_group_lost", f"the counters {group} were not read: {reason}")
    if seen.beside is not None:
        yield from _disagreement(seen, levels_of([seen.beside]), values)


def _disagreement(seen: Readings, other: Mapping[str, list[float]], values: Mapping[str, Value]) -> Iterator[Finding]:
    assert seen.beside is not None
    for level in ("tensor_active_fraction", "dram_fraction"):
        own = values.get(level)
        if own is None or own.value is None or level not in other or abs(own.value - other[level][0]) <= _AGREE:
            continue
        message = (
            f"{find(level).title}: {own.value:.1%} by {own.tier}, {other[level][0]:.1%} by {seen.beside.series.tier} "
            "in the same minute"
        )
        yield Finding("counter_tiers_disagree", message, "trust neither until they agree: look for other work there")
