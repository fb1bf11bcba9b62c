"""``joulemark report``: tables of stored runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from joulemark.cli.arguments import FORMATS, Commands, add_command
from joulemark.cli.console import say
from joulemark.errors import ConfigurationError


def add_parser(commands: Commands) -> None:
    """Add ``report``."""
    parser = add_command(
        commands,
        "report",
        "tables of stored runs (joulemark's and pytest-benchmark's)",
        "joulemark report results/cpu/ --out summary.md",
        run,
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="a result file, or a folder of them")
    parser.add_argument("--format", choices=FORMATS, help="terminal unless --out's suffix says otherwise")
    parser.add_argument("--out", type=Path, metavar="F", help="write to F (.md, .csv or .json) instead of the terminal")


def run(args: argparse.Namespace) -> int:
    """Print or write the tables of the runs."""
    from joulemark.report import foreign, output

    if args.out is not None and args.format is None:
        output.check_report_path(args.out)
    runs, unusable = foreign.read_results(args.results)
    for line in unusable:
        say(f"left out: {line}")
    if not runs:
        raise ConfigurationError(f"no usable result in {', '.join(map(str, args.results))}", "run pytest --bench first")
    if args.out is not None:
        output.write_report(runs, args.out, args.format)
        say(f"wrote {args.out}")
    else:
        sys.stdout.write(output.render(runs, args.format or "terminal"))
    return 0
