"""Chains in streamed rows by ``wgmma``, the matrix products of warpgroups: for compute capability 9.0.

From 32 channels on the matrix instructions of single warps are the limit: on Hopper they reach less of the rate than a
warpgroup's, which read one operand from shared memory and leave registers to the weights. ``device/wide.cuh`` has the
scheme; of its products 1/2, 3/4 or all are needed with 16, 32 or 64 channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels import chain
from joulemark.merged.kernels.chain import ACTIVATIONS, ALIGNMENT, brick_constants, check_room, refuse, struct
from joulemark.merged.kernels.compile import device_text
from joulemark.merged.kernels.description import STORED, Description
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.fragments import a_fragments
from joulemark.merged.kernels.kernel import Kernel
from joulemark.merged.kernels.seconds import Counts, cheapest
from joulemark.merged.kernels.warpgroup import FORMATS, ROWS, vocabulary
from joulemark.merged.sequence import Shape

_LAYERS = range(2, 4)
_SLOTS = 4
REGISTERS = {2: (24, 240), 3: (24, 160)}
"""Of a thread that loads and of one that multiplies, by layers: together at most 65536."""
_OTHER_REGISTERS = 24
"""Of one that multiplies, beside weights and sums; with fewer the compiler waits for every product."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a kernel that are free to choose.

    Args:
        width: columns of a band with its halo: 32 or 64.
        pairs: rows of a product's pixels; width · pairs is at most 128.
        groups: that a brick has from top to bottom, each of pairs · 64 / channels rows.
    """

    width: int = 32
    pairs: int = 4
    groups: int = 64


def channels_of(description: Description) -> int:
    """Channels that all tensors are padded to: 16, 32 or 64."""
    sequence = description.sequence
    most = max(sequence.channels(tensor) for tensor in range(len(sequence.layers) + 1))
    return next((n for n in (16, 32) if most <= n), 64)


def unsuited(description: Description) -> str | None:
    """Why there is no such kernel for a sequence; None where there is one."""
    layers = description.sequence.layers
    if description.sequence.dimensions != 2 or len(layers) not in _LAYERS:
        return f"{len(layers)} layers in {description.sequence.dimensions} dimensions, not 2 or 3 in 2"
    if description.format not in FORMATS:
        return f"{description.format}: there is one for bf16 and fp16"
    if len(layers) == 3 and channels_of(description) == ROWS:
        return "3 layers of more than 32 channels: their weights take the registers of two"
    if any(one.residual is not None for one in layers[:-1]) or layers[-1].residual not in (None, 0):
        return "a residual that is not the input, added last"
    return chain.unsuited(description)


def product_matrix(weight: Tensor, channels: int) -> Tensor:
    """[input row, kernel column, 64 = output row · channel, input channel]: zeros where a row does not reach another.

    Args:
        weight: [out, in, 3, 3].
        channels: to pad to.
    """
    packed = ROWS // channels
    out, inner = weight.shape[:2]
    made = weight.new_zeros((packed + 2, 3, packed, channels, channels))
    for row in range(packed):
        for tap in range(3):
            made[row + tap, :, row, :out, :inner] = weight[:, :, tap].permute(2, 0, 1)
    return made.flatten(2, 3)


def pack(description: Description, given: List[Parameters]) -> Tensor:
    """Per layer the fragments [input row][kernel column][step][warp][lane][4 words], then a bias per channel."""
    channels = channels_of(description)
    parts = []
    for layer, one in zip(description.sequence.layers, given, strict=True):
        matrix = product_matrix(one.weight.detach().float().cpu(), channels).to(STORED[description.format])
        # [row, column, warp, 16 rows, step, 16 channels] → [row, column, step, warp, 16 rows, 16 channels]
        split = matrix.view(*matrix.shape[:2], 4, 16, channels // 16, 16).permute(0, 1, 4, 2, 3, 5)
        bias = torch.zeros(channels)
        if one.bias is not None:
            bias[: layer.out_channels] = one.bias.detach().float().cpu()
        parts += [a_fragments(split).flatten().view(torch.uint8), bias.view(torch.uint8)]
    return torch.cat(parts).to(given[0].weight.device)


def _constants(description: Description, plan: Plan) -> tuple[dict[str, object], int]:
    """The F of ``device/wide.cuh``, and bytes of shared memory."""
    layers = description.sequence.layers
    depth, channels = len(layers), channels_of(description)
    packed = ROWS // channels
    row = plan.width * channels * 2
    ring = packed * (_SLOTS * plan.pairs + 2) * row + ALIGNMENT  # behind it room for what a shift reads too much
    staged = 2 * ALIGNMENT + depth * ring
    adds = layers[-1].residual is not None or description.adds
    constants: dict[str, object] = {
        "CHANNELS": channels, "PACKED": packed, "PAIRS": plan.pairs, "WIDTH": plan.width, "LEVELS": depth,
        "TILE_HEIGHT": plan.groups * plan.pairs * packed, "TILE_WIDTH": plan.width - 2 * depth,
        "TAKEN": layers[0].in_channels, "MADE": layers[-1].out_channels,
        "LAYER_BYTES": (packed + 2) * 3 * (channels // 16) * 4 * 32 * 16 + channels * 4,
        "RINGS": 2 * ALIGNMENT, "RING_BYTES": ring, "STAGED": staged, "THREADS": 128 * (depth + 1),
        "LAST_ACTIVATION": ACTIVATIONS[layers[-1].activation], "RESIDUAL": "GLOBAL" if adds else "NOTHING",
        **brick_constants(None),
    }  # fmt: skip
    return constants, staged + plan.pairs * packed * row


def counts(description: Description, plan: Plan, size: Shape, batch: int, device: Device) -> Counts:
    """What the busiest multiprocessor does: one block on it takes brick after brick.

    ``step`` is a group of rows that goes through all layers' warpgroups, ``product`` the columns of their products,
    which share the tensor cores, ``store`` the columns of one layer's sums, ``chunk`` 16 bytes of input or output.
    """
    layers, channels = description.sequence.layers, channels_of(description)
    out, depth, packed = description.sequence.sizes(size)[-1], len(layers), ROWS // channels
    rows, columns = plan.pairs * packed, plan.pairs * plan.width
    groups = min(plan.groups, -(-out[0] // rows))
    bricks = batch * -(-out[0] // (rows * groups)) * -(-out[1] // (plan.width - 2 * depth))
    rounds = -(-bricks // device.multiprocessors)
    steps = rounds * (groups + 2 * depth)  # a group above and one below for each layer's halo
    moved = (layers[0].in_channels + layers[-1].out_channels) * description.itemsize / 16
    return {
        "product": steps * depth * (packed + 2) * 3 * (channels // 16) * columns, "store": steps * columns,
        "chunk": steps * rows * plan.width * moved, "step": steps, "round": rounds, "launch": 1,
    }  # fmt: skip


def _registers(description: Description, plan: Plan) -> int:
    """Of a thread that multiplies: weights, sums, and others beside them."""
    channels = channels_of(description)
    weights = (ROWS // channels + 2) * 3 * (channels // 16) * 4
    return weights + plan.width * plan.pairs // 2 + _OTHER_REGISTERS


def _body(description: Description) -> str:
    """The kernel's body: who does what."""
    layers = description.sequence.layers
    depth = len(layers)
    few, many = REGISTERS[depth]
    starts = "        run.template ring<0>().prepare(4, 128);\n" + "".join(
        f"        run.template ring<{n}>().prepare(128, 128);\n" for n in range(1, depth)
    )
    inner = "".join(
        f"        if (group == {n}) run.template inner_layer<{n}, {ACTIVATIONS[layers[n].activation]}>(warp % 4);\n"
        for n in range(depth - 1)
    )
    clears = "".join(f"    run.template ring<{n}>().clear();\n" for n in range(depth))
    return (
        f"    Wide<Field> run(a);\n    if (threadIdx.x == 0) {{\n{starts}    }}\n"
        f"{clears}    fence_async();\n    block_sync();\n"
        f"    const int warp = own_warp(), group = warp / 4;\n"
        f"    if (group == {depth}) {{\n        registers_down<{few}>();\n        run.load(warp % 4);\n    }} else {{\n"
        f"        registers_up<{many}>();\n{inner}"
        f"        if (group == {depth - 1}) run.template last_layer<{depth - 1}>(warp % 4);\n    }}\n"
    )


def candidates(description: Description, size: Shape, batch: int, device: Device, limit: int = 8) -> list[Plan]:
    """Plans worth a trial for inputs of ``size``, the most promising first.

    Raises:
        ValueError: there is no wide kernel for this sequence.
    """
    refuse(unsuited(description), "wide kernel")
    plans = _all_plans(description, description.sequence.sizes(size)[-1], device)
    return cheapest("wide", plans, lambda plan: counts(description, plan, size, batch, device), limit)


def _all_plans(description: Description, out: Shape, device: Device) -> Iterator[Plan]:
    """Bands and groups that fit: the height of an image in up to eight parts."""
    depth = len(description.sequence.layers)
    for width, pairs in ((32, 4), (32, 3), (64, 2), (32, 2), (64, 1)):
        rows = pairs * (ROWS // channels_of(description))
        most = -(-out[0] // rows)
        for groups in sorted({-(-most // n) for n in (1, 2, 3, 4, 6, 8)}, reverse=True):
            plan = Plan(width, pairs, groups)
            _, shared = _constants(description, plan)
            if rows >= depth and shared <= device.block_shared and _registers(description, plan) <= REGISTERS[depth][1]:
                yield plan


def wide(description: Description, plan: Plan) -> Kernel:
    """The kernel of a chain by products of warpgroups.

    Raises:
        ValueError: there is none for this sequence or plan.
    """
    refuse(unsuited(description), "wide kernel")
    layers = description.sequence.layers
    depth, columns = len(layers), plan.width * plan.pairs
    if plan.width not in (32, 64) or not plan.pairs >= 1 or columns > 128 or plan.groups < 1:
        raise ValueError(f"{plan}: give 32 or 64 columns, and pairs so that they make at most 128")
    constants, shared = _constants(description, plan)
    rows = plan.pairs * int(str(constants["PACKED"]))
    if rows < depth:
        raise ValueError(f"a group of {rows} rows is lower than the halo of {depth} layers")
    check_room(shared)
    if _registers(description, plan) > REGISTERS[depth][1]:
        raise ValueError(f"{plan} takes {_registers(description, plan)} registers, {REGISTERS[depth][1]} are there")
    edge = (rows * plan.groups, plan.width - 2 * depth)
    name = f"wide_{description}_{plan.width}x{plan.pairs}x{plan.groups}"
    flags = {"ADDS_INPUT": layers[-1].residual == 0, "ADDS_BEHIND": layers[-1].adds_behind}
    source = (
        vocabulary(description.format, registers=[columns])
        + "".join(device_text(f"{part}.cuh") for part in ("rows", "chain", "wide"))
        + struct("Field", constants, flags, f"using T = {description.format};")
        + f"KERNEL({name}, {128 * (depth + 1)}, 1) {{\n{_body(description)}}}\n"
    )
    return Kernel(
        name,
        description,
        source,
        128 * (depth + 1),
        shared,
        edge,
        partial(pack, description),
        persistent=1,
        least=90,
        only=90,
        counts=partial(counts, description, plan),
    )
