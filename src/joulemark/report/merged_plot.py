"""Merged execution beside its best rival as a picture: gains in time, energy and DRAM bytes, a row per subject."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulemark.errors import ConfigurationError
from joulemark.metrics import format_value
from joulemark.report.plot import COLOURS, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
_MARKS = (("energy", "o", COLOURS[1], "energy"), ("dram_bytes", "D", COLOURS[2], "DRAM bytes"))
"""Gain → what marks it, its colour, what it is called; the gain in time is a bar."""
_DRAWN = ("burst", *(name for name, *_ in _MARKS))
_ROW_IN, _PANEL_IN = 0.24, 0.75
"""Height of a row, and of what is around a panel."""
_TICKS = (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def draw(document: Mapping[str, Any], path: Path, asked: Callable[[Row], float | None] = lambda _: None) -> None:
    """Draw a document of merged execution into a file.

    Per subject a bar from 1 to the best rival's burst over merged's, with both times beside it, and marks where energy
    and DRAM bytes fall by as much; a panel for each batch size of networks, one for all blocks.

    Args:
        document: of schema ``joulemark.merged``; its rows have ``gains``.
        path: its suffix chooses the format.
        asked: the gain that is asked for of a row, drawn as a line across its bar.

    Raises:
        ConfigurationError: no row has a gain, or the disk refuses.
    """
    from matplotlib.figure import Figure

    panels = _panels(document)
    if not panels:
        raise ConfigurationError("no row has a gain over a rival to be drawn", "give a file with measured rivals")
    heights = [_PANEL_IN + _ROW_IN * len(rows) for rows in panels.values()]
    figure = Figure(figsize=(9.5, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    limits = _limits([row["gains"] for rows in panels.values() for row in rows])
    for at, (name, rows) in enumerate(panels.items()):
        panel = figure.add_subplot(grid[at, 0])
        _draw_panel(panel, f"{name}, {document['gpu']}", rows, asked)
        panel.set_xlim(*limits)
        if at == len(panels) - 1:
            panel.legend(fontsize=7, loc="lower right")
            panel.set_xlabel("the best rival's figure over merged's", fontsize=8)
    save(figure, path)


def _limits(gains: Sequence[Mapping[str, float | None]]) -> tuple[float, float]:
    """Of an axis on which all that is drawn lies."""
    known = [value for one in gains for name in _DRAWN if (value := _drawable(one, name)) is not None]
    return min(0.9, 0.9 * min(known)), 1.15 * max(known)


def _panels(document: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Rows with a gain in time: networks by batch size and name, blocks by their groups."""
    networks = document["kind"] == "networks"
    rows = [row for row in document["rows"] if _drawable(row["gains"], "burst") is not None]
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["shape"][0] if networks else 0, row["group"])):
        found.setdefault(f"batch {row['shape'][0]}" if networks else "blocks", []).append(row)
    return found


def _drawable(gains: Mapping[str, float | None], name: str) -> float | None:
    """A gain that has a place on a logarithmic axis; None for any other."""
    value = gains.get(name)
    return value if value is not None and 0 < value < inf else None


def _draw_panel(panel: Axes, title: str, rows: Sequence[Row], asked: Callable[[Row], float | None]) -> None:
    from matplotlib.ticker import NullLocator

    places = range(len(rows))
    gains = [row["gains"] for row in rows]
    panel.barh(places, [one["burst"] - 1 for one in gains], left=1, height=0.6, color=COLOURS[5], label="time")
    for name, mark, colour, called in _MARKS:
        known = [(value, at) for at, one in enumerate(gains) if (value := _drawable(one, name)) is not None]
        if known:
            panel.plot(*zip(*known, strict=True), mark, color=colour, markersize=4.5, linestyle="", label=called)
    bars = [(value, at) for at, row in enumerate(rows) if (value := asked(row)) is not None]
    if bars:
        panel.plot(*zip(*bars, strict=True), "|", color="black", markersize=12, linestyle="", label="asked for")
    for at, row in enumerate(rows):
        panel.annotate(_told(row), (1.01, at), xycoords=("axes fraction", "data"), va="center", fontsize=7)
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_xticks(_TICKS, [f"{tick:g}×" for tick in _TICKS])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_yticks(list(places), [plain(row["subject"]) for row in rows], fontsize=8)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.set_title(plain(title), loc="left", fontsize=10)
    panel.grid(visible=True, axis="x", linewidth=0.3)


def _told(row: Row) -> str:
    """Merged's time and its best rival's."""
    best, rivals = row["gains"]["best_rival"], row["rivals"]
    return plain(", ".join(f"{name} {format_value(rivals[name]['burst_s'], 's')}" for name in ("merged", best)))
