"""Plain kernels in Triton for what stands between merged sequences.

An epilogue; a depthwise convolution; a pointwise convolution, of a gated input too. All read and write channels-last
tensors once and keep sums in fp32. They import Triton, which comes with torch for CUDA: this module and those beside it
that hold kernels in Triton (:mod:`joulemark.merged.copies`, ``excitation``, ``gather``, ``normalize``, ``sliding``,
``spread``, ``stem``, ``windows``) are imported only where it is there, by what runs them.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,valid-type"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from joulemark.merged.sequence import LEAKY_SLOPE, Activation, Conv

NUMBERS: dict[Activation, int] = {
    "none": 0,
    "relu": 1,
    "relu6": 2,
    "silu": 3,
    "gelu": 4,
    "leaky": 5,
    "hardswish": 6,
}
# Sizes are not compiled in (``do_not_specialize``): one kernel serves all batches and resolutions.
_SLOPE = tl.constexpr(LEAKY_SLOPE)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_LOG2_E = tl.constexpr(1.4426950408889634)
_TAIL = tl.constexpr(6.5)
"""From where on a GELU of 16 bits takes what the normal distribution has beyond as it is there: 4e-11."""
_ELEMENTS = 2048
_OCTET = 8


@triton.jit
def _gelu_of_16_bits(y):
    """``max(y, 0) - |y| Q(|y|)``, which is y Φ(y), in ten instructions, for a result that is rounded to 16 bits.

    Q, the normal distribution beyond a point, is 2 to a polynomial: log2(Q) is smooth, about a parabola. Its minimax
    fit (by a linear program, Chebyshev basis) of degree 6 on [0, 6.5], weighted 30 times as high up to 4.75, is off Q
    by 2.6e-5 of it there and by 8e-4 of it behind. Beyond -6.5 the result stays -2.6e-10. Not-a-numbers stay.
    """
    a = tl.minimum(tl.abs(y), _TAIL, propagate_nan=tl.PropagateNan.ALL)
    power = 2.52405553e-05
    power = power * a - 0.000649605587
    power = power * a + 0.00743576698
    power = power * a - 0.0518598184
    power = power * a - 0.460433483
    power = power * a - 1.1505487
    power = power * a - 1.00003791
    return tl.maximum(y, 0.0) - a * tl.exp2(power)


@triton.jit
def _positive(y):
    """The larger of a number and zero; not-a-numbers stay."""
    return tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def up_to_six(y):
    """A number between zero and six; not-a-numbers stay."""
    return tl.minimum(_positive(y), 6.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate(y, activation: tl.constexpr, bits: tl.constexpr = 32):
    """The activation of a number, as :data:`joulemark.merged.bricks.ACTIVATIONS` has it.

    Args:
        y: in fp32.
        activation: of :data:`NUMBERS`.
        bits: of the format that the result is rounded to.
    """
    if activation == 1:
        y = _positive(y)
    if activation == 2:
        y = up_to_six(y)
    if activation == 3:
        y = y / (1.0 + tl.exp2(y * -_LOG2_E))  # exp takes three instructions more: results below normal numbers
    if activation == 4:
        y = _gelu_of_16_bits(y) if bits == 16 else 0.5 * y * (1.0 + tl.erf(y * _ROOT_HALF))
    if activation == 5:
        y = tl.where(y > 0.0, y, y * _SLOPE)
    if activation == 6:
        y = y * up_to_six(y + 3.0) * (1.0 / 6.0)
    return y


@triton.jit
def finished(y, residual, there, added: tl.constexpr, activation: tl.constexpr):
    """The activation of numbers, and what is added to them where ``residual`` points, as :func:`adding` says.

    ``residual`` points at numbers of the result's format, be there something to add or not.
    """
    if added == "before":
        y += tl.load(residual, mask=there, other=0.0).to(tl.float32)
    y = activate(y, activation, residual.dtype.element_ty.primitive_bitwidth)
    if added == "behind":
        y += tl.load(residual, mask=there, other=0.0).to(tl.float32)
    return y


def adding(layer: Conv, residual: Tensor | None) -> str:
    """Where a layer's kernel adds a tensor: ``before`` its activation or ``behind`` it; ``nothing`` without one."""
    if residual is None:
        return "nothing"
    return "behind" if layer.adds_behind else "before"


@triton.jit(do_not_specialize=("pieces", "units"))
def _epilogue(
    y, bias, residual, pieces, units,
    unit: tl.constexpr, biased: tl.constexpr, added: tl.constexpr, activation: tl.constexpr,
    block: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """In place what follows a convolution: ``pieces`` of ``unit`` neighbours, ``units`` of which are one pixel's.

    The end comes first: it is what the convolution wrote last, and the L2 still holds some of it; what reads the result
    begins at its beginning. ``wide`` is for numbers of pieces beyond 32 bits: a remainder of 64 bits is dear.
    """
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    if wide:
        part = part.to(tl.int64)
    piece = part * block + tl.arange(0, block)
    lane = tl.arange(0, unit)[None, :]
    there = (piece < pieces)[:, None]
    at = piece.to(tl.int64)[:, None] * unit + lane
    value = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
    if biased:
        value += tl.load(bias + (piece % units)[:, None] * unit + lane, mask=there, other=0.0).to(tl.float32)
    value = finished(value, residual + at, there, added, activation)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=there)


def epilogue(layer: Conv, y: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Bias, residual and activation of a layer in place.

    Args:
        layer: whose convolution gave y; without a norm.
        y: [batch, channels, *size], channels-last.
        bias: [channels].
        residual: like y.
    """
    units, unit = units_of(y.shape[1])
    pieces, block = y.numel() // unit, _ELEMENTS // unit
    _epilogue[(triton.cdiv(pieces, block),)](
        y, y if bias is None else bias, y if residual is None else residual, pieces, units, unit,
        bias is not None, adding(layer, residual), NUMBERS[layer.activation], block, pieces + block > 1 << 31,
    )  # fmt: skip
    return y


@triton.jit
def _tapped(
    total, value, weight, channel, real, channels, dy, dx: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr
):
    """A sum and what a row of the input adds to it, ``dy`` rows below the line's first tap; nothing beyond the last."""
    tap = tl.load(weight + (dy * columns + dx) * channels + channel, mask=real & (dy >= 0) & (dy < rows), other=0.0)
    return total + value * tap.to(tl.float32)[None, :]


@triton.jit
def _stored(
    total, place, there, bias, residual, out, channel, real,
    biased: tl.constexpr, added: tl.constexpr, activation: tl.constexpr,
):  # fmt: skip
    """Stores a sum with its bias and all that follows."""
    if biased:
        total += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    total = finished(total, residual + place, there, added, activation)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=("units", "height", "width", "out_height", "out_width"))
def _depthwise(
    x, weight, bias, residual, out, units, height, width, out_height, out_width,
    unit: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, stride_y: tl.constexpr, stride_x: tl.constexpr,
    pad_y: tl.constexpr, pad_x: tl.constexpr, step_y: tl.constexpr, step_x: tl.constexpr,
    biased: tl.constexpr, added: tl.constexpr, activation: tl.constexpr,
    lines: tl.constexpr, pixels: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """``pixels`` neighbouring outputs of one or two lines and ``lanes`` channels of a depthwise convolution.

    Two lines share each load of the input; they need taps without dilation.
    """
    channels = units * unit
    strips, bands = tl.cdiv(out_width, pixels), tl.cdiv(out_height, lines)
    band = tl.program_id(0) // strips
    column = (tl.program_id(0) % strips) * pixels + tl.arange(0, pixels)
    channel = tl.program_id(1) * lanes + tl.arange(0, lanes)
    image, row = (band // bands).to(tl.int64), (band % bands) * lines
    real = channel < channels
    first = tl.zeros((pixels, lanes), tl.float32)
    second = tl.zeros((pixels, lanes), tl.float32)
    for down in range(rows + (lines - 1) * stride_y):  # a loop: unrolled, the loads of 49 taps take all registers
        y = row * stride_y - pad_y + down * step_y
        inside_y = (y >= 0) & (y < height)
        for dx in tl.static_range(columns):
            at = column * stride_x - pad_x + dx * step_x
            inside = ((at >= 0) & (at < width) & inside_y)[:, None] & real[None, :]
            place = ((image * height + y) * width + at)[:, None] * channels + channel[None, :]
            value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            first = _tapped(first, value, weight, channel, real, channels, down, dx, rows, columns)
            if lines == 2:
                second = _tapped(second, value, weight, channel, real, channels, down - stride_y, dx, rows, columns)
    place = ((image * out_height + row) * out_width + column)[:, None] * channels + channel[None, :]
    there = (column < out_width)[:, None] & real[None, :]
    _stored(first, place, there, bias, residual, out, channel, real, biased, added, activation)
    if lines == 2:
        place += out_width * channels
        there = there & (row + 1 < out_height)
        _stored(second, place, there, bias, residual, out, channel, real, biased, added, activation)


def depthwise(
    layer: Conv,
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    strip: tuple[int, int] = (2, 16),
) -> Tensor:
    """A depthwise convolution in two dimensions with what follows it.

    Args:
        layer: of as many groups as channels.
        x: [batch, channels, height, width], channels-last.
        taps: [rows * columns, channels], contiguous.
        bias: [channels].
        residual: like out.
        out: where to, channels-last.
        strip: lines of the output and positions of each that a program makes; 2 lines for taps that are not dilated.
    """
    batch, channels, height, width = x.shape
    out_height, out_width = out.shape[2:]
    lines, pixels = strip
    lanes = min(64, triton.next_power_of_2(channels))
    pixels = max(1, min(pixels, triton.next_power_of_2(out_width)))
    grid = (batch * triton.cdiv(out_height, lines) * triton.cdiv(out_width, pixels), triton.cdiv(channels, lanes))
    units, unit = units_of(channels)
    shape: tuple[Any, ...] = (*layer.kernel, *layer.stride, *layer.padding, *layer.dilation)
    _depthwise[grid](
        x, taps, x if bias is None else bias, x if residual is None else residual, out,
        units, height, width, out_height, out_width, unit, *shape,
        bias is not None, adding(layer, residual), NUMBERS[layer.activation], lines, pixels, lanes,
    )  # fmt: skip
    return out


def strips_for(layer: Conv, width: int) -> tuple[tuple[int, int], ...]:
    """The strips (lines, positions) that are worth trying for a depthwise convolution, the most promising first.

    Positions of one thread share its loads of taps, lines its loads of the input.

    Args:
        width: of the output.
    """
    lines = 2 if layer.dilation[0] == 1 else 1
    wide = ((lines, 32),) if width > 16 else ()
    return (*wide, (lines, 16), *(((1, 16),) if lines == 2 else ()))


def taps_of(weight: Tensor) -> Tensor:
    """[channels, 1, rows, columns] → [rows * columns, channels], so that neighbouring lanes read neighbours."""
    return weight.flatten(1).t().contiguous()


def compiled_for(path: str, layer: Conv, adds: bool, gated: bool, itemsize: int) -> tuple[object, ...]:
    """What the kernel of a path is compiled for: layers that agree in it share one.

    Args:
        path: see :mod:`joulemark.merged.paths`, one of our own.
        itemsize: bytes of an element.
    """
    activation = (layer.activation, adds or layer.residual is not None, layer.adds_behind, gated, layer.norm)
    unit = layer.out_channels if layer.norm is not None else units_of(layer.out_channels)[1]
    if path.startswith("tiles"):
        inputs = layer.in_channels
        depth = _depth(inputs, itemsize)
        steps = (depth, inputs % depth == 0, _stages(inputs, depth, itemsize))
        return (path, activation, units_of(inputs)[1], unit, steps)
    if path.startswith(("gather", "rows")):
        return (path, activation, unit, layer.in_channels, layer.kernel, layer.stride, layer.padding, layer.dilation)
    if path.startswith(("taps", "slide")):
        shape = (layer.kernel, layer.stride, layer.padding, layer.dilation)
        lanes = layer.out_channels if path.startswith("slide") else min(64, triton.next_power_of_2(layer.out_channels))
        return (path, activation, unit, shape, lanes)
    return (path, activation, unit)


def units_of(channels: int) -> tuple[int, int]:
    """Channels as a product whose second factor kernels are compiled for: eight neighbours can be loaded at once."""
    return (channels // _OCTET, _OCTET) if channels % _OCTET == 0 else (channels, 1)


@triton.jit(do_not_specialize=("pixels", "input_units", "output_units", "row_units"))
def _product(
    x, weight, bias, residual, gate, out, pixels, input_units, output_units, row_units,
    input_unit: tl.constexpr, output_unit: tl.constexpr, row_unit: tl.constexpr,
    biased: tl.constexpr, added: tl.constexpr, gated: tl.constexpr,
    activation: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, even: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """``rows`` pixels of an image and ``columns`` channels of a pointwise convolution; weights [outputs, inputs].

    A pixel of the output lies ``row_units * row_unit`` numbers behind the one before it.
    """
    inputs, outputs = input_units * input_unit, output_units * output_unit
    across, strips = tl.cdiv(outputs, columns), tl.cdiv(pixels, rows)
    strip = tl.program_id(0) // across
    column = (tl.program_id(0) % across) * columns + tl.arange(0, columns)
    image, row = (strip // strips).to(tl.int64), (strip % strips) * rows + tl.arange(0, rows)
    there = (row < pixels)[:, None]
    real = (column < outputs)[None, :]
    at = (image * pixels + row)[:, None]
    inner = tl.arange(0, depth)
    left_at, right_at = x + at * inputs + inner[None, :], weight + column[None, :] * inputs + inner[:, None]
    opened_at = gate + image * inputs + inner
    total = tl.zeros((rows, columns), tl.float32)
    if biased:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    for start in range(0, inputs, depth):
        within = tl.full((depth,), 1, tl.int1) if even else start + inner < inputs
        left = tl.load(left_at + start, mask=there & within[None, :], other=0.0)
        if gated:
            opened = tl.load(opened_at + start, mask=within, other=0.0).to(tl.float32)
            left = (left.to(tl.float32) * opened[None, :]).to(left.dtype)
        right = tl.load(right_at + start, mask=within[:, None] & real, other=0.0)
        total = tl.dot(left, right, total, input_precision=precision)
    total = finished(total, residual + at * outputs + column[None, :], there & real, added, activation)
    place = at * (row_units * row_unit) + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=there & real)


def tiles_for(pixels: int, outputs: int) -> tuple[tuple[int, int], ...]:
    """The tiles (rows, columns) that are worth trying for a pointwise convolution, the most promising first.

    The larger ones read less; of the smaller ones, more fit a multiprocessor, and some load while others store.

    Args:
        pixels: of all images.
        outputs: channels.
    """
    wide = 128 if outputs > 64 else max(16, 1 << (outputs - 1).bit_length())
    narrow = min(wide, 64)
    low = (128, narrow) if wide > narrow and 0 < outputs % wide <= narrow else (64, wide)  # no half of a tile is empty
    many = -(-pixels // 128) * -(-outputs // wide) >= 132
    return tuple(dict.fromkeys((*(((128, wide),) if many else ()), low, (64, narrow))))


def _depth(inputs: int, itemsize: int) -> int:
    """Input channels that a product takes at a time: 128 bytes, half as many where these leave a quarter empty."""
    depth = max(16, min(128 // itemsize, 1 << (inputs - 1).bit_length()))
    return depth // 2 if depth < inputs < 2 * depth and inputs % (depth // 2) == 0 and depth > 16 else depth


def _stages(inputs: int, depth: int, itemsize: int) -> int:
    """Steps of a product that have room in shared memory.

    Three of 128 bytes a pixel, four of halved ones, so that all are on their way. Of a single one just what its copies
    need to run ahead: more programs fit a multiprocessor.
    """
    if inputs <= depth:
        return 2
    return 4 if depth * itemsize < 128 else 3


def product(
    layer: Conv,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gate: Tensor | None,
    out: Tensor,
    tile: tuple[int, int],
) -> Tensor:
    """``weight · (gate * x) + bias`` at every position, with what follows it.

    Args:
        layer: a pointwise one.
        x: [batch, inputs, *size], channels-last.
        weight: [outputs, inputs, 1, …].
        bias: [outputs].
        residual: like out.
        gate: [batch, inputs, 1, …], contiguous; None for ones.
        out: where to, channels-last, or some channels of such a tensor.
        tile: rows and columns that a program computes.
    """
    outputs, inputs = weight.shape[:2]
    images = 1 if gate is None else x.shape[0]
    pixels = x.numel() // (inputs * images)
    rows, columns = tile
    grid = (images * triton.cdiv(pixels, rows) * triton.cdiv(outputs, columns),)
    (input_units, input_unit), (output_units, output_unit) = units_of(inputs), units_of(outputs)
    row_units, row_unit = units_of(out.stride(-1))
    depth, large = _depth(inputs, x.dtype.itemsize), rows * columns >= 128 * 128
    _product[grid](
        x, weight, x if bias is None else bias, x if residual is None else residual, x if gate is None else gate, out,
        pixels, input_units, output_units, row_units, input_unit, output_unit, row_unit,
        bias is not None, adding(layer, residual), gate is not None, NUMBERS[layer.activation],
        rows, columns, depth, inputs % depth == 0, "tf32",
        num_warps=8 if large else 4, num_stages=_stages(inputs, depth, x.dtype.itemsize),
        maxnreg=128 if large and x.dtype.itemsize == 2 else None,  # then two of them fit a multiprocessor
    )  # fmt: skip
    return out
