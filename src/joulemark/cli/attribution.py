"""``joulemark attribution``: counters of each kernel class, operator and module of a recorded run, without replay."""

from __future__ import annotations

import argparse
from pathlib import Path

from joulemark.cli.arguments import Commands, add_command, add_document_arguments
from joulemark.cli.console import check_places, deliver


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
        "folder", type=Path, metavar="FOLDER", help="of a recording (joulemark.measure.attribution.record)"
    )
    add_document_arguments(parser, "attribution.schema.json")


def run(args: argparse.Namespace) -> int:
    """Print, write or draw the attribution of a recording."""
    from joulemark.attribution import SCHEMA, attribute
    from joulemark.report import attribution_plot, attribution_view

    check_places(args, SCHEMA, "attribution document")
    deliver(attribute(args.folder), args, attribution_view, attribution_plot)
    return 0
