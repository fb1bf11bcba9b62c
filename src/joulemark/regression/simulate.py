"""Simulated comparisons: how often the gate errs when the spread between processes is known (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from joulemark.regression.clocks import sides_differ
from joulemark.regression.scatter import Array, pool, scatter_of
from joulemark.regression.verdicts import Rule, established


@dataclass(frozen=True)
class Components:
    """Where the scatter of one row's figure comes from, as standard deviations of its logarithm.

    Args:
        between: of processes of the same thing, without those that stand apart.
        within: of one process's figure, given the process.
        apart: deviations of the processes that stand apart, on the logarithmic scale.
        share: of all processes, how many do.
        clocks: logarithms of the SM clocks that processes may have, each as likely; empty where it is not known.
        tails: degrees of freedom of Student's distribution that the scatter follows, more than two; infinite: normal.
    """

    between: float
    within: float = 0.0
    apart: tuple[float, ...] = ()
    share: float = 0.0
    clocks: tuple[float, ...] = ()
    tails: float = math.inf

    @property
    def total(self) -> float:
        """Of the figure of one process that does not stand apart."""
        return math.hypot(self.between, self.within)


@dataclass(frozen=True)
class Rate:
    """Events among trials, with Wilson's score interval.

    Args:
        events, trials: counts.
        interval: 95 %.
    """

    events: int
    trials: int
    interval: tuple[float, float]

    @property
    def value(self) -> float:
        """Share of the trials."""
        return self.events / self.trials


def rate(events: int, trials: int) -> Rate:
    """A share with its interval.

    Raises:
        ValueError: no trial.
    """
    if trials < 1:
        raise ValueError("a rate needs at least one trial")
    return Rate(events, trials, wilson(events / trials, trials))


def wilson(share: float, trials: int) -> tuple[float, float]:
    """Score interval of a share, 95 % (Wilson, Journal of the American Statistical Association 22, 1927).

    Args:
        share: of the trials, between 0 and 1.
        trials: that were independent.
    """
    z2 = float(special.ndtri(0.975)) ** 2
    centre = share + z2 / (2 * trials)
    half = math.sqrt(z2 * (share * (1 - share) + z2 / (4 * trials)) / trials)
    scale = 1 + z2 / trials
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def regressions(base: Array, new: Array, rule: Rule, clocks: tuple[Array, Array] | None = None) -> NDArray[np.bool_]:
    """Which rows of many runs the gate calls regressed.

    The very procedure of :func:`joulemark.regression.effects.changes` and
    :func:`joulemark.regression.verdicts.judge` for measured spreads, over all runs at once.

    Args:
        base, new: (runs, rows, processes), logarithms of the processes' figures, where lower is better.
        rule: of the gate.
        clocks: logarithms of the SM clocks of both sides' processes, NaN for rows that do not know theirs; where the
            sides differ, a regression must show in cycles too. None for figures that do not follow the clock.

    Returns:
        (runs, rows).
    """
    p, effect = _tested(base, new)
    if clocks is not None:
        known = np.flatnonzero(~np.isnan(np.concatenate(clocks, axis=-1)).any(axis=(0, 2)))
        hertz = [side[:, known] for side in clocks]
        moved = sides_differ(*hertz)
        in_cycles = [side[:, known] + clock for side, clock in zip((base, new), hertz, strict=True)]
        if moved.any():
            p_cycles, effect_cycles = _tested(*in_cycles)
            p[:, known] = np.where(moved, np.maximum(p[:, known], p_cycles), p[:, known])
            effect[:, known] = np.where(moved, np.minimum(effect[:, known], effect_cycles), effect[:, known])
    return np.asarray(established(p, rule) & (effect >= math.log1p(rule.min_effect)))


def _tested(base: Array, new: Array) -> tuple[Array, Array]:
    """One-sided p-values of "not worse", and the effects."""
    found = pool(scatter_of(base, new))
    return np.asarray(special.stdtr(found.df, -found.effect / found.error)), found.effect


def simulate(
    components: Sequence[Components],
    slowdown: float | Sequence[float],
    rows: int,
    rule: Rule,
    processes: int = 3,
    seed: int = 0,
) -> NDArray[np.bool_]:
    """Verdicts on simulated runs: log figure = effect + process + noise within, and what stands apart.

    SM clocks are drawn from those of the components, on both sides alike and whatever the figures are. That is the
    harder case for a row that is judged in cycles too: where a figure follows its clock, its cycles scatter less.

    Args:
        components: of each row of a run.
        slowdown: true worsening as a fraction, of all rows or of each.
        rows: at least so many are simulated, in whole runs.
        rule: of the gate.
        processes: per side.
        seed: of the generator.

    Returns:
        (runs, rows of a run), whether the gate called the row regressed.
    """
    generator = np.random.default_rng(seed)
    runs = math.ceil(rows / len(components))
    effect = np.broadcast_to(np.log1p(np.asarray(slowdown, dtype=float)), (len(components),))
    base, new = (_side(components, (runs, processes), generator) for _ in range(2))
    clocks = (_clocks(components, (runs, processes), generator), _clocks(components, (runs, processes), generator))
    return regressions(base, new + effect[:, None], rule, clocks)


def _side(components: Sequence[Components], shape: tuple[int, int], generator: np.random.Generator) -> Array:
    """(runs, rows, processes), logarithms."""
    rows = []
    for one in components:
        figures = _scatter(one.tails, shape, generator) * one.total
        if one.apart:
            figures += np.where(generator.random(shape) < one.share, generator.choice(one.apart, shape), 0.0)
        rows.append(figures)
    return np.stack(rows, axis=1)


def _scatter(tails: float, shape: tuple[int, int], generator: np.random.Generator) -> Array:
    """Of standard deviation 1."""
    if math.isinf(tails):
        return generator.standard_normal(shape)
    return generator.standard_t(tails, shape) * math.sqrt((tails - 2) / tails)


def _clocks(components: Sequence[Components], shape: tuple[int, int], generator: np.random.Generator) -> Array:
    """(runs, rows, processes), logarithms; NaN for rows whose clocks are not known."""
    return np.stack([generator.choice(one.clocks or (math.nan,), shape) for one in components], axis=1)
