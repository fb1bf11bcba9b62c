"""Where a workload's measured joules went: static, control and datapath by unit and level, and what is left (pure)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from joulemark.energy.microbench.suite import SUITE
from joulemark.energy.units import MOVEMENT_GROUPS, UNITS, Group

if TYPE_CHECKING:
    from collections.abc import Mapping

    from joulemark.energy.calibration import Calibration
    from joulemark.energy.counters import Counts
    from joulemark.energy.model import Prediction
    from joulemark.records import Json


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
        notes: what is missing.
    """

    measured_j: float
    parts: Mapping[Group, Mapping[str, float]]
    residual_j: float
    dynamic_j: float
    movement_share: float | None
    path_share: float | None
    notes: tuple[str, ...] = ()

    @property
    def residual_share(self) -> float:
        """Residual over measured energy, signed."""
        return self.residual_j / self.measured_j

    def to_json(self) -> dict[str, Json]:
        return {
            "measured_j": self.measured_j,
            "parts": {group: dict(parts) for group, parts in self.parts.items()},
            "residual_j": self.residual_j,
            "residual_share": self.residual_share,
            "dynamic_j": self.dynamic_j,
            "movement_share": self.movement_share,
            "path_share": self.path_share,
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
    static = sum(parts.get("static", {}).values())
    dynamic = measured_j - static
    movement = sum(sum(parts[group].values()) for group in MOVEMENT_GROUPS if group in parts)
    path, notes = _path_energy(calibration, counts)
    positive = dynamic > 0
    return Split(
        measured_j,
        dict(parts),
        measured_j - prediction.energy_j,
        dynamic,
        movement / dynamic if positive else None,
        path / dynamic if positive and path is not None else None,
        notes if positive else (*notes, "measured energy is below static energy: there is no dynamic part to share"),
    )


def _path_energy(calibration: Calibration, counts: Counts) -> tuple[float | None, tuple[str, ...]]:
    """Energy of all accesses, each charged to the level that served it, with its whole path (ASAP'24's definition)."""
    count = {unit: one.value for unit, one in counts.values.items()}
    served = {
        "hbm_read": count.get("hbm_read", 0.0),
        "hbm_write": count.get("hbm_write", 0.0),
        "l2_read": max(count.get("l2_read", 0.0) - count.get("hbm_read", 0.0), 0.0),
        "l2_write": max(count.get("l2_write", 0.0) - count.get("hbm_write", 0.0), 0.0),
        "shared_read": count.get("shared_read", 0.0),
        "shared_write": count.get("shared_write", 0.0),
    }
    passed = count.get("l2_read", 0.0) + count.get("l2_write", 0.0)
    served["l1_read"] = max(count.get("l1", 0.0) - passed, 0.0)
    energies = _per_byte(calibration)
    lacking = [name for name, bytes_ in served.items() if bytes_ > 0 and name not in energies]
    if lacking:
        return None, (f"no path energy of {', '.join(lacking)} in the calibration",)
    return sum(bytes_ * energies[name] for name, bytes_ in served.items() if bytes_ > 0), ()


def _per_byte(calibration: Calibration) -> dict[str, float]:
    """Benchmark of memory → J per byte of its level, of normal operands where measured, else of random ones."""
    found: dict[str, float] = {}
    for operands in ("random", "normal"):
        for row in calibration.paths:
            known = SUITE.get(row["benchmark"])
            if row["operands"] == operands and known is not None and known.family == "memory" and known.role == "fit":
                found[row["benchmark"]] = float(row["measured_j"])
    return found
