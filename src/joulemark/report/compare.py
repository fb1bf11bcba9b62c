"""Two runs, row by row: ratios with intervals, and a verdict that says when the data cannot tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from joulemark.errors import ConfigurationError
from joulemark.metrics import all_metrics, find, format_ratio, format_value
from joulemark.records import NOT_REAL, Outcome, Record, Run
from joulemark.regression.effects import Change, LeftOut, changes, spread_between_processes
from joulemark.regression.machines import differences, set_up_differently
from joulemark.regression.verdicts import Judged, Rule, Verdict, judge
from joulemark.report.comparison import OUTCOME, Comparison, Row
from joulemark.report.pairing import Pair, Pairing, pair_cases

GATED_METRICS = (
    "device_time_s",
    "host_time_s",
    "throughput_per_s",
    "energy_per_item_j",
    "peak_memory_bytes",
)
"""What decides unless metrics are named. Levels of utilization are shown beside them: they explain a change."""

_MEASURED: frozenset[Outcome] = frozenset({"ok", "flagged"})


def compare(base: Run, new: Run, metrics: Sequence[str] | None = None, rule: Rule | None = None) -> Comparison:
    """Compare two stored runs.

    Cases are paired by what they are (never by an id, an address or the order of parameters), their changes
    estimated by :func:`joulemark.regression.effects.changes` and judged together as
    :class:`joulemark.regression.verdicts.Rule` says. An out-of-memory that is new is a regression. A throughput that
    restates a time in the same comparison is shown and does not count twice. Rows on GPUs of different models, and
    rows of a simulated GPU against a real one, are shown and do not count.

    Args:
        base, new: runs.
        metrics: names of those that count, in the order of the rows; by default :data:`GATED_METRICS`, with the
            levels of utilization shown beside them.
        rule: what counts as worse, and how seldom the gate may be wrong.

    Raises:
        ConfigurationError: a metric or a number of the rule makes no sense.
    """
    rule = rule or Rule()
    check(metrics, rule)
    pairing = pair_cases(base, new)
    pairs = [pair for pair in pairing.pairs if not _unsupported(pair)]
    rows = _judge(_drafts(pairs, metrics, rule, pairing), rule)
    environment = differences(base, new)
    messages = [*_about_runs(base, new, rows), *_about_pairs(pairing, pairs)]
    set_up = set_up_differently(environment)
    return Comparison(
        base.path,
        new.path,
        rows,
        tuple(pairing.name(one.case) for one in pairing.only_base),
        tuple(pairing.name(one.case) for one in pairing.only_new),
        len(pairs),
        environment,
        (*messages, *([set_up] if set_up else [])),
        rule,
        _between_processes(base, new, rows),
        tuple(side for side, run in (("BASE", base), ("NEW", new)) if run.simulated),
    )


def check(metrics: Sequence[str] | None, rule: Rule) -> None:
    """Refuse what cannot be compared, before anything is measured for it.

    Raises:
        ConfigurationError: a metric or a number of the rule makes no sense.
    """
    known = {metric.name: metric.better for metric in all_metrics()}
    for name in metrics or ():
        if known.get(name, "neither") == "neither":
            choices = ", ".join(key for key, better in known.items() if better != "neither")
            what = "is unknown" if name not in known else "has no better direction"
            raise ConfigurationError(f"the metric {name!r} {what}", f"choose from {choices}")
    for what, value in (("spread", rule.spread), ("threshold", rule.threshold), ("minimal effect", rule.min_effect)):
        if not 0 <= value < 1:
            raise ConfigurationError(f"the {what} {value!r} is not a fraction", "give a number such as 0.02")


def _unsupported(pair: Pair) -> bool:
    return pair.base.outcome == pair.new.outcome == "unsupported"


def _about_pairs(pairing: Pairing, kept: Sequence[Pair]) -> Iterable[str]:
    """What a reader must know of the pairs, the cases that neither side supports first."""
    skipped = [pair.key for pair in pairing.pairs if _unsupported(pair)]
    if skipped:
        yield f"unsupported on both sides ({len(skipped)}): {', '.join(skipped)}"
    yield from pairing.messages
    if not kept and not skipped:
        yield "nothing in common: no case is in both files"


def _about_runs(base: Run, new: Run, rows: Sequence[Row]) -> Iterable[str]:
    for side, run in (("BASE", base), ("NEW", new)):
        if run.simulated:
            yield f"{side} was measured on simulated GPUs: {NOT_REAL}"
        if not run.completed:
            yield f"{side} is incomplete ({run.reason or 'its file has problems'}): {run.path}"
        yield from (f"{side}: {problem}" for problem in run.problems)
    spans = [_span(run) for run in (base, new)]
    measured = any(row.spread == "measured" for row in rows)
    if measured and spans[0] and spans[1] and (spans[0][1] < spans[1][0] or spans[1][1] < spans[0][0]):
        yield (
            "the runs were measured one after the other: what shifted the whole machine between them is not part of "
            "the measured spread (joulemark ab takes turns)"
        )


def _span(run: Run) -> tuple[float, float] | None:
    windows = [record.window_utc for record in run.records if record.window_utc is not None]
    return (min(start for start, _ in windows), max(end for _, end in windows)) if windows else None


def _between_processes(base: Run, new: Run, rows: Sequence[Row]) -> dict[str, float]:
    names = dict.fromkeys(row.metric for row in rows if row.spread == "measured")
    found = {name: spread_between_processes((*base.records, *new.records), name) for name in names}
    return {name: spread for name, spread in found.items() if spread is not None}


@dataclass(frozen=True)
class _Draft:
    """A row, and the change that its verdict is still to come from; None where the row has its verdict."""

    row: Row
    change: Change | None = None


def _drafts(pairs: Sequence[Pair], metrics: Sequence[str] | None, rule: Rule, pairing: Pairing) -> list[_Draft]:
    """Rows by pair and metric. Each metric is estimated over all pairs at once: they share their spread."""
    measured = [pair for pair in pairs if pair.base.outcome in _MEASURED and pair.new.outcome in _MEASURED]
    others = (*pairing.only_base, *pairing.only_new)
    records = [(pair.base, pair.new) for pair in measured]
    shown = () if metrics is not None else _levels()
    found = {name: changes(records, name, rule, others) for name in (*(metrics or GATED_METRICS), *shown)}
    index = {id(pair): i for i, pair in enumerate(measured)}
    out: list[_Draft] = []
    for pair in pairs:
        if id(pair) not in index:
            out.append(_Draft(_outcome_row(pair)))
            continue
        of_pair = {name: by_pair[index[id(pair)]] for name, by_pair in found.items()}
        out += _drafts_of(pair, of_pair, frozenset(shown))
    return out


def _levels() -> tuple[str, ...]:
    """Shares of what the hardware can do, such as the GPU's busy fraction."""
    return tuple(one.name for one in all_metrics() if one.unit == "1" and one.better == "higher")


def _drafts_of(pair: Pair, found: Mapping[str, Change | None], levels: frozenset[str]) -> Iterable[_Draft]:
    marks = tuple(_flag_notes(pair))
    for name, change in found.items():
        missing = [side for side, record in _sides(pair) if record.value(name) is None]
        if len(missing) == 2 or (missing and name in levels):
            continue
        row = Row(
            pair.key,
            pair.new.case_id,
            name,
            pair.base.value(name),
            pair.new.value(name),
            find(name).unit,
            None,
            None,
            "inconclusive",
            pair.gated and not missing,
            pair.notes,
        )
        if missing:
            record = pair.base if missing == ["BASE"] else pair.new
            reason = f"not measured in {missing[0]}: {record.notes.get(name, 'no reason given')}"
            yield _Draft(replace(row, notes=(*row.notes, reason)))
            continue
        row = replace(row, notes=(*row.notes, *marks))
        if name in levels:
            row = replace(row, gated=False)
        elif _restates_time(name, found):
            row = replace(row, gated=False, notes=(*row.notes, "restates the time: not counted twice"))
        yield _with_change(row, pair, change)


def _sides(pair: Pair) -> tuple[tuple[str, Record], tuple[str, Record]]:
    return ("BASE", pair.base), ("NEW", pair.new)


def _flag_notes(pair: Pair) -> Iterable[str]:
    for side, record in _sides(pair):
        if record.outcome == "flagged":
            codes = sorted({one.code for one in record.findings if one.flags})
            yield f"flagged in {side}: {', '.join(codes) or 'no reason given'}"


def _restates_time(name: str, found: Mapping[str, Change | None]) -> bool:
    """Whether a throughput is nothing but the inverse of a time that is compared too."""
    throughput = found.get("throughput_per_s")
    if name != "throughput_per_s" or throughput is None:
        return False
    times = (found.get("device_time_s"), found.get("host_time_s"))
    return any(time is not None and abs(time.ratio * throughput.ratio - 1) < 1e-6 for time in times)


def _with_change(row: Row, pair: Pair, change: Change | None) -> _Draft:
    """The row with what is known of its change before all rows are judged together."""
    if change is None:
        verdict: Verdict = "same" if row.base == row.new else "inconclusive"
        note = "no ratio: a figure is zero, below what the clock resolves"
        return _Draft(replace(row, verdict=verdict, notes=(*row.notes, note)))
    notes = list(row.notes)
    if not change.effects:
        notes.append("an interval reaches zero: too close to what the clock resolves")
    metric = find(row.metric)
    alone = [
        side for side, record in _sides(pair) if change.assumed and record.metrics[row.metric].interval is None
    ]  # fmt: skip
    if alone and metric.unit != "B":
        notes.append(f"no interval in {' and '.join(alone)}: its own spread is unknown")
    if change.left_out is not None:
        notes.append(_left_out_note(change.left_out))
    if change.clocks is not None and row.gated:
        notes.append(_clock_note(change, higher_is_better=metric.better == "higher"))
    return _Draft(
        replace(
            row,
            base=change.base,
            new=change.new,
            ratio=change.ratio,
            spread="assumed" if change.assumed else "measured",
            processes=change.processes,
            notes=tuple(notes),
        ),
        change if change.effects else None,
    )


def _left_out_note(one: LeftOut) -> str:
    side = ("BASE", "NEW")[one.side]
    ratio = format_ratio(one.ratio)
    return f"one process of {side} stood apart and was left out: its figure is {ratio}x that of the others"


def _clock_note(change: Change, higher_is_better: bool) -> str:
    assert change.clocks is not None
    clocks = " -> ".join(format_value(clock, "Hz", 4) for clock in change.clocks)
    if len(change.effects) < 2:
        return f"the SM clock moved ({clocks})"
    in_cycles = math.exp(change.effects[1].log_ratio * (-1 if higher_is_better else 1))
    return (
        f"the SM clock moved ({clocks}): per cycle {format_ratio(in_cycles)}x; "
        "the verdict holds for both, since the truth lies between them"
    )


def _judge(drafts: Sequence[_Draft], rule: Rule) -> tuple[Row, ...]:
    open_ones = [draft for draft in drafts if draft.change is not None]
    judged = iter(
        judge(
            [draft.change.effects for draft in open_ones if draft.change is not None],
            rule,
            [draft.row.gated for draft in open_ones],
        )
    )
    return tuple(
        draft.row if draft.change is None else _judged_row(draft.row, draft.change, next(judged), rule)
        for draft in drafts
    )


def _judged_row(row: Row, change: Change, judged: Judged, rule: Rule) -> Row:
    lo, hi = judged.interval
    verdict = judged.verdict
    if verdict == "same" and _worse_now_and_then(row.metric, change, rule):
        verdict = "inconclusive"
    if find(row.metric).better == "higher":
        lo, hi = -hi, -lo
    return replace(
        row,
        interval=(math.exp(lo), math.exp(hi)),
        verdict=verdict,
        p_value=judged.p_value,
        detectable=judged.detectable,
    )


def _worse_now_and_then(metric: str, change: Change, rule: Rule) -> bool:
    """Whether the process that was left out is one of NEW's, and beyond the threshold: nothing excludes that."""
    if change.left_out is None or change.left_out.side == 0:
        return False
    worse = change.ratio * change.left_out.ratio
    return (1 / worse if find(metric).better == "higher" else worse) > 1 + rule.threshold


def _outcome_row(pair: Pair) -> Row:
    """The verdict where a side has no figures: it ran out of memory, failed or could not be done."""
    base, new = pair.base.outcome, pair.new.outcome
    verdict: Verdict = "inconclusive"
    gated = pair.gated
    if base == new == "oom":
        verdict, note = "same", "OOM on both sides"
    elif new == "oom" and base in _MEASURED:
        verdict, note = "regressed", "now OOM"
    elif base == "oom" and new in _MEASURED:
        verdict, note = "improved", "no longer OOM"
    else:
        note = f"{base} → {new}" + (f": {pair.new.reason}" if pair.new.reason and new not in _MEASURED else "")
        # What base could not do either is no news; what it could is.
        gated = gated and base in (*_MEASURED, "oom") and new != "oom"
    return Row(pair.key, pair.new.case_id, OUTCOME, base, new, "", None, None, verdict, gated, (*pair.notes, note))
