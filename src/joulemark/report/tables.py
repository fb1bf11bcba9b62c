"""From stored runs to tables of text, with a note under the table for everything that a reader must know."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from joulemark.findings import instability_of
from joulemark.metrics import CORE, LEVELS, find, format_value
from joulemark.records import OUTCOMES, Finding, Record, Run, Table, Value
from joulemark.report.evidence import CPU
from joulemark.report.generations_table import generations_table
from joulemark.report.names import first_of, namer
from joulemark.report.scaling_table import scaling_table

SHOWN_METRICS = CORE
"""Metrics of the table, the most important first; csv and json hold all."""

_WITH_INTERVAL = frozenset({"device_time_s", "host_time_s", "energy_per_item_j"})
_MANY = 3
"""Unstable cases from which on they are told together."""
_OPTION = "--bench-"
"""In a reason that a user can do away with."""
_MEASURED = frozenset({"ok", "flagged"})
_OUTCOME_TEXT = {"oom": "OOM", "failed": "FAILED"}
_FIGURE = re.compile(r"\d[\d.,]*(e[+-]?\d+)?\s?([pnµmkMGTK]?i?(s|J|W|B|Hz)\b|%|°C)?")


@dataclass(frozen=True)
class Column:
    """A column of records: its heading and what a record's cell says; None where it has nothing to say."""

    title: str
    cell: Callable[[Record], str | None]
    numeric: bool = False


def _text(name: str) -> Callable[[Record], str | None]:
    def cell(record: Record) -> str | None:
        value = getattr(record.case, name)
        return None if value is None else str(value)

    return cell


def _param(name: str) -> Callable[[Record], str | None]:
    return lambda record: str(record.case.params[name]) if name in record.case.params else None


def tables_of(runs: Sequence[Run]) -> list[Table]:
    """The tables of runs, one after the other."""
    return [table for run in runs for table in tables_of_run(run)]


def tables_of_run(run: Run) -> list[Table]:
    """A table per benchmark function: a row per record, columns for what was measured.

    Functions without a workload share one where their parameters have the same names. Cases of a function that
    are all unsupported have no table. The notes, of all tables, stand under the last.
    """
    numbered = _notes_of_findings(run.records)
    marks = {
        record.case_id: ",".join(str(number) for number, (_, ids) in enumerate(numbered, 1) if record.case_id in ids)
        for record in run.records
    }
    notes = (
        *(f"[{number}] {text}" for number, (text, _) in enumerate(numbered, 1)),
        *_missing_in_short(run.records),
        *(f"file: {problem}" for problem in run.problems),
        summary_line(run),
    )
    groups = _groups(run.records)
    names = [name if len(groups) > 1 else None for name in groups]
    tables = [
        table
        for name, records in zip(names, groups.values(), strict=True)
        for table in _group_tables(records, marks, _title(run, name))
    ] or [Table((), (), title=_title(run, None))]
    tables += [one for one in (scaling_table(run.records), generations_table(run.records)) if one is not None]
    return [*tables[:-1], replace(tables[-1], notes=notes)]


def _groups(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by the function that swept them, or else by the names of their parameters."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        key = record.case.benchmark or f"by {', '.join(record.case.params)}".removesuffix("by ")
        groups.setdefault(key, []).append(record)
    return {key: found for key, found in groups.items() if any(one.outcome != "unsupported" for one in found)}


def _group_tables(records: Sequence[Record], marks: Mapping[str, str], title: str) -> list[Table]:
    """The table of a group, and one of the levels of the chip where counters were read."""
    tables = [_table(records, marks, title, SHOWN_METRICS)]
    if any(record.value(level) is not None for record in records for level in LEVELS):
        tables.append(_table(records, marks, f"{title} | shares of peak over a step", LEVELS))
    return tables


def _table(records: Sequence[Record], marks: Mapping[str, str], title: str, metrics: Sequence[str]) -> Table:
    columns = [*identity_columns(records), *_metric_columns(records, metrics)]
    rows = tuple(
        (*(_or_missing(column.cell(record), column.numeric) for column in columns), _outcome(record, marks))
        for record in records
    )
    return Table(
        columns=(*(column.title for column in columns), "outcome"),
        rows=rows,
        numeric=frozenset(index for index, column in enumerate(columns) if column.numeric),
        title=title,
    )


def _or_missing(cell: str | None, numeric: bool) -> str:
    if cell is not None:
        return cell
    return "n/a" if numeric else "-"


def _outcome(record: Record, marks: Mapping[str, str]) -> str:
    text = _OUTCOME_TEXT.get(record.outcome, record.outcome)
    mark = marks[record.case_id]
    return f"{text} [{mark}]" if mark else text


def _title(run: Run, group: str | None) -> str:
    gpus = " ".join(sorted({record.case.gpu_model for record in run.records}))
    drivers = sorted({str(one.facts.get("driver")) for one in run.environments.values() if one.facts.get("driver")})
    simulated = "simulated GPUs" if run.simulated else ""
    parts = [Path(run.path).name, gpus, f"driver {', '.join(drivers)}" if drivers else "", simulated, group]
    return " | ".join(part for part in parts if part)


def identity_columns(records: Sequence[Record], own: Sequence[Column] | None = None) -> list[Column]:
    """Workload and the axes of the case; an axis that is None or at its default everywhere has no column.

    Args:
        records: that the columns are for.
        own: of the user's parameters; by default one of each.
    """
    columns = [Column("workload", _text("workload"))]
    for name, title, default in (
        ("phase", "phase", None),
        ("dtype", "dtype", None),
        ("mode", "mode", None),
        ("layout", "layout", "contiguous"),
        ("input", "input", "device"),
    ):
        told = name == "layout" and _follows_workload(records, name)
        if not told and any(getattr(record.case, name) not in (None, default) for record in records):
            columns.append(Column(title, _text(name)))
    columns += [Column(name, _param(name)) for name in _param_names(records)] if own is None else own
    if len({record.case.gpu_model for record in records}) > 1:
        columns.append(Column("gpu", _text("gpu_model")))
    if any(record.case.world_size != 1 for record in records):
        columns.append(Column("gpus", _text("world_size"), numeric=True))
    if any(record.case.batch_size is not None for record in records):
        columns.append(Column("batch", _text("batch_size"), numeric=True))
    return columns


def _follows_workload(records: Sequence[Record], name: str) -> bool:
    """Whether a workload never has two values of an axis: then its column would say nothing that compares."""
    seen: dict[str, str | None] = {}
    return all(
        seen.setdefault(one.case.workload, getattr(one.case, name)) == getattr(one.case, name) for one in records
    )


def _param_names(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record.case.params))


def _metric_columns(records: Sequence[Record], metrics: Sequence[str]) -> list[Column]:
    measured = [name for name in metrics if any(record.value(name) is not None for record in records)]
    return [Column(find(name).title, _figure(name, leading=name == measured[0]), numeric=True) for name in measured]


def _figure(name: str, leading: bool) -> Callable[[Record], str | None]:
    def cell(record: Record) -> str | None:
        found = record.metrics.get(name)
        if found is None or found.value is None:
            return _OUTCOME_TEXT.get(record.outcome) if leading else None
        return format_figure(found) if name in _WITH_INTERVAL else format_value(found.value, found.unit)

    return cell


def format_figure(value: Value) -> str:
    """A figure with half its interval in per cent of it: ``1.23 ms ±0.4%``; whole ones from 100 on."""
    text = format_value(value.value, value.unit)
    if value.value and value.interval is not None:
        half = (value.interval[1] - value.interval[0]) / 2 / abs(value.value)
        text += f" ±{half:.1%}" if half < 1 else f" ±{half:.0%}"
    return text


def groups_of_findings(records: Sequence[Record]) -> list[tuple[Finding, list[Record]]]:
    """Each kind of Finding and of failure, with the records that it is about.

    The same thing seen of several cases, each with its own figures, is one kind: the first one's Finding stands for it.
    """
    groups: dict[tuple[str, str, str], tuple[Finding, list[Record]]] = {}
    for record in records:
        for finding in _findings_and_reason(record):
            key = (finding.code, _FIGURE.sub("#", finding.message), finding.remedy)
            _, members = groups.setdefault(key, (finding, []))
            if not members or members[-1] is not record:
                members.append(record)
    return list(groups.values())


def _notes_of_findings(records: Sequence[Record]) -> list[tuple[str, frozenset[str]]]:
    """One note per kind of Finding and per reason of a failure, with the cases that it is about."""
    name = namer(record.case for record in records)
    notes = []
    for finding, members in groups_of_findings(records):
        remedy = f" ({finding.remedy})" if finding.remedy else ""
        text = _many_unstable(finding, members, len(records)) or (
            f"{first_of([name(record.case) for record in members])}: {finding.message}{remedy}"
        )
        notes.append((text, frozenset(record.case_id for record in members)))
    return notes


def _many_unstable(finding: Finding, members: Sequence[Record], total: int) -> str | None:
    """``12 of 14 cases: host time varies, by 5.2% to 21.0% …``; None of few, and of files without samples."""
    if finding.code != "unstable" or len(members) < _MANY:
        return None
    found = [one for one in (instability_of(record.metrics, record.samples) for record in members) if one is not None]
    if len(found) < len(members):
        return None
    shares = [summary.iqr / summary.median for _, summary in found]
    by = f"by {min(shares):.1%} to {max(shares):.1%} (interquartile range over median)"
    return f"{len(members)} of {total} cases: {found[0][0].title} varies {by}: {finding.remedy}"


def _findings_and_reason(record: Record) -> list[Finding]:
    found = list(record.findings)
    if record.outcome not in _MEASURED:
        what = {"oom": "out of memory", "failed": "FAILED", "unsupported": "not supported"}[record.outcome]
        reason = record.reason or ""
        message = reason if reason.lower().startswith(what.lower()) else f"{what}: {reason}" if reason else what
        found.insert(0, Finding(record.outcome, message))
    return found


@dataclass(frozen=True)
class _Missing:
    """What is missing for one reason.

    Args:
        reason: the first one's of those that differ in their figures alone.
        columns: titles of metrics that no record has.
        cells: metrics of single records, by title and case.
    """

    reason: str
    columns: list[str] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)

    @property
    def note(self) -> str:
        return f"not measured: {', '.join((*self.columns, *self.cells))}: {self.reason}"


def notes_of_missing(records: Sequence[Record]) -> list[str]:
    """Why figures of the measured records are missing: whole columns together by reason, then single cells.

    Reasons that differ in their figures alone are one note, with the first one's figures. Single cells are named for
    the metrics of the table; csv and json hold the notes of all.
    """
    return [one.note for one in _missing(records)]


def _missing_in_short(records: Sequence[Record]) -> list[str]:
    """The notes under a table: what the machine of a CPU lacks is one line, with the command that says why."""
    found = _missing(records)
    lacking = [one for one in found if not one.cells and _OPTION not in one.reason]
    if len(lacking) < 2 or any(record.case.gpu_model != CPU for record in records):
        return [one.note for one in found]
    names = ", ".join(name for one in lacking for name in one.columns)
    return [f"not measured on this CPU: {names} (joulemark env says why)",
            *(one.note for one in found if one not in lacking)]  # fmt: skip


def _missing(records: Sequence[Record]) -> list[_Missing]:
    name_of = namer(record.case for record in records)
    measured = [record for record in records if record.outcome in _MEASURED]
    missing: dict[tuple[str, str], list[Record]] = {}
    by_reason: dict[str, _Missing] = {}
    said: dict[str, str] = {}
    for record in measured:
        for name, why in record.notes.items():
            if record.value(name) is None:
                kind = _FIGURE.sub("#", why)
                said.setdefault(kind, why)
                missing.setdefault((name, kind), []).append(record)
    absent = {name for name, _ in missing if all(record.value(name) is None for record in records)}
    for (name, kind), members in missing.items():
        title = find(name).title
        if name in absent and len(members) == len(measured):
            by_reason.setdefault(kind, _Missing(said[kind])).columns.append(title)
        elif name in SHOWN_METRICS:
            cell = f"{title} of {first_of([name_of(one.case) for one in members])}"
            by_reason.setdefault(kind, _Missing(said[kind])).cells.append(cell)
    return list(by_reason.values())


def summary_line(run: Run) -> str:
    """``12 cases: 10 ok, 1 flagged, 1 oom; measured 42.0 s of 61.2 s (69 %)``, and whether the run is complete."""
    counts = Counter(record.outcome for record in run.records)
    total = f"{len(run.records)} case{'' if len(run.records) == 1 else 's'}"
    listed = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    parts = [f"{total}: {listed}" if listed else total]
    efficiency = efficiency_of(run)
    if efficiency is not None:
        parts.append(f"measured {run.measured_s:.1f} s of {run.wall_s:.1f} s ({efficiency:.0%})")
    if not run.completed:
        parts.append(f"INCOMPLETE ({run.reason})" if run.reason else "INCOMPLETE")
    return "; ".join(parts)


def efficiency_of(run: Run) -> float | None:
    """Share of a sweep's wall time whose samples are stored; None when the file does not say, or not what can be."""
    if run.measured_s is None or not run.wall_s or not 0 <= run.measured_s <= run.wall_s:
        return None
    return run.measured_s / run.wall_s
