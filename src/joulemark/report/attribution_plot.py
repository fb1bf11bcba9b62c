"""Kernel classes of a step as a picture: time and counters per class, and a roofline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulemark.records import Json
from joulemark.report.attribution_view import class_title
from joulemark.report.plot import COLOURS, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHARES = (("pipe_tensor", "tensor pipe"), ("dram_throughput", "DRAM"), ("issue_active", "issue slots"))


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
    roofs = document["roofline"]
    points = [(one, one["roofline"]) for one in document["classes"] if one["roofline"]]
    points = [(one, point) for one, point in points if point["flop_per_s"] > 0]
    if roofs is None or not points:
        reason = document["notes"].get("roofline", "no class has both FLOP and DRAM bytes")
        panel.text(0.5, 0.5, plain(f"no roofline: {reason}"), ha="center", va="center", transform=panel.transAxes)
        panel.set_axis_off()
        return
    ridge = roofs["ridge_flop_per_byte"]
    low = min(*(point["flop_per_byte"] for _, point in points), ridge) / 3
    high = max(*(point["flop_per_byte"] for _, point in points), ridge) * 3
    panel.plot([low, ridge, high], [low * roofs["bytes_per_s"], *[roofs["flop_per_s"]] * 2], color="#000000")
    for index, (entry, point) in enumerate(points):
        panel.scatter(
            point["flop_per_byte"],
            point["flop_per_s"],
            s=30 + 600 * entry["time_share"],
            color=COLOURS[index % len(COLOURS)],
            alpha=0.7,
            label=plain(class_title(entry)),
        )
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("FLOP per byte of DRAM")
    panel.set_ylabel("FLOP/s")
    panel.set_title("roofline; areas are shares of kernel time", loc="left", fontsize=10)
    panel.grid(visible=True, linewidth=0.3)
    panel.legend(fontsize=7)
