"""Every figure of every record as comma-separated values in base units, for spreadsheets and scripts."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from joulemark.metrics import all_metrics
from joulemark.records import Case, Json, Record, Run
from joulemark.report.escape import csv_text

_CASE = tuple(one.name for one in fields(Case) if one.name != "params")
_LEAD = ("run_id", "file", "case_id", *_CASE)
_TAIL = ("outcome", "reason", "gpu_uuid", "window_start_utc", "window_end_utc", "findings", "notes")


def render(runs: Sequence[Run]) -> str:
    """A header and one line per record (RFC 4180), lines ended by CR LF.

    A metric has three columns, ``name``, ``name_lo`` and ``name_hi`` (its interval), in the units of the records;
    the user's parameters have columns ``param_…``. What was not measured is empty. A text cell that a spreadsheet
    would take for a formula starts with an apostrophe.
    """
    records = [(run, record) for run in runs for record in run.records]
    metrics = _metric_names(record for _, record in records)
    params = list(dict.fromkeys(name for _, record in records for name in record.case.params))
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_MINIMAL)
    figures = [f"{name}{suffix}" for name in metrics for suffix in ("", "_lo", "_hi")]
    header = [*_LEAD, *(f"param_{name}" for name in params), *figures, *_TAIL]
    writer.writerow([csv_text(title) for title in header])
    for run, record in records:
        writer.writerow([_cell(value) for value in _row(run, record, params, metrics)])
    return out.getvalue()


def render_rows(rows: Sequence[Mapping[str, Json]]) -> str:
    """Rows of one shape, their keys as the header; a list of texts is joined by ``; ``, a pair of numbers by ``..``."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_MINIMAL)
    writer.writerow([csv_text(title) for title in rows[0]] if rows else [])
    for row in rows:
        writer.writerow([_cell(_flat(value)) for value in row.values()])
    return out.getvalue()


def _flat(value: Json) -> Json:
    if not isinstance(value, list):
        return value
    return "; ".join(value) if value and isinstance(value[0], str) else "..".join(map(str, value))


def _metric_names(records: Iterable[Record]) -> list[str]:
    seen = {name for record in records for name in record.metrics}
    known = [metric.name for metric in all_metrics() if metric.name in seen]
    return known + sorted(seen - set(known))


def _row(run: Run, record: Record, params: Sequence[str], metrics: Sequence[str]) -> list[object]:
    figures: list[object] = []
    for name in metrics:
        value = record.metrics.get(name)
        lo, hi = (None, None) if value is None or value.interval is None else value.interval
        figures += [None if value is None else value.value, lo, hi]
    start, end = record.window_utc or (None, None)
    findings = "; ".join(f"{finding.code}: {finding.message}" for finding in record.findings)
    notes = "; ".join(f"{name}: {why}" for name, why in record.notes.items())
    return [
        run.run_id,
        run.path,
        record.case_id,
        *(getattr(record.case, name) for name in _CASE),
        *(record.case.params.get(name) for name in params),
        *figures,
        record.outcome,
        record.reason,
        record.gpu_uuid,
        start,
        end,
        findings,
        notes,
    ]


def _cell(value: object) -> object:
    return csv_text(value) if isinstance(value, str) else value
