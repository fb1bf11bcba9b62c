"""Where a bigger batch stops helping, of every series of stored runs: over models, GPUs, drivers and runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from joulemark.errors import ConfigurationError
from joulemark.history.runs import sorted_drivers
from joulemark.metrics import Metric, all_metrics, batch_text, find, format_value
from joulemark.records import Case, Json, Record, Run, Table
from joulemark.report.evidence import driver_of_record
from joulemark.report.names import first_of, label_without_gpu
from joulemark.utilization.curves import MEMORY, by_batch, plateau_of
from joulemark.utilization.plateau import Plateau

SCHEMA = "joulemark/plateaus/1"


@dataclass(frozen=True)
class PlateauRow:
    """A series of a run, judged.

    Args:
        run: that measured it.
        series: the case without its batch size.
        driver: version, or ``unknown``.
        plateau: of the level over the batch size; the level of a metric that is better lower is its inverse.
    """

    run: Run
    series: Case
    driver: str
    plateau: Plateau


def check_metric(name: str) -> Metric:
    """The metric of a name.

    Raises:
        ConfigurationError: there is none.
    """
    known = [metric.name for metric in all_metrics()]
    if name not in known:
        raise ConfigurationError(f"the metric {name!r} is unknown", f"choose from {', '.join(known)}")
    return find(name)


def plateaus_of(runs: Sequence[Run], metric: Metric) -> list[PlateauRow]:
    """Every series that swept the batch, in order of models, GPUs, drivers and time.

    Args:
        runs: as read from the store.
        metric: whose level is looked at.
    """
    rows = [
        PlateauRow(run, records[0].case.series, driver, plateau_of(*by_batch(records), metric.name))
        for run in runs
        for driver, records in _series(run)
    ]
    ranks = {driver: rank for rank, driver in enumerate(sorted_drivers(row.driver for row in rows))}

    def order(row: PlateauRow) -> tuple[str, str, int, float, str]:
        when = row.run.started_utc or 0.0
        return label_without_gpu(row.series), row.series.gpu_model, ranks[row.driver], when, row.run.path

    return sorted(rows, key=order)


def _series(run: Run) -> list[tuple[str, list[Record]]]:
    """The records of each series with a batch, under each driver."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in run.records:
        if record.case.batch_size is not None:
            found.setdefault((driver_of_record(run, record), record.case.series.case_id), []).append(record)
    return [(driver, records) for (driver, _), records in found.items()]


def table_of(rows: Sequence[PlateauRow], metric: Metric) -> Table:
    """The plateaus side by side; series of too few batch sizes are named under the table."""
    shown = [row for row in rows if row.plateau.verdict != "too_few_points"]
    few = [label_without_gpu(row.series) for row in rows if row.plateau.verdict == "too_few_points"]
    notes = [f"{first_of(few)}: too few batch sizes for a plateau"] if few else []
    notes += _notes(shown)
    if metric.better == "lower":
        notes.append(f"the level is 1 / {metric.title}: its plateau is where {metric.title} stops falling")
    confidence = {f"{row.plateau.confidence:.0%}" for row in shown}
    notes += [f"knees with {', '.join(sorted(confidence))} intervals, in items per step"] if shown else []
    return Table(
        ("case", "gpu", "driver", "run", "knee", metric.title, "verdict"),
        tuple(_cells(row, metric) for row in shown),
        frozenset({4, 5}),
        tuple(notes),
        f"plateaus of {metric.title} over the batch size",
    )


def _cells(row: PlateauRow, metric: Metric) -> tuple[str, ...]:
    plateau = row.plateau
    level = plateau.level if plateau.level is None or metric.better != "lower" else 1 / plateau.level
    verdict = "plateau" if plateau.verdict == "plateau" else plateau.describe()
    if plateau.verdict == "not_reached":
        end = ": larger ones did not fit" if plateau.limited_by == MEMORY else ""
        verdict = f"not reached by {batch_text(plateau.largest_batch)}{end}"
    name, path, level_text = label_without_gpu(row.series), _run_name(row.run.path), format_value(level, metric.unit)
    return name, row.series.gpu_model, row.driver, path, knee_text(plateau), level_text, verdict


def _run_name(path: str) -> str:
    """``4b96b6`` of ``sweep-20261129T145039Z-4b96b6.jsonl``: what all sweeps share leaves no width for the case."""
    own = re.fullmatch(r"sweep-\d{8}T\d{6}Z-(\w+)\.jsonl", Path(path).name)
    return Path(path).name if own is None else own[1]


def knee_text(plateau: Plateau) -> str:
    """``61 [57.4, ≥ 64]``: the batch beyond which no doubling pays, with its interval; ``n/a`` where there is none."""
    if plateau.knee is None or plateau.interval is None:
        return "n/a"
    below, above = "≤ " if plateau.open_below else "", "≥ " if plateau.open_above else ""
    lo, hi = map(batch_text, plateau.interval)
    return f"{batch_text(plateau.knee)} [{below}{lo}, {above}{hi}]"


def _notes(rows: Iterable[PlateauRow]) -> list[str]:
    """One note per kind of Finding, with the series that it is about and the first one's figures."""
    said: dict[str, tuple[str, list[str]]] = {}
    for row in rows:
        for finding in row.plateau.findings:
            remedy = f" ({finding.remedy})" if finding.remedy else ""
            _, names = said.setdefault(finding.code, (f"{finding.message}{remedy}", []))
            names.append(label_without_gpu(row.series))
    return [f"{first_of(list(dict.fromkeys(names)))}: {text}" for text, names in said.values()]


def document(rows: Sequence[PlateauRow], metric: Metric) -> Json:
    """All of it, described by ``docs/schema/plateaus.schema.json``."""
    return {
        "schema": SCHEMA,
        "metric": metric.name,
        "inverted": metric.better == "lower",
        "rows": [
            {
                "label": row.series.label,
                "series_id": row.series.case_id,
                "gpu_model": row.series.gpu_model,
                "driver": row.driver,
                "run_id": row.run.run_id,
                "path": row.run.path,
                "plateau": row.plateau.to_json(),
            }
            for row in rows
        ],
    }
