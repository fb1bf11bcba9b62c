"""A convolution of few channels and taps in Triton, as networks begin with, whose taps are one step of a product."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,valid-type"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from joulemark.merged.normalize import statistics
from joulemark.merged.pointwise import NUMBERS, adding, finished, units_of
from joulemark.merged.sequence import Conv

_STEP = 64
"""Taps times channels, at most, that a product takes in one step."""
_COLUMNS = 64
"""Channels that a program computes, at most; all of them where a norm wants them."""
_NORMED = 256
"""Of a norm, at most."""


@triton.jit(do_not_specialize=("pixels", "height", "width", "out_height", "out_width", "output_units"))
def _gathered(
    x, weight, bias, residual, out, pixels, height, width, out_height, out_width, output_units,
    output_unit: tl.constexpr, inputs: tl.constexpr, taps_y: tl.constexpr, taps_x: tl.constexpr,
    stride_y: tl.constexpr, stride_x: tl.constexpr, pad_y: tl.constexpr, pad_x: tl.constexpr,
    step_y: tl.constexpr, step_x: tl.constexpr, biased: tl.constexpr, added: tl.constexpr, activation: tl.constexpr,
    normed: tl.constexpr, eps: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """``rows`` outputs and ``columns`` channels of a convolution whose taps of all channels are one step of a product.

    Weights lie as [outputs, taps_y, taps_x, inputs]; ``bias`` is [outputs], with a norm [3, outputs] with its scale and
    shift, and ``columns`` are all outputs then.
    """
    outputs = output_units * output_unit
    pixel = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    there, real = (pixel < pixels)[:, None], (column < outputs)[None, :]
    image, place = (pixel // (out_height * out_width)).to(tl.int64), pixel % (out_height * out_width)
    inner = tl.arange(0, depth)
    y = (place // out_width)[:, None] * stride_y - pad_y + (inner // (taps_x * inputs))[None, :] * step_y
    at = (place % out_width)[:, None] * stride_x - pad_x + ((inner // inputs) % taps_x)[None, :] * step_x
    tap = inner < taps_y * taps_x * inputs
    inside = there & tap[None, :] & (y >= 0) & (y < height) & (at >= 0) & (at < width)
    left = tl.load(x + ((image[:, None] * height + y) * width + at) * inputs + (inner % inputs)[None, :], mask=inside,
                   other=0.0)  # fmt: skip
    right = tl.load(
        weight + column[None, :] * (taps_y * taps_x * inputs) + inner[:, None], mask=tap[:, None] & real, other=0.0
    )
    total = tl.dot(left, right, input_precision=precision)
    if biased:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    if normed:
        channel = tl.zeros((rows, columns), tl.int32) + column[None, :]
        mean, inverse = statistics((total,), channel, outputs, eps, 1, columns)
        scale = tl.load(bias + outputs + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
        shift = tl.load(bias + 2 * outputs + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
        total = (total - mean) * inverse * scale + shift
    position = pixel.to(tl.int64)[:, None] * outputs + column[None, :]
    total = finished(total, residual + position, there & real, added, activation)
    tl.store(out + position, total.to(out.dtype.element_ty), mask=there & real)


def gathers(layer: Conv) -> bool:
    """Whether :func:`gathered` is made for a layer: two dimensions, one group, all taps one step of a product."""
    taps = layer.kernel[0] * layer.kernel[-1] * layer.in_channels
    narrow = layer.norm is None or layer.out_channels <= _NORMED
    return len(layer.kernel) == 2 and layer.groups == 1 and taps <= _STEP and max(layer.kernel) > 1 and narrow


def tiles_of(layer: Conv) -> tuple[tuple[int, int], ...]:
    """Outputs and channels that a program computes, in the sizes that are worth a trial."""
    whole = max(16, int(triton.next_power_of_2(layer.out_channels)))
    if layer.norm is None:
        return ((64, min(_COLUMNS, whole)), (128, min(_COLUMNS, whole)))
    return ((32, whole), (64, whole))


def gathered(
    layer: Conv,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    tile: tuple[int, int],
) -> Tensor:
    """A convolution of few channels, as networks begin with, and what follows it.

    Args:
        layer: that :func:`gathers` admits.
        x: [batch, inputs, height, width], channels-last.
        weight: [outputs, inputs, rows, columns], channels-last.
        bias: [outputs]; with a norm [3, outputs], bias, scale and shift.
        residual: like out.
        out: where to, channels-last.
        tile: outputs and channels that a program computes.
    """
    batch, inputs, height, width = x.shape
    out_height, out_width = out.shape[2:]
    rows, columns = tile
    pixels = batch * out_height * out_width
    units, unit = units_of(layer.out_channels)
    grid = (triton.cdiv(pixels, rows), triton.cdiv(layer.out_channels, columns))
    shape: tuple[Any, ...] = (*layer.kernel, *layer.stride, *layer.padding, *layer.dilation)
    depth = max(16, triton.next_power_of_2(layer.kernel[0] * layer.kernel[1] * inputs))
    _gathered[grid](
        x, weight, x if bias is None else bias, x if residual is None else residual, out,
        pixels, height, width, out_height, out_width, units, unit, inputs, *shape,
        bias is not None, adding(layer, residual), NUMBERS[layer.activation],
        layer.norm is not None, layer.norm or 0.0, rows, columns, depth, "tf32",
    )  # fmt: skip
    return out
