"""A transposed convolution whose windows do not overlap, in Triton; what imports this looks for Triton first.

Each position of the input makes a window of its own of the output: a product of channels, as a pointwise convolution
is, with the channels of all taps side by side, each stored at its place.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,valid-type"

from __future__ import annotations

from math import prod

import triton
import triton.language as tl
from torch import Tensor

from joulemark.merged.pointwise import NUMBERS, activate, units_of
from joulemark.merged.sequence import Activation, Shape

_STEP_BYTES = 128
"""Of a position's channels that a product takes at a time."""
_LARGE = 128 * 128
"""Numbers of a tile from which eight warps share it."""


@triton.jit(do_not_specialize=("pixels", "depth", "height", "width", "input_units", "output_units", "row_units"))
def _spread(
    x, weight, bias, out, pixels, depth, height, width, input_units, output_units, row_units,
    input_unit: tl.constexpr, output_unit: tl.constexpr, row_unit: tl.constexpr,
    taps_z: tl.constexpr, taps_y: tl.constexpr, taps_x: tl.constexpr,
    biased: tl.constexpr, activation: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """``rows`` positions of the input and ``columns`` of the numbers that each makes; weights [taps, outputs, inputs].

    A position of the output lies ``row_units * row_unit`` numbers behind the one before it.
    """
    inputs, outputs, row = input_units * input_unit, output_units * output_unit, row_units * row_unit
    made = outputs * (taps_z * taps_y * taps_x)
    across = tl.cdiv(made, columns)
    pixel = (tl.program_id(0) // across) * rows + tl.arange(0, rows)
    column = (tl.program_id(0) % across) * columns + tl.arange(0, columns)
    there, real = (pixel < pixels)[:, None], (column < made)[None, :]
    start_of = pixel.to(tl.int64)[:, None] * inputs
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(0, inputs, step):
        inner = start + tl.arange(0, step)
        left = tl.load(x + start_of + inner[None, :], mask=there & (inner < inputs)[None, :], other=0.0)
        right = tl.load(
            weight + column[None, :] * inputs + inner[:, None], mask=(inner < inputs)[:, None] & real, other=0.0
        )
        total = tl.dot(left, right, total, input_precision=precision)
    tap, channel = column // outputs, column % outputs
    if biased:
        total += tl.load(bias + channel, mask=column < made, other=0.0).to(tl.float32)[None, :]
    out_height, out_width = height * taps_y, width * taps_x
    image, z = (pixel // (width * height * depth)).to(tl.int64), (pixel // (width * height)) % depth
    line = (image * depth + z) * taps_z * out_height + ((pixel // width) % height) * taps_y
    down = (tap // (taps_y * taps_x)) * out_height + (tap // taps_x) % taps_y
    position = (line * out_width + (pixel % width) * taps_x)[:, None] + (down * out_width + tap % taps_x)[None, :]
    place = position * row + channel[None, :]
    total = activate(total, activation, out.dtype.element_ty.primitive_bitwidth)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=there & real)


def tiles_for(pixels: int, outputs: int) -> tuple[tuple[int, int], ...]:
    """The tiles (positions of the input, numbers of each) that are worth trying.

    Args:
        pixels: positions of the input in all images.
        outputs: channels times taps.
    """
    most = max(16, int(triton.next_power_of_2(outputs)))
    tiles = dict.fromkeys((tall, min(wide, most)) for tall, wide in ((128, 128), (128, 256), (64, 64)))
    return tuple(one for one in tiles if one[0] == 64 or pixels > 64)


def arranged(weight: Tensor) -> Tensor:
    """[inputs, outputs, *window] → [taps, outputs, inputs], contiguous."""
    return weight.flatten(2).permute(2, 1, 0).contiguous()


def spread(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Shape,
    out: Tensor,
    activation: Activation,
    tile: tuple[int, int],
) -> Tensor:
    """``activation(weight · x + bias)``, each position's window at its place.

    Args:
        x: [batch, inputs, *size], channels-last, of two or three dimensions.
        weight: [taps, outputs, inputs], contiguous.
        bias: [outputs].
        window: positions of the output that one of the input makes, per dimension.
        out: [batch, outputs, *size · window], where to: channels-last, or some channels of such a tensor.
        activation: of the result.
        tile: see :func:`tiles_for`.
    """
    batch, inputs, *size = x.shape
    outputs, taps, pixels = out.shape[1], prod(window), batch * prod(size)
    rows, columns = tile
    missing = (1,) * (3 - len(size))
    (input_units, input_unit), (output_units, output_unit) = units_of(inputs), units_of(outputs)
    row_units, row_unit = units_of(out.stride(-1))
    step = max(16, min(_STEP_BYTES // x.dtype.itemsize, int(triton.next_power_of_2(inputs))))
    _spread[(triton.cdiv(pixels, rows) * triton.cdiv(outputs * taps, columns),)](
        x, weight, x if bias is None else bias, out, pixels, *missing, *size, input_units, output_units, row_units,
        input_unit, output_unit, row_unit, *missing, *window, bias is not None, NUMBERS[activation],
        rows, columns, step, "tf32", num_warps=8 if rows * columns >= _LARGE else 4,
    )  # fmt: skip
    return out
