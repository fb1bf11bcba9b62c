"""``joulemark tandem``: from which batch on the kernels of inference hide the framework."""

from __future__ import annotations

import argparse
from pathlib import Path

from joulemark.cli.arguments import Commands, add_command, add_document_arguments
from joulemark.cli.console import check_places, deliver, read_runs


def add_parser(commands: Commands) -> None:
    """Add ``tandem``."""
    parser = add_command(
        commands,
        "tandem",
        "device time against the host's issue time over batch sizes, and where they cross",
        "joulemark tandem results/nvidia-h200/ --out tandem.json --plot tandem.svg",
        run,
        "0 read, 2 unreadable or nothing to show, 3 a profile lost records: its launches and kernels do not agree",
    )
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="RESULT", help="a sweep with the profiler pass, or a folder of them"
    )
    add_document_arguments(parser, "tandem.schema.json")


def run(args: argparse.Namespace) -> int:
    """Print, write or draw the tandem of the runs."""
    from joulemark import tandem
    from joulemark.report import tandem_plot, tandem_view

    check_places(args, tandem.SCHEMA, "tandem document")
    document = tandem.tandem_document(read_runs(args.results))
    deliver(document, args, tandem_view, tandem_plot)
    return tandem.exit_code(document)
