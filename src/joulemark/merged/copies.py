"""Copies of tensors into some channels of another one, in Triton; what imports this looks for Triton first."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,valid-type"

from __future__ import annotations

from collections.abc import Sequence as List

import triton
import triton.language as tl
from torch import Tensor

from joulemark.merged.pointwise import units_of

MOST = 4
"""Tensors that one launch copies."""
_ELEMENTS = 4096


@triton.jit
def _copy(part, out, pixels, channels, row, rows: tl.constexpr, lanes: tl.constexpr):
    """``rows`` positions and ``lanes`` channels; positions of ``out`` are ``row`` numbers apart."""
    pixel = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    channel = tl.program_id(1) * lanes + tl.arange(0, lanes)
    there = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    value = tl.load(part + pixel[:, None] * channels + channel[None, :], mask=there)
    tl.store(out + pixel[:, None] * row + channel[None, :], value, mask=there)


@triton.jit(
    do_not_specialize=("pixels", "row_units", "first_units", "second_units", "third_units", "fourth_units")
)  # fmt: skip
def _copies(
    first, second, third, fourth, first_out, second_out, third_out, fourth_out, pixels, row_units,
    first_units, second_units, third_units, fourth_units,
    unit: tl.constexpr, rows: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """One of four tensors; all numbers of channels are multiples of ``unit``."""
    row, which = row_units * unit, tl.program_id(2)
    if which == 0:
        _copy(first, first_out, pixels, first_units * unit, row, rows, lanes)
    if which == 1:
        _copy(second, second_out, pixels, second_units * unit, row, rows, lanes)
    if which == 2:
        _copy(third, third_out, pixels, third_units * unit, row, rows, lanes)
    if which == 3:
        _copy(fourth, fourth_out, pixels, fourth_units * unit, row, rows, lanes)


def copied(pairs: List[tuple[Tensor, Tensor]]) -> None:
    """Copy up to :data:`MOST` tensors.

    Args:
        pairs: each [batch, channels, *size], channels-last, and where to: some channels of one such tensor for all.
    """
    pixels = pairs[0][0].numel() // pairs[0][0].shape[1]
    channels = [part.shape[1] for part, _ in pairs]
    lanes = max(8, min(64, int(triton.next_power_of_2(max(channels)))))
    rows, row = _ELEMENTS // lanes, pairs[0][1].stride(-1)
    unit = min(units_of(one)[1] for one in (row, *channels))
    given = [*pairs, *[pairs[0]] * (MOST - len(pairs))]
    _copies[triton.cdiv(pixels, rows), triton.cdiv(max(channels), lanes), len(pairs)](
        *(part for part, _ in given), *(out for _, out in given), pixels, row // unit,
        *(part.shape[1] // unit for part, _ in given), unit, rows, lanes,
    )  # fmt: skip
