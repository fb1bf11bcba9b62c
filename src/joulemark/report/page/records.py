"""Every record as a row of data for the page's own table, which sorts and filters it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from joulemark.metrics import find
from joulemark.records import NOT_REAL, Json, Record
from joulemark.report.escape import printable
from joulemark.report.evidence import Evidence
from joulemark.report.tables import SHOWN_METRICS, Column, format_figure, identity_columns

_METRICS = (*SHOWN_METRICS, "gpu_busy_fraction", "tensor_active_fraction", "dram_fraction")
_LONGEST = 120


def table_data(evidence: Evidence) -> Json:
    """``columns`` (title, kind, instruments), ``rows`` of cells, ``filters`` (columns that have few values).

    A cell of a text column is its text, of a figure ``[text, number]``, of one that was not measured ``null``. The last
    cell of a row holds what its details say.
    """
    records = evidence.records
    identity = _identity(records)
    metrics = [name for name in _METRICS if any(record.value(name) is not None for record in records)]
    several = len(evidence.runs) > 1
    columns = [{"title": one.title, "kind": "number" if one.numeric else "text", "tier": ""} for one in identity]
    columns += [{"title": find(name).title, "kind": "number", "tier": _tiers(records, name)} for name in metrics]
    columns += [{"title": "run", "kind": "text", "tier": ""}] if several else []
    columns += [{"title": "outcome", "kind": "text", "tier": ""}]
    rows = []
    for run in reversed(evidence.runs):
        for record in run.records:
            cells: list[Json] = []
            for column in identity:
                text = column.cell(record)
                cells.append([text, _number(text)] if column.numeric and text is not None else text and _short(text))
            cells += [_figure(record, name) for name in metrics]
            cells += [_short(Path(run.path).stem + " (simulated)" * run.simulated)] if several else []
            cells += [record.outcome, _details(record, bool(run.is_simulated(record)))]
            rows.append(cells)
    return {"columns": columns, "rows": rows, "filters": _filters(columns, rows)}


def _identity(records: Sequence[Record]) -> list[Column]:
    """What tells a case, with all parameters in one column: few records have the same ones."""
    own = [Column("parameters", _parameters)] if any(record.case.params for record in records) else []
    return identity_columns(records, own)


def _parameters(record: Record) -> str:
    return " ".join(f"{name}={value}" for name, value in record.case.params.items())


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _short(text: str) -> str:
    plain = printable(text)
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 1]}…"


def _figure(record: Record, name: str) -> Json:
    value = record.metrics.get(name)
    return None if value is None or value.value is None else [format_figure(value), value.value]


def _tiers(records: Sequence[Record], name: str) -> str:
    tiers = {value.tier for record in records if (value := record.metrics.get(name)) is not None and value.tier}
    return ", ".join(sorted(tiers))


def _details(record: Record, simulated: bool) -> str:
    """Whether its GPU is simulated, Findings, the reason of a failure, and why figures are missing."""
    said = [f"simulated GPU: {NOT_REAL}"] if simulated else []
    said += [record.reason] if record.reason else []
    said += [f"{one.message} ({one.remedy})" if one.remedy else one.message for one in record.findings]
    said += [f"{find(name).title}: {why}" for name, why in record.notes.items() if name in _METRICS]
    return printable(" · ".join(said))[:600]


def _filters(columns: Sequence[Mapping[str, Json]], rows: Sequence[Sequence[Json]]) -> list[Json]:
    """Columns of text with two to thirty values, for menus: their index and their values."""
    found = []
    for index, column in enumerate(columns):
        if column["kind"] == "text":
            values = sorted({row[index] for row in rows if isinstance(row[index], str)})
            if 2 <= len(values) <= 30:
                found.append({"column": index, "values": values})
    return found


def script_json(document: Json) -> str:
    """JSON that may stand in a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
