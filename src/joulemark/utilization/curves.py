"""Records of one configuration over batch sizes, of one run or several: of which of them a plateau is made.

Runs differ in more than the noise between processes: another host, another load, other batch sizes. So a plateau is
that of one run wherever a run has enough batch sizes; every table, picture and document asks :func:`plateau_of` for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from joulemark.metrics import find
from joulemark.records import Record, Run
from joulemark.utilization.plateau import MIN_BATCHES, Plateau, Point, find_plateau

THROUGHPUT = "throughput_per_s"
MEMORY = "memory"
"""Why no larger batch was measured, where one did not fit."""
_ASKED_FOR = "the batch sizes that were asked for"
_MEASURED = ("ok", "flagged")

ByBatch = Mapping[int, Sequence[Record]]
"""Batch size → measured records of one configuration, the best equipped last."""


def best_equipped_last(runs: Iterable[Run]) -> list[Run]:
    """Runs without a profile before those with one, then by time: of what several of them have, the last one counts."""
    return sorted(runs, key=lambda run: (any(one.tables.get("timeline") for one in run.records), run.started_utc or 0))


def by_batch(records: Iterable[Record]) -> tuple[dict[int, tuple[Record, ...]], int | None]:
    """Measured records of one configuration by batch size, and the smallest batch that ran out of memory, if any did.

    Args:
        records: of runs in the order of :func:`best_equipped_last`; those without a batch size are passed over.
    """
    measured: dict[int, tuple[Record, ...]] = {}
    too_large: list[int] = []
    for record in records:
        batch = record.case.batch_size
        if not batch:
            continue
        if record.outcome in _MEASURED:
            measured[batch] = (*measured.get(batch, ()), record)
        elif record.outcome == "oom":
            too_large.append(batch)
    return dict(sorted(measured.items())), min(too_large, default=None)


def plateau_of(measured: ByBatch, did_not_fit: int | None = None, metric: str = THROUGHPUT) -> Plateau:
    """The plateau of a metric over the batch sizes that have it.

    Of the run that swept the largest batch, the newest of several. Where no run has enough batch sizes for a verdict,
    all of them together, each record as a process.

    Args:
        measured, did_not_fit: from :func:`by_batch`.
        metric: name; of one that is better lower, the level is its inverse.
    """
    found = points_of(measured, metric)
    largest = max((one.batch for one in found), default=0.0)
    limited = MEMORY if did_not_fit is not None and did_not_fit > largest else _ASKED_FOR
    return find_plateau(found, limited_by=limited)


def points_of(measured: ByBatch, metric: str = THROUGHPUT) -> list[Point]:
    """What :func:`plateau_of` is the plateau of, batch sizes rising."""
    runs: dict[str, dict[int, Record]] = {}
    for batch, records in measured.items():
        for record in records:
            if _levels(record, metric):
                runs.setdefault(record.run_id, {})[batch] = record
    enough = [one for one in runs.values() if len(one) >= MIN_BATCHES]
    chosen: ByBatch = measured
    if enough:
        chosen = {batch: (record,) for batch, record in max(enough, key=_reach).items()}
    levels = {
        batch: tuple(level for record in records for level in _levels(record, metric))
        for batch, records in sorted(chosen.items())
    }
    return [Point(batch, values) for batch, values in levels.items() if values]


def _reach(run: Mapping[int, Record]) -> tuple[int, float]:
    """The largest batch of a run's records, and when they were measured."""
    return max(run), max((record.window_utc or (0.0,))[0] for record in run.values())


def _levels(record: Record, metric: str) -> tuple[float, ...]:
    """The level as each process saw it, or as the record has it."""
    own = [process[metric] for process in record.processes if process.get(metric) is not None]
    whole = record.value(metric)
    values = own or ([] if whole is None else [whole])
    inverted = find(metric).better == "lower"
    return tuple(1 / value if inverted and value else value for value in values)
