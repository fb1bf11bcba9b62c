"""Costs of a few percent under a noise of ten: stretches with and without it in turns, and what they say (pure).

Stretches follow each other as A B B A, B A A B … (the sequence of Thue and Morse): drifts cancel within four of them,
and what a place among the four does falls on both sides alike. Each four give one ratio; many give an interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import Any

import numpy as np

QUAD = 4
FEWEST = 6
"""Ratios without which there is no interval: its ends are then the least and the greatest."""
ONE_STATE = 1.2
"""Four stretches were measured in one state of the host where the longest takes at most so many times the shortest."""
WIDEST, FINEST = 0.1, 0.0005
"""Costs that :func:`steady_estimate` asks for on either side of 0, and how far apart: beyond, few fours are steady."""


def order() -> Iterator[bool]:
    """Whether the cost is on, stretch by stretch, without an end; never more than two alike in a row."""
    number = 0
    while True:
        yield number.bit_count() % 2 == 1
        number += 1


def ratios(seconds: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Cost of each four stretches in :func:`order`, relative: geometric means with over without, less 1."""
    whole = len(seconds) // QUAD
    logs = np.log(np.asarray(seconds[: QUAD * whole], dtype=float)).reshape(whole, QUAD)
    first_on = np.array([number.bit_count() % 2 for number in range(0, QUAD * whole, QUAD)])
    inner = (logs[:, 1] + logs[:, 2] - logs[:, 0] - logs[:, 3]) / 2
    return np.exp(np.where(first_on == 1, -inner, inner)) - 1


def evened(seconds: Sequence[float], probes: Sequence[float]) -> tuple[list[float], float]:
    """Stretches less what a probe of the host's speed explains, in s, and the power of the probe's time they go with.

    A probe is a fixed piece of the host's work, timed around each stretch: it has no part in the cost, so what is taken
    off falls on both sides alike. The power is the slope of least squares between the logarithms; 0 takes nothing off.

    Args:
        seconds: of the stretches.
        probes: of the probe around each, in s.
    """
    logs, speed = np.log(np.asarray(seconds, dtype=float)), np.log(np.asarray(probes, dtype=float))
    speed -= speed.mean()
    spread = float(speed @ speed)
    power = max(0.0, float(speed @ logs) / spread) if spread else 0.0
    return np.exp(logs - power * speed).tolist(), power


def steady_ratios(seconds: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Those of :func:`ratios` whose four stretches were measured in one state of the host.

    A shared host takes 1.5 to 2 times as long for seconds and is then fast again: a four in which that changed says
    nothing of a cost of 2 %, and costs many others to outweigh. But the stretches are chosen by themselves, and a cost
    drives its fours apart as the host does: what is left tells less than the whole of it, a quarter less where the
    scatter within a state comes near the bound. :func:`steady_estimate` undoes that.
    """
    whole = len(seconds) // QUAD
    fours = np.asarray(seconds[: QUAD * whole], dtype=float).reshape(whole, QUAD)
    return ratios(seconds)[fours.max(axis=1) <= ONE_STATE * fours.min(axis=1)]


def steady_estimate(runs: Sequence[Sequence[float]], step: float = FINEST) -> Estimate | None:
    """The cost by the fours that one state of the host saw, of one run or of several; None where there is no such four.

    A cost is possible where the stretches less that cost leave steady fours that lie evenly about 0: at the true one
    both sides are alike, so that choosing among them favours neither. The interval spans all costs that are possible,
    up to the next that is not (the inversion of the test; Hollander, Wolfe and Chicken, section 3.3); None where they
    do not end within ``WIDEST``. Signed ranks ask that each ratio is spread evenly about the one cost, not that all
    scatter alike (there, section 3.1): each lies within a run, so those of a calm and of a restless host may be pooled.

    Args:
        runs: of each, the stretches in :func:`order`, in s.
        step: between the costs that are asked for.
    """
    kept = _steady_less(runs, 0.0)
    if len(kept) in (0, sum(len(one) // QUAD for one in runs)):
        return estimate(kept) if len(kept) else None  # nothing was chosen
    cost = 0.0
    for _ in range(20):  # each turn leaves a fourth of what is missing, or less
        if len(kept):
            cost = (1 + cost) * (1 + estimate(kept).cost) - 1
        kept = _steady_less(runs, cost)
    number = round(WIDEST / step)
    possible = [one for one in range(-number, number + 1) if _even_about_0(_steady_less(runs, one * step))]
    bounded = bool(possible) and -number < possible[0] and possible[-1] < number
    interval = ((possible[0] - 1) * step, (possible[-1] + 1) * step) if bounded else None
    return Estimate(cost, (1 + cost) * (1 + float(np.median(kept))) - 1, interval, len(kept))


def _steady_less(runs: Sequence[Sequence[float]], cost: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """:func:`steady_ratios` of runs whose stretches with the cost are taken as that much shorter."""
    factors = [1.0, 1 / (1 + cost)]
    less = ([seconds * factors[on] for seconds, on in zip(one, order(), strict=False)] for one in runs)
    return np.concatenate([steady_ratios(one) for one in less])


def _even_about_0(found: np.ndarray[Any, np.dtype[np.float64]]) -> bool:
    """Whether ratios do not refuse that their cost is 0; too few refuse nothing."""
    if len(found) < FEWEST:
        return True
    interval = estimate(found.tolist()).interval
    return interval is not None and interval[0] <= 0 <= interval[1]


@dataclass(frozen=True)
class Estimate:
    """What some ratios say.

    Args:
        cost: the median of the means of all pairs of them, which wastes less of them than their own median does.
        median: their own.
        interval: of the cost; None of too few.
        quads: how many ratios.
    """

    cost: float
    median: float
    interval: tuple[float, float] | None
    quads: int

    @property
    def half_width(self) -> float:
        """Of the interval; infinite without one."""
        return math.inf if self.interval is None else (self.interval[1] - self.interval[0]) / 2

    def verdict(self, limit: float) -> str:
        """``held``, ``missed`` or ``not told``: where the whole interval lies."""
        if self.interval is None or self.interval[0] <= limit < self.interval[1]:
            return "not told"
        return "held" if self.interval[1] <= limit else "missed"

    def to_json(self) -> dict[str, Any]:
        return {"cost": self.cost, "median": self.median, "interval": self.interval, "quads": self.quads}


def estimate(costs: Sequence[float], confidence: float = 0.95) -> Estimate:
    """The estimate of Hodges and Lehmann, with the interval that belongs to Wilcoxon's signed ranks.

    Source: Hollander, Wolfe and Chicken, *Nonparametric Statistical Methods*, sections 3.2 and 3.3, for many ratios.

    Raises:
        ValueError: there is none.
    """
    values = np.asarray(costs, dtype=float)
    n = len(values)
    if not n:
        raise ValueError("no four stretches have come to an end")
    above = np.triu_indices(n)
    means = np.sort((values[above[0]] + values[above[1]]) / 2)
    interval = None
    if n >= FEWEST:
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        outside = max(0, math.floor(n * (n + 1) / 4 - z * math.sqrt(n * (n + 1) * (2 * n + 1) / 24)))
        interval = (float(means[outside]), float(means[len(means) - 1 - outside]))
    return Estimate(float(np.median(means)), float(median(values)), interval, n)
