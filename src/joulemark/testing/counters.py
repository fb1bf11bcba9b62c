"""Simulated hardware counters: sources whose figures are given, ladders of them, and a device of PM sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from joulemark.collect.counters import Ladder, descend
from joulemark.collect.cupti import BUSY_REMEDY, LIBRARY_REMEDY, PERMISSION_REMEDY
from joulemark.collect.cupti_device import Samples, SamplingSettings
from joulemark.counter_series import COUNTERS, CounterSeries, Tier
from joulemark.errors import (
    ConfigurationError,
    CountersBusy,
    CountersOverflow,
    CountersUnavailable,
    CountersUnreadable,
    DeviceError,
    NotPermitted,
    NotSupported,
)

Rate = float | Callable[[float], float]
"""Of a share its value, of a count its number per second; a constant, or a function of the seconds into the run."""

REFUSALS: Mapping[str, DeviceError] = {
    "permission": NotPermitted(
        "cuptiPmSamplingEnable answered CUPTI_ERROR_INSUFFICIENT_PRIVILEGES (35)", PERMISSION_REMEDY
    ),
    "unsupported": NotSupported("this GPU has no such counters"),
    "library": CountersUnavailable("no libcupti is installed", LIBRARY_REMEDY),
    "busy": CountersBusy("cuptiPmSamplingEnable answered CUPTI_ERROR_HARDWARE_BUSY (26)", BUSY_REMEDY),
    "unreadable": CountersUnreadable("all counters of group pass1 read 0 while the GPU worked"),
}
"""Why a tier may be refused, by the name that a scenario gives it."""

HALF_BUSY: Mapping[str, Rate] = {
    "sm_active": 0.9,
    "issue_active": 0.25,
    "warps_active": 0.3,
    "pipe_tensor": 0.5,
    "dram_throughput": 0.4,
}


@dataclass
class FakeCounters:
    """A counter source whose figures are given.

    Args:
        rates: per canonical counter what it shows while the run lasts.
        passes: name of a pass → its counters; by default one pass gives all.
        tier: that it says it is.
        sample_s: length of a sample, in s.
        margin_s: sampling before the run begins and after it ends, in which everything reads 0.
        fails: name of a pass → what recording it raises.
        missing: canonical counter → why it is not there.
        clock: that times the run, in s.
        recorded: passes that were recorded, in order.
        closed: whether :meth:`close` was called.

    Example:
        >>> source = FakeCounters({"pipe_tensor": 0.5})
        >>> series = source.record("pass1", lambda: time.sleep(0.01)).at_work()
        >>> series.mean("pipe_tensor")
        0.5
    """

    rates: Mapping[str, Rate] = field(default_factory=lambda: dict(HALF_BUSY))
    passes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tier: Tier = "pm_sampling"
    sample_s: float = 1e-3
    margin_s: float = 2e-3
    fails: Mapping[str, DeviceError] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter
    recorded: list[str] = field(default_factory=list, init=False)
    closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if unknown := set(self.rates) - set(COUNTERS):
            raise ConfigurationError(f"no counters are called {sorted(unknown)}", "see joulemark.counter_series")
        if not self.passes:
            self.passes = {"pass1": tuple(self.rates)}

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the passes."""
        return tuple(self.passes)

    def counters(self, group: str) -> tuple[str, ...]:
        """Those given for a pass."""
        return tuple(self.passes[group])

    def record(self, group: str, run: Callable[[], object], expected_s: float | None = None) -> CounterSeries:
        """Runs, and says what was given.

        Raises:
            DeviceError: the one that the pass was told to fail with.
        """
        self.recorded.append(group)
        if group in self.fails:
            raise self.fails[group]
        began = self.clock()
        run()
        run_s = self.clock() - began
        edges = np.arange(-self.margin_s, run_s + self.margin_s + self.sample_s / 2, self.sample_s)
        names = self.passes[group]
        return CounterSeries(
            tier=self.tier,
            group=group,
            start_s=edges[:-1] + self.margin_s,
            end_s=edges[1:] + self.margin_s,
            values={name: self._samples(name, edges, run_s) for name in names},
            units={name: COUNTERS[name].unit for name in names},
            raw={name: f"simulated_{name}" for name in names},
            missing=self.missing,
            source={"library": "simulated", "chip": "simulated", "interval_s": self.sample_s, "run_s": run_s},
        )

    def _samples(self, name: str, edges: np.ndarray[Any, np.dtype[np.float64]], run_s: float) -> Any:
        """The rate in the samples that lie wholly inside the run, 0 outside: the run's edges fall on samples' edges."""
        rate = self.rates[name]
        middle = (edges[:-1] + edges[1:]) / 2
        inside = (edges[:-1] >= -self.sample_s / 4) & (middle < run_s)
        level = np.array([rate(float(t)) if callable(rate) else rate for t in middle])
        scale = 1.0 if COUNTERS[name].unit == "1" else self.sample_s
        return np.where(inside, level * scale, 0.0)

    def close(self) -> None:
        """Remembers it."""
        self.closed = True


def fake_ladder(sources: Mapping[Tier, FakeCounters | DeviceError | str]) -> Ladder:
    """A ladder of simulated instruments.

    Args:
        sources: per tier, best first, an instrument, an error, or the name of one in :data:`REFUSALS`.

    Example:
        >>> fake_ladder({"pm_sampling": "permission", "gpm": FakeCounters(tier="gpm")}).tier
        'gpm'
    """
    return descend({tier: lambda one=one: _opened(one) for tier, one in sources.items()})  # type: ignore[misc]


def _opened(source: FakeCounters | DeviceError | str) -> FakeCounters:
    if isinstance(source, str):
        source = REFUSALS[source]
    if isinstance(source, DeviceError):
        raise source
    return source


@dataclass
class FakePmDevice:
    """A device of PM sampling whose metrics, limits and faults are given (see :mod:`joulemark.collect.pm_sampling`).

    Args:
        metrics: base metrics that the chip knows, each with the value of its samples while it works.
        per_pass: how many base metrics CUPTI says it counts in one pass.
        undecodable: base metrics that spoil the decoding of every pass they are in.
        exclusive: pairs of base metrics that do not stand in one pass; one paired with itself stands in none.
        sets: name of a set → base metrics that can be counted with it, best set first; empty for the open set alone.
        refuses: what the device raises when a sampling is made.
        samples: per sampling.
        holds: samples that the hardware buffer holds; None for any number.
        run_s: what a run is taken to last, which with the interval gives the number of samples; None for ``samples``.
        zeros: full names of metrics that read 0 whatever their base shows.
        flags_overflow: how many of the next readings say that the buffer ran full.
        stale_first: whether the first sample begins seconds early, as on a device that was sampled before.
        wall_clock: whether time stamps are Unix time, else they begin somewhere.
        ticks_per_ns: rate of the time stamps.
        timer_ns: what the device's timer shows multiples of (32 on a GH100).
        library, chip: as reported.
    """

    metrics: Mapping[str, float]
    per_pass: int = 100
    undecodable: frozenset[str] = frozenset()
    exclusive: tuple[tuple[str, str], ...] = ()
    sets: Mapping[str | None, Collection[str]] = field(default_factory=dict)
    refuses: DeviceError | None = None
    samples: int = 50
    holds: int | None = None
    run_s: float | None = None
    zeros: frozenset[str] = frozenset()
    flags_overflow: int = 0
    stale_first: bool = True
    wall_clock: bool = True
    ticks_per_ns: float = 1.0
    timer_ns: int = 1
    library: str = "13.0.1"
    chip: str = "GH100"
    sampled: list[tuple[str, ...]] = field(default_factory=list, init=False)
    settings: SamplingSettings | None = field(default=None, init=False)
    open: int = field(default=0, init=False)

    def metric_sets(self) -> tuple[str | None, ...]:
        """Those given."""
        return tuple(self.sets) or (None,)

    def base_metrics(self, metric_set: str | None) -> frozenset[str]:
        """Names of the metrics given."""
        return frozenset(self.metrics)

    def base(self, full_name: str) -> str:
        """The given metric that a full name is of."""
        return next(name for name in self.metrics if full_name == name or full_name.startswith(f"{name}."))

    def fits(self, metrics: Sequence[str], metric_set: str | None) -> bool:
        """Whether they are few enough and none exclude each other."""
        bases = {self.base(metric) for metric in metrics}
        if self.sets and not bases <= set(self.sets[metric_set]):
            return False
        return len(bases) <= self.per_pass and not any(set(pair) <= bases for pair in self.exclusive)

    def sampler(self, metrics: Sequence[str], metric_set: str | None, settings: SamplingSettings) -> FakeSampling:
        """A sampling of some metrics.

        Raises:
            DeviceError: the one given.
        """
        if self.refuses is not None:
            raise self.refuses
        self.sampled.append(tuple(metrics))
        self.settings = settings
        self.open += 1
        return FakeSampling(self, tuple(metrics), settings)


@dataclass
class FakeSampling:
    """One sampling of a :class:`FakePmDevice`, with its metrics."""

    device: FakePmDevice
    metrics: tuple[str, ...]
    settings: SamplingSettings
    running: bool = field(default=False, init=False)

    def start(self) -> None:
        """Begins."""
        self.running = True

    def stop(self) -> None:
        """Ends."""
        self.running = False

    def close(self) -> None:
        """Counted by the device."""
        self.device.open -= 1

    def read(self) -> Samples:
        """The given values in every sample; an image that is full says so, as CUPTI's does.

        Raises:
            CountersUnreadable: a metric was told to spoil the decoding.
            CountersOverflow: there are more samples than the buffer holds.
        """
        bases = [self.device.base(metric) for metric in self.metrics]
        if spoiled := self.device.undecodable & set(bases):
            raise CountersUnreadable(f"cuptiPmSamplingDecodeData answered CUPTI_ERROR_UNKNOWN (999) for {min(spoiled)}")
        device, interval = self.device, self.settings.interval
        n = device.samples if device.run_s is None else round(device.run_s * 1e9 / interval)
        if device.holds is not None and n > device.holds:
            raise CountersOverflow("cuptiPmSamplingDecodeData answered CUPTI_ERROR_OUT_OF_MEMORY (8)")
        since_ns = interval * np.arange(n + 1) // device.timer_ns * device.timer_ns
        edges = np.round((since_ns - interval * n) * device.ticks_per_ns).astype(np.int64)
        edges += time.time_ns() if device.wall_clock else 10**12
        start, end = edges[:-1], edges[1:].copy()
        if device.stale_first and n:
            start[0] -= 4_000_000_000
        row = [0.0 if name in device.zeros else device.metrics[device.base(name)] for name in self.metrics]
        device.flags_overflow -= (overflow := device.flags_overflow > 0)
        full = n > self.settings.image_samples
        return Samples(start, end, np.tile(row, (n, 1)), overflow or full)
