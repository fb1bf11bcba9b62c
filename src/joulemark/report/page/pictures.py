"""From a figure to inline SVG that follows the page's colours, and to PNG, SVG and CSV files."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulemark.errors import ConfigurationError
from joulemark.report import csv, plot
from joulemark.report.escape import printable
from joulemark.report.page.parts import Figure, Mark
from joulemark.whole_files import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

WIDTH, HEIGHT = 4.6, 2.9
"""Of a figure, in inches: readable on a phone, and three stand in a row on a screen."""
_ABOVE, _BELOW, _EDGE = 0.28, 0.45, 0.012
"""Margins in inches, and where text begins, as a share of the width."""
_INK, _QUIET, _GRID, _PAPER = "#1b2027", "#5d6673", "#d9dde3", "#fdfdfe"
_SETTINGS: Mapping[str, Any] = {
    "font.size": 9.0, "axes.titlesize": 9.0, "axes.labelsize": 9.0, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5,
    "text.color": _INK, "axes.labelcolor": _QUIET, "axes.edgecolor": _QUIET, "xtick.color": _QUIET,
    "ytick.color": _QUIET, "grid.color": _GRID, "grid.linewidth": 0.6, "axes.grid": True, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7, "figure.facecolor": _PAPER,
    "axes.facecolor": "none", "svg.fonttype": "none", "svg.hashsalt": "joulemark", "legend.frameon": False,
    "xtick.major.size": 0.0, "ytick.major.size": 0.0, "axes.titley": 1.0, "savefig.dpi": 200.0,
}  # fmt: skip
_VARIABLES = {
    **{colour: f"var(--s{index})" for index, colour in enumerate(plot.PALETTE)},
    _INK: "var(--ink)", _QUIET: "var(--quiet)", _GRID: "var(--grid)",
}  # fmt: skip
_COLOUR = re.compile("|".join(_VARIABLES))
_NAMED = re.compile(r' id="([^"]*)"')
_REFERENCE = re.compile(r'(?:href="|url\()#([^")]+)')
_FONT = re.compile(r"font: ([\d.]+)px [^;\"]+")
_PROLOGUE = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>|<!--.*?-->|\s*<title>.*?</title>", re.DOTALL)
_OPENING = re.compile(r'^<svg[^>]*?viewBox="([^"]+)"[^>]*>')
_TAG = re.compile(r"<[^>]*>")
_FRACTION = re.compile(r"(\d\.\d\d)\d+")
_BLANKS = re.compile(r"\s*\n\s*")


def check_folder(folder: Path) -> None:
    """Refuse a folder for plots before any work is done.

    Raises:
        ConfigurationError: it is a file, or matplotlib is not installed.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"--plots {str(folder)!r} is a file", "give a folder; it is made if need be")
    check_matplotlib("--plots")


def check_matplotlib(what: str) -> None:
    """Say what needs matplotlib where it is not installed.

    Raises:
        ConfigurationError: it is not.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigurationError(f"{what} needs matplotlib", "pip install 'joulemark[html]'") from None


def inline(figure: Figure) -> str:
    """A figure as an SVG element: its colours are the page's variables, its identifiers its own, its text is text."""
    out = io.StringIO()
    with settings():
        canvas = _drawn(figure)
        canvas.patch.set_visible(False)
        canvas.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = _OPENING.sub(r'<svg viewBox="\1" aria-hidden="true">', _PROLOGUE.sub("", out.getvalue()), count=1)
    used = {name for tag in _TAG.findall(text) for name in _REFERENCE.findall(tag)}
    return _BLANKS.sub(" ", _TAG.sub(lambda found: _own_tag(found.group(), figure.key, used), text))


def _own_tag(tag: str, key: str, used: Set[str]) -> str:
    """A tag in the page's colours, with short numbers; text between tags is nobody's to change.

    Identifiers that are referred to are made unique on the page, the others dropped.
    """
    short = _FRACTION.sub(r"\1", _FONT.sub(r"font-size: \1px", tag))
    coloured = _COLOUR.sub(lambda found: _VARIABLES[found.group()], short)
    kept = _NAMED.sub(lambda found: f' id="{key}-{found[1]}"' if found[1] in used else "", coloured)
    return _REFERENCE.sub(lambda found: found.group().replace("#", f"#{key}-"), kept)


def settings() -> Any:
    """A context in which matplotlib draws as the report does."""
    import matplotlib as mpl

    return mpl.rc_context(dict(_SETTINGS))


def _drawn(figure: Figure, above: float = 0.0, below: float = 0.0) -> Canvas:
    """A canvas with the figure on it, and inches above for a title and below for a legend."""
    from matplotlib.figure import Figure as Canvas

    height = HEIGHT + above + below
    canvas = Canvas(figsize=(WIDTH, height))
    width, bottom, top = 0.97 - figure.left, (_BELOW + below) / height, (HEIGHT + below - _ABOVE) / height
    axes = canvas.add_axes((figure.left, bottom, width, top - bottom))
    axes.set_title(plot.plain(figure.axis), loc="left", color=_QUIET, pad=6, x=(_EDGE - figure.left) / width)
    figure.draw(axes)
    return canvas


def save_all(figures: Iterable[Figure], folder: Path) -> list[Path]:
    """Write each figure as ``<key>.svg`` and ``<key>.png``, and its data as ``<key>.csv``.

    Raises:
        ConfigurationError: the disk refuses.
    """
    written = []
    for figure in figures:
        paths = [folder / f"{figure.key}{suffix}" for suffix in (".svg", ".png", ".csv")]
        with settings():
            canvas = _drawn(figure, 0.26, 0.17 * -(-len(figure.legend) // 2))
            _title_and_legend(canvas, figure)
            for path in paths[:2]:
                plot.save(canvas, path)
        _write_csv(figure, paths[2])
        written += paths
    return written


def _title_and_legend(canvas: Canvas, figure: Figure) -> None:
    canvas.text(_EDGE, 0.98, plot.plain(figure.title), va="top", fontsize=10, fontweight="bold", color=_INK)
    if figure.legend:
        handles = [handle(mark) for mark in figure.legend]
        canvas.legend(handles=handles, loc="lower left", ncols=2, fontsize=7.5, bbox_to_anchor=(0.01, 0.0))


def handle(mark: Mark) -> Any:
    """An entry of matplotlib's legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colour = plot.PALETTE[mark.colour % len(plot.PALETTE)]
    if mark.stroke in ("bar", "band"):
        return Patch(color=colour, alpha=1.0 if mark.stroke == "bar" else 0.2, label=plot.plain(mark.label))
    style = "--" if mark.stroke == "dash" else "-"
    return Line2D([], [], color=colour, linestyle=style, label=plot.plain(mark.label))


def _write_csv(figure: Figure, path: Path) -> None:
    names = list(dict.fromkeys(name for row in figure.rows for name in row))
    rows = [{name: row.get(name) for name in names} for row in figure.rows]
    write_text(csv.render_rows(rows), path)


def alternative(figure: Figure) -> str:
    """What a reader who does not see the figure is told."""
    return printable(f"{figure.title}: {figure.axis}. {figure.caption}")
