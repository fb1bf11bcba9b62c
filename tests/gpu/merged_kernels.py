"""Generated kernels on a GPU: numerics of all families and formats, then times of variants by CUDA graphs.

    python tests/gpu/merged_kernels.py OUT --seconds 120 [--only REGEX]
    compute-sanitizer python tests/gpu/merged_kernels.py --start 0 --only 'numerics .*bf16'

Items run in a process that is started anew behind an item that breaks its CUDA context or hangs. Builds are made first,
in parallel ($JOULEMARK_KERNEL_CACHE keeps them). OUT/merged-kernels.json is written after every item; where it is there
it is gone on with. Exit codes: 0 all items are done, 3 time was up first.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import queue
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters, run_plain
from joulemark.merged.kernels import (
    Description,
    Kernel,
    bottleneck,
    bottleneck_warpgroup,
    build,
    expand_depthwise,
    inverted_residual,
    inverted_residual_warpgroup,
    launch,
    run,
)
from joulemark.merged.kernels import chain as chains
from joulemark.merged.kernels import memoized as memos
from joulemark.merged.kernels import planes as volumes
from joulemark.merged.kernels import planes_warpgroup as slices
from joulemark.merged.kernels import stem_warpgroup as stems
from joulemark.merged.kernels import stream as streams
from joulemark.merged.kernels import stream_warpgroup as thirds
from joulemark.merged.kernels import wide as wides
from joulemark.merged.kernels.compile import KernelError, architecture_of
from joulemark.merged.kernels.description import Format
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.kernel import layout
from joulemark.merged.kernels.layouts import from_bricks, to_bricks
from joulemark.merged.sequence import Conv, Sequence, Shape

LIMITS: dict[Format, float] = {"bf16": 1e-2, "fp16": 1e-2, "tf32": 2e-3, "fp32": 1e-5}
ROTATED_BYTES = 300 << 20
"""Inputs and outputs that a replay goes through: several times the L2 of any GPU so far."""
PER_VARIANT_MS = 50.0
FIRST_SECONDS, ITEM_SECONDS = 40.0, 15.0
"""Longest silence of a process before its first record, and between two."""


def sequence_of(
    channels: list[int],
    dimensions: int = 2,
    activation: str = "relu",
    residual: int | None = None,
    behind: bool = False,
) -> Sequence:
    """A chain of 3-wide convolutions; the last adds tensor ``residual``, behind its activation perhaps."""
    three, one = (3,) * dimensions, (1,) * dimensions
    layers = [Conv(a, b, three, one, one, one, 1, activation) for a, b in pairwise(channels)]  # type: ignore[arg-type]
    return Sequence((*layers[:-1], replace(layers[-1], residual=residual, adds_behind=behind)))


def parameters_of(sequence: Sequence, dtype: torch.dtype, device: str) -> list[Parameters]:
    """Random weights that keep the variance, rounded to the dtype."""
    out = []
    for one in sequence.layers:
        shape = (one.out_channels, one.in_channels // one.groups, *one.kernel)
        weight = torch.randn(shape, device=device) * math.sqrt(2 / math.prod(shape[1:]))
        out.append(Parameters(weight.to(dtype), (0.1 * torch.randn(one.out_channels, device=device)).to(dtype)))
    return out


def input_of(sequence: Sequence, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Random input [batch, *size] of a sequence, channels-last."""
    x = torch.randn(shape[0], sequence.channels(0), *shape[1:], device=device).to(dtype)
    return x.contiguous(memory_format=layout(sequence.dimensions))


def relative_error(y: Tensor, reference: Tensor) -> float:
    """‖y − reference‖ / ‖reference‖, NaN where y holds one."""
    return float((y.double() - reference.double()).norm() / reference.double().norm())


@dataclass(frozen=True)
class Variant:
    """A kernel by what makes it, so that it can cross to another process.

    Args:
        family: module of ``joulemark.merged.kernels``.
        description: of the sequence.
        plan: of the family.
    """

    family: str
    description: Description
    plan: Any

    def make(self) -> Kernel:
        """The kernel."""
        return FAMILIES[self.family](self.description, self.plan)


FAMILIES: dict[str, Callable[[Description, Any], Kernel]] = {
    "chain": chains.chain,
    "stream": streams.stream,
    "stream_warpgroup": thirds.stream_warpgroup,
    "memoized": memos.memoized,
    "wide": wides.wide,
    "planes": volumes.planes,
    "planes_warpgroup": slices.planes_warpgroup,
    "inverted_residual": inverted_residual.inverted_residual,
    "inverted_residual_warpgroup": inverted_residual_warpgroup.inverted_residual_warpgroup,
    "expand_depthwise": expand_depthwise.expand_depthwise,
    "bottleneck": bottleneck.bottleneck,
    "bottleneck_warpgroup": bottleneck_warpgroup.bottleneck_warpgroup,
    "stem_warpgroup": stems.stem_warpgroup,
}


@dataclass(frozen=True)
class Check:
    """Numerics of one variant on one shape [batch, *size]."""

    variant: Variant
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Timing:
    """The time of one variant of a block; without a variant that of cuDNN.

    Args:
        block: its name.
        sequence: the whole chain.
        shape: [batch, *size] of its input.
        variant: of the whole chain, or of one of its equal layers.
    """

    block: str
    sequence: Sequence
    shape: tuple[int, ...]
    variant: Variant | None


Item = Check | Timing


def chain_variant(
    sequence: Sequence,
    edge: Shape,
    warps: int = 8,
    blocks: int = 2,
    format_: Format = "bf16",
    layout: Shape | None = None,
) -> Variant:
    """A variant of the padded chains."""
    return Variant("chain", Description(sequence, format_), chains.Plan(edge, warps, blocks, layout))


def chain_checks(format_: Format) -> Iterator[Check]:
    """Padded chains of one format: depths, channels, activations, residuals, odd sizes and batches, 2-D and 3-D."""
    blocks = 1 if format_ == "fp32" else 2
    for channels, shape, edge, more in (
        ([16] * 5, (3, 61, 77), (16, 24), {}),
        ([16] * 2, (1, 33, 130), (16, 62), {"activation": "relu6"}),
        ([16] * 3, (2, 40, 50), (12, 28), {"residual": 0}),
        ([16] * 7, (1, 45, 37), (8, 20), {}),
        ([32] * 3, (2, 35, 51), (8, 12), {"activation": "none"}),
        ([3, 24, 40, 5], (1, 29, 31), (8, 10), {}),
        ([64, 64], (1, 20, 40), (8, 14), {}),
        ([64, 64], (1, 20, 40), (8, 14), {"activation": "leaky", "residual": 0, "behind": True}),
        ([16] * 3, (2, 9, 14, 19), (4, 4, 12), {"dimensions": 3}),
        ([16] * 2, (1, 7, 8, 33), (4, 8, 14), {"dimensions": 3, "residual": 0}),
    ):
        sequence = sequence_of(channels, **more)
        yield Check(chain_variant(sequence, edge, 8, blocks if sequence.dimensions == 2 else 1, format_), shape)


def stream_variant(sequence: Sequence, *plan: int, format_: Format = "bf16") -> Variant:
    """A variant of the streamed chains."""
    return Variant("stream", Description(sequence, format_), streams.Plan(*plan))


def stream_checks(format_: Format) -> Iterator[Check]:
    """Streamed chains of one format: depths, channels, activations, residuals, odd sizes and batches."""
    narrow = format_ in ("tf32", "fp32")
    for channels, shape, plan, more in (
        ([16] * 5, (3, 61, 77), (16 if narrow else 64, 20), {}),
        ([16] * 2, (1, 33, 130), (48, 16), {"activation": "relu6"}),
        ([16] * 3, (2, 40, 50), (32, 13, 1, 8, 4), {"residual": 0}),
        ([16] * 4, (2, 40, 50), (16 if narrow else 32, 40), {"residual": 1}),
        ([16] * 3, (2, 40, 50), (32, 13, 1, 8, 4), {"activation": "leaky", "residual": 1, "behind": True}),
        ([16] * 3, (140, 40, 50), (32, 39), {"activation": "none"}),
        ([32] * 3, (2, 35, 51), (32, 128), {"activation": "none"}),
        ([3, 24, 16, 5], (1, 29, 31), (16, 10), {}),
    ):
        if format_ == "fp32" and max(channels) > 16:
            continue
        yield Check(stream_variant(sequence_of(channels, **more), *plan, format_=format_), shape)  # type: ignore[arg-type]


def third_variant(sequence: Sequence, *plan: int, format_: Format = "bf16") -> Variant:
    """A variant of the chains streamed by warpgroups."""
    return Variant("stream_warpgroup", Description(sequence, format_), thirds.Plan(*plan))


def third_checks(format_: Format) -> Iterator[Check]:
    """Chains streamed by warpgroups of one format; the fourth has more bricks than blocks."""
    if format_ in ("tf32", "fp32"):
        return
    for channels, shape, plan, more in (
        ([32] * 3, (3, 61, 77), (1, 20, 2, 6), {}),
        ([32] * 2, (2, 33, 300), (4, 16), {"activation": "relu6"}),
        ([32] * 5, (2, 40, 150), (1, 13), {"activation": "none"}),
        ([16] * 3, (150, 30, 131), (2, 7), {"residual": 0}),
        ([32] * 3, (3, 61, 77), (1, 20, 2, 6), {"activation": "leaky", "residual": 0, "behind": True}),
        ([16] * 5, (1, 45, 60), (1, 45, 1, 12), {}),
        ([3, 24, 16, 5], (1, 29, 31), (1, 10), {}),
    ):
        yield Check(third_variant(sequence_of(channels, **more), *plan, format_=format_), shape)  # type: ignore[arg-type]


def memo_variant(sequence: Sequence, edge: Shape, *plan: int, format_: Format = "bf16") -> Variant:
    """A variant of the memoized chains."""
    return Variant("memoized", Description(sequence, format_), memos.Plan(edge, *plan))


def memo_checks(format_: Format) -> Iterator[Check]:
    """Memoized chains of one format; the last shape is a stress of flags, many small bricks on all multiprocessors."""
    blocks = 1 if format_ == "fp32" else 2
    for channels, shape, edge, plan, more in (
        ([16] * 5, (3, 61, 77), (8, 30), (8, blocks), {}),
        ([16] * 3, (2, 40, 50), (12, 30), (8, blocks, 1, 4), {"residual": 0}),
        ([16] * 3, (2, 40, 50), (12, 30), (8, blocks, 1, 4), {"activation": "leaky", "residual": 0, "behind": True}),
        ([3, 24, 5], (5, 29, 31), (4, 14), (4, blocks), {"activation": "relu6"}),
        ([16] * 7, (9, 200, 210), (4, 14), (4, blocks, 4, 4), {}),
    ):
        yield Check(memo_variant(sequence_of(channels, **more), edge, *plan, format_=format_), shape)  # type: ignore[arg-type]


def wide_variant(sequence: Sequence, *plan: int, format_: Format = "bf16") -> Variant:
    """A variant of two wide layers."""
    return Variant("wide", Description(sequence, format_), wides.Plan(*plan))


def wide_checks(format_: Format) -> Iterator[Check]:
    """Two wide layers of one format."""
    if format_ in ("tf32", "fp32"):
        return
    for channels, shape, plan, more in (
        ([64] * 3, (3, 61, 77), (32, 4, 64), {}),
        ([64] * 3, (150, 30, 33), (32, 3, 4), {"activation": "none"}),
        ([64] * 3, (2, 50, 130), (64, 2, 4), {}),
        ([40, 56, 36], (1, 29, 31), (32, 4, 2), {"activation": "relu6"}),
        ([64] * 3, (2, 40, 50), (32, 3, 5), {"residual": 0}),
        ([64] * 3, (2, 40, 50), (32, 3, 5), {"activation": "leaky", "residual": 0, "behind": True}),
        ([32] * 3, (3, 61, 130), (64, 2, 64), {}),
        ([32] * 3, (150, 30, 33), (32, 4, 2), {"residual": 0}),
        ([32] * 4, (3, 61, 77), (32, 2, 5), {}),
        ([16] * 3, (3, 61, 130), (64, 2, 2), {}),
    ):
        yield Check(wide_variant(sequence_of(channels, **more), *plan, format_=format_), shape)  # type: ignore[arg-type]


def plane_variant(sequence: Sequence, edge: Shape, *plan: int, format_: Format = "bf16") -> Variant:
    """A variant of the streamed volumes."""
    return Variant("planes", Description(sequence, format_), volumes.Plan(edge, *plan))


def plane_checks(format_: Format) -> Iterator[Check]:
    """Streamed volumes of one format."""
    if format_ == "fp32":
        return
    for channels, shape, edge, warps, more in (
        ([16] * 3, (2, 19, 37, 45), (7, 12, 28) if format_ != "tf32" else (7, 4, 12), 4, {}),
        ([16] * 4, (3, 9, 27, 31), (20, 4, 10), 4, {"activation": "none"}),
        ([3, 8, 24, 5], (1, 29, 13, 15), (5, 4, 10), 3, {"activation": "relu6"}),
    ):
        sequence = sequence_of(channels, 3, **more)  # type: ignore[arg-type]
        yield Check(plane_variant(sequence, edge, warps, format_=format_), shape)


def slice_variant(sequence: Sequence, *plan: int, format_: Format = "bf16") -> Variant:
    """A variant of the volumes streamed by warpgroups."""
    return Variant("planes_warpgroup", Description(sequence, format_), slices.Plan(*plan))


def slice_checks(format_: Format) -> Iterator[Check]:
    """Volumes streamed by warpgroups of one format."""
    if format_ in ("tf32", "fp32"):
        return
    for channels, shape, plan, more in (
        ([16] * 3, (2, 19, 37, 45), (1, 3, 7), {}),
        ([16] * 4, (3, 9, 27, 31), (2, 1, 20), {"activation": "none"}),
        ([32] * 2, (2, 17, 40, 40), (1, 4, 9), {"activation": "relu6"}),
        ([3, 8, 24, 5], (1, 29, 13, 15), (1, 1, 5, 1, 3, 2), {}),
    ):
        yield Check(slice_variant(sequence_of(channels, 3, **more), *plan, format_=format_), shape)  # type: ignore[arg-type]


def pointwise(inputs: int, outputs: int, activation: str, residual: int | None = None) -> Conv:
    """A 1×1 convolution."""
    return Conv(inputs, outputs, (1, 1), (1, 1), (0, 0), (1, 1), 1, activation, residual)


def projected(inputs: int, outputs: int) -> Sequence:
    """A bottleneck that adds a pointwise convolution of its input."""
    inner = Conv(64, 64, (3, 3), (1, 1), (1, 1), (1, 1), 1, "relu")
    last = replace(pointwise(64 + inputs, outputs, "relu"), joined=0)
    return Sequence((pointwise(inputs, 64, "relu"), inner, last))


def block_checks(format_: Format) -> Iterator[Check]:
    """Inverted residuals and bottlenecks of one format, odd sizes: the best ranked plans of another size, where halves
    of bricks hang over the border."""
    if format_ in ("tf32", "fp32"):
        return
    made: list[tuple[str, Any, Sequence, int]] = []
    for inputs, hidden, outputs, stride, edge in (
        (32, 192, 32, 1, 28),
        (16, 96, 24, 2, 28),
        (64, 384, 96, 1, 28),
        (160, 960, 320, 1, 7),
    ):
        depthwise = Conv(hidden, hidden, (3, 3), (stride,) * 2, (1, 1), (1, 1), hidden, "relu6")
        residual = 0 if stride == 1 and inputs == outputs else None
        layers = pointwise(inputs, hidden, "relu6"), depthwise, pointwise(hidden, outputs, "none", residual)
        made.append(("inverted_residual", inverted_residual, Sequence(layers), edge))
        made.append(("inverted_residual_warpgroup", inverted_residual_warpgroup, Sequence(layers), edge))
    inner = Conv(64, 64, (3, 3), (1, 1), (1, 1), (1, 1), 1, "relu")
    layers = pointwise(256, 64, "relu"), inner, pointwise(64, 256, "relu", 0)
    made += [
        ("bottleneck", bottleneck, Sequence(layers), 28),
        ("bottleneck_warpgroup", bottleneck_warpgroup, Sequence(layers), 28),
        ("bottleneck_warpgroup", bottleneck_warpgroup, projected(64, 256), 28),
    ]
    for family, module, sequence, edge in made:
        description = Description(sequence, format_)
        plans = module.candidates(description, (edge, edge), 64, Device(), limit=2)
        if family == "inverted_residual_warpgroup":  # of each kind the best ranked, and one launched early
            ranked = module.candidates(description, (edge, edge), 64, Device(), limit=1000)
            best = {(one.groups > 1, one.halves): replace(one, early=False) for one in reversed(ranked)}
            plans = [*best.values(), *[one for one in ranked if one.early][:1]]
        for plan in plans:
            yield Check(Variant(family, description, plan), (3, 19, 37))


def front_checks(format_: Format) -> Iterator[Check]:
    """Fronts of EfficientNet's blocks of one format: both windows and strides, odd sizes and batches, batch 1."""
    if format_ in ("tf32", "fp32"):
        return
    for inputs, hidden, window, stride, edge, shape in (
        (40, 240, 5, 1, 28, (3, 19, 37)),
        (24, 144, 5, 2, 56, (1, 37, 53)),
        (16, 96, 3, 2, 112, (3, 61, 77)),
        (24, 144, 3, 1, 56, (1, 29, 31)),
        (112, 672, 5, 2, 14, (5, 13, 15)),
        (192, 1152, 5, 1, 7, (1, 7, 9)),
        (192, 1152, 3, 1, 7, (7, 7, 7)),
    ):
        half = (window // 2,) * 2
        depthwise = Conv(hidden, hidden, (window,) * 2, (stride,) * 2, half, (1, 1), hidden, "silu")
        description = Description(Sequence((pointwise(inputs, hidden, "silu"), depthwise)), format_)
        for plan in expand_depthwise.candidates(description, (edge, edge), 64, Device(), limit=2):
            yield Check(Variant("expand_depthwise", description, plan), shape)


def stem_checks(format_: Format) -> Iterator[Check]:
    """First layers of one format: images and volumes, odd lines, cut lines, plans of one turn and of several; the fifth
    has more bricks than blocks. Behind them the best ranked plans of the sizes that networks have."""
    if format_ in ("tf32", "fp32"):
        return
    seven, volume, three = (7, 7), (7, 7, 7), (3, 3)
    for channels, kernel, activation, shape, plan in (
        ((3, 64), seven, "relu", (3, 131, 227), (56, 2, 1, 3)),
        ((3, 64), seven, "leaky", (2, 90, 150), (40, 2, 2, 2, 3, 2)),
        ((3, 32), three, "silu", (3, 61, 77), (40, 3, 1, 2)),
        ((1, 20), (5, 6), "relu6", (2, 40, 50), (24, 2, 3)),
        ((4, 64), three, "hardswish", (150, 33, 130), (64, 2, 1, 2, 2, 2)),
        ((3, 64), volume, "none", (2, 9, 40, 61), (32, 2, 2, 1)),
        ((3, 24), (3, 5, 5), "relu", (3, 5, 37, 48), (24, 4, 1, 1, 3)),
        ((16, 64), seven, "relu", (3, 61, 101), (32, 3, 2, 1, 2, 2)),
    ):
        description = Description(Sequence((first_layer(*channels, kernel, activation),)), format_)  # type: ignore[arg-type]
        yield Check(Variant("stem_warpgroup", description, stems.Plan(*plan)), shape)
    one, two = (1, 1), (2, 2)
    for inputs, outputs, kernel, stride, size in (
        (3, 64, seven, two, (224, 224)),
        (3, 32, three, two, (224, 224)),
        (3, 64, volume, (1, 2, 2), (16, 112, 112)),
        (16, 64, seven, two, (768, 1152)),
        (3, 16, seven, one, (224, 224)),
        (3, 32, three, one, (256, 256)),
        (3, 64, three, one, (224, 224)),
    ):
        layer = replace(first_layer(inputs, outputs, kernel, "relu"), stride=stride)
        description = Description(Sequence((layer,)), format_)
        for plan in stems.candidates(description, size, 32, Device(), limit=4):
            yield Check(Variant("stem_warpgroup", description, plan), (3, *size))


def first_layer(inputs: int, outputs: int, kernel: Shape, activation: str) -> Conv:
    """A network's first convolution, stride 2 in a plane."""
    stride, half = (1, 2, 2)[-len(kernel) :], tuple(taps // 2 for taps in kernel)
    return Conv(inputs, outputs, kernel, stride, half, (1,) * len(kernel), 1, activation)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Block:
    """A chain to be timed: channels per tensor, shape [batch, *size], plans of both families."""

    channels: list[int]
    shape: tuple[int, ...]
    padded: list[tuple[Shape, int, int]]
    streamed: list[tuple[int, ...]] = field(default_factory=list)
    memoized: list[tuple[Any, ...]] = field(default_factory=list)
    wide: list[tuple[int, ...]] = field(default_factory=list)
    thirds: list[tuple[int, ...]] = field(default_factory=list)
    planes: list[tuple[Any, ...]] = field(default_factory=list)
    slices: list[tuple[int, ...]] = field(default_factory=list)


BLOCKS = {
    "4x16@1024b8": Block(
        [16] * 5,
        (8, 1024, 1024),
        [((16, 56), 8, 2), ((24, 40), 8, 2), ((40, 56), 16, 1), ((14, 40), 6, 3)],
        [(64, 171), (64, 128), (64, 171, 1, 32, 8), (64, 171, 1, 16, 8), (64, 171, 1, 16, 2), (32, 128, 2)],
        [((16, 62), 8, 2, 2, 5), ((8, 62), 8, 2, 4, 5), ((16, 30), 4, 4, 2, 5)],
        thirds=[(1, 128, 1, 12)],
    ),
    "2x16@1024b8": Block(
        [16] * 3,
        (8, 1024, 1024),
        [((16, 60), 8, 2), ((24, 44), 8, 2), ((16, 28), 4, 4)],
        [(128, 114), (64, 128, 2), (128, 128), (64, 128, 2, 32, 8), (128, 114, 1, 16, 8), (32, 128, 4)],
        [((16, 62), 8, 2, 4, 5), ((16, 62), 8, 2, 2, 5)],
        [(64, 2, 32), (64, 1, 64), (64, 2, 128)],
        thirds=[(1, 94, 3, 12), (3, 94, 1, 12), (1, 147, 2, 12)],
    ),
    "2x32@512b16": Block(
        [32] * 3,
        (16, 512, 512),
        [((16, 28), 8, 2), ((24, 44), 12, 1), ((12, 44), 6, 2)],
        [(48, 128), (48, 103), (48, 128, 1, 32, 8), (32, 128)],
        [((16, 30), 8, 2, 4, 5), ((16, 30), 8, 2, 8, 5)],
        [(32, 4, 16), (64, 2, 32), (64, 2, 64), (64, 2, 16), (32, 4, 64)],
        thirds=[(1, 74, 2, 6), (2, 64, 1, 12), (2, 171, 1, 12), (1, 64, 1, 12)],
    ),
    "3x32@224b64": Block(
        [32] * 4,
        (64, 224, 224),
        [((16, 26), 8, 2), ((20, 42), 12, 1)],
        [(32, 224), (32, 112)],
        [],
        [(32, 2, 56), (32, 2, 28), (32, 2, 14)],
        thirds=[(1, 224, 1, 12), (1, 112, 1, 12)],
    ),
    "4x32@512b16": Block(
        [32] * 5,
        (16, 512, 512),
        [((16, 24), 8, 2), ((20, 40), 12, 1)],
        [],
        [((16, 30), 8, 2, 4, 5), ((8, 30), 8, 2, 8, 5)],
        thirds=[(1, 64, 1, 8), (1, 128, 1, 8)],
    ),
    "3x16@224b64": Block(
        [16] * 4, (64, 224, 224), [((16, 58), 8, 2), ((28, 42), 8, 2)], [(80, 224), (80, 112), (64, 224)]
    ),
    "4x16@512b1": Block(
        [16] * 5,
        (1, 512, 512),
        [((16, 56), 8, 2), ((24, 40), 8, 2), ((16, 24), 4, 4)],
        [(64, 40), (64, 64), (48, 43), (32, 64)],
    ),
    "2x64@224b64": Block(
        [64] * 3,
        (64, 224, 224),
        [((14, 28), 8, 1)],
        wide=[(32, 4, 56), (32, 3, 75), (32, 4, 28), (64, 2, 112), (64, 2, 56)],
    ),
    "2x64@56b64": Block(
        [64] * 3,
        (64, 56, 56),
        [((14, 28), 8, 1), ((8, 12), 8, 1)],
        wide=[(32, 4, 14), (32, 3, 19), (32, 4, 7), (64, 2, 28), (64, 2, 14)],
    ),
    "2x64@56b1": Block(
        [64] * 3, (1, 56, 56), [((6, 12), 8, 1), ((4, 12), 8, 1)], wide=[(32, 4, 1), (32, 2, 1), (32, 2, 2)]
    ),
    "3d 2x16@128b1": Block(
        [16] * 3,
        (1, 128, 128, 128),
        [((4, 8, 28), 8, 1), ((6, 8, 12), 12, 1)],
        planes=[
            ((26, 12, 28), 4),
            ((26, 12, 28), 6),
            ((19, 12, 28), 6),
            ((16, 8, 28), 4),
            ((32, 12, 12), 4),
            ((26, 14, 28), 6),
        ],
        slices=[(1, 3, 128), (3, 1, 128), (1, 2, 64)],
    ),
    "3d 3x16@128b1": Block(
        [16] * 4,
        (1, 128, 128, 128),
        [((4, 4, 26), 8, 1), ((4, 6, 10), 12, 1)],
        planes=[((26, 10, 26), 4), ((43, 10, 10), 4), ((32, 16, 10), 4)],
        slices=[(1, 2, 128), (2, 1, 128)],
    ),
    "3d 2x8@128b1": Block(
        [8] * 3,
        (1, 128, 128, 128),
        [((4, 8, 28), 8, 1), ((6, 8, 12), 12, 1)],
        planes=[((26, 12, 28), 4), ((26, 12, 28), 6)],
    ),
    "3d 2x16@64b4": Block(
        [16] * 3,
        (4, 64, 64, 64),
        [((4, 8, 28), 8, 1), ((6, 8, 12), 12, 1)],
        planes=[((16, 12, 28), 4), ((16, 12, 28), 6), ((32, 8, 12), 4)],
    ),
}
SINGLE = {
    (16, 2): [((16, 62), 8, 2), ((32, 62), 8, 2)],
    (32, 2): [((16, 30), 8, 2), ((32, 30), 8, 2)],
    (64, 2): [((14, 30), 8, 1), ((28, 30), 8, 1)],
    (16, 3): [((4, 8, 30), 8, 1), ((8, 8, 30), 8, 1)],
    (8, 3): [((4, 8, 30), 8, 1), ((8, 8, 30), 8, 1)],
}
"""Plans of the kernel of one layer, by channels and dimensions."""
BRICKED: dict[str, list[Shape]] = {
    "4x16@1024b8": [(8, 8), (16, 16), (8, 32)],
    "2x16@1024b8": [(8, 8), (16, 16), (8, 32)],
    "3x16@224b64": [(8, 8), (16, 16), (8, 32)],
    "2x32@512b16": [(8, 8), (16, 16), (8, 32)],
    "3x32@224b64": [(8, 8), (16, 16), (8, 32)],
}
"""Layouts of activations in bricks, measured with a block's first plan."""
SINGLE_THIRDS = {
    (16, 2): [(4, 128), (2, 128, 2)],
    (32, 2): [(4, 128), (2, 128, 2), (1, 171, 3)],
    (16, 3): [(1, 2, 43, 3), (2, 2, 64), (1, 4, 64)],
    (8, 3): [(2, 2, 64)],
}
SINGLE_STREAMED = {(16, 2): [(128, 128, 2), (256, 128)], (32, 2): [(96, 128)]}


def chain_timings() -> Iterator[Timing]:
    """The blocks of chains, each by several bricks, its layers one by one, and cuDNN."""
    for name, block in BLOCKS.items():
        dimensions = len(block.shape) - 1
        sequence, one = (sequence_of(c, dimensions) for c in (block.channels, block.channels[:2]))
        key = block.channels[0], dimensions
        variants: list[Variant | None] = [chain_variant(sequence, *plan) for plan in block.padded]
        if name in BRICKED:
            variants += [chain_variant(sequence, *block.padded[0], layout=brick) for brick in BRICKED[name]]
        variants += [stream_variant(sequence, *plan) for plan in block.streamed]
        variants += [memo_variant(sequence, *plan) for plan in block.memoized]
        variants += [wide_variant(sequence, *plan) for plan in block.wide]
        variants += [third_variant(sequence, *plan) for plan in block.thirds]
        variants += [plane_variant(sequence, *plan) for plan in block.planes]
        variants += [slice_variant(sequence, *plan) for plan in block.slices]
        variants += [chain_variant(one, *plan) for plan in SINGLE[key]]
        variants += [stream_variant(one, *plan) for plan in SINGLE_STREAMED.get(key, ())]
        singles = slice_variant if dimensions == 3 else third_variant
        variants += [singles(one, *plan) for plan in SINGLE_THIRDS.get(key, ())]
        yield from (Timing(name, sequence, block.shape, variant) for variant in [*variants, None])


def with_addition(checks: Iterator[Check]) -> Iterator[Check]:
    """The checks, and behind them the first that adds nothing of its own once more, with a tensor from outside."""
    first = None
    for one in checks:
        yield one
        adds = any(layer.residual is not None for layer in one.variant.description.sequence.layers)
        first = one if first is None and not adds else first
    if first is not None:
        outside = replace(first.variant, description=replace(first.variant.description, adds=True))
        yield replace(first, variant=outside)


def everything(only: str = "") -> list[Item]:
    """All items whose label matches."""
    made: list[Item] = []
    adding = (chain_checks, stream_checks, third_checks, memo_checks, wide_checks, plane_checks, slice_checks)
    for checks in (front_checks, *adding, block_checks, stem_checks):
        for format_ in LIMITS:
            made += with_addition(checks(format_)) if checks in adding else checks(format_)
    made += chain_timings()
    return [item for item in made if re.search(only, label(item))]


def label(item: Item) -> str:
    """What an item is, in a line; what --only matches."""
    if isinstance(item, Timing):
        said = "cudnn fused" if item.variant is None else f"{item.variant.family} {item.variant.plan}"
        return f"time {item.block} {said}"
    last = item.variant.description.sequence.layers[-1]
    behind = f", adds behind {last.activation}" if last.adds_behind else ""
    behind += ", adds from outside" if item.variant.description.adds else ""
    size = "x".join(map(str, item.shape))
    return f"numerics {item.variant.family} {item.variant.description} {item.variant.plan} on {size}{behind}"


def check(one: Check) -> dict[str, Any]:
    """The error of a variant against float64."""
    kernel = one.variant.make()
    description = kernel.description
    sequence = description.sequence
    given = parameters_of(sequence, description.dtype, "cuda")
    x = input_of(sequence, one.shape, description.dtype, "cuda")
    residual = torch.randn_like(kernel.empty_output(x)) if description.adds else None
    y = run(kernel, x, kernel.pack(given), residual)
    torch.cuda.synchronize()
    double = [Parameters(p.weight.double(), None if p.bias is None else p.bias.double()) for p in given]
    added = None if residual is None else residual.double()
    error = relative_error(y, run_plain(sequence, double, x.double(), added))
    return {"kernel": kernel.name, "shape": one.shape, "error": error, "ok": error < LIMITS[description.format]}


def replay_ms(calls: list[Callable[[], object]]) -> list[float]:
    """Milliseconds of a call, one number per replay of a graph of all calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        kept = [call() for call in calls]
    graph.replay()

    def event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    start, end = event(), event()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    rounds = max(5, min(100, int(PER_VARIANT_MS / max(start.elapsed_time(end), 1e-3))))
    pairs = [(event(), event()) for _ in range(rounds)]
    for begin, finish in pairs:
        begin.record()
        graph.replay()
        finish.record()
    torch.cuda.synchronize()
    del kept
    return [begin.elapsed_time(finish) / len(calls) for begin, finish in pairs]


def summary(values: list[float]) -> dict[str, float]:
    """Median and extremes, in ms."""
    return {"ms": statistics.median(values), "least": min(values), "most": max(values), "rounds": len(values)}


@dataclass
class Inputs:
    """What the timings of one block share."""

    block: str
    given: list[Parameters]
    xs: list[Tensor]
    reference: Tensor


def inputs_of(timing: Timing) -> Inputs:
    """Parameters, rotating inputs, and the first images' output in fp32."""
    dtype = torch.bfloat16 if timing.variant is None else timing.variant.description.dtype
    given = parameters_of(timing.sequence, dtype, "cuda")
    first = input_of(timing.sequence, timing.shape, dtype, "cuda")
    count = max(1, min(16, -(-ROTATED_BYTES // (2 * first.numel() * first.element_size()))))
    xs = [first, *(torch.randn_like(first) for _ in range(count - 1))]
    some = max(1, min(2, timing.shape[0]))
    flat = [Parameters(p.weight.float(), None if p.bias is None else p.bias.float()) for p in given]
    return Inputs(timing.block, given, xs, run_plain(timing.sequence, flat, first[:some].float()))


def time_item(timing: Timing, inputs: Inputs) -> dict[str, Any]:
    """The record of a timing."""
    if timing.variant is None:
        return time_cudnn(timing.sequence, inputs.given, inputs.xs, inputs.reference)
    if len(timing.variant.description.sequence.layers) < len(timing.sequence.layers):
        return time_unmerged(timing.variant, inputs.given, inputs.xs, inputs.reference)
    return time_variant(timing.variant, inputs.given, inputs.xs, inputs.reference)


def guarded(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The record, or what went wrong."""
    try:
        return act()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return {"failed": f"{type(error).__name__}: {error}"[:400]}


def facts(kernel: Kernel) -> dict[str, Any]:
    """What a kernel takes on this device."""
    there = launch.loaded(kernel, torch.device("cuda", torch.cuda.current_device()))
    return {
        "kernel": kernel.name, "registers": there.build.registers, "spilled": there.build.spilled,
        "shared": kernel.shared, "threads": kernel.block, "resident": there.blocks_per_multiprocessor,
    }  # fmt: skip


def prepared(
    kernel: Kernel, weights: Tensor, x: Tensor, out: Tensor, scratch: Tensor | None = None
) -> Callable[[], None]:
    """A launch bound to its tensors."""
    return launch.loaded(kernel, x.device).prepare(x, weights, None, out, scratch)


def time_variant(variant: Variant, given: list[Parameters], xs: list[Tensor], reference: Tensor) -> dict[str, Any]:
    """One merged kernel."""
    kernel = variant.make()
    weights = kernel.pack(given)
    if kernel.layout is not None:
        xs = [to_bricks(x, kernel.layout) for x in xs]
    outs = [torch.full_like(kernel.empty_output(x), math.nan) for x in xs]
    scratch = launch.scratch_of(kernel, xs[0])
    values = replay_ms([prepared(kernel, weights, x, y, scratch) for x, y in zip(xs, outs, strict=True)])
    y = outs[0][: len(reference)]
    error = relative_error(y if kernel.layout is None else from_bricks(y), reference)
    return {**facts(kernel), **summary(values), "error": error}


def time_unmerged(variant: Variant, given: list[Parameters], xs: list[Tensor], reference: Tensor) -> dict[str, Any]:
    """The same kernel layer by layer, for chains of equal layers."""
    kernel = variant.make()
    weights = [kernel.pack([one]) for one in given]
    between = [torch.empty_like(xs[0]) for _ in range(2)]
    outs = [torch.full_like(x, math.nan) for x in xs]
    calls = []
    for x, y in zip(xs, outs, strict=True):
        last = len(given) - 1
        tensors = [x, *(between[n % 2] for n in range(last)), y]
        steps = [prepared(kernel, weights[n], tensors[n], tensors[n + 1]) for n in range(last + 1)]
        calls.append(lambda steps=steps: [step() for step in steps])
    record = {**facts(kernel), **summary(replay_ms(calls)), "unmerged": True}
    return {**record, "error": relative_error(outs[0][: len(reference)], reference)}


def time_cudnn(sequence: Sequence, given: list[Parameters], xs: list[Tensor], reference: Tensor) -> dict[str, Any]:
    """Fused cuDNN (convolution, bias, ReLU in one call), layer by layer."""
    torch.backends.cudnn.benchmark = True
    one = [1] * sequence.dimensions
    last_format = layout(sequence.dimensions)
    weights = [p.weight.contiguous(memory_format=last_format) for p in given]

    def call(x: Tensor) -> Tensor:
        for weight, p in zip(weights, given, strict=True):
            x = torch.cudnn_convolution_relu(x, weight, p.bias, one, one, one, 1)
        return x

    with torch.no_grad():
        error = relative_error(call(xs[0])[: len(reference)], reference)
        return {"kernel": "cudnn fused", **summary(replay_ms([lambda x=x: call(x) for x in xs])), "error": error}


def run_items(items: list[Item], start: int) -> None:
    """In a process of its own: a JSON line per item, as soon as it is done."""
    torch.manual_seed(start)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    inputs: Inputs | None = None
    for number, item in enumerate(items[start:], start):
        if isinstance(item, Check):
            record = guarded(lambda item=item: check(item))
        else:
            if inputs is None or inputs.block != item.block:
                del inputs
                torch.cuda.empty_cache()
                inputs = inputs_of(item)
            record = guarded(lambda item=item, inputs=inputs: time_item(item, inputs))
        print(json.dumps({"item": number, "label": label(item), **record}), flush=True)
        if "CUDA" in record.get("failed", ""):
            sys.exit(1)  # the context may be spoilt


def build_one(task: tuple[Variant, str]) -> str | None:
    """Fill the cache; None, or why there is no kernel."""
    variant, architecture = task
    try:
        build(variant.make(), architecture)
    except (KernelError, ValueError) as error:
        return f"{variant.plan}: {error}"[:300]
    return None


def build_all(items: list[Item], architecture: str, workers: int) -> list[str]:
    """Builds of all variants in parallel; what failed."""
    variants = {repr(item.variant): item.variant for item in items if item.variant is not None}
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        tasks = [(variant, architecture) for variant in variants.values()]
        return [said for said in pool.imap_unordered(build_one, tasks) if said]


class Worker:
    """A process that runs items from one on, and a thread that reads what it says."""

    def __init__(self, only: str, start: int) -> None:
        command = [sys.executable, __file__, "--only", only, "--start", str(start)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next record; None when the process ended.

        Raises:
            queue.Empty: it said nothing for that long.
        """
        line = self.lines.get(timeout=max(seconds, 0.1))
        return None if line is None else json.loads(line)

    def end(self) -> str:
        """Stop the process; the end of what it complained about."""
        self.process.kill()
        assert self.process.stderr is not None
        said = self.process.stderr.read()
        self.process.wait()
        return said[-600:]


def kept(path: Path, items: list[Item]) -> list[dict[str, Any]]:
    """The records of a file that is there, where they are of the first of these items."""
    records: list[dict[str, Any]] = json.loads(path.read_text())["records"] if path.exists() else []
    return records if [one["label"] for one in records] == [label(one) for one in items[: len(records)]] else []


def run_all(
    items: list[Item],
    only: str,
    end: float,
    save: Callable[[list[dict[str, Any]]], None],
    records: list[dict[str, Any]],
) -> bool:
    """Run items one after another, going on behind one that breaks its process or hangs; whether all are done.

    Args:
        items: to run.
        only: what selects them.
        end: on ``time.monotonic``.
        save: writes all records.
        records: of the first items, from before; those of the others are added.
    """
    done = len(records)
    while done < len(items) and time.monotonic() < end - FIRST_SECONDS / 4:
        worker, patience, why = Worker(only, done), FIRST_SECONDS, ""
        while done < len(items):
            try:
                record = worker.next(min(patience, end - time.monotonic()))
            except queue.Empty:
                why = "no answer"
                break
            if record is None:
                break
            done, patience = record["item"] + 1, ITEM_SECONDS
            records.append(record)
            show(record)
            save(records)
        said = worker.end()
        broken = why or (said if done < len(items) and (not records or "failed" not in records[-1]) else "")
        if broken and time.monotonic() < end:
            records.append({"item": done, "label": label(items[done]), "failed": f"{why} {said}"})
            show(records[-1])
            save(records)
            done += 1
    print(f"{done} of {len(items)} items")
    return done == len(items)


def show(record: dict[str, Any]) -> None:
    """A record in a line."""
    keys = ("ms", "error", "ok", "registers", "spilled", "resident", "failed")
    values = ((key, record[key]) for key in keys if key in record)
    print(record["label"], *(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values), flush=True)


def main() -> int:
    """Build, then run item after item while there is time; the exit code is 3 while some are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--only", default="", help="items whose label matches")
    parser.add_argument("--build", metavar="ARCHITECTURE", help="only fill $JOULEMARK_KERNEL_CACHE; needs no GPU")
    parser.add_argument("--start", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    items = everything(options.only)
    if options.start is not None:
        run_items(items, options.start)
        return 0
    begun = time.monotonic()
    architecture = options.build
    if architecture is None:
        asked = "import torch; print(*torch.cuda.get_device_capability())"
        said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
        architecture = architecture_of(int(said[0]), int(said[1]))
    failed = build_all(items, architecture, max(1, len(os.sched_getaffinity(0)) - 1))
    print(f"built in {time.monotonic() - begun:.0f} s", *failed, sep="\n", flush=True)
    if options.build:
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "merged-kernels.json"

    def save(records: list[dict[str, Any]]) -> None:
        path.write_text(json.dumps({"not built": failed, "records": records}, indent=1))

    return 0 if run_all(items, options.only, begun + options.seconds, save, kept(path, items)) else 3


if __name__ == "__main__":
    sys.exit(main())
