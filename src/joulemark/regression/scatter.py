"""Means and scatter of a row's processes, without the one process that ran at a speed of its own (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from scipy import special

from joulemark.regression.variance import moderate

Array = NDArray[np.float64]

MIN_PROCESSES = 3
"""Per side, for a spread between processes that is measured."""

STANDS_APART = 1e-3
"""Chance at which a row whose processes are all alike loses one of them."""

SAME_SPEED = 0.05
"""Chance at which a process that runs at the other side's speed is taken for one of a third speed."""


@dataclass(frozen=True)
class Scatter:
    """Logarithms of processes' figures on two sides, of one row or of many; a side that is not there counts none.

    Args:
        means, counts: (…, 2), of the base's and of the new side's processes.
        squares: (…), squared deviations from the side's mean, summed over both sides.
        farthest: (…), by how much the squares fall without the process that stands farthest from its side's others.
        side: (…), the side of that process.
        figure: (…), its own logarithm.
    """

    means: Array
    counts: Array
    squares: Array
    farthest: Array
    side: NDArray[np.intp]
    figure: Array


@dataclass(frozen=True)
class Pooled:
    """What rows show of the change between their sides, each with the variance that all rows together make likely.

    Args:
        means, counts: (…, 2), of the processes that were kept.
        error: (…), standard error of the difference of the means; it has no bound without a second side.
        df: (…), its degrees of freedom.
        left_out: (…), whether a process was left out; ``side`` and ``figure`` of the scatter tell which.
    """

    means: Array
    counts: Array
    error: Array
    df: Array
    left_out: NDArray[np.bool_]

    @property
    def effect(self) -> Array:
        """New minus base."""
        return np.asarray(self.means[..., 1] - self.means[..., 0])


def scatter_of(base: Array, new: Array | None = None) -> Scatter:
    """Of (…, processes) logarithms; a side may have any number of processes from :data:`MIN_PROCESSES` on."""
    sides = (base,) if new is None else (base, new)
    deviations = [side - side.mean(axis=-1, keepdims=True) for side in sides]
    counts = [side.shape[-1] for side in sides]
    # The squares about the mean of the others are r² n / (n - 1) less without a process that deviates by r.
    gains = np.concatenate([one**2 * n / (n - 1) for one, n in zip(deviations, counts, strict=True)], axis=-1)
    place = gains.argmax(axis=-1)
    shape = place.shape
    absent = 2 - len(sides)
    return Scatter(
        np.stack([*(side.mean(axis=-1) for side in sides), *[np.full(shape, np.nan)] * absent], axis=-1),
        np.broadcast_to(np.array([*counts, *[0] * absent], dtype=float), (*shape, 2)),
        np.asarray(sum((one**2).sum(axis=-1) for one in deviations)),
        np.take_along_axis(gains, place[..., None], axis=-1)[..., 0],
        np.asarray(place >= counts[0], dtype=np.intp),
        np.take_along_axis(np.concatenate(sides, axis=-1), place[..., None], axis=-1)[..., 0],
    )


def joined(rows: Sequence[Scatter]) -> Scatter:
    """Rows of any numbers of processes as one (rows,)."""
    return Scatter(*(np.stack([getattr(row, one.name) for row in rows]) for one in fields(Scatter)))


def pool(rows: Scatter) -> Pooled:
    """Means, and their difference's standard error with the rows' variances moderated, one process of a row left out.

    One process in a state of its own (a GPU that ran small kernels 6 % faster for some seconds) pulls the mean of its
    side and inflates the row's variance, so that slowdowns of the row are missed. It is left out where

    - **it stands apart:** its distance from its side's others, over the scatter without it, has a two-sided chance
      under :data:`STANDS_APART`, Bonferroni over the row's processes (the deleted residual of a two-sample model, which
      follows Student's distribution; Cook and Weisberg, *Residuals and Influence in Regression*, 1982, section 2.2);
    - **and two speeds alone do not explain the row:** its figure is not that of the other side, whose chance
      would be over :data:`SAME_SPEED`. Three slow processes against one slow and two fast ones are as likely a case
      that runs at two speeds, as a change beside one process that missed it; then all processes are kept, and the
      row's variance says so.

    At most one process of a row: where a second one stands apart, that is what the row's processes are like.

    Args:
        rows: (…, rows); rows lend each other their variance (:func:`joulemark.regression.variance.moderate`).
    """
    df = rows.counts.sum(axis=-1) - (rows.counts > 0).sum(axis=-1)
    without = moderate((rows.squares - rows.farthest) / (df - 1), df - 1)
    left_out = _stands_apart(rows, without.variance, without.df) & ~_at_other_speed(rows, without.variance, without.df)
    kept = df - left_out
    spread = moderate((rows.squares - left_out * rows.farthest) / kept, kept)
    here = left_out[..., None] & (np.arange(2) == rows.side[..., None])
    counts = rows.counts - here
    means = np.where(here, (rows.means * rows.counts - rows.figure[..., None]) / np.maximum(counts, 1), rows.means)
    with np.errstate(divide="ignore"):
        error = np.sqrt(spread.variance * (1 / counts).sum(axis=-1))
    return Pooled(means, counts, error, spread.df, left_out)


def _stands_apart(rows: Scatter, variance: Array, df: Array) -> NDArray[np.bool_]:
    chance = 2 * special.stdtr(df, -np.sqrt(rows.farthest / variance))
    return np.asarray(chance * rows.counts.sum(axis=-1) < STANDS_APART)


def _at_other_speed(rows: Scatter, variance: Array, df: Array) -> NDArray[np.bool_]:
    other = (1 - rows.side)[..., None]
    mean, count = (np.take_along_axis(one, other, axis=-1)[..., 0] for one in (rows.means, rows.counts))
    with np.errstate(divide="ignore"):
        chance = 2 * special.stdtr(df, -np.abs(rows.figure - mean) / np.sqrt(variance * (1 + 1 / count)))
    return np.asarray(chance > SAME_SPEED)
