"""The units and memory levels that a calibration gives an energy, and what is counted of each (pure).

``E = P_static·T + C·(1 + ρ·C/T) + ρ_sm·(1/a − 1)·S²/T + M`` with
``C + M = P_sm·(SM time) + Σ_k (control_k + datapath_k · activity) · N_k``, of which M is the memory's (HBM), C the
core's and S that of its SMs, a share a of which is active at a time.
Control is what zero operands cost, datapath what their toggling adds (Antepara et al., *Benchmark-driven Models for
Energy Analysis and Attribution of GPU-Accelerated Supercomputing*, SC'25). Levels are nested: a byte from HBM is
counted at HBM, L2 and L1, so that each level's coefficient is the increment over the level above. ρ is the loss of the
core's supply: conduction losses of voltage regulators and wiring grow as the square of the current. ρ_sm is the part of
it that lies with each SM: where a few draw what all could, theirs is larger. The memory has a supply of its own, whose
loss is not told from its coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping

Part = Literal["static", "control", "datapath"]
Group = Literal["static", "issue", "vector", "integer", "special", "tensor", "shared", "l1", "l2", "hbm"]
GROUPS: tuple[Group, ...] = get_args(Group)
"""In the order of a split."""


@dataclass(frozen=True)
class Unit:
    """Something that spends energy whenever it is used.

    Args:
        name: key in counts and calibrations.
        group: what it is part of in a split.
        counted: what one count is: ``s``, ``SM.s``, ``inst`` (warp instruction), ``op`` (one thread's operation: an FMA
            is one), ``FLOP`` (tensor pipes: a multiply-add is two; integer operations alike), ``request`` (of up to a
            line of 128 B), ``B``, or ``J.W`` (energy of the core times its power: the supply's loss).
        title: for tables.
        has_datapath: whether operands toggle in it.
        scales_with_core_voltage: False for what the memory clock feeds.
    """

    name: str
    group: Group
    counted: Literal["s", "SM.s", "J.W", "inst", "op", "FLOP", "request", "B"]
    title: str
    has_datapath: bool = True
    scales_with_core_voltage: bool = True

    @property
    def energy_unit(self) -> str:
        """Unit of the coefficient: W for time, 1/W for the supply, else J per count."""
        return {"s": "W", "SM.s": "W/SM", "J.W": "1/W"}.get(self.counted, f"J/{self.counted}")


STATIC, SM_ACTIVE, SUPPLY, HBM_ACTIVE = "static", "sm_active", "supply", "hbm_active"
SM_SUPPLY = "sm_supply"
LOSSES = (SUPPLY, SM_SUPPLY)
INSTRUCTION, MEMORY_ACCESS, L1_REQUEST, L2_REQUEST = "instruction", "memory_access", "l1_request", "l2_request"

_DTYPES = (("fp16", "FP16"), ("bf16", "BF16"), ("tf32", "TF32"), ("fp64", "FP64"), ("int8", "INT8"), ("fp8", "FP8"))

UNITS: Mapping[str, Unit] = {
    unit.name: unit
    for unit in (
        Unit(STATIC, "static", "s", "static", has_datapath=False),
        Unit(SM_ACTIVE, "static", "SM.s", "SM active", has_datapath=False),
        Unit(SUPPLY, "static", "J.W", "supply loss", has_datapath=False, scales_with_core_voltage=False),
        Unit(SM_SUPPLY, "static", "J.W", "supply loss in SMs", has_datapath=False, scales_with_core_voltage=False),
        Unit(INSTRUCTION, "issue", "inst", "instruction issue", has_datapath=False),
        Unit(MEMORY_ACCESS, "issue", "inst", "memory instruction", has_datapath=False),
        Unit("fp32", "vector", "op", "FP32 FMA"),
        Unit("fp32_operands", "vector", "op", "FP32 FMA's third register"),
        Unit("fp64", "vector", "op", "FP64 FMA"),
        Unit("fp64_operands", "vector", "op", "FP64 FMA's third register"),
        Unit("fp16x2", "vector", "op", "FP16x2 FMA"),
        Unit("integer", "integer", "op", "integer multiply-add"),
        Unit("logic", "integer", "op", "logic and shift"),
        Unit("special", "special", "op", "special function"),
        *(Unit(f"mma_{key}", "tensor", "FLOP", f"tensor {title}") for key, title in _DTYPES),
        *(Unit(f"wgmma_{key}", "tensor", "FLOP", f"tensor {title} (wgmma)") for key, title in _DTYPES if key != "fp64"),
        Unit("shared_read", "shared", "B", "shared memory read"),
        Unit("shared_write", "shared", "B", "shared memory write"),
        Unit(L1_REQUEST, "l1", "inst", "L1 request", has_datapath=False),
        Unit("l1", "l1", "B", "L1"),
        Unit(L2_REQUEST, "l2", "request", "L2 request", has_datapath=False),
        Unit("l2_read", "l2", "B", "L2 read"),
        Unit("l2_write", "l2", "B", "L2 write"),
        Unit(HBM_ACTIVE, "hbm", "s", "HBM in use", has_datapath=False, scales_with_core_voltage=False),
        Unit("hbm_read", "hbm", "B", "HBM read", scales_with_core_voltage=False),
        Unit("hbm_write", "hbm", "B", "HBM write", scales_with_core_voltage=False),
    )
}
"""Every unit by name. Stores have no L1 level of their own: a write-through L1 holds no store back from the L2, so
``l1`` counts what passes, loads and stores alike, as the counter of L1 sectors does."""

MOVEMENT_GROUPS: frozenset[Group] = frozenset({"shared", "l1", "l2", "hbm"})
"""Groups that move data and compute nothing."""


def fed_by_core(unit: str) -> bool:
    """Whether a unit's power above static comes through the core's supply, whose loss grows with it."""
    return UNITS[unit].scales_with_core_voltage and unit != STATIC


def of_sms(unit: str) -> bool:
    """Whether a unit's power comes through the supply of the SM that uses it."""
    return fed_by_core(unit) and UNITS[unit].group != "l2"


def columns(units: Mapping[str, object]) -> list[tuple[str, Part]]:
    """The coefficients of some units, in the order of :data:`UNITS`.

    Args:
        units: names, those of :data:`UNITS`.

    Raises:
        KeyError: a name that is no unit.
    """
    for name in units:
        UNITS[name]
    chosen: list[tuple[str, Part]] = []
    for name, unit in UNITS.items():
        if name in units:
            chosen.append((name, "static" if unit.group == "static" else "control"))
            if unit.has_datapath:
                chosen.append((name, "datapath"))
    return chosen
