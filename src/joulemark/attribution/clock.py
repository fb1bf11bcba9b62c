"""The clock of PM samples laid over the clock of a kernel timeline, by beacons that both instruments see (pure).

A beacon is a kernel that keeps one SM busy, between stretches in which nothing runs. The timeline tells when it began
and ended. The samples tell how many active cycles there were up to each sample's end: inside a beacon that sum grows
evenly, so a line through its points gives the beacon's middle and length to a small part of a sample. Begin and end as
the timeline has them hold some launch work that no SM does. Over the middle that cancels, wherever it is. How much is
there the lengths tell: taken off both ends of a kernel alike, what is left is when its SMs worked.

A straight line through the beacons of both ends of a run is the mapping: an offset and a drift. Its standard error in
between comes from how far beacons lie off the line (Draper and Smith, *Applied Regression Analysis*, section 1.4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from joulemark.counter_series import CounterSeries
from joulemark.errors import UnreadableInput

Floats = npt.NDArray[np.float64]

_ACTIVITY = ("sm_active_cycles", "sm_active", "instructions")
"""What shows a beacon, the steadiest first."""
_LEAST_BOUNDARIES = 3
_LEAST_BEACONS = 2
_SAME_LENGTH = 0.1
"""Relative difference of a beacon's length on both clocks, beyond which they did not see the same beacon."""
_LARGEST_RESIDUAL = 0.25
"""Of a sample: beacons that lie further off the line are not those of this run, or a clock jumped."""
_MOST_STRAYS = 8
_NOT_MAPPED = "record again: nothing else may run on the GPU before, between and behind the beacons"


@dataclass(frozen=True)
class ClockMap:
    """``t_samples = reference + offset + (1 + drift) · (t_timeline − reference)``, all in s.

    Args:
        reference_s: on the timeline's clock, in the middle of the beacons.
        offset_s: of the samples' clock there.
        drift: relative difference of the two clocks' rates.
        uncertainty_s: largest standard error of a mapped time between the first and the last beacon.
        residual_s: standard deviation of the beacons from the line.
        ends_s: mean deviation of the beacons of each end.
        beacons: that stand behind it.
        launch_s: mean time by which a beacon lasts longer on the timeline than its SM works; never less than nothing.
        launch_error_s: its standard error.
        head_s: time at the begin of a kernel, beside launching, in which it counts nothing yet
            (:func:`joulemark.attribution.check.idle_head`).
        counts_off_s: offset from the mapping at which the counts of steps fit the timeline best
            (:mod:`joulemark.attribution.check`): kernels do not count evenly from their begin to their end.
    """

    reference_s: float
    offset_s: float
    drift: float
    uncertainty_s: float
    residual_s: float
    ends_s: tuple[float, float]
    beacons: int
    launch_s: float = 0.0
    launch_error_s: float = 0.0
    head_s: float = 0.0
    counts_off_s: float = 0.0

    @property
    def ends_of_kernels_s(self) -> tuple[float, float]:
        """What is taken off begin and end of each kernel."""
        return self.launch_s / 2 + self.head_s, self.launch_s / 2

    def to_samples(self, timeline_s: Floats) -> Floats:
        """Times of the timeline on the samples' clock."""
        return self.reference_s + self.offset_s + (1 + self.drift) * (timeline_s - self.reference_s)

    def to_timeline(self, samples_s: Floats) -> Floats:
        """Times of the samples on the timeline's clock."""
        return self.reference_s + (samples_s - self.reference_s - self.offset_s) / (1 + self.drift)

    def shifted(self, seconds: float) -> ClockMap:
        """The mapping that is wrong by so much, for trials."""
        return replace(self, offset_s=self.offset_s + seconds)

    def doubted(self) -> ClockMap:
        """The mapping that is wrong by its standard error and by what uneven kernels look like."""
        return self.shifted(math.hypot(self.uncertainty_s, self.counts_off_s))

    def at_once(self) -> ClockMap:
        """The mapping with kernels that count from the end of their launch on, to their end."""
        return replace(self, head_s=0.0)

    def to_json(self) -> dict[str, float | int | list[float]]:
        """Strict JSON, in s."""
        return {
            "reference_s": self.reference_s,
            "offset_s": self.offset_s,
            "drift": self.drift,
            "uncertainty_s": self.uncertainty_s,
            "residual_s": self.residual_s,
            "ends_s": list(self.ends_s),
            "beacons": self.beacons,
            "launch_s": self.launch_s,
            "launch_error_s": self.launch_error_s,
            "head_s": self.head_s,
        }


@dataclass(frozen=True)
class Beacons:
    """Beacons of a window on the timeline, in order of time.

    Args:
        start_s, end_s: in s, shape [n].
        before: how many stand before the steps; the others stand behind them.
    """

    start_s: Floats
    end_s: Floats
    before: int

    @property
    def middle_s(self) -> Floats:
        """Shape [n]."""
        return (self.start_s + self.end_s) / 2

    @property
    def length_s(self) -> Floats:
        """Shape [n]."""
        return self.end_s - self.start_s


def fit_clock(series: CounterSeries, beacons: Beacons) -> ClockMap:
    """The mapping from a timeline to the samples of the same run.

    Args:
        series: all samples of the run, those of the beacons included.
        beacons: as the timeline has them.

    Raises:
        UnreadableInput: the samples do not show these beacons.
    """
    middle, length = sightings(series, beacons)
    mapped = line_through(beacons.middle_s, middle, beacons.before)
    longer = beacons.length_s - length / (1 + mapped.drift)
    error_s = float(longer.std(ddof=1)) / math.sqrt(len(longer))
    mapped = replace(mapped, launch_s=max(0.0, float(longer.mean())), launch_error_s=error_s)
    sample_s = float(np.median(series.duration_s))
    if mapped.residual_s > _LARGEST_RESIDUAL * sample_s:
        raise UnreadableInput(
            f"beacons lie {mapped.residual_s * 1e6:.1f} µs off one straight line (a sample is {sample_s * 1e6:.1f} µs)",
            "a clock jumped during the run, or its beacons were mistaken; record again",
        )
    return mapped


def sightings(series: CounterSeries, beacons: Beacons) -> tuple[Floats, Floats]:
    """Middle and length in s of each beacon on the samples' clock.

    Raises:
        UnreadableInput: the samples do not show these beacons.
    """
    behind = len(beacons.start_s) - beacons.before
    if min(beacons.before, behind) < _LEAST_BEACONS:
        raise UnreadableInput(
            f"the timeline holds {beacons.before} beacons before the steps and {behind} behind them",
            "the clocks are mapped by two or more at each end; record again",
        )
    middle, length = _bursts(series)
    first = _train(middle, length, beacons, slice(0, beacons.before), from_end=False)
    last = _train(middle, length, beacons, slice(beacons.before, None), from_end=True)
    seen = np.concatenate([first, last])
    return middle[seen], length[seen]


def _bursts(series: CounterSeries) -> tuple[Floats, Floats]:
    """Middle and length in s of every stretch of activity that grows evenly enough to be a beacon, in order."""
    counts = _activity(series)
    active = np.concatenate([[False], counts > 0, [False]])
    begins, ends = np.flatnonzero(active[1:] & ~active[:-1]), np.flatnonzero(active[:-1] & ~active[1:])
    found = [_burst(series, counts, int(begin), int(end)) for begin, end in zip(begins, ends, strict=True)]
    kept = np.array([one for one in found if one is not None]).reshape(-1, 2)
    return kept[:, 0], kept[:, 1]


def _burst(series: CounterSeries, counts: Floats, begin: int, end: int) -> tuple[float, float] | None:
    """Middle and length of one stretch of samples; None where it has too few samples for a line."""
    if end - begin < _LEAST_BOUNDARIES + 1:
        return None
    so_far = np.cumsum(counts[begin:end])
    seconds_per_count, at_zero = np.polyfit(so_far[:-1], series.end_s[begin : end - 1], 1)
    total = so_far[-1]
    return float(at_zero + seconds_per_count * total / 2), float(seconds_per_count * total)


def _activity(series: CounterSeries) -> Floats:
    """Active cycles, or what grows with them, in each sample."""
    name = next((one for one in _ACTIVITY if one in series.values), None)
    if name is None:
        raise UnreadableInput(
            f"the group {series.group} counts nothing that shows a beacon", f"count one of {', '.join(_ACTIVITY)}"
        )
    scale = series.duration_s if series.units[name] == "1" else 1.0
    return np.nan_to_num(series.values[name] * scale)


def _train(middle: Floats, length: Floats, beacons: Beacons, which: slice, *, from_end: bool) -> npt.NDArray[np.intp]:
    """The bursts that are one end's beacons: those nearest to that end that are like them."""
    wanted_middle, wanted_length = beacons.middle_s[which], beacons.length_s[which]
    n = len(wanted_middle)
    places = range(len(middle) - n + 1)
    for place in list(reversed(places) if from_end else places)[:_MOST_STRAYS]:
        here = slice(place, place + n)
        alike = np.abs(length[here] / wanted_length - 1) < _SAME_LENGTH
        spacing = np.abs(np.diff(middle[here]) / np.diff(wanted_middle) - 1) < _SAME_LENGTH
        if alike.all() and spacing.all():
            return np.arange(place, place + n)
    raise UnreadableInput(
        f"the samples show no {n} beacons {'behind' if from_end else 'before'} the steps "
        f"of {', '.join(f'{one * 1e6:.0f}' for one in wanted_length)} µs",
        _NOT_MAPPED,
    )


def line_through(timeline: Floats, samples: Floats, before: int) -> ClockMap:
    """Straight line through beacons' middles, with the standard error of what it says between them.

    Args:
        timeline, samples: middles on both clocks, in s, shape [n].
        before: how many of them stand before the steps.
    """
    n, reference = len(timeline), float(timeline.mean())
    x, y = timeline - reference, samples - timeline
    spread = float(x @ x)
    drift, offset = float(x @ y) / spread, float(y.mean())
    off = y - offset - drift * x
    residual = math.sqrt(float(off @ off) / (n - 2))
    furthest = float(np.abs(x).max())
    return ClockMap(
        reference_s=reference,
        offset_s=offset,
        drift=drift,
        uncertainty_s=residual * math.sqrt(1 / n + furthest**2 / spread),
        residual_s=residual,
        ends_s=(float(off[:before].mean()), float(off[before:].mean())),
        beacons=n,
    )
