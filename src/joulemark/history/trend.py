"""What became of a metric: its level under each driver, and where it changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from joulemark.history.changes import CONFIDENCE, FALSE_ALARM_RATE, Change, find_changes, runs_needed
from joulemark.history.runs import Figures, Floats, PastRun, differences, sorted_drivers
from joulemark.records import Case
from joulemark.regression.verdicts import quantile

_TRIM = 0.2
"""Share of the runs left out at either end of a trimmed mean."""


@dataclass(frozen=True)
class Ratio:
    """New over base.

    Args:
        value: None where there is no ratio, for want of figures above zero.
        interval: (lo, hi) with 95 % confidence; None where a side has a single run.
    """

    value: float | None = None
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Level:
    """A row's figures under one driver.

    Args:
        median: in the metric's base unit.
        runs: how many have the figure; at least one.
        ratio: to the level under the driver before, in order of versions; None for the first.
    """

    median: float
    runs: int
    ratio: Ratio | None = None


@dataclass(frozen=True)
class RowChange:
    """A row that changed its level.

    Args:
        case: of the row.
        before, after: medians of the two levels, in the metric's base unit.
        ratio: after / before.
    """

    case: Case
    before: float
    after: float
    ratio: Ratio


@dataclass(frozen=True)
class ChangePoint:
    """A run from which on levels differ.

    Args:
        at: index of the first run at the new level; where a driver changed within ``between``, the run that did.
        between: indices of the runs between which it lies, both included, with 95 % confidence.
        before, run: the last run at the old level and the first at the new one.
        differences: what else differs between these two: name → (before, after).
        ratio: of the rows that changed (of all, where none did by itself): geometric mean.
        rows: those that changed, the strongest change first; empty where only all together tell.
    """

    at: int
    between: tuple[int, int]
    before: PastRun
    run: PastRun
    differences: Mapping[str, tuple[str | None, str | None]]
    ratio: Ratio
    rows: tuple[RowChange, ...]


@dataclass(frozen=True)
class Trend:
    """A metric over runs, judged.

    Args:
        figures: the metric over runs.
        drivers: versions in their order.
        levels: per row, by driver.
        changes: in order of time.
        rate: chance that a history without a change gets one.
        runs_needed: fewest runs in which a change can be found at this rate.
    """

    figures: Figures
    drivers: tuple[str, ...]
    levels: tuple[Mapping[str, Level], ...]
    changes: tuple[ChangePoint, ...]
    rate: float
    runs_needed: int


def trend_of(figures: Figures, rate: float = FALSE_ALARM_RATE) -> Trend:
    """Judge a metric over runs.

    Args:
        figures: of an :class:`joulemark.history.index.Index`.
        rate: see :func:`joulemark.history.changes.find_changes`.

    Raises:
        ValueError: the rate lies not between 0 and 1.
    """
    found = find_changes(figures.values, rate)
    ends = [0, *(one.at for one in found), len(figures.runs)]
    return Trend(
        figures,
        tuple(sorted_drivers(run.driver for run in figures.runs)),
        _levels(figures),
        tuple(_point(figures, one, ends[at], ends[at + 2], rate) for at, one in enumerate(found)),
        rate,
        runs_needed(rate),
    )


def _levels(figures: Figures) -> tuple[Mapping[str, Level], ...]:
    drivers = sorted_drivers(run.driver for run in figures.runs)
    own = {driver: np.array([run.driver == driver for run in figures.runs]) for driver in drivers}
    rows: list[Mapping[str, Level]] = []
    for row in figures.values:
        levels: dict[str, Level] = {}
        base: Floats | None = None
        for driver in drivers:
            values = _measured(row[own[driver]])
            if values.size:
                ratio = None if base is None else trimmed_ratio(base, values)
                levels[driver] = Level(float(np.median(values)), int(values.size), ratio)
                base = values
        rows.append(levels)
    return tuple(rows)


def _measured(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _point(figures: Figures, change: Change, start: int, stop: int, rate: float) -> ChangePoint:
    """A change with what it did to the rows, against the levels up to its neighbours."""
    runs = figures.runs
    at = _at_driver_change(runs, change)
    old, new = figures.values[:, start:at], figures.values[:, at:stop]
    strict = 1 - rate / max(len(figures.cases), 1)
    moved: list[RowChange] = []
    places: list[int] = []
    for row, case in enumerate(figures.cases):
        before, after = _measured(old[row]), _measured(new[row])
        surely = trimmed_ratio(before, after, strict).interval
        if surely is not None and not surely[0] <= 1 <= surely[1]:
            ratio = trimmed_ratio(before, after)
            moved.append(RowChange(case, float(np.median(before)), float(np.median(after)), ratio))
            places.append(row)
    moved.sort(key=lambda one: -abs(math.log(one.ratio.value or 1.0)))
    rows = places or list(range(len(figures.cases)))
    return ChangePoint(
        at,
        (change.earliest, change.latest),
        runs[at - 1],
        runs[at],
        differences(runs[at - 1], runs[at]),
        _joint_ratio(old[rows], new[rows]),
        tuple(moved),
    )


def _at_driver_change(runs: Sequence[PastRun], change: Change) -> int:
    """The place of a change, or of the driver change that it cannot be told from."""
    near = sorted(range(change.earliest, change.latest + 1), key=lambda at: abs(at - change.at))
    return next((at for at in near if runs[at].driver != runs[at - 1].driver), change.at)


def _joint_ratio(old: Floats, new: Floats) -> Ratio:
    """Geometric mean of the rows' ratios, its interval from run to run: a run's figures share its luck."""
    both = np.concatenate([old, new], axis=1)
    usable = both[(both > 0).any(axis=1) & ~(both <= 0).any(axis=1)]
    usable = usable[
        np.isfinite(usable[:, : old.shape[1]]).any(axis=1) & np.isfinite(usable[:, old.shape[1] :]).any(axis=1)
    ]
    if not usable.size:
        return Ratio()
    logs = np.log(usable)
    center = (np.nanmean(logs[:, : old.shape[1]], axis=1) + np.nanmean(logs[:, old.shape[1] :], axis=1)) / 2
    logs -= center[:, None]
    seen = np.isfinite(logs).any(axis=0)
    runs = np.full(both.shape[1], np.nan)
    runs[seen] = np.exp(np.nanmean(logs[:, seen], axis=0))
    return trimmed_ratio(_measured(runs[: old.shape[1]]), _measured(runs[old.shape[1] :]))


def trimmed_ratio(base: Floats, new: Floats, confidence: float = CONFIDENCE) -> Ratio:
    """Ratio of two levels: of the means of the logarithms, a fifth of the runs trimmed at either end.

    The interval is Yuen's for trimmed means of unequal variance (*Biometrika* 61, 1974), which is Welch's where
    there are too few runs to trim.

    Args:
        base, new: one figure per run, finite.
        confidence: of the interval.
    """
    if not base.size or not new.size or min(base.min(), new.min()) <= 0:
        return Ratio()
    (mean_base, error_base, freedom_base), (mean_new, error_new, freedom_new) = map(_trimmed, (base, new))
    shift = mean_new - mean_base
    if error_base is None or error_new is None:
        return Ratio(math.exp(shift))
    variance = error_base + error_new
    if variance == 0:
        return Ratio(math.exp(shift), (math.exp(shift), math.exp(shift)))
    freedom = variance**2 / (error_base**2 / freedom_base + error_new**2 / freedom_new)
    half = quantile(0.5 + confidence / 2, freedom) * math.sqrt(variance)
    return Ratio(math.exp(shift), (math.exp(shift - half), math.exp(shift + half)))


def _trimmed(values: Floats) -> tuple[float, float | None, int]:
    """Trimmed mean of the logs, its squared standard error (None for a single run), and degrees of freedom."""
    logs = np.sort(np.log(values))
    cut = int(_TRIM * logs.size)
    kept = logs[cut : logs.size - cut]
    if logs.size < 2:
        return float(kept.mean()), None, 0
    winsorized = np.clip(logs, kept[0], kept[-1])
    spread = float(((winsorized - winsorized.mean()) ** 2).sum())
    return float(kept.mean()), spread / (kept.size * (kept.size - 1)), kept.size - 1
