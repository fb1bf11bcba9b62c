"""Windows to coefficients: a non-negative least-squares fit with an interval on every coefficient (pure).

Power of a window is static power and what stands above it: the sum over its rates of coefficient times rate, and the
loss of the core's supply, which grows as the square of the core's part of that sum (all but HBM); with fewer SMs
active, the part of it that lies with each SM is larger. The losses are columns like the others, whose rate is the
square of what the measured power leaves for the core: both are found by turns.

Zero operands have activity 0, so that only the control of a unit shows; random ones have activity 1. Levels are nested
in the counts, so a coefficient is an increment. Intervals are of a wild bootstrap over windows and repeats (Wu,
*Jackknife, bootstrap and other resampling methods in regression analysis*, Ann. Statist. 1986): each window's power is
drawn anew with the scatter that the residuals of its benchmark show, enlarged by their leverage (MacKinnon and White's
HC3) and never smaller than that of all windows, and what a repeat has in common is drawn as one. Static power drifts
and steps within minutes at one clock, so stretches of up to :data:`STRETCH` windows in order of measurement each have
an offset from it; that order is random, so an offset takes nothing from a coefficient. The sensors' gain error is of
the board, is not seen by any repetition and is not inside the intervals.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import nnls

from joulemark.energy.microbench.suite import SUITE
from joulemark.energy.units import (
    HBM_ACTIVE,
    L2_REQUEST,
    LOSSES,
    SM_ACTIVE,
    SM_SUPPLY,
    STATIC,
    SUPPLY,
    UNITS,
    Part,
    columns,
    fed_by_core,
    of_sms,
)
from joulemark.energy.windows import BURST
from joulemark.errors import MeasurementError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from joulemark.energy.windows import CalibrationWindow

    Array = NDArray[np.float64]

ACTIVITY = {"zero": 0.0, "random": 1.0}
"""Activity of the operands that enter the fit; that of others is estimated from it."""

DRAWS = 400
STRETCH = 30
"""Windows that share an offset of static power, at most: less than a minute."""
_GAP_S = 30.0
"""Time without a window after which a new stretch begins."""
_OFFSET_W = 5.0
"""Size of the offsets that is expected; what the windows do not ask for stays at 0."""
_NOISE_W = 0.4
_NOISE_RELATIVE = 0.004
_LEVERAGE_MOST = 0.95
_INSEPARABLE = 0.95
_HBM_BYTES = ("hbm_read", "hbm_write")
_LOW_RATE = 0.35
"""Of the highest rate of the memory: below it, a window tells what the memory costs in use from what its bytes cost."""
_FEWEST_PAUSED = 5
"""Windows of SMs that pause between iterations: without them, how much an SM draws and how many do are one variable."""
_TURNS, _SETTLED = 40, 1e-5
"""Turns of coefficients and the supply's losses at most, and the relative change of the losses that ends them."""


@dataclass(frozen=True)
class Design:
    """The equations of a fit.

    Args:
        columns: (unit, part) of each coefficient, shape [p].
        rates: count per second, times activity for a datapath, shape [n, p]; of the supply's losses, once they are
            fitted, the square of the core's power without them, in W².
        power: in W, shape [n].
        sigma: standard deviation that a window's power is given, in W, shape [n].
        repeat: number of the repeat, shape [n].
        windows: which they are.
        left_out: key of a window → why it is not in the fit.
        merged: units whose control and datapath the windows cannot tell apart, as one kind of operands is missing;
            their ``control`` is both.
        stretch: key of any window → number of its stretch.
    """

    columns: tuple[tuple[str, Part], ...]
    rates: Array
    power: Array
    sigma: Array
    repeat: NDArray[np.int64]
    windows: tuple[CalibrationWindow, ...]
    left_out: dict[str, str]
    merged: frozenset[str] = frozenset()
    stretch: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def core(self) -> NDArray[np.bool_]:
        """Columns whose power comes through the core's supply, shape [p]."""
        return np.array([fed_by_core(unit) for unit, _ in self.columns])

    @cached_property
    def memory(self) -> NDArray[np.bool_]:
        """Columns of the memory, shape [p]."""
        return np.array([not fed_by_core(unit) and unit not in (STATIC, *LOSSES) for unit, _ in self.columns])

    def concentration(self, rates: Array) -> Array:
        """All SMs over those that are active on the mean, less 1; 0 where none is.

        Args:
            rates: as in the design, shape [..., p].
        """
        index = [i for i, (unit, _) in enumerate(self.columns) if unit == SM_ACTIVE]
        if not index:
            return np.zeros(rates.shape[:-1])
        active, most = rates[..., index[0]], float(self.rates[:, index[0]].max())
        found: Array = np.divide(most, active, out=np.ones_like(active), where=active > 0)
        return np.maximum(found - 1, 0.0)

    def crowding(self, rates: Array, values: Array) -> Array:
        """What the loss in the SMs' supply is multiplied by, where it is taken as a loss of all of the core's power.

        Args:
            rates: as in the design, shape [..., p].
            values: coefficients, shape [p].
        """
        sms = np.array([of_sms(unit) for unit, _ in self.columns])
        of_core, in_sms = (rates[..., mask] @ values[mask] for mask in (self.core, sms))
        share: Array = np.divide(in_sms, of_core, out=np.zeros_like(of_core), where=of_core > 0)
        return self.concentration(rates) * share**2

    @property
    def stretches(self) -> NDArray[np.int64]:
        """Number of each used window's stretch, shape [n]."""
        return np.array([self.stretch[window.point.key] for window in self.windows])


@dataclass(frozen=True)
class Fit:
    """Coefficients and what their fit tells of them.

    Args:
        design: what was solved.
        values: coefficients in J per count (W for time), shape [p].
        draws: of the bootstrap, shape [d, p].
        unbounded: least-squares coefficients without the bound at 0, shape [p]; NaN where they are not determined.
        errors: standard errors of ``unbounded``, shape [p].
        condition_number: of the weighted design with columns of unit length; infinite where it is singular.
        correlation: of the bootstrap draws, shape [p, p]; NaN for a coefficient that never moves.
        offsets: of static power in each stretch, in W.
    """

    design: Design
    values: Array
    draws: Array
    unbounded: Array
    errors: Array
    condition_number: float
    correlation: Array
    offsets: Array

    @property
    def fitted_w(self) -> Array:
        """Power of each window by the coefficients and its stretch's offset, in W, shape [n]."""
        return self.power_w(self.design.rates, self.offsets[self.design.stretches])

    def power_w(self, rates: Array, offset_w: Array | float = 0.0) -> Array:
        """Power of windows by the coefficients.

        Args:
            rates: as in the design, shape [..., p]; what they hold of the supply's loss does not count.
            offset_w: of static power, in W.
        """
        core, memory = (rates[..., mask] @ self.values[mask] for mask in (self.design.core, self.design.memory))
        drawn: Array = self._static_w + offset_w + memory + with_loss(core, self.loss_at(rates))
        return drawn

    def core_w(self, window: CalibrationWindow) -> float:
        """Of a window's power, what the core got above static power: without the memory and the supply's loss, in W."""
        row = np.array(rates_of(window, self.design.columns))
        memory_w = row[self.design.memory] @ self.values[self.design.memory]
        drawn_w = (window.power_w or 0.0) - self._static_w - self.offset_w(window) - memory_w
        return float(without_loss(np.asarray(drawn_w), self.loss_at(row)))

    @property
    def determined(self) -> bool:
        """Whether the windows fix every coefficient, or some only together with others."""
        return bool(np.isfinite(self.unbounded).all())

    @property
    def supply(self) -> float:
        """Loss of the supply with all SMs active, per W."""
        return self._value(SUPPLY)

    def loss_at(self, rates: Array) -> Array:
        """Loss of the supply per W of the core's power, shape [...]; rates are as in the design, shape [..., p]."""
        return self.supply + self._value(SM_SUPPLY) * self.design.crowding(rates, self.values)

    @property
    def _static_w(self) -> float:
        return self._value(STATIC)

    def _value(self, unit: str) -> float:
        return sum(float(v) for (name, _), v in zip(self.design.columns, self.values, strict=True) if name == unit)

    def offset_w(self, window: CalibrationWindow) -> float:
        """Offset of static power when a window was measured, in W."""
        return float(self.offsets[self.design.stretch[window.point.key]])

    @property
    def residual_w(self) -> Array:
        """Measured minus fitted, in W, shape [n]."""
        return self.design.power - self.fitted_w

    def interval(self, column: int, confidence: float = 0.95) -> tuple[float, float]:
        """Percentile interval of a coefficient."""
        lo, hi = np.quantile(self.draws[:, column], ((1 - confidence) / 2, (1 + confidence) / 2))
        return float(lo), float(hi)

    def inseparable(self) -> list[tuple[int, int, float]]:
        """Pairs of coefficients of which the data fix little more than a combination, with their correlation."""
        p = len(self.values)
        rho = self.correlation
        return [
            (i, j, float(rho[i, j]))
            for i in range(p)
            for j in range(i + 1, p)
            if np.isfinite(rho[i, j]) and abs(rho[i, j]) > _INSEPARABLE
        ]


def with_loss(core_w: Array, supply: float | Array) -> Array:
    """What the board draws for a power of the core, with the supply's loss, in W."""
    drawn: Array = core_w * (1 + supply * core_w)
    return drawn


def without_loss(drawn_w: Array, supply: float | Array) -> Array:
    """The inverse of :func:`with_loss`; below 0 there is no loss."""
    got: Array = 2 * drawn_w / (1 + np.sqrt(1 + 4 * supply * np.maximum(drawn_w, 0.0)))
    return got


def reason_unknown(window: CalibrationWindow) -> str | None:
    """Why this version makes nothing of a window; None when it does."""
    if window.point.benchmark not in SUITE:
        return "the suite has no such benchmark"
    if foreign := window.counts.keys() - UNITS.keys():
        return f"this version knows no unit {', '.join(sorted(foreign))}"
    return None


def reason_left_out(window: CalibrationWindow) -> str | None:
    """Why a window does not enter the fit; None when it does."""
    if (unknown := reason_unknown(window)) is not None:
        return unknown
    if SUITE[window.point.benchmark].role == "check" or window.point.duty == BURST:
        return "measured as a check of the fit"
    if window.point.operands not in ACTIVITY:
        return f"activity of {window.point.operands} operands is an outcome of the fit"
    if window.power_w is None:
        return window.reading.reason or "no power"
    if window.power_w <= 0:
        return f"its power reads {window.power_w:g} W, which no board draws"
    if window.capped:
        return "capped: the power limit or heat held the clocks down"
    if window.clock_held is False:
        return "the SM clock was below its highest"
    return None


def design_of(windows: Sequence[CalibrationWindow]) -> Design:
    """The equations that windows give.

    Raises:
        MeasurementError: none of them can be used.
    """
    left_out = {window.point.key: why for window in windows if (why := reason_left_out(window)) is not None}
    used = tuple(window for window in windows if window.point.key not in left_out)
    if not used:
        reasons = Counter(left_out.values()).most_common(1)
        raise MeasurementError(
            f"no window of {len(windows)} can be fitted ({reasons[0][0] if reasons else 'there is none'})",
            "measure with joulemark calibrate, or go on with --resume",
        )
    names = {unit for window in used for unit, count in window.counts.items() if count} | {STATIC, *LOSSES}
    chosen = columns(dict.fromkeys(names - _not_told_apart(used)))
    rates = np.array([rates_of(window, chosen) for window in used])
    merged = _merged(chosen, rates)
    single = {(unit, "datapath") for unit in merged}
    moving = [i for i, one in enumerate(chosen) if one[0] in LOSSES or (rates[:, i].any() and one not in single)]
    power = np.array([window.power_w for window in used], dtype=float)
    sigma = np.hypot(_NOISE_W, _NOISE_RELATIVE * power)
    repeat = np.array([0 if window.point.benchmark == "idle" else window.point.repeat for window in used])
    kept = tuple(chosen[i] for i in moving)
    stretch = _stretches(windows)
    return Design(kept, rates[:, moving], power, sigma, repeat, used, left_out, merged, stretch)


def _not_told_apart(used: Sequence[CalibrationWindow]) -> set[str]:
    """Units that these windows cannot tell from another.

    Lines always asked for whole, memory always near its peak, SMs that always work without a pause.
    """
    found = set()
    if not any(SUITE[window.point.benchmark].unit == L2_REQUEST for window in used):
        found.add(L2_REQUEST)
    moved = [rate for window in used if (rate := sum(window.rates.get(unit, 0.0) for unit in _HBM_BYTES))]
    if min(moved, default=1.0) > _LOW_RATE * max(moved, default=1.0):
        found.add(HBM_ACTIVE)
    if sum(window.sleep_ns > 0 and window.point.operands == "random" for window in used) < _FEWEST_PAUSED:
        found.add(SM_SUPPLY)
    return found


def _stretches(windows: Sequence[CalibrationWindow]) -> dict[str, int]:
    """Key of a window → number of its stretch: so many windows in a row, without a long pause between two of them."""
    numbers: dict[str, int] = {}
    number, held, last = 0, 0, None
    for window in windows:
        now = window.begun
        paused = now is not None and last is not None and (now - last).total_seconds() > _GAP_S + window.duration_s
        if held == STRETCH or (paused and held):
            number, held = number + 1, 0
        numbers[window.point.key] = number
        held, last = held + 1, now
    return numbers


def _merged(chosen: Sequence[tuple[str, Part]], rates: Array) -> frozenset[str]:
    index = {one: i for i, one in enumerate(chosen)}
    pairs = [(unit, index[unit, "control"], i) for (unit, part), i in index.items() if part == "datapath"]
    return frozenset(unit for unit, control, datapath in pairs if (rates[:, control] == rates[:, datapath]).all())


def rates_of(
    window: CalibrationWindow, chosen: Sequence[tuple[str, Part]], activity: float | None = None
) -> list[float]:
    """A window's row: count per second of each coefficient.

    Args:
        window: with its counts.
        chosen: the coefficients.
        activity: of its operands; by default that of its kind.
    """
    level = ACTIVITY.get(window.point.operands, 1.0) if activity is None else activity
    rates = {**window.rates, STATIC: 1.0}
    return [rates.get(unit, 0.0) * (level if part == "datapath" else 1.0) for unit, part in chosen]


def fit(design: Design, draws: int = DRAWS, seed: int = 0) -> Fit:
    """Coefficients of a design, none below 0, each with its bootstrap.

    Args:
        design: at least as many windows as coefficients.
        draws: of the bootstrap.
        seed: of its signs.

    Raises:
        MeasurementError: fewer windows than coefficients.
    """
    n, p = design.rates.shape
    if n < p:
        raise MeasurementError(
            f"{n} windows cannot fix {p} coefficients", "go on with joulemark calibrate --resume until the plan is done"
        )
    target = design.power / design.sigma
    design, solver = _with_supply(design, target)
    values, offsets = solver.solve(target)
    fitted = (design.rates @ values + offsets[design.stretches]) / design.sigma
    scatter = _scatter(design, target - fitted, solver.leverage)
    sampled = np.array([solver.solve(fitted + noise)[0] for noise in _noise(design.repeat, *scatter, draws, seed)])
    unbounded, errors = solver.unbounded(target)
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation = np.atleast_2d(np.corrcoef(sampled, rowvar=False))
    return Fit(design, values, sampled, unbounded, errors, solver.condition_number, correlation, offsets)


def _with_supply(design: Design, target: Array) -> tuple[Design, _Solver]:
    """The design with the rates of the supply's losses, and what solves it."""
    index = {unit: i for i, (unit, _) in enumerate(design.columns)}
    static, columns_of = index[STATIC], [index[unit] for unit in LOSSES if unit in index]
    losses, crowding = np.zeros(len(columns_of)), design.concentration(design.rates)
    other_w = np.full(len(design.power), design.power.min())
    for _ in range(_TURNS):
        factors = np.stack([np.ones_like(crowding), crowding])[: len(columns_of)]
        core_w = np.maximum(without_loss(design.power - other_w, losses @ factors), 0.0)
        rates = design.rates.copy()
        rates[:, columns_of] = (core_w**2 * factors).T
        design = replace(design, rates=rates)
        solver = _Solver(design)
        values, offsets = solver.solve(target)
        before, losses = losses, values[columns_of]
        memory_w = rates[:, design.memory] @ values[design.memory]
        other_w = values[static] + offsets[design.stretches] + memory_w
        crowding = design.crowding(rates, values)
        if np.abs(losses - before).max() <= _SETTLED * losses.max():
            break
    return design, solver


class _Solver:
    """Weighted least squares of a design with its stretches' offsets, factored once (QR) for many right-hand sides.

    Args:
        design: to solve.
    """

    def __init__(self, design: Design) -> None:
        n, p = design.rates.shape
        m = max(design.stretch.values()) + 1
        weighted = design.rates / design.sigma[:, None]
        lengths = np.linalg.norm(weighted, axis=0)
        self._scale = np.where(lengths > 0, lengths, 1.0)  # idle windows alone know no loss
        offsets = np.zeros((n, m))
        offsets[np.arange(n), design.stretches] = 1 / design.sigma
        system = np.block([[weighted / self._scale, offsets], [np.zeros((m, p)), np.eye(m) / _OFFSET_W]])
        self._q, self._r = np.linalg.qr(system)
        self._n, self._p, self._m = n, p, m
        self._full_rank = bool(np.linalg.matrix_rank(self._r[:p, :p]) == p)
        self.condition_number = float(np.linalg.cond(weighted / self._scale))
        self.leverage: Array = np.minimum((self._q[:n] ** 2).sum(axis=1), _LEVERAGE_MOST)

    def solve(self, target: Array) -> tuple[Array, Array]:
        """Coefficients, none below 0, and offsets of either sign (each as the difference of two from 0 on).

        Where least squares alone leaves none below 0, it is the answer; most draws of a bootstrap are.
        """
        p, m = self._p, self._m
        projected = self._q[: self._n].T @ target
        if self._full_rank:
            free = solve_triangular(self._r, projected)
            if (free[:p] >= 0).all():
                return free[:p] / self._scale, free[p:]
        both_signs = np.hstack([self._r, -self._r[:, p:]])
        solution = nnls(both_signs, projected)[0]
        return solution[:p] / self._scale, solution[p : p + m] - solution[p + m :]

    def unbounded(self, target: Array) -> tuple[Array, Array]:
        """Coefficients without the bound and their standard errors; NaN where the design has no full rank."""
        p = self._p
        if not self._full_rank:
            nothing = np.full(p, np.nan)
            return nothing, nothing
        inverse = np.linalg.inv(self._r)
        projected = self._q[: self._n].T @ target
        residual = target - self._q[: self._n] @ projected
        variance = float(residual @ residual) / max(self._n - p, 1)
        errors = np.sqrt(variance * (inverse**2).sum(axis=1))
        return (inverse @ projected)[:p] / self._scale, errors[:p] / self._scale


def _scatter(design: Design, residual: Array, leverage: Array) -> tuple[Array, Array]:
    """Standard deviations to draw from: of each window, shape [n], and of what each repeat has in common, shape [r]."""
    n, p = design.rates.shape
    repeats, index = np.unique(design.repeat, return_inverse=True)
    common = np.array([residual[index == i].mean() for i in range(len(repeats))])
    own = residual - common[index]
    pooled = float(own @ own) / max(n - p, 1)
    squares: dict[str, list[float]] = defaultdict(list)
    for window, one, h in zip(design.windows, own, leverage, strict=True):
        squares[window.point.benchmark].append((one / (1 - h)) ** 2)
    by_window = [max(pooled, float(np.mean(squares[window.point.benchmark]))) for window in design.windows]
    return np.sqrt(by_window), np.abs(common)


def _noise(repeat: NDArray[np.int64], own: Array, common: Array, draws: int, seed: int) -> Array:
    """What each draw adds to the fitted powers, shape [draws, n]."""
    rng = np.random.default_rng(seed)
    index = np.unique(repeat, return_inverse=True)[1]
    noise: Array = rng.standard_normal((draws, len(own))) * own
    noise += (rng.standard_normal((draws, len(common))) * common)[:, index]
    return noise


def bound_reason(fitted: Fit, column: int) -> str | None:
    """Why a coefficient lies at its bound of 0; None when it does not."""
    if fitted.values[column] > 0:
        return None
    free, error = fitted.unbounded[column], fitted.errors[column]
    if not np.isfinite(free):
        return "at 0: the windows do not fix it (their design has no full rank)"
    unit, part = fitted.design.columns[column]
    unit_text = UNITS[unit].energy_unit
    seen = f"without the bound it would be {free:.3g} ± {error:.2g} {unit_text}"
    if free < -2 * error:
        return f"at 0: {seen}: what lies above it or beside it in the same windows is charged too much"
    if free > 2 * error:
        return f"at 0: {seen}, with others below 0: what is charged beside it in the same windows holds its part"
    return f"at 0: {seen}, no more than its noise: the {part} of {unit} costs nothing that was seen"
