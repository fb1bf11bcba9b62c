"""Where the joules went as a picture: per series stacked bars over batch sizes, and energy beside throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulemark.metrics import format_value
from joulemark.records import Json
from joulemark.report.plot import COLOURS, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GROUPS: Mapping[str, str] = {
    "static": "#999999", "issue": "#56b4e9", "vector": "#009e73", "integer": "#66c2a5", "special": "#b2df8a",
    "tensor": "#0072b2", "shared": "#f0e442", "l1": "#e69f00", "l2": "#d55e00", "hbm": "#a50026",
}  # fmt: skip
"""Group of units → its colour: what computes is cold, what moves data warm, the further the darker."""
_UNEXPLAINED = "#000000"
_OTHERS = "other workloads"


def draw(document: Mapping[str, Json], path: Path) -> None:
    """Draw the document of :func:`joulemark.energy.validation.document` into a file.

    A row of panels per series of batch sizes; workloads of no series share the last row.

    Raises:
        ConfigurationError: the disk refuses.
    """
    from matplotlib.figure import Figure

    rows = {row["workload"]: row for row in document["rows"]}
    series = document["series"]
    in_series = {cell["workload"] for one in series for cell in one["cells"]}
    alone = [row for name, row in rows.items() if name not in in_series and row["split"] is not None]
    count = len(series) + bool(alone)
    figure = Figure(figsize=(12, 3.6 * max(count, 1)), layout="constrained")
    grid = figure.add_gridspec(max(count, 1), 2)
    for at, one in enumerate(series):
        cells = [rows[cell["workload"]] for cell in one["cells"]]
        labels = [str(cell["batch_size"]) for cell in one["cells"]]
        _draw_split(figure.add_subplot(grid[at, 0]), plain(one["series"]), cells, labels, "batch size")
        _draw_energy(figure.add_subplot(grid[at, 1]), one)
    if alone:
        names = [plain(row["workload"]) for row in alone]
        _draw_split(figure.add_subplot(grid[count - 1, :]), _OTHERS, alone, names, "")
    save(figure, path)


def _draw_split(panel: Axes, title: str, rows: Sequence[Mapping[str, Any]], labels: Sequence[str], below: str) -> None:
    """Shares of measured energy, stacked; what the model claims too much stands below zero as the residual."""
    splits = [row["split"] for row in rows]
    bottom = [0.0] * len(rows)
    for group, colour in _GROUPS.items():
        shares = [_share(split, group) for split in splits]
        if any(shares):
            panel.bar(range(len(rows)), shares, bottom=bottom, color=colour, label=group, width=0.8)
        bottom = [base + share for base, share in zip(bottom, shares, strict=True)]
    residual = [0.0 if split is None else split["residual_share"] for split in splits]
    start = [base if share >= 0 else 0.0 for base, share in zip(bottom, residual, strict=True)]
    panel.bar(range(len(rows)), residual, bottom=start, fill=False, edgecolor=_UNEXPLAINED, label="residual", width=0.8)
    upright = 90 if len(rows) > 8 else 0
    panel.set_xticks(range(len(rows)), list(labels), rotation=upright, fontsize=7)
    panel.set_xlabel(below)
    panel.set_ylabel("share of measured energy")
    panel.set_title(title, loc="left", fontsize=9)
    panel.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _share(split: Mapping[str, Any] | None, group: str) -> float:
    return 0.0 if split is None else sum(split["parts"].get(group, {}).values()) / float(split["measured_j"])


def _draw_energy(panel: Axes, series: Mapping[str, Any]) -> None:
    """Energy per item and throughput over the batch, each with the knee of its plateau and the knee's interval."""
    cells = series["cells"]
    batches = [cell["batch_size"] for cell in cells]
    beside = panel.twinx()
    energy, throughput = COLOURS[1], COLOURS[0]
    panel.plot(batches, [cell["energy_per_item_j"] for cell in cells], color=energy, marker="o", markersize=3)
    beside.plot(batches, [cell["items_per_s"] for cell in cells], color=throughput, marker="s", markersize=3)
    for plateau, colour in ((series["energy_plateau"], energy), (series["throughput_plateau"], throughput)):
        if plateau["knee"] is not None:
            panel.axvline(plateau["knee"], color=colour, linewidth=0.8)
            panel.axvspan(*plateau["interval"], color=colour, alpha=0.12, linewidth=0)
    for axes, label, colour in ((panel, "energy per item", energy), (beside, "items/s", throughput)):
        axes.set_ylabel(label, color=colour)
        axes.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(lambda joules, _: format_value(joules, "J"))
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda batch, _: f"{batch:g}")
    panel.set_xlabel("batch size")
    said = f"energy: {series['energy_plateau']['text']}\nthroughput: {series['throughput_plateau']['text']}"
    panel.set_title(said, loc="left", fontsize=8)
