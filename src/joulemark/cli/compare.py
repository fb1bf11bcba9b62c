"""``joulemark compare``: two stored runs, row by row, with a verdict."""

from __future__ import annotations

import argparse
from pathlib import Path

from joulemark.cli import verdicts
from joulemark.cli.arguments import Commands, add_command


def add_parser(commands: Commands) -> None:
    """Add ``compare``."""
    parser = add_command(
        commands,
        "compare",
        "two stored runs, row by row, with a verdict",
        "joulemark compare main.jsonl branch.jsonl --metrics device_time_s,energy_per_item_j",
        run,
        verdicts.EXIT_CODES,
    )
    parser.add_argument("base", type=Path, metavar="BASE", help="the result file to compare with")
    parser.add_argument("new", type=Path, metavar="NEW", help="the result file in question")
    verdicts.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compare, print the rows, and exit by the verdict."""
    from joulemark.report import foreign
    from joulemark.report.compare import compare

    sides = (foreign.read_result(args.base), foreign.read_result(args.new))
    return verdicts.show(compare(*sides, verdicts.metrics_of(args), verdicts.rule_of(args)), args)
