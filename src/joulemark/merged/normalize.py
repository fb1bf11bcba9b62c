"""Layer norms over channels in Triton: behind what was just computed, and of a tensor that lies in memory.

A program has all channels of its positions in registers, in fp32; mean and variance are two passes over these, the
second over differences from the mean. Channels that are no power of two are masked, in three parts where that leaves
fewer idle: 96, 192, 384 and 768 leave none.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,valid-type,assignment"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from joulemark.merged.pointwise import NUMBERS, adding, finished
from joulemark.merged.sequence import Conv

MOST_CHANNELS = 3072
"""Whose numbers stay in registers."""
_FEWEST_LANES = 16
"""Of a part: eight neighbours are loaded at once."""
_NUMBERS = 4096
"""That a program takes, where it takes more than one position."""
_OF_A_THREAD = 8
"""Of each part: 16 bytes of 16 bits."""


def parts_of(channels: int) -> tuple[int, int]:
    """Parts, and channels of each, a power of two."""
    whole, third = (triton.next_power_of_2(one) for one in (channels, triton.cdiv(channels, 3)))
    return (3, third) if 3 * third < whole and third >= _FEWEST_LANES else (1, whole)


@triton.jit
def statistics(values, channel, channels, eps: tl.constexpr, parts: tl.constexpr, lanes: tl.constexpr):
    """Mean and inverse deviation of each row.

    ``values``: ``parts`` tensors [rows, lanes], zeros beyond the last channel; ``channel``: of the first, as large.
    """
    total = values[0]
    for part in tl.static_range(1, parts):
        total += values[part]
    mean = (tl.sum(total, 1) / channels)[:, None]
    square = tl.zeros_like(total)
    for part in tl.static_range(parts):
        away = tl.where(channel + part * lanes < channels, values[part] - mean, 0.0)
        square += away * away
    return mean, tl.rsqrt(tl.sum(square, 1) / channels + eps)[:, None]


@triton.jit(do_not_specialize=("positions",))
def _normalize(
    x, bias, affine, residual, out, positions,
    channels: tl.constexpr, biased: tl.constexpr, added: tl.constexpr, activation: tl.constexpr, eps: tl.constexpr,
    rows: tl.constexpr, parts: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """``rows`` positions of ``norm(x + bias)`` and what follows."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
    channel = tl.zeros((rows, lanes), tl.int32) + tl.arange(0, lanes)[None, :]
    values = ()
    for part in tl.static_range(parts):
        real = channel + part * lanes < channels
        there = real & (row < positions)
        value = tl.load(x + row * channels + channel + part * lanes, mask=there, other=0.0).to(tl.float32)
        if biased:
            value += tl.load(bias + channel + part * lanes, mask=real, other=0.0).to(tl.float32)
        values += (value,)
    mean, inverse = statistics(values, channel, channels, eps, parts, lanes)
    for part in tl.static_range(parts):
        real = channel + part * lanes < channels
        there = real & (row < positions)
        scale = tl.load(affine + channel + part * lanes, mask=real, other=0.0).to(tl.float32)
        shift = tl.load(affine + channels + channel + part * lanes, mask=real, other=0.0).to(tl.float32)
        value = (values[part] - mean) * inverse * scale + shift
        place = row * channels + channel + part * lanes
        value = finished(value, residual + place, there, added, activation)
        tl.store(out + place, value.to(out.dtype.element_ty), mask=there)


def normalized(
    x: Tensor,
    bias: Tensor | None,
    affine: Tensor,
    eps: float,
    out: Tensor,
    layer: Conv | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``norm(x + bias)`` by one kernel, with what follows it in a layer.

    Args:
        x: [batch, channels, *size], channels-last, of :data:`MOST_CHANNELS` at most.
        bias: [channels].
        affine: [2, channels], scale and shift behind the norm.
        eps: what is added to the variance.
        out: where to, like x; x itself perhaps.
        layer: whose activation follows, and which adds; None for the norm alone.
        residual: like x.
    """
    channels = x.shape[1]
    added = "nothing" if layer is None else adding(layer, residual)
    activation = NUMBERS["none" if layer is None else layer.activation]
    parts, lanes = parts_of(channels)
    positions = x.numel() // channels
    most = 1 << max(_NUMBERS // (parts * lanes), 1).bit_length() - 1
    rows = min(most, triton.next_power_of_2(positions))
    _normalize[(triton.cdiv(positions, rows),)](
        x, x if bias is None else bias, affine, x if residual is None else residual, out, positions,
        channels, bias is not None, added, activation, eps, rows, parts, lanes,
        num_warps=max(1, min(8, rows * lanes // (32 * _OF_A_THREAD))),
    )  # fmt: skip
    return out
