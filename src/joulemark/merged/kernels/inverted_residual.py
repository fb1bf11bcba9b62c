"""Inverted residuals: 1×1 expansion, depthwise 3×3 of stride 1 or 2, 1×1 projection, in one kernel.

Where the expansion is missing (the first block of MobileNetV2) the depthwise reads the input itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels.columns import Columns, crossed, kept, larger, smaller, where
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
from joulemark.merged.kernels.lane_weights import product_fragments, sum_bytes
from joulemark.merged.kernels.seconds import Counts, cheapest_of, counts_by_output
from joulemark.merged.kernels.tiling import for_residents
from joulemark.merged.sequence import Shape

_SPARED = 8
"""Registers fewer than counted, with which most of the measured kernels were compiled without spills."""


@dataclass(frozen=True)
class Plan(Cut):
    """How an inverted residual is cut; each part of a brick makes a part of the output's channels.

    Args:
        ahead: a block takes brick after brick and brings the next one's input while it computes.
    """

    ahead: bool = False


@dataclass(frozen=True)
class _Geometry(Expanding):
    """What follows from the layers and the plan; the kernel's text derives the same from the same constants."""

    channels_in: int
    hidden: int
    channels_out: int
    stride: int
    expands: bool
    silus: tuple[bool, bool]
    residual: bool
    plan: Plan
    window = 3

    @cached_property
    def out_pixels(self) -> int:
        return self.plan.strips * self.plan.tile[1] * self.plan.height + 1

    @cached_property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        plan = self.plan
        octets_out = self.channels_out // 8 // plan.parts
        given = self.input_bytes * where(plan.ahead, 2, 1)
        sums = where(plan.groups > 1, plan.warps * plan.tiles * octets_out * 512, 0)
        staged = 0 if self.residual else octets_out * self.out_pixels * 16  # a residual's lies in the input's place
        return larger(given + larger(self.hidden_bytes, sums) + self.slack * 16, staged)

    @property
    def weight_bytes(self) -> int:
        """Of a chunk's weights, as a block reads them."""
        pairs = -(-(self.channels_out // 8 // self.plan.parts) // 2)
        return self.stage_weight_bytes + 2 * pairs * 512

    @property
    def stages_in_place(self) -> bool:
        """Whether the output has room where the input of its brick was."""
        staged = self.channels_out // 8 // self.plan.parts * self.out_pixels
        return self.residual or staged <= 2 * self.steps_in * self.plane_pixels

    @property
    def kind(self) -> tuple[object, ...]:
        """Of its plan: few of a kind are worth a trial."""
        plan = self.plan
        return plan.width * plan.height, plan.tiles, plan.groups, plan.parts, plan.together, plan.ahead

    def resident(self, device: Device, spared: int = 0) -> int:
        """Blocks of a multiprocessor that shared memory and registers suffice for; 0 where none fits.

        Args:
            spared: registers that the compiler is asked to do without.
        """
        plan = self.plan
        sums = plan.tiles * self.channels_out // 2 // plan.parts
        held = 8 * min(self.steps_in, 6) if self.expands else 0  # weights of the expansion
        wanted = 52 + 6 * plan.ahead + 10 * plan.tiles + sums + held + 16 * (plan.together - 1)  # registers, about
        warps = plan.warps * plan.groups
        fits = (wanted <= 252) & (self.shared <= device.block_shared)
        # Each of the four schedulers has a quarter of the registers for its warps.
        of_scheduler = device.registers // 4 // 32 // (-(-(wanted - spared) // 8) * 8)
        by_registers = 4 * of_scheduler // warps
        return fits * smaller(by_registers, device.shared // (self.shared + 1024), 8)

    def counts(self, out: Shape, batch: int, device: Device) -> Counts:
        """What the busiest multiprocessor does: throughput of all its blocks, waits of one after another."""
        plan = self.plan
        blocks = plan.parts * plan.bricks(out, batch)
        each = -(-blocks // device.multiprocessors)
        beside = smaller(plan.resident, each)  # blocks, which hide a part of each other's beginning and end
        rounds, whole = each / beside, -(-each // beside)
        tiles, octets = plan.strips * plan.height // plan.tile[0], self.channels_out // 8 // plan.parts
        taken = self.pixel_tiles * 2 * self.channels_in
        stage = self.stage_counts(each, whole, self.chunks)
        return {
            **stage,
            "depthwise_bare": stage["depthwise_tile"] / beside,
            "project_product": each * self.chunks * 2 * octets * tiles,
            "weights": each * self.chunks * self.weight_bytes,
            "chunk": each * (taken + plan.height * plan.width * octets * (1 + self.residual)),
            "round": where(plan.ahead, 1, rounds),
            "round_ahead": where(plan.ahead, rounds - 1, 0),
            "round_bare": rounds / beside,
            "round_partial": whole - rounds,
            "warp": each * plan.warps * plan.groups,
            "launch": 1,
        }


def unsuited(description: Description) -> str | None:
    """Why a sequence is no inverted residual that this kernel computes; None if it is one."""
    layers = description.sequence.layers
    if description.format not in ("bf16", "fp16"):
        return f"no inverted residual in {description.format}"
    if description.sequence.dimensions != 2 or len(layers) not in (2, 3) or description.adds:
        return "an inverted residual has two or three layers in two dimensions"
    *expansion, depthwise, projection = layers
    if any(one.activation not in ACTIVATIONS for one in layers):
        return f"activations are {', '.join(ACTIVATIONS)}"
    if not is_depthwise(depthwise, (3,)) or not all(one.is_pointwise for one in (*expansion, projection)):
        return "an inverted residual is 1×1, depthwise 3×3 (stride 1 or 2, padding 1), 1×1"
    if any(one.residual is not None for one in layers[:-1]) or projection.residual not in (None, 0):
        return "only the projection adds, and only the sequence's input"
    if projection.adds_behind:
        return "an inverted residual adds before its last activation"
    if any(description.sequence.channels(n) % 8 for n in (0, len(layers))):
        return "channels of input and output must be multiples of 8"
    return None


def inverted_residual(description: Description, plan: Plan) -> Kernel:
    """The kernel of an inverted residual.

    Raises:
        ValueError: the sequence is none, or the plan does not fit together.
    """
    why = unsuited(description)
    if why:
        raise ValueError(f"{description} cannot be merged as an inverted residual: {why}")
    geometry = _geometry(description, plan)
    if plan.height % (plan.tiles * plan.tile[0]):
        raise ValueError(f"a brick of {plan.height} rows is no whole number of {plan.tiles} tiles of {plan.tile[0]}")
    if plan.parts > 1 and geometry.channels_out % (16 * plan.parts):
        raise ValueError(f"{geometry.channels_out} channels do not split into {plan.parts} parts of a multiple of 16")
    if plan.warps * plan.groups > 32 or geometry.turns > 16:
        raise ValueError(
            f"{plan.warps * plan.groups} warps, each with {geometry.turns} tiles to expand: at most 32, 16"
        )
    if plan.ahead and (plan.parts > 1 or not geometry.stages_in_place):
        raise ValueError("inputs are brought ahead where one block makes a brick and the output has room in its place")
    name = f"inverted_residual_{description}_{_name(geometry)}"

    return Kernel(
        name,
        description,
        _source(name, description, geometry),
        plan.warps * plan.groups * 32,
        geometry.shared,
        (plan.height, plan.width),
        partial(_pack, geometry, description.dtype),
        persistent=plan.resident if plan.ahead else None,
        parts=plan.parts,
        counts=partial(counts_by_output, geometry, description),
    )


def _source(name: str, description: Description, geometry: _Geometry) -> str:
    plan = geometry.plan
    offsets, _ = offsets_of(_sizes(geometry))
    constants = {
        **geometry.stage_constants,
        "CHANNELS_OUT": geometry.channels_out,
        "OUT_PLANE_PIXELS": geometry.out_pixels,
        **{f"{part.upper()}_AT": offset for part, offset in offsets.items()},
    }
    flags = {
        "EXPANDS": geometry.expands,
        "RESIDUAL": geometry.residual,
        "NARROW": plan.narrow,
        "AHEAD": plan.ahead,
    }
    activations = [layer.activation.upper() for layer in description.sequence.layers]
    stages = ("EXPAND", "DEPTHWISE", "PROJECT")
    named = zip(stages, ["NONE"] * (3 - len(activations)) + activations, strict=True)
    return "\n".join(
        [
            constants_text(description, constants, flags),
            device_text("octets.cuh"),
            *(f"constexpr Activation {stage}_ACTIVATION = {one};" for stage, one in named),
            device_text("expansion.cuh"),
            device_text("inverted_residual.cuh"),
            f"KERNEL({name}, THREADS, {plan.resident}) {{ inverted_residual(a); }}",
            "",
        ]
    )


def candidates(description: Description, size: Shape, batch: int, device: Device, limit: int = 12) -> list[Plan]:
    """Plans worth a trial for inputs of ``size``, the most promising first.

    Raises:
        ValueError: the sequence is no inverted residual.
    """
    why = unsuited(description)
    if why:
        raise ValueError(f"{description} cannot be merged as an inverted residual: {why}")
    out = description.sequence.sizes(size)[-1]

    def made(sizes: Mapping[str, Any]) -> _Geometry:
        return _geometry(description, Plan(**sizes))

    ranked = cheapest_of(
        "inverted_residual",
        for_residents(_all_cuts(description, out), made, (out, batch, device), _SPARED),
        made,
        lambda geometry: geometry.counts(out, batch, device),
        limit,
        lambda geometry: geometry.kind,
    )
    return [one.plan for one in ranked]


def _all_cuts(description: Description, out: Shape) -> Iterator[Columns]:
    """Every way to cut that the kernel can be generated for."""
    channels = description.sequence.channels(len(description.sequence.layers))
    widths = sorted({-(-out[1] // n) for n in range(1, 9)} & set(range(4, 65)))
    splits = [n for n in (1, 2, 4) if n == 1 or channels % (16 * n) == 0]
    expands = len(description.sequence.layers) == 3
    ways = {"groups": (1, 2, 3, 4), "buffers": (1, 2)} if expands else {"groups": (1,), "buffers": (2,)}
    many = expands and -(-description.sequence.channels(0) // 16) > KEPT_STEPS

    def suits(rows: Columns) -> Any:
        geometry = _geometry(description, Plan(**rows))
        groups, warps = geometry.plan.groups, geometry.plan.warps * geometry.plan.groups
        return (warps >= 2) & (warps <= 16) & (groups <= geometry.chunks) & (geometry.turns <= 16)

    def may_bring(rows: Columns) -> Any:
        # One group: several small blocks side by side beat one with more warps.
        alone = (rows["groups"] == 1) & (rows["parts"] == 1)
        return ~rows["ahead"] | (alone & _geometry(description, Plan(**rows)).stages_in_place)

    cuts = sharing(kept(crossed(bricks_in(out, widths), **ways, parts=splits), suits), many)
    return kept(crossed(cuts, ahead=(False, True)), may_bring)


def _geometry(description: Description, plan: Plan) -> _Geometry:
    *expansion, depthwise, projection = description.sequence.layers
    return _Geometry(
        description.sequence.channels(0),
        depthwise.out_channels,
        projection.out_channels,
        depthwise.stride[0],
        bool(expansion),
        (any(one.activation == "silu" for one in expansion), depthwise.activation == "silu"),
        projection.residual is not None,
        plan,
    )


def _name(geometry: _Geometry) -> str:
    plan = geometry.plan
    form = "n" if plan.narrow else "w"
    return (
        f"s{geometry.stride}_{plan.height}x{plan.width}{form}_t{plan.tiles}_g{plan.groups}"
        f"_b{plan.buffers}_r{plan.resident}_m{plan.together}_p{plan.parts}{'_a' if plan.ahead else ''}"
    )


def _sizes(geometry: _Geometry) -> dict[str, int]:
    """Bytes of the parts of the packed weights."""
    pairs, stages = -(-geometry.channels_out // 16), geometry.stage_sizes
    weights = {one: stages[one] for one in ("expand", "depthwise")}
    return {**weights, "project": geometry.chunks * 2 * pairs * 512, **stages, "project_bias": pairs * 128}


def _pack(geometry: _Geometry, dtype: torch.dtype, parameters: List[Parameters]) -> Tensor:
    """The layers' weights in the order in which the kernel's lanes read them."""
    *expansion, depthwise, projection = parameters
    parts = {
        **geometry.stage_weights(dtype, expansion[0] if expansion else None, depthwise),
        "project": product_fragments(projection.weight[:, :, 0, 0].to(dtype), geometry.chunks * CHUNK, 16),
        "project_bias": sum_bytes(projection, geometry.channels_out),
    }
    return packed(_sizes(geometry), parts, depthwise.weight.device)
