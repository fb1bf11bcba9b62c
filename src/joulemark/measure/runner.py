"""The only loop: runs the passes of a plan over one step and returns what each saw."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from joulemark.collect.memory import MemoryPeak
from joulemark.collect.power import EnergyReading, PowerSampler, PowerWindow, energy_of
from joulemark.collect.timing import LoneSamples, Timer, first_line, is_out_of_memory
from joulemark.collect.torch_profiler import Profiler, TorchProfiler
from joulemark.errors import JoulemarkError, Unsupported
from joulemark.findings import from_warning
from joulemark.measure import counters, steady
from joulemark.measure.pace import Alone, Pace
from joulemark.measure.plan import Pass, Plan
from joulemark.measure.profile import measurement_of
from joulemark.measure.stopping import BUDGET, Exactly, Precision
from joulemark.measure.value import value_of
from joulemark.metrics import ATTRIBUTION, COUNTERS, PROFILER, format_value
from joulemark.records import Finding, Measurement, Value
from joulemark.stats import summarize
from joulemark.workloads.base import Step

if TYPE_CHECKING:
    from joulemark.measure.attribution_pass import Attributing

_WARM_UP_S = 5.0
"""A warm-up that has not settled by then is ended."""
_SHORT_ROUND_S = 20e-6
"""Rounds shorter than this are repeated inside one timed round: a clock call costs about 0.1 µs."""


@dataclass(frozen=True)
class WarmUp:
    """What came before the first sample.

    Args:
        seconds: time of all warm-up steps.
        step_s: the last, warm step (fenced).
        steps: how many.
    """

    seconds: float
    step_s: float
    steps: int


@dataclass(frozen=True)
class _Job:
    """What all passes of one case share; ``lone_only``: no pass issues steps back to back."""

    step: Step
    rounds: int | None
    iterations: int
    warmup_s: float
    warmup_steps: int
    lone_only: bool


@dataclass
class Runner:
    """Measures one step with the instruments of one device.

    Args:
        timer: of the device that the step runs on.
        memory: peak memory of that device.
        power: sampler of the device's power; None when it is off.
        no_power: why power is off.
        profiler: records the trace of the profiler pass.
        keep_trace: where that trace stays, or the recording of the attribution pass; None throws it away.
        counting: instruments of the counters pass.
        attributing: instruments of the attribution pass.
        document: where the document of that pass goes; None for none.
        label: of the case, for that document.
        dtype: number format of the case, for the counters' reference; None where it has none.
        pace: who decides how many steps a pass takes.
        clock: reads the SM clock while the steady steps run.
    """

    timer: Timer
    memory: MemoryPeak
    power: PowerSampler | None = None
    no_power: str = "power was not asked for (--bench-collect power)"
    profiler: Profiler = field(default_factory=TorchProfiler)
    keep_trace: Path | None = None
    counting: counters.Counting | None = None
    attributing: Attributing | None = None
    document: Path | None = None
    label: str = ""
    dtype: str | None = None
    pace: Pace = field(default_factory=Alone)
    clock: steady.Clock = steady.unknown_clock
    _epoch: float = field(default_factory=lambda: time.time() - time.perf_counter())
    _warm_step_s: float = 0.0
    _warmup_s: float = 0.0
    _stretches: list[steady.Stretch] = field(default_factory=list)

    def measure(
        self,
        step: Step,
        plan: Plan,
        rounds: int | None = None,
        iterations: int | None = None,
        warmup_rounds: int | None = None,
        progress: Callable[[str], None] = lambda _: None,
        build_s: float = 0.0,
    ) -> list[Measurement]:
        """Warm up, then one Measurement per pass; later passes are lost alone if one of them fails.

        Args:
            step: what to repeat.
            plan: its passes.
            rounds, iterations, warmup_rounds: fixed by the user, or None for the pilot to choose.
            progress: told the name of each pass as it begins.
            build_s: time that building the step took, in s, for the warm-up figure.

        Raises:
            Exception: whatever the step raises in its warm-up or in the latency pass (out of memory, say).
        """
        __tracebackhide__ = True
        progress("warm-up")
        gc.collect()
        warm = self._warm_up(step, warmup_rounds or self.pace.warmup_rounds)
        self._warm_step_s = self.pace.agree(warm.step_s)
        loops = iterations or self._iterations(self._warm_step_s, step)
        self._warmup_s = build_s + warm.seconds
        job = _Job(step, rounds, loops, self._warmup_s, warm.steps, plan.find("steady") is None)
        self._stretches = []
        planned = plan.find("steady")
        stretches = 1 if planned is None else steady.stretches_of(planned, self._warm_step_s, self.pace)
        found: dict[str, Measurement] = {}
        for one in plan.visits(stretches):
            progress(one.name)
            if one.name == "latency":
                found[one.name] = self._latency(one, job)
                continue
            seen = self._later_pass(_part_of(one, stretches), step, list(found.values()))
            if seen.values or one.name not in found:  # a later stretch that fails takes nothing from the earlier ones
                found[one.name] = seen
        return list(found.values())

    def _later_pass(self, one: Pass, step: Step, done: list[Measurement]) -> Measurement:
        """A pass whose failure costs its own figures alone."""
        passes: dict[str, Callable[[Pass, Step, list[Measurement]], Measurement]] = {
            "steady": self._steady,
            "issue": self._issue,
            "power": self._power,
            "cold": self._cold,
            "graph": self._graph,
            "profiler": lambda one, step, _: self._profile(one, step),
            "counters": lambda one, step, _: self._count(one, step),
            "attribution": lambda one, step, _: self._attribute(one, step),
        }
        try:
            return passes[one.name](one, step, done)
        except JoulemarkError as error:
            return Measurement(one.name, missing=_all_missing(one.name, str(error)))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not self.pace.alone:
                raise  # the other ranks wait in this very pass
            return Measurement(one.name, missing=_all_missing(one.name, "out of memory in this pass"))

    def _warm_up(self, step: Step, rounds: int | None) -> WarmUp:
        """Run until a step takes no less time than the one before (compilation, caches and clocks have settled)."""
        __tracebackhide__ = True
        times: list[float] = []
        begin = time.perf_counter()
        while True:
            if step.setup is not None:
                step.setup()
            self.timer.synchronize()
            start = time.perf_counter()
            step.run()
            self.timer.synchronize()
            times.append(time.perf_counter() - start)
            spent = time.perf_counter() - begin
            if rounds is not None:
                if len(times) >= max(1, rounds):
                    break
                continue
            settled = len(times) >= 3 and times[-1] > 0.9 * min(times[:-1])
            # The first step alone would be taken for a warm one; of a compiled step it is mostly the compiler.
            late = spent > _WARM_UP_S and len(times) >= 2
            if settled or late or len(times) >= 50:
                break
        return WarmUp(time.perf_counter() - begin, times[-1], len(times))

    @staticmethod
    def _iterations(step_s: float, step: Step) -> int:
        """Calls per timed round: one, except for calls that a clock cannot resolve."""
        if step.setup is not None or step_s >= _SHORT_ROUND_S:
            return 1
        return max(1, round(_SHORT_ROUND_S * 5 / max(step_s, 1e-8)))

    def _utc(self, moment: float) -> float:
        return moment + self._epoch

    def _latency(self, one: Pass, job: _Job) -> Measurement:
        step = job.step
        stop = Exactly(job.rounds) if job.rounds else self.pace.stop(one, self._warm_step_s)
        with _quiet_collector():
            lone = self.timer.lone(step.run, step.setup, stop, job.iterations)
        if not self.pace.alone:
            self.timer.side_streams = self.pace.agree(lone.side_streams)
            lone = replace(lone, side_streams=self.timer.side_streams)
        values = {
            "host_time_s": value_of(lone.host_s, "host_time_s", "host_clock"),
            "warmup_s": Value(job.warmup_s, "s", n=job.warmup_steps, tier="host_clock"),
        }
        samples, missing = {"host_time_s": lone.host_s}, {}
        peak = self.memory.read_bytes()
        if peak is None:
            missing["peak_memory_bytes"] = "this system does not show the peak of a process's memory"
        else:
            values["peak_memory_bytes"] = Value(float(peak), "B", n=1, tier=self.memory.tier)
        if lone.device_s:
            samples["lone_device_time_s"] = lone.device_s
        else:
            missing["device_time_s"] = "no CUDA device clock: the step ran on the host"
        if lone.issue_s:
            samples["lone_issue_s"] = lone.issue_s
        # Where steps cannot follow each other unfenced, the lone ones give the device time.
        alone = job.lone_only or step.setup is not None or lone.side_streams
        if alone and lone.device_s:
            samples["device_time_s"] = lone.device_s
            values["device_time_s"] = value_of(lone.device_s, "device_time_s", self.timer.tier)
        if alone or not lone.device_s:
            _throughput(values, samples, step)
        findings = tuple(_lone_findings(lone, one))
        window = (self._utc(lone.start), self._utc(lone.end))
        return Measurement(one.name, values, samples, missing, findings, windows_utc=(window,))

    def in_turns(
        self, steps: Sequence[Step], one: Pass, rounds: Iterable[Sequence[int]], warmup_rounds: int | None = None
    ) -> list[Measurement]:
        """Steady Measurements of several steps whose stretches take turns; first a warm-up of each.

        What changes slowly, the device's clocks above all, changes for all of them alike.

        Args:
            steps: without setups.
            one: the time of a stretch with its lead-in, its least samples and its aim.
            rounds: of each the steps in their order, by their places in ``steps``; every step comes at least once.
            warmup_rounds: of each step, None to run it until it has settled.

        Raises:
            Exception: whatever a step raises.
        """
        times = [self._warm_up(step, warmup_rounds or self.pace.warmup_rounds).step_s for step in steps]
        found: list[list[steady.Stretch]] = [[] for _ in steps]
        for place in (place for order in rounds for place in order):
            found[place].append(self._stretch(one, steps[place], times[place]))
        return [self._of_stretches(one, step, stretches) for step, stretches in zip(steps, found, strict=True)]

    def _steady(self, one: Pass, step: Step, done: list[Measurement]) -> Measurement:
        """A further stretch of steps back to back; what all of them so far have shown."""
        self._refuse_back_to_back(step)
        self._stretches.append(self._stretch(one, step, self.pace.agree(_step_time(done))))
        return self._of_stretches(one, step, self._stretches)

    def _stretch(self, one: Pass, step: Step, step_s: float) -> steady.Stretch:
        with _quiet_collector():
            return steady.take(self.timer, step.run, one, step_s, self.pace, self.clock)

    def _of_stretches(self, one: Pass, step: Step, stretches: Sequence[steady.Stretch]) -> Measurement:
        samples = steady.samples_of(stretches)
        values = {"device_time_s": steady.time_of(stretches, self.timer.tier)}
        if clocks := samples.get("stretch_sm_clock_hz"):
            values["steady_sm_clock_hz"] = value_of(clocks, "steady_sm_clock_hz", "nvml")
        _throughput(values, samples, step)
        imprecise = [
            finding for each in stretches for finding in _imprecise(each.stopped, each.step_s, "device time", one)
        ]
        windows = tuple((self._utc(each.start), self._utc(each.end)) for each in stretches)
        return Measurement(one.name, values, samples, {}, tuple(imprecise[:1]), windows_utc=windows)

    def _refuse_back_to_back(self, step: Step) -> None:
        if step.setup is not None:
            raise Unsupported("a setup runs between the steps, so they cannot be issued back to back")
        if self.timer.side_streams:
            raise Unsupported("the step works on several streams, so an event of one of them does not end it")

    def _issue(self, one: Pass, step: Step, done: list[Measurement]) -> Measurement:
        self._refuse_back_to_back(step)
        step_s = self.pace.agree(_step_time(done))
        with _quiet_collector():
            issue = self.timer.issue(step.run, self.pace.stop(one, step_s))
        samples = {"host_issue_unprofiled_s": issue.step_s, "host_reference_s": issue.reference_s}
        if not issue.step_s:
            return Measurement(one.name)
        return Measurement(
            one.name, {name: value_of(seconds, name, "host_clock") for name, seconds in samples.items()}, samples
        )

    def _power(self, one: Pass, step: Step, done: list[Measurement]) -> Measurement:
        if self.power is None:
            raise Unsupported(self.no_power)
        if step.setup is not None:
            raise Unsupported("a setup runs between the steps: its energy cannot be told from theirs")
        step_s = self.pace.agree(_step_time(done))
        with _quiet_collector(), self.power.window() as window:
            progress = self.timer.sustain(step.run, one.budget_s, step_s, self.pace.steps(one.budget_s, step_s))
        begin = progress[1][0] if len(progress) > 2 else progress[0][0]
        reading = energy_of(window, begin, progress[-1][0])
        steady_s = next(
            (each.values["device_time_s"].value for each in done if each.name == "steady" and each.values), None
        )
        return self._energy(one, step, steady_s, window, reading, progress)

    def _energy(
        self,
        one: Pass,
        step: Step,
        steady_s: float | None,
        window: PowerWindow,
        reading: EnergyReading,
        progress: list[tuple[float, int]],
    ) -> Measurement:
        """J per item: mean power over the aligned windows times the time that an item took in them."""
        if reading.power_w.value is None or not reading.windows:
            reason = reading.reason or "the power window held no reading"
            return Measurement(one.name, missing=_all_missing("power", reason), conditions=window.conditions)
        start, end = reading.windows[0][0], reading.windows[-1][1]
        in_window = (end - start) / _steps_between(progress, start, end)
        per_item = in_window / step.items
        power = reading.power_w
        interval = None if power.interval is None else (power.interval[0] * per_item, power.interval[1] * per_item)
        values = {
            "power_w": power,
            "energy_per_item_j": Value(
                reading.power_w.value * per_item, "J", interval, power.confidence, power.n, power.tier
            ),
        }
        if steady_s:
            values["sampler_slowdown"] = Value(in_window / steady_s - 1, "1", n=1, tier=self.timer.tier)
        samples = {
            "energy_j": list(reading.energy_j),
            "energy_window_s": list(reading.window_s),
            "energy_steps": [_steps_between(progress, lo, hi) for lo, hi in reading.windows],
        }
        return Measurement(
            one.name,
            values,
            samples,
            {},
            reading.findings,
            window.conditions,
            windows_utc=tuple((self._utc(lo), self._utc(hi)) for lo, hi in reading.windows),
        )

    def _cold(self, one: Pass, step: Step, done: list[Measurement]) -> Measurement:
        _refuse_long(_step_time(done), "the state of the L2 cache at its start is lost in it")
        flush = self.timer.flush_l2()
        if flush is None:
            raise Unsupported("the size of the L2 cache is not known, so it cannot be flushed")
        setup = _both(step.setup, flush)
        with _quiet_collector():
            lone = self.timer.lone(step.run, setup, Precision(one.budget_s, one.target, one.min_samples))
        return Measurement(
            one.name,
            {"device_time_cold_s": value_of(lone.device_s, "device_time_cold_s", self.timer.tier)},
            {"device_time_cold_s": lone.device_s},
            windows_utc=((self._utc(lone.start), self._utc(lone.end)),),
        )

    def _graph(self, one: Pass, step: Step, done: list[Measurement]) -> Measurement:
        _refuse_long(_step_time(done), "its launches are hidden behind its kernels")
        if not step.capturable:
            raise Unsupported("this step is not one that a CUDA graph can hold (host reads, new inputs or its mode)")
        replay = self.timer.capture(step.run)
        with _quiet_collector():
            steady = self.timer.steady(replay, Precision(one.budget_s, one.target, one.min_samples), _step_time(done))
        return Measurement(
            one.name,
            {"device_time_graph_s": value_of(steady.step_s, "device_time_graph_s", self.timer.tier)},
            {"device_time_graph_s": steady.step_s},
            windows_utc=((self._utc(steady.start), self._utc(steady.end)),),
        )

    def _profile(self, one: Pass, step: Step) -> Measurement:
        fitting = int(one.budget_s / max(self._warm_step_s, 1e-9))
        steps = max(one.min_samples, min(_MOST_PROFILED_STEPS, fitting))
        kept = self.keep_trace
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
        with nullcontext() if kept else TemporaryDirectory(prefix="joulemark-trace-") as folder:
            path = kept or Path(str(folder)) / "trace.json"
            with _quiet_collector():
                recording = self.profiler.record(step.run, step.setup, steps, self.timer.synchronize, path)
            window = (self._utc(recording.start), self._utc(recording.end))
            return replace(measurement_of(recording, path, one.name), windows_utc=(window,))

    def _count(self, one: Pass, step: Step) -> Measurement:
        if self.counting is None:
            raise Unsupported("this process has opened no counters")
        with _quiet_collector():
            seen = counters.read_step(self.counting, self.timer, self.dtype, one, step, self._warm_step_s)
        seen.stages.add("build and warm-up", self._warmup_s)
        windows = tuple((self._utc(start), self._utc(end)) for start, end in seen.spans)
        return counters.measurement_of(one.name, seen, self.counting, windows)

    def _attribute(self, one: Pass, step: Step) -> Measurement:
        if self.attributing is None:
            raise Unsupported("this process has opened no instruments for it")
        # every measuring process would pay for these imports
        from joulemark.measure.attribution_pass import attribute_step

        with nullcontext() if self.keep_trace else TemporaryDirectory(prefix="joulemark-recording-") as folder:
            recording = self.keep_trace or Path(str(folder))
            return attribute_step(self.attributing, one, step, recording, self.document, self.label, self.dtype)


_METRICS_OF = {
    "latency": ("host_time_s", "peak_memory_bytes"),
    "steady": ("device_time_s", "throughput_per_s"),
    "issue": ("host_issue_unprofiled_s",),
    "power": ("power_w", "energy_per_item_j"),
    "cold": ("device_time_cold_s",),
    "graph": ("device_time_graph_s",),
    "profiler": PROFILER,
    "counters": COUNTERS,
    "attribution": ATTRIBUTION,
}


def _all_missing(name: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(_METRICS_OF[name], reason)


def missing_metrics(plan: Plan, reasons: dict[str, str]) -> dict[str, str]:
    """Metric → reason for every pass that the plan leaves out and for which a reason is known."""
    out: dict[str, str] = {}
    for name, reason in reasons.items():
        if plan.find(name) is None:
            out.update(_all_missing(name, reason))
    return out


_LONG_STEP_S = 0.05
_MOST_PROFILED_STEPS = 10


def _refuse_long(step_s: float, why: str) -> None:
    if step_s > _LONG_STEP_S:
        raise Unsupported(f"a step of {format_value(step_s, 's')} is long: {why}")


def _step_time(done: list[Measurement]) -> float:
    """The best known time of a step issued back to back, in s."""
    for one in reversed(done):
        for metric in ("device_time_s", "host_time_s"):
            value = one.values.get(metric)
            if value is not None and value.value is not None:
                return value.value
    raise ValueError("no pass has timed the step yet")


def _throughput(values: dict[str, Value], samples: dict[str, list[float]], step: Step) -> None:
    name = "device_time_s" if "device_time_s" in values else "host_time_s"
    time_s = values[name]
    if not time_s.value:
        return
    interval = (
        None
        if time_s.interval is None or time_s.interval[0] <= 0
        else (step.items / time_s.interval[1], step.items / time_s.interval[0])
    )
    values["throughput_per_s"] = Value(
        step.items / time_s.value, "1/s", interval, time_s.confidence, len(samples[name]), time_s.tier
    )


def _steps_between(progress: list[tuple[float, int]], start: float, end: float) -> float:
    """Steps completed between two moments, interpolated between the known completions."""
    moments, counts = zip(*progress, strict=True)
    lo, hi = np.interp((start, end), moments, counts)
    return float(hi - lo)


def _lone_findings(lone: LoneSamples, one: Pass) -> Iterator[Finding]:
    yield from _imprecise(lone.stopped, lone.host_s, "host time", one)
    if lone.side_streams:
        yield Finding(
            "side_streams",
            "the step works on streams other than the current one: its device time ends at a device-wide fence",
        )


def _imprecise(stopped: str, samples: Sequence[float], what: str, one: Pass) -> Iterator[Finding]:
    """A budget that ended before the interval was narrow: said where it is wider than 5 %, ten times the aim."""
    width = summarize(samples).relative_half_width
    if stopped == BUDGET and len(samples) > one.min_samples and width > 0.05:
        percent = f"{100 * width:.1f}" if width < 0.1 else f"{100 * width:.0f}"
        yield Finding(
            "precision_not_reached",
            f"the interval of the {what} is ±{percent} % after {len(samples)} samples",
            "give it more time (--bench-budget), or look for what disturbs the machine",
        )


def _part_of(one: Pass, stretches: int) -> Pass:
    """The pass, or one stretch of the steady one."""
    if one.name != "steady":
        return one
    return replace(one, budget_s=one.budget_s / stretches, min_samples=math.ceil(one.min_samples / stretches))


def _both(first: Callable[[], object] | None, second: Callable[[], object]) -> Callable[[], object]:
    def setup() -> None:
        if first is not None:
            first()
        second()

    return setup


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keep Python's garbage collector out of the samples."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def warnings_as_findings(findings: list[Finding]) -> Iterator[None]:
    """A warning in a benchmark says something about its figures: it becomes a Finding, once per text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield
    texts: set[str] = set()
    for one in caught:
        text = first_line(one.message) if isinstance(one.message, Warning) else str(one.message)
        if text not in texts:
            texts.add(text)
            findings.append(from_warning(one.category.__name__, text))
