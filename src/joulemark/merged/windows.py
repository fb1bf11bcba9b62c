"""Maxima and means over windows, in Triton; :mod:`joulemark.merged.pooling` imports this where Triton is there."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,valid-type"

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from joulemark.merged.pointwise import units_of
from joulemark.merged.sequence import Shape

_ELEMENTS = 2048


@triton.jit(
    do_not_specialize=(
        "pixels", "depth", "height", "width", "out_depth", "out_height", "out_width", "units", "row_units"
    )
)  # fmt: skip
def _windows(
    x, out, pixels, depth, height, width, out_depth, out_height, out_width, units, row_units,
    unit: tl.constexpr, row_unit: tl.constexpr, taps_z: tl.constexpr, taps_y: tl.constexpr, taps_x: tl.constexpr,
    stride_z: tl.constexpr, stride_y: tl.constexpr, stride_x: tl.constexpr,
    pad_z: tl.constexpr, pad_y: tl.constexpr, pad_x: tl.constexpr,
    largest: tl.constexpr, counted: tl.constexpr, rows: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """The largest, or the mean, of the windows of ``rows`` outputs and ``lanes`` channels.

    A mean that counts no zeros around the image divides by what is inside; one that does, by all. A position of the
    output lies ``row_units * row_unit`` numbers behind the one before it.
    """
    channels = units * unit
    pixel = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    channel = tl.program_id(1) * lanes + tl.arange(0, lanes)
    real = (channel < channels)[None, :]
    at = (pixel % out_width) * stride_x - pad_x
    y = ((pixel // out_width) % out_height) * stride_y - pad_y
    z = ((pixel // (out_width * out_height)) % out_depth) * stride_z - pad_z
    image = pixel // (out_width * out_height * out_depth)
    first = ((image * depth + z) * height + y) * width + at
    total = tl.zeros((rows, lanes), tl.float32)
    if largest:
        total -= float("inf")
    inside = tl.zeros((rows,), tl.float32)
    for tap in tl.static_range(taps_z * taps_y * taps_x):
        dz, dy, dx = tap // (taps_y * taps_x), (tap // taps_x) % taps_y, tap % taps_x
        there = (
            (z + dz >= 0) & (z + dz < depth) & (y + dy >= 0) & (y + dy < height) & (at + dx >= 0) & (at + dx < width)
        )
        place = (first + (dz * height + dy) * width + dx)[:, None] * channels + channel[None, :]
        mask = (there & (pixel < pixels))[:, None] & real
        if largest:
            value = tl.load(x + place, mask=mask, other=float("-inf")).to(tl.float32)
            total = tl.maximum(total, value, propagate_nan=tl.PropagateNan.ALL)
        if not largest:
            total += tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
            inside += there.to(tl.float32)
    if not largest:
        if counted:
            total = total / (taps_z * taps_y * taps_x)
        if not counted:
            total = total / inside[:, None]
    position = pixel[:, None] * (row_units * row_unit) + channel[None, :]
    tl.store(out + position, total.to(out.dtype.element_ty), mask=(pixel < pixels)[:, None] & real)


def pooled(
    x: Tensor, largest: bool, kernel: Shape, stride: Shape, padding: Shape, counted: bool, out: Tensor | None = None
) -> Tensor:
    """The largest of each window, or its mean.

    Args:
        x: [batch, channels, (depth,) height, width].
        largest: else the mean.
        kernel, stride, padding: per dimension.
        counted: whether a mean counts the zeros around the image.
        out: where to, channels-last, or some channels of such a tensor; None for a new one.

    Returns:
        ``out``.
    """
    memory = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    x = x.contiguous(memory_format=memory)
    batch, channels, *size = x.shape
    out_size = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(size, kernel, stride, padding, strict=True)]
    if out is None:
        out = torch.empty((batch, channels, *out_size), dtype=x.dtype, device=x.device, memory_format=memory)
    missing = (1,) * (3 - len(size))
    none = (0,) * len(missing)
    pixels = batch * prod(out_size)
    lanes = max(8, min(64, triton.next_power_of_2(channels)))
    rows = _ELEMENTS // lanes
    (units, unit), (row_units, row_unit) = units_of(channels), units_of(out.stride(-1))
    _windows[triton.cdiv(pixels, rows), triton.cdiv(channels, lanes)](
        x, out, pixels, *missing, *size, *missing, *out_size, units, row_units, unit, row_unit,
        *missing, *kernel, *missing, *stride, *none, *padding, largest, counted, rows, lanes,
    )  # fmt: skip
    return out
