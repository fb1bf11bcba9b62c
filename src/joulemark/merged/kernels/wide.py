"""Two layers of up to 64 channels in streamed rows by ``wgmma``: for compute capability 9.0.

With 64 channels the matrix instructions of single warps become the limit; a warpgroup's read one operand from shared
memory and leave registers to the weights. ``device/wide.cuh`` has the scheme.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels import chain
from joulemark.merged.kernels.chain import ACTIVATIONS, MOST_SHARED, struct
from joulemark.merged.kernels.compile import device_text
from joulemark.merged.kernels.description import STORED, Description
from joulemark.merged.kernels.fragments import a_fragments, pad_channels
from joulemark.merged.kernels.kernel import Kernel

_CHANNELS, _LEAST_CHANNELS = 64, 33
_WIDTH, _GUARD = 32, 1024
_WARPS = 12
_INSTRUCTIONS = {"bf16": "bf16", "fp16": "f16"}


@dataclass(frozen=True)
class Plan:
    """Sizes of a kernel that are free to choose.

    Args:
        rows: of a group, 3 or 4.
        groups: that a brick has from top to bottom.
    """

    rows: int = 4
    groups: int = 64


def unsuited(description: Description) -> str | None:
    """Why there is no such kernel for a sequence; None where there is one."""
    layers = description.sequence.layers
    if description.sequence.dimensions != 2 or len(layers) != 2:
        return f"{len(layers)} layers in {description.sequence.dimensions} dimensions, not 2 in 2"
    if description.format not in _INSTRUCTIONS:
        return f"{description.format}: there is one for bf16 and fp16"
    if max(layer.out_channels for layer in layers) < _LEAST_CHANNELS:
        return f"{layers[-1].out_channels} channels: less than half of the 64 that an instruction makes"
    if layers[0].residual is not None or layers[1].residual not in (None, 0):
        return "a residual that is not the input, added last"
    return chain.unsuited(description)


def wgmma_text(format_: str, columns: int) -> str:
    """The instruction wgmma.m64nNk16 with A in registers, as a function for ``columns`` = N."""
    first = columns // 2
    outputs = ", ".join(f"%{i}" for i in range(first))
    inputs = ", ".join(f"%{first + i}" for i in range(4))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(first))
    kind = _INSTRUCTIONS[format_]
    return f"""#ifndef EMULATED
template <class T, int N> DEVICE void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 b) {{
    asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
                 "{{{outputs}}}, "
                 "{{{inputs}}}, %{first + 4}, 1, 1, 1, 0;"
                 : {operands}
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}
#endif
"""


def pack(description: Description, given: List[Parameters]) -> Tensor:
    """Per layer the fragments [tap][step][warp][lane][4 words] of A, then 64 biases."""
    parts = []
    for layer, one in zip(description.sequence.layers, given, strict=True):
        weight = pad_channels(one.weight.detach().float().cpu(), _CHANNELS, _CHANNELS).to(STORED[description.format])
        # [warp, row, step, channel, ky, kx] → [ky, kx, step, warp, row, channel]
        matrix = weight.view(4, 16, 4, 16, 3, 3).permute(4, 5, 2, 0, 1, 3)
        bias = torch.zeros(_CHANNELS)
        if one.bias is not None:
            bias[: layer.out_channels] = one.bias.detach().float().cpu()
        parts += [a_fragments(matrix).flatten().view(torch.uint8), bias.view(torch.uint8)]
    return torch.cat(parts).to(given[0].weight.device)


def wide(description: Description, plan: Plan) -> Kernel:
    """The kernel of two wide layers.

    Raises:
        ValueError: there is none for this sequence or plan.
    """
    why = unsuited(description)
    if why:
        raise ValueError(f"no wide kernel for this chain: {why}")
    if plan.rows not in (3, 4) or plan.groups < 1:
        raise ValueError(f"{plan.groups} groups of {plan.rows} rows: give 3 or 4 rows")
    first, last = description.sequence.layers
    weights = 9 * 4 * 4 * 32 * 16
    adds = last.residual is not None or description.adds
    edge = (plan.rows * plan.groups, _WIDTH - 4)
    constants: dict[str, object] = {
        "ROWS": plan.rows, "WIDTH": _WIDTH, "TILE_HEIGHT": edge[0], "TILE_WIDTH": edge[1], "TAKEN": first.in_channels,
        "CHANNELS": last.out_channels, "LAYER_BYTES": weights + _CHANNELS * 4, "BIAS": weights,
        "FIRST_ACTIVATION": ACTIVATIONS[first.activation], "LAST_ACTIVATION": ACTIVATIONS[last.activation],
        "RESIDUAL": "GLOBAL" if adds else "NOTHING",
    }  # fmt: skip
    ring = (4 * plan.rows + 2) * _WIDTH * 128
    shared = 4 * _GUARD + 2 * ring + plan.rows * _WIDTH * 128
    if shared > MOST_SHARED:
        raise ValueError(f"the rings take {shared} bytes of shared memory, {MOST_SHARED} are there")
    name = f"wide_{description}_{plan.rows}x{plan.groups}"
    source = (
        f"#ifdef EMULATED\n{device_text('hopper_emulation.hpp')}#else\n{device_text('hopper.cuh')}#endif\n"
        + "".join(device_text(f"{part}.cuh") for part in ("rows", "chain"))
        + wgmma_text(description.format, plan.rows * _WIDTH)
        + device_text("wide.cuh")
        + struct("Field", constants, {"ADDS_INPUT": last.residual == 0}, f"using T = {description.format};")
        + f"KERNEL({name}, {32 * _WARPS}, 1) {{\n    wide<Field>(a);\n}}\n"
    )
    return Kernel(
        name,
        description,
        source,
        32 * _WARPS,
        shared,
        edge,
        lambda given: pack(description, given),
        persistent=1,
        least=90,
        only=90,
    )
