"""Kernel classes of a step as a picture: time and counters per class, and a roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulemark.attribution.roofline import ends_of
from joulemark.attribution.stored import POOLED
from joulemark.metrics import format_value
from joulemark.records import Json
from joulemark.report.attribution_view import class_title, placed, unplaced
from joulemark.report.plot import COLOURS, PALETTE, plain, save
from joulemark.utilization.kernels import CLASSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHARES = (("pipe_tensor", "tensor pipe"), ("dram_throughput", "DRAM"), ("issue_active", "issue slots"))
_PEAKS = (("flop_per_s", "FLOP/s"), ("bytes_per_s", "B/s"))
_ROOF = 8
_COLOUR = {name: at for at, name in zip((1, 3, 5, 4, 0, 2, 7, 9, 10, 6), CLASSES, strict=True)} | {POOLED: 8}


def draw(document: Mapping[str, Json], path: Path) -> None:
    """Draw the document of :func:`joulemark.attribution.attribute` into a file.

    Raises:
        ConfigurationError: the disk refuses.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    levels, roofline = figure.subplots(1, 2)
    _draw_levels(levels, document)
    _draw_roofline(roofline, document)
    save(figure, path)


def _draw_levels(panel: Axes, document: Mapping[str, Any]) -> None:
    """Per class its share of the kernels' time and its shares of peak, with their intervals."""
    entries = document["classes"]
    names = [plain(class_title(one)) for one in entries]
    series = [("share of kernel time", [(one["time_share"], None) for one in entries])]
    for counter, title in _SHARES:
        found = [one["counters"].get(counter) for one in entries]
        if all(cell is not None for cell in found):
            series.append((title, [(cell["value"], cell["interval"]) for cell in found]))
    height = 0.8 / len(series)
    for index, (title, values) in enumerate(series):
        at = [row + index * height for row in range(len(entries))]
        errors = [[max(0.0, v - lo[0]), max(0.0, lo[1] - v)] if lo else [0.0, 0.0] for v, lo in values]
        panel.barh(
            at, [v for v, _ in values], height, label=title, color=COLOURS[index], xerr=list(zip(*errors, strict=True))
        )
    panel.set_yticks([row + 0.4 - height / 2 for row in range(len(entries))], names, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(0, 1)
    panel.set_xlabel("share of peak, or of time")
    panel.set_title(plain(str(document["label"])), loc="left", fontsize=10)
    panel.legend(fontsize=7)


def _draw_roofline(panel: Axes, document: Mapping[str, Any]) -> None:
    entries = placed(document)
    if not entries:
        reason = next(unplaced(document), "no kernel was recorded")
        panel.text(0.5, 0.5, plain(reason), ha="center", va="center", transform=panel.transAxes)
        panel.set_axis_off()
        return
    draw_roofline(panel, document)
    for entry, colour in zip(entries, class_colours(entries), strict=True):
        panel.scatter([], [], s=40, color=PALETTE[colour], label=plain(class_title(entry)))
    for entry in document["classes"]:
        if entry not in entries:
            panel.scatter([], [], s=0, label=f"no place: {plain(class_title(entry))}")
    peaks = (format_value(document["roofline"][name], unit, 3) for name, unit in _PEAKS)
    panel.plot([], [], color=PALETTE[_ROOF], label=f"roofs, both measured: {', '.join(peaks)}")
    panel.set_ylabel("FLOP/s")
    panel.set_title("roofline; areas are shares of kernel time", loc="left", fontsize=10)
    panel.grid(visible=True, linewidth=0.3)
    panel.legend(fontsize=7)


def class_colours(entries: Sequence[Mapping[str, Any]]) -> list[int]:
    """Places in the palette: a class has the same in every roofline, a part of a class that comes second a free one."""
    taken: list[int] = []
    for entry in entries:
        own = _COLOUR[entry["class"]]
        taken.append(own if own not in taken else next((at for at in range(len(PALETTE)) if at not in taken), own))
    return taken


def draw_roofline(axes: Axes, document: Mapping[str, Any]) -> None:
    """The roofs and the classes under them with their intervals; an area is a share of the kernels' time.

    Args:
        axes: to draw on.
        document: in which :func:`~joulemark.report.attribution_view.placed` finds some.
    """
    roofs, entries = document["roofline"], placed(document)
    ridge = roofs["ridge_flop_per_byte"]
    at = [entry["roofline"]["flop_per_byte"] for entry in entries]
    low, high = min(*at, ridge) / 3, max(*at, ridge) * 3
    axes.plot([low, ridge, high], [low * roofs["bytes_per_s"], *[roofs["flop_per_s"]] * 2], color=PALETTE[_ROOF])
    for entry, colour in zip(entries, class_colours(entries), strict=True):
        point, ends = entry["roofline"], ends_of(entry)
        place = point["flop_per_byte"], point["flop_per_s"]
        axes.scatter(*place, s=20 + 350 * entry["time_share"], color=PALETTE[colour % len(PALETTE)], alpha=0.7)
        bars = [
            _around(value, ends.get(name)) for name, value in zip(("flop_per_byte", "flop_per_s"), place, strict=True)
        ]
        axes.errorbar(*place, xerr=bars[0], yerr=bars[1], color=PALETTE[colour % len(PALETTE)], linewidth=1.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte of DRAM")


def _around(value: float, ends: tuple[float, float] | None) -> list[list[float]] | None:
    return None if ends is None else [[max(0.0, value - ends[0])], [max(0.0, ends[1] - value)]]
