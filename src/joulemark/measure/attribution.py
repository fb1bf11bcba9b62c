"""Records a few steps with PM sampling and torch.profiler at once, in windows between beacons, into a folder.

A window is one sampling in one session of the profiler: a train of beacons, steady steps, a train of beacons. The
profiler records the device alone; short kernels mark the steps there. Stretches without instruments stand in turns with
the windows: they show what the instruments cost. Where the host is slower than the device, a spinning kernel may hold
the device before the steps until the host is ahead (:attr:`Plan.ahead`): then the device is the limit. Each pass of
counters has windows of its own; two more hold references, the peaks that a roofline stands on.
:func:`joulemark.attribution.attribute` reads the folder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from joulemark.attribution.recording import (
    HOST,
    Mode,
    RecordedWindow,
    Recording,
    Role,
    write_recording,
    write_series,
)
from joulemark.collect.counters import open_counters
from joulemark.collect.flops import calls_per_window, product_of
from joulemark.collect.pm_sampling import Pace
from joulemark.collect.side_sampling import SideSource
from joulemark.collect.torch_profiler import MARK, prepare
from joulemark.counter_series import CounterSource
from joulemark.errors import DeviceError, NotSupported, Unsupported
from joulemark.workloads.base import Step

BEACONS = (8.0, 6.0, 9.0, 7.0, 10.0, 6.5)
"""Lengths of a train's beacons, in samples: no two alike, so that a train fits the samples in one way."""
_GAP = 6.0
_MARGIN_S = 1e-3
_WARM_STEPS = 3
_FEWEST_STEPS = 2
_FILLED = 0.85
"""Of the samples that a window may give: its steps may be slower beside both instruments."""
_BARE = 3
"""Stretches without instruments before the first session of the profiler, which leaves the host slower."""
_SLOWER_HOST = 1.25
"""By which the profiler slows the issue of a step; steps that waited for an H200's host took 15 to 29 % longer."""
_LEAST_HOLD, _MOST_HELD_STEPS = 100.0, 1.2
"""In samples: far longer than a beacon. In steps: the device's queue holds some 1,000 launches, one large step."""
_MOST_LOST = 3
"""Windows that may be lost before the first one is read."""
_HOST_STEPS = 2
_REFERENCE_S = 0.03
_STREAM_BYTES = 2**29
_SPIN_CYCLES = 2_000_000
_SOURCE_FACTS = ("library", "chip")
PACE = Pace(interval_s=10e-6, most_samples=8000, growth=2.0)
"""CUPTI 13.0 decoded 8,138 to 9,021 samples of a run whole, 20 to 5 µs apart (7 counters, H200)."""
COUNTED = ("sm_active", "sm_active_cycles", "sm_cycles", "issue_active", "instructions", "pipe_tensor",
           "pipe_tensor_cycles", "pipe_fma_instructions", "dram_throughput", "dram_read_bytes", "dram_write_bytes",
           "l2_bytes")  # fmt: skip
"""What a recording counts unless it is told otherwise: the fewer, the sooner CUPTI has decoded a sample."""
CAREFUL_PACE = Pace(interval_s=20e-6, most_samples=3900, growth=1.25)
"""Within one image of CUPTI's usual size."""


@dataclass(frozen=True)
class Plan:
    """What to record.

    Args:
        windows: of each pass of counters.
        groups: passes by their numbers; the first one counts tensor activity, instructions and DRAM.
        references: whether to record the peaks for a roofline.
        host: whether to record in which operator and module's forward each kernel is launched.
        dtype: number format of the reference product.
        ahead: whether the device is held before the steps of each stretch and window, until the host is so far ahead
            that it need not wait for it: their kernels are then back to back, as where the device is the limit.
        limit_s: no window is begun after so much time.
    """

    windows: int = 6
    groups: tuple[int, ...] = (0,)
    references: bool = True
    host: bool = True
    dtype: str = "bf16"
    ahead: bool = False
    limit_s: float = math.inf


class Bench(Protocol):
    """What recording needs of a device and its profiler (:class:`TorchBench`, or a fake)."""

    source: CounterSource
    facts: dict[str, Any]
    mode: Mode

    def synchronize(self) -> None: ...
    def spin(self, seconds: float) -> None: ...
    def stamp(self) -> Any: ...
    def between(self, first: Any, last: Any) -> float: ...
    def mark(self, name: str) -> Any: ...
    def profiled(self, path: Path, warm: Callable[[], object], *, host: bool) -> Any: ...
    def references(self, dtype: str) -> dict[Role, tuple[Callable[[], object], float | None]]: ...


def _own_source(
    uuid: str, device: str, libcupti: str | None, pace: Pace, counters: Collection[str] | None
) -> CounterSource:
    """PM sampling in this process."""
    ladder = open_counters(uuid, device, libcupti, pace, wanted=counters)
    if ladder.source is None or ladder.tier != "pm_sampling":
        ladder.close()
        raise ladder.refused.get("pm_sampling") or NotSupported("this GPU has no PM sampling")
    return ladder.source


class TorchBench:
    """A CUDA device of torch, PM sampling of it, and torch.profiler.

    Args:
        device: as torch calls it.
        libcupti: see :func:`joulemark.collect.counters.open_counters`.
        pace: how finely to sample.
        counters: what to count; None for all that the device has, in several passes.
        beside: whether another process samples, where the sampler and torch.profiler do not bear each other.

    Raises:
        Unsupported: torch or a GPU is missing.
        DeviceError: PM sampling does not work here; its type says why.
    """

    def __init__(
        self,
        device: str = "cuda:0",
        libcupti: str | None = None,
        pace: Pace = PACE,
        counters: Collection[str] | None = COUNTED,
        *,
        beside: bool = False,
    ) -> None:
        try:
            import torch
        except ImportError as error:
            raise Unsupported("torch is not installed, so nothing can be recorded with its profiler") from error
        if not torch.cuda.is_available():
            raise Unsupported("torch sees no CUDA device: kernels and counters are recorded together on one")
        self._torch, self._device = torch, torch.device(device)
        properties = torch.cuda.get_device_properties(self._device)
        uuid = str(properties.uuid)
        uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        opened = SideSource if beside else _own_source
        self.source: CounterSource = opened(uuid, device, libcupti, pace, counters)
        self.mode: Mode = "side process" if beside else "one process"
        self.facts: dict[str, Any] = {"gpu": properties.name, "torch": torch.__version__}
        self._cycles_per_s = self._measured_clock()

    def synchronize(self) -> None:
        """Wait for the device."""
        self._torch.cuda.synchronize(self._device)

    def spin(self, seconds: float) -> None:
        """Keep one SM busy for about so long; returns before it is done."""
        self._torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def stamp(self) -> Any:
        """A point in time of the device, behind all that it was given."""
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    def between(self, first: Any, last: Any) -> float:
        """Seconds between two points in time that the device has passed."""
        return float(first.elapsed_time(last)) * 1e-3

    def _measured_clock(self) -> float:
        self._torch.cuda._sleep(_SPIN_CYCLES)
        began = self.stamp()
        self._torch.cuda._sleep(_SPIN_CYCLES)
        ended = self.stamp()
        self.synchronize()
        return _SPIN_CYCLES / self.between(began, ended)

    def mark(self, name: str) -> Any:
        """A range of the trace."""
        return self._torch.profiler.record_function(name)

    @contextmanager
    def profiled(self, path: Path, warm: Callable[[], object], *, host: bool) -> Iterator[None]:
        """A session of the profiler that warms up first, and writes its trace behind the block.

        Args:
            path: of the trace.
            warm: what runs while it warms up.
            host: whether it also records the host's operators, and Python's frames, among which are the modules'
                forward calls.
        """
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if host else [])]
        profiler = profile(activities=activities, with_stack=host)
        prepare(profiler)
        warm()
        self.synchronize()
        profiler.start_trace()
        try:
            yield
            self.synchronize()
        finally:
            profiler.stop_trace()
        profiler.export_chrome_trace(str(path))

    def references(self, dtype: str) -> dict[Role, tuple[Callable[[], object], float | None]]:
        """Work at the peaks: what runs, and its FLOP where they are known."""
        product = product_of(dtype, str(self._device))
        array = self._torch.ones(_STREAM_BYTES // 4, device=self._device)
        return {"product": (product.run, product.flops), "stream": (lambda: array.add_(1.0), None)}


@dataclass
class _Recorder:
    """One recording under way."""

    bench: Bench
    step: Step
    folder: Path
    label: str
    pace: Pace
    interval_s: float
    steps: int
    hold_s: float = 0.0
    issue_s: float = math.nan
    windows: list[RecordedWindow] = field(default_factory=list)
    bare_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def written(self) -> Recording:
        """What was recorded so far, in its file too."""
        done = Recording(
            label=self.label,
            windows=tuple(self.windows),
            mode=self.bench.mode,
            facts=self.bench.facts,
            bare_step_s=tuple(self.bare_s),
            plain_step_s=tuple(self.plain_s),
            recorded_step_s=tuple(self.step_s),
            missing=self.missing,
            notes=self.notes,
        )
        write_recording(self.folder, done)
        return done

    def loop(self) -> float:
        """Steps back to back between two fences, each behind a mark on the device; seconds on the device."""
        bench = self.bench
        bench.synchronize()
        if self.hold_s:
            bench.spin(self.hold_s)
        began, issued = bench.stamp(), time.perf_counter()
        for _ in range(self.steps):
            bench.spin(0.0)
            self.step.run()
        bench.spin(0.0)
        self.issue_s, ended = (time.perf_counter() - issued) / self.steps, bench.stamp()
        bench.synchronize()
        return bench.between(began, ended)

    def plain(self) -> float:
        """A stretch like those of the windows around it, which no instrument sees; its seconds per step."""
        self.beacons()
        return self.loop() / self.steps

    def beacons(self) -> None:
        """A train, with stretches around it in which nothing runs."""
        wait(_GAP * self.interval_s)
        for samples in BEACONS:
            self.bench.spin(samples * self.interval_s)
            self.bench.synchronize()
            wait(_GAP * self.interval_s)

    def steps_window(self, group: str) -> None:
        """A window of steps in a pass of counters, in a session of the profiler."""

        def work() -> float:
            self.beacons()
            seconds = self.loop()
            self.beacons()
            return seconds

        if len(self.plain_s) == len(self.step_s):  # else there is one, since a window was lost
            self.plain_s.append(self.plain())
        window = RecordedWindow(len(self.windows), "steps", group, self.steps, own_trace=True, hold_s=self.hold_s)
        with self.bench.profiled(self.folder / window.trace, self.loop, host=False):
            seconds = self._sampled(window, work)
        self.step_s.append(seconds / self.steps)
        self.written()

    def reference(self, role: Role, run: Callable[[], object], flop: float | None) -> None:
        """A window of work at a peak; a reason where it cannot be sampled."""
        calls = calls_per_window(run, self.bench.synchronize, _REFERENCE_S)

        def work() -> float:
            self.bench.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                run()
            self.bench.synchronize()
            return time.perf_counter() - began

        all_flop = None if flop is None else flop * calls
        window = RecordedWindow(len(self.windows), role, self.bench.source.groups[0], calls, all_flop)
        try:
            self._sampled(window, work)
        except DeviceError as error:
            self.notes["roofline"] = f"the reference {role} was not sampled: {error}"

    def _sampled(self, window: RecordedWindow, work: Callable[[], float]) -> float:
        """Samples a window, and keeps it; the seconds of its work, of its last run where samples did not fit."""
        spent = [math.nan]

        def run() -> None:
            wait(_MARGIN_S)
            spent.append(work())
            wait(_MARGIN_S)

        series = self.bench.source.record(window.group, run, expected_s=self.interval_s * self.pace.most_samples)
        write_series(self.folder / window.file, series)
        self.missing |= dict(series.missing)
        self.bench.facts |= {key: series.source[key] for key in _SOURCE_FACTS if key in series.source}
        self.windows.append(replace(window, seconds=spent[-1]))
        # where this run had to be sampled at a longer interval, later beacons are longer
        self.interval_s = max(self.interval_s, float(series.source.get("interval_s", self.interval_s)))
        return spent[-1]


def record(
    bench: Bench, step: Step, folder: Path, label: str, plan: Plan | None = None, pace: Pace = PACE
) -> Recording:
    """Record steps of some work into a folder, which then holds all that the attribution needs.

    Args:
        bench: a device with its instruments.
        step: the work; it must do the same each time.
        folder: to write into.
        label: what it is.
        plan: what to record.
        pace: how finely the bench samples.

    Raises:
        Unsupported: a setup runs between the steps.
        DeviceError: the counters of a window of steps could not be read; its type says why.
    """
    plan = plan or Plan()
    if step.setup is not None:
        raise Unsupported("a setup runs between the steps: counters cannot tell its work from theirs")
    end = time.monotonic() + plan.limit_s
    folder.mkdir(parents=True, exist_ok=True)
    recorder = _prepared(bench, step, folder, label, plan, pace)
    recorder.bare_s.extend(recorder.plain() for _ in range(_BARE))
    _record_windows(recorder, _turns(bench.source.groups, plan), end)
    recorder.plain_s.append(recorder.plain())
    for role, (run, flop) in (bench.references(plan.dtype) if plan.references else {}).items():
        recorder.reference(role, run, flop)
    recorder.written()
    if plan.host and time.monotonic() < end:
        _record_host(recorder)
    return recorder.written()


def _record_windows(recorder: _Recorder, groups: Sequence[str], end: float) -> None:
    """Windows of steps in turns of the passes; one that cannot be read costs itself alone.

    Raises:
        DeviceError: none could be read.
    """
    lost: list[DeviceError] = []
    for group in groups:
        over = time.monotonic() > end
        if recorder.windows and over:
            recorder.notes["windows"] = f"{len(recorder.windows)} were recorded when the time was over"
            break
        try:
            recorder.steps_window(group)
        except DeviceError as error:
            lost.append(error)
            if len(lost) >= _MOST_LOST and not recorder.windows:
                break
    if not recorder.windows:
        raise lost[-1]
    if lost:
        recorder.notes["lost_windows"] = f"{len(lost)} could not be read: {lost[-1]}"


def _turns(groups: Sequence[str], plan: Plan) -> list[str]:
    """Passes in turns, so that each has windows over the whole recording."""
    chosen = [groups[number] for number in plan.groups if number < len(groups)]
    return chosen * plan.windows


def _prepared(bench: Bench, step: Step, folder: Path, label: str, plan: Plan, pace: Pace) -> _Recorder:
    """A recorder with as many steps to a window as its samples hold."""
    recorder = _Recorder(bench, step, folder, label, pace, pace.interval_s, _WARM_STEPS)
    recorder.loop()
    step_s, issue_s = recorder.loop() / _WARM_STEPS, recorder.issue_s
    if plan.ahead:
        recorder.hold_s = _hold(_WARM_STEPS, issue_s, 0.0)
        step_s = recorder.loop() / _WARM_STEPS
    beacons = 2 * (sum(BEACONS) + (len(BEACONS) + 2) * _GAP)
    room = _FILLED * pace.most_samples - beacons - 4 * _MARGIN_S / pace.interval_s

    def lasts(steps: int) -> float:
        return steps * step_s + (_hold(steps, issue_s, step_s) if plan.ahead else 0.0)

    most = max(_FEWEST_STEPS, int(room * pace.interval_s / step_s))
    fitting = (steps for steps in range(most, _FEWEST_STEPS, -1) if lasts(steps) <= room * pace.interval_s)
    recorder.steps = next(fitting, _FEWEST_STEPS)
    recorder.interval_s = max(pace.interval_s, lasts(recorder.steps) / room)
    if plan.ahead:
        recorder.hold_s = max(_hold(recorder.steps, issue_s, step_s), _LEAST_HOLD * recorder.interval_s)
    return recorder


def _hold(steps: int, issue_s: float, step_s: float) -> float:
    """For how long in s the device must wait so that the host, slowed by the profiler, stays ahead to the last step.

    Args:
        steps: that follow.
        issue_s: of the host for one.
        step_s: of the device for one.
    """
    slow_s = _SLOWER_HOST * issue_s
    return max(0.0, min(steps * slow_s - (steps - 1) * step_s, _MOST_HELD_STEPS * slow_s))


def _record_host(recorder: _Recorder) -> None:
    """A session of its own with the host's operators and Python's frames, which make the host much slower.

    It stands behind all that is measured, and its times are not used.
    """
    bench = recorder.bench
    recorder.steps = _HOST_STEPS
    try:
        with bench.profiled(recorder.folder / HOST, recorder.loop, host=True):
            for number in range(_HOST_STEPS):
                with bench.mark(f"{MARK}#{number}"):
                    recorder.step.run()
    except RuntimeError as error:
        recorder.notes["modules"] = f"the profiler could not record them ({error})"


def wait(seconds: float) -> None:
    """Let time pass without giving the processor away: sleeping may take a millisecond more."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
