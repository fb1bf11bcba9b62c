"""Squeeze-and-excitation up to its gates, by two kernels in Triton; what imports this looks for Triton first."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,valid-type"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from joulemark.merged.pointwise import NUMBERS, activate, units_of, up_to_six
from joulemark.merged.sequence import Activation

_POOL_ROWS, _POOL_STEPS, _POOL_LANES = 32, 4, 64
"""Pixels that a pooling adds to its sums at a time, how many times as many are on their way at once, and channels."""
_POOLED = 4 * 132
"""Programs that a pooling is cut into at most, where its images are fewer: four for each multiprocessor of an H200."""
_SQUEEZED = 64
"""Squeezed channels that an excitation takes at a time: more than that are rare."""
_EXCITED, _EXCITED_WARPS = 64, 2
"""Channels whose gates a program makes, and its warps: the fastest of five on an H200, at batch 1, 32 and 128 alike."""
_ADDED = 2048
"""Numbers of the first product that such a program has on their way at once, 16 for each thread."""


class Split(NamedTuple):
    """How the two kernels of a squeeze-and-excitation are cut into programs."""

    parts: int
    """Of an image's pixels: a program pools one, in ``_POOL_LANES`` channels."""
    width: int
    """Squeezed channels that either kernel takes at a time."""
    lanes: int
    """Channels whose gates a program makes."""
    warps: int
    """Of such a program."""


def split_for(batch: int, channels: int, squeezed: int, pixels: int) -> Split:
    """The split for ``batch`` images of ``pixels`` positions.

    Pooling takes the fewest turns of its loop that programs which run at once can share, and no more parts than that.
    """
    loads = triton.cdiv(pixels, _POOL_ROWS * _POOL_STEPS)
    most = max(1, _POOLED // (batch * triton.cdiv(channels, _POOL_LANES)))
    turns = triton.cdiv(loads, most)
    width = max(16, min(_SQUEEZED, triton.next_power_of_2(squeezed)))
    lanes = max(16, min(_EXCITED, triton.next_power_of_2(channels)))
    return Split(triton.cdiv(loads, turns), width, lanes, _EXCITED_WARPS)


def compiled_for(channels: int, squeezed: int) -> tuple[int, ...]:
    """What both kernels are compiled for by sizes: excitations that agree in it, and in all else, share them."""
    split = split_for(1, channels, squeezed, 1)
    return units_of(channels)[1], split.width, triton.cdiv(squeezed, split.width), split.lanes


@triton.jit
def _factor(weight, start, channel, channels, squeezed, width: tl.constexpr):
    """[width, lanes] of weights that lie as [squeezed, channels], zeros beside them."""
    inner = start + tl.arange(0, width)
    there = (inner < squeezed)[:, None] & (channel < channels)[None, :]
    return tl.load(weight + inner[:, None] * channels + channel[None, :], mask=there, other=0.0)


@triton.jit(do_not_specialize=("pixels", "parts", "units", "squeezed"))
def _pool(
    x, weight, products, pixels, parts, units, squeezed, unit: tl.constexpr,
    padded: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, steps: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """What ``lanes`` channels of one of ``parts`` parts of an image add to the first product: weight · sum over pixels.

    Loads are issued ahead of the loop that uses them, which issues the next: those of a turn's own would wait for each
    other, as ptxas puts each beside its use.
    """
    channels = units * unit
    image, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    channel = tl.program_id(1) * lanes + tl.arange(0, lanes)
    factor = _factor(weight, 0, channel, channels, squeezed, width)
    share = tl.cdiv(pixels, parts)
    left = tl.minimum(share, pixels - part * share)
    row, real = tl.arange(0, rows * steps), (channel < channels)[None, :]
    x += (image * pixels + part * share) * channels
    place = row[:, None] * channels + channel[None, :]
    coming = tl.load(x + place, mask=(row < left)[:, None] & real, other=0.0)
    total = tl.zeros((rows, lanes), tl.float32)
    for _ in range(0, left, rows * steps):
        total += tl.sum(tl.reshape(coming, (steps, rows, lanes)).to(tl.float32), 0)
        x += rows * steps * channels
        left -= rows * steps
        coming = tl.load(x + place, mask=(row < left)[:, None] & real, other=0.0)
    pooled = tl.sum(total, 0)[None, :]
    products += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * padded
    for start in range(0, padded, width):
        tl.store(products + start + tl.arange(0, width), tl.sum(factor.to(tl.float32) * pooled, 1))
        factor = _factor(weight, start + width, channel, channels, squeezed, width)


@triton.jit(do_not_specialize=("pixels", "pieces", "units", "squeezed"))
def _excite(
    products, squeeze_bias, weight, bias, gate, pixels, pieces, units, squeezed,
    unit: tl.constexpr, activation: tl.constexpr, hard: tl.constexpr,
    padded: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """The gates of ``lanes`` channels of an image from the ``pieces`` of its first product.

    Every program adds up all pieces, activates, multiplies by its own weights and takes the sigmoid. Where ``padded``
    is one ``width`` the compiler leaves no loop over it, and all loads of a program are on their way at once.
    """
    channels = units * unit
    image = tl.program_id(0)
    channel = tl.program_id(1) * lanes + tl.arange(0, lanes)
    row = tl.arange(0, rows)[:, None]
    shift = tl.load(bias + channel, mask=channel < channels, other=0.0)
    value = tl.zeros((lanes,), tl.float32)
    for start in range(0, padded, width):
        inner = start + tl.arange(0, width)
        place = products + (image * pieces + row) * padded + inner[None, :]
        total = tl.load(place, mask=row < pieces, other=0.0)
        factor = _factor(weight, start, channel, channels, squeezed, width)
        added = tl.load(squeeze_bias + inner, mask=inner < squeezed, other=0.0)
        for piece in range(rows, pieces, rows):
            total += tl.load(place + piece * padded, mask=row < pieces - piece, other=0.0)
        hidden = activate(tl.sum(total, 0) / pixels + added.to(tl.float32), activation)
        hidden = tl.where(inner < squeezed, hidden, 0.0)  # zero times an infinity of the image is in those beside them
        value += tl.sum(factor.to(tl.float32) * hidden[:, None], 0)
    value += shift.to(tl.float32)
    if hard:
        value = up_to_six(value + 3.0) / 6.0
    if not hard:
        value = 1.0 / (1.0 + tl.exp(-value))
    tl.store(gate + image * channels + channel, value.to(gate.dtype.element_ty), mask=channel < channels)


def squeeze_and_excite(
    x: Tensor, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], activation: Activation, hard: bool
) -> Tensor:
    """The gate of every image and channel (Hu et al., *Squeeze-and-Excitation Networks*, CVPR 2018), by two kernels.

    The first product is linear, so whoever pools some channels also multiplies their sums; ``squeezed`` numbers of each
    of those programs are left to add up, in fp32 and in one order: the same input gives the same bits.

    Args:
        x: [batch, channels, *size], channels-last.
        first: weight [squeezed, channels] and bias [squeezed].
        second: weight [squeezed, channels], turned, and bias [channels].
        activation: between them.
        hard: whether a hard sigmoid ends it.

    Returns:
        [batch, channels, 1, …], contiguous.
    """
    batch, channels = x.shape[:2]
    pixels, squeezed = x.numel() // (batch * channels), first[0].shape[0]
    split = split_for(batch, channels, squeezed, pixels)
    parts, width, lanes = split.parts, split.width, split.lanes
    across, padded = triton.cdiv(channels, _POOL_LANES), triton.cdiv(squeezed, width) * width
    products = torch.empty((batch, parts * across, padded), dtype=torch.float32, device=x.device)
    units, unit = units_of(channels)
    _pool[(batch * parts, across)](
        x, first[0], products, pixels, parts, units, squeezed, unit, padded, width, _POOL_ROWS, _POOL_STEPS, _POOL_LANES
    )
    gate = torch.empty((batch, channels, *(1,) * (x.dim() - 2)), dtype=x.dtype, device=x.device)
    _excite[(batch, triton.cdiv(channels, lanes))](
        products, first[1], *second, gate, pixels, parts * across, units, squeezed, unit,
        NUMBERS[activation], hard, padded, width, _ADDED // width, lanes,
        num_warps=split.warps,
    )  # fmt: skip
    return gate
