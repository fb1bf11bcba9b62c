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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from joulemark.attribution.recording import HOST, RecordedWindow, Recording, Role, write_recording, write_series
from joulemark.collect.flops import calls_per_window
from joulemark.collect.pm_sampling import Pace
from joulemark.collect.torch_profiler import MARK
from joulemark.errors import DeviceError, Unsupported
from joulemark.measure.attribution_bench import CAREFUL_PACE, PACE, Bench, TorchBench
from joulemark.workloads.base import Step

__all__ = ["BEACONS", "CAREFUL_PACE", "PACE", "Bench", "Plan", "TorchBench", "record"]

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
_SLOWER_HOST = 2.0
"""By which the profiler slows the issue of a step: an H200's host launched every 15 µs, every 26 to 45 beside it."""
_SLOWER_LATER = 2.0
"""By which the host may become slower from one stretch to the next."""
_LED = 0.5
"""Of the steps' time: the host leads if it has issued all of them before the device has done so much."""
_FREE = 0.95
"""Of the hold: a host that is done by then did not stand before a queue that was full until the hold ended."""
_LEAST_HOLD, _MOST_HOLD_S = 100.0, 0.1
"""In samples: far longer than a beacon. In s: samples of a window with a longer one would be far apart."""
_LATEST = 6
"""Stretches by which the hold is chosen: two turns of one without instruments, a warm-up and a window."""
_MOST_REPEATS = 6
"""Of stretches and windows of a recording, together, in which the device may have waited although it was held."""
_MOST_LOST = 3
"""Windows that may be lost before the first one is read."""
_COARSER = 1.01
"""Samples so much further apart than asked for are not those that were asked for; less is rounding."""
_HOST_STEPS = 2
_REFERENCE_S = 0.03
_SOURCE_FACTS = ("library", "chip")


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
            that it need not wait for it: their kernels are then back to back, as where the device is the limit. Windows
            then hold as few steps as the host can issue meanwhile: record more of them.
        limit_s: no window is begun after so much time.
    """

    windows: int = 6
    groups: tuple[int, ...] = (0,)
    references: bool = True
    host: bool = True
    dtype: str = "bf16"
    ahead: bool = False
    limit_s: float = math.inf


@dataclass(frozen=True)
class _Stretch:
    """Steps between two fences.

    Args:
        seconds: of the steps on the device.
        issue_s: of the host, from the begin of the hold until all was issued.
        hold_s: for which the device was held before the steps.
    """

    seconds: float
    issue_s: float
    hold_s: float

    @property
    def held(self) -> bool:
        """Whether the host had issued everything before the device was half through.

        Then the device waited for no launch, if each half of the launches takes either side about as long.
        """
        return self.issue_s <= self.hold_s + _LED * self.seconds

    @property
    def tells_of_the_host(self) -> bool:
        """Whether the host issued at its own speed, or too slowly; else it may have stood before a full queue."""
        return self.issue_s <= _FREE * self.hold_s or not self.held


@dataclass
class _Recorder:
    """One recording under way.

    Args:
        interval_s: between samples, now; ``least_interval_s`` is the finest at which they are recorded whole.
        steps: of each stretch and window; ``steps_s`` of them all on the device, as long as it does not wait.
        room: samples of a window for its steps and what holds the device before them.
        hold_s: for which the device is held before the steps, now; 0 for not at all.
        wanted_s: holds with which the host would have been ahead in the latest stretches, were it slower by then.
    """

    bench: Bench
    step: Step
    folder: Path
    label: str
    pace: Pace
    interval_s: float
    least_interval_s: float
    room: float
    steps: int
    steps_s: float = 0.0
    hold_s: float = 0.0
    wanted_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    repeats: int = _MOST_REPEATS
    waited: int = 0
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

    def adapt(self) -> None:
        """Hold the device as the latest stretches ask for, and sample no finer than a window then fits."""
        interval_s = max(self.least_interval_s, self.steps_s / self.room)
        if self.wanted_s:
            self.hold_s = max(_LEAST_HOLD * interval_s, min(max(self.wanted_s), _MOST_HOLD_S))
        self.interval_s = max(interval_s, (self.hold_s + self.steps_s) / self.room)

    def loop(self) -> _Stretch:
        """Steps back to back between two fences, each behind a mark on the device."""
        bench = self.bench
        bench.synchronize()
        holding, issued = bench.stamp(), time.perf_counter()
        if self.hold_s:
            bench.spin(self.hold_s)
        began = bench.stamp()
        for _ in range(self.steps):
            bench.spin(0.0)
            self.step.run()
        bench.spin(0.0)
        issue_s, ended = time.perf_counter() - issued, bench.stamp()
        bench.synchronize()
        done = _Stretch(bench.between(began, ended), issue_s, bench.between(holding, began))
        if self.hold_s and done.tells_of_the_host:
            self.wanted_s.append(_wanted(done.issue_s, done.seconds))
        if self.hold_s and done.held:
            self.steps_s = done.seconds
        return done

    def plain(self) -> float:
        """A stretch like those of the windows around it, which no instrument sees; its seconds per step."""
        while True:
            self.adapt()
            self.beacons()
            done = self.loop()
            if not self._once_more(done):
                return done.seconds / self.steps

    def _once_more(self, done: _Stretch) -> bool:
        """Whether to repeat a stretch or window, since its device may have waited; noted if that is no longer done."""
        if not self.hold_s or done.held:
            return False
        if self.repeats:
            self.repeats -= 1
            return True
        self.waited += 1
        self.notes["hold"] = (
            f"in {self.waited} stretches and windows the device may have waited for the host, although it was held and "
            f"{_MOST_REPEATS} others were repeated for that"
        )
        return False

    def beacons(self) -> None:
        """A train, with stretches around it in which nothing runs."""
        wait(_GAP * self.interval_s)
        for samples in BEACONS:
            self.bench.spin(samples * self.interval_s)
            self.bench.synchronize()
            wait(_GAP * self.interval_s)

    def steps_window(self, group: str) -> None:
        """A window of steps in a pass of counters, in a session of the profiler, behind a stretch without both."""
        if len(self.plain_s) == len(self.step_s):  # else there is one, since a window was lost
            self.plain_s.append(self.plain())
        done = self._window_in_session(group)
        while self._once_more(done):
            self.windows.pop()
            done = self._window_in_session(group)
        self.step_s.append(done.seconds / self.steps)
        self.written()

    def _window_in_session(self, group: str) -> _Stretch:
        """One window, held as its warm-up beside the profiler asks for."""
        runs: list[_Stretch] = []

        def work() -> float:
            self.beacons()
            runs.append(self.loop())
            self.beacons()
            return runs[-1].seconds

        window = RecordedWindow(len(self.windows), "steps", group, self.steps, own_trace=True)
        with self.bench.profiled(self.folder / window.trace, self.loop, host=False):
            self.adapt()
            self._sampled(replace(window, hold_s=self.hold_s), work)
        if self.hold_s:
            self.windows[-1] = replace(self.windows[-1], held=runs[-1].held)
        return runs[-1]

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

    def _sampled(self, window: RecordedWindow, work: Callable[[], float]) -> None:
        """Samples a window, and keeps it with the seconds of its work, of its last run where samples did not fit."""
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
        # where this run had to be sampled at a longer interval, later ones are, too
        interval_s = float(series.source.get("interval_s", self.interval_s))
        if interval_s > _COARSER * self.interval_s:
            self.interval_s = self.least_interval_s = interval_s


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
    beacons = 2 * (sum(BEACONS) + (len(BEACONS) + 2) * _GAP)
    room = _FILLED * pace.most_samples - beacons - 4 * _MARGIN_S / pace.interval_s
    recorder = _Recorder(bench, step, folder, label, pace, pace.interval_s, pace.interval_s, room, _WARM_STEPS)
    recorder.loop()
    done = recorder.loop()
    if plan.ahead:
        _go_ahead(recorder, done.issue_s / _WARM_STEPS)
    else:
        step_s = done.seconds / _WARM_STEPS
        recorder.steps = max(_FEWEST_STEPS, int(room * pace.interval_s / step_s))
        recorder.steps_s = recorder.steps * step_s
    recorder.adapt()
    return recorder


def _go_ahead(recorder: _Recorder, issue_s: float) -> None:
    """Choose the first hold, and as many steps as fit behind it and the device's queue takes meanwhile: one at least.

    Args:
        recorder: to do so for.
        issue_s: of the host for a step, where nothing is held.
    """
    recorder.steps = 1
    issue_s = min(issue_s, recorder.loop().issue_s)  # behind several steps the queue may have been full
    recorder.wanted_s.append(_wanted(_SLOWER_HOST * issue_s, 0.0))
    recorder.adapt()
    first = min(recorder.loop(), recorder.loop(), key=lambda done: done.seconds)  # one may have waited for the host
    slow_s = _SLOWER_HOST * min(issue_s, first.issue_s)
    each_s = first.seconds + _wanted(slow_s, first.seconds)
    steps = max(1, int(recorder.room * recorder.least_interval_s / each_s))
    while True:
        recorder.steps, recorder.steps_s = steps, steps * first.seconds
        recorder.wanted_s.clear()
        recorder.wanted_s.append(_wanted(steps * slow_s, recorder.steps_s))
        recorder.adapt()
        if recorder.loop().held or steps == 1:
            return
        steps //= 2


def _wanted(issue_s: float, seconds: float) -> float:
    """For how long in s to hold the device so that a host that became slower would still lead (``_Stretch.held``).

    Args:
        issue_s: of the host for all steps.
        seconds: of the device for all steps.
    """
    return max(0.0, _SLOWER_LATER * issue_s - _LED * seconds)


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
