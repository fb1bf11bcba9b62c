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
        "pixels", "depth", "height", "width", "out_depth", "out_height", "out_width",
        "all_depth", "all_height", "all_width", "units", "row_units", "beside_units",
    )
)  # fmt: skip
def _windows(
    x, out, beside, pixels, depth, height, width, out_depth, out_height, out_width, all_depth, all_height, all_width,
    units, row_units, beside_units, unit: tl.constexpr, row_unit: tl.constexpr, beside_unit: tl.constexpr,
    taps_z: tl.constexpr, taps_y: tl.constexpr, taps_x: tl.constexpr,
    stride_z: tl.constexpr, stride_y: tl.constexpr, stride_x: tl.constexpr,
    pad_z: tl.constexpr, pad_y: tl.constexpr, pad_x: tl.constexpr,
    largest: tl.constexpr, counted: tl.constexpr, kept: tl.constexpr, rows: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """The largest, or the mean, of the windows of ``rows`` outputs and ``lanes`` channels.

    A mean that counts no zeros around the image divides by what is inside; one that does, by all. A position of the
    output lies ``row_units * row_unit`` numbers behind the one before it, one of ``beside`` ``beside_units *
    beside_unit``. Where the input is ``kept`` there, each position is copied by the window whose stride it is in; so
    there may be more windows, ``all``, than outputs.
    """
    channels = units * unit
    pixel = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    channel = tl.program_id(1) * lanes + tl.arange(0, lanes)
    real = (channel < channels)[None, :]
    out_at, out_y = pixel % all_width, (pixel // all_width) % all_height
    out_z, image = (pixel // (all_width * all_height)) % all_depth, pixel // (all_width * all_height * all_depth)
    at, y, z = out_at * stride_x - pad_x, out_y * stride_y - pad_y, out_z * stride_z - pad_z
    first = ((image * depth + z) * height + y) * width + at
    total = tl.zeros((rows, lanes), tl.float32)
    if largest:
        total -= float("inf")
    inside = tl.zeros((rows,), tl.float32)
    for dz in tl.static_range(taps_z):
        for dy in tl.static_range(taps_y):
            for dx in tl.static_range(taps_x):
                inside_y = (z + dz >= 0) & (z + dz < depth) & (y + dy >= 0) & (y + dy < height)
                there = inside_y & (at + dx >= 0) & (at + dx < width)
                place = (first + (dz * height + dy) * width + dx)[:, None]
                mask = (there & (pixel < pixels))[:, None] & real
                source = x + place * channels + channel[None, :]
                number = tl.load(source, mask=mask, other=float("-inf") if largest else 0.0)
                if (
                    kept and dz >= pad_z and dz < pad_z + stride_z and dy >= pad_y and dy < pad_y + stride_y
                    and dx >= pad_x and dx < pad_x + stride_x
                ):  # fmt: skip
                    copy = beside + place * (beside_units * beside_unit) + channel[None, :]
                    tl.store(copy, number, mask=mask)
                if largest:
                    total = tl.maximum(total, number.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
                if not largest:
                    total += number.to(tl.float32)
                    inside += there.to(tl.float32)
    if not largest:
        if counted:
            total = total / (taps_z * taps_y * taps_x)
        if not counted:
            total = total / inside[:, None]
    wanted = (pixel < pixels) & (out_at < out_width) & (out_y < out_height) & (out_z < out_depth)
    line = (image * out_depth + out_z) * out_height + out_y
    position = (line * out_width + out_at)[:, None] * (row_units * row_unit) + channel[None, :]
    tl.store(out + position, total.to(out.dtype.element_ty), mask=wanted[:, None] & real)


def compiled_for(channels: int) -> tuple[int, int]:
    """What the kernel of a pooling into a tensor of its own is compiled for by channels."""
    return units_of(channels)[1], _lanes(channels)


def _lanes(channels: int) -> int:
    """Channels of a program."""
    return int(max(8, min(64, triton.next_power_of_2(channels))))


def pooled(
    x: Tensor,
    largest: bool,
    kernel: Shape,
    stride: Shape,
    padding: Shape,
    counted: bool,
    out: Tensor | None = None,
    beside: Tensor | None = None,
) -> Tensor:
    """The largest of each window, or its mean.

    Args:
        x: [batch, channels, (depth,) height, width].
        largest: else the mean.
        kernel, stride, padding: per dimension.
        counted: whether a mean counts the zeros around the image.
        out: where to, channels-last, or some channels of such a tensor; None for a new one.
        beside: where x is copied to, as ``out``; None for nowhere. For windows that reach over their whole stride.

    Returns:
        ``out``.
    """
    memory = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    x = x.contiguous(memory_format=memory)
    batch, channels, *size = x.shape
    out_size = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(size, kernel, stride, padding, strict=True)]
    if out is None:
        out = torch.empty((batch, channels, *out_size), dtype=x.dtype, device=x.device, memory_format=memory)
    all_size = out_size
    if beside is not None:
        all_size = [max(n, -(-whole // s)) for n, whole, s in zip(out_size, size, stride, strict=True)]
    missing = (1,) * (3 - len(size))
    none = (0,) * len(missing)
    pixels = batch * prod(all_size)
    lanes = _lanes(channels)
    rows = _ELEMENTS // lanes
    (units, unit), (row_units, row_unit) = units_of(channels), units_of(out.stride(-1))
    beside_units, beside_unit = (row_units, row_unit) if beside is None else units_of(beside.stride(-1))
    _windows[triton.cdiv(pixels, rows), triton.cdiv(channels, lanes)](
        x, out, out if beside is None else beside, pixels, *missing, *size, *missing, *out_size, *missing, *all_size,
        units, row_units, beside_units, unit, row_unit, beside_unit,
        *missing, *kernel, *missing, *stride, *none, *padding, largest, counted, beside is not None, rows, lanes,
    )  # fmt: skip
    return out
