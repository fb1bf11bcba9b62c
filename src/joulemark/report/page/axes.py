"""How every plot of the page draws its lines, intervals and batch axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from joulemark.metrics import format_value
from joulemark.records import Value
from joulemark.report.plot import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_TICKS = 9.5


def colour(index: int) -> str:
    """Of the palette, round and round."""
    return PALETTE[index % len(PALETTE)]


def batch_axis(axes: Axes, batches: Sequence[int]) -> None:
    """A logarithmic axis of batch sizes that names those which were measured, as far as there is room."""
    axes.set_xscale("log", base=2)
    apart = math.log2(batches[-1] / batches[0]) / MAX_TICKS
    shown: list[int] = []
    for batch in reversed(batches):
        if not shown or math.log2(shown[-1] / batch) >= max(apart, 0.4):
            shown.append(batch)
    axes.set_xticks(shown, [str(batch) for batch in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("batch size")


def value_axis(axes: Axes, unit: str, log: bool = False) -> None:
    """An axis whose ticks are read with their prefixes: ``2 ms``, ``5 k``."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    if log:
        axes.set_yscale("log")
        lo, hi = axes.get_ylim()
        narrow = hi / lo < 50 if lo > 0 else False
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    text = (lambda y, _: f"{100 * y:.0f} %") if unit == "%" else (lambda y, _: format_value(y, unit))
    axes.yaxis.set_major_formatter(FuncFormatter(text))


def line(axes: Axes, points: Sequence[tuple[float, Value]], index: int, dashed: bool = False) -> None:
    """A metric over the batch, with its intervals as a band."""
    if not points:
        return
    batches = [batch for batch, _ in points]
    values = [value.value or 0.0 for _, value in points]
    ends = [value.interval or (value.value or 0.0, value.value or 0.0) for _, value in points]
    style = "--" if dashed else "-"
    axes.fill_between(batches, [lo for lo, _ in ends], [hi for _, hi in ends], color=colour(index), alpha=0.18, lw=0)
    axes.plot(batches, values, color=colour(index), linestyle=style, marker="o", markersize=3.2, linewidth=1.5)


def knee(axes: Axes, at: float, interval: tuple[float, float] | None, index: int) -> None:
    """A vertical line with its interval as a band."""
    axes.axvline(at, color=colour(index), linewidth=1.2, linestyle=":")
    if interval is not None:
        axes.axvspan(*interval, color=colour(index), alpha=0.1, linewidth=0)
