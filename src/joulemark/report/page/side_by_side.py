"""Two or more runs, drivers, GPUs or modes side by side: a table, and their throughput and energy in one figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from joulemark.records import Value
from joulemark.report import sides as comparison
from joulemark.report.page import axes as drawing
from joulemark.report.page.parts import Figure, Mark, Section, row_of, tiers_of
from joulemark.report.plateau_table import knee_text
from joulemark.report.sides import Axis, Match, Side

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST = 12
_METRICS = (("throughput_per_s", "items per second", "1/s"), ("energy_per_item_j", "energy per item", "J"))
Lines = list[tuple[int, list[tuple[int, Value]]]]


def section(sides: Sequence[Side], axis: Axis) -> Section:
    """The section that a comparison begins with."""
    matches = comparison.matches_of(sides, axis)
    figures = [figure for match in matches[:_MOST] for figure in _figures(match, [side.name for side in sides])]
    return Section(
        "side-by-side",
        f"Side by side: {', '.join(side.name for side in sides)}",
        f"What two or more sides measured, by {axis}. Lines of one colour are of one side; bands are 95 % intervals, "
        "dotted lines the knees.",
        tuple(figures),
        tuple(comparison.tables_of(sides, axis)),
        tables_first=True,
        short="Side by side",
    )


def _figures(match: Match, names: Sequence[str]) -> Iterator[Figure]:
    for metric, axis, unit in _METRICS:
        lines = [
            (names.index(name), line) for name, curve in match.curves.items() if len(line := curve.positive(metric)) > 1
        ]
        if len(lines) < 2:
            continue
        knees = "; ".join(f"{name} {knee_text(curve.plateau)}" for name, curve in match.curves.items())
        said = f"Plateau from batch: {knees}. " if metric == "throughput_per_s" else ""
        yield Figure(
            f"sides-{match.key}-{metric.split('_')[0]}",
            match.title,
            axis,
            f"{said}By {tiers_of([value for _, line in lines for _, value in line])}.",
            partial(_draw, match=match, names=names, lines=lines, unit=unit),
            [row_of(batch, names[at], value) for at, line in lines for batch, value in line],
            tuple(Mark(names[at], at) for at, _ in lines),
            left=0.15,
        )


def _draw(axes: Axes, match: Match, names: Sequence[str], lines: Lines, unit: str) -> None:
    for at, line in lines:
        drawing.line(axes, line, at)
    drawing.batch_axis(axes, sorted({batch for _, line in lines for batch, _ in line}))
    drawing.value_axis(axes, unit, log=True)
    if unit == "1/s":
        for name, curve in match.curves.items():
            if curve.plateau.knee is not None:
                drawing.knee(axes, curve.plateau.knee, None, names.index(name))
