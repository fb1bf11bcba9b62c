"""A run that is known: steps of kernels with given rates, seen by simulated PM samples and a simulated profiler.

For tests of the attribution without a GPU: rates, clock offset, drift and noise are given, so what comes out can be
compared with what went in. The two clocks and the ends of kernels are by default as an H200 showed them
(``results/nvidia-h200/attribution-clocks.json``).

>>> run = SyntheticRun((SyntheticKernel("gemm", 100e-6, {"dram_read_bytes": 1e12}),), steps=3)
>>> series, launches, beacons = run.window(0)
>>> len(launches), len(beacons.start_s)
(3, 12)
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from joulemark.attribution.clock import Beacons
from joulemark.attribution.recording import Mode, RecordedWindow, Recording, Role, write_recording, write_series
from joulemark.attribution.timeline import BEACON, Launches, Timeline
from joulemark.counter_series import COUNTERS, CounterSeries, Tier
from joulemark.errors import DeviceError
from joulemark.trace.chrome import MODULE_PREFIX
from joulemark.trace.iterations import OWN_MARK

_CLOCK_HZ = 1.98e9
_SMS = 132
_BEACON_SAMPLES = (8.0, 6.0, 9.0, 7.0, 10.0, 6.5)
_GAP_SAMPLES = 6.0
_MARGIN_S = 1e-3
_MARK_S, _AROUND_MARK_S = 1.2e-6, 1e-6
_BEHIND_HOLD_S = 4e-6
_BETWEEN_WINDOWS_S = 0.05
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SyntheticKernel:
    """A kernel of a step.

    Args:
        name: of it; several may have the same.
        length_s: of a launch, in s.
        rates: canonical counter → counts per s, or the share of peak, while it runs.
        gap_s: behind it, in which nothing runs.
        operator: that launches it.
        module: in whose forward call it is launched; None outside of any.
    """

    name: str
    length_s: float
    rates: Mapping[str, float]
    gap_s: float = 1e-6
    operator: str = "aten::op"
    module: str | None = None


@dataclass(frozen=True)
class _Event:
    """A kernel that ran: times on the timeline's clock in s, rates as they were in this launch."""

    kernel: SyntheticKernel
    step: int
    start: float
    end: float
    factor: float


@dataclass
class SyntheticRun:
    """Windows of steps of known kernels.

    Args:
        kernels: of a step, in order.
        steps: of each window.
        windows: how many.
        interval_s: between samples.
        offset_s, drift: of the samples' clock against the timeline's.
        sample_noise: relative standard deviation of a sample's counts.
        rate_noise: relative standard deviation of the rates of a launch.
        length_noise: relative standard deviation of a launch's length.
        tick_s: what the times of samples and of the profiler are multiples of.
        stamp_noise_s: standard deviation of the times that the profiler records.
        lead_s, tail_s: by which it records a kernel's begin before, and its end after its SMs work.
        late_first_s: by which it records the first kernel of a window later than others, behind a pause.
        hold_s: for which a spinning kernel holds the device before the steps.
        head_s: at a kernel's begin, at the most a quarter of it, in which it counts nothing yet; beacons have none.
        seed: of all noise.
    """

    kernels: Sequence[SyntheticKernel]
    steps: int = 20
    windows: int = 1
    interval_s: float = 20e-6
    offset_s: float = 3.0
    drift: float = 2e-5
    sample_noise: float = 0.01
    rate_noise: float = 0.02
    length_noise: float = 0.01
    tick_s: float = 32e-9
    stamp_noise_s: float = 0.03e-6
    lead_s: float = 0.2e-6
    tail_s: float = 0.1e-6
    late_first_s: float = 0.2e-6
    hold_s: float = 0.0
    head_s: float = 1.5e-6
    seed: int = 0
    _rng: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    @property
    def counters(self) -> tuple[str, ...]:
        """Those that any kernel has a rate of, and what shows the beacons."""
        names = dict.fromkeys(name for one in self.kernels for name in one.rates)
        return tuple(names | {"sm_active_cycles": None})

    def true_per_step(self, counter: str, name: str | None = None) -> float:
        """Counts per step of all kernels, or of those of one name; of a share, its share of peak × s."""
        return sum(one.length_s * _rate(one, counter) for one in self.kernels if name is None or one.name == name)

    def window(self, number: int, steps: int | None = None) -> tuple[CounterSeries, Launches, Beacons]:
        """One window: its samples, its launches with places in the order of the step, and its beacons.

        Args:
            number: of the window.
            steps: in it, where they are not the run's.
        """
        steps = self.steps if steps is None else steps
        begin = 1.0 + number * _BETWEEN_WINDOWS_S
        before, now = self._beacons(begin)
        held = [self._spin(now, self.hold_s)] if self.hold_s else []
        events, now = self._steps(now + self.hold_s + _BEHIND_HOLD_S, number * steps, steps)
        behind, now = self._beacons(now + _GAP_SAMPLES * self.interval_s)
        series = self._series([*before, *held, *events, *behind], begin - _MARGIN_S, now + _MARGIN_S)
        names = {one.name: code for code, one in enumerate(self.kernels)}
        place = np.arange(len(events)) % len(self.kernels)
        launches = Launches(
            *self._stamps(events),
            name=np.array([names[one.kernel.name] for one in events], np.int64),
            step=np.array([one.step for one in events], np.int64),
            place=place.astype(np.int64),
        )
        return series, launches, Beacons(*self._stamps([*before, *behind]), before=len(before))

    def timeline(self, launches: Sequence[Launches], beacons: Sequence[Beacons]) -> Timeline:
        """What the trace of some windows would tell."""
        names = [one.name for one in self.kernels]
        codes = {name: code for code, name in enumerate(names)}
        seen: dict[str, int] = {}
        places = []
        for name in names:
            places.append((codes[name], seen.get(name, 0)))
            seen[name] = seen.get(name, 0) + 1
        joined = Launches(
            *(np.concatenate([getattr(one, key) for one in launches]) for key in ("start_s", "end_s")),
            *(np.concatenate([getattr(one, key) for one in launches]) for key in ("name", "step", "place")),
        )
        window_of_step = np.repeat(np.arange(len(launches)), self.steps)
        operators = [one.operator for one in self.kernels]
        return Timeline(names, places, joined, window_of_step, dict(enumerate(beacons)), operators, [], ())

    def recorded(self) -> tuple[Recording, Timeline, dict[int, CounterSeries]]:
        """A recording as :func:`joulemark.attribution.document.document_of` takes it, without files."""
        found = [self.window(number) for number in range(self.windows)]
        timeline = self.timeline([launches for _, launches, _ in found], [beacons for _, _, beacons in found])
        return self._recording("synthetic"), timeline, dict(enumerate(series for series, _, _ in found))

    def write(self, folder: Path, label: str = "synthetic") -> None:
        """Write a recording as :func:`joulemark.measure.attribution.record` does."""
        folder.mkdir(parents=True, exist_ok=True)
        recording = self._recording(label)
        for one in recording.windows:
            series, launches, beacons = self.window(one.number)
            write_series(folder / one.file, series)
            write_trace(folder / one.trace, self.device_events(launches, beacons))
        write_recording(folder, recording)

    def _recording(self, label: str) -> Recording:
        windows = tuple(
            RecordedWindow(number, "steps", "pass1", self.steps, own_trace=True, hold_s=self.hold_s)
            for number in range(self.windows)
        )
        step_s = sum(one.length_s + one.gap_s for one in self.kernels)
        facts = {"gpu": "Synthetic GPU", "chip": "simulated", "library": "simulated"}
        plain, beside = (step_s,) * (self.windows + 1), (step_s,) * self.windows
        return Recording(label, windows, "one process", facts, plain_step_s=plain, recorded_step_s=beside)

    def _beacons(self, now: float) -> tuple[list[_Event], float]:
        events = []
        for samples in _BEACON_SAMPLES:
            length = samples * self.interval_s
            events.append(self._spin(now, length))
            now += length + _GAP_SAMPLES * self.interval_s * (1 + 0.3 * self._rng.random())
        return events, now

    def _spin(self, now: float, seconds: float) -> _Event:
        kernel = SyntheticKernel(BEACON, seconds, {"sm_active_cycles": _CLOCK_HZ})
        return _Event(kernel, -1, now, now + seconds, 1.0)

    def _steps(self, now: float, first: int, steps: int) -> tuple[list[_Event], float]:
        events = []
        for step in range(first, first + steps):
            for kernel in self.kernels:
                length = kernel.length_s * max(0.1, self._rng.normal(1, self.length_noise))
                factor = max(0.0, self._rng.normal(1, self.rate_noise)) * kernel.length_s / length
                events.append(_Event(kernel, step, now, now + length, factor))
                now += length + kernel.gap_s + self.lead_s + self.tail_s
        return events, now

    def _stamps(self, events: Sequence[_Event]) -> tuple[Floats, Floats]:
        """What the profiler records of some events."""
        times = np.array([(one.start, one.end) for one in events]).reshape(-1, 2)
        times = times + self._rng.normal(0, self.stamp_noise_s, times.shape)
        if events and events[0].kernel.name == BEACON:
            times[0] += self.late_first_s
        return self._ticks(times[:, 0] - self.lead_s), self._ticks(times[:, 1] + self.tail_s)

    def _ticks(self, times: Floats) -> Floats:
        return np.asarray(np.round(times / self.tick_s) * self.tick_s) if self.tick_s else times

    def _series(self, events: Sequence[_Event], begin: float, until: float) -> CounterSeries:
        """Samples of evenly growing counts, at even intervals of the samples' own clock."""
        phase = self._rng.random() * self.interval_s
        edges = self._ticks(np.arange(self._mapped(begin) + phase, self._mapped(until), self.interval_s))
        at = (edges - self.offset_s) / (1 + self.drift)
        times = np.array([(one.start, one.end) for one in events])
        values = {name: self._counted(name, events, times, at) for name in self.counters}
        first = float(edges[0])
        return CounterSeries(
            tier="pm_sampling",
            group="pass1",
            start_s=edges[:-1] - first,
            end_s=edges[1:] - first,
            values=values,
            units={name: COUNTERS[name].unit for name in values},
            raw={name: f"simulated_{name}" for name in values},
            source={"library": "simulated", "chip": "simulated", "interval_s": self.interval_s},
        )

    def _counted(self, name: str, events: Sequence[_Event], times: Floats, at: Floats) -> Floats:
        rate = np.array([one.factor * _rate(one.kernel, name) for one in events])
        counts = rate * (times[:, 1] - times[:, 0])
        beacon = np.array([one.kernel.name == BEACON for one in events])
        head = np.where(beacon, 0.0, np.minimum(self.head_s, (times[:, 1] - times[:, 0]) / 4))
        knots = np.stack([times[:, 0] + head, times[:, 1]], axis=1).reshape(-1)
        so_far = np.repeat(np.concatenate([[0.0], np.cumsum(counts)]), 2)[1:-1]
        sampled = np.diff(np.interp(at, knots, so_far))
        noisy: Floats = sampled * self._rng.normal(1, self.sample_noise, len(sampled))
        return noisy / np.diff(at) if COUNTERS[name].unit == "1" else noisy

    def _mapped(self, timeline_s: float) -> float:
        return self.offset_s + (1 + self.drift) * timeline_s

    def device_events(self, launches: Launches, beacons: Beacons) -> list[dict[str, Any]]:
        """A window's events as torch.profiler writes them that records the device alone: its calls and its kernels."""
        spins = [(float(one), float(two)) for one, two in zip(beacons.start_s, beacons.end_s, strict=True)]
        begins = [float(launches.start_s[launches.step == step].min()) for step in np.unique(launches.step)]
        marks = [*(one - _AROUND_MARK_S for one in begins), float(launches.end_s.max()) + _AROUND_MARK_S + _MARK_S]
        if self.hold_s:
            released = float(launches.start_s.min()) - _BEHIND_HOLD_S
            spins.append((released - self.hold_s, released))
        kernels = [(BEACON, *one) for one in spins] + [(BEACON, one - _MARK_S, one) for one in marks]
        names = [self.kernels[int(place)].name for place in launches.place]
        kernels += zip(names, launches.start_s.tolist(), launches.end_s.tolist(), strict=True)
        kernels.sort(key=lambda one: one[1])
        host = kernels[0][1]
        return [
            event
            for number, (name, start, end) in enumerate(kernels)
            for event in _launched(number, min(start - 3e-6, host + number * 1e-7), name, start, end, None)
        ]

    def host_events(self, launches: Launches) -> list[dict[str, Any]]:
        """Events of some steps with the host's marks and operators, and the modules' forward calls."""
        events, ids = [], iter(range(len(launches)))
        host, each = float(launches.start_s[0]) - 1e-3, 1e-7
        for step in np.unique(launches.step):
            rows = np.flatnonzero(launches.step == step)
            events.append(_host(f"{OWN_MARK}#{step}", "user_annotation", host, host + each * (len(rows) + 1)))
            for row in rows:
                host += each
                kernel = self.kernels[int(launches.place[row])]
                span = float(launches.start_s[row]), float(launches.end_s[row])
                events += _launched(next(ids), host, kernel.name, *span, kernel.operator)
                if kernel.module is not None:
                    call = f"{MODULE_PREFIX}{kernel.module}"
                    events.append(_host(call, "python_function", host - 2e-8, host + 6e-8))
            host += 2 * each
        return events


@dataclass
class SyntheticBench:
    """A device whose instruments see a known run (see :class:`joulemark.measure.attribution.Bench`).

    What it is asked to run is run and not looked at: every window shows the next window of the known run, with as many
    steps as were marked.

    Args:
        run: what they see.
        fails: what recording a window raises.
    """

    run: SyntheticRun
    fails: DeviceError | None = None
    facts: dict[str, Any] = field(default_factory=lambda: {"gpu": "Synthetic GPU"})
    mode: Mode = "one process"
    marks: list[str] = field(default_factory=list)
    _events: list[dict[str, Any]] = field(default_factory=list, init=False)
    _window: int = field(default=0, init=False)
    _spun: int = field(default=0, init=False)

    @property
    def source(self) -> SyntheticBench:
        """Itself: it samples too."""
        return self

    @property
    def tier(self) -> Tier:
        """Of PM sampling."""
        return "pm_sampling"

    @property
    def groups(self) -> tuple[str, ...]:
        """One pass."""
        return ("pass1",)

    def counters(self, group: str) -> tuple[str, ...]:
        """All that the run has."""
        return self.run.counters

    def record(self, group: str, run: Callable[[], object], expected_s: float | None = None) -> CounterSeries:
        """The next window.

        Raises:
            DeviceError: the one given.
        """
        if self.fails is not None:
            raise self.fails
        self._spun = 0
        run()
        series, launches, beacons = self.run.window(self._window, max(1, self._spun - 1))
        self._events = self.run.device_events(launches, beacons)
        self._window += 1
        return series

    def close(self) -> None:
        """Nothing is held."""

    def synchronize(self) -> None:
        """Nothing is waited for."""

    def spin(self, seconds: float) -> None:
        """The known run has beacons of its own; marks of steps are counted."""
        self._spun += seconds <= 0

    def stamp(self) -> float:
        """Now."""
        return time.perf_counter()

    def between(self, first: float, last: float) -> float:
        """What passed, on the host."""
        return last - first

    def mark(self, name: str) -> AbstractContextManager[None]:
        """Remembers the name."""
        self.marks.append(name)
        return nullcontext()

    @contextmanager
    def profiled(self, path: Path, warm: Callable[[], object], *, host: bool) -> Iterator[None]:
        """Writes the trace of the window in the block, or one of the host."""
        warm()
        yield
        write_trace(path, self.run.host_events(self.run.window(self._window, 2)[1]) if host else self._events)

    def references(self, dtype: str) -> dict[Role, tuple[Callable[[], object], float | None]]:
        """None: the known run has no peaks."""
        return {}


def write_trace(path: Path, events: Sequence[Mapping[str, Any]]) -> None:
    """Write events as torch.profiler's compressed trace."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": list(events)}, file)


def _rate(kernel: SyntheticKernel, counter: str) -> float:
    every = _SMS * _CLOCK_HZ if counter == "sm_active_cycles" else 0.0
    return kernel.rates.get(counter, every)


def _host(name: str, category: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start * 1e6, "dur": (end - start) * 1e6}


def _launched(
    correlation: int, at: float, name: str, start: float, end: float, operator: str | None
) -> list[dict[str, Any]]:
    call = {**_host("cudaLaunchKernel", "cuda_runtime", at, at + 2e-8), "args": {"correlation": correlation}}
    ran = {**_host(name, "kernel", start, end), "pid": 0, "tid": 7, "args": {"device": 0, "correlation": correlation}}
    around = [] if operator is None else [_host(operator, "cpu_op", at - 1e-8, at + 4e-8)]
    return [*around, call, ran]
