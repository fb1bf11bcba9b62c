"""Utilization of training over batch sizes as a picture: a row per series, levels and plateau beside the waterfall."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark.metrics import find
from joulemark.records import Json
from joulemark.report.names import series_titles
from joulemark.report.plot import COLOURS, plain, save
from joulemark.report.utilization_view import BARS
from joulemark.utilization.waterfall import TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEVELS = ("gpu_busy_fraction", "sm_active_fraction", "issue_slot_fraction", "tensor_active_fraction", "dram_fraction")
_BAR_COLOURS = ("#009e73", "#56b4e9", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#aaaaaa", "#e69f00", "#000000")


def draw(document: Mapping[str, Json], path: Path) -> None:
    """Draw the document of :func:`joulemark.utilization.summary.document_of` into a file.

    Raises:
        ConfigurationError: the disk refuses.
    """
    from matplotlib.figure import Figure

    series = document["series"]
    figure = Figure(figsize=(13, 3.6 * len(series)), layout="constrained")
    rows = figure.subplots(len(series), 3, squeeze=False)
    for (throughput, levels, waterfall), name, one in zip(rows, series_titles(series), series, strict=True):
        _draw_throughput(throughput, name, one)
        _draw_levels(levels, one)
        _draw_waterfall(waterfall, one)
    save(figure, path)


def _batch_axis(panel: Axes) -> None:
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda batch, _: f"{batch:g}")
    panel.set_xlabel("batch size")
    panel.grid(visible=True, linewidth=0.3)


def _draw_throughput(panel: Axes, name: str, series: Mapping[str, Json]) -> None:
    """Items per second, with the knee and its interval."""
    known = [(cell["batch_size"], cell["throughput_per_s"]) for cell in series["cells"] if cell["throughput_per_s"]]
    if known:
        panel.plot(*zip(*known, strict=True), color=COLOURS[0], marker="o", markersize=3, linewidth=1.2)
    plateau = series["throughput_plateau"]
    if plateau is not None and plateau["knee"] is not None:
        panel.axvline(plateau["knee"], color=COLOURS[1], linewidth=0.8)
        panel.axvspan(*plateau["interval"], color=COLOURS[1], alpha=0.15, linewidth=0)
    verdict = "n/a" if plateau is None else plateau["text"]
    panel.set_title(plain(f"{name}: {verdict}"), loc="left", fontsize=9)
    panel.set_ylabel("items/s")
    _batch_axis(panel)


def _draw_levels(panel: Axes, series: Mapping[str, Json]) -> None:
    for colour, level in zip(COLOURS, _LEVELS, strict=False):
        known = [(cell["batch_size"], cell["levels"][level]) for cell in series["cells"] if level in cell["levels"]]
        if known:
            label = find(level).title
            panel.plot(*zip(*known, strict=True), color=colour, marker="o", markersize=3, linewidth=1.2, label=label)
    panel.set_ylim(0, 1)
    panel.set_ylabel("share of peak over the step")
    if panel.lines:
        panel.legend(fontsize=7)
    _batch_axis(panel)


def _draw_waterfall(panel: Axes, series: Mapping[str, Json]) -> None:
    """Stacked shares of the step; what is a gain stands below zero."""
    cells = [cell for cell in series["cells"] if cell["waterfall"] is not None]
    above, below = [0.0] * len(cells), [0.0] * len(cells)
    for colour, name in zip(_BAR_COLOURS, TITLES, strict=True):
        shares = [next((b["share"] for b in cell["waterfall"]["bars"] if b["name"] == name), 0.0) for cell in cells]
        bottom = [above[i] if share >= 0 else below[i] for i, share in enumerate(shares)]
        if any(shares):
            panel.bar(range(len(cells)), shares, bottom=bottom, color=colour, label=BARS[name], width=0.8)
        above = [top + max(0.0, share) for top, share in zip(above, shares, strict=True)]
        below = [low + min(0.0, share) for low, share in zip(below, shares, strict=True)]
    panel.set_xticks(range(len(cells)), [str(cell["batch_size"]) for cell in cells])
    panel.set_xlabel("batch size")
    panel.set_ylabel("share of the step")
    if cells:
        panel.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
