"""What the document of the tandem says of batches that were issued in turns: issue time and exposed overhead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from joulemark.findings import PROCESS_SPREAD
from joulemark.records import Json, Row
from joulemark.tandem import turns
from joulemark.tandem.turns import Busy, Exposed

EVEN = 0.10
"""Deviation from the median over batches under which the host's issue time per operator is called even."""
FEW = 0.05
"""Share of the step under which its exposed overhead no longer matters."""
OTHER_RUN = "other_run"
"""Source of a busy time (:attr:`joulemark.tandem.turns.Busy.source`) that is not of the run of the turns."""


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


def exposed(
    rows: Sequence[Mapping[str, Json]], issued: Sequence[Sequence[Row]], worked: Sequence[Sequence[Row]]
) -> dict[str, Json]:
    """Exposed overhead of the batches whose steps were timed in turns, and between which of them it rises.

    The busy time of a batch is that of the run of its turns, or else, where that has none, of the series.

    Args:
        rows: of the series, with the busy time of a profiled step of whatever run.
        issued: per run the bursts and stretches of the series' cases.
        worked: of the same runs the busy times of these cases.
    """
    nothing: tuple[Sequence[Row], Sequence[Row]] = ((), ())
    runs = zip(reversed(issued), reversed(worked), strict=True)
    timed, profiled = next((one for one in runs if any("step_s" in row for row in one[0])), nothing)
    busy = _busy(rows, timed, profiled)
    found = turns.exposed(timed, {batch: one.seconds for batch, one in busy.items()})
    common: dict[str, Json] = {"confidence": turns.CONFIDENCE}
    if found is None:
        note = _why_not(timed, busy, "a known busy time")
        return {**common, "batches": [], "changes": [], "rises": None, "rounds": None, "note": note}
    changes = _changes(found, busy)
    return {
        **common,
        "batches": _batches(found, busy, timed),
        "changes": changes,
        "rises": _rises(found, changes, busy, timed),
        "rounds": found.rounds,
        "note": _of_other_runs(found.batches, busy, profiled),
    }


def _busy(rows: Sequence[Mapping[str, Json]], timed: Sequence[Row], profiled: Sequence[Row]) -> dict[int, Busy]:
    """Batch → its busy time, of the batches that were timed; ascending."""
    known = {row["batch_size"] for row in timed}
    others = {row["batch_size"]: row["metrics"]["gpu_busy_s"]["value"] for row in rows}
    found = {batch: Busy(seconds, OTHER_RUN) for batch, seconds in others.items() if seconds and seconds > 0}
    found |= {batch: one for batch, one in turns.busy(profiled).items() if batch in others}
    return {batch: found[batch] for batch in sorted(found) if batch in known}


def _batches(found: Exposed, busy: Mapping[int, Busy], timed: Sequence[Row]) -> list[Json]:
    told = zip(found.batches, found.exposed_s, found.share, found.interval_s, strict=True)
    return [
        {
            "batch_size": batch,
            "exposed_s": seconds,
            "share": share,
            "interval_s": list(ends),
            "busy_s": busy[batch].seconds,
            "busy_from": busy[batch].source,
            "sm_clock_hz": turns.middle(timed, batch, "sm_clock_hz"),
            "busy_sm_clock_hz": busy[batch].sm_clock_hz,
        }
        for batch, seconds, share, ends in told
    ]


def _changes(found: Exposed, busy: Mapping[int, Busy]) -> list[dict[str, Json]]:
    """From each batch to the next; ``doubt_s`` is what two runs' busy times are assumed to differ by."""
    told = zip(
        pairwise(found.batches),
        found.change_s,
        found.change_interval_s,
        found.share_change,
        found.share_change_interval,
        strict=True,
    )
    return [
        {
            "batch_sizes": list(pair),
            "change_s": change,
            "interval_s": list(ends),
            "share_change": share,
            "share_interval": list(share_ends),
            "doubt_s": _doubt_s([busy[batch] for batch in pair]),
        }
        for pair, change, ends, share, share_ends in told
    ]


def _doubt_s(pair: Sequence[Busy]) -> float | None:
    others = [one.seconds for one in pair if one.source == OTHER_RUN]
    return PROCESS_SPREAD * max(others) if others else None


def _rises(
    found: Exposed, changes: Sequence[Mapping[str, Json]], busy: Mapping[int, Busy], timed: Sequence[Row]
) -> list[Json]:
    """Neighbours of which the larger batch exposes more seconds by the whole interval, each with what it means.

    A rise in seconds is no rise of what the framework exposes where a step has another number of kernels, or where the
    kernels hide the host and what is left are the short gaps between them: a device takes some 1 µs from one kernel to
    the next, however large the batch, and the busy time itself is known to about 1 % of the step. So none is left out,
    and each says

    - ``where`` its larger batch stands: ``at the floor``, both shares of the step under :data:`FEW`; otherwise
      ``below the crossover``, where the device works for less time than the host issues, or ``beyond the crossover``;
    - ``share_rises``: whether the share of the step rises by its whole interval, too. Where it does not, a larger batch
      waits longer and yet for less of its time;
    - ``in_doubt``: whether it is within the doubt of a busy time of another run.
    """
    share = dict(zip(found.batches, found.share, strict=True))
    rising = set(found.rises)
    rises: list[Json] = []
    for change in changes:
        pair = (low, high) = tuple(change["batch_sizes"])
        if pair not in rising:
            continue
        issue_s = turns.middle(timed, high, "issue_s") or 0.0
        hidden = busy[high].seconds >= issue_s
        rises.append(
            {
                "batch_sizes": [low, high],
                "where": "at the floor" if max(share[low], share[high]) < FEW else _side(hidden),
                "share_rises": change["share_interval"][0] > 0,
                "in_doubt": change["doubt_s"] is not None and change["interval_s"][0] <= change["doubt_s"],
            }
        )
    return rises


def _side(hidden: bool) -> str:
    return "beyond the crossover" if hidden else "below the crossover"


def _of_other_runs(batches: Sequence[int], busy: Mapping[int, Busy], profiled: Sequence[Row]) -> str | None:
    """Which batches have no busy time of the run of the turns, and why."""
    others = [batch for batch in batches if busy[batch].source == OTHER_RUN]
    if not others:
        return None
    reasons = dict.fromkeys(str(row["reason"]) for row in profiled if row["batch_size"] in others and row.get("reason"))
    why = "; ".join(reasons) or "it profiled none of them"
    return (
        f"busy time of another run at batch {', '.join(map(str, others))}, assumed to differ by {PROCESS_SPREAD:.0%}; "
        f"of the run of the turns: {why}"
    )


def _why_not(bursts: Sequence[Row], per_batch: Mapping[int, object], what: str) -> str:
    if not bursts:
        return "its cases were not issued in turns (bench_tandem.py, bench_issue_in_turns)"
    if len(per_batch) < 2:
        return f"fewer than two of the batches that were issued in turns have {what}"
    return f"fewer than {turns.FEWEST_ROUNDS} rounds hold all batches"
