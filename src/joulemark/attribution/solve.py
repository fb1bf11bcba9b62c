"""Rates of kernels from samples that hold several of them: a non-negative least-squares deconvolution (pure).

A sample's count is the sum over kernels of overlap × rate. With A the overlaps of samples (rows) with units (columns)
in s, y the counts and W a weight per sample, the rates r minimise ``Σ w (y − A r)²`` under ``r ≥ 0``
(Lawson and Hanson, *Solving Least Squares Problems*, chapter 23). Weights are the inverse of a sample's busy time:

- the variance of a count grows with the time in which it is counted, and
- then ``Σ (y − A r) = 0`` over busy samples where no rate is held at 0, since the columns of A add up to the busy time:
  rates give back the counts of the run, however they vary inside a kernel.

A kernel counts less where it begins and ends. In a sample that holds the end of one and the begin of the next, that
would be taken off the rate of the wrong one. So rates that figures stand on are sought with samples that one kernel
fills, where it has any: the others weigh a hundredth (:meth:`Overlaps.by_filled`), and what these counted is dealt out
(:mod:`joulemark.attribution.dealing`).

Intervals: steps are independent repetitions of the same work. Each step's influence on a figure (its score through the
inverse of the normal matrix) is resampled with replacement, which is the bootstrap over steps without solving again
(Hu and Kalbfleisch, *The estimating function bootstrap*, Canadian Journal of Statistics 28, 2000), widened to Student's
t for few steps. What the mapping's uncertainty does to a figure is added in quadrature.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse, stats
from scipy.sparse.linalg import splu

from joulemark.attribution.clock import ClockMap, Floats
from joulemark.attribution.timeline import Codes, Launches
from joulemark.counter_series import CounterSeries

LEVEL = 0.95
"""Of the intervals."""
DRAWS = 1000
_LEAST_BUSY = 0.05
"""Of a sample: one that is busy for less weighs no more than that."""
_FILLED, _NOT_FILLED = 0.999, 0.01
"""Part of a sample in which one kernel runs, so that it counts as filled; weight of one that is not."""
_TURNS = 30
_RIDGE = 1e-9
"""Of the mean diagonal of the normal matrix: units that always run at the same time share what was counted."""


@dataclass(frozen=True)
class Window:
    """One window: its samples, its launches and how their clocks lie.

    Args:
        series: all samples of the window, beacons included.
        launches: of its steps.
        clock: mapping.
    """

    series: CounterSeries
    launches: Launches
    clock: ClockMap

    def on_timeline(self) -> CounterSeries:
        """The samples on the timeline's clock: its seconds are what kernels last."""
        start, end = (self.clock.to_timeline(times) for times in (self.series.start_s, self.series.end_s))
        return replace(self.series, start_s=start, end_s=end)


@dataclass(frozen=True)
class Overlaps:
    """The samples of a window's steps.

    Args:
        matrix: time in s that each unit ran in each sample, shape [samples, units].
        rows: indices of the samples in the series.
        step: in which each sample lies.
        weight: shape [samples].
        filled: whether one unit runs all the time, shape [samples].
    """

    matrix: sparse.csr_array
    rows: npt.NDArray[np.intp]
    step: Codes
    weight: Floats
    filled: npt.NDArray[np.bool_]

    def by_filled(self) -> Overlaps:
        """The same, with samples in which kernels begin or end weighing little."""
        return replace(self, weight=np.where(self.filled, self.weight, _NOT_FILLED * self.weight))

    @property
    def weighted(self) -> sparse.csr_array:
        """The matrix, each sample times its weight."""
        one = self.matrix
        each = np.repeat(self.weight, np.diff(one.indptr))
        return sparse.csr_array((one.data * each, one.indices, one.indptr), one.shape)


def overlaps(window: Window, unit_of_place: Codes, units: int) -> Overlaps:
    """Overlaps of a window's samples with units, from the first kernel of its steps to the last.

    Args:
        window: of one recording.
        unit_of_place: number of the unit of each place of a step.
        units: how many there are.
    """
    launches, series = window.launches.working(window.clock.ends_of_kernels_s), window.on_timeline()
    start, end = launches.start_s, launches.end_s
    sample_s = float(np.median(series.duration_s))
    inside = (series.end_s > start.min() - sample_s) & (series.start_s < end.max() + sample_s)
    rows = np.flatnonzero(inside)
    matrix = _matrix(series.start_s[rows], series.end_s[rows], start, end, unit_of_place[window.launches.place], units)
    busy = matrix @ np.ones(units)
    weight = 1 / np.maximum(busy, _LEAST_BUSY * series.duration_s[rows])
    filled = matrix.max(axis=1).toarray().reshape(-1) >= _FILLED * series.duration_s[rows]
    steps, first = _first_of_steps(window.launches.step, start)
    middle = (series.start_s[rows] + series.end_s[rows]) / 2
    step = steps[np.clip(np.searchsorted(first, middle, "right") - 1, 0, None)]
    return Overlaps(matrix, rows, step, weight, filled)


def _first_of_steps(step: Codes, start: Floats) -> tuple[Codes, Floats]:
    """Steps of a window and when the first kernel of each began."""
    steps, where = np.unique(step, return_inverse=True)
    first = np.full(len(steps), np.inf)
    np.minimum.at(first, where.reshape(-1), start)
    return steps, first


def _matrix(begin: Floats, until: Floats, start: Floats, end: Floats, unit: Codes, units: int) -> sparse.csr_array:
    """Overlap in s of samples [begin, until) with launches [start, end), summed over the launches of a unit."""
    low = np.searchsorted(until, start, "right")
    count = np.maximum(np.searchsorted(begin, end, "left") - low, 0)
    launch = np.repeat(np.arange(len(start)), count)
    row = np.arange(len(launch)) - np.repeat(np.cumsum(count) - count, count) + low[launch]
    length = np.minimum(until[row], end[launch]) - np.maximum(begin[row], start[launch])
    return sparse.coo_array((np.maximum(length, 0), (row, unit[launch])), (len(begin), units)).tocsr()


@dataclass(frozen=True)
class Normal:
    """Normal equations of a group of windows, kept by step.

    Args:
        gram: Σ Aᵀ W A, shape [units, units], with its ridge; sparse, since a kernel shares samples with few others.
        rhs: Aᵀ W y, shape [units, counters].
        parts: per window its overlaps and counts, shape [samples, counters].
        steps: all numbers of steps.
    """

    gram: sparse.csc_array
    rhs: Floats
    parts: list[tuple[Overlaps, Floats]]
    steps: Codes


def normal(parts: list[tuple[Overlaps, Floats]]) -> Normal:
    """Normal equations of windows that counted the same."""
    units = parts[0][0].matrix.shape[1]
    left = [(one.weighted.T, one.matrix, counts) for one, counts in parts]
    gram = functools.reduce(operator.add, (weighted @ matrix for weighted, matrix, _ in left))
    rhs = sum((weighted @ counts for weighted, _, counts in left), np.zeros((units, parts[0][1].shape[1])))
    diagonal = gram.diagonal()
    ridge = _RIDGE * float(diagonal[diagonal > 0].mean())
    gram = sparse.csc_array(gram + ridge * sparse.eye_array(units))
    steps = np.unique(np.concatenate([one.step for one, _ in parts]))
    return Normal(gram, rhs, parts, steps)


def rates(system: Normal) -> Floats:
    """Non-negative rates, shape [units, counters], in counts per s."""
    found = unbounded_rates(system)
    negative = np.flatnonzero((found < 0).any(axis=0))  # without any, the bound changes nothing
    if negative.size:
        lower = np.linalg.cholesky(system.gram.toarray())
        target = np.linalg.solve(lower, system.rhs[:, negative])
        most = _TURNS * len(lower)
        found[:, negative] = np.stack([optimize.nnls(lower.T, one, maxiter=most)[0] for one in target.T], axis=1)
    return found


def unbounded_rates(system: Normal) -> Floats:
    """Rates that may be negative, which takes a small part of the time."""
    return np.asarray(splu(system.gram).solve(system.rhs))


def influences(system: Normal, found: Floats, times: Floats) -> Floats:
    """What each step adds to each figure's deviation, shape [figures, counters, steps].

    A rate that is held at 0 could be larger in another draw of steps; a figure with such rates has the deviation that
    it would have if all rates were free.

    Args:
        system: that was solved.
        found: its rates, shape [units, counters].
        times: figures as sums over units of time × rate, shape [figures, units].
    """
    scores = np.zeros((len(system.steps), *found.shape))
    for one, counts in system.parts:
        left = (counts - one.matrix @ found) * one.weight[:, None]
        where = np.searchsorted(system.steps, one.step)
        for step in np.unique(where):
            rows = where == step
            scores[step] += one.matrix[rows].T @ left[rows]
    out = np.zeros((len(times), found.shape[1], len(system.steps)))
    every = splu(system.gram).solve(times.T)
    for counter in range(found.shape[1]):
        free = np.flatnonzero(found[:, counter] > 0)
        weights = np.zeros_like(every)
        if free.size:
            weights[free] = splu(sparse.csc_array(system.gram[free][:, free])).solve(times[:, free].T)
        holds_zeros = times[:, found[:, counter] <= 0].any(axis=1)
        weights[:, holds_zeros] = every[:, holds_zeros]
        out[:, counter] = (scores[:, :, counter] @ weights).T
    return out


def half_widths(influence: Floats, seed: int = 0) -> Floats:
    """Half the interval of each figure, shape of the influences without their last axis; NaN for a single step."""
    n = influence.shape[-1]
    if n < 2:
        return np.full(influence.shape[:-1], np.nan)
    rng = np.random.default_rng(seed)
    draws = rng.multinomial(n, np.full(n, 1 / n), DRAWS) - 1
    spread = (influence @ draws.T).std(axis=-1)
    return np.asarray(spread * np.sqrt(n / (n - 1)) * stats.t.ppf(0.5 + LEVEL / 2, n - 1))


def counts_of(window: Window, names: list[str]) -> Floats:
    """Counts of some counters in every sample, shares as share × s, shape [samples, counters]."""
    series = window.on_timeline()
    columns = [series.values[name] * (series.duration_s if series.units[name] == "1" else 1.0) for name in names]
    return np.stack(columns, axis=1)
