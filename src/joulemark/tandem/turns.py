"""What batches that were issued in turns say of the host and of what it exposes, at whatever speed it had (pure).

Within a round the host is about as fast for one batch as for another; from round to round it may be not. So a batch's
level is the median over rounds of its log time minus the round's median: a two-way fit of rounds and batches, the
first sweep of Tukey's median polish (Hoaglin, Mosteller and Tukey, *Understanding Robust and Exploratory Data
Analysis*, chapter 6). A burst that the host was slow in, or a round in which its speed changed, moves no median.

Exposed overhead is a difference in seconds, of the step and of the device's busy time: neighbouring batches are
compared by the median over rounds of how much more of it one has than the other had in the same round.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from joulemark.records import Row

TABLE, BUSY_TABLE = "issue_turns", "busy_turns"
CONFIDENCE = 0.95
DRAWS = 2000
FEWEST_ROUNDS = 5
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Turns:
    """Batches compared within rounds.

    Args:
        batches: ascending.
        deviation: of each batch from the median of all, relative.
        interval: (lo, hi) of each deviation, 95 %.
        issue_s: median of each batch over the rounds, in s, as they came: at the speed that the host had most often.
        rounds: in which every batch has its turn.
    """

    batches: list[int]
    deviation: list[float]
    interval: list[tuple[float, float]]
    issue_s: list[float]
    rounds: int

    @property
    def furthest(self) -> int:
        """Place of the batch that is furthest from the others."""
        return int(np.argmax(np.abs(self.deviation)))


@dataclass(frozen=True)
class Exposed:
    """Exposed overhead of batches whose steps were timed in turns.

    Args:
        batches: ascending.
        exposed_s: median over the rounds of the step's time minus the device's busy time, in s.
        share: of the step, at those medians.
        interval_s: (lo, hi) of each ``exposed_s``, 95 %.
        change_s: from each batch to the next, median over rounds, in s.
        change_interval_s: (lo, hi) of each change, 95 %.
        share_change: of the share of the step from each batch to the next, median over rounds.
        share_change_interval: (lo, hi) of each of these, 95 %.
        rounds: in which every batch has its turn.
    """

    batches: list[int]
    exposed_s: list[float]
    share: list[float]
    interval_s: list[tuple[float, float]]
    change_s: list[float]
    change_interval_s: list[tuple[float, float]]
    share_change: list[float]
    share_change_interval: list[tuple[float, float]]
    rounds: int

    @property
    def rises(self) -> list[tuple[int, int]]:
        """Neighbouring batches of which the larger exposes more, by the whole interval of the change."""
        pairs = zip(pairwise(self.batches), self.change_interval_s, strict=True)
        return [pair for pair, (low, _) in pairs if low > 0]


@dataclass(frozen=True)
class Busy:
    """Busy time of the device in a step of one batch.

    Args:
        seconds: in s.
        source: ``profiled`` or ``replayed`` (a graph of the step) in the run of the turns, or ``other_run``.
        sm_clock_hz: while it was recorded; None where it is not known.
    """

    seconds: float
    source: str
    sm_clock_hz: float | None = None


def busy(rows: Sequence[Row]) -> dict[int, Busy]:
    """Batch → busy time of a step, a replay's where one was recorded; the median of several processes.

    A replay is recorded where the profiled step waited for the host and the unprofiled one hardly does
    (:mod:`joulemark.measure.busy_turns`): then the device had another clock in it.

    Args:
        rows: of the table ``busy_turns``.
    """
    known: dict[int, dict[bool, list[Row]]] = {}
    for row in rows:
        batch, seconds = row["batch_size"], row["busy_s"]
        if isinstance(batch, int) and isinstance(seconds, int | float) and seconds > 0:
            known.setdefault(batch, {}).setdefault(bool(row["replayed"]), []).append(row)
    found = {}
    for batch, by_source in known.items():
        replayed = True in by_source
        told = by_source[replayed]
        clock_hz = _numbers(told, "sm_clock_hz")
        found[batch] = Busy(
            float(np.median(_numbers(told, "busy_s"))),
            "replayed" if replayed else "profiled",
            float(np.median(clock_hz)) if clock_hz else None,
        )
    return found


def middle(rows: Sequence[Row], batch: int, name: str) -> float | None:
    """Median over the rounds of what the rows of a batch say; None where none does."""
    known = _numbers([row for row in rows if row["batch_size"] == batch], name)
    return float(np.median(known)) if known else None


def _numbers(rows: Sequence[Row], name: str) -> list[float]:
    return [float(value) for row in rows if isinstance(value := row.get(name), int | float)]


def exposed(rows: Sequence[Row], busy_s: Mapping[int, float], *, seed: int = 0) -> Exposed | None:
    """Exposed overhead over the rounds that hold all batches; None with fewer than two batches or five such rounds.

    Args:
        rows: of the table ``issue_turns``.
        busy_s: busy time of the device in a step of each batch, in s; other batches are left out.
        seed: of the bootstrap over rounds.
    """
    batches = sorted(busy_s)
    steps = _whole(rows, busy_s, "step_s")
    if steps is None:
        return None
    left = steps - np.array([busy_s[batch] for batch in batches])
    change, share_change = np.diff(left, axis=1), np.diff(left / steps, axis=1)
    drawn = np.random.default_rng(seed).integers(len(left), size=(DRAWS, len(left)))
    return Exposed(
        batches,
        np.median(left, axis=0).tolist(),
        (np.median(left, axis=0) / np.median(steps, axis=0)).tolist(),
        _ends(np.median(left[drawn], axis=1)),
        np.median(change, axis=0).tolist(),
        _ends(np.median(change[drawn], axis=1)),
        np.median(share_change, axis=0).tolist(),
        _ends(np.median(share_change[drawn], axis=1)),
        len(left),
    )


def compare(rows: Sequence[Row], per_batch: Mapping[int, float], *, seed: int = 0) -> Turns | None:
    """Compares batches over the rounds that hold all of them; None with fewer than two batches or five such rounds.

    The interval is of percentiles of a bootstrap over rounds: a round is what repeats.

    Args:
        rows: of the table ``issue_turns``.
        per_batch: what the issue time of each batch is divided by (its operators); other batches are left out.
        seed: of the bootstrap.
    """
    batches = sorted(per_batch)
    times = _whole(rows, per_batch, "issue_s")
    if times is None:
        return None
    logs = within_rounds(times / np.array([per_batch[batch] for batch in batches]))
    drawn = np.random.default_rng(seed).integers(len(times), size=(DRAWS, len(times)))
    deviation = levels(logs)
    return Turns(
        batches,
        deviation.tolist(),
        _ends(levels(logs[drawn])),
        np.median(times, axis=0).tolist(),
        len(times),
    )


def _ends(drawn: Floats) -> list[tuple[float, float]]:
    """(lo, hi) of each column of draws, shape [draws, columns]."""
    low, high = np.quantile(drawn, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2), axis=0)
    return list(zip(low.tolist(), high.tolist(), strict=True))


def _whole(rows: Sequence[Row], wanted: Collection[int], name: str) -> Floats | None:
    """Times in s of the rounds that hold all batches, shape [rounds, batches]; None where too few do."""
    batches = sorted(wanted)
    whole = [one for one in _rounds(rows, wanted, name) if len(one) == len(batches)]
    if len(batches) < 2 or len(whole) < FEWEST_ROUNDS:
        return None
    return np.array([[one[batch] for batch in batches] for one in whole])


def _rounds(rows: Sequence[Row], wanted: Container[int], name: str) -> list[dict[int, float]]:
    """Batch → time in s of every round; those of several processes follow each other and number theirs alike.

    A batch that comes again begins a round too: no time of one process stands among those of another.
    """
    found: list[dict[int, float]] = []
    last: object = None
    for row in rows:
        batch, seconds = row["batch_size"], row.get(name)
        if not found or row["round"] != last or batch in found[-1]:
            found.append({})
        last = row["round"]
        if isinstance(batch, int) and isinstance(seconds, int | float) and batch in wanted:
            found[-1][batch] = float(seconds)
    return found


def within_rounds(times: Floats) -> Floats:
    """Log times without what is common to a round, shape [rounds, batches]."""
    logs = np.log(times)
    return np.asarray(logs - np.median(logs, axis=1, keepdims=True))


def levels(logs: Floats) -> Floats:
    """Relative deviation of each batch's level from the median of all, shape [..., batches].

    Args:
        logs: log times within rounds, shape [..., rounds, batches].
    """
    level = np.median(logs, axis=-2)
    return np.asarray(np.exp(level - np.median(level, axis=-1, keepdims=True)) - 1)
