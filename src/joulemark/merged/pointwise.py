"""Two plain kernels in Triton for what stands between merged sequences: an epilogue, and a depthwise convolution.

Both read and write channels-last tensors once and keep sums in fp32. They import Triton, which comes with torch for
CUDA: only :mod:`joulemark.merged.paths` imports this module, and only where Triton is there.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,valid-type"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from joulemark.merged.sequence import LEAKY_SLOPE, Activation, Conv

_NUMBERS: dict[Activation, int] = {
    "none": 0,
    "relu": 1,
    "relu6": 2,
    "silu": 3,
    "gelu": 4,
    "leaky": 5,
    "hardswish": 6,
}
_SLOPE = tl.constexpr(LEAKY_SLOPE)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_ELEMENTS = 2048


@triton.jit
def _activate(y, activation: tl.constexpr):
    """The activation of a number, as :data:`joulemark.merged.bricks.ACTIVATIONS` has it."""
    if activation == 1:
        y = tl.maximum(y, 0.0)
    if activation == 2:
        y = tl.minimum(tl.maximum(y, 0.0), 6.0)
    if activation == 3:
        y = y / (1.0 + tl.exp(-y))
    if activation == 4:
        y = 0.5 * y * (1.0 + tl.erf(y * _ROOT_HALF))
    if activation == 5:
        y = tl.where(y > 0.0, y, y * _SLOPE)
    if activation == 6:
        y = y * tl.minimum(tl.maximum(y + 3.0, 0.0), 6.0) / 6.0
    return y


@triton.jit
def _epilogue(
    y, bias, residual, count, channels,
    biased: tl.constexpr, added: tl.constexpr, activation: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """In place ``activation(y + bias + residual)`` over ``count`` elements, channels innermost."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < count
    value = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
    if biased:
        value += tl.load(bias + at % channels, mask=there, other=0.0).to(tl.float32)
    if added:
        value += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    tl.store(y + at, _activate(value, activation).to(y.dtype.element_ty), mask=there)


def epilogue(y: Tensor, bias: Tensor | None, residual: Tensor | None, activation: Activation) -> Tensor:
    """``activation(y + bias + residual)`` in place.

    Args:
        y: [batch, channels, *size], channels-last.
        bias: [channels].
        residual: like y.
    """
    count = y.numel()
    grid = (triton.cdiv(count, _ELEMENTS),)
    _epilogue[grid](
        y, y if bias is None else bias, y if residual is None else residual, count, y.shape[1],
        bias is not None, residual is not None, _NUMBERS[activation], _ELEMENTS,
    )  # fmt: skip
    return y


@triton.jit
def _depthwise(
    x, weight, bias, residual, out, channels, height, width, out_height, out_width,
    rows: tl.constexpr, columns: tl.constexpr, stride_y: tl.constexpr, stride_x: tl.constexpr,
    pad_y: tl.constexpr, pad_x: tl.constexpr, step_y: tl.constexpr, step_x: tl.constexpr,
    biased: tl.constexpr, added: tl.constexpr, activation: tl.constexpr, pixels: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """``pixels`` neighbouring outputs of one row and ``lanes`` channels of a depthwise convolution."""
    strips = tl.cdiv(out_width, pixels)
    line = tl.program_id(0) // strips
    column = (tl.program_id(0) % strips) * pixels + tl.arange(0, pixels)
    channel = tl.program_id(1) * lanes + tl.arange(0, lanes)
    image, row = (line // out_height).to(tl.int64), line % out_height
    real = channel < channels
    total = tl.zeros((pixels, lanes), tl.float32)
    if biased:
        total += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    for dy in tl.static_range(rows):
        y = row * stride_y - pad_y + dy * step_y
        inside_y = (y >= 0) & (y < height)
        for dx in tl.static_range(columns):
            at = column * stride_x - pad_x + dx * step_x
            inside = ((at >= 0) & (at < width) & inside_y)[:, None] & real[None, :]
            place = ((image * height + y) * width + at)[:, None] * channels + channel[None, :]
            value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            tap = tl.load(weight + (dy * columns + dx) * channels + channel, mask=real, other=0.0).to(tl.float32)
            total += value * tap[None, :]
    place = ((image * out_height + row) * out_width + column)[:, None] * channels + channel[None, :]
    there = (column < out_width)[:, None] & real[None, :]
    if added:
        total += tl.load(residual + place, mask=there, other=0.0).to(tl.float32)
    tl.store(out + place, _activate(total, activation).to(out.dtype.element_ty), mask=there)


def depthwise(
    layer: Conv, x: Tensor, taps: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor
) -> Tensor:
    """A depthwise convolution in two dimensions with what follows it.

    Args:
        layer: of as many groups as channels.
        x: [batch, channels, height, width], channels-last.
        taps: [rows * columns, channels], contiguous.
        bias: [channels].
        residual: like out.
        out: where to, channels-last.
    """
    batch, channels, height, width = x.shape
    out_height, out_width = out.shape[2:]
    lanes = min(64, triton.next_power_of_2(channels))
    pixels = max(1, min(16, triton.next_power_of_2(out_width)))
    grid = (batch * out_height * triton.cdiv(out_width, pixels), triton.cdiv(channels, lanes))
    shape: tuple[Any, ...] = (*layer.kernel, *layer.stride, *layer.padding, *layer.dilation)
    _depthwise[grid](
        x, taps, x if bias is None else bias, x if residual is None else residual, out,
        channels, height, width, out_height, out_width, *shape,
        bias is not None, residual is not None, _NUMBERS[layer.activation], pixels, lanes,
    )  # fmt: skip
    return out


def taps_of(weight: Tensor) -> Tensor:
    """[channels, 1, rows, columns] → [rows * columns, channels], so that neighbouring lanes read neighbours."""
    return weight.flatten(1).t().contiguous().to(torch.float32)
