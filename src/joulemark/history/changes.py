"""Change points of many series over the same runs, at a stated rate of false alarms (pure).

A run is one process or a few, so all its figures share the luck of that process: runs, not figures, are independent.
The test therefore permutes whole runs. Nothing is assumed of the noise but that the runs between two changes could
stand in any order; ranks make single bad runs harmless.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Ints = npt.NDArray[np.intp]

FALSE_ALARM_RATE = 0.01
"""Chance that a history without any change is given one."""
MIN_RUNS = 3
"""A level is made of at least so many runs: one or two may be bad luck."""
CONFIDENCE = 0.95
"""Coverage of the stretch in which a change lies."""
_COMPONENTS = 5
"""Principal components that are looked at: shifts that many rows share are among the first."""
_PASSES = 10
"""Rounds in which places and tests are settled after a split; they settle in two or three."""


@dataclass(frozen=True)
class Change:
    """A shift of levels.

    Args:
        at: index of the first run at the new level.
        earliest, latest: the runs between which that one lies, both included, with 95 % confidence.
    """

    at: int
    earliest: int
    latest: int


def find_changes(levels: Floats, rate: float = FALSE_ALARM_RATE, seed: int = 0) -> list[Change]:
    """Runs at which levels shift.

    Binary segmentation (Vostrikova, *Soviet Mathematics Doklady* 24, 1981) over two statistics of the ranks: the
    largest rank sum of any row and split (Pettitt, *Applied Statistics* 28, 1979), for a shift of one row alone; and
    the largest sum over the runs of a split or of an arc (Olshen et al., *Biostatistics* 5, 2004, for levels that
    come back) of the first principal components, for shifts that many rows share. A stretch of runs is split where
    one of the two exceeds its values under all of ``ceil(2 / rate) - 1`` permutations of the runs: a stretch without a
    change is split with probability ``rate`` at most, whatever the noise and however rows depend on each other.
    Every change is tested again between its neighbours.

    Args:
        levels: rows × runs in order of time, of any unit; NaN where a row was not measured.
        rate: chance of a false change point in a stretch without one, between 0 and 1.
        seed: of the permutations: the same levels always give the same answer.

    Returns:
        the changes in order of time.

    Raises:
        ValueError: a rate that is none.
    """
    if not 0 < rate < 1:
        raise ValueError(f"a false-alarm rate lies between 0 and 1, got {rate}")
    rng = np.random.default_rng(seed)
    found: list[Change] = []
    todo = [(0, levels.shape[1])]
    while todo:
        start, stop = todo.pop()
        change = _split(levels, start, stop, rate, rng)
        if change is not None:
            found.append(change)
            todo += [(start, change.at), (change.at, stop)]
    return _settled(levels, sorted(found, key=lambda one: one.at), rate, rng)


def runs_needed(rate: float) -> int:
    """Fewest runs among which a change can stand out at a rate: as many orders must be as unlikely as it."""
    runs = 2 * MIN_RUNS
    while 2 / math.comb(runs, runs // 2) > rate / 2:
        runs += 1
    return runs


def _settled(levels: Floats, found: Sequence[Change], rate: float, rng: np.random.Generator) -> list[Change]:
    """Each change again between its neighbours: a first split may have stood a little beside the change."""
    changes = list(found)
    if len(changes) < 2:
        return changes
    for _ in range(_PASSES):
        before = list(changes)
        for change in before:
            at = changes.index(change)
            start = changes[at - 1].at if at else 0
            stop = changes[at + 1].at if at + 1 < len(changes) else levels.shape[1]
            again = _split(levels, start, stop, rate, rng)
            changes[at : at + 1] = [] if again is None else [again]
        if [one.at for one in changes] == [one.at for one in before]:
            break
    return changes


def _split(levels: Floats, start: int, stop: int, rate: float, rng: np.random.Generator) -> Change | None:
    """Where the runs from ``start`` to ``stop`` change their level; None where they do not."""
    if stop - start < 2 * MIN_RUNS:
        return None
    scan = _Scan(levels[:, start:stop])
    if not scan.rows:
        return None
    if _stands_out(scan.joint_strength, scan.runs, rate / 2, rng):
        begin, end = scan.arc()
    elif _stands_out(scan.single_strength, scan.runs, rate / 2, rng):
        begin, end = scan.single()
    else:
        return None
    if end < scan.runs:  # the level comes back at the end of the arc: only its begin is looked for
        scan = _Scan(levels[:, start : start + end])
    change = scan.place(begin, rate)
    return replace(change, at=start + change.at, earliest=start + change.earliest, latest=start + change.latest)


def _stands_out(strength: Callable[[Ints], float], runs: int, rate: float, rng: np.random.Generator) -> bool:
    """Whether a statistic of the runs in their order exceeds those of all permutations: by chance at this rate."""
    own = strength(np.arange(runs))
    return all(strength(rng.permutation(runs)) < own for _ in range(math.ceil(1 / rate) - 1))


class _Scan:
    """Rank statistics of a stretch, in any order of its runs.

    Args:
        levels: rows × runs; NaN where a row was not measured.
    """

    def __init__(self, levels: Floats) -> None:
        levels = levels[np.isfinite(levels).sum(axis=1) >= 2 * MIN_RUNS]
        present = np.isfinite(levels)
        self.rows, self.runs = levels.shape
        counts = present.sum(axis=1, keepdims=True)
        ranks = np.zeros(levels.shape)
        for own, row, there in zip(ranks, levels, present, strict=True):
            own[there] = average_ranks(row[there]) - (there.sum() + 1) / 2
        deviation = np.sqrt((ranks**2).sum(axis=1, keepdims=True) / np.maximum(counts - 1, 1))
        # Single precision halves the traffic of the permutations and is far finer than the statistic's noise.
        self._ranks = (ranks / np.where(deviation > 0, deviation, 1.0)).astype(np.float32)
        self._present = None if present.all() else present
        self._whole = _weights(np.arange(1, self.runs + 1), self.runs)
        self._components = _components(self._ranks)
        # Doubling lengths meet any arc to within a half, and its strength to within a third.
        self._lengths = [1 << k for k in range(2, 32) if 1 << k <= self.runs // 2]

    def scores(self, order: Ints) -> Singles:
        """Standardized rank sums, rows × splits after 1, 2, … runs in this order; 0 where a side is too short."""
        sums = np.cumsum(self._ranks[:, order], axis=1)
        if self._present is None:
            sums *= self._whole
        else:
            counts = np.cumsum(self._present[:, order], axis=1)
            sums *= _weights(counts, counts[:, -1:])
        return sums

    def single_strength(self, order: Ints) -> float:
        """Largest absolute rank sum of any row and split, in standard deviations."""
        scores = self.scores(order)
        return max(float(scores.max()), -float(scores.min()))

    def joint_strength(self, order: Ints) -> float:
        """Largest absolute sum of any component and arc, in standard deviations."""
        return max((float(sums.max()) for _, sums in self._arcs(order)), default=0.0)

    def _arcs(self, order: Ints) -> Iterator[tuple[int, Singles]]:
        """Per length the absolute standardized sums of the components over all arcs; length 0 is the splits."""
        sums = np.cumsum(self._components[:, order], axis=1)
        if not sums.size:
            return
        yield 0, np.abs(sums * self._whole)
        for length in self._lengths:
            weight = math.sqrt(self.runs / (length * (self.runs - length)))
            yield length, np.abs(sums[:, length:] - sums[:, :-length]) * np.float32(weight)

    def arc(self) -> tuple[int, int]:
        """The runs (first, end) whose components stand out most; the end is the stretch's own for a split."""
        length, sums = max(self._arcs(np.arange(self.runs)), key=lambda arc: float(arc[1].max()))
        at = int(np.unravel_index(np.argmax(sums), sums.shape)[1]) + 1
        if length and at < MIN_RUNS:
            return at + length, self.runs
        end = at + length if length else self.runs
        return at, end if end <= self.runs - MIN_RUNS else self.runs

    def single(self) -> tuple[int, int]:
        """The split at which a row stands out most, and the stretch's end."""
        scores = np.abs(self.scores(np.arange(self.runs)))
        return int(np.unravel_index(np.argmax(scores), scores.shape)[1]) + 1, self.runs

    def place(self, near: int, rate: float) -> Change:
        """The likeliest split of the mean rank of the rows that move, and those almost as likely.

        They are the splits whose likelihood ratio against the likeliest stays under the quantile of Hansen,
        *Sample splitting and threshold estimation*, Econometrica 68 (2000): ``-2 log(1 - sqrt(confidence))``.

        Args:
            near: the first run of the new level, roughly; who moves there counts.
            rate: at which a row counts as moving, Bonferroni over the rows.
        """
        scores = self.scores(np.arange(self.runs))[:, near - 1]
        movers = np.abs(scores) >= NormalDist().inv_cdf(1 - rate / 2 / self.rows)
        rows = movers if movers.any() else np.ones(self.rows, dtype=bool)
        mean = (np.sign(scores[rows])[:, None] * self._ranks[rows]).mean(axis=0, dtype=float)
        mean -= mean.mean()
        gain = (np.cumsum(mean) * self._whole) ** 2
        at = int(np.argmax(gain))
        # Levels without any noise are possible: then no other split is likely.
        rest = max(float((mean**2).sum() - gain[at]), 1e-9)
        unlikely = (gain[at] - gain) / (rest / (self.runs - 2))
        close = np.flatnonzero((unlikely <= -2 * math.log(1 - math.sqrt(CONFIDENCE))) & (self._whole > 0))
        return Change(at + 1, int(close[0]) + 1, int(close[-1]) + 1)


def average_ranks(values: Floats) -> Floats:
    """Ranks from 1, equal values having the mean of theirs: as scipy.stats.rankdata, whose import takes a second."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[places], dtype=float)


def _components(ranks: Singles) -> Singles:
    """First principal components of the runs, each of variance 1; a permutation of the runs permutes them alike."""
    values = ranks.astype(float)
    rows, runs = values.shape
    # The components come from the smaller product of the matrix with itself: many times faster than its own SVD.
    squares, vectors = np.linalg.eigh(values @ values.T if rows < runs else values.T @ values)
    strengths = np.sqrt(np.maximum(squares[::-1][:_COMPONENTS], 0.0))
    real = strengths > 1e-6 * max(strengths.max(initial=0.0), 1.0)
    chosen = vectors[:, ::-1][:, :_COMPONENTS][:, real].T
    components = chosen @ values / strengths[real, None] if rows < runs else chosen
    return np.asarray(components * math.sqrt(runs - 1), dtype=np.float32)


def _weights(counts: npt.NDArray[np.int_], total: npt.NDArray[np.int_] | int) -> Singles:
    """1 / standard deviation of the sum of ``counts`` of ``total`` values of variance 1, drawn without replacement."""
    other = total - counts
    inside = (counts >= MIN_RUNS) & (other >= MIN_RUNS)
    return np.where(inside, np.sqrt(total / np.maximum(counts * other, 1.0)), 0.0).astype(np.float32)
