"""Counts of every kernel, class, operator and module, with intervals, from the windows of one pass of counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from joulemark.attribution import solve
from joulemark.attribution.clock import Floats
from joulemark.attribution.solve import Window
from joulemark.attribution.units import Units
from joulemark.records import Json

ELAPSED = ("sm_cycles",)
"""Counters that go on when nothing runs: no kernel's."""
OWN_TRAFFIC = ("pcie_rx_bytes", "pcie_tx_bytes")
"""Counters in which the instrument's own records weigh more than the work."""


@dataclass(frozen=True)
class Rows:
    """What figures are wanted of: each row some places of a step.

    Args:
        members: per row which places, shape [rows, places].
        times: per row the time of each unit per step, shape [rows, units], in s.
    """

    members: Floats
    times: Floats

    @property
    def time_s(self) -> Floats:
        """Of each row, per step."""
        return np.asarray(self.times.sum(axis=1))


def rows_of(labels: Sequence[str], order: Sequence[str], units: Units) -> Rows:
    """A row per label: the places that bear it."""
    index = {label: number for number, label in enumerate(order)}
    members = np.zeros((len(order), len(labels)))
    members[[index[label] for label in labels], np.arange(len(labels))] = 1.0
    times = np.zeros((len(order), len(units.units)))
    np.add.at(times, (slice(None), units.of_place), members * units.time_s)
    return Rows(members, times)


@dataclass(frozen=True)
class Figures:
    """What one pass tells of rows.

    Args:
        group: the pass.
        counters: names.
        units_of: counter → unit.
        amount: per step, shape [rows, counters]; of shares share × s.
        half: half of its interval; NaN without one.
        rate: per unit of launches and counter, in counts per s.
        measured, attributed, outside: counts per step of all samples of the steps, of all kernels, and of samples in
            which no kernel ran, shape [counters].
        samples: of the steps.
    """

    group: str
    counters: list[str]
    units_of: Mapping[str, str]
    amount: Floats
    half: Floats
    rate: Floats
    measured: Floats
    attributed: Floats
    outside: Floats
    samples: int

    def cell(self, row: int, counter: str, time_s: float) -> dict[str, Json]:
        """Value and interval of a row: a share of peak over its time, or an amount per step."""
        column = self.counters.index(counter)
        value, half = float(self.amount[row, column]), float(self.half[row, column])
        if self.units_of[counter] == "1":
            value, half = (value / time_s, half / time_s) if time_s else (0.0, 0.0)
        interval = None if np.isnan(half) else [max(0.0, value - half), value + half]
        return {"value": value, "interval": interval}


def figures_of(windows: Sequence[Window], rows: Rows) -> Figures:
    """Figures of rows from the windows of one pass.

    Args:
        windows: that counted the same.
        rows: of a step.
    """
    series = windows[0].series
    names = [name for name in series.values if name not in (*ELAPSED, *OWN_TRAFFIC)]
    n = rows.times.shape[1]
    parts = _parts(windows, names, n)
    system = solve.normal(parts)
    found = solve.rates(system)
    influence = solve.influences(system, found, rows.times)
    by_clock = rows.times @ (_shifted(windows, names, n) - found)
    half = np.sqrt(solve.half_widths(influence) ** 2 + by_clock**2)
    steps = len(system.steps)
    idle = [np.asarray(one.matrix.sum(axis=1)).reshape(-1) <= 0 for one, _ in parts]
    return Figures(
        group=series.group,
        counters=names,
        units_of=series.units,
        amount=rows.times @ found,
        half=half,
        rate=found,
        measured=sum((counts.sum(axis=0) for _, counts in parts), np.zeros(len(names))) / steps,
        attributed=sum(((one.matrix @ found).sum(axis=0) for one, _ in parts), np.zeros(len(names))) / steps,
        outside=sum((counts[no].sum(axis=0) for (_, counts), no in zip(parts, idle, strict=True)), np.zeros(len(names)))
        / steps,
        samples=sum(len(one.rows) for one, _ in parts),
    )


def _parts(windows: Sequence[Window], names: list[str], units: int) -> list[tuple[solve.Overlaps, Floats]]:
    found = [(solve.overlaps(one, units), one) for one in windows]
    return [(each, solve.counts_of(window.series, names)[each.rows]) for each, window in found]


def _shifted(windows: Sequence[Window], names: list[str], units: int) -> Floats:
    """Rates where every mapping is off by its standard error."""
    off = [replace(one, clock=one.clock.shifted(one.clock.uncertainty_s)) for one in windows]
    return solve.rates(solve.normal(_parts(off, names, units)))
