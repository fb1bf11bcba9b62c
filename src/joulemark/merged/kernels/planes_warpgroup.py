"""Chains of few channels in streamed planes by ``wgmma``: what ``stream_warpgroup`` does with rows, done with planes.

A product's rows are 8 × 8 pixels of a plane, its columns the channels of three output planes: each plane of the input
is read once for all three (``device/stream_warpgroup.cuh``, ``device/planes_warpgroup.cuh``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from joulemark.merged.kernels.chain import best_plans, refuse
from joulemark.merged.kernels.description import Description
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.kernel import Kernel
from joulemark.merged.kernels.seconds import varied
from joulemark.merged.kernels.stream_warpgroup import Thirds, fits, unsuited_slices
from joulemark.merged.sequence import Shape

_RINGS = ((5, 3), (4, 3), (4, 2), (3, 2))
"""Planes of the input's ring and of the others, the deepest first."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a kernel that are free to choose.

    Args:
        down: tiles of 8 × 8 pixels of a plane, one below the other.
        across: tiles side by side.
        planes: of the output that a brick has; a block takes brick after brick.
        blocks: per multiprocessor.
        ahead: planes of the input's ring.
        between: planes of the other rings.
    """

    down: int = 1
    across: int = 3
    planes: int = 32
    blocks: int = 1
    ahead: int = 4
    between: int = 3


def unsuited(description: Description) -> str | None:
    """Why there is no such kernel for a sequence; None where there is one."""
    if description.sequence.dimensions != 3:
        return f"{description.sequence.dimensions} dimensions: planes are streamed in 3"
    return unsuited_slices(description)


def candidates(description: Description, size: Shape, batch: int, device: Device, limit: int = 12) -> list[Plan]:
    """Plans worth a trial for inputs of ``size``, the most promising first.

    Raises:
        ValueError: there is no such kernel for this sequence.
    """
    refuse(unsuited(description), "kernel of planes by warpgroups")
    plans = _all_plans(description, description.sequence.sizes(size)[-1], batch, device)
    ranked = best_plans(
        "planes_warpgroup", plans, lambda plan: _fitting(description, plan), (size, batch, device), limit, _kind
    )
    return varied(ranked, _kind)


def _kind(plan: Plan) -> tuple[int, int, int]:
    return plan.down, plan.across, plan.blocks


def _all_plans(description: Description, out: Shape, batch: int, device: Device) -> Iterator[Plan]:
    """Tiles of all kinds, bricks of such depths that all blocks get equally many, and the deepest rings that fit."""
    halo = 2 * len(description.sequence.layers)
    for down, across, blocks in product(range(1, 8), range(1, 8), (1, 2, 3)):
        edge = 8 * down + 2 - halo, 8 * across + 2 - halo
        rings = next((one for one in _RINGS if fits(_fitting, description, Plan(down, across, 8, blocks, *one))), None)
        if rings is None:
            continue
        tiles = batch * prod(-(-n // e) for n, e in zip(out[1:], edge, strict=True))
        pieces = {max(1, rounds * device.multiprocessors * blocks // tiles) for rounds in (1, 2, 3, 4)}
        depths = {-(-out[0] // n) for n in pieces} | {out[0]}
        yield from (Plan(down, across, depth, blocks, *rings) for depth in sorted(depths) if depth >= min(4, out[0]))


def planes_warpgroup(description: Description, plan: Plan) -> Kernel:
    """The kernel of a chain in planes streamed by warpgroups.

    Raises:
        ValueError: there is none for this sequence or plan.
    """
    made = _fitting(description, plan)
    name = f"planes_{description}_{plan.planes}_t{plan.down}x{plan.across}_b{plan.blocks}r{plan.ahead}_{plan.between}"
    return made.kernel(name)


def _fitting(description: Description, plan: Plan) -> Thirds:
    refuse(unsuited(description), "kernel of planes by warpgroups")
    halo = 2 * len(description.sequence.layers)
    if min(plan.down, plan.across, plan.planes, plan.blocks) < 1 or min(plan.ahead, plan.between) < 2:
        raise ValueError(f"{plan}: give a tile, a plane and a block at least, and rings of two planes")
    edge = (plan.planes, 8 * plan.down + 2 - halo, 8 * plan.across + 2 - halo)
    field = (8 * plan.down + 2, 8 * plan.across + 8)
    made = Thirds(description, plan.blocks, plan.down * plan.across, field, edge, (plan.ahead, plan.between))
    made.check()
    return made
