"""Where a workload's measured joules went: static, control and datapath by unit and level, and what is left (pure)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from joulemark.energy.microbench.suite import SUITE
from joulemark.energy.model import interval_of
from joulemark.energy.units import HBM_ACTIVE, MOVEMENT_GROUPS, UNITS, Group

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from joulemark.energy.calibration import Calibration
    from joulemark.energy.counters import Counts
    from joulemark.energy.model import Prediction
    from joulemark.records import Json

    Array = NDArray[np.float64]
    Interval = tuple[float, float]

RESIDUAL = "residual"
"""Name of what no unit explains, beside the groups of units."""


@dataclass(frozen=True)
class Split:
    """Measured energy in parts that sum to it.

    Args:
        measured_j: of the sensors.
        parts: group of units → {``static``, ``control``, ``datapath``: J}.
        residual_j: measured minus all parts: positive where the model knows too little.
        dynamic_j: measured minus static parts.
        movement_share: of dynamic energy, the increments of shared memory, L1, L2 and HBM alone.
        path_share: of dynamic energy, each level with its whole path: a byte from HBM is charged all that its
            microbenchmark spends per byte, instructions included; None where the calibration lacks a path.
        share_intervals: group, or ``residual`` → 95 % interval of its share of measured energy: of coefficients,
            drift of static power, assumed shares and activities. The sensors' gain scales all alike and moves no share.
        movement_interval, path_interval: likewise of those shares.
        notes: what is missing.
    """

    measured_j: float
    parts: Mapping[Group, Mapping[str, float]]
    residual_j: float
    dynamic_j: float
    movement_share: float | None
    path_share: float | None
    share_intervals: Mapping[str, Interval] = field(default_factory=dict)
    movement_interval: Interval | None = None
    path_interval: Interval | None = None
    notes: tuple[str, ...] = ()

    @property
    def residual_share(self) -> float:
        """Residual over measured energy, signed."""
        return self.residual_j / self.measured_j

    @property
    def shares(self) -> dict[str, float]:
        """Group, or ``residual`` → share of measured energy; they sum to 1."""
        shares: dict[str, float] = {RESIDUAL: self.residual_share}
        shares.update((group, sum(parts.values()) / self.measured_j) for group, parts in self.parts.items())
        return shares

    def to_json(self) -> dict[str, Json]:
        return {
            "measured_j": self.measured_j,
            "parts": {group: dict(parts) for group, parts in self.parts.items()},
            "residual_j": self.residual_j,
            "residual_share": self.residual_share,
            "dynamic_j": self.dynamic_j,
            "movement_share": self.movement_share,
            "path_share": self.path_share,
            "share_intervals": {name: list(interval) for name, interval in self.share_intervals.items()},
            "movement_interval": None if self.movement_interval is None else list(self.movement_interval),
            "path_interval": None if self.path_interval is None else list(self.path_interval),
            "notes": list(self.notes),
        }


def split(calibration: Calibration, prediction: Prediction, counts: Counts, measured_j: float) -> Split:
    """Split the measured energy of a workload.

    Args:
        calibration: of the GPU.
        prediction: of the model for the same stretch.
        counts: of that stretch.
        measured_j: energy that the sensors showed for it.
    """
    parts: dict[Group, dict[str, float]] = defaultdict(dict)
    for (unit, part), energy in prediction.parts.items():
        group = UNITS[unit].group
        parts[group][part] = parts[group].get(part, 0.0) + energy
    drawn = _drawn_groups(prediction)
    dynamic = measured_j - sum(parts.get("static", {}).values())
    movement = sum(sum(parts[group].values()) for group in MOVEMENT_GROUPS if group in parts)
    path, notes = _path_energy(calibration, {unit: np.array([one.value]) for unit, one in counts.values.items()})
    known = dynamic > 0
    if not known:
        notes = (*notes, "measured energy is below static energy: there is no dynamic part to share")
    moved = sum((drawn[group] for group in MOVEMENT_GROUPS if group in drawn), np.zeros(1))
    spread_path = _path_energy(calibration, prediction.sampled.counts)[0]
    return Split(
        measured_j,
        dict(parts),
        measured_j - prediction.energy_j,
        dynamic,
        movement / dynamic if known else None,
        float(path[0]) / dynamic if known and path is not None else None,
        _share_intervals(drawn, measured_j),
        _of_dynamic(moved, drawn, measured_j) if known else None,
        _of_dynamic(spread_path, drawn, measured_j) if known and spread_path is not None else None,
        notes,
    )


def _drawn_groups(prediction: Prediction) -> dict[Group, Array]:
    """Group of units → J in each draw, shape [d]."""
    drawn: dict[Group, Array] = {}
    for (unit, _), energy in zip(prediction.parts, prediction.sampled.energy.T, strict=True):
        group = UNITS[unit].group
        drawn[group] = drawn.get(group, 0.0) + energy
    return drawn


def _share_intervals(drawn: Mapping[Group, Array], measured_j: float) -> dict[str, Interval]:
    explained = sum(drawn.values(), np.zeros(1))
    intervals: dict[str, Interval] = {group: interval_of(energy / measured_j) for group, energy in drawn.items()}
    return intervals | {RESIDUAL: interval_of(1 - explained / measured_j)}


def _of_dynamic(energy: Array, drawn: Mapping[Group, Array], measured_j: float) -> Interval | None:
    """Interval of a share of dynamic energy, which itself depends on the static power of each draw."""
    dynamic = measured_j - drawn.get("static", np.zeros(1))
    return interval_of(energy / dynamic) if (dynamic > 0).all() else None


def _path_energy(calibration: Calibration, count: Mapping[str, Array]) -> tuple[Array | None, tuple[str, ...]]:
    """Energy of all accesses, each charged to the level that served it, with its whole path (ASAP'24's definition).

    Args:
        calibration: with the energies of paths.
        count: unit → counts, shape [d].

    Returns:
        J, shape [d], and what is missing; None where a path that is needed is not in the calibration.
    """
    none = np.zeros(1)

    def of(*units: str) -> Array:
        return sum((count[unit] for unit in units if unit in count), none)

    served = {
        "hbm_read": of("hbm_read"),
        "hbm_write": of("hbm_write"),
        "l2_read": np.maximum(of("l2_read") - of("hbm_read"), 0.0),
        "l2_write": np.maximum(of("l2_write") - of("hbm_write"), 0.0),
        "shared_read": of("shared_read"),
        "shared_write": of("shared_write"),
        "l1_read": np.maximum(of("l1") - of("l2_read", "l2_write"), 0.0),
    }
    energies = _per_byte(calibration)
    used = {name: bytes_ for name, bytes_ in served.items() if (bytes_ > 0).any()}
    lacking = [name for name in used if name not in energies]
    if lacking:
        return None, (f"no path energy of {', '.join(lacking)} in the calibration",)
    in_use = of(HBM_ACTIVE) * calibration.value(HBM_ACTIVE)
    return sum((bytes_ * energies[name] for name, bytes_ in used.items()), in_use), ()


def _per_byte(calibration: Calibration) -> dict[str, float]:
    """Benchmark of memory → J per byte of its level, of normal operands where measured, else of random ones."""
    found: dict[str, float] = {}
    for operands in ("random", "normal"):
        for row in calibration.paths:
            known = SUITE.get(row["benchmark"])
            if row["operands"] == operands and known is not None and known.family == "memory" and known.role == "fit":
                found[row["benchmark"]] = float(row["measured_j"])
    return found
