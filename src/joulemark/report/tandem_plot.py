"""The tandem of CPU and GPU over batch sizes as a picture: a row per model, a line per mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulemark.errors import ConfigurationError
from joulemark.records import Json
from joulemark.report.escape import printable, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette, told apart by colour-blind readers too."""
_PANELS = ("time per step (s)", "exposed share of the step", "hidden ratio")


def check_path(path: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is read.

    Raises:
        ConfigurationError: of another suffix, a folder, or without matplotlib.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigurationError(f"--plot got {str(path)!r}", f"use a name that ends in {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise ConfigurationError(f"--plot got {str(path)!r}, which is a folder", "give a file name in it")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError("--plot needs matplotlib", "pip install 'joulemark[plot]'") from error


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


def save(figure: Figure, path: Path) -> None:
    """Write a figure; missing folders are made, and an SVG holds no date.

    Raises:
        ConfigurationError: the disk refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, metadata=metadata)
    except OSError as error:
        what = f"the plot {path} cannot be written ({error.strerror or error})"
        raise ConfigurationError(what, "choose another place") from error


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
    return plain(" ".join(part for part in parts if part) or "series")


def plain(text: str) -> str:
    """Text that matplotlib shows as it is: a dollar sign would begin mathematics, an underscore at the front hide."""
    return shorten(printable(text), 60).replace("$", r"\$").lstrip("_")
