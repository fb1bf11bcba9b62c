"""``joulemark report``: tables of stored runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark.cli.arguments import FORMATS, Commands, add_command
from joulemark.cli.console import say
from joulemark.errors import ConfigurationError

if TYPE_CHECKING:
    from joulemark.records import Run
    from joulemark.report import output


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
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--shares",
        action="store_true",
        help="which part of the chip spends how much, side by side: results are documents of joulemark energy",
    )
    what.add_argument(
        "--plateaus",
        nargs="?",
        const="throughput_per_s",
        metavar="METRIC",
        help="from which batch on a bigger one stops helping, of every series, GPU, driver and run "
        "(of throughput_per_s unless you say)",
    )


def run(args: argparse.Namespace) -> int:
    """Print or write the tables of the runs."""
    from joulemark.report import output

    if args.out is not None and args.format is None:
        output.check_report_path(args.out)
    form = args.format or ("terminal" if args.out is None else output.format_of(args.out))
    width = None if args.out is None else output.FILE_WIDTH
    text = _shares(args.results, form, width) if args.shares else _of_runs(args, form, width)
    if args.out is None:
        sys.stdout.write(text)
    else:
        output.write_checked(text, args.out)
        say(f"wrote {args.out}")
    return 0


def _of_runs(args: argparse.Namespace, form: output.Format, width: int | None) -> str:
    from joulemark.report import foreign, output

    runs, unusable = foreign.read_results(args.results)
    for line in unusable:
        say(f"left out: {line}")
    if not runs:
        raise ConfigurationError(f"no usable result in {', '.join(map(str, args.results))}", "run pytest --bench first")
    return output.render(runs, form, width) if args.plateaus is None else _plateaus(runs, args.plateaus, form, width)


def _shares(paths: list[Path], form: str, width: int | None) -> str:
    from joulemark.report import energy_shares, markdown, terminal

    if form not in ("terminal", "markdown"):
        raise ConfigurationError(f"shares have no {form} form", "the documents themselves are JSON")
    table = energy_shares.shares_table(energy_shares.read_shares(paths))
    return markdown.render([table]) if form == "markdown" else terminal.render([table], width) + "\n"


def _plateaus(runs: list[Run], name: str, form: str, width: int | None) -> str:
    from joulemark.report import jsonout, markdown, plateau_table, terminal

    metric = plateau_table.check_metric(name)
    if form == "csv":
        raise ConfigurationError("plateaus have no csv form", "use --format json")
    rows = plateau_table.plateaus_of(runs, metric)
    if form == "json":
        return jsonout.dumps(plateau_table.document(rows, metric))
    tables = [plateau_table.table_of(rows, metric)]
    return markdown.render(tables) if form == "markdown" else terminal.render(tables, width) + "\n"
