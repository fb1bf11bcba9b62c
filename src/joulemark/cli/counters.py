"""``joulemark counters``: kernels, their classes and levels in exports of Nsight Compute."""

from __future__ import annotations

import argparse
from pathlib import Path

from joulemark.cli.arguments import Commands, add_command, add_form_arguments
from joulemark.cli.console import say, show


def add_parser(commands: Commands) -> None:
    """Add ``counters``."""
    parser = add_command(
        commands,
        "counters",
        "kernels, their classes and levels in an export of Nsight Compute (--csv)",
        "ncu --csv --page raw --print-units base python step.py > counters.csv; joulemark counters counters.csv",
        run,
        "0 all read, 2 unreadable or no permission, 3 a file is damaged",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="the output of ncu --csv")
    add_form_arguments(parser, "counters.schema.json")


def run(args: argparse.Namespace) -> int:
    """Read exports and print their kernels, classes and levels."""
    from joulemark import utilization
    from joulemark.report import counters_view

    document = utilization.read_files(args.files)
    show(document, args, counters_view)
    for entry in document["files"]:
        if entry["error"]:
            say(f"error: {entry['error']}")
    return utilization.exit_code(document)
