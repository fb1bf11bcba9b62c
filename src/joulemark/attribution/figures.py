"""Counts of every kernel, class, operator and module, with intervals, from the windows of one pass of counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from joulemark.attribution import solve
from joulemark.attribution.clock import Floats
from joulemark.attribution.dealing import Flags, Part, doubt, per_step
from joulemark.attribution.solve import Window
from joulemark.attribution.units import Units
from joulemark.records import Json

_CYCLES = "sm_cycles"
ELAPSED = (_CYCLES,)
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


@dataclass(frozen=True)
class _Given:
    """Counts of some windows given to the places of a step.

    Args:
        system: that was solved for the units' rates.
        rates: shape [units, counters].
        parts: the windows, by places.
        long: whether a place's rate is that of samples that it fills, shape [places].
        amounts: of each place in each step, shape [places, counters, steps].
    """

    system: solve.Normal
    rates: Floats
    parts: list[Part]
    long: Flags
    amounts: Floats


def _given(windows: Sequence[Window], units: Units, counters: list[str]) -> _Given:
    """Rates, from samples that one unit fills where it fills any; then every sample's counts dealt out to places."""
    n, places = len(units.units), np.arange(len(units.of_place))
    by_unit = [solve.overlaps(one, units.of_place, n).by_filled() for one in windows]
    by_place = [solve.overlaps(one, places, len(places)).matrix for one in windows]
    counts = [solve.counts_of(one, counters)[seen.rows] for one, seen in zip(windows, by_unit, strict=True)]
    parts = [Part(each, y, seen.step) for each, y, seen in zip(by_place, counts, by_unit, strict=True)]
    system = solve.normal(list(zip(by_unit, counts, strict=True)))
    rates = solve.rates(system)
    fills = np.sum([one.matrix[one.filled].sum(axis=0) for one in by_unit], axis=0) > 0
    long = fills[units.of_place]
    return _Given(system, rates, parts, long, per_step(parts, rates[units.of_place], long, system.steps))


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
        self._windows, self._units = windows, units
        self._own = _given(windows, units, self.counters)
        off = [replace(one, clock=one.clock.doubted()) for one in windows]
        plain = [replace(one, clock=one.clock.at_once()) for one in windows]
        others = ((off, units), (plain, at_once), (windows, finer))
        self._others = [_given(*other, self.counters).amounts.mean(axis=2) for other in others]
        self._sum()

    def _sum(self) -> None:
        own, steps = self._own, len(self._own.system.steps)
        self.measured = np.sum([one.counts.sum(axis=0) for one in own.parts], axis=0) / steps
        self.attributed = own.amounts.sum(axis=(0, 2)) / steps
        idle = [one.overlap.sum(axis=1) <= 0 for one in own.parts]
        lost = [one.counts[rows].sum(axis=0) for one, rows in zip(own.parts, idle, strict=True)]
        self.outside = np.sum(lost, axis=0) / steps
        self.samples = sum(len(one.counts) for one in own.parts)
        whole = np.where(self.measured > 0, self.measured, 1.0)
        self._sums_differ = np.where(self.measured > 0, (self.attributed + self.outside) / whole - 1, 0.0)

    def amounts(self, rows: Rows) -> tuple[Floats, Floats]:
        """Counts of rows per step (of shares share × s) and half their intervals, shape [rows, counters].

        An interval holds, added in quadrature, what differs between steps, in what was dealt out and in the rates by
        which it was; twice what sharing samples out is off (:func:`.dealing.doubt`), what a doubted mapping
        (:meth:`.ClockMap.doubted`) and kernels that count from end to end do, and what a finer grouping of short
        kernels would change; and the share by which the sum over kernels differs from what was counted. It is NaN
        where a single step was recorded.
        """
        own, members, units = self._own, rows.members, self._units
        steps = len(own.system.steps)
        by_step = np.tensordot(members, own.amounts, axes=1)
        amount = by_step.mean(axis=2)
        between_steps = solve.half_widths((by_step - amount[:, :, None]) / steps)
        of_rates = solve.half_widths(solve.influences(own.system, own.rates, self._mixed_times(members)))
        shared = doubt(own.parts, own.rates[units.of_place], own.long, members) / np.sqrt(steps)
        twice = [shared, *(members @ other - amount for other in self._others)]
        square = between_steps**2 + of_rates**2 + (self._sums_differ * amount) ** 2
        return amount, np.sqrt(square + sum((_TWICE * one) ** 2 for one in twice))

    def clocks(self) -> dict[int, float]:
        """Of each place, cycles of all SMs per s while it ran: of its samples, by the time that it ran in them."""
        if _CYCLES not in self._windows[0].series.values:
            return {}
        spent, cycles = np.zeros(len(self._own.long)), np.zeros(len(self._own.long))
        for window, part, (seen, _) in zip(self._windows, self._own.parts, self._own.system.parts, strict=True):
            series = window.on_timeline()
            spent += part.overlap.sum(axis=0)
            cycles += (series.values[_CYCLES] / series.duration_s)[seen.rows] @ part.overlap
        return {int(place): float(cycles[place] / spent[place]) for place in np.flatnonzero(spent)}

    def _mixed_times(self, members: Floats) -> Floats:
        """Time in s per step of each row's units in samples that none fills, shape [rows, units]."""
        own, units = self._own, self._units
        mixed = [part.overlap[~seen.filled] for part, (seen, _) in zip(own.parts, own.system.parts, strict=True)]
        spent = np.sum([one.sum(axis=0) for one in mixed], axis=0) / len(own.system.steps)
        of_unit = np.eye(len(units.units))[units.of_place]
        return np.asarray((members * spent) @ of_unit)


def cells(passes: Sequence[Pass], rows: Rows, time_s: Floats) -> list[dict[str, Json]]:
    """Per row its counters: an amount per step, or a share of peak over the row's time, each with its interval.

    A row that took no time (a coarse clock writes such kernels) has no shares.

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
                if not per:
                    continue
                cell.setdefault(name, _cell(float(amount[row, column]) / per, float(half[row, column]) / per))
    return out


def _cell(value: float, half: float) -> Mapping[str, Json]:
    return {"value": value, "interval": None if np.isnan(half) else [max(0.0, value - half), value + half]}
