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
_TWICE = 2.0
"""A standard error to an interval of some 95 %."""


@dataclass(frozen=True)
class Rows:
    """What figures are wanted of.

    Args:
        order: label of each row.
        members: which places of a step each row holds, shape [rows, places].
    """

    order: list[str]
    members: Floats

    @classmethod
    def by(cls, labels: Sequence[str]) -> Rows:
        """A row per label: the places that bear it."""
        order = list(dict.fromkeys(labels))
        index = {label: number for number, label in enumerate(order)}
        members = np.zeros((len(order), len(labels)))
        members[[index[label] for label in labels], np.arange(len(labels))] = 1.0
        return cls(order, members)

    def times(self, units: Units) -> Floats:
        """Per row the time per step in which the SMs work on each unit, in s, shape [rows, units]."""
        of_unit = np.eye(len(units.units))[units.of_place]
        return np.asarray((self.members * units.working_s) @ of_unit)


class Pass:
    """Windows that counted the same, solved.

    Args:
        windows: of one pass.
        units: how their launches are grouped.
        finer: another grouping, which pools less.
        at_once: the same grouping, of kernels that count from the end of their launch on.

    Attributes:
        counters: names of what was counted and is some kernel's.
        unit_of: counter → its unit.
        measured, attributed, outside: counts per step (of shares share × s) in all samples of the steps, of all
            kernels, and in samples in which no kernel ran, shape [counters].
        samples: of the steps.
    """

    def __init__(self, windows: Sequence[Window], units: Units, finer: Units, at_once: Units) -> None:
        series = windows[0].series
        self.group, self.unit_of, self.raw = series.group, series.units, series.raw
        self.counters = [name for name in series.values if name not in (*ELAPSED, *OWN_TRAFFIC)]
        self._units, self._finer, self._at_once = units, finer, at_once
        parts = self._parts(windows, units)
        self._system = solve.normal(parts)
        self._rates = solve.rates(self._system)
        off = [replace(one, clock=one.clock.doubted()) for one in windows]
        self._off = solve.rates(solve.normal(self._parts(off, units)))
        plain = [replace(one, clock=one.clock.at_once()) for one in windows]
        self._plain = solve.rates(solve.normal(self._parts(plain, at_once)))
        self._less_pooled = solve.rates(solve.normal(self._parts(windows, finer)))
        self._sum(parts)

    def _parts(self, windows: Sequence[Window], units: Units) -> list[tuple[solve.Overlaps, Floats]]:
        found = [(solve.overlaps(one, units.of_place, len(units.units)), one) for one in windows]
        return [(each, solve.counts_of(window, self.counters)[each.rows]) for each, window in found]

    def _sum(self, parts: Sequence[tuple[solve.Overlaps, Floats]]) -> None:
        zero, steps = np.zeros(len(self.counters)), len(self._system.steps)
        idle = [np.asarray(one.matrix.sum(axis=1)).reshape(-1) <= 0 for one, _ in parts]
        given = [(one.matrix @ self._rates).sum(axis=0) for one, _ in parts]
        lost = [counts[rows].sum(axis=0) for (_, counts), rows in zip(parts, idle, strict=True)]
        self.measured = sum((counts.sum(axis=0) for _, counts in parts), zero) / steps
        self.attributed = sum(given, zero) / steps
        self.outside = sum(lost, zero) / steps
        self.samples = sum(len(one.rows) for one, _ in parts)
        whole = np.where(self.measured > 0, self.measured, 1.0)
        self._sums_differ = np.where(self.measured > 0, (self.attributed + self.outside) / whole - 1, 0.0)

    def amounts(self, rows: Rows) -> tuple[Floats, Floats]:
        """Counts of rows per step (of shares share × s) and half their intervals, shape [rows, counters].

        An interval holds, added in quadrature, what differs between steps, twice what a doubted mapping
        (:meth:`.ClockMap.doubted`) and kernels that count from end to end do, twice what a finer grouping of
        short kernels would change, and the share by which the sum over kernels differs from what was counted. It is
        NaN where a single step was recorded.
        """
        times = rows.times(self._units)
        amount = times @ self._rates
        between_steps = solve.half_widths(solve.influences(self._system, self._rates, times))
        others = (
            times @ self._off,
            rows.times(self._at_once) @ self._plain,
            rows.times(self._finer) @ self._less_pooled,
        )
        square = between_steps**2 + sum((_TWICE * (other - amount)) ** 2 for other in others)
        square = square + (self._sums_differ * amount) ** 2
        return amount, np.sqrt(square)


def cells(passes: Sequence[Pass], rows: Rows, time_s: Floats) -> list[dict[str, Json]]:
    """Per row its counters: an amount per step, or a share of peak over the row's time, each with its interval.

    Args:
        passes: a counter of several is the first one's.
        rows: what is wanted.
        time_s: of each row per step.
    """
    out: list[dict[str, Json]] = [{} for _ in rows.order]
    for one in passes:
        amount, half = one.amounts(rows)
        for column, name in enumerate(one.counters):
            for row, cell in enumerate(out):
                per = float(time_s[row]) if one.unit_of[name] == "1" else 1.0
                cell.setdefault(name, _cell(float(amount[row, column]) / per, float(half[row, column]) / per))
    return out


def _cell(value: float, half: float) -> Mapping[str, Json]:
    return {"value": value, "interval": None if np.isnan(half) else [max(0.0, value - half), value + half]}
