"""``joulemark counters``: kernels, their classes and levels in exports of Nsight Compute."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from joulemark.cli.arguments import Commands, add_command
from joulemark.cli.console import print_json, say


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
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/schema/counters.schema.json)")
    parser.add_argument("--format", choices=("terminal", "markdown", "json"), help="terminal unless you choose")


def run(args: argparse.Namespace) -> int:
    """Read exports and print their kernels, classes and levels."""
    from joulemark import utilization
    from joulemark.report import counters_view

    document = utilization.read_files(args.files)
    if args.json or args.format == "json":
        print_json(document)
    else:
        sys.stdout.write(counters_view.render(document, "markdown" if args.format == "markdown" else "terminal"))
    for entry in document["files"]:
        if entry["error"]:
            say(f"error: {entry['error']}")
    return utilization.exit_code(document)
