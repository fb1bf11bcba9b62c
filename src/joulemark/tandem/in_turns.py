"""What the document of the tandem says of batches that were issued in turns: issue time and exposed overhead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from joulemark.records import Json, Row
from joulemark.tandem import turns

EVEN = 0.10
"""Deviation from the median over batches under which the host's issue time per operator is called even."""


def issue(rows: Sequence[Mapping[str, Json]], issued: Sequence[Sequence[Row]]) -> dict[str, Json]:
    """How much the issue time per operator differs over batches that were issued in turns.

    Args:
        rows: of the series, with their operators.
        issued: per run the bursts of the series' cases.
    """
    operators = {row["batch_size"]: row["metrics"]["operators_per_step"]["value"] for row in rows}
    bursts = next((one for one in reversed(issued) if one), [])
    known = {row["batch_size"] for row in bursts}
    per_batch = {batch: count for batch, count in operators.items() if count and count > 0 and batch in known}
    found = turns.compare(bursts, per_batch)
    common: dict[str, Json] = {"limit": EVEN, "confidence": turns.CONFIDENCE}
    if found is None:
        unknown = dict.fromkeys(("rounds", "median_s", "largest_deviation", "interval", "batch", "even"))
        note = _why_not(bursts, per_batch, "a known number of operators")
        return {**common, "batches": [], **unknown, "note": note}
    at = found.furthest
    launches = {row["batch_size"]: row["metrics"]["launches_per_step"]["value"] for row in rows}
    told = zip(found.batches, found.deviation, found.interval, strict=True)
    per_operator = [time / per_batch[batch] for batch, time in zip(found.batches, found.issue_s, strict=True)]
    return {
        **common,
        "batches": [
            {"batch_size": batch, "deviation": far, "interval": list(ends), "launches_per_step": launches[batch]}
            for batch, far, ends in told
        ],
        "rounds": found.rounds,
        "median_s": median(per_operator),
        "largest_deviation": found.deviation[at],
        "interval": list(found.interval[at]),
        "batch": found.batches[at],
        "even": abs(found.deviation[at]) <= EVEN,
        "note": None,
    }


def exposed(rows: Sequence[Mapping[str, Json]], issued: Sequence[Sequence[Row]]) -> dict[str, Json]:
    """Exposed overhead of the batches whose steps were timed in turns, and between which of them it rises.

    Args:
        rows: of the series, with the busy time of a profiled step.
        issued: per run the bursts and stretches of the series' cases.
    """
    busy = {row["batch_size"]: row["metrics"]["gpu_busy_s"]["value"] for row in rows}
    timed = next((one for one in reversed(issued) if any("step_s" in row for row in one)), [])
    known = {row["batch_size"] for row in timed}
    busy_s = {batch: seconds for batch, seconds in busy.items() if seconds and seconds > 0 and batch in known}
    found = turns.exposed(timed, busy_s)
    common: dict[str, Json] = {"confidence": turns.CONFIDENCE}
    if found is None:
        note = _why_not(timed, busy_s, "a known busy time")
        return {**common, "batches": [], "changes": [], "rises": None, "rounds": None, "note": note}
    told = zip(found.batches, found.exposed_s, found.share, found.interval_s, strict=True)
    changes = zip(pairwise(found.batches), found.change_s, found.change_interval_s, strict=True)
    return {
        **common,
        "batches": [
            {"batch_size": batch, "exposed_s": seconds, "share": share, "interval_s": list(ends)}
            for batch, seconds, share, ends in told
        ],
        "changes": [
            {"batch_sizes": list(pair), "change_s": change, "interval_s": list(ends)} for pair, change, ends in changes
        ],
        "rises": [list(pair) for pair in found.rises],
        "rounds": found.rounds,
        "note": None,
    }


def _why_not(bursts: Sequence[Row], per_batch: Mapping[int, float], what: str) -> str:
    if not bursts:
        return "its cases were not issued in turns (bench_tandem.py, bench_issue_in_turns)"
    if len(per_batch) < 2:
        return f"fewer than two of the batches that were issued in turns have {what}"
    return f"fewer than {turns.FEWEST_ROUNDS} rounds hold all batches"
