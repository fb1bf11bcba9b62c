"""``joulemark compare``: two stored runs, row by row, with a verdict."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from joulemark.cli.arguments import Commands, add_command, fraction
from joulemark.cli.console import print_json, say


def add_parser(commands: Commands) -> None:
    """Add ``compare``."""
    parser = add_command(
        commands,
        "compare",
        "two stored runs, row by row, with a verdict",
        "joulemark compare main.jsonl branch.jsonl --metrics device_time_s,energy_per_item_j",
        run,
        "0 nothing worse, 1 regressed, 2 unreadable, 3 cannot be decided",
    )
    parser.add_argument("base", type=Path, metavar="BASE", help="the result file to compare with")
    parser.add_argument("new", type=Path, metavar="NEW", help="the result file in question")
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/schema/compare.schema.json)")
    parser.add_argument("--format", choices=("terminal", "markdown", "json"), help="terminal unless you choose")
    parser.add_argument("--metrics", metavar="NAMES", help="comma-separated, of the names in the result files")
    parser.add_argument(
        "--spread",
        type=fraction,
        metavar="FRACTION",
        help="what two runs of the same thing are assumed to differ by: 0.02 or 2%% (2%% unless you say)",
    )
    parser.add_argument(
        "--threshold", type=fraction, metavar="FRACTION", help="smallest worsening that counts (5%% unless you say)"
    )
    parser.add_argument("--fail-on-missing", action="store_true", help="exit 1 when NEW lacks rows or figures of BASE")


def run(args: argparse.Namespace) -> int:
    """Compare, print the rows, and exit by the verdict."""
    from joulemark.report import compare, comparison_table, foreign, markdown, terminal

    metrics = compare.DEFAULT_METRICS if args.metrics is None else tuple(filter(None, args.metrics.split(",")))
    comparison = compare.compare(
        foreign.read_result(args.base),
        foreign.read_result(args.new),
        tuple(name.strip() for name in metrics),
        compare.DEFAULT_SPREAD if args.spread is None else args.spread,
        compare.DEFAULT_THRESHOLD if args.threshold is None else args.threshold,
    )
    if args.json or args.format == "json":
        print_json(comparison.to_json())
        for message in comparison.messages:
            say(message)
    elif args.format == "markdown":
        sys.stdout.write(markdown.render([comparison_table.table_of(comparison)]))
    else:
        terminal.print_tables([comparison_table.table_of(comparison)])
    return compare.exit_code(comparison, args.fail_on_missing)
