"""Simulated comparisons: how often the gate errs when the spread between processes is known (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from joulemark.regression.variance import moderate
from joulemark.regression.verdicts import Rule, established


@dataclass(frozen=True)
class Components:
    """Where the scatter of one row's figure comes from, as standard deviations of its logarithm.

    Args:
        between: of processes of the same thing.
        within: of one process's figure, given the process.
    """

    between: float
    within: float = 0.0

    @property
    def total(self) -> float:
        """Of one process's figure."""
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


def regressions(base: NDArray[np.float64], new: NDArray[np.float64], rule: Rule) -> NDArray[np.bool_]:
    """Which rows of many runs the gate calls regressed.

    The very procedure of :func:`joulemark.regression.verdicts.judge` for measured spreads, over all runs at once.

    Args:
        base, new: (runs, rows, processes), logarithms of the processes' figures, where lower is better.
        rule: of the gate.

    Returns:
        (runs, rows).
    """
    counts = base.shape[-1], new.shape[-1]
    df = sum(counts) - 2
    squares = sum(side.var(axis=-1, ddof=1) * (count - 1) for side, count in zip((base, new), counts, strict=True))
    spread = moderate(squares / df, df)
    error = np.sqrt(spread.variance * (1 / counts[0] + 1 / counts[1]))
    effect = new.mean(axis=-1) - base.mean(axis=-1)
    p = special.stdtr(spread.df, -effect / error)
    return np.asarray(established(p, rule) & (effect >= math.log1p(rule.min_effect)))


def simulate(
    components: Sequence[Components],
    slowdown: float | Sequence[float],
    rows: int,
    rule: Rule,
    processes: int = 3,
    seed: int = 0,
) -> NDArray[np.bool_]:
    """Verdicts on simulated runs: log figure = effect + process + noise within, all normal.

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
    sd = np.array([one.total for one in components])
    runs = math.ceil(rows / len(sd))
    effect = np.broadcast_to(np.log1p(np.asarray(slowdown, dtype=float)), sd.shape)
    base, new = (generator.standard_normal((runs, len(sd), processes)) * sd[:, None] for _ in range(2))
    return regressions(base, new + effect[:, None], rule)
