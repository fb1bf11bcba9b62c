"""How much the host's issue time differs over batches that were issued in turns, at whatever speed the host had (pure).

Within a round the host is about as fast for one batch as for another; from round to round it may be not. So a batch's
level is the median over rounds of its log time minus the round's median: a two-way fit of rounds and batches, the
first sweep of Tukey's median polish (Hoaglin, Mosteller and Tukey, *Understanding Robust and Exploratory Data
Analysis*, chapter 6). A burst that the host was slow in, or a round in which its speed changed, moves no median.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from joulemark.records import Row

TABLE = "issue_turns"
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


def compare(rows: Sequence[Row], per_batch: Mapping[int, float], *, seed: int = 0) -> Turns | None:
    """Compares batches over the rounds that hold all of them; None with fewer than two batches or five such rounds.

    The interval is of percentiles of a bootstrap over rounds: a round is what repeats.

    Args:
        rows: of the table ``issue_turns``.
        per_batch: what the issue time of each batch is divided by (its operators); other batches are left out.
        seed: of the bootstrap.
    """
    batches = sorted(per_batch)
    whole = [one for one in _rounds(rows, per_batch) if len(one) == len(batches)]
    if len(batches) < 2 or len(whole) < FEWEST_ROUNDS:
        return None
    times = np.array([[one[batch] for batch in batches] for one in whole])
    logs = within_rounds(times / np.array([per_batch[batch] for batch in batches]))
    drawn = np.random.default_rng(seed).integers(len(whole), size=(DRAWS, len(whole)))
    low, high = np.quantile(levels(logs[drawn]), ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2), axis=0)
    deviation = levels(logs)
    return Turns(
        batches,
        deviation.tolist(),
        list(zip(low.tolist(), high.tolist(), strict=True)),
        np.median(times, axis=0).tolist(),
        len(whole),
    )


def _rounds(rows: Sequence[Row], wanted: Container[int]) -> list[dict[int, float]]:
    """Batch → issue time in s of every round; those of several processes follow each other and number theirs alike."""
    found: list[dict[int, float]] = []
    last: object = None
    for row in rows:
        if not found or row["round"] != last:
            found.append({})
        last = row["round"]
        batch, issue_s = row["batch_size"], row["issue_s"]
        if isinstance(batch, int) and isinstance(issue_s, float) and batch in wanted:
            found[-1][batch] = issue_s
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
