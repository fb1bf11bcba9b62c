"""What every picture shares: its file, its colours, and text that matplotlib shows as it is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark import whole_files
from joulemark.errors import ConfigurationError
from joulemark.report.escape import printable, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette, told apart by colour-blind readers too."""
PALETTE = (*COLOURS, "#f0e442", "#999999", "#8c510a", "#5e3c99")
"""The same, continued for the parts of stacked bars, which have an order and edges too."""


def check_path(path: Path, option: str = "--plot") -> None:
    """Refuse a picture that could not be drawn, before anything is read.

    Raises:
        ConfigurationError: of another suffix, a folder, or without matplotlib.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigurationError(f"{option} got {str(path)!r}", f"use a name that ends in {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise ConfigurationError(f"{option} got {str(path)!r}, which is a folder", "give a file name in it")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(f"{option} needs matplotlib", "pip install 'joulemark[plot]'") from error


_METADATA = {".svg": {"Date": None}, ".png": {}, ".pdf": {"CreationDate": None}}
_ABOUT = {".svg": "Description", ".png": "Description", ".pdf": "Subject"}


def save(figure: Figure, path: Path, about: str = "") -> None:
    """Write a figure, whole or not at all; missing folders are made, and no date is in it.

    Args:
        figure: to write.
        path: its suffix chooses the format.
        about: kept in the file's metadata.

    Raises:
        ConfigurationError: the disk refuses.
    """
    suffix = path.suffix.lower()
    told = {_ABOUT[suffix]: printable(about)} if about else {}
    drawn = io.BytesIO()
    figure.savefig(drawn, format=suffix[1:], metadata={**_METADATA[suffix], **told})
    try:
        whole_files.put(drawn.getvalue(), path)
    except OSError as error:
        what = f"the plot {path} cannot be written ({error.strerror or error})"
        raise ConfigurationError(what, "choose another place") from error


def plain(text: str) -> str:
    """Text that matplotlib shows as it is: a dollar sign would begin mathematics, an underscore at the front hide."""
    return shorten(printable(text), 60).replace("$", r"\$").lstrip("_")
