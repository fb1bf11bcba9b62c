"""A comparison as a table: the verdict, a row per figure, and under them what is on one side only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from joulemark.metrics import find, format_ratio, format_value
from joulemark.records import Table
from joulemark.regression.verdicts import VERDICTS
from joulemark.report.comparison import OUTCOME, Comparison, Row
from joulemark.report.names import first_of, without_common_parts


def table_of(comparison: Comparison, ends: str = "") -> Table:
    """The comparison for a printer: the verdict, a row per figure, what is on one side only and the summary under them.

    Args:
        comparison: of two runs.
        ends: how the command ends because of it, see :func:`joulemark.report.comparison.meaning_of_exit`.
    """
    names, common = without_common_parts([row.key for row in comparison.rows])
    rows = tuple(
        (
            names[row.key],
            row.metric if row.metric == OUTCOME else find(row.metric).title,
            "-" if row.ratio is None else f"{format_ratio(row.ratio)}x",
            "-" if row.interval is None else "..".join(map(format_ratio, row.interval)),
            _shown(row.base, row.unit),
            _shown(row.new, row.unit),
            "-" if row.detectable is None else f"{row.detectable:.1%}",
            _verdict(row, comparison.spread == "mixed"),
        )
        for row in comparison.rows
    )
    return Table(
        columns=("case", "metric", "ratio", "interval", "base", "new", "detectable", "verdict"),
        rows=rows,
        numeric=frozenset({2, 3, 4, 5, 6}),
        notes=tuple(_notes(comparison)),
        lead=verdict_line(comparison, names, ends),
        title=f"{Path(comparison.base).name} -> {Path(comparison.new).name}" + (f" | {common}" if common else ""),
    )


def _verdict(row: Row, mark_assumed: bool) -> str:
    text = row.verdict.upper() if row.verdict == "regressed" else row.verdict
    remarks = ["not gated"] if not row.gated else []
    remarks += ["spread assumed"] if mark_assumed and row.spread == "assumed" else []
    return text + (f" ({', '.join(remarks)})" if remarks else "")


def _shown(value: float | str | None, unit: str) -> str:
    if isinstance(value, str):
        return value.upper() if value in ("oom", "failed") else value
    return format_value(value, unit)


def _notes(comparison: Comparison) -> Iterable[str]:
    by_note: dict[str, list[str]] = defaultdict(list)
    for row in comparison.rows:
        for note in row.notes:
            if note not in comparison.messages and row.key not in by_note[note]:
                by_note[note].append(row.key)
    for note, keys in by_note.items():
        yield f"{first_of(keys)}: {note}"
    yield from comparison.messages
    for name, (old, current) in comparison.environment.items():
        yield f"{name}: {'unknown' if old is None else old} -> {'unknown' if current is None else current}"
    if comparison.only_in_new:
        yield f"only in NEW ({len(comparison.only_in_new)}): {', '.join(comparison.only_in_new)}"
    if comparison.only_in_base:
        yield f"missing in NEW ({len(comparison.only_in_base)}): {', '.join(comparison.only_in_base)}"
    yield from _about_spread(comparison)
    yield summary_line(comparison)


def _about_spread(comparison: Comparison) -> Iterable[str]:
    """Where the spread comes from, and what the verdicts therefore mean."""
    rule = comparison.rule
    if comparison.between_processes:
        listed = ", ".join(f"{find(name).title} {sd:.2%}" for name, sd in comparison.between_processes.items())
        yield (
            f"spread measured between processes (standard deviation): {listed}; a worsening counts from "
            f"{rule.min_effect:.1%} on where it is certain"
        )
    if comparison.spread != "measured":
        yield (
            f"spread assumed: two runs of the same thing differ by up to ±{rule.spread:.1%}; a worsening counts where "
            f"it is certainly beyond {rule.threshold:.1%} (measure the spread with --bench-processes 3 on both sides)"
        )
    yield (
        f"inconclusive: a worsening beyond {rule.threshold:.1%} cannot be excluded; detectable: found in "
        f"{rule.power:.0%} of trials; false alarms: at most {rule.alpha:.1%} of rows, {rule.fdr:.0%} of runs"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def verdict_line(comparison: Comparison, names: Mapping[str, str], ends: str) -> str:
    """``verdict: regressed (exit code 1: something is worse); 1 of 4 cases changed; worst: a-b8, time 1.300x``.

    Args:
        names: what its table calls a case.
        ends: how the command ends because of it; may be empty.
    """
    worst = comparison.worst()
    parts = [f"verdict: {comparison.verdict}" + (f" ({ends})" if ends else "")]
    parts += [f"simulated GPUs in {' and '.join(comparison.simulated)}"] if comparison.simulated else []
    if worst is not None:
        changed = {row.key for row in comparison.rows if row.gated and row.verdict in ("regressed", "improved")}
        parts.append(f"{len(changed)} of {_count(comparison.compared, 'case')} changed")
        parts.append(f"worst: {names[worst.key]}, {_in_words(worst)}")
    return "; ".join(parts)


def _in_words(row: Row) -> str:
    if row.metric == OUTCOME:
        return f"{_shown(row.base, row.unit)} -> {_shown(row.new, row.unit)}"
    return f"{find(row.metric).title} " + ("without a ratio" if row.ratio is None else f"{format_ratio(row.ratio)}x")


def summary_line(comparison: Comparison) -> str:
    """``compared 4 cases, 4 rows: 1 regressed, 3 same; 0 new, 1 missing; geometric mean of ratios: …``."""
    counts = Counter(row.verdict for row in comparison.rows)
    listed = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]) or "none"
    means = ", ".join(
        f"{find(name).title} {format_ratio(mean, 4)}x" for name, mean in comparison.geometric_means().items()
    )
    parts = [
        f"compared {_count(comparison.compared, 'case')}, {_count(len(comparison.rows), 'row')}: {listed}",
        f"{len(comparison.only_in_new)} new, {len(comparison.only_in_base)} missing",
        *([f"geometric mean of ratios: {means}"] if means else []),
    ]
    return "; ".join(parts)
