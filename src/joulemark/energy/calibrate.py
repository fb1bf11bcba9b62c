"""Measures the plan of a calibration on a GPU, window by window, each stored before the next."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, get_args

from joulemark.energy.caches import Caches, chase_sizes, find_caches
from joulemark.energy.counting import Counting
from joulemark.energy.engine import CounterRecorder, Engine, GpuFacts, Launch, Meter, Run
from joulemark.energy.microbench.suite import SUITE, Benchmark, Operands, benchmarks_for, tiles_for
from joulemark.energy.plan import DUTIES, meets_limit
from joulemark.energy.windows import CalibrationWindow, Counted, Point, WindowWriter
from joulemark.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from joulemark.collect.energy import PowerWindow
    from joulemark.collect.power import PowerSampler

WINDOW_S = 1.0
"""Nine updates or ten of a counter that moves every 100 ms: power to about 0.4 % (docs/energy-model.md, "The length
of a window")."""
SETTLE_S = 0.25
LIMIT_S = 500.0
_CAPPED_SETTLE_S = 1.2
"""Clocks fall for about a second before they are where the power limit holds them; such windows are measured again."""
_AFTER_CAP_S = 1.0
"""Clocks need that long to come back after a window that met the power limit."""
_LAUNCH_S = 4e-3
_COUNT_S = 2.0
_COUNTED_LAUNCHES = 10
_PILOT_ITERATIONS = 64
_PAUSE_NS = (200, 500_000)


@dataclass(frozen=True)
class Progress:
    """Where a plan stands.

    Args:
        measured: points measured by this command.
        left: points that still lack a window.
    """

    measured: int
    left: int


class BenchmarkFailed(DeviceError):
    """A kernel did not run; the device may not answer this process any more."""


class SampledMeter:
    """Reads a GPU's sensors by a thread beside the work.

    Args:
        sampler: of the GPU.
    """

    _switch_s = 5e-4
    """After which a thread that launches work makes way for the sampler; an update that is seen late costs accuracy."""

    def __init__(self, sampler: PowerSampler) -> None:
        self._sampler = sampler

    def __call__(self, run: Callable[[], Run]) -> tuple[Run, PowerWindow]:
        before = sys.getswitchinterval()
        sys.setswitchinterval(self._switch_s)
        try:
            with self._sampler.window() as window:
                ran = run()
        finally:
            sys.setswitchinterval(before)
        return ran, window


def chase_curve(engine: Engine) -> list[tuple[int, float]]:
    """(footprint in bytes, cycles per dependent load) of a pointer chase, as ``find_caches`` takes it."""
    return [(size, engine.chase(size)) for size in chase_sizes(engine.facts.l2_bytes)]


def measure_caches(engine: Engine) -> Caches:
    """The ends of the caches by pointer chase.

    Raises:
        MeasurementError: the latency curve does not show them.
    """
    return find_caches(*zip(*chase_curve(engine), strict=True))


def l2_bytes_of(facts: GpuFacts, caches: Caches | None) -> int:
    """What surely stays in the L2: as measured, else half of what the driver says."""
    return facts.l2_bytes // 2 if caches is None else caches.l2.fits_bytes


def measure(
    engine: Engine,
    meter: Meter,
    points: Sequence[Point],
    caches: Caches | None,
    writer: WindowWriter,
    limit_s: float = LIMIT_S,
    window_s: float = WINDOW_S,
    clock: Callable[[], float] = time.perf_counter,
    tell: Callable[[Progress, CalibrationWindow], None] | None = None,
) -> Progress:
    """Measure the points that the writer's file lacks, until all are there or time is up.

    Args:
        engine, meter: the GPU.
        points: the plan.
        caches: size the footprints; None where their ends were not found.
        writer: stores each window.
        limit_s: after which no further window begins.
        window_s: length of a window.
        clock: of the limit.
        tell: called after each window.

    Raises:
        BenchmarkFailed: a benchmark did not run; the writer's file says so, and whoever goes on leaves it out.
    """
    begin = clock()
    settle_s = SETTLE_S
    todo = [point for point in points if point.key not in writer.done and point.benchmark not in writer.failed]
    progress = Progress(0, len(todo))
    for number, point in enumerate(todo, start=1):
        if clock() - begin > limit_s - 2 * window_s - _CAPPED_SETTLE_S - SETTLE_S:
            break
        settling_s = _CAPPED_SETTLE_S if meets_limit(point.benchmark, point.operands, point.duty) else settle_s
        with _noted(point.benchmark, writer):
            window = measure_point(engine, meter, point, caches, window_s, settling_s)
            if window.capped and settling_s < _CAPPED_SETTLE_S:
                window = measure_point(engine, meter, point, caches, window_s, _CAPPED_SETTLE_S)
        settle_s = _AFTER_CAP_S if window.capped else SETTLE_S
        writer.add(window)
        progress = Progress(number, len(todo) - number)
        if tell is not None:
            tell(progress, window)
    return progress


def count(
    engine: Engine,
    recorder: CounterRecorder,
    caches: Caches | None,
    writer: WindowWriter,
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
    tell: Callable[[int, Counted], None] | None = None,
) -> int:
    """Count each benchmark that the writer's file lacks under hardware counters, those of the fit first.

    Every group of counters sees the same launches on random operands; counts are per launch.

    Args:
        engine: the GPU.
        recorder: of its counters.
        caches: size the footprints; None where their ends were not found.
        writer: stores what was counted.
        limit_s: after which no further benchmark begins.
        clock: of the limit.
        tell: called after each benchmark with how many are left.

    Returns:
        How many benchmarks are still to be counted.
    """
    begin = clock()
    counting = Counting(recorder)
    todo = [one for one in benchmarks_for(engine.facts.architecture) if one.work(engine.facts.architecture)]
    todo = [one for one in sorted(todo, key=_is_check) if one.name not in writer.counted | writer.failed]
    for number, benchmark in enumerate(todo):
        if clock() - begin > limit_s - _COUNT_S:
            return len(todo) - number
        with _noted(benchmark.name, writer):
            counted = count_benchmark(engine, counting, benchmark, caches)
        writer.add(counted)
        if tell is not None:
            tell(len(todo) - number - 1, counted)
    return 0


@contextmanager
def _noted(benchmark: str, writer: WindowWriter) -> Iterator[None]:
    """A failure is on disk before it ends the command: what it did to the device may be more than one kernel."""
    try:
        yield
    except Exception as error:  # cuda-core's errors have no common type over releases
        writer.fail(benchmark, f"{type(error).__name__}: {error}")
        raise BenchmarkFailed(f"{benchmark} failed: {error}", "go on with --resume, which leaves it out") from error


def _is_check(benchmark: Benchmark) -> bool:
    return benchmark.role == "check"


def count_benchmark(engine: Engine, counting: Counting, benchmark: Benchmark, caches: Caches | None) -> Counted:
    """One benchmark under hardware counters, on all SMs: there a footprint that is too small would show."""
    facts = engine.facts
    kind: Operands = "random" if "random" in benchmark.operands else "zero"
    engine.load(benchmark, kind, tiles_for(benchmark, l2_bytes_of(facts, caches), facts.sms, facts.memory_bytes))
    launch = sized(engine, facts.sms, paused=False)
    expected_s = _COUNTED_LAUNCHES * engine.time_launch(launch)
    totals = counting.of(lambda: engine.repeat(launch, _COUNTED_LAUNCHES), _COUNTED_LAUNCHES, expected_s)
    instructions = engine.instructions(benchmark, paused=False)
    counts = benchmark.counts_per_launch(facts.architecture, launch.blocks, launch.iterations, instructions)
    return Counted(benchmark.name, counts, totals.each)


def measure_point(
    engine: Engine, meter: Meter, point: Point, caches: Caches | None, window_s: float, settle_s: float = SETTLE_S
) -> CalibrationWindow:
    """One window of one benchmark.

    Args:
        engine, meter: the GPU.
        point: what to run.
        caches: size the footprints; None where their ends were not found.
        window_s: length of the counted stretch, in s.
        settle_s: of the same work before it, in s.
    """
    benchmark = SUITE[point.benchmark]
    duty = DUTIES[point.duty]
    utc = datetime.now(UTC).isoformat(timespec="seconds")
    if not benchmark.kernel:
        ran, power = meter(lambda: engine.run(None, settle_s, window_s))
        return CalibrationWindow(point, 0, 0, 0, 0, ran.start, ran.end, {}, power, utc)
    sms = engine.facts.sms
    kinds: dict[str, Operands] = {kind: kind for kind in get_args(Operands)}
    tiles = tiles_for(benchmark, l2_bytes_of(engine.facts, caches), sms, engine.facts.memory_bytes)
    engine.load(benchmark, kinds[point.operands], tiles)
    launch = sized(engine, duty.blocks(sms), duty.paused)
    if duty.bursts:
        launch = replace(launch, rest_s=_LAUNCH_S)
    ran, power = meter(lambda: engine.run(launch, settle_s, window_s))
    counts = _counts(engine, benchmark, launch, ran)
    return CalibrationWindow(
        point, launch.blocks, launch.iterations, launch.sleep_ns, ran.launches, ran.start, ran.end, counts, power, utc
    )


def sized(engine: Engine, blocks: int, paused: bool) -> Launch:
    """A launch of the loaded kernel that takes about 4 ms; a pause is as long as an iteration."""
    pilot = Launch(blocks, _PILOT_ITERATIONS)
    each = _per_iteration(engine, pilot)
    if paused:
        low, high = _PAUSE_NS
        pilot = Launch(blocks, _PILOT_ITERATIONS, min(max(round(each * 1e9), low), high))
        each = _per_iteration(engine, pilot)
    # The pilot of a short kernel is mostly its launch: once more with a length that counts.
    longer = Launch(blocks, max(_PILOT_ITERATIONS, min(round(_LAUNCH_S / 4 / each), 1 << 24)), pilot.sleep_ns)
    each = _per_iteration(engine, longer)
    return Launch(blocks, max(1, min(round(_LAUNCH_S / each), 1 << 24)), pilot.sleep_ns)


def _per_iteration(engine: Engine, launch: Launch) -> float:
    return max(engine.time_launch(launch) / launch.iterations, 1e-10)


def _counts(engine: Engine, benchmark: Benchmark, launch: Launch, ran: Run) -> Mapping[str, float]:
    busy_s = (ran.end - ran.start) * (0.5 if launch.rest_s else 1.0)
    over = benchmark.counts_over(launch.blocks, busy_s)
    if not benchmark.work(engine.facts.architecture):
        return over
    instructions = engine.instructions(benchmark, launch.sleep_ns > 0)
    per_launch = benchmark.counts_per_launch(engine.facts.architecture, launch.blocks, launch.iterations, instructions)
    return {unit: count * ran.launches for unit, count in per_launch.items()} | over
