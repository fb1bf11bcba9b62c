"""The table of data-parallel cases: throughput, efficiency, communication and energy over the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from joulemark.metrics import find, format_value
from joulemark.records import Case, Record, Table, Value

_METRICS = (
    "throughput_per_s",
    "scaling_efficiency",
    "exposed_communication_s",
    "straggler_rank",
    "energy_per_item_j",
    "overlap_fraction",
    "communication_s",
    "straggler_wait_s",
    "power_w",
)
"""The most important first: a narrow terminal leaves out the last."""
_STEP_TIMES = ("device_time_s", "host_time_s")


def scaling_table(records: Sequence[Record]) -> Table | None:
    """A row per number of ranks of every case that was measured with several; None where none was.

    The step time is the device's where it has a clock. A cell that does not apply to one rank is ``-``, one that was
    not measured is ``n/a`` (the notes of the run say why).
    """
    together = {_series(record.case) for record in records if record.case.world_size > 1}
    rows = [record for record in records if _series(record.case) in together]
    if not rows:
        return None
    order = list(dict.fromkeys(_series(record.case) for record in rows))
    rows.sort(key=lambda record: (order.index(_series(record.case)), record.case.world_size))
    metrics = [name for name in _METRICS if any(_tells(record, name) for record in rows)]
    times = next((name for name in _STEP_TIMES if any(record.value(name) is not None for record in rows)), None)
    figures = [*([times] if times else []), *metrics]
    identity = _identity(rows)
    return Table(
        columns=(*(title for title, _ in identity), *(find(name).title for name in figures)),
        rows=tuple(
            (*(cell(record.case) for _, cell in identity), *(_cell(record, name) for name in figures))
            for record in rows
        ),
        numeric=frozenset(range(len(identity) - 2, len(identity) + len(figures))),
        title="data parallel: batches are per GPU, figures of all GPUs together",
    )


def _tells(record: Record, name: str) -> bool:
    """Whether a record has a figure, or can say that no rank is a straggler."""
    return record.value("straggler_wait_s" if name == "straggler_rank" else name) is not None


def _series(case: Case) -> str:
    return replace(case, world_size=1).case_id


def _identity(rows: Sequence[Record]) -> list[tuple[str, Callable[[Case], str]]]:
    """Columns that tell the cases apart, the batch and the number of ranks last."""
    columns: list[tuple[str, Callable[[Case], str]]] = [("workload", lambda case: case.workload)]
    for name, title in (("dtype", "dtype"), ("mode", "mode"), ("gpu_model", "gpu")):
        if name == "dtype" or len({getattr(record.case, name) for record in rows}) > 1:
            columns.append((title, _text(name)))
    return [*columns, ("batch", _text("batch_size")), ("ranks", _text("world_size"))]


def _text(name: str) -> Callable[[Case], str]:
    def cell(case: Case) -> str:
        value = getattr(case, name)
        return "-" if value is None else str(value)

    return cell


def _cell(record: Record, name: str) -> str:
    found = record.metrics.get(name)
    if found is None or found.value is None:
        applies = record.case.world_size > 1 or name not in _OF_SEVERAL
        nobody = name == "straggler_rank" and record.value("straggler_wait_s") is not None
        return "none" if nobody else "n/a" if applies else "-"
    if name == "straggler_rank":
        return f"rank {found.value:.0f}"
    if name == "scaling_efficiency":
        return _with_bounds(found)
    return format_value(found.value, found.unit)


_OF_SEVERAL = frozenset(_METRICS) - {"throughput_per_s", "energy_per_item_j", "power_w"}


def _with_bounds(value: Value) -> str:
    """``0.97 [0.95, 0.98]``."""
    text = format_value(value.value, value.unit)
    if value.interval is None:
        return text
    low, high = (format_value(bound, value.unit) for bound in value.interval)
    return f"{text} [{low}, {high}]"
