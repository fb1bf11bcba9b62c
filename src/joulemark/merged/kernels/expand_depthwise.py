"""Fronts of inverted residuals: 1×1 expansion and depthwise 3×3 or 5×5 of stride 1 or 2, in one kernel.

Where squeeze-and-excitation reads what the depthwise gives (EfficientNet), expansion and projection cannot be one
kernel; the expanded tensor, the largest of the block, need not travel to memory all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels.columns import Columns, crossed, kept, larger, smaller
from joulemark.merged.kernels.compile import device_text
from joulemark.merged.kernels.description import Description
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.expansion import (
    ACTIVATIONS,
    CHUNK,
    KEPT_STEPS,
    Cut,
    Expanding,
    bricks_in,
    constants_text,
    is_depthwise,
    offsets_of,
    packed,
    sharing,
)
from joulemark.merged.kernels.kernel import Kernel
from joulemark.merged.kernels.lane_weights import neighbours_of_16
from joulemark.merged.kernels.seconds import Counts, cheapest_of, varied
from joulemark.merged.sequence import Shape

_CONVOLVING = {3: (44, 14), 5: (112, 10)}
"""Window → registers of the depthwise and of each of its tiles, about: what NVRTC makes without spills for sm_90a."""
_WARPS, _TURNS = 16, 16


@dataclass(frozen=True)
class Plan(Cut):
    """How the front of an inverted residual is cut; the parts of a brick take its chunks in turns."""


@dataclass(frozen=True)
class _Geometry(Expanding):
    """What follows from the layers and the plan; the kernel's text derives the same from the same constants."""

    channels_in: int
    hidden: int
    stride: int
    window: int
    silus: tuple[bool, bool]
    plan: Plan
    expands = True

    @cached_property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return self.input_bytes + self.hidden_bytes + self.slack * 16

    @property
    def kind(self) -> tuple[object, ...]:
        """Of its plan: few of a kind are worth a trial."""
        plan = self.plan
        return plan.width * plan.height, plan.tiles, plan.groups, plan.parts, plan.together

    def resident(self, device: Device) -> int:
        """Blocks of a multiprocessor that shared memory and registers suffice for; 0 where none fits."""
        plan = self.plan
        held = 8 * (self.steps_in if self.steps_in <= KEPT_STEPS else 2)
        expanding = 56 + self.window**2 // 2 + held + 16 * plan.together
        fixed, per_tile = _CONVOLVING[self.window]
        convolving = fixed + per_tile * plan.tiles
        # Each of the four schedulers has a quarter of the registers for its warps.
        of_scheduler = device.registers // 4 // 32 // (-(-larger(expanding, convolving) // 8) * 8)
        by_registers = 4 * of_scheduler // (plan.warps * plan.groups)
        by_memory = device.shared // (self.shared + 1024)
        return (self.shared <= device.block_shared) * smaller(by_registers, by_memory, 8)

    def expanded_share(self, size: Shape, out: Shape) -> float:
        """Of all bricks' tiles of pixels, about: those in rows above and below the image are cleared once."""
        bricks = -(-out[0] // self.plan.height)
        last = (bricks - 1) * self.plan.height * self.stride - self.window // 2  # row of the image where it begins
        above = self.window // 2 * self.pitch // 16
        below = larger(0, self.pixel_tiles - -(-(size[0] - last) * self.pitch // 16))
        return 1 - (above + below) / (bricks * self.pixel_tiles)

    def counts(self, size: Shape, out: Shape, batch: int, device: Device) -> Counts:
        """What the busiest multiprocessor does: throughput of all its blocks, waits of one after another.

        The terms are those of inverted residuals.
        """
        plan = self.plan
        each = -(-plan.parts * plan.bricks(out, batch) // device.multiprocessors)
        beside = smaller(plan.resident, each)  # blocks, which hide a part of each other's beginning and end
        rounds, whole = each / beside, -(-each // beside)
        chunks = -(-self.chunks // plan.parts)
        taken, left = self.pixel_tiles * 2 * self.channels_in, plan.height * plan.width * 4 * chunks
        return {
            **self.stage_counts(each, whole, chunks, self.expanded_share(size, out)),
            "weights": each * chunks * self.stage_weight_bytes,
            "chunk": each * (taken + left),
            "chunk_bare": rounds * (taken + left),
            "hidden_in_turn": whole * -(-chunks // plan.groups),
            "round": rounds,
            "round_bare": rounds / beside,
            "launch": 1,
        }


def unsuited(description: Description) -> str | None:
    """Why a sequence is no front of an inverted residual that this kernel computes; None if it is one."""
    layers = description.sequence.layers
    if description.format not in ("bf16", "fp16"):
        return f"no front of an inverted residual in {description.format}"
    if description.sequence.dimensions != 2 or len(layers) != 2:
        return "the front of an inverted residual has two layers in two dimensions"
    expansion, depthwise = layers
    if description.adds or any(one.residual is not None for one in layers):
        return "the front of an inverted residual adds nothing"
    if any(one.activation not in ACTIVATIONS for one in layers):
        return f"activations are {', '.join(ACTIVATIONS)}"
    if not expansion.is_pointwise or not is_depthwise(depthwise, tuple(_CONVOLVING)):
        return "the front of an inverted residual is 1×1, depthwise 3×3 or 5×5 (stride 1 or 2, padding 1 or 2)"
    if any(description.sequence.channels(n) % 8 for n in (0, 1)):
        return "channels of input and output must be multiples of 8"
    return None


def expand_depthwise(description: Description, plan: Plan) -> Kernel:
    """The kernel of the front of an inverted residual.

    Raises:
        ValueError: the sequence is none, or the plan does not fit together.
    """
    _refuse(description)
    geometry = _geometry(description, plan)
    if plan.height % (plan.tiles * plan.tile[0]):
        raise ValueError(f"a brick of {plan.height} rows is no whole number of {plan.tiles} tiles of {plan.tile[0]}")
    if plan.parts * plan.groups > geometry.chunks:
        raise ValueError(f"{plan.parts} × {plan.groups} parts and groups have no chunk each: {geometry.chunks} chunks")
    if plan.warps * plan.groups > _WARPS or geometry.turns > _TURNS:
        raise ValueError(
            f"{plan.warps * plan.groups} warps, each with {geometry.turns} tiles to expand: at most {_WARPS}, {_TURNS}"
        )
    name = f"expand_depthwise_{description}_{_name(geometry)}"

    return Kernel(
        name,
        description,
        _source(name, description, geometry),
        plan.warps * plan.groups * 32,
        geometry.shared,
        (plan.height, plan.width),
        partial(_pack, geometry, description.dtype),
        parts=plan.parts,
        counts=partial(_counts, geometry, description),
    )


def _counts(geometry: _Geometry, description: Description, size: Shape, batch: int, device: Device) -> Counts:
    return geometry.counts(size, description.sequence.sizes(size)[-1], batch, device)


def _refuse(description: Description) -> None:
    why = unsuited(description)
    if why:
        raise ValueError(f"{description} cannot be merged as the front of an inverted residual: {why}")


def _source(name: str, description: Description, geometry: _Geometry) -> str:
    offsets, _ = offsets_of(geometry.stage_sizes)
    constants = {
        **geometry.stage_constants,
        "HIDDEN": geometry.hidden,
        **{f"{part.upper()}_AT": offset for part, offset in offsets.items()},
    }
    expansion, depthwise = (layer.activation.upper() for layer in description.sequence.layers)
    return "\n".join(
        [
            constants_text(description, constants, {"EXPANDS": True, "NARROW": geometry.plan.narrow}),
            device_text("octets.cuh"),
            f"constexpr Activation EXPAND_ACTIVATION = {expansion}, DEPTHWISE_ACTIVATION = {depthwise};",
            device_text("expansion.cuh"),
            device_text("expand_depthwise.cuh"),
            f"KERNEL({name}, THREADS, {geometry.plan.resident}) {{ expand_depthwise(a); }}",
            "",
        ]
    )


def candidates(description: Description, size: Shape, batch: int, device: Device, limit: int = 12) -> list[Plan]:
    """Plans worth a trial for inputs of ``size``, the most promising first.

    Raises:
        ValueError: the sequence is no front of an inverted residual.
    """
    _refuse(description)
    out = description.sequence.sizes(size)[-1]
    ranked = cheapest_of(
        "expand_depthwise",
        _all_plans(description, out, device),
        lambda sizes: _geometry(description, Plan(**sizes)),
        lambda geometry: geometry.counts(size, out, batch, device),
        4 * limit,
        lambda geometry: geometry.kind,
    )
    # Counts add up what more warps would overlap: of each number of warps the best is tried early.
    plans = (one.plan for one in ranked)
    return varied(plans, lambda plan: min(16, plan.resident * plan.warps * plan.groups) // 4)[:limit]


def _all_plans(description: Description, out: Shape, device: Device) -> Iterator[Columns]:
    """Every way to cut that the kernel can be generated for, with the blocks of a multiprocessor that fit."""
    widths = sorted({-(-out[1] // n) for n in range(1, 9)} & set(range(4, 65))) or [out[1]]
    cuts = crossed(bricks_in(out, widths), groups=(1, 2, 3, 4), buffers=(1, 2), parts=(1, 2, 3, 4, 6))
    many = -(-description.sequence.channels(0) // 16) > KEPT_STEPS

    def suits(rows: Columns) -> Any:
        geometry = _geometry(description, Plan(**rows))
        warps, shares = geometry.plan.warps * geometry.plan.groups, geometry.plan.parts * geometry.plan.groups
        return (warps >= 2) & (warps <= _WARPS) & (shares <= geometry.chunks) & (geometry.turns <= _TURNS)

    def placed() -> Iterator[Columns]:
        for rows in sharing(kept(cuts, suits), many):
            yield {**rows, "resident": _geometry(description, Plan(**rows)).resident(device)}

    return kept(placed(), lambda rows: rows["resident"] > 0)


def _geometry(description: Description, plan: Plan) -> _Geometry:
    expansion, depthwise = description.sequence.layers
    channels = description.sequence.channels(0), depthwise.out_channels
    silus = expansion.activation == "silu", depthwise.activation == "silu"
    return _Geometry(*channels, depthwise.stride[0], depthwise.kernel[0], silus, plan)


def _name(geometry: _Geometry) -> str:
    plan = geometry.plan
    return (
        f"k{geometry.window}_s{geometry.stride}_{plan.height}x{plan.width}{'n' if plan.narrow else 'w'}_t{plan.tiles}"
        f"_g{plan.groups}_b{plan.buffers}_r{plan.resident}_m{plan.together}_p{plan.parts}"
    )


def _pack(geometry: _Geometry, dtype: torch.dtype, parameters: List[Parameters]) -> Tensor:
    """The layers' weights in the order in which the kernel's lanes read them.

    Hidden channels come in the order in which a lane's results over two octets are neighbours.
    """
    places = neighbours_of_16(geometry.chunks * CHUNK)

    def placed(layer: Parameters) -> Parameters:
        weight = layer.weight.new_zeros(len(places), *layer.weight.shape[1:])
        weight[: geometry.hidden] = layer.weight
        order = places.to(weight.device)
        if layer.bias is None:
            return Parameters(weight[order], None)
        bias = layer.bias.new_zeros(len(places))
        bias[: geometry.hidden] = layer.bias
        return Parameters(weight[order], bias[order])

    expansion, depthwise = (placed(one) for one in parameters)
    return packed(
        geometry.stage_sizes, geometry.stage_weights(dtype, expansion, depthwise), parameters[0].weight.device
    )
