"""Where a bigger batch stops helping: the knee of a level over batch size, with an interval and an honest verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from joulemark.metrics import batch_text
from joulemark.records import Finding, Json

Verdict = Literal["plateau", "not_reached", "declines", "too_few_points"]
Floats = npt.NDArray[np.float64]

GAIN = 0.05
"""A doubling of the batch that gains no more than this does not pay."""
CONFIDENCE = 0.9
"""Coverage of the intervals here, unless said otherwise."""
MIN_BATCHES = 4
"""Fewer batch sizes leave no doubling to tell a knee from noise with."""
ASSUMED_SPREAD = 0.02
"""Standard deviation between processes, relative to the level, where none was measured."""
BUMP = 4.0
"""Standard errors that noise does not reach: a deeper dip, a stronger bend is real."""

_CORNERS_PER_DOUBLING = 16
_GRID = 8
"""Batch sizes per doubling at which gains are looked at."""
_EXACT = 1e-12
"""Smallest standard error: levels without any noise are possible."""
_NONE = math.inf


@dataclass(frozen=True)
class Point:
    """A level at one batch size.

    Args:
        batch: items per step.
        processes: the level as each measuring process saw it (its median), in any unit; at least one.
    """

    batch: float
    processes: tuple[float, ...]


@dataclass(frozen=True)
class Plateau:
    """Where a level stops growing with the batch.

    Args:
        verdict: ``plateau``, ``not_reached``, ``declines`` or ``too_few_points``.
        knee: batch beyond which no doubling gains more than 5 %, interpolated; None when it is not reached.
        interval: (lo, hi) of the knee, a bootstrap interval; None without a knee.
        open_below, open_above: the interval ends at the smallest (largest) batch because nothing lies beyond it.
        confidence: of the intervals.
        support: share of the bootstrap draws that come to the same verdict.
        corner: of the segmented fit in log batch, the second estimator; None where a straight line does as well.
        corner_interval: its bootstrap interval.
        declines_from: batch beyond which the level stays more than 5 % under its plateau; None when it does not fall.
        level: of the plateau, in the level's unit; None without one.
        largest_batch: that was measured; None without any.
        limited_by: why there is no larger one.
        findings: what the reader must know; a disagreement of the two estimators is one.
    """

    verdict: Verdict
    knee: float | None = None
    interval: tuple[float, float] | None = None
    open_below: bool = False
    open_above: bool = False
    confidence: float = CONFIDENCE
    support: float | None = None
    corner: float | None = None
    corner_interval: tuple[float, float] | None = None
    declines_from: float | None = None
    level: float | None = None
    largest_batch: float | None = None
    limited_by: str = ""
    findings: tuple[Finding, ...] = ()

    def describe(self) -> str:
        """The verdict in words: ``plateau from 32 [28, 41]``."""
        if self.verdict == "too_few_points":
            return f"too few points (fewer than {MIN_BATCHES} usable batch sizes)"
        if self.verdict == "not_reached":
            return f"not reached (largest batch {batch_text(self.largest_batch)}, limited by {self.limited_by})"
        if self.verdict == "declines":
            return f"declines past {batch_text(self.declines_from)}"
        lo, hi = self.interval or (None, None)
        below, above = "≤ " if self.open_below else "", "≥ " if self.open_above else ""
        return f"plateau from {batch_text(self.knee)} [{below}{batch_text(lo)}, {above}{batch_text(hi)}]"

    def to_json(self) -> dict[str, Json]:
        """Strict JSON; batch sizes in items per step."""
        data = asdict(self)
        for key in ("interval", "corner_interval"):
            data[key] = None if data[key] is None else list(data[key])
        return {**data, "findings": [one.to_json() for one in self.findings], "text": self.describe()}


def find_plateau(
    points: Sequence[Point],
    *,
    limited_by: str = "the batch sizes that were asked for",
    confidence: float = CONFIDENCE,
    draws: int = 400,
    seed: int = 0,
    spread: float = ASSUMED_SPREAD,
) -> Plateau:
    """The knee of a level (throughput, tensor activity …) over batch size.

    Two estimators. The first is the definition: the smallest batch, interpolated in log batch, beyond which no
    doubling gains more than 5 %, on the least concave majorant of the log levels (returns diminish, so what noise
    bends the other way is pooled), or on the levels themselves where a dip is too deep for noise. The second is a
    continuous fit of two straight lines to log level over log batch (Muggeo, *Statistics in Medicine* 22, 2003),
    by grid search over the corner. Intervals are percentiles of a parametric bootstrap (Efron and Tibshirani,
    *An Introduction to the Bootstrap*, section 6.5) whose noise is the spread between processes, pooled over batch
    sizes in log level, with Student's correction for its few degrees of freedom.

    Args:
        points: in any order, one per batch size; a level that is not above zero is left out with a Finding.
        limited_by: why no larger batch was measured (``memory``); part of the verdict ``not reached``.
        confidence: of the intervals.
        draws: of the bootstrap.
        seed: of the bootstrap: the same points always give the same answer.
        spread: relative standard deviation between processes to assume where no batch has two.

    Raises:
        ValueError: a batch size stands twice, is not positive, or has no level.
    """
    usable, findings = _usable(points)
    largest = max((one.batch for one in usable), default=None)
    x = np.log2(np.array([one.batch for one in usable], dtype=float))
    if len(usable) < MIN_BATCHES or int((x <= x[-1] - 1 + 1e-9).sum()) < 2:
        return Plateau("too_few_points", largest_batch=largest, limited_by=limited_by, findings=findings)
    y, error, freedom = _levels(usable, spread)
    if freedom is None:
        message = f"no batch size was measured by two processes: a spread of {spread:.0%} between processes is assumed"
        findings += (Finding("spread_assumed", message, "measure with --bench-processes 3"),)
    curve = _Curve(x, error)
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((draws, x.size)) * error
    if freedom:
        noise *= np.sqrt(freedom / rng.chisquare(freedom, (draws, 1)))
    return _judge(curve, y, y + noise, confidence, limited_by, findings)


def _usable(points: Sequence[Point]) -> tuple[list[Point], tuple[Finding, ...]]:
    batches = [one.batch for one in points]
    if len(set(batches)) < len(batches) or any(not 0 < batch < math.inf for batch in batches):
        raise ValueError(f"batch sizes must be positive and different, got {sorted(batches)}")
    if any(not one.processes for one in points):
        raise ValueError("every batch size needs the level of at least one process")
    good = [one for one in points if all(0 < value < math.inf for value in one.processes)]
    if len(good) == len(points):
        return sorted(good, key=lambda one: one.batch), ()
    left = ", ".join(batch_text(one.batch) for one in points if one not in good)
    finding = Finding("level_not_positive", f"the level is not a number above zero at batch {left}: left out")
    return sorted(good, key=lambda one: one.batch), (finding,)


def _levels(points: Sequence[Point], spread: float) -> tuple[Floats, Floats, int | None]:
    """Log2 level, its standard error per batch, and the error's degrees of freedom (None where it is assumed)."""
    logs = [np.log2(np.array(one.processes, dtype=float)) for one in points]
    counts = np.array([one.size for one in logs])
    freedom = int((counts - 1).sum())
    if freedom:
        variance = sum(float(((one - one.mean()) ** 2).sum()) for one in logs) / freedom
        deviation = math.sqrt(variance)
    else:
        deviation = math.log2(1 + spread)
    y = np.array([one.mean() for one in logs])
    return y, deviation / np.sqrt(counts), freedom or None


class _Curve:
    """Both estimators on one set of batch sizes, for many draws of the levels at once.

    Args:
        x: log2 of the batch sizes, ascending.
        error: standard errors of the log2 levels.
    """

    def __init__(self, x: Floats, error: Floats) -> None:
        self.x, self.error = x, error
        grid = x[0] + np.arange(int((x[-1] - x[0]) * _GRID + 1e-6) + 1) / _GRID
        self.starts = grid[: grid.size - _GRID]
        self._chords, self._left, self._right = _lines(x, grid)
        self._corners, self._kinks, self._residual = _segments(x)

    def between(self, level: Floats) -> tuple[Floats, Floats]:
        """Each row between its batch sizes: the lowest and the highest that diminishing returns allow.

        The lowest are the chords; the highest are the neighbouring chords prolonged, as at a sharp corner.
        """
        chords = level @ self._chords
        return chords, np.maximum(chords, np.minimum(level @ self._left, level @ self._right))

    def majorant(self, y: Floats) -> Floats:
        """Least concave majorant of each row, where it is one within noise; elsewhere the row itself.

        Its slopes are the isotonic regression of the steps' slopes (pool adjacent violators, in min-max form).
        """
        n = self.x.size
        slopes = np.full((n - 1, n - 1, y.shape[0]), -np.inf)
        for first in range(n - 1):
            for last in range(first, n - 1):
                slopes[first, last] = (y[:, last + 1] - y[:, first]) / (self.x[last + 1] - self.x[first])
        steps = np.stack([slopes[: i + 1, i:].max(axis=1).min(axis=0) for i in range(n - 1)], axis=1)
        rise = np.cumsum(steps * np.diff(self.x), axis=1)
        fitted = y[:, :1] + np.concatenate([np.zeros((y.shape[0], 1)), rise], axis=1)
        dips = ((fitted - y) > BUMP * math.sqrt(2) * np.maximum(self.error, _EXACT)).any(axis=1)
        return np.where(dips[:, None], y, fitted)

    def knees(self, fine: Floats) -> Floats:
        """Log2 batch per row beyond which no doubling gains more than 5 %; +inf where the last one still does.

        Args:
            fine: levels from :meth:`between`.
        """
        gain = fine[:, _GRID:] - fine[:, :-_GRID] - math.log2(1 + GAIN)
        pays = gain > 0
        last = self.starts.size - 1 - np.argmax(pays[:, ::-1], axis=1)
        knees = np.where(pays.any(axis=1), _crossing(self.starts, gain, last), self.starts[0])
        return np.where(pays[:, -1], _NONE, knees)

    def declines(self, level: Floats) -> Floats:
        """Log2 batch beyond which each row stays more than 5 % under its plateau; +inf where it does not."""
        floor = level.max(axis=1, keepdims=True) - math.log2(1 + GAIN)
        over = level - floor
        last = self.x.size - 1 - np.argmax((over >= 0)[:, ::-1], axis=1)
        return np.where(last == self.x.size - 1, _NONE, _crossing(self.x, over, last))

    def corners(self, y: Floats) -> tuple[Floats, Floats, Floats]:
        """Two straight lines per row: log2 batch of their corner, how far they bend down there, and the misfit.

        The bend and the misfit (root mean square of what is left) are in standard errors.
        """
        left = y @ self._residual
        bends = -(left @ self._kinks.T)
        best, rows = np.argmax(bends, axis=1), np.arange(y.shape[0])
        bend, kinks = bends[rows, best], self._kinks[best]
        deviation = np.sqrt(((kinks * self.error) ** 2).sum(axis=1))
        rest = left + bend[:, None] * kinks
        misfit = np.sqrt(((rest / np.maximum(self.error, _EXACT)) ** 2).sum(axis=1) / max(self.x.size - 4, 1))
        return self._corners[best], bend / np.maximum(deviation, _EXACT), misfit


def _crossing(x: Floats, values: Floats, last: npt.NDArray[np.intp]) -> Floats:
    """Where each row of values falls through zero after its index ``last``."""
    rows, after = np.arange(values.shape[0]), np.minimum(last + 1, x.size - 1)
    over, under = values[rows, last], values[rows, after]
    share = over / np.where(over > under, over - under, 1.0)
    return x[last] + np.clip(share, 0, 1) * (x[after] - x[last])


def _lines(x: Floats, grid: Floats) -> tuple[Floats, Floats, Floats]:
    """Matrices from levels at ``x`` to the grid: the chords, and the chords of the left and right neighbours.

    The outermost steps have a neighbour on one side alone and stay with their chord.
    """
    step = np.clip(np.searchsorted(x, grid, "right") - 1, 0, x.size - 2)
    outer = (step == 0) | (step == x.size - 2)

    def along(chord: npt.NDArray[np.intp]) -> Floats:
        weights = np.zeros((x.size, grid.size))
        share = (grid - x[chord]) / (x[chord + 1] - x[chord])
        weights[chord, np.arange(grid.size)] = 1 - share
        weights[chord + 1, np.arange(grid.size)] = share
        return weights

    return along(step), along(np.where(outer, step, step - 1)), along(np.where(outer, step, step + 1))


def _segments(x: Floats) -> tuple[Floats, Floats, Floats]:
    """Candidate corners, what each adds to a straight line (unit vectors), and the projection off straight lines."""
    count = round(float(x[-2] - x[1]) * _CORNERS_PER_DOUBLING) + 1
    corners = np.linspace(x[1], x[-2], max(count, 2))
    line = np.stack([np.ones_like(x), x], axis=1)
    residual = np.eye(x.size) - line @ np.linalg.pinv(line)
    kinks = np.maximum(x - corners[:, None], 0) @ residual
    return corners, kinks / np.linalg.norm(kinks, axis=1, keepdims=True), residual


def _judge(
    curve: _Curve, y: Floats, draws: Floats, confidence: float, limited_by: str, findings: tuple[Finding, ...]
) -> Plateau:
    knee, intervals, reached = _knee(curve, y, draws, confidence)
    level, levels = curve.majorant(y[None]), curve.majorant(draws)
    fall, fallen = float(curve.declines(level)[0]), np.isfinite(curve.declines(levels))
    declines = math.isfinite(fall) and float(fallen.mean()) >= confidence
    outcome: Verdict = "not_reached" if knee is None else "declines" if declines else "plateau"
    agree = {"not_reached": ~reached, "plateau": reached & ~fallen, "declines": reached & fallen}
    support = float(agree[outcome].mean())
    corner, corner_interval, exact = _corner(curve, y, draws, confidence)
    findings += _uncertain(outcome, support, confidence)
    findings += _disagreement(curve, knee, corner, corner_interval)
    found = Plateau(
        outcome,
        confidence=confidence,
        support=support,
        corner=None if corner is None else _power(corner),
        corner_interval=corner_interval and (_power(corner_interval[0]), _power(corner_interval[1])),
        largest_batch=_power(float(curve.x[-1])),
        limited_by=limited_by,
        findings=findings,
    )
    if knee is None:
        return found
    if exact and corner_interval is not None and _close(curve, knee, corner):
        intervals.append(corner_interval)
    lo, hi = min(one[0] for one in intervals), max(one[1] for one in intervals)
    return replace(
        found,
        knee=_power(knee),
        interval=(_power(lo), _power(hi)),
        open_below=lo <= float(curve.x[0]),
        open_above=hi >= float(curve.x[-1]),
        declines_from=_power(fall) if outcome == "declines" else None,
        level=_power(float(level.max())),
    )


def _knee(
    curve: _Curve, y: Floats, draws: Floats, confidence: float
) -> tuple[float | None, list[tuple[float, float]], npt.NDArray[np.bool_]]:
    """The knee, its intervals under both ways to read between the batches, and which draws reach one."""
    own, many = curve.between(curve.majorant(y[None])), curve.between(curve.majorant(draws))
    knees, drawn = [float(curve.knees(one)[0]) for one in own], [curve.knees(one) for one in many]
    reached = np.isfinite(drawn[0])
    if math.isinf(knees[0]):
        return None, [], reached
    knees = [min(knee, float(curve.x[-1])) for knee in knees]
    intervals = [_interval(one, knee, curve, confidence) for one, knee in zip(drawn, knees, strict=True)]
    return sum(knees) / len(knees), intervals, reached


def _interval(drawn: Floats, own: float, curve: _Curve, confidence: float) -> tuple[float, float]:
    """Union of the percentile and the basic bootstrap interval: the majorant's bias shows in one of them only.

    A draw that reaches no knee counts as one at the largest batch.
    """
    smallest, largest = float(curve.x[0]), float(curve.x[-1])
    tails = ((1 - confidence) / 2, (1 + confidence) / 2)
    lo, hi = (float(one) for one in np.quantile(np.minimum(drawn, largest), tails))
    return max(smallest, min(lo, 2 * own - hi)), min(largest, max(hi, 2 * own - lo))


def _uncertain(outcome: Verdict, support: float, confidence: float) -> tuple[Finding, ...]:
    if support >= confidence:
        return ()
    message = f"only {support:.0%} of the bootstrap draws agree with the verdict {outcome.replace('_', ' ')!r}"
    return (Finding("plateau_uncertain", message, "measure with more processes, or with larger batches"),)


def _power(log2: float) -> float:
    return float(2.0**log2)


def _corner(
    curve: _Curve, y: Floats, draws: Floats, confidence: float
) -> tuple[float | None, tuple[float, float] | None, bool]:
    """The corner of two straight lines, its interval, and whether they describe the curve to within its noise."""
    corner, bend, misfit = (float(one[0]) for one in curve.corners(y[None]))
    if bend < BUMP:
        return None, None, False
    return corner, _interval(curve.corners(draws)[0], corner, curve, confidence), misfit < BUMP


def _close(curve: _Curve, knee: float, corner: float | None) -> bool:
    return corner is not None and abs(knee - corner) <= float(np.diff(curve.x).max())


def _disagreement(
    curve: _Curve, knee: float | None, corner: float | None, corner_interval: tuple[float, float] | None
) -> tuple[Finding, ...]:
    """What the two estimators do not agree on, more than one step of the batch sizes apart."""
    if (knee is None and corner is None) or (knee is not None and _close(curve, knee, corner)):
        return ()
    rule = "no knee within the batches" if knee is None else f"a knee at {batch_text(_power(knee))}"
    if corner is None or corner_interval is None:
        fit = "no corner"
    else:
        lo, hi = (batch_text(_power(end)) for end in corner_interval)
        fit = f"a corner at {batch_text(_power(corner))} [{lo}, {hi}]"
    message = f"the 5 % rule finds {rule}, two straight lines have {fit}"
    return (Finding("plateau_estimators_disagree", message, "the curve has no sharp corner: read it as a range"),)
