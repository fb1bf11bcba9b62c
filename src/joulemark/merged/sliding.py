"""A depthwise convolution in Triton that slides, with the layer norm over channels behind it where there is one.

ConvNeXt's blocks begin so (Liu et al., *A ConvNet for the 2020s*, CVPR 2022). A program makes some lines of the output,
and some positions of each. It takes a column of taps at a time, which stay in registers while it slides down the input:
each number that it loads there serves all lines that want it. Of 7×7 taps and 7 lines that is 13 loads for an output
instead of 49. With a norm it holds all channels of its positions (:mod:`joulemark.merged.normalize`).
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,valid-type,assignment,var-annotated"

from __future__ import annotations

from math import prod

import triton
import triton.language as tl
from torch import Tensor

from joulemark.merged.normalize import MOST_CHANNELS, parts_of, statistics
from joulemark.merged.pointwise import NUMBERS, adding, finished
from joulemark.merged.sequence import Conv, Shape

_MANY_TAPS = 49
"""Taps from which all strips are worth a trial; with fewer ``taps`` has its own, and each trial takes time."""
_MOST_ROWS = 11
"""Of taps: a column of them stays in registers."""
_LANES = 64
"""Channels of a program, at most, where no norm wants all of them."""
_LINES = (8, 7)
_SUMS = 64
"""Sums of a thread, at most, beside which it has registers for eight neighbouring channels at a time; else four."""
_NUMBERS = 1024
"""Numbers of a line and a part, at most: 256 threads of four, each of which may have all registers that it can."""
_WARPS = 16
_POSITIONS = 8
_FILLED = 100
"""Programs from which the device counts as filled: three quarters of the multiprocessors of an H200."""


@triton.jit(do_not_specialize=("height", "width", "out_height", "out_width"))
def _slide(
    x, weight, affine, residual, out, height, width, out_height, out_width,
    channels: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, stride_y: tl.constexpr, stride_x: tl.constexpr,
    pad_y: tl.constexpr, pad_x: tl.constexpr, biased: tl.constexpr, added: tl.constexpr, activation: tl.constexpr,
    normed: tl.constexpr, eps: tl.constexpr,
    lines: tl.constexpr, pixels: tl.constexpr, parts: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """``lines`` by ``pixels`` outputs of ``parts * lanes`` channels.

    What differs by channel alone is loaded for every pixel, so that it has the layout of the sums: as a row it would be
    handed on through shared memory, with a barrier for each tap.
    """
    strips, bands = tl.cdiv(out_width, pixels), tl.cdiv(out_height, lines)
    band = tl.program_id(0) // strips
    column = ((tl.program_id(0) % strips) * pixels + tl.arange(0, pixels))[:, None]
    image, row = (band // bands).to(tl.int64), (band % bands) * lines
    begin = tl.program_id(1) * lanes + tl.zeros((pixels, lanes), tl.int32) + tl.arange(0, lanes)[None, :]
    totals = ()  # of the first part all lines, then of the next
    for part in tl.static_range(parts):
        channel = begin + part * lanes
        real = channel < channels
        start = tl.zeros((pixels, lanes), tl.float32)
        if biased:
            start += tl.load(affine + channel, mask=real, other=0.0).to(tl.float32)
        sums = ()
        for _ in tl.static_range(lines):
            sums += (start,)
        for dx in range(columns):  # a loop: unrolled, the loads of all taps take all registers
            taps = ()
            for dy in tl.static_range(rows):
                tap = tl.load(weight + (dy * columns + dx) * channels + channel, mask=real, other=0.0)
                taps += (_wide(tap),)
            at = column * stride_x - pad_x + dx
            offset, inside = at * channels + channel, (at >= 0) & (at < width) & real
            for down in tl.static_range(rows + (lines - 1) * stride_y):
                y = row * stride_y - pad_y + down
                line_of_x = x + (image * height + y) * width * channels
                there = inside & (y >= 0) & (y < height)
                sums = _added_to(sums, line_of_x + offset, there, taps, down, lines, rows, stride_y)
        totals += sums
    if normed:
        means, inverses = _of_lines(totals, begin, channels, eps, lines, parts, lanes)
    for part in tl.static_range(parts):
        channel = begin + part * lanes
        inside, place = (channel < channels) & (column < out_width), column * channels + channel
        if normed:
            scale = tl.load(affine + channels + channel, mask=channel < channels, other=0.0).to(tl.float32)
            shift = tl.load(affine + 2 * channels + channel, mask=channel < channels, other=0.0).to(tl.float32)
        for line in tl.static_range(lines):
            value = totals[part * lines + line]
            if normed:
                value = (value - means[line]) * inverses[line] * scale + shift
            first = (image * out_height + row + line) * out_width * channels
            there = inside & (row + line < out_height)
            value = finished(value, residual + first + place, there, added, activation)
            tl.store(out + first + place, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _wide(value):
    """In fp32. A number of bf16 is its upper half: told so, the compiler takes one instruction for each, not 1.5."""
    wide = value.to(tl.float32)
    if value.dtype == tl.bfloat16:
        wide = (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return wide


@triton.jit
def _added_to(
    sums, at, there, taps, down: tl.constexpr, lines: tl.constexpr, rows: tl.constexpr, stride: tl.constexpr
):  # fmt: skip
    """The sums of all lines and what row ``down`` of the input adds to them; of large strides no line wants some."""
    if down % stride < rows:
        value = _wide(tl.load(at, mask=there, other=0.0))
        new = ()
        for line in tl.static_range(lines):
            if down >= line * stride and down < line * stride + rows:
                new += (sums[line] + value * taps[down - line * stride],)
            else:
                new += (sums[line],)
        sums = new
    return sums


@triton.jit
def _of_lines(
    totals, channel, channels, eps: tl.constexpr, lines: tl.constexpr, parts: tl.constexpr, lanes: tl.constexpr
):  # fmt: skip
    """Means and inverse deviations of each line."""
    means, inverses = (), ()
    for line in tl.static_range(lines):
        values = ()
        for part in tl.static_range(parts):
            values += (totals[part * lines + line],)
        mean, inverse = statistics(values, channel, channels, eps, parts, lanes)
        means += (mean,)
        inverses += (inverse,)
    return means, inverses


def slides(layer: Conv) -> bool:
    """Whether :func:`depthwise` is made for a layer: in two dimensions, of several rows of taps, or with a norm."""
    plain = layer.groups == layer.in_channels == layer.out_channels and len(layer.kernel) == 2
    if not plain or set(layer.dilation) != {1} or layer.kernel[0] > _MOST_ROWS:
        return False
    return layer.kernel[0] > 1 if layer.norm is None else layer.out_channels <= MOST_CHANNELS


def strips_for(layer: Conv, batch: int, size: Shape) -> tuple[tuple[int, int], ...]:
    """The strips (lines, positions) that are worth trying, those that load least first.

    Of few and of many lines that with as many positions as still fill the device.

    Args:
        layer: that :func:`slides` admits.
        batch, size: of its output.
    """
    height, width = size
    parts, lanes = _shares(layer)
    across = triton.cdiv(layer.out_channels, parts * lanes)
    most = min(_POSITIONS, triton.next_power_of_2(width), max(1, _NUMBERS // lanes))

    def programs(lines: int, pixels: int) -> int:
        return int(batch * across * triton.cdiv(height, lines) * triton.cdiv(width, pixels))

    found = []
    for lines in dict.fromkeys(min(one, height) for one in (min(_LINES, key=lambda one: -height % one), 4, 2)):
        pixels = most
        while pixels > 1 and programs(lines, pixels) < _FILLED:
            pixels //= 2
        found.append((lines, pixels))
    return tuple(found if layer.norm is not None or prod(layer.kernel) >= _MANY_TAPS else found[:2])


def _shares(layer: Conv) -> tuple[int, int]:
    """Parts of a program's channels, and channels of a part."""
    if layer.norm is not None:
        return parts_of(layer.out_channels)
    return 1, min(_LANES, triton.next_power_of_2(layer.out_channels))


def depthwise(
    layer: Conv,
    x: Tensor,
    taps: Tensor,
    affine: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    strip: tuple[int, int],
) -> Tensor:
    """A depthwise convolution with its norm, and with what follows.

    Args:
        layer: that :func:`slides` admits.
        x: [batch, channels, height, width], channels-last.
        taps: [rows * columns, channels], contiguous.
        affine: [channels], the bias, or none; with a norm [3, channels], bias, scale and shift.
        residual: like out.
        out: where to, channels-last.
        strip: lines of the output, and positions of each, a power of two, that a program makes.
    """
    batch, channels, height, width = x.shape
    out_height, out_width = out.shape[2:]
    (lines, pixels), (parts, lanes) = strip, _shares(layer)
    grid = (batch * triton.cdiv(out_height, lines) * triton.cdiv(out_width, pixels),
            triton.cdiv(channels, parts * lanes))  # fmt: skip
    _slide[grid](
        x, taps, x if affine is None else affine, x if residual is None else residual, out,
        height, width, out_height, out_width, channels, *layer.kernel, *layer.stride, *layer.padding,
        affine is not None, adding(layer, residual), NUMBERS[layer.activation],
        layer.norm is not None, layer.norm or 0.0, lines, pixels, parts, lanes,
        num_warps=_warps(strip, parts, lanes, x.dtype.itemsize),
    )  # fmt: skip
    return out


def _warps(strip: tuple[int, int], parts: int, lanes: int, itemsize: int) -> int:
    """Of a program: so many that a thread has few sums, or few neighbouring channels where programs are few.

    The same for every batch, since kernels are compiled ahead for one image.
    """
    lines, pixels = strip
    neighbours = 8 if parts * lines * 8 <= _SUMS and itemsize == 2 else 4
    if pixels < _POSITIONS:
        neighbours = min(neighbours, 2, pixels)
    return max(1, min(_WARPS, pixels * lanes // (32 * neighbours)))
