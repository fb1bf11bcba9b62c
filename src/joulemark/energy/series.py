"""Energy per item over batch sizes beside throughput, and where each stops gaining (pure)."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from joulemark.utilization.plateau import Point, find_plateau

if TYPE_CHECKING:
    from collections.abc import Iterable

    from joulemark.energy.outcome import Outcome
    from joulemark.records import Json

_FEWEST = 2
"""Batch sizes that make a series."""


def series_of(outcomes: Iterable[Outcome]) -> list[dict[str, Json]]:
    """Workloads whose names differ in their batch size alone, ascending in it.

    Returns:
        Per series its cells, and the plateaus of throughput (items/s) and of energy (items/J, so that both gain
        upwards); see :func:`joulemark.utilization.plateau.find_plateau`. Workloads without items are left out.
    """
    groups: dict[str, dict[int, dict[str, Json]]] = defaultdict(dict)
    for one in outcomes:
        seen = one.measured
        if seen.items and seen.batch_size:
            groups[seen.workload.removesuffix(f"-b{seen.batch_size}")][seen.batch_size] = _cell(one, seen.items)
    return [
        _series(name, [cells[batch] for batch in sorted(cells)])
        for name, cells in groups.items()
        if len(cells) >= _FEWEST
    ]


def _cell(one: Outcome, items: float) -> dict[str, Json]:
    seen = one.measured
    return {
        "workload": seen.workload,
        "batch_size": seen.batch_size,
        "items_per_s": items / seen.window_s,
        "energy_per_item_j": seen.measured_j / items,
        "dynamic_per_item_j": None if one.split is None else one.split.dynamic_j / items,
        "power_w": seen.measured_j / seen.window_s,
        "capped": seen.capped,
    }


def _series(name: str, cells: list[dict[str, Json]]) -> dict[str, Json]:
    levels = {
        "throughput_plateau": [cell["items_per_s"] for cell in cells],
        "energy_plateau": [1 / cell["energy_per_item_j"] for cell in cells],
    }
    plateaus = {
        which: find_plateau([Point(cell["batch_size"], (level,)) for cell, level in zip(cells, values, strict=True)])
        for which, values in levels.items()
    }
    return {"series": name, "cells": cells, **{which: one.to_json() for which, one in plateaus.items()}}
