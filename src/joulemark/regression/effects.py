"""From the records of two runs to effects with standard errors: measured between processes, or assumed (pure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from joulemark.metrics import find
from joulemark.records import Record, Value
from joulemark.regression.clocks import CLOCKS, PER_CYCLE, sides_differ
from joulemark.regression.scatter import MIN_PROCESSES, Pooled, Scatter, joined, pool, scatter_of
from joulemark.regression.verdicts import Effect, Rule, quantile

_SMALLEST = 1e-100
"""A figure under it is none: ratios with it would overflow."""

Figure = Callable[[Record], NDArray[np.float64]]
Pair = tuple[Record, Record]


@dataclass(frozen=True)
class LeftOut:
    """The one process of a row that stood apart from all others, so that the row was judged without it.

    Args:
        side: 0 for base, 1 for new.
        ratio: its figure over that of its side's others.
    """

    side: int
    ratio: float


@dataclass(frozen=True)
class Change:
    """How one figure of one case changed.

    Args:
        base, new: figures in base units; over several processes the geometric mean of their figures, without one
            that was left out.
        effects: one, or two between which the truth lies: in time, and in cycles of a clock that moved. Empty where
            an interval reaches zero, so that there is no error on a logarithmic scale.
        processes: on each side, with one that was left out.
        assumed: whether the spread between processes was assumed.
        clocks: median SM clock of both sides in Hz where they differ, else None.
        left_out: the process that was left out of ``base``, ``new`` and the effect in time.
    """

    base: float
    new: float
    effects: tuple[Effect, ...]
    processes: tuple[int, int]
    assumed: bool
    clocks: tuple[float, float] | None = None
    left_out: LeftOut | None = None

    @property
    def ratio(self) -> float:
        """New / base."""
        return self.new / self.base


def changes(pairs: Sequence[Pair], metric: str, rule: Rule, others: Sequence[Record] = ()) -> list[Change | None]:
    """Changes of one metric over the cases of two runs.

    The logarithm of a process's figure is its case's level plus the process's own deviation plus the noise within
    it. Where both sides hold at least :data:`MIN_PROCESSES` processes, the variance of the last two together comes
    from the figures of the processes, pooled over rows (:func:`joulemark.regression.variance.moderate`). Otherwise
    the deviation of processes is assumed (``rule.spread``) and joined with the two figures' own intervals.

    Where the sides ran at different SM clocks (:func:`joulemark.regression.clocks.sides_differ`), an effect in cycles
    stands beside the one in time. A kernel that computes takes its cycles whatever the clock, one that waits for
    memory takes its time; the effect at the same clock lies between the two.

    Args:
        pairs: (base, new) records of the same case.
        metric: its name.
        rule: with the assumed spread.
        others: further records whose processes show the spread of this metric.

    Returns:
        One per pair; None where a side lacks the figure or it is not positive.
    """
    plain = _effects(pairs, metric, rule, others, lambda record: _figures(record, metric))
    exponent = PER_CYCLE.get(metric)
    moved = [_moved_clocks(pair, metric) if exponent else None for pair in pairs]
    if exponent is None or not any(moved):
        return plain
    clocks_of = {id(record): _clock_of(pair, metric) for pair in pairs for record in pair}

    def cycles_of(record: Record) -> NDArray[np.float64]:
        return _in_cycles(record, metric, exponent, clocks_of.get(id(record), CLOCKS[-1]))

    in_cycles = _effects(pairs, metric, rule, others, cycles_of)
    return [
        replace(one, effects=(*one.effects, *(() if cycles is None else cycles.effects)), clocks=clocks)
        if one is not None and clocks is not None
        else one
        for one, cycles, clocks in zip(plain, in_cycles, moved, strict=True)
    ]


def spread_between_processes(records: Sequence[Record], metric: str) -> float | None:
    """Pooled standard deviation of the logarithm of a process's figure; None where no record shows it."""
    figures = [logs for record in records if len(logs := _log_or_empty(_figures(record, metric))) >= MIN_PROCESSES]
    if not figures:
        return None
    squares = sum(float(logs.var(ddof=1)) * (len(logs) - 1) for logs in figures)
    return math.sqrt(squares / sum(len(logs) - 1 for logs in figures))


def _figures(record: Record, metric: str) -> NDArray[np.float64]:
    """Figures of the processes that have one; the record's own where it names no processes."""
    found = [process[metric] for process in record.processes if metric in process]
    value = record.value(metric)
    if not found and value is not None:
        found = [value]
    return np.asarray(found, dtype=float)


def _clocks(record: Record, metric: str, clock: str) -> NDArray[np.float64]:
    """SM clocks of the same processes; of no length where one does not know its own.

    Args:
        record: of the processes.
        metric: that they have a figure of.
        clock: the metric that holds the clock.
    """
    with_figure = [process for process in record.processes if metric in process]
    clocks = [process.get(clock) for process in with_figure]
    if len(clocks) < 2:
        clocks = [record.value(clock)]
    known = all(clock is not None and clock > 0 for clock in clocks)
    return np.asarray(clocks if known else [], dtype=float)


def _clock_of(pair: Pair, metric: str) -> str:
    """The clock that both sides know, that of the timed steps before that of the energy windows."""
    known = (clock for clock in CLOCKS if all(_clocks(record, metric, clock).size for record in pair))
    return next(known, CLOCKS[-1])


def _in_cycles(record: Record, metric: str, exponent: int, clock: str) -> NDArray[np.float64]:
    figures, clocks = _figures(record, metric), _clocks(record, metric, clock)
    return figures * clocks**exponent if len(figures) == len(clocks) else np.asarray([], dtype=float)


def _log_or_empty(figures: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log(figures) if figures.size and (figures > _SMALLEST).all() else np.asarray([], dtype=float)


def _moved_clocks(pair: Pair, metric: str) -> tuple[float, float] | None:
    """Median SM clocks of both sides, where all processes know theirs and the sides differ."""
    sides = [_clocks(record, metric, _clock_of(pair, metric)) for record in pair]
    if not all(side.size for side in sides) or not sides_differ(np.log(sides[0]), np.log(sides[1])):
        return None
    base, new = (float(np.median(side)) for side in sides)
    return base, new


def _effects(
    pairs: Sequence[Pair], metric: str, rule: Rule, others: Sequence[Record], figure: Figure
) -> list[Change | None]:
    logs = [(_log_or_empty(figure(base)), _log_or_empty(figure(new))) for base, new in pairs]
    measured = [i for i, sides in enumerate(logs) if min(map(len, sides)) >= MIN_PROCESSES]
    alone = [one for record in others if len(one := _log_or_empty(figure(record))) >= MIN_PROCESSES]
    sign = -1 if find(metric).better == "higher" else 1
    out: list[Change | None] = [
        _assumed(pair, metric, sides, rule, sign) if all(map(len, sides)) else None
        for pair, sides in zip(pairs, logs, strict=True)
    ]
    if measured:
        rows = joined([*(scatter_of(*logs[i]) for i in measured), *(scatter_of(one) for one in alone)])
        pooled = pool(rows)
        for row, i in enumerate(measured):
            out[i] = _measured(rows, pooled, row, sign)
    return out


def _measured(rows: Scatter, pooled: Pooled, row: int, sign: int) -> Change:
    error = float(pooled.error[row])
    effect = Effect(sign * float(pooled.effect[row]), error, error, float(pooled.df[row]))
    base, new = np.exp(pooled.means[row]).tolist()
    side = int(rows.side[row])
    out = LeftOut(side, math.exp(rows.figure[row] - pooled.means[row][side])) if pooled.left_out[row] else None
    counts = rows.counts[row].astype(int).tolist()
    return Change(base, new, (effect,), (counts[0], counts[1]), assumed=False, left_out=out)


def _assumed(
    pair: Pair, metric: str, logs: tuple[NDArray[np.float64], NDArray[np.float64]], rule: Rule, sign: int
) -> Change | None:
    base, new = (record.metrics.get(metric) for record in pair)
    if base is None or new is None or not base.value or not new.value or min(base.value, new.value) < 0:
        return None
    log_ratio = float(np.median(logs[1]) - np.median(logs[0]))
    counts = (len(logs[0]), len(logs[1]))
    errors = _errors(base, new, rule)
    if errors is None:
        return Change(base.value, new.value, (), counts, assumed=True)
    below, above = errors if sign > 0 else errors[::-1]
    effect = Effect(sign * log_ratio, below, above, assumed=True)
    return Change(base.value, new.value, (effect,), counts, assumed=True)


def _errors(base: Value, new: Value, rule: Rule) -> tuple[float, float] | None:
    """Standard errors of the lower and the upper side of log(new / base); None where an interval reaches zero."""
    assumed = math.log1p(rule.spread) / quantile(0.975, math.inf)
    below, above = [assumed], [assumed]
    # The upper end of base is the lower end of the ratio.
    for value, lower, upper in ((new, below, above), (base, above, below)):
        if value.interval is None or value.value is None:
            continue
        if value.interval[0] <= 0:
            return None
        # With few samples the interval is the whole range, and says how little of the median it covers.
        z = quantile(0.5 + max(value.confidence, 0.5) / 2, math.inf)
        lower.append(max(0.0, math.log(value.value / value.interval[0])) / z)
        upper.append(max(0.0, math.log(value.interval[1] / value.value)) / z)
    return math.hypot(*below), math.hypot(*above)
