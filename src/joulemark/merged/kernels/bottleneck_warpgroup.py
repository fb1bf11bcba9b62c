"""Bottlenecks with 64 channels inside by the products of warpgroups, for compute capability 9.0."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
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
from joulemark.merged.sequence import Shape

_MIDDLE = 64


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

    def products(self, channels: int) -> int:
        """Products of a warpgroup, of depth 16, that a brick takes; its slowest warpgroup counts for all."""
        reduced = -(-(self.height + 2) * self.pitch // 64)
        turns = [-(-tiles // self.warpgroups) * self.warpgroups for tiles in (reduced, self.tiles)]
        return turns[0] * channels // 16 + turns[1] * (36 + channels // 16)

    def shared(self, channels: int) -> int:
        """Bytes of shared memory of a block."""
        return _weights(channels) + self.groups * _MIDDLE * 2 * self.plane_pixels


def _weights(channels: int) -> int:
    return 2 * (2 * channels * _MIDDLE + 9 * _MIDDLE * _MIDDLE)


def unsuited(description: Description) -> str | None:
    """Why a sequence is no bottleneck that this kernel computes; None if it is one."""
    why = bottleneck.unsuited(description)
    if why:
        return why
    channels, middle = (description.sequence.channels(n) for n in (0, 1))
    if middle != _MIDDLE or channels % 64:
        return f"the products of warpgroups take {_MIDDLE} channels inside, a multiple of 64 outside"
    return None


def bottleneck_warpgroup(description: Description, plan: Plan) -> Kernel:
    """The kernel of a bottleneck.

    Raises:
        ValueError: the sequence is none, or the plan does not fit together.
    """
    why = unsuited(description)
    if why:
        raise ValueError(f"{description} cannot be merged as a bottleneck: {why}")
    channels = description.sequence.channels(0)
    if plan.warpgroups > plan.tiles or plan.groups * plan.warpgroups > 8:
        raise ValueError(f"{plan.groups} · {plan.warpgroups} warpgroups for {plan.tiles} tiles: at most 8, one a tile")
    if plan.shared(channels) > bottleneck.CAPACITY:
        raise ValueError(f"{plan} takes {plan.shared(channels)} bytes of shared memory")
    name = f"bottleneck_{description}_{plan.height}x{plan.width}_g{plan.groups}_w{plan.warpgroups}"

    def pack(parameters: List[Parameters]) -> Tensor:
        return _pack(description.dtype, parameters)

    return Kernel(
        name,
        description,
        _source(name, description, plan),
        plan.groups * plan.warpgroups * 128,
        plan.shared(channels),
        (plan.height, plan.width),
        pack,
        persistent=1,
        least=90,
        only=90,
    )


def candidates(description: Description, size: Shape, batch: int, device: Device, limit: int = 6) -> list[Plan]:
    """Plans worth a trial for inputs of ``size``, the most promising first; none where no plan fits the device.

    They are ranked by the products that the busiest multiprocessor makes. What more warpgroups gain, of which some wait
    for memory while others multiply, was not measured: the best plan of each number of them goes first.

    Raises:
        ValueError: the sequence is no bottleneck that this kernel computes.
    """
    why = unsuited(description)
    if why:
        raise ValueError(f"{description} cannot be merged as a bottleneck: {why}")
    out, channels = description.sequence.sizes(size)[-1], description.sequence.channels(0)
    widths = sorted({-(-out[1] // n) for n in range(1, 9)} & set(range(4, 65)))
    ranked = []
    for width, height, groups, warpgroups in product(widths, (2, 4, 6, 7, 8, 12, 14, 16), (1, 2, 3, 4), (1, 2, 4)):
        plan = Plan(height, width, groups, warpgroups)
        room = plan.shared(channels) <= device.block_shared and 2 <= groups * warpgroups <= 4
        if room and height <= out[0] and warpgroups <= plan.tiles:
            bricks = batch * -(-out[0] // height) * -(-out[1] // width)
            rounds = -(-bricks // (device.multiprocessors * groups))
            ranked.append((rounds * groups * plan.products(channels), -groups * warpgroups, plan))
    ranked.sort(key=lambda one: one[:2])
    return varied((plan for *_, plan in ranked), lambda plan: plan.groups * plan.warpgroups)[:limit]


def _source(name: str, description: Description, plan: Plan) -> str:
    layers = description.sequence.layers
    channels, weights = description.sequence.channels(0), _weights(description.sequence.channels(0))
    constants = {
        "CHANNELS": channels,
        "BRICK_HEIGHT": plan.height,
        "BRICK_WIDTH": plan.width,
        "GROUPS": plan.groups,
        "WARPGROUPS": plan.warpgroups,
        "THREADS": plan.groups * plan.warpgroups * 128,
        "PLANE_PIXELS": plan.plane_pixels,
        "REDUCE_AT": 0,
        "CONVOLVE_AT": 2 * channels * _MIDDLE,
        "WIDEN_AT": 2 * channels * _MIDDLE + 18 * _MIDDLE * _MIDDLE,
        "WEIGHTS": weights,
        "REDUCE_BIAS_AT": weights,
        "CONVOLVE_BIAS_AT": weights + 4 * _MIDDLE,
        "WIDEN_BIAS_AT": weights + 8 * _MIDDLE,
    }
    stages = zip(("REDUCE", "CONVOLVE", "WIDEN"), layers, strict=True)
    return "\n".join(
        [
            f"using Element = {description.format};",
            *(f"constexpr int {key} = {value};" for key, value in constants.items()),
            f"constexpr bool RESIDUAL = {str(layers[2].residual is not None).lower()};",
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
    inner, outer = (neighbours(n).to(device) for n in (first.weight.shape[0], last.weight.shape[0]))

    def octets(weight: Tensor) -> Tensor:
        return as_bytes(weight.to(dtype).unflatten(1, (-1, 8)).transpose(0, 1))

    taps = middle.weight.permute(2, 3, 0, 1).flatten(0, 1)
    parts = [
        octets(first.weight[:, :, 0, 0][inner][:, outer]),
        *(octets(one) for one in taps),
        octets(last.weight[:, :, 0, 0][outer]),
        bias_bytes(first, first.weight.shape[0]),
        bias_bytes(middle, middle.weight.shape[0]),
        bias_bytes(last, last.weight.shape[0]),
    ]
    return torch.cat(parts)
