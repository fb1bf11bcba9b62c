"""Bottlenecks: 1×1, 3×3, 1×1 and the input added, in one persistent kernel that keeps all weights in shared memory.

That bounds the channels: 256-64-64-256 (ResNet-50's first stage) takes 136 KiB of weights.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels.compile import device_text
from joulemark.merged.kernels.description import Description
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.kernel import Kernel
from joulemark.merged.kernels.lane_weights import as_bytes, bias_bytes, neighbours, product_fragments
from joulemark.merged.kernels.seconds import Counts, cheapest, counts_by_output
from joulemark.merged.kernels.tiling import Tiled
from joulemark.merged.sequence import Conv, Shape

_ACTIVATIONS = ("none", "relu", "relu6", "silu")
CAPACITY = 227 * 1024  # of a block on sm_90 and later; CUDA C++ Programming Guide, table of compute capabilities


@dataclass(frozen=True)
class Plan(Tiled):
    """How a bottleneck is cut.

    Args:
        height: of a brick of the output.
        width: of a brick of the output.
        tiles: of 16 positions, one above the other, that a warp computes.
        groups: of warps, which take bricks independently of each other.
        narrow: a tile is 8 positions in each of two rows, not 16 in one.
        together: tiles of pixels that share each load of the first layer's weights.
    """

    height: int
    width: int
    tiles: int
    groups: int = 2
    narrow: bool = False
    together: int = 2


@dataclass(frozen=True)
class _Geometry:
    """What follows from the layers and the plan; the kernel's text derives the same from the same constants."""

    channels: int
    middle: int
    plan: Plan

    @property
    def plane_pixels(self) -> int:
        tiles = -(-(self.plan.height + 2) * (self.plan.width + 2) // 16)
        return tiles * 16 + 2  # 16-byte stores of a warp to four octets fall on different banks

    @property
    def slack(self) -> int:
        """Bytes behind the last octet that tiles with columns to spare read (and do not use)."""
        plan, pitch = self.plan, self.plan.width + 2
        corner = (plan.height - plan.tiles * plan.tile[0]) * pitch + (plan.strips - 1) * plan.tile[1]
        rows = plan.tile[0] * (plan.tiles - 1) + 2
        last = corner + 7 + (pitch if plan.narrow else 8) + rows * pitch + 2
        return 16 * max(0, last + 1 - self.plane_pixels)

    @property
    def offsets(self) -> dict[str, int]:
        """Of the parts of the packed weights, bytes; ``weights`` is the size of those kept in shared memory."""
        outer, convolve = self.channels * self.middle * 2, 9 * self.middle * self.middle * 2
        biases = 2 * outer + convolve
        return {
            "reduce_at": 0,
            "convolve_at": outer,
            "widen_at": outer + convolve,
            "weights": biases,
            "reduce_bias_at": biases,
            "convolve_bias_at": biases + 4 * self.middle,
            "widen_bias_at": biases + 8 * self.middle,
        }

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return self.offsets["weights"] + self.plan.groups * (self.middle * 2 * self.plane_pixels + self.slack)

    def fits(self, device: Device) -> bool:
        """Whether shared memory and registers suffice.

        NVRTC 13 for sm_90a: two tiles that share weights keep all in registers with 8 warps and spill 15 to 26 with
        12 to 16, where one tile spills none; each that shares them alone spills five at most.
        """
        plan = self.plan
        wanted = 76 + plan.tiles * self.middle // 2 + 20 * (plan.together - 1) * min(plan.tiles, 2)  # about
        warps = plan.warps * plan.groups
        return 2 <= warps <= 16 and self.shared <= device.block_shared and warps * 32 * wanted <= device.registers

    def counts(self, out: Shape, batch: int, device: Device) -> Counts:
        """What the busiest multiprocessor does: work of all its groups, waits of one brick after another."""
        plan, steps = self.plan, self.middle // 16
        tiles = plan.strips * plan.height // plan.tile[0]
        turns = ceil(ceil((plan.height + 2) * (plan.width + 2) / 16) / plan.warps)
        outer = self.channels // 16 * steps
        reduced, taps, widened = turns * plan.warps * outer, tiles * 9 * steps * steps, tiles * outer
        bricks = batch * -(-out[0] // plan.height) * -(-out[1] // plan.width)
        rounds = -(-bricks // (device.multiprocessors * plan.groups))
        each = rounds * min(plan.groups, -(-bricks // device.multiprocessors))
        return {
            "product": each * 2 * (reduced + taps + widened),
            "weights": each * (reduced / plan.together + (taps + widened) / plan.tiles),
            "pixels": each * tiles * 9 * steps,
            "product_in_turn": rounds * (reduced + taps + widened) / plan.warps,
            "round": rounds,
            "round_bare": rounds / plan.groups,
            "launch": 1,
        }


def unsuited(description: Description) -> str | None:
    """Why a sequence is no bottleneck that this kernel computes; None if it is one."""
    layers = description.sequence.layers
    if description.format not in ("bf16", "fp16"):
        return f"no bottleneck in {description.format}"
    if description.sequence.dimensions != 2 or len(layers) != 3 or description.adds:
        return "a bottleneck has three layers in two dimensions"
    if any(one.activation not in _ACTIVATIONS for one in layers):
        return f"activations are {', '.join(_ACTIVATIONS)}"
    if [one.is_pointwise for one in layers] != [True, False, True] or not _is_3x3(layers[1]):
        return "a bottleneck is 1×1, 3×3 (stride 1, padding 1), 1×1, without groups"
    if layers[0].residual is not None or layers[1].residual is not None or layers[2].residual not in (None, 0):
        return "only the last layer adds, and only the sequence's input"
    if layers[2].adds_behind:
        return "a bottleneck adds before its last activation"
    if any(one.joined is not None for one in layers):
        return "only products of warpgroups join the input's channels to those inside"
    channels = [description.sequence.channels(n) for n in range(4)]
    if channels[0] != channels[3] or channels[1] != channels[2] or any(one % 32 for one in channels):
        return f"channels must be multiples of 32, equal at both ends and inside: got {channels}"
    least = _Geometry(channels[0], channels[1], Plan(2, 16, 1, groups=1))
    if least.shared > CAPACITY:
        return f"its weights take {least.offsets['weights']} bytes, more than shared memory holds"
    return None


def _is_3x3(layer: Conv) -> bool:
    shape = layer.kernel, layer.stride, layer.padding, layer.dilation, layer.groups
    return shape == ((3, 3), (1, 1), (1, 1), (1, 1), 1)


def bottleneck(description: Description, plan: Plan) -> Kernel:
    """The kernel of a bottleneck.

    Raises:
        ValueError: the sequence is none, or the plan does not fit together.
    """
    why = unsuited(description)
    if why:
        raise ValueError(f"{description} cannot be merged as a bottleneck: {why}")
    layers = description.sequence.layers
    geometry = _Geometry(layers[0].in_channels, layers[0].out_channels, plan)
    if plan.height % (plan.tiles * plan.tile[0]):
        raise ValueError(f"a brick of {plan.height} rows is no whole number of {plan.tiles} tiles of {plan.tile[0]}")
    if plan.warps * plan.groups > 32 or geometry.shared > CAPACITY:
        raise ValueError(f"{plan} takes {plan.warps * plan.groups} warps and {geometry.shared} bytes of shared memory")
    form = "n" if plan.narrow else "w"
    name = f"bottleneck_{description}_{plan.height}x{plan.width}{form}_t{plan.tiles}_g{plan.groups}_m{plan.together}"

    return Kernel(
        name,
        description,
        _source(name, description, geometry),
        plan.warps * plan.groups * 32,
        geometry.shared,
        (plan.height, plan.width),
        partial(_pack, geometry, description.dtype),
        persistent=1,
        counts=partial(counts_by_output, geometry, description),
    )


def candidates(description: Description, size: Shape, batch: int, device: Device, limit: int = 8) -> list[Plan]:
    """Plans worth a trial for inputs of ``size``, the most promising first; none where no plan fits the device.

    Raises:
        ValueError: the sequence is no bottleneck.
    """
    why = unsuited(description)
    if why:
        raise ValueError(f"{description} cannot be merged as a bottleneck: {why}")
    out = description.sequence.sizes(size)[-1]
    channels, middle = description.sequence.channels(0), description.sequence.channels(1)
    widths = sorted({-(-out[1] // n) for n in range(1, 9)} & set(range(4, 65)))
    ways = product(widths, (False, True), (1, 2, 3, 4), (1, 2, 4, 7), (1, 2, 3, 4), (1, 2))
    plans = (
        Plan(tiles * blocks * (2 if narrow else 1), width, tiles, groups, narrow, together)
        for width, narrow, tiles, blocks, groups, together in ways
    )
    fitting = (one for one in plans if one.height <= out[0] + 3 and _Geometry(channels, middle, one).fits(device))
    return cheapest(
        "bottleneck",
        fitting,
        lambda plan: _Geometry(channels, middle, plan).counts(out, batch, device),
        limit,
        lambda plan: (plan.width * plan.height, plan.tiles, plan.groups),
    )


def _source(name: str, description: Description, geometry: _Geometry) -> str:
    plan, layers = geometry.plan, description.sequence.layers
    constants = {
        "CHANNELS": geometry.channels,
        "MIDDLE": geometry.middle,
        "BRICK_HEIGHT": plan.height,
        "BRICK_WIDTH": plan.width,
        "TILES": plan.tiles,
        "GROUPS": plan.groups,
        "TOGETHER": plan.together,
        "THREADS": plan.warps * plan.groups * 32,
        "PLANE_PIXELS": geometry.plane_pixels,
        "SLACK": geometry.slack,
        **{part.upper(): offset for part, offset in geometry.offsets.items()},
    }
    flags = {"NARROW": plan.narrow, "RESIDUAL": layers[2].residual is not None}
    stages = zip(("REDUCE", "CONVOLVE", "WIDEN"), layers, strict=True)
    return "\n".join(
        [
            f"using Element = {description.format};",
            *(f"constexpr int {key} = {value};" for key, value in constants.items()),
            *(f"constexpr bool {key} = {str(value).lower()};" for key, value in flags.items()),
            device_text("octets.cuh"),
            *(f"constexpr Activation {stage}_ACTIVATION = {layer.activation.upper()};" for stage, layer in stages),
            device_text("bottleneck.cuh"),
            f"KERNEL({name}, THREADS, 1) {{ bottleneck(a); }}",
            "",
        ]
    )


def _pack(geometry: _Geometry, dtype: torch.dtype, parameters: List[Parameters]) -> Tensor:
    """The layers' weights in the order in which the kernel's lanes read them.

    The input channels of the first layer, and the output channels of first and last, go by :func:`neighbours`.
    """
    first, middle, last = parameters
    device = first.weight.device
    inner, outer = (neighbours(n).to(device) for n in (geometry.middle, geometry.channels))
    taps = middle.weight.to(dtype).permute(3, 2, 0, 1).flatten(0, 1)  # [column, row] first
    # [9 taps, steps, …] → [steps, 9 taps, …]
    convolved = torch.stack([product_fragments(one, geometry.middle, 16) for one in taps])
    convolved = convolved.view(9, geometry.middle // 16, -1).transpose(0, 1)
    widened = last.weight[:, :, 0, 0].to(dtype)[outer].split(32)
    parts = [
        product_fragments(first.weight[:, :, 0, 0].to(dtype)[inner][:, outer], geometry.channels, 16),
        as_bytes(convolved),
        *(product_fragments(one, geometry.middle, 16) for one in widened),
        bias_bytes(first, geometry.middle),
        bias_bytes(middle, geometry.middle),
        bias_bytes(last, geometry.channels),
    ]
    return torch.cat(parts)
