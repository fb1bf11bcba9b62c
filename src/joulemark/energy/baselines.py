"""Simple models, each the best of its form on the same calibration, which a better one must beat (pure).

They know nothing of operands, so they are fitted to the windows with random ones, which are nearer to a workload's than
zeros; and they are judged by relative error, so that is what their fit makes least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import linprog

from joulemark.energy.counters import NOMINAL
from joulemark.energy.units import INSTRUCTION, SM_ACTIVE, UNITS
from joulemark.errors import MeasurementError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from joulemark.energy.calibration import Calibration

    Array = NDArray[np.float64]
    Features = Callable[[Mapping[str, float], Calibration], list[float]]


def _constant(rates: Mapping[str, float], calibration: Calibration) -> list[float]:
    del rates, calibration
    return []


def _sm_active(rates: Mapping[str, float], calibration: Calibration) -> list[float]:
    del calibration
    return [rates.get(SM_ACTIVE, 0.0)]


def _hbm(rates: Mapping[str, float]) -> float:
    return rates.get("hbm_read", 0.0) + rates.get("hbm_write", 0.0)


def _tensor_hbm(rates: Mapping[str, float], calibration: Calibration) -> list[float]:
    table = NOMINAL.get(str(calibration.gpu.get("architecture")), NOMINAL["sm_90a"])
    cycles = sum(
        rate / table.get(unit.rpartition("_")[2], table["bf16"])
        for unit, rate in rates.items()
        if unit in UNITS and UNITS[unit].group == "tensor"
    )
    return [cycles, _hbm(rates)]


def _instructions_hbm(rates: Mapping[str, float], calibration: Calibration) -> list[float]:
    del calibration
    return [rates.get(INSTRUCTION, 0.0), _hbm(rates)]


BASELINES: Mapping[str, Features] = {
    "constant power": _constant,
    "a + b SM-active": _sm_active,
    "tensor + HBM": _tensor_hbm,
    "instructions + HBM": _instructions_hbm,
}
"""Name → the rates that the model knows, beside a constant."""


@dataclass(frozen=True)
class Baseline:
    """A fitted simple model.

    Args:
        name: one of :data:`BASELINES`.
        coefficients: constant in W, then J per count of each feature.
    """

    name: str
    coefficients: tuple[float, ...]

    def power_w(self, rates: Mapping[str, float], calibration: Calibration) -> float:
        """Power at these rates (counts per second), in W."""
        return float(np.dot(self.coefficients, [1.0, *BASELINES[self.name](rates, calibration)]))


def baselines(calibration: Calibration) -> list[Baseline]:
    """All simple models, non-negative, fitted to the windows that the calibration's own fit used, without zeros."""
    used = [row for row in calibration.windows if row["left_out"] is None and row["power_w"]]
    moving = [row for row in used if "/random/" in row["key"] or not row["rates"].keys() - {SM_ACTIVE}] or used
    power = np.array([row["power_w"] for row in moving], dtype=float)
    found: list[Baseline] = []
    for name, features in BASELINES.items() if moving else ():
        design = np.array([[1.0, *features(row["rates"], calibration)] for row in moving])
        found.append(Baseline(name, tuple(map(float, least_relative(design, power)))))
    return found


def least_relative(design: Array, power: Array) -> Array:
    """Coefficients from 0 on with the least sum of |predicted / power - 1|, as a linear programme.

    Args:
        design: a constant and the features of each window, shape [n, p].
        power: measured, in W, shape [n].

    Returns:
        Constant in W, then J per count of each feature, shape [p].

    Raises:
        MeasurementError: the programme has no solution.
    """
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    relative = design / scale / power[:, None]
    n, p = relative.shape
    bounds = np.block([[relative, -np.eye(n)], [-relative, -np.eye(n)]])
    solved = linprog(np.repeat([0.0, 1.0], [p, n]), bounds, np.repeat([1.0, -1.0], n))
    if solved.x is None:
        raise MeasurementError(f"a simple model has no best fit: {solved.message}")
    coefficients: Array = solved.x[:p] / scale
    return coefficients
