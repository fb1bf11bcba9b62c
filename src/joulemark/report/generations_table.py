"""The same cases on several GPUs of one run (models, or boards of one model), each against the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from joulemark.metrics import format_value
from joulemark.records import Record, Table, Value

_METRICS = ("throughput_per_s", "energy_per_item_j")
_TITLES = {"throughput_per_s": ("items/s", "speed"), "energy_per_item_j": ("energy/item", "energy")}
_AXES = ("workload", "phase", "dtype", "mode", "batch_size", "world_size")
_DEFAULTS = {"mode": "eager", "world_size": 1}
_MEASURED = ("ok", "flagged")


def generations_table(records: Sequence[Record]) -> Table | None:
    """A row per case and GPU, with ratios to the run's first one; None where no case was on two.

    A ratio is the GPU's figure over the first one's, with the bounds of both intervals combined: a speed above 1 is
    faster, an energy below 1 is less.
    """
    measured = [record for record in records if record.outcome in _MEASURED]
    groups: dict[str, dict[str, Record]] = {}
    for record in measured:
        groups.setdefault(replace(record.case, gpu_model="").case_id, {}).setdefault(record.case.gpu_model, record)
    shared = [group for group in groups.values() if len(group) > 1]
    metrics = [name for name in _METRICS if any(one.value(name) for group in shared for one in group.values())]
    if not shared or not metrics:
        return None
    base = next(iter(shared[0]))
    axes = _axes([record for group in shared for record in group.values()])
    rows = tuple(
        (*(_axis(record, axis) for axis in axes), model, *_figures(record, group.get(base), metrics))
        for group in shared
        for model, record in group.items()
    )
    titles = [title for name in metrics for title in (_TITLES[name][0], f"{_TITLES[name][1]} / {base}")]
    first = len(axes) + 1
    columns = (*(axis.removesuffix("_size") for axis in axes), "gpu", *titles)
    return Table(
        columns=columns,
        rows=rows,
        numeric=frozenset(range(first, first + len(titles))),
        title=f"GPUs against {base}",
    )


def _axes(records: Sequence[Record]) -> list[str]:
    """Workload, and what else tells the cases apart."""
    told = [
        axis for axis in _AXES if any(getattr(one.case, axis) not in (None, _DEFAULTS.get(axis)) for one in records)
    ]
    return list(dict.fromkeys(["workload", *told]))


def _axis(record: Record, axis: str) -> str:
    value = getattr(record.case, axis)
    if axis == "workload" and record.case.params:
        own = ", ".join(f"{name}={one}" for name, one in sorted(record.case.params.items()))
        return f"{value} ({own})"
    return "-" if value is None else str(value)


def _figures(record: Record, base: Record | None, metrics: Sequence[str]) -> list[str]:
    cells: list[str] = []
    for name in metrics:
        own = record.metrics.get(name)
        reference = None if base is None else base.metrics.get(name)
        cells.append("n/a" if own is None else format_value(own.value, own.unit))
        cells.append(_ratio(own, reference))
    return cells


def _ratio(own: Value | None, base: Value | None) -> str:
    """``1.42 [1.40, 1.44]``."""
    if own is None or base is None or own.value is None or not base.value:
        return "n/a"
    text = format_value(own.value / base.value, "1")
    if own is base:
        return "1"
    if own.interval is None or base.interval is None or base.interval[0] <= 0:
        return text
    low, high = own.interval[0] / base.interval[1], own.interval[1] / base.interval[0]
    return f"{text} [{format_value(low, '1')}, {format_value(high, '1')}]"
