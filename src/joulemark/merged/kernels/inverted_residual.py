"""Inverted residuals: 1×1 expansion, depthwise 3×3 of stride 1 or 2, 1×1 projection, in one kernel.

Where the expansion is missing (the first block of MobileNetV2) the depthwise reads the input itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels.compile import device_text
from joulemark.merged.kernels.description import Description
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.kernel import Kernel
from joulemark.merged.kernels.lane_weights import as_bytes, diagonal_taps, product_fragments, sum_bytes
from joulemark.merged.kernels.seconds import Counts, cheapest
from joulemark.merged.kernels.tiling import Tiled
from joulemark.merged.sequence import Conv, Shape

CHUNK = 32  # hidden channels at a time
_ACTIVATIONS = ("none", "relu", "relu6", "silu")
_KEPT_STEPS = 4  # of the expansion's weights, in registers over a chunk; more would crowd out the sums
_ALIGNMENT = 16
_SPARED = 8
"""Registers fewer than counted, with which most of the measured kernels were compiled without spills."""


@dataclass(frozen=True)
class Plan(Tiled):
    """How an inverted residual is cut.

    Args:
        height: of a brick of the output.
        width: of a brick of the output.
        tiles: of 16 positions, one above the other, that a warp computes.
        groups: of warps, which take the chunks of hidden channels in turns.
        buffers: 2 lets a warp expand the next chunk while others still read the last one; 1 takes less shared memory.
        resident: blocks of a multiprocessor that registers must suffice for.
        narrow: a tile is 8 positions in each of two rows, not 16 in one.
        together: tiles of pixels that share each load of the expansion's weights.
        parts: blocks that share a brick: each makes a part of the output's channels.
        ahead: a block takes brick after brick and brings the next one's input while it computes.
    """

    height: int
    width: int
    tiles: int
    groups: int = 1
    buffers: int = 2
    resident: int = 1
    narrow: bool = False
    together: int = 1
    parts: int = 1
    ahead: bool = False

    def bricks(self, out: Shape, batch: int) -> int:
        """Of an output of spatial size ``out``."""
        return batch * -(-out[0] // self.height) * -(-out[1] // self.width)


@dataclass(frozen=True)
class _Geometry:
    """What follows from the layers and the plan; the kernel's text derives the same from the same constants."""

    channels_in: int
    hidden: int
    channels_out: int
    stride: int
    expands: bool
    residual: bool
    plan: Plan

    @property
    def chunks(self) -> int:
        return -(-self.hidden // CHUNK)

    @property
    def steps_in(self) -> int:
        return -(-self.channels_in // 16) if self.expands else 2 * self.chunks

    @property
    def pitch(self) -> int:
        return self.stride * (self.plan.width + 2 // self.stride)

    @property
    def pixel_tiles(self) -> int:
        return -(-(self.stride * (self.plan.height - 1) + 3) * self.pitch // 16)

    @property
    def turns(self) -> int:
        """Tiles of pixels that a warp expands."""
        return -(-self.pixel_tiles // self.plan.warps)

    @property
    def plane_pixels(self) -> int:
        # Copies of the neighbouring octets of a pixel fall on different banks.
        return self.pixel_tiles * 16 + (8 // min(8, 2 * self.steps_in) if self.steps_in < 4 else 1)

    @property
    def out_pixels(self) -> int:
        return self.plan.strips * self.plan.tile[1] * self.plan.height + 1

    @property
    def slack(self) -> int:
        """Pixels behind the last octet that tiles with columns to spare read (and do not use)."""
        plan, step = self.plan, self.stride * self.plan.tile[0]
        rows = step * (plan.tiles - 1) + 3
        second = self.stride * self.pitch if plan.narrow else 8
        third = 1 if self.stride == 2 else 2
        corner = (plan.height - plan.tiles * plan.tile[0]) * self.stride * self.pitch
        last = corner + (plan.strips - 1) * plan.tile[1] + 7 + second + third + ((rows - 1) // 2 * 2 + 1) * self.pitch
        return max(0, last + 1 - self.plane_pixels)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        plane, plan = self.plane_pixels * 16, self.plan
        octets_out = self.channels_out // 8 // plan.parts
        given = 2 * self.steps_in * plane * (2 if plan.ahead else 1)
        hidden = plan.groups * plan.buffers * 4 * plane if self.expands else 0
        sums = plan.warps * plan.tiles * octets_out * 512 if plan.groups > 1 else 0
        staged = 0 if self.residual else octets_out * self.out_pixels * 16  # a residual's lies in the input's place
        return max(given + max(hidden, sums) + self.slack * 16, staged)

    @property
    def weight_bytes(self) -> int:
        """Of a chunk's weights, as a block reads them."""
        taps, pairs = 4 * 8 * 48, -(-(self.channels_out // 8 // self.plan.parts) // 2)
        return (self.steps_in * 1024 if self.expands else 0) + taps + 2 * pairs * 512

    @property
    def stages_in_place(self) -> bool:
        """Whether the output has room where the input of its brick was."""
        staged = self.channels_out // 8 // self.plan.parts * self.out_pixels
        return self.residual or staged <= 2 * self.steps_in * self.plane_pixels

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
        if wanted > 252 or self.shared > device.block_shared:
            return 0
        # Each of the four schedulers has a quarter of the registers for its warps.
        of_scheduler = device.registers // 4 // 32 // (-(-(wanted - spared) // 8) * 8)
        by_registers = 4 * of_scheduler // warps
        return min(by_registers, device.shared // (self.shared + 1024), 8)

    def counts(self, out: Shape, batch: int, device: Device) -> Counts:
        """What the busiest multiprocessor does: throughput of all its blocks, waits of one after another."""
        plan = self.plan
        blocks = plan.parts * plan.bricks(out, batch)
        each = -(-blocks // device.multiprocessors)
        beside = min(plan.resident, each)  # blocks, which hide a part of each other's beginning and end
        rounds = each / beside
        tiles, octets = plan.strips * plan.height // plan.tile[0], self.channels_out // 8 // plan.parts
        expanded = self.chunks * self.turns * plan.warps if self.expands else 0
        own = -(-self.chunks // plan.groups)  # chunks of a warp
        steps = own * -(-self.turns // plan.together) * (self.steps_in + 1) if self.expands else 0
        taken = self.pixel_tiles * 2 * self.channels_in
        again = 1 if self.steps_in <= _KEPT_STEPS else -(-self.turns // plan.together)
        loads = 2 * self.steps_in * again * plan.warps if self.expands else 0  # of a chunk's weights of the expansion
        return {
            "expand_product": each * expanded * 4 * self.steps_in,
            "expand_tile": each * expanded,
            "depthwise_tile": each * self.chunks * 4 * tiles,
            "depthwise_octet": each * self.chunks * 4 * plan.warps,
            "project_product": each * self.chunks * 2 * octets * tiles,
            "weight_load": each * self.chunks * loads,
            "weights": each * self.chunks * self.weight_bytes,
            "chunk": each * (taken + plan.height * plan.width * octets * (1 + self.residual)),
            "expand_step": rounds * steps,
            "octet_in_turn": rounds * own * 4,
            "load_in_turn": rounds * taken / (plan.warps * plan.groups),
            "round": 1 if plan.ahead else rounds,
            "round_ahead": rounds - 1 if plan.ahead else 0,
            "round_bare": rounds / beside,
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
    if any(one.activation not in _ACTIVATIONS for one in layers):
        return f"activations are {', '.join(_ACTIVATIONS)}"
    if not _is_depthwise(depthwise) or not all(one.is_pointwise for one in (*expansion, projection)):
        return "an inverted residual is 1×1, depthwise 3×3 (stride 1 or 2, padding 1), 1×1"
    if any(one.residual is not None for one in layers[:-1]) or projection.residual not in (None, 0):
        return "only the projection adds, and only the sequence's input"
    if any(description.sequence.channels(n) % 8 for n in (0, len(layers))):
        return "channels of input and output must be multiples of 8"
    return None


def _is_depthwise(layer: Conv) -> bool:
    shape = layer.kernel, layer.padding, layer.dilation
    return (
        shape == ((3, 3), (1, 1), (1, 1))
        and layer.stride in ((1, 1), (2, 2))
        and layer.groups == layer.in_channels == layer.out_channels
    )


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

    def pack(parameters: List[Parameters]) -> Tensor:
        return _pack(geometry, description.dtype, parameters)

    return Kernel(
        name,
        description,
        _source(name, description, geometry),
        plan.warps * plan.groups * 32,
        geometry.shared,
        (plan.height, plan.width),
        pack,
        persistent=plan.resident if plan.ahead else None,
        parts=plan.parts,
        counts=lambda size, batch, device: geometry.counts(description.sequence.sizes(size)[-1], batch, device),
    )


def _source(name: str, description: Description, geometry: _Geometry) -> str:
    plan = geometry.plan
    offsets, _ = _layout(geometry)
    constants = {
        "CHANNELS_IN": geometry.channels_in,
        "CHUNKS": geometry.chunks,
        "CHANNELS_OUT": geometry.channels_out,
        "STRIDE": geometry.stride,
        "BRICK_HEIGHT": plan.height,
        "BRICK_WIDTH": plan.width,
        "TILES": plan.tiles,
        "GROUPS": plan.groups,
        "BUFFERS": plan.buffers,
        "TOGETHER": plan.together,
        "PARTS": plan.parts,
        "KEPT_STEPS": _KEPT_STEPS,
        "THREADS": plan.warps * plan.groups * 32,
        "PLANE_PIXELS": geometry.plane_pixels,
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
            f"using Element = {description.format};",
            *(f"constexpr int {key} = {value};" for key, value in constants.items()),
            *(f"constexpr bool {key} = {str(value).lower()};" for key, value in flags.items()),
            device_text("octets.cuh"),
            *(f"constexpr Activation {stage}_ACTIVATION = {one};" for stage, one in named),
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
    fitting = (
        replace(plan, resident=resident)
        for plan in _all_plans(description, out)
        for resident in sorted({_geometry(description, plan).resident(device, spared) for spared in (0, _SPARED)})
        if resident and (not plan.ahead or plan.bricks(out, batch) > resident * device.multiprocessors)
    )
    return cheapest(
        "inverted_residual",
        fitting,
        lambda plan: _geometry(description, plan).counts(out, batch, device),
        limit,
        lambda plan: (plan.width * plan.height, plan.tiles, plan.groups, plan.parts, plan.together, plan.ahead),
    )


def _all_plans(description: Description, out: Shape) -> Iterator[Plan]:
    """Every way to cut that the kernel can be generated for."""
    channels = description.sequence.channels(len(description.sequence.layers))
    expands = len(description.sequence.layers) == 3
    widths = sorted({-(-out[1] // n) for n in range(1, 9)} & set(range(4, 65)))
    splits = [n for n in (1, 2, 4) if n == 1 or channels % (16 * n) == 0]
    steps = -(-description.sequence.channels(0) // 16)
    shared = (1, 2, 3) if expands and steps > _KEPT_STEPS else (0,)  # 0: as many as there are registers for
    ways = product(widths, (False, True), (1, 2, 4, 7), (1, 2, 3, 4, 7), (1, 2, 3, 4), (1, 2), splits, shared)
    for width, narrow, tiles, blocks, groups, buffers, parts, together in ways:
        height = tiles * blocks * (2 if narrow else 1)
        plan = Plan(height, width, tiles, groups, buffers, 1, narrow, together or (1 if tiles > 1 else 2), parts)
        geometry = _geometry(description, plan)
        useful = height <= out[0] + (1 if narrow else 3) and (expands or (groups == 1 and buffers == 2))
        if useful and 2 <= plan.warps * groups <= 16 and groups <= geometry.chunks and geometry.turns <= 16:
            yield plan
            # One group: several small blocks side by side beat one with more warps.
            ahead = replace(plan, ahead=True)
            if groups == parts == 1 and _geometry(description, ahead).stages_in_place:
                yield ahead


def _geometry(description: Description, plan: Plan) -> _Geometry:
    *expansion, depthwise, projection = description.sequence.layers
    return _Geometry(
        description.sequence.channels(0),
        depthwise.out_channels,
        projection.out_channels,
        depthwise.stride[0],
        bool(expansion),
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


def _layout(geometry: _Geometry) -> tuple[dict[str, int], int]:
    """Offsets of the parts of the packed weights, bytes, and their total."""
    chunks, pairs = geometry.chunks, -(-geometry.channels_out // 16)
    parts = {
        "expand": chunks * geometry.steps_in * 1024 if geometry.expands else 0,
        "depthwise": chunks * 4 * 8 * 48,
        "project": chunks * 2 * pairs * 512,
        "expand_bias": chunks * CHUNK * 8,
        "depthwise_bias": chunks * CHUNK * 8,
        "project_bias": pairs * 128,
    }
    offsets, total = {}, 0
    for part, size in parts.items():
        offsets[part] = total
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, total


def _pack(geometry: _Geometry, dtype: torch.dtype, parameters: List[Parameters]) -> Tensor:
    """The layers' weights in the order in which the kernel's lanes read them."""
    *expansion, depthwise, projection = parameters
    hidden = geometry.chunks * CHUNK
    offsets, total = _layout(geometry)
    parts = {
        "depthwise": diagonal_taps(depthwise.weight[:, 0].to(dtype), hidden),
        "project": product_fragments(projection.weight[:, :, 0, 0].to(dtype), hidden, 16),
        "depthwise_bias": sum_bytes(depthwise, hidden),
        "project_bias": sum_bytes(projection, geometry.channels_out),
    }
    if expansion:
        # [chunks, 32 channels, …]: the steps over the input channels of one chunk follow each other.
        weight = expansion[0].weight[:, :, 0, 0].to(dtype)
        whole = weight.new_zeros(hidden, weight.shape[1])
        whole[: weight.shape[0]] = weight
        chunks = [product_fragments(one, 16 * geometry.steps_in, CHUNK) for one in whole.split(CHUNK)]
        parts["expand"] = torch.cat(chunks)
        parts["expand_bias"] = sum_bytes(expansion[0], hidden)
    packed = torch.zeros(total, dtype=torch.uint8, device=depthwise.weight.device)
    for name, part in parts.items():
        packed[offsets[name] : offsets[name] + part.numel()] = as_bytes(part)
    return packed
