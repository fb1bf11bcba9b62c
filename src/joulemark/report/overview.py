"""Many runs in a terminal: the answers in short and a line per run, or per series of one; tables on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from joulemark.metrics import CORE, format_value
from joulemark.records import OUTCOMES, Case, Record, Run, Table
from joulemark.report import answers_view, terminal
from joulemark.report.escape import printable
from joulemark.report.evidence import Document, gather, model_of
from joulemark.report.formats import table_of
from joulemark.report.names import label_without_gpu
from joulemark.report.output import render_tables
from joulemark.report.tables import tables_of

MOST_LINES = 90
"""Two screens: what is longer is told in short."""
_MOST_ROWS = 40
_TRIAL, _ADDED_WORK = "aa-", "added_work"
_HOW = "every case in its table: --tables; as a page: --out report.html"


def render(runs: Sequence[Run], documents: Sequence[Document] = (), width: int | None = None) -> str:
    """The answers and all tables where they fit two screens; else both in short. Trials of the gate are named alone.

    Args:
        runs: in any order.
        documents: beside the runs, see :mod:`joulemark.report.documents`.
        width: of the terminal, in columns; its own by default.
    """
    columns = width or terminal.width()
    whole = render_whole(runs, documents, columns)
    if whole.count("\n") <= MOST_LINES:
        return whole
    sweeps, trials = _apart(runs)
    answers = answers_view.render_brief(gather(sweeps, documents), columns, terminal.shows_blocks())
    notes = [*_trial_notes(trials), _HOW]
    table = _series(sweeps[0], notes) if len(sweeps) == 1 else _runs(sweeps, notes)
    return f"{answers}{terminal.render([table], columns)}\n"


def render_whole(runs: Sequence[Run], documents: Sequence[Document] = (), width: int | None = None) -> str:
    """The answers and the tables of all runs but trials of the gate, which are named; see :func:`render`."""
    sweeps, trials = _apart(runs)
    text = render_tables(gather(sweeps, documents), tables_of(sweeps), "terminal", width)
    return text + "".join(f"\n{printable(note)}\n" for note in _trial_notes(trials))


def _apart(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Sweeps, and trials of the gate: one binary in many processes. Where there is nothing else, trials are sweeps."""
    trials = [run for run in runs if _is_trial(run)]
    sweeps = [run for run in runs if not _is_trial(run)]
    return (sweeps, trials) if sweeps else (trials, [])


def _is_trial(run: Run) -> bool:
    return Path(run.path).name.startswith(_TRIAL) or any(_ADDED_WORK in one.case.params for one in run.records)


def _trial_notes(trials: Sequence[Run]) -> list[str]:
    if not trials:
        return []
    return [f"trials of the gate, no sweeps: {_named([Path(run.path).name for run in trials])} (read by joulemark aa)"]


def _runs(runs: Sequence[Run], notes: Sequence[str]) -> Table:
    """A line per run, the newest last."""
    ordered = sorted(runs, key=lambda run: run.started_utc or 0.0)
    shown = ordered[-_MOST_ROWS:]
    rows = [
        (
            Path(run.path).name.removesuffix(".jsonl"),
            _named(sorted({model_of(one) for one in run.records}), 2) + " (simulated)" * run.simulated,
            _named(list(dict.fromkeys(one.case.workload for one in run.records)), 2) or "-",
            _outcomes(run.records) + ("" if run.completed else ", INCOMPLETE") + ", problems" * bool(run.problems),
        )
        for run in shown
    ]
    older = [f"{len(ordered) - len(shown)} older runs are not listed"] if len(shown) < len(ordered) else []
    columns = ("run", "gpu", "workloads", "cases")
    return table_of(f"{len(ordered)} runs", columns, rows, [*older, *notes], ())


def _series(run: Run, notes: Sequence[str]) -> Table:
    """A line per series of a run: what differs in its batch size alone."""
    groups: dict[str, list[Record]] = {}
    for record in run.records:
        groups.setdefault(record.case.series.case_id, []).append(record)
    shown = list(groups.values())[:_MOST_ROWS]
    rows = [(_title(one[0].case), _batches(one), _times(one), _outcomes(one)) for one in shown]
    more = [f"{len(groups) - len(shown)} more series are not listed"] if len(shown) < len(groups) else []
    marks = [*(f"file: {problem}" for problem in run.problems), *(["INCOMPLETE"] if not run.completed else [])]
    columns = ("series", "batches", "time", "cases")
    title = f"{Path(run.path).name}{' | simulated GPUs' if run.simulated else ''} | {len(run.records)} cases"
    return table_of(title, columns, rows, [*more, *marks, *notes], ())


def _title(case: Case) -> str:
    return label_without_gpu(case.series)


def _batches(records: Iterable[Record]) -> str:
    sizes = sorted({one.case.batch_size for one in records if one.case.batch_size is not None})
    return " … ".join(str(size) for size in dict.fromkeys((sizes[0], sizes[-1]))) if sizes else "-"


def _times(records: Sequence[Record]) -> str:
    """The time that most records have, of the smallest and the largest batch."""
    ordered = sorted(records, key=lambda one: one.case.batch_size or 0)
    for metric in CORE[:2]:
        known = [value for one in ordered if (value := one.value(metric)) is not None]
        if known:
            return " … ".join(dict.fromkeys(format_value(value, "s") for value in (known[0], known[-1])))
    return "n/a"


def _outcomes(records: Iterable[Record]) -> str:
    counts = Counter(one.outcome for one in records)
    return ", ".join(f"{counts[one]} {one}" for one in OUTCOMES if counts[one]) or "none"


def _named(names: Sequence[str], most: int = 3) -> str:
    """``a, b, c and 4 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
