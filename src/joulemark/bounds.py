"""What figures of a machine can be, by their unit: beyond that a file is damaged, or its unit is another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST: Mapping[str, float] = {
    "s": 1e9,  # 32 years
    "1/s": 1e18,  # a million items in a picosecond
    "J": 1e15,  # a megawatt, more than a rack of GPUs takes, for 32 years
    "W": 1e6,
    "B": 1e18,  # ten million times the memory of a GPU
    "Hz": 1e12,  # a thousand times a GPU's clock
    "degC": 1e3,  # silicon melts at 1414 °C, solder at 220 °C
    "1": 1e30,  # counts: a zettaflop machine for 32 years
    "FLOP": 1e30,
    "FLOP/s": 1e21,
}
"""By unit, the largest magnitude of any figure."""
LEAST: Mapping[str, float] = {
    "s": 1e-12,  # a cycle of a GPU takes three hundred times as long
    "1/s": 1e-9,  # an item in 32 years
    "J": 1e-21,  # erasing one bit at room temperature takes 2.9e-21 J (Landauer, IBM J. Res. Dev. 5, 1961)
    "W": 1e-6,
}
"""By unit, the smallest of an amount that is above 0; 0 and what is below it count as not known."""
AMOUNTS = frozenset({
    "device_time_s", "host_time_s", "device_time_cold_s", "device_time_graph_s", "counted_step_s", "throughput_per_s",
    "energy_per_item_j", "power_w",
})  # fmt: skip
"""Metrics that are measured as a whole; others may be differences, which come as close to 0 as they like."""
_SUFFIXES = {"_s": "s", "_per_s": "1/s", "_j": "J", "_w": "W", "_hz": "Hz", "_bytes": "B", "_c": "degC"}
_SMALL = 1e-5
"""No least amount is as large."""


def check_figures(
    metrics: Mapping[str, Any], samples: Mapping[str, Sequence[float]], processes: Iterable[Mapping[str, float]]
) -> None:
    """Refuse figures of a record that no machine has; those of units that are not known here pass.

    Args:
        metrics: figures by metric name, with ``value``, ``interval`` and ``unit`` as of a record.
        samples: raw samples by name; the suffix of a name (``_s``, ``_j``, ``_w`` …) tells its unit.
        processes: medians by metric name, of each process.

    Raises:
        ValueError: of one; says which, its value and what it can be.
    """
    for name, figure in metrics.items():
        unit, value = figure.unit, figure.value
        most = MOST.get(unit, math.inf)
        if value is not None and not (-most <= value <= most and (value >= _SMALL or value <= 0)):
            _check(f"metrics.{name}.value", value, unit, name)
        for end in figure.interval or ():
            if not -most <= end <= most:
                _check(f"metrics.{name}.interval", end, unit, None)
    for name, values in samples.items():
        if values:
            _check_all(f"samples.{name}", values, name)
    for number, medians in enumerate(processes):
        for name, median in medians.items():
            _check_all(f"processes[{number}].{name}", (median,), name)


def _check_all(field: str, values: Sequence[float], name: str) -> None:
    unit = _unit_of(name)
    _check(field, max(values), unit, None)
    _check(field, min(values), unit, None)
    if name in AMOUNTS and min(values) < _SMALL:
        for value in values:
            _check(field, value, unit, name)


def _unit_of(name: str) -> str:
    found = max((suffix for suffix in _SUFFIXES if name.endswith(suffix)), key=len, default="")
    return _SUFFIXES.get(found, "")


def _check(field: str, value: float, unit: str, name: str | None) -> None:
    """Refuse a value; ``name`` is the metric's where it may not come close to 0."""
    most, least = MOST.get(unit, math.inf), LEAST.get(unit, 0.0) if name in AMOUNTS else 0.0
    if not -most <= value <= most:
        raise ValueError(f"{field} is {value!r} {unit}, and no such figure is beyond {most:.0e} {unit}")
    if 0 < value < least:
        raise ValueError(f"{field} is {value!r} {unit}, and no such amount is below {least:.0e} {unit}")
