"""Power and energy from counts, with an interval; under a power limit, from the clock that the limit allows (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from joulemark.energy import bits
from joulemark.energy.counters import Counts, Range
from joulemark.energy.fit import with_loss
from joulemark.energy.microbench.suite import SUITE
from joulemark.energy.units import (
    LOSSES,
    MOVEMENT_GROUPS,
    SM_ACTIVE,
    SM_SUPPLY,
    STATIC,
    SUPPLY,
    UNITS,
    Part,
    fed_by_core,
    of_sms,
)
from joulemark.errors import MeasurementError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from joulemark.energy.calibration import Calibration

    Array = NDArray[np.float64]

_ASSUMED_ACTIVITY = Range(0.8, 0.5, 1.0)
_ACTIVITY_SPREAD = 0.15
_BITS: Mapping[str, tuple[int, int]] = {
    "bf16": (8, 8), "fp16": (11, 5), "fp32": (24, 8), "tf32": (24, 8), "fp64": (53, 11), "int8": (8, 0),
}  # fmt: skip
"""Bits of sign and mantissa, and of the exponent."""
_LOWEST_CLOCK = 0.2
_LEAST_BUSY = 0.02
_STRAIGHT = 1e-9
_STATIC_UNITS = frozenset({STATIC, SM_ACTIVE, *LOSSES})


@dataclass(frozen=True, eq=False)
class Sampled:
    """A prediction as every draw of coefficients, shares and activities has it.

    Args:
        energy: J per draw and coefficient, shape [d, p]; columns as in ``parts`` of the prediction.
        counts: unit → count, shape [d].
    """

    energy: Array
    counts: Mapping[str, Array]


@dataclass(frozen=True)
class Prediction:
    """What a stretch of work should cost.

    Args:
        energy_j, power_w: of all.
        interval_j: 95 %: coefficients, drift of static power, shares, activity; the sensors' gain is not inside.
        dynamic_j: without static power and active SMs.
        dynamic_interval_j: likewise.
        parts: (unit, part) → J, those of the core each with its part of the supply's loss.
        time_s: of the work.
        clock: SM clock over its highest that was assumed.
        activities: unit → activity of its operands that was taken.
        notes: what was assumed.
        sampled: the draws that the intervals are of.
    """

    energy_j: float
    power_w: float
    interval_j: tuple[float, float]
    dynamic_j: float
    dynamic_interval_j: tuple[float, float]
    parts: Mapping[tuple[str, Part], float]
    time_s: float
    clock: float
    activities: Mapping[str, float]
    notes: tuple[str, ...]
    sampled: Sampled = field(repr=False, compare=False)


def activities_of(
    calibration: Calibration, given: float | None = None, dtype: str | None = None, memory_bits: float | None = None
) -> dict[str, Range]:
    """Activity of each unit's operands: given, or that of normal values where it was measured, or assumed 0.8.

    Args:
        calibration: with what was measured.
        given: one activity for all units.
        dtype: number format of what lies in memory; bf16 unless it is said.
        memory_bits: toggling of what lies in memory (:func:`joulemark.energy.bits.toggling`), where it is known.
    """
    if given is not None:
        return dict.fromkeys(calibration.units, Range.exact(given))
    measured = {kind: _measured(calibration, kind) for kind in ("normal", "normal_fp32")}
    return {unit: _activity(unit, dtype, measured, memory_bits) for unit in calibration.units}


def _measured(calibration: Calibration, operands: str) -> dict[str, float]:
    """Unit → activity of operands, as measured."""
    return {
        SUITE[row["benchmark"]].unit: float(row["activity"])
        for row in calibration.activities
        if row["operands"] == operands and row["benchmark"] in SUITE
    }


def _activity(
    unit: str, dtype: str | None, measured: Mapping[str, Mapping[str, float]], memory_bits: float | None
) -> Range:
    """Measured, else derived; a level of memory without a measurement has that of the others: the data are the same."""
    if UNITS[unit].group not in MOVEMENT_GROUPS:
        one = measured["normal"].get(unit)
        return _ASSUMED_ACTIVITY if one is None else _around(one)
    if memory_bits is not None:
        return _around(bits.activity(memory_bits, {kind: by[unit] for kind, by in measured.items() if unit in by}))
    known = measured["normal_fp32" if dtype == "fp32" else "normal"] or measured["normal"]
    levels = [value for name, value in known.items() if UNITS[name].group in MOVEMENT_GROUPS]
    if not levels:
        return _ASSUMED_ACTIVITY
    at = known.get(unit, float(np.median(levels)))
    return _around(at if known is measured["normal_fp32"] else _in_memory(at, dtype))


def _around(activity: float) -> Range:
    at = min(max(activity, 0.0), 1.2)
    return Range(at, max(at - _ACTIVITY_SPREAD, 0.0), at + _ACTIVITY_SPREAD)


def _in_memory(bf16: float, dtype: str | None) -> float:
    """Activity of normal values of a format in memory, from that of bf16, which was measured.

    Sign and mantissa toggle like random bits; what bf16's eight bits of exponent add is taken over by bit.
    """
    sign_and_mantissa, exponent = _BITS.get(dtype or "bf16", _BITS["bf16"])
    kept, moving = _BITS["bf16"]
    per_bit = min(max((bf16 * (kept + moving) - kept) / moving, 0.0), 1.0)
    return (sign_and_mantissa + per_bit * exponent) / (sign_and_mantissa + exponent)


class Model:
    """A calibration as a predictor.

    Args:
        calibration: of the GPU.
        activity: of all operands; by default as :func:`activities_of` says.
        dtype: number format of what lies in memory.
        memory_bits: toggling of what lies in memory, where it is known.
        static_offset_w: static power beyond the calibration's, as an idle board showed it, in W.
        scale: unit → factor on its energy, for what-if questions.
        seed: of the draws for intervals.
    """

    def __init__(
        self,
        calibration: Calibration,
        activity: float | None = None,
        scale: Mapping[str, float] | None = None,
        seed: int = 0,
        dtype: str | None = None,
        static_offset_w: float = 0.0,
        memory_bits: float | None = None,
    ) -> None:
        self.calibration = calibration
        self._activity = activities_of(calibration, activity, dtype, memory_bits)
        factors = np.array([(scale or {}).get(unit, 1.0) for unit, _ in calibration.columns])
        self._values = calibration.values * factors
        self._draws = calibration.draw_matrix * factors
        self._core = np.array([UNITS[unit].scales_with_core_voltage for unit, _ in calibration.columns])
        self._static = np.array([unit in _STATIC_UNITS for unit, _ in calibration.columns])
        self._fed_by_core = np.array([fed_by_core(unit) for unit, _ in calibration.columns])
        self._drifting = np.array([unit == STATIC for unit, _ in calibration.columns])
        self._of_sms = np.array([of_sms(unit) for unit, _ in calibration.columns])
        self._losses = tuple(self._column(unit) for unit in (SUPPLY, SM_SUPPLY))
        self._values = self._values + np.where(self._drifting, static_offset_w, 0.0)
        self._draws = self._draws + np.where(self._drifting, static_offset_w, 0.0)
        self._drift_w = float(np.std(calibration.goodness.get("static_offsets_w") or [0.0]))
        bursts = calibration.bursts
        low, high = bursts["interval"] or (0.0, 0.0)
        self._follows, self._follows_error = min(max(bursts["share"] or 0.0, 0.0), 1.0), (high - low) / 4
        self._seed = seed

    def predict(self, counts: Counts, time_s: float, clock: float = 1.0) -> Prediction:
        """Energy and power of counts in a time.

        Args:
            counts: of the whole stretch.
            time_s: its length.
            clock: SM clock over its highest; below 1 the frequency law scales the core's dynamic energy.

        Raises:
            MeasurementError: the clock is below its highest and the calibration has no law, or a figure overflows.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            found = self._predicted(counts, time_s, clock)
        if not np.isfinite(found.energy_j) or not np.isfinite(found.sampled.energy).all():
            raise MeasurementError("counts times energies are beyond all numbers", "look at the counters of this row")
        return found

    def _predicted(self, counts: Counts, time_s: float, clock: float) -> Prediction:
        row = self._row(counts, time_s)
        scale = self._scale(voltage(clock, *self._law(clock)))
        loss, in_sms = (value for value, _ in self._losses)
        losses = (loss * _more_in_bursts(self._follows, counts.busy.value), in_sms * _crowding(counts.active.value))
        parts = self._drawn(row * self._values * scale, time_s, *losses)
        sampled = self._sampled(counts, time_s, clock)
        dynamic = sampled.energy[:, ~self._static].sum(axis=1)
        energy = float(parts.sum())
        return Prediction(
            energy,
            energy / time_s,
            interval_of(sampled.energy.sum(axis=1)),
            float(parts[~self._static].sum()),
            interval_of(dynamic),
            dict(zip(self.calibration.columns, map(float, parts), strict=True)),
            time_s,
            clock,
            {unit: one.value for unit, one in self._activity.items() if UNITS[unit].has_datapath},
            counts.notes,
            sampled,
        )

    def _law(self, clock: float) -> tuple[float, float]:
        """Slope and curvature of the voltage over the clock.

        Raises:
            MeasurementError: the calibration has none, and the clock is below its highest.
        """
        if clock >= 1.0:
            return 0.0, 0.0
        law = self.calibration.frequency_law
        if law.get("beta") is None:
            raise MeasurementError(
                f"no law of energy over clock in this calibration: {law.get('reason')}",
                "calibrate without --quick on a GPU whose power limit some microbenchmark meets",
            )
        return float(law["beta"]), float(law.get("curvature") or 0.0)

    def _row(self, counts: Counts, time_s: float) -> Array:
        row = []
        for unit, part in self.calibration.columns:
            count = time_s if unit == STATIC else counts.values.get(unit, Range.exact(0.0)).value
            row.append(count * (self._activity[unit].value if part == "datapath" else 1.0))
        return np.array(row)

    def _column(self, unit: str) -> tuple[float, Array]:
        """Value and draws of a coefficient of one part; 0 where the calibration has none."""
        mask = np.array([name == unit for name, _ in self.calibration.columns])
        return float(self._values[mask].sum()), self._draws[:, mask].sum(axis=1)

    def _drawn(self, parts: Array, time_s: float, supply: float | Array, in_sms: float | Array) -> Array:
        """Parts as the board draws them, in J, shape [..., p]: those of the core share its supply's loss.

        Args:
            parts: without it.
            time_s: of the work.
            supply, in_sms: loss per W of the core's and of the SMs' power.
        """
        core, sms = (np.where(mask, parts, 0.0).sum(axis=-1) / time_s for mask in (self._fed_by_core, self._of_sms))
        drawn_w = with_loss(core, supply) + in_sms * sms**2
        grown = np.divide(drawn_w, core, out=np.ones_like(core), where=core > 0)
        drawn: Array = parts * np.where(self._fed_by_core, grown[..., None], 1.0)
        return drawn

    def _scale(self, volts: float | Array) -> Array:
        """Factor on each coefficient at a voltage, over that of the highest clock."""
        scaled: Array = np.where(self._core & ~self._static, np.asarray(volts)[..., None] ** 2, 1.0)
        return scaled

    def _sampled(self, counts: Counts, time_s: float, clock: float) -> Sampled:
        """Coefficients, shares and activities drawn together."""
        rng = np.random.default_rng(self._seed)
        draws = len(self._draws)
        share = {unit: _draw(one, rng, draws) for unit, one in counts.values.items()}
        activity = {unit: _draw(one, rng, draws) for unit, one in sorted(self._activity.items())}
        columns = []
        for unit, part in self.calibration.columns:
            count = np.full(draws, time_s) if unit == STATIC else share.get(unit, np.zeros(draws))
            columns.append(count * activity[unit] if part == "datapath" else count)
        energy: Array = np.column_stack(columns) * self._draws
        energy[:, self._drifting] += (time_s * rng.normal(0.0, self._drift_w, draws))[:, None]
        energy = energy * self._scale(self._voltage_draws(clock, rng, draws))
        follows = np.clip(rng.normal(self._follows, self._follows_error, draws), 0.0, 1.0)
        loss, in_sms = (drawn for _, drawn in self._losses)
        losses = (
            loss * _more_in_bursts(follows, _draw(counts.busy, rng, draws)),
            in_sms * _crowding(_draw(counts.active, rng, draws)),
        )
        return Sampled(self._drawn(energy, time_s, *losses), share)

    def _voltage_draws(self, clock: float, rng: np.random.Generator, draws: int) -> Array:
        if clock >= 1.0:
            return np.ones(draws)
        law = self.calibration.frequency_law
        lo, hi = law["interval"]
        covariance = law.get("covariance") or [[((hi - lo) / 4) ** 2, 0.0], [0.0, 0.0]]
        beta, curvature = rng.multivariate_normal(self._law(clock), covariance, draws, check_valid="ignore").T
        volts: Array = voltage(clock, beta, np.maximum(curvature, 0.0))
        return volts

    def under_limit(
        self, counts: Counts, time_s: float, limit_w: float, clock: float = 1.0, core_share: float = 1.0
    ) -> Prediction:
        """What the same counts cost under a power limit, at the clock that it allows.

        The core's share of the time grows as the clock falls, the rest (bound by memory) keeps its length.

        Args:
            counts: of the whole stretch.
            time_s: its length at ``clock``.
            limit_w: power limit.
            clock: SM clock over its highest at which ``time_s`` holds.
            core_share: of the time, that follows the SM clock; 1 for work bound by arithmetic.

        Raises:
            MeasurementError: the calibration has no frequency law, or no clock is slow enough.
        """

        def length(x: float) -> float:
            return time_s * (core_share * clock / x + 1 - core_share)

        def power(x: float) -> float:
            parts = self._row(counts, length(x)) * self._values * self._scale(voltage(x, *self._law(x)))
            loss, in_sms = (value for value, _ in self._losses)
            return float(self._drawn(parts, length(x), loss, in_sms * _crowding(counts.active.value)).sum() / length(x))

        if power(1.0) <= limit_w:
            return self.predict(counts, length(1.0), 1.0)
        low, high = _LOWEST_CLOCK, 1.0
        if power(low) > limit_w:
            raise MeasurementError(
                f"no clock holds this work under {limit_w:.0f} W: at {low:.0%} of it {power(low):.0f} W are left"
            )
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if power(middle) <= limit_w else (low, middle)
        return self.predict(counts, length(low), low)


def voltage(clock: float, slope: float | Array, curvature: float | Array) -> Any:
    """Voltage of the core over that at the highest clock: ``1 - slope · d + curvature · d²``, d the drop of the clock.

    Where it would rise again it stays: no chip runs slower at a higher voltage.
    """
    lowest = slope / np.maximum(2 * np.asarray(curvature), _STRAIGHT)
    drop = np.maximum(np.minimum(1 - clock, lowest), 0.0)
    return np.maximum(1 - slope * drop + curvature * drop**2, 0.0)


def _more_in_bursts(follows: float | Array, busy: float | Array) -> Any:
    """Factor on the supply's loss of a load that is busy for a share of the time; see ``goodness.bursts``."""
    return 1 + follows * (1 / np.maximum(busy, _LEAST_BUSY) - 1)


def _crowding(active: float | Array) -> Any:
    """Factor on the loss in the SMs' supply: 0 where all are active all of the time."""
    return 1 / np.maximum(active, _LEAST_BUSY) - 1


def _draw(one: Range, rng: np.random.Generator, draws: int) -> Array:
    """Uniform over the range, so that its ends are as likely as its middle."""
    if one.low == one.high:
        return np.full(draws, one.value)
    return rng.uniform(one.low, one.high, draws)


def interval_of(values: Array) -> tuple[float, float]:
    """95 % of draws."""
    lo, hi = np.quantile(values, (0.025, 0.975))
    return float(lo), float(hi)
