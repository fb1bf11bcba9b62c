"""The first convolution of a network, of up to four channels and eight taps in a row, by kernels in Triton.

Libraries multiply channels in steps of eight and more: of three they waste most. Here a step of a product is a row of
taps: in an image of four channels, channels innermost, its eight pixels are 32 neighbours in memory, of which 7 taps of
3 channels fill two thirds. One kernel pads the image with zeros, in rows, columns and channels, so that the other one
reads without asking where it is. Volumes are images with more rows of taps.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,valid-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from joulemark.merged.pointwise import NUMBERS, activate, units_of
from joulemark.merged.sequence import Conv, Shape, of_three

_CHANNELS = 4
_PIXELS = 8
_FILLED = 1024
"""Pixels of the padded image that a program writes."""


@triton.jit(do_not_specialize=("pixels", "depth", "height", "width", "out_depth", "out_height", "out_width"))
def _pad(
    x, out, pixels, depth, height, width, out_depth, out_height, out_width,
    inputs: tl.constexpr, pad_z: tl.constexpr, pad_y: tl.constexpr, pad_x: tl.constexpr,
    channels: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Writes ``block`` pixels of the padded image, ``channels`` of each: zeros around it and behind ``inputs``."""
    pixel = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    channel = tl.arange(0, channels)
    at = pixel % out_width - pad_x
    y = (pixel // out_width) % out_height - pad_y
    z = (pixel // (out_width * out_height)) % out_depth - pad_z
    image = pixel // (out_width * out_height * out_depth)
    inside = (at >= 0) & (at < width) & (y >= 0) & (y < height) & (z >= 0) & (z < depth) & (pixel < pixels)
    given = (((image * depth + z) * height + y) * width + at) * inputs
    value = tl.load(
        x + given[:, None] + channel[None, :], mask=inside[:, None] & (channel < inputs)[None, :], other=0.0
    )
    tl.store(out + pixel[:, None] * channels + channel[None, :], value, mask=(pixel < pixels)[:, None])


@triton.jit(do_not_specialize=("pixels", "depth", "height", "width", "out_depth", "out_height", "out_width", "units"))
def _rows(
    x, weight, bias, out, pixels, depth, height, width, out_depth, out_height, out_width, units,
    unit: tl.constexpr, channels: tl.constexpr, taps_z: tl.constexpr, taps_y: tl.constexpr, taps_x: tl.constexpr,
    stride_z: tl.constexpr, stride_y: tl.constexpr, stride_x: tl.constexpr, biased: tl.constexpr,
    activation: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """``rows`` outputs, ``columns`` channels: a product for each row of taps; weights as :func:`rows_of` has them."""
    outputs = units * unit
    pixel = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    there, real = pixel < pixels, column < outputs
    place = tl.where(there, pixel, 0)
    at = (place % out_width) * stride_x
    y = ((place // out_width) % out_height) * stride_y
    z = ((place // (out_width * out_height)) % out_depth) * stride_z
    image = (place // (out_width * out_height * out_depth)).to(tl.int64)
    first = (((image * depth + z) * height + y) * width + at) * channels
    inner = tl.arange(0, step)
    total = tl.zeros((rows, columns), tl.float32)
    for row in range(taps_z * taps_y):
        begin = ((row // taps_y) * height + row % taps_y) * width * channels
        left = tl.load(
            x + (first + begin)[:, None] + inner[None, :], mask=(inner < taps_x * channels)[None, :], other=0.0
        )
        right = tl.load(
            weight + (row * step + inner)[:, None] * outputs + column[None, :], mask=real[None, :], other=0.0
        )
        total = tl.dot(left, right, total, input_precision=precision)
    if biased:
        total += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
    position = pixel.to(tl.int64)[:, None] * outputs + column[None, :]
    total = activate(total, activation, out.dtype.element_ty.primitive_bitwidth)
    tl.store(out + position, total.to(out.dtype.element_ty), mask=there[:, None] & real[None, :])


def has_rows(layer: Conv) -> bool:
    """Whether :func:`stem` is made for a layer."""
    few = layer.in_channels <= _CHANNELS and 1 < layer.kernel[-1] <= _PIXELS and len(layer.kernel) in (2, 3)
    return few and layer.groups == 1 and set(layer.dilation) == {1}


def tiles_of(layer: Conv) -> tuple[tuple[int, int], ...]:
    """Outputs and channels that a program computes, in the sizes that are worth a trial."""
    columns = max(16, min(64, triton.next_power_of_2(layer.out_channels)))
    return ((128, columns), (256, columns))


def rows_of(weight: Tensor) -> Tensor:
    """[outputs, inputs, (planes,) rows, columns] → [planes * rows * step, outputs]: a row's channels, zeros."""
    outputs, inputs, *taps = weight.shape
    by_row = weight.movedim(1, -1).reshape(outputs, -1, taps[-1], inputs)
    filled = weight.new_zeros(outputs, by_row.shape[1], _step(taps[-1]) // _CHANNELS, _CHANNELS)
    filled[:, :, : taps[-1], :inputs] = by_row
    return filled.reshape(outputs, -1).t().contiguous()


def stem(layer: Conv, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Shape) -> Tensor:
    """The convolution and its activation.

    Args:
        layer: that :func:`has_rows` admits.
        x: [batch, inputs, (depth,) height, width], channels-last.
        weight: as :func:`rows_of` has it.
        bias: [outputs].
        out: where to, channels-last.
        tile: outputs and channels that a program computes.
    """
    batch, inputs = x.shape[:2]
    pad, stride, taps = (
        of_three(one, empty) for one, empty in ((layer.padding, 0), (layer.stride, 1), (layer.kernel, 1))
    )
    size, out_size = (of_three(tuple(one.shape[2:]), 1) for one in (x, out))
    wide = tuple(edge + 2 * around for edge, around in zip(size, pad, strict=True))
    padded = torch.empty((batch, *wide, _CHANNELS), dtype=x.dtype, device=x.device)
    count = padded.numel() // _CHANNELS
    _pad[(triton.cdiv(count, _FILLED),)](x, padded, count, *size, *wide, inputs, *pad, _CHANNELS, _FILLED)
    rows, columns = tile
    pixels = batch * out_size[0] * out_size[1] * out_size[2]
    grid = (triton.cdiv(pixels, rows), triton.cdiv(layer.out_channels, columns))
    _rows[grid](
        padded, weight, padded if bias is None else bias, out, pixels, *wide, *out_size, *units_of(layer.out_channels),
        _CHANNELS, *taps, *stride, bias is not None, NUMBERS[layer.activation], rows, columns, _step(taps[-1]), "tf32",
        num_warps=rows // 32, num_stages=3,
    )  # fmt: skip
    return out


def _step(taps: int) -> int:
    """Elements of a row of taps that a product takes, some of them zeros."""
    return 16 if _CHANNELS * taps <= 16 else 32
