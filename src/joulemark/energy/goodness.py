"""How good a fit is: R² of dynamic energy, residuals, checks that took no part, and the law of capped clocks (pure)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from joulemark.energy.fit import ACTIVITY, Fit, rates_of
from joulemark.energy.microbench.suite import SUITE
from joulemark.energy.units import HBM_ACTIVE, SM_ACTIVE, STATIC, UNITS
from joulemark.energy.windows import BURST

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from joulemark.energy.windows import CalibrationWindow, Counted
    from joulemark.records import Json

    Array = NDArray[np.float64]

_LINE_POINTS = 3
_FEWEST_BURSTS = 2
_BURST_NOISE_W = 2.0
"""Of the difference between two windows, from which a share is worked out: static power drifts."""
_SAME_RATE = 0.02
_CURVE_POINTS = 6
"""Capped windows from which a curve of the voltage is drawn rather than a line."""
_CORE_SHARE = 0.4
"""Of a capped window's power: below it, errors of memory's and static power would pass for the law of the core."""


@dataclass(frozen=True)
class Line:
    """Dynamic energy against count at one window length, for one benchmark and kind of operands.

    Args:
        benchmark, operands: which.
        n: windows.
        levels: different rates among them.
        slope_j: energy per count of the benchmark's unit, everything on its way included, in J.
        offset_j: what the line leaves at count 0, in J.
        r2: of the line; None with ``reason``.
        reason: why there is no r2.
    """

    benchmark: str
    operands: str
    n: int
    levels: int
    slope_j: float | None
    offset_j: float | None
    r2: float | None
    reason: str | None = None


def static_power(fitted: Fit, window: CalibrationWindow) -> float:
    """Power of a window that is not dynamic: static, and that of its active SMs, in W."""
    return _power_of(fitted, window, STATIC, 1.0) + fitted.offset_w(window) + _power_of(fitted, window, SM_ACTIVE)


def _power_of(fitted: Fit, window: CalibrationWindow, unit: str, rate: float | None = None) -> float:
    """Power of a unit of one part, at its rate in a window unless another is given."""
    value = sum(v for (name, _), v in zip(fitted.design.columns, fitted.values, strict=True) if name == unit)
    return float(value * (window.rates.get(unit, 0.0) if rate is None else rate))


def standing_power(fitted: Fit, window: CalibrationWindow) -> float:
    """Power of a window that does not grow with its counts: :func:`static_power` and that of a memory in use, in W."""
    return static_power(fitted, window) + _power_of(fitted, window, HBM_ACTIVE)


def lines(fitted: Fit) -> list[Line]:
    """The line of each benchmark and kind of operands among the windows of a fit."""
    groups: dict[tuple[str, str], list[CalibrationWindow]] = defaultdict(list)
    for window in fitted.design.windows:
        if SUITE[window.point.benchmark].unit in window.counts and SUITE[window.point.benchmark].role == "fit":
            groups[window.point.benchmark, window.point.operands].append(window)
    return [_line(fitted, *key, windows) for key, windows in sorted(groups.items())]


def _line(fitted: Fit, benchmark: str, operands: str, windows: Sequence[CalibrationWindow]) -> Line:
    unit = SUITE[benchmark].unit
    length = float(np.median([window.duration_s for window in windows]))
    count = np.array([window.rates[unit] * length for window in windows])
    energy = np.array([((window.power_w or 0.0) - static_power(fitted, window)) * length for window in windows])
    levels = 1 + int((np.diff(np.sort(count)) > _SAME_RATE * count.max()).sum())
    if len(windows) < _LINE_POINTS or levels < 2:
        why = f"{len(windows)} windows at {levels} rates: three windows at two rates make a line that can fail"
        return Line(benchmark, operands, len(windows), levels, None, None, None, why)
    slope, offset = np.polyfit(count, energy, 1)
    r2 = _r2(energy, energy - slope * count - offset)
    same = None if r2 is not None else "all windows have the same energy"
    return Line(benchmark, operands, len(windows), levels, float(slope), float(offset), r2, same)


def _r2(seen: Array, left: Array) -> float | None:
    """Share of the variance that a fit explains; None without any."""
    variance = float(((seen - seen.mean()) ** 2).sum())
    return 1 - float(left @ left) / variance if variance else None


def overall(fitted: Fit) -> dict[str, Json]:
    """R² of dynamic power over all windows of the fit, and its residuals."""
    power, left = fitted.design.power, fitted.residual_w
    static = np.array([static_power(fitted, window) for window in fitted.design.windows])
    dynamic = power - static
    busy = dynamic > 10.0
    relative = np.abs(left[busy] / dynamic[busy])
    temperature = np.array([_temperature(window) for window in fitted.design.windows])
    return {
        "windows": len(power),
        "coefficients": len(fitted.values),
        "r2_dynamic": _r2(dynamic, left),
        "residual_rms_w": float(np.sqrt((left**2).mean())),
        "residual_worst_w": float(np.abs(left).max()),
        "dynamic_error_mean": float(relative.mean()) if relative.size else None,
        "dynamic_error_worst": float(relative.max()) if relative.size else None,
        "condition_number": fitted.condition_number if np.isfinite(fitted.condition_number) else None,
        "static_offsets_w": [float(offset) for offset in fitted.offsets],
        "residual_temperature_correlation": _correlation(temperature, left),
    }


def _temperature(window: CalibrationWindow) -> float:
    at = None if window.conditions is None else window.conditions.temperature_c
    return np.nan if at is None else at


def _correlation(a: Array, b: Array) -> float | None:
    """A diagnosis only: temperature as a regressor would stand in for power itself."""
    known = np.isfinite(a)
    if known.sum() < 3 or np.ptp(a[known]) == 0 or np.ptp(b[known]) == 0:
        return None
    return float(np.corrcoef(a[known], b[known])[0, 1])


def path_energies(fitted: Fit, windows: Iterable[CalibrationWindow]) -> list[dict[str, Json]]:
    """Energy per count of a benchmark with everything on its way: issue, levels above, consumption of what was loaded.

    This is what most publications print, less what a memory in use costs by time. Of each benchmark and kind of
    operands: by the windows (median and range), and by the coefficients.
    """
    groups: dict[tuple[str, str], list[CalibrationWindow]] = defaultdict(list)
    for window in windows:
        usable = window.power_w is not None and not window.capped and window.clock_held is not False
        usable = usable and window.point.duty != BURST
        if usable and window.counts.get(SUITE[window.point.benchmark].unit) and SUITE[window.point.benchmark].kernel:
            groups[window.point.benchmark, window.point.operands].append(window)
    rows = []
    for (benchmark, operands), group in sorted(groups.items()):
        unit = SUITE[benchmark].unit
        if UNITS[unit].group == "static":
            continue
        seen = [((one.power_w or 0.0) - standing_power(fitted, one)) / one.rates[unit] for one in group]
        by_model = None
        if operands in ACTIVITY:
            standing = [standing_power(fitted, one) - static_power(fitted, one) for one in group]
            moving = [_dynamic(fitted, one) - at for one, at in zip(group, standing, strict=True)]
            by_model = float(np.median([watts / one.rates[unit] for one, watts in zip(group, moving, strict=True)]))
        rows.append(
            {
                "benchmark": benchmark, "operands": operands, "unit": unit, "per": UNITS[unit].counted,
                "measured_j": float(np.median(seen)), "range_j": [float(min(seen)), float(max(seen))],
                "model_j": by_model, "n": len(seen),
            }
        )  # fmt: skip
    return rows


def _dynamic(fitted: Fit, window: CalibrationWindow, activity: float | None = None) -> float:
    row = np.array(rates_of(window, fitted.design.columns, activity))
    return float(fitted.power_w(row, fitted.offset_w(window))) - static_power(fitted, window)


def checks(fitted: Fit, windows: Iterable[CalibrationWindow]) -> list[dict[str, Json]]:
    """Windows that took no part, as the fit predicts them: other access patterns, several units at once, bursts."""
    rows = []
    for window in windows:
        name, burst = window.point.benchmark, window.point.duty == BURST
        known = name in SUITE and (burst or SUITE[name].role == "check")
        if not known or window.power_w is None or window.capped or window.point.operands not in ACTIVITY:
            continue
        static = static_power(fitted, window)
        measured, predicted = window.power_w - static, _dynamic(fitted, window)
        rows.append(
            {
                "benchmark": f"{name} in bursts" if burst else name, "operands": window.point.operands,
                "measured_dynamic_w": measured, "predicted_dynamic_w": predicted,
                "relative_error": (predicted - measured) / measured if measured > 1.0 else None,
            }
        )  # fmt: skip
    return rows


_EXPECTED = (
    ("instructions", "instruction", 1.0),
    ("shared_wavefronts", "shared_read", 1 / 128),
    ("shared_wavefronts", "shared_write", 1 / 128),
    ("pipe_lsu_instructions", "memory_access", 1.0),
    ("l1_requests", "l1_request", 1.0),
    ("l1_sectors", "l1", 1 / 32),
    ("dram_read_bytes", "hbm_read", 1.0),
    ("dram_write_bytes", "hbm_write", 1.0),
)
"""Counter, unit that it should count, and counts per unit."""


def counted_checks(counted: Iterable[Counted]) -> list[dict[str, Json]]:
    """Hardware counters over the analytic counts, where a counter sees exactly one unit: 1 where both agree."""
    return [
        {
            "benchmark": one.benchmark,
            "counter": counter,
            "unit": unit,
            "ratio": one.counters[counter] / (one.counts[unit] * per_unit),
        }
        for one in counted
        for counter, unit, per_unit in _EXPECTED
        if counter in one.counters and one.counts.get(unit)
    ]


def orderings(fitted: Fit, windows: Iterable[CalibrationWindow]) -> list[dict[str, Json]]:
    """What must hold on any chip: zeros cheaper than random operands, and each level dearer than the one above."""
    path = {(row["benchmark"], row["operands"]): float(row["measured_j"]) for row in path_energies(fitted, windows)}
    rows = [
        {"statement": f"{name}: zeros cheaper than random", "holds": path[name, "zero"] < path[name, "random"]}
        for name, operands in sorted(path)
        if operands == "random" and (name, "zero") in path
    ]
    for low, high in (("l1_read", "l2_read"), ("l2_read", "hbm_read"), ("l2_write", "hbm_write")):
        if (low, "random") in path and (high, "random") in path:
            holds = path[low, "random"] < path[high, "random"]
            rows.append({"statement": f"{low} cheaper than {high}, per byte", "holds": holds})
    return rows


def activities(fitted: Fit, windows: Iterable[CalibrationWindow]) -> list[dict[str, Json]]:
    """Activity of constant and normal operands: where their power lies between control (0) and random (1)."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for window in windows:
        benchmark = SUITE.get(window.point.benchmark)
        if benchmark is None or window.point.operands in ACTIVITY or window.power_w is None or window.capped:
            continue
        still, moving = _dynamic(fitted, window, 0.0), _dynamic(fitted, window, 1.0)
        if moving - still > 5.0:
            seen = window.power_w - static_power(fitted, window)
            groups[benchmark.name, window.point.operands].append((seen - still) / (moving - still))
    return [
        {"benchmark": name, "operands": operands, "activity": float(np.median(values)), "n": len(values)}
        for (name, operands), values in sorted(groups.items())
    ]


def frequency_law(fitted: Fit, windows: Iterable[CalibrationWindow]) -> dict[str, Json]:
    """How the energy of core units falls with the clock, from windows that the power limit slowed down.

    ``e(f) = e(f_max) · v²`` with :func:`joulemark.energy.model.voltage` v: β is its slope at the highest clock, γ how
    it flattens below. Both are a least-squares fit over the capped windows; γ is 0 where they do not show it. Static
    power and HBM keep theirs. β = 1 with γ = 0 is the law f², β = 0 a constant voltage.
    """
    points = [point for window in windows if (point := _law_point(fitted, window)) is not None]
    spread = max((x for x, _ in points), default=1.0) - min((x for x, _ in points), default=1.0)
    known: dict[str, Json] = {"n": len(points), "points": [list(point) for point in points]}
    if len(points) < 3 or spread < 0.02:
        why = f"{len(points)} capped windows over {spread:.1%} of the clock; three over 2 % are needed"
        return dict.fromkeys(("beta", "interval", "curvature", "covariance", "clock_range")) | known | {"reason": why}
    drop = np.array([1 - x for x, _ in points])
    lost = np.array([1 - np.sqrt(max(s, 0.0)) for _, s in points])
    found, covariance = _least_squares(np.column_stack([drop, -(drop**2)]), lost)
    if len(points) < _CURVE_POINTS or found[1] < 2 * np.sqrt(covariance[1, 1]):
        (beta,), ((variance,),) = _least_squares(drop[:, None], lost)
        found, covariance = np.array([beta, 0.0]), np.array([[variance, 0.0], [0.0, 0.0]])
    error = float(np.sqrt(covariance[0, 0]))
    return known | {
        "beta": float(found[0]),
        "interval": [float(found[0]) - 2 * error, float(found[0]) + 2 * error],
        "curvature": float(found[1]),
        "covariance": covariance.tolist(),
        "clock_range": [min(x for x, _ in points), max(x for x, _ in points)],
        "reason": None,
    }


def _least_squares(columns: Array, wanted: Array) -> tuple[Array, Array]:
    """Coefficients and their covariance."""
    inverse = np.linalg.pinv(columns.T @ columns)
    found: Array = inverse @ columns.T @ wanted
    left = wanted - columns @ found
    covariance: Array = inverse * float(left @ left) / max(len(wanted) - columns.shape[1], 1)
    return found, covariance


def bursts(fitted: Fit, windows: Sequence[CalibrationWindow]) -> dict[str, Json]:
    """Which share of the supply's loss follows the power of the moment; the rest follows its mean.

    A load that is busy for a share d of the time loses ``ρ·C²·(1 + f·(1/d − 1))`` in the supply: f is 1 for a current
    through a resistance, 0 for a leakage that follows the temperature. What lies with each SM follows the moment by
    itself: SMs are active for that share. f is the least-squares fit over windows in bursts, each beside one of the
    same load without a pause, so that its coefficients' errors cancel.
    """
    random = [one for one in windows if one.point.operands == "random"]
    steady = {one.point.benchmark: one for one in random if one.point.duty == "full"}
    in_bursts = [one for one in random if one.point.duty == BURST and one.point.benchmark in steady]
    found = [_gain_and_loss(fitted, one, steady[one.point.benchmark]) for one in in_bursts]
    points = np.array([point for point in found if point is not None]).reshape(-1, 2)
    if len(points) < _FEWEST_BURSTS or not fitted.supply:
        why = f"{len(points)} loads in bursts that no limit held down; {_FEWEST_BURSTS} are needed, and a loss"
        return {"share": None, "interval": None, "n": len(points), "reason": why}
    most, more = points.T
    share = float(most @ more / (most @ most))
    left = more - share * most
    scatter = max(float(np.sqrt(left @ left / (len(points) - 1))), _BURST_NOISE_W)
    error = scatter / float(np.sqrt(most @ most))
    return {"share": share, "interval": [share - 2 * error, share + 2 * error], "n": len(points), "reason": None}


def _gain_and_loss(fitted: Fit, burst: CalibrationWindow, steady: CalibrationWindow) -> tuple[float, float] | None:
    """What a load in bursts would lose more if all of the loss followed it, and what it did lose more, in W."""
    if burst.power_w is None or steady.power_w is None or burst.capped or steady.capped:
        return None
    unit = SUITE[burst.point.benchmark].unit
    if not burst.counts.get(unit) or not steady.counts.get(unit):
        return None
    busy = burst.rates[unit] / steady.rates[unit]
    core = busy * fitted.core_w(steady)
    static = static_power(fitted, burst) - _power_of(fitted, burst, SM_ACTIVE)
    row = np.array(rates_of(burst, fitted.design.columns))
    lost = burst.power_w - static - float(row[fitted.design.memory] @ fitted.values[fitted.design.memory]) - core
    most = fitted.supply * core**2 * (1 / busy - 1)
    return (most, lost - float(fitted.loss_at(row)) * core**2) if busy < 1 else None


def _all_fitted(fitted: Fit, window: CalibrationWindow) -> bool:
    """Whether every unit of a window has its energy for the window's operands."""
    random = window.point.operands == "random"

    def known(unit: str) -> bool:
        if unit in fitted.design.merged:  # of random operands alone
            return random
        wanted = "datapath" if random and UNITS[unit].has_datapath else "control"
        return (unit, wanted) in fitted.design.columns

    used = [unit for unit, count in window.counts.items() if count and UNITS[unit].group != "static"]
    return window.point.operands in ACTIVITY and all(map(known, used))


def _law_point(fitted: Fit, window: CalibrationWindow) -> tuple[float, float] | None:
    """(clock over its highest, core energy over that at the highest clock) of a capped window."""
    state = window.conditions
    if not window.capped or window.power_w is None or state is None or window.clock_held is not False:
        return None
    if not _all_fitted(fitted, window) or window.point.duty == BURST:
        return None
    if state.sm_clock_hz is None or state.max_sm_clock_hz is None:
        return None
    parts = np.array(rates_of(window, fitted.design.columns)) * fitted.values
    active = _power_of(fitted, window, SM_ACTIVE)
    core = float(parts[fitted.design.core].sum() - active)
    if core <= _CORE_SHARE * window.power_w:
        return None
    return state.sm_clock_hz / state.max_sm_clock_hz, float((fitted.core_w(window) - active) / core)
