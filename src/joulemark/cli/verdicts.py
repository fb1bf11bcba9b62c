"""What the commands with verdicts share: the options that say what counts, and how a comparison is shown."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from joulemark.argument_types import fraction
from joulemark.cli.arguments import FORMATS
from joulemark.cli.console import say

if TYPE_CHECKING:
    from joulemark.regression.verdicts import Rule
    from joulemark.report.comparison import Comparison

_METRICS_HELP = (
    "what counts, comma-separated: names of metrics in the result files (device_time_s, host_time_s, throughput_per_s, "
    "energy_per_item_j and peak_memory_bytes unless you say)"
)
EXIT_CODES = "0 nothing worse, 1 regressed, 2 unreadable, 3 cannot be decided or no figure counts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a comparison."""
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/schema/compare.schema.json)")
    parser.add_argument("--format", choices=FORMATS, default="terminal", help="terminal unless you choose")
    parser.add_argument("--metrics", metavar="NAMES", help=_METRICS_HELP)
    parser.add_argument(
        "--spread",
        type=fraction,
        metavar="FRACTION",
        help="what two runs of the same thing are assumed to differ by: 0.02 or 2%% (2%% unless you say)",
    )
    parser.add_argument(
        "--threshold",
        type=fraction,
        metavar="FRACTION",
        help="the worsening that must not stay unseen (5%% unless you say)",
    )
    parser.add_argument(
        "--min-effect",
        type=fraction,
        metavar="FRACTION",
        help="smallest worsening that counts, however certain (1%% unless you say)",
    )
    parser.add_argument("--fail-on-missing", action="store_true", help="exit 1 when NEW lacks rows or figures of BASE")


def metrics_of(args: argparse.Namespace) -> tuple[str, ...] | None:
    """The metrics that were named."""
    if args.metrics is None:
        return None
    return tuple(name.strip() for name in args.metrics.split(",") if name.strip())


def rule_of(args: argparse.Namespace) -> Rule:
    """What counts as worse."""
    from joulemark.regression.verdicts import Rule

    given = {name: getattr(args, name) for name in ("spread", "threshold", "min_effect")}
    return Rule(**{name: value for name, value in given.items() if value is not None})


def show(comparison: Comparison, args: argparse.Namespace) -> int:
    """Print a comparison; the exit code by its verdict."""
    from joulemark.report import output
    from joulemark.report.comparison import exit_code, meaning_of_exit

    form: output.Format = "json" if args.json else args.format
    ends = meaning_of_exit(comparison, args.fail_on_missing)
    sys.stdout.write(output.render_comparison(comparison, form, ends=ends))
    if form in ("json", "csv"):
        for message in comparison.messages:
            say(message)
    return exit_code(comparison, args.fail_on_missing)
