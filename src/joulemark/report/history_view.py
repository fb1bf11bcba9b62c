"""A metric's history as tables and as a JSON document, described by ``docs/schema/history.schema.json``."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from joulemark.history.runs import PastRun, Source
from joulemark.history.trend import ChangePoint, Level, Ratio, RowChange, Trend
from joulemark.metrics import find, format_value
from joulemark.records import NOT_REAL, Json, Table
from joulemark.report.names import namer

SCHEMA = "joulemark/history/1"
_ROWS_OF_A_CHANGE = 5


def tables_of(trend: Trend) -> list[Table]:
    """Levels by driver, the changes, and the rows that changed most."""
    return [_levels(trend), _changes(trend), *(_rows(trend, number) for number in range(1, len(trend.changes) + 1))]


def _levels(trend: Trend) -> Table:
    figures, drivers = trend.figures, trend.drivers
    unit, name = find(figures.metric).unit, namer(figures.cases)
    common = next((gpu for gpu, _ in Counter(case.gpu_model for case in figures.cases).most_common(1)), "")
    counts = Counter(run.driver for run in figures.runs)
    newest = f"{drivers[-1]} / previous" if len(drivers) > 1 else ""
    rows, told = [], zip(figures.cases, trend.levels, strict=True)
    for case, levels in sorted(told, key=lambda one: _says_less(one[1], drivers)):
        cells = [_level(levels.get(driver), unit, counts[driver]) for driver in drivers]
        last = levels.get(drivers[-1])
        ratio = [ratio_text(None if last is None else last.ratio)] if newest else []
        rows.append((name(replace(case, gpu_model="") if case.gpu_model == common else case), *cells, *ratio))
    columns = ("case", *(f"{driver} ({_runs(counts[driver])})" for driver in drivers), *([newest] if newest else []))
    return Table(
        columns,
        tuple(rows),
        frozenset(range(1, len(columns))),
        title=f"{find(figures.metric).title} by driver, median over {_runs(len(figures.runs))}"
        + (" on simulated GPUs" if figures.simulated else "")
        + (f"; {common} unless another is named" if common else ""),
    )


def _says_less(levels: Mapping[str, Level], drivers: Sequence[str]) -> tuple[bool, bool]:
    """What puts a row behind others: no ratio for the newest driver, then a single run."""
    newest = levels.get(drivers[-1]) if drivers else None
    compared = newest is not None and newest.ratio is not None
    return not compared, sum(one.runs for one in levels.values()) < 2


def _level(level: Level | None, unit: str, runs: int) -> str:
    if level is None:
        return "n/a"
    return format_value(level.median, unit) + ("" if level.runs == runs else f" ({_runs(level.runs)})")


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"


def ratio_text(ratio: Ratio | None) -> str:
    """``1.031 [1.027, 1.035]``."""
    if ratio is None or ratio.value is None:
        return "n/a"
    if ratio.interval is None:
        return f"{ratio.value:.3f} (one run)"
    return f"{ratio.value:.3f} [{ratio.interval[0]:.3f}, {ratio.interval[1]:.3f}]"


def _changes(trend: Trend) -> Table:
    columns = ("change", "from run", "began", "driver before", "driver after", "rows", "ratio", "meaning")
    rows = tuple(
        (
            str(number),
            _run_name(one.run),
            _date(one.run.started_utc),
            one.before.driver,
            one.run.driver if one.run.driver != one.before.driver else "the same",
            f"{len(one.rows)} of {len(trend.figures.cases)}" if one.rows else "all together",
            ratio_text(one.ratio),
            meaning(trend, one),
        )
        for number, one in enumerate(trend.changes, 1)
    )
    where = " on simulated GPUs" if trend.figures.simulated else ""
    title = f"{len(rows) or 'no'} change{'' if len(rows) == 1 else 's'} of {find(trend.figures.metric).title}{where}"
    return Table(columns, rows, frozenset({5, 6}), notes=tuple(notes_of(trend)), title=title)


def notes_of(trend: Trend) -> list[str]:
    """What a reader must know of the changes and the levels."""
    notes = [f"change {number}: {_between(trend, one)}" for number, one in enumerate(trend.changes, 1)]
    notes += [f"change {number}: {what}" for number, one in enumerate(trend.changes, 1) if (what := _difference(one))]
    figures = trend.figures
    if len(figures.runs) < trend.runs_needed:
        notes.append(
            f"{_runs(len(figures.runs))}: it takes {trend.runs_needed} to show a change at this rate of false alarms"
        )
    elif short := _of_few_runs(trend):
        notes.append(
            f"{short} of {len(figures.cases)} cases are in fewer than {trend.runs_needed} runs: what changes in one of "
            "them alone cannot be shown"
        )
    notes.append(
        f"a history without any change would be given one with a chance of at most {trend.rate:.3g}; "
        "ratios are new / base with 95 % intervals, from run to run"
    )
    if figures.flagged:
        share = figures.flagged / sum(level.runs for levels in trend.levels for level in levels.values())
        which = "1 figure" if figures.flagged == 1 else f"{figures.flagged} figures"
        notes.append(f"flagged in their runs, and counted here: {which} ({share:.0%})")
    if figures.simulated:
        notes.append(f"all runs are on simulated GPUs: {NOT_REAL}")
    if figures.simulated_apart:
        notes.append(
            f"{_runs(figures.simulated_apart)} on simulated GPUs left out: they are no part of a history of others "
            "(keep them in a folder of their own)"
        )
    if figures.copies:
        notes.append(f"in several files, and counted once: {_runs(figures.copies)}")
    return notes


def _of_few_runs(trend: Trend) -> int:
    """How many cases are in too few runs for a change of their own to stand out."""
    return sum(sum(level.runs for level in levels.values()) < trend.runs_needed for levels in trend.levels)


def _between(trend: Trend, change: ChangePoint) -> str:
    first, last = change.between
    if first == last:
        return "no other run is as likely (95 % confidence)"
    names = [_run_name(trend.figures.runs[at]) for at in (first, last)]
    return f"it began between {names[0]} and {names[1]} (95 % confidence)"


def _difference(change: ChangePoint) -> str:
    parts = [f"{name} {old or '-'} → {new or '-'}" for name, (old, new) in change.differences.items()]
    return f"differs from the run before in {', '.join(parts)}" if parts else ""


def _rows(trend: Trend, number: int) -> Table:
    rows, unit = trend.changes[number - 1].rows, find(trend.figures.metric).unit
    name = namer(trend.figures.cases)
    shown = tuple(
        (name(one.case), format_value(one.before, unit), format_value(one.after, unit), ratio_text(one.ratio))
        for one in rows[:_ROWS_OF_A_CHANGE]
    )
    more = len(rows) - len(shown)
    return Table(
        ("case", "before", "after", "ratio"),
        shown,
        frozenset({1, 2, 3}),
        notes=(f"and {more} more: --json has all",) if more else () if rows else ("no row changed by itself",),
        title=f"change {number}: rows that changed most",
    )


def meaning(trend: Trend, change: ChangePoint) -> str:
    """``worse``, ``better``, or ``up`` and ``down`` for a metric without a better direction."""
    ratio, better = change.ratio.value, find(trend.figures.metric).better
    if ratio is None or ratio == 1:
        return "n/a"
    if better == "neither":
        return "up" if ratio > 1 else "down"
    return "better" if (ratio < 1) == (better == "lower") else "worse"


def _run_name(run: PastRun) -> str:
    return Path(run.path).name


def _date(started_utc: float | None) -> str:
    if started_utc is None or not math.isfinite(started_utc) or not 0 <= started_utc < 1e11:
        return "n/a"
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(started_utc))


def problems_of(sources: Sequence[Source]) -> list[str]:
    """A line for each file that cannot be used, or not wholly."""
    lines = [f"left out: {one.error}" for one in sources if one.error is not None]
    return lines + [f"{one.path}: {problem}" for one in sources for problem in one.problems]


def document(trend: Trend, sources: Sequence[Source]) -> Json:
    """All of it.

    Args:
        trend: of :func:`joulemark.history.trend.trend_of`.
        sources: the files that were looked at.
    """
    figures = trend.figures
    metric = find(figures.metric)
    name = namer(figures.cases)
    return {
        "schema": SCHEMA,
        "metric": figures.metric,
        "unit": metric.unit,
        "better": metric.better,
        "false_alarm_rate": trend.rate,
        "runs_needed": trend.runs_needed,
        "runs": [_run(run) for run in figures.runs],
        "drivers": list(trend.drivers),
        "rows": [
            {
                "label": name(case),
                "case_id": case.case_id,
                "levels": {driver: _level_json(level) for driver, level in levels.items()},
            }
            for case, levels in zip(figures.cases, trend.levels, strict=True)
        ],
        "changes": [_change(trend, one) for one in trend.changes],
        "notes": notes_of(trend),
        "files": [{"path": one.path, "error": one.error, "problems": list(one.problems)} for one in sources],
    }


def _run(run: PastRun) -> Json:
    return {"path": run.path, "run_id": run.run_id, "started_utc": run.started_utc, "driver": run.driver,
            "simulated": run.simulated}  # fmt: skip


def _level_json(level: Level) -> Json:
    ratio = None if level.ratio is None else _ratio(level.ratio)
    return {"median": level.median, "runs": level.runs, "ratio_to_previous_driver": ratio}


def _ratio(ratio: Ratio) -> Json:
    return {"value": ratio.value, "interval": None if ratio.interval is None else list(ratio.interval)}


def _change(trend: Trend, change: ChangePoint) -> Json:
    name = namer(trend.figures.cases)
    return {
        "run": change.at,
        "between_runs": list(change.between),
        "run_id": change.run.run_id,
        "path": change.run.path,
        "driver": {"before": change.before.driver, "after": change.run.driver},
        "differences": {key: {"before": old, "after": new} for key, (old, new) in change.differences.items()},
        "ratio": _ratio(change.ratio),
        "meaning": meaning(trend, change),
        "rows": [_row(one, name(one.case)) for one in change.rows],
    }


def _row(row: RowChange, label: str) -> Json:
    return {
        "label": label,
        "case_id": row.case.case_id,
        "before": row.before,
        "after": row.after,
        "ratio": _ratio(row.ratio),
    }
