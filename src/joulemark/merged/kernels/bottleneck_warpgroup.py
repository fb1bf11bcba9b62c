"""Bottlenecks with 64 channels inside by the products of warpgroups, for compute capability 9.0.

Those that keep their channels add their input; those that change them add a pointwise convolution of it, a part of the
last layer: that joins the input's channels to those inside.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels import bottleneck
from joulemark.merged.kernels.compile import device_text
from joulemark.merged.kernels.description import Description
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.kernel import Kernel
from joulemark.merged.kernels.lane_weights import as_bytes, bias_bytes, neighbours
from joulemark.merged.kernels.seconds import varied
from joulemark.merged.kernels.warpgroup import vocabulary
from joulemark.merged.sequence import Sequence, Shape

_MIDDLE = 64
_BEHIND = {(1, 4): 1.0, (1, 2): 1.15}
_OTHERS_BEHIND = 1.5
"""Groups and warpgroups of each: time over that of four which share a brick, for as many products."""


@dataclass(frozen=True)
class Plan:
    """How a bottleneck is cut.

    Args:
        height: of a brick of the output.
        width: of a brick of the output.
        groups: of warpgroups, which take bricks independently of each other.
        warpgroups: of a group, which share the tiles of a brick.
    """

    height: int
    width: int
    groups: int = 2
    warpgroups: int = 2

    @property
    def pitch(self) -> int:
        """Positions from a row to the next."""
        return self.width + 2

    @property
    def tiles(self) -> int:
        """Of 64 output positions."""
        return -(-self.height * self.pitch // 64)

    @property
    def plane_pixels(self) -> int:
        """Pixels that an octet of the brick has room for."""
        reduced = -(-(self.height + 2) * self.pitch // 64) * 64
        # Two more than a multiple of 8: 16-byte stores of a warp to four octets fall on different banks.
        return max(reduced, 64 * self.tiles + 2 * self.pitch + 2) // 8 * 8 + 10

    def products(self, width: _Width) -> int:
        """Products of a warpgroup, of depth 16, that a brick takes; its slowest warpgroup counts for all."""
        reduced = -(-(self.height + 2) * self.pitch // 64)
        turns = [-(-tiles // self.warpgroups) * self.warpgroups for tiles in (reduced, self.tiles)]
        return turns[0] * width.inputs // 16 + turns[1] * (36 + width.widened // 16 * (width.outputs // 64))

    def shared(self, width: _Width) -> int:
        """Bytes of shared memory of a block."""
        return width.weights + self.groups * _MIDDLE * 2 * self.plane_pixels


@dataclass(frozen=True)
class _Width:
    """Channels in front of a bottleneck and behind it, and of its last layer's input, joined ones among them."""

    inputs: int
    outputs: int
    widened: int

    @property
    def convolve_at(self) -> int:
        """Bytes of the first layer's weights."""
        return 2 * self.inputs * _MIDDLE

    @property
    def widen_at(self) -> int:
        """Bytes of the weights of the first and the second layer."""
        return self.convolve_at + 2 * 9 * _MIDDLE * _MIDDLE

    @property
    def weights(self) -> int:
        """Bytes of all of them."""
        return self.widen_at + 2 * self.widened * self.outputs


def _width_of(description: Description) -> _Width:
    first, _, last = description.sequence.layers
    return _Width(first.in_channels, last.out_channels, last.in_channels)


def unsuited(description: Description) -> str | None:
    """Why a sequence is no bottleneck that this kernel computes; None if it is one."""
    layers = description.sequence.layers
    joined = len(layers) == 3 and layers[2].joined == 0
    why = bottleneck.unsuited(_without_join(description) if joined else description)
    if why:
        return why
    width, middle = _width_of(description), layers[1].in_channels
    if middle != _MIDDLE or width.outputs % 64 or width.inputs % 32:
        return f"the products of warpgroups take {_MIDDLE} channels inside, a multiple of 64 outside"
    if Plan(2, 8, 1, 1).shared(width) > bottleneck.CAPACITY:
        return f"its weights take {width.weights} bytes, more than shared memory holds"
    return None


def _without_join(description: Description) -> Description:
    """The same with as many channels in front as behind and the input added: what else it has to be is the same."""
    first, middle, last = description.sequence.layers
    around = replace(last, in_channels=middle.out_channels, joined=None)
    plain = Sequence((replace(first, in_channels=last.out_channels), middle, around))
    return replace(description, sequence=plain)


def bottleneck_warpgroup(description: Description, plan: Plan) -> Kernel:
    """The kernel of a bottleneck.

    Raises:
        ValueError: the sequence is none, or the plan does not fit together.
    """
    why = unsuited(description)
    if why:
        raise ValueError(f"{description} cannot be merged as a bottleneck: {why}")
    width = _width_of(description)
    if plan.warpgroups > plan.tiles or plan.groups * plan.warpgroups > 8:
        raise ValueError(f"{plan.groups} · {plan.warpgroups} warpgroups for {plan.tiles} tiles: at most 8, one a tile")
    if plan.shared(width) > bottleneck.CAPACITY:
        raise ValueError(f"{plan} takes {plan.shared(width)} bytes of shared memory")
    joined = "_joined" if description.sequence.layers[2].joined is not None else ""
    name = f"bottleneck_{description}{joined}_{plan.height}x{plan.width}_g{plan.groups}_w{plan.warpgroups}"

    return Kernel(
        name,
        description,
        _source(name, description, plan),
        plan.groups * plan.warpgroups * 128,
        plan.shared(width),
        (plan.height, plan.width),
        partial(_pack, description.dtype),
        persistent=1,
        least=90,
        only=90,
    )


def candidates(description: Description, size: Shape, batch: int, device: Device, limit: int = 6) -> list[Plan]:
    """Plans worth a trial for inputs of ``size``, the most promising first; none where no plan fits the device.

    They are ranked by the products that the busiest multiprocessor makes, times how far plans of as many products
    stayed behind on an H200: 256-64-64-256 at 56² took 60 and 113 µs (32 and 64 images) where four warpgroups share a
    brick of 14×14, 69 µs (32) where two do, 168 µs (64) where two share each of two. Of each kind the best goes first.

    Raises:
        ValueError: the sequence is no bottleneck that this kernel computes.
    """
    why = unsuited(description)
    if why:
        raise ValueError(f"{description} cannot be merged as a bottleneck: {why}")
    out, channels = description.sequence.sizes(size)[-1], _width_of(description)
    widths = sorted({-(-out[1] // n) for n in range(1, 9)} & set(range(4, 65)))
    ranked = []
    for width, height, groups, warpgroups in product(widths, (2, 4, 6, 7, 8, 12, 14, 16), (1, 2, 3, 4), (1, 2, 4)):
        plan = Plan(height, width, groups, warpgroups)
        room = plan.shared(channels) <= device.block_shared and 2 <= groups * warpgroups <= 4
        if room and height <= out[0] and warpgroups <= plan.tiles:
            bricks = batch * -(-out[0] // height) * -(-out[1] // width)
            rounds = -(-bricks // (device.multiprocessors * groups))
            behind = _BEHIND.get((groups, warpgroups), _OTHERS_BEHIND)
            ranked.append((rounds * groups * plan.products(channels) * behind, -groups * warpgroups, plan))
    ranked.sort(key=lambda one: one[:2])
    return varied((plan for *_, plan in ranked), lambda plan: (plan.groups, plan.warpgroups))[:limit]


def _source(name: str, description: Description, plan: Plan) -> str:
    layers = description.sequence.layers
    width = _width_of(description)
    constants = {
        "INPUTS": width.inputs,
        "CHANNELS": width.outputs,
        "BRICK_HEIGHT": plan.height,
        "BRICK_WIDTH": plan.width,
        "GROUPS": plan.groups,
        "WARPGROUPS": plan.warpgroups,
        "THREADS": plan.groups * plan.warpgroups * 128,
        "PLANE_PIXELS": plan.plane_pixels,
        "REDUCE_AT": 0,
        "CONVOLVE_AT": width.convolve_at,
        "WIDEN_AT": width.widen_at,
        "WEIGHTS": width.weights,
        "REDUCE_BIAS_AT": width.weights,
        "CONVOLVE_BIAS_AT": width.weights + 4 * _MIDDLE,
        "WIDEN_BIAS_AT": width.weights + 8 * _MIDDLE,
    }
    stages = zip(("REDUCE", "CONVOLVE", "WIDEN"), layers, strict=True)
    return "\n".join(
        [
            f"using Element = {description.format};",
            *(f"constexpr int {key} = {value};" for key, value in constants.items()),
            f"constexpr bool RESIDUAL = {str(layers[2].residual is not None).lower()};",
            f"constexpr bool JOINED = {str(layers[2].joined is not None).lower()};",
            vocabulary(description.format, registers=[_MIDDLE], shared=[_MIDDLE]),
            device_text("octets.cuh"),
            *(f"constexpr Activation {stage}_ACTIVATION = {layer.activation.upper()};" for stage, layer in stages),
            device_text("bottleneck_warpgroup.cuh"),
            f"KERNEL({name}, THREADS, 1) {{ bottleneck(a); }}",
            "",
        ]
    )


def _pack(dtype: torch.dtype, parameters: List[Parameters]) -> Tensor:
    """The layers' weights as matrices in shared memory: [octet of inputs][output][8 inputs]."""
    first, middle, last = parameters
    device = first.weight.device
    inputs, inner, outer = (
        neighbours(n).to(device) for n in (first.weight.shape[1], first.weight.shape[0], last.weight.shape[0])
    )

    def octets(weight: Tensor) -> Tensor:
        return as_bytes(weight.to(dtype).unflatten(1, (-1, 8)).transpose(0, 1))

    taps = middle.weight.permute(2, 3, 0, 1).flatten(0, 1)
    # The last layer's input is the second's output, as that lies in registers, and, joined, what the first one reads.
    convolved, joined = last.weight[:, :, 0, 0][outer].tensor_split([_MIDDLE], 1)
    parts = [
        octets(first.weight[:, :, 0, 0][inner][:, inputs]),
        *(octets(one) for one in taps),
        octets(torch.cat([convolved, joined[:, inputs] if joined.shape[1] else joined], 1)),
        bias_bytes(first, first.weight.shape[0]),
        bias_bytes(middle, middle.weight.shape[0]),
        bias_bytes(last, last.weight.shape[0]),
    ]
    return torch.cat(parts)
