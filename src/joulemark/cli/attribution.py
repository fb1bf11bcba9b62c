"""``joulemark attribution``: counters of each kernel class, operator and module of a recorded run, without replay."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark.cli.arguments import Commands, add_command, add_document_arguments
from joulemark.cli.console import check_places, deliver
from joulemark.errors import UnreadableInput, in_words

if TYPE_CHECKING:
    from joulemark.records import Json


def add_parser(commands: Commands) -> None:
    """Add ``attribution``."""
    parser = add_command(
        commands,
        "attribution",
        "counters of each kernel class, operator and module of a recorded run, without replay",
        "joulemark attribution recorded/ --out attribution.json --plot attribution.svg",
        run,
        "0 read, 2 unreadable, or its clocks cannot be mapped",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="RECORDING",
        help="folder that joulemark.measure.attribution.record wrote, or an earlier document (--out F.json)",
    )
    add_document_arguments(parser, "attribution.schema.json")


def run(args: argparse.Namespace) -> int:
    """Print, write or draw the attribution of a recording."""
    from joulemark.attribution import SCHEMA, attribute
    from joulemark.report import attribution_plot, attribution_view

    check_places(args, SCHEMA, "attribution document")
    document = _earlier(args.source) if args.source.is_file() else attribute(args.source)
    deliver(document, args, attribution_view, attribution_plot)
    return 0


def _earlier(path: Path) -> dict[str, Json]:
    """An attribution that was written before, with all that its tables show."""
    from joulemark.report import attribution_view, documents

    document = dict(documents.read(path, "attribution").content)
    try:
        list(attribution_view.tables(document))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{path} is no whole document of joulemark attribution ({in_words(error)})"
        raise UnreadableInput(what, "make it again from its recording") from error
    return document
