"""PM sampling: hardware counters over time while the whole model runs, through CUPTI.

The GPU's performance monitors write a record per interval; nothing is replayed or serialized, and a run costs about
nothing. :mod:`joulemark.collect.pm_metrics` packs the counters into passes; each is *proved by decoding* once on the
device (:func:`prove`), since CUPTI accepts passes that it then cannot decode.

Source: CUPTI documentation, "CUPTI PM Sampling API".
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from joulemark.collect.cupti_device import Samples, SamplingSettings
from joulemark.collect.pm_metrics import METRICS, WITHHELD, Chip, Group, Metric, plan
from joulemark.counter_series import COUNTERS, CounterSeries, Tier
from joulemark.errors import CountersOverflow, CountersUnreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

_PER_CENT = 100.0
_NS_PER_S = 1e9
_NO_TIME_INTERVAL = ("GA100", "TU1")
_SYSTEM_CLOCK_HZ = 1.6e9
"""Only to turn an interval into clock cycles on chips that know no other; what a sample lasted is read, not assumed."""

INTERVAL_S = 100e-6
MOST_SAMPLES = 2000
"""Of one run: each takes CUPTI some 0.25 ms to decode, and some 24 kB of the hardware buffer [GH100, 37 metrics]."""

_ROOM, _SPARE_SAMPLES = 1.5, 100
"""Samples that a buffer has room for, over those that a run is expected to give: clearing a large one takes long."""
_SAMPLE_BYTES, _BUFFER_STEP = 32 * 2**10, 16 * 2**20
"""Room for a sample in the hardware buffer, and what its size is a multiple of, in B."""
_EXERCISE_S = 0.1
"""Longest time that the work of a proof is expected to take, in s."""
_TRIES = 3
_STALE = 2.0
_SAME_RATE = 0.02
_SAME_TIME_S = 0.1
_LEAST_COVERED = 0.98
"""Of a run, by its samples: of a part of a step nothing can be said about the step."""


class Sampling(Protocol):
    """One sampling of a device (:class:`joulemark.collect.cupti_device.Sampler`)."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def read(self) -> Samples: ...
    def close(self) -> None: ...


class PmDevice(Chip, Protocol):
    """What this module needs of a device (:class:`joulemark.collect.cupti_device.CuptiDevice`, or a fake)."""

    def sampler(self, metrics: Sequence[str], metric_set: str | None, settings: SamplingSettings) -> Sampling: ...


@dataclass(frozen=True)
class Run:
    """Work that was sampled.

    Args:
        samples: what was decoded.
        interval_s: between samples, in s, as asked for.
        by_time: whether the device keeps that interval itself.
        run_s: time of the work on the host, in s.
        begin_ns, end_ns: of the work, Unix time in ns.
    """

    samples: Samples
    interval_s: float
    by_time: bool
    run_s: float
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class Pace:
    """How finely runs are sampled.

    Args:
        interval_s: least time between samples, in s.
        most_samples: of one run.
        growth: of the interval where a run gave more than can be held.
    """

    interval_s: float = INTERVAL_S
    most_samples: int = MOST_SAMPLES
    growth: float = 4.0

    def interval_for(self, expected_s: float | None) -> float:
        """Interval between samples, in s, so that a run of a length in s gives no more than the most samples."""
        return max(self.interval_s, (expected_s or 0.0) / self.most_samples)

    def settings(self, chip: str, interval_s: float, expected_s: float | None = None) -> SamplingSettings:
        """How to sample a chip (``GH100``) at an interval, with room for a run of a length in s; None for the most."""
        by_time = not chip.startswith(_NO_TIME_INTERVAL)
        interval = interval_s * _NS_PER_S if by_time else interval_s * _SYSTEM_CLOCK_HZ
        usual = SamplingSettings(interval=max(1, round(interval)), by_time=by_time)
        most = max(usual.image_samples, self.most_samples + _SPARE_SAMPLES)
        room = max(usual.buffer_bytes, _buffer_bytes(most)) if most > usual.image_samples else usual.buffer_bytes
        if expected_s is None:
            return replace(usual, buffer_bytes=room, image_samples=most)
        samples = math.ceil(_ROOM * expected_s / interval_s) + _SPARE_SAMPLES
        return replace(usual, buffer_bytes=min(_buffer_bytes(samples), room), image_samples=min(samples, most))


SWEEP_PACE = Pace(most_samples=1000)
"""Of a sweep's windows: one of 0.1 s or less is sampled as finely as any, one of a single long step half as finely."""


def _buffer_bytes(samples: int) -> int:
    return _BUFFER_STEP * math.ceil(samples * _SAMPLE_BYTES / _BUFFER_STEP)


def record_run(
    device: PmDevice,
    group: Group,
    run: Callable[[], object],
    interval_s: float,
    expected_s: float | None = None,
    pace: Pace | None = None,
) -> Run:
    """Samples a group while ``run`` runs; where a buffer ran full again, in the largest, then at a longer interval.

    Args:
        device: to sample, by a sampler made for this run.
        group: to count.
        run: the work; it may be run more than once.
        interval_s: between samples, in s.
        expected_s: about how long the run takes, in s: it has buffers of that size; None for the largest.
        pace: how many samples a run may give.

    Raises:
        CountersOverflow: even the longest interval gave too many samples.
        DeviceError: the device refuses, or what it sampled cannot be decoded.
    """
    pace, tried = pace or Pace(), interval_s
    for _ in range(_TRIES):
        settings = pace.settings(device.chip, interval_s, expected_s)
        began = time.perf_counter()
        found = _record_once(device, group, run, settings, interval_s)
        if found is not None and not found.samples.overflow:
            return found
        run_s = time.perf_counter() - began if found is None else found.run_s
        longer = interval_s if expected_s is not None else pace.growth * interval_s
        tried, interval_s, expected_s = interval_s, max(longer, pace.interval_for(run_s)), None
    raise CountersOverflow(
        f"the hardware buffer ran full {_TRIES} times, last at {tried:.3g} s per sample", "run for less time"
    )


def _record_once(
    device: PmDevice, group: Group, run: Callable[[], object], settings: SamplingSettings, interval_s: float
) -> Run | None:
    """One run beside a sampler of its own; None where the buffer ran full and CUPTI decodes none of it."""
    sampler = device.sampler(group.full_names(), group.metric_set, settings)
    try:
        sampler.start()
        begin_ns, began = time.time_ns(), time.perf_counter()
        try:
            run()
        finally:
            run_s, end_ns = time.perf_counter() - began, time.time_ns()
            sampler.stop()
        try:
            samples = sampler.read()
        except CountersOverflow:
            return None
        return Run(samples, interval_s, settings.by_time, run_s, begin_ns, end_ns)
    finally:
        sampler.close()


def prove(device: PmDevice, group: Group, exercise: Callable[[], object]) -> tuple[list[Group], dict[str, str]]:
    """Samples and decodes a group once; what does not decode is halved until it does.

    Args:
        device: to sample.
        group: to prove.
        exercise: work that keeps the SMs busy for a while, and returns when it is done.

    Returns:
        The groups that decode, and per counter of those that do not the reason.

    Raises:
        DeviceError: the device refuses for a reason that a smaller group does not change.
    """
    try:
        series_of(device, group, record_run(device, group, exercise, INTERVAL_S, _EXERCISE_S))
    except CountersUnreadable as error:
        anchor, rest = group.metrics[:1], group.metrics[1:]
        if len(rest) <= 1:
            return [], dict.fromkeys(group.counters, error.what)
        half = (len(rest) + 1) // 2
        first, reasons = prove(device, group.only([*anchor, *rest[:half]]), exercise)
        second, more = prove(device, group.only([*anchor, *rest[half:]]), exercise)
        return first + second, reasons | more
    return [group], {}


def series_of(device: Chip, group: Group, run: Run) -> CounterSeries:
    """The samples under their canonical names, shares as shares, times in s from the first sample on.

    Raises:
        CountersUnreadable: there is no sample, time does not go forward, a part of the run is missing, a value is no
            number, or no SM was active.
    """
    samples = _without_stale(run.samples)
    if not len(samples.start):
        raise CountersUnreadable(
            f"PM sampling decoded no sample in {run.run_s:.3g} s of group {group.name}", "try again in a fresh process"
        )
    if (samples.end <= samples.start).any() or (np.diff(samples.start) <= 0).any():
        raise CountersUnreadable(f"the time stamps of group {group.name} do not go forward", "try a longer interval")
    values = _values(group, samples)
    if broken := [name for name, some in values.items() if not np.isfinite(some).all()]:
        raise CountersUnreadable(f"PM sampling gave no number for {', '.join(broken)}")
    first, rate = int(samples.start[0]), _ticks_per_s(samples, run)
    covered_s = float((samples.end - samples.start).sum()) / rate
    if covered_s < _LEAST_COVERED * run.run_s:
        raise CountersUnreadable(
            f"the samples of group {group.name} cover {covered_s:.3g} s of a run of {run.run_s:.3g} s",
            "run for less time",
        )
    on_wall_clock = rate == _NS_PER_S and abs(int(samples.end[-1]) - run.end_ns) < _SAME_TIME_S * _NS_PER_S
    series = CounterSeries(
        tier="pm_sampling",
        group=group.name,
        start_s=np.asarray(samples.start - first, np.float64) / rate,
        end_s=np.asarray(samples.end - first, np.float64) / rate,
        values=values,
        units={name: COUNTERS[name].unit for name in values},
        clock="unix" if on_wall_clock else "pm_timestamp",
        raw=group.raw(),
        source=_source(device, group, run, first, rate),
    )
    if not len(series.at_work()):
        raise CountersUnreadable(f"the SMs read 0 in all {len(series)} samples of group {group.name}")
    return series


def _source(device: Chip, group: Group, run: Run, first: int, rate: float) -> dict[str, str | float]:
    return {
        "library": f"CUPTI {device.library}",
        "chip": device.chip,
        "metric_set": group.metric_set or "none named",
        "interval_s": run.interval_s,
        "run_s": run.run_s,
        "run_begin_s": (run.begin_ns - first) / _NS_PER_S,
        "run_end_s": (run.end_ns - first) / _NS_PER_S,
        "first_tick": first,
        "ticks_per_s": rate,
    }


def _ticks_per_s(samples: Samples, run: Run) -> float:
    """Rate of the time stamps: ns, unless a device that keeps the interval itself shows another one.

    Single samples differ by the 32 ns of the device's timer [GH100], so it is their mean that shows it.
    """
    if not run.by_time:
        return _NS_PER_S
    seen = float((samples.end - samples.start).mean()) / run.interval_s
    return _NS_PER_S if abs(seen / _NS_PER_S - 1) < _SAME_RATE else seen


def _without_stale(samples: Samples) -> Samples:
    """Without samples that are none: of no length, as the last one decoded, or begun where an earlier sampling ended.

    The latter may be seconds long; both have been seen with libcupti 13.0.
    """
    length = samples.end - samples.start
    held = length > 0
    if held.any():
        held &= length <= _STALE * np.median(length[held])
    return replace(samples, start=samples.start[held], end=samples.end[held], values=samples.values[held])


def _values(group: Group, samples: Samples) -> dict[str, NDArray[np.float64]]:
    column = {name: samples.values[:, index] for index, name in enumerate(group.full_names())}
    values: dict[str, NDArray[np.float64]] = {}
    for name, raw in group.raw().items():
        total = np.sum([column[part] for part in raw.split("+")], axis=0)
        values[name] = total / _PER_CENT if COUNTERS[name].unit == "1" else total
    return values


class PmSamplingSource:
    """Counters by PM sampling on one device; every group has been proved.

    Args:
        device: to sample.
        exercise: work that keeps the SMs busy for some 20 ms, and returns when it is done.
        pace: how finely runs are sampled.

    Raises:
        DeviceError: no group can be sampled; its type says why.
    """

    tier: Tier = "pm_sampling"

    def __init__(
        self,
        device: PmDevice,
        exercise: Callable[[], object],
        pace: Pace | None = None,
        metrics: Sequence[Metric] = METRICS,
    ) -> None:
        self._device, self._pace = device, pace or Pace()
        self._last_run_s: float | None = None
        planned = plan(device, metrics)
        if not planned.groups:
            raise CountersUnreadable(f"CUPTI {device.library} plans no pass for {device.chip}", "use a newer CUPTI")
        proved: list[Group] = []
        spoiled: dict[str, str] = {}
        for group in planned.groups:
            decoded, reasons = prove(device, group, exercise)
            proved += decoded
            spoiled |= reasons
        if not proved:
            said = next(iter(spoiled.values()))
            raise CountersUnreadable(
                f"no group of counters decodes: {said}", "try again in a fresh process, or a newer CUPTI"
            )
        named = [replace(group, name=f"pass{number}") for number, group in enumerate(proved, 1)]
        self._groups = {group.name: group for group in named}
        given = {name for group in named for name in group.counters}
        missing = (
            dict(WITHHELD) | dict(planned.missing) | {name: f"does not decode: {why}" for name, why in spoiled.items()}
        )
        self.missing = {name: reason for name, reason in missing.items() if name not in given}

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the passes."""
        return tuple(self._groups)

    def counters(self, group: str) -> tuple[str, ...]:
        """Canonical names that a pass gives."""
        return self._groups[group].counters

    def record(self, group: str, run: Callable[[], object], expected_s: float | None = None) -> CounterSeries:
        """See :meth:`joulemark.counter_series.CounterSource.record`.

        Raises:
            CountersUnreadable: nothing was decoded, or the SMs read 0.
            DeviceError: the device refuses.
        """
        wanted = self._groups[group]
        expected_s = expected_s or self._last_run_s
        done = record_run(self._device, wanted, run, self._pace.interval_for(expected_s), expected_s, self._pace)
        self._last_run_s = done.run_s  # passes over the same work take about as long
        return replace(series_of(self._device, wanted, done), missing=self.missing)

    def close(self) -> None:
        """Nothing is held between two records."""
