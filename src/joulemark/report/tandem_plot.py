"""The tandem of CPU and GPU over batch sizes as a picture: a row per model, a line per mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulemark.errors import ConfigurationError
from joulemark.records import Json
from joulemark.report.plot import COLOURS, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = ("time per step (s)", "exposed share of the step", "hidden ratio")


def draw(document: Mapping[str, Json], path: Path) -> None:
    """Draw the document of :func:`joulemark.tandem.tandem_document` into a file.

    Per model: GPU busy time (solid) and host issue time (dashed) over the batch size with the crossovers and their
    intervals, the exposed share of the step, and the hidden ratio.

    Raises:
        ConfigurationError: there is no series to draw, or the disk refuses.
    """
    from matplotlib.figure import Figure

    groups = _by_model(document["series"])
    if not groups:
        raise ConfigurationError("no series over batch sizes is there to be drawn", "sweep bench_tandem.py")
    figure = Figure(figsize=(13, 3.6 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), len(_PANELS), squeeze=False)
    for row, (name, series) in zip(panels, groups.items(), strict=True):
        _draw_model(row, name, series)
    save(figure, path)


def _by_model(series: Sequence[Mapping[str, Json]]) -> dict[str, list[Mapping[str, Json]]]:
    groups: dict[str, list[Mapping[str, Json]]] = {}
    for one in series:
        name = " ".join(str(one[key]) for key in ("workload", "phase", "dtype", "gpu_model") if one[key])
        groups.setdefault(name, []).append(one)
    return groups


def _draw_model(panels: Sequence[Axes], name: str, series: Sequence[Mapping[str, Json]]) -> None:
    times, shares, hidden = panels
    for index, one in enumerate(series):
        colour, label = COLOURS[index % len(COLOURS)], _label(one)
        _line(times, one, lambda row: row["metrics"]["gpu_busy_s"]["value"], colour, "-")
        _line(times, one, lambda row: row["metrics"]["host_issue_unprofiled_s"]["value"], colour, "--")
        _line(shares, one, lambda row: row["exposed_share"], colour, "-", label)
        _line(hidden, one, lambda row: row["hidden_ratio_unprofiled"], colour, "-", label)
        _mark_crossover(times, one["crossover"], colour)
    times.set_yscale("log")
    times.set_title(plain(name), loc="left", fontsize=10)
    shares.axhline(0.05, color="grey", linewidth=0.8, linestyle=":")
    for panel, title in zip(panels, _PANELS, strict=True):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda batch, _: f"{batch:g}")
        panel.set_xlabel("batch size")
        panel.set_ylabel(title)
        panel.grid(visible=True, linewidth=0.3)
    for style, what in (("-", "GPU busy"), ("--", "host issue")):
        times.plot([], [], style, color="black", linewidth=1.2, label=what)
    times.legend(fontsize=7)
    shares.legend(fontsize=7)


def _line(panel: Axes, series: Mapping[str, Json], value: Any, colour: str, style: str, label: str = "") -> None:
    known = [(row["batch_size"], value(row)) for row in series["rows"] if value(row) is not None]
    if known:
        batches, values = zip(*known, strict=True)
        panel.plot(batches, values, style, color=colour, marker="o", markersize=3, linewidth=1.2, label=label)


def _mark_crossover(panel: Axes, crossover: Mapping[str, Json], colour: str) -> None:
    if crossover["batch"] is None:
        return
    panel.axvline(crossover["batch"], color=colour, linewidth=0.8)
    if crossover["interval"] is not None:
        panel.axvspan(*crossover["interval"], color=colour, alpha=0.15, linewidth=0)


def _label(series: Mapping[str, Json]) -> str:
    parts = [series["mode"] or "", series["input"] if series["input"] not in (None, "device") else ""]
    parts.append(f"x{series['world_size']}" if series["world_size"] != 1 else "")
    return plain(" ".join(part for part in parts if part) or "series")
