"""``joulemark ab``: two Python environments on one machine, measured in turns and compared."""

from __future__ import annotations

import argparse
from pathlib import Path

from joulemark.argument_types import positive
from joulemark.cli import verdicts
from joulemark.cli.arguments import Commands, add_command, new_folder
from joulemark.cli.console import say


def add_parser(commands: Commands) -> None:
    """Add ``ab``."""
    parser = add_command(
        commands,
        "ab",
        "two Python environments on one machine, measured in turns and compared",
        "joulemark ab --old venvs/torch-2.10 --new venvs/torch-2.11 --rounds 3 -- bench_training --bench-quick",
        run,
        verdicts.EXIT_CODES,
    )
    for side in ("old", "new"):
        parser.add_argument(
            f"--{side}", type=Path, required=True, metavar="ENV", help="a Python interpreter, or a virtual environment"
        )
    parser.add_argument(
        "--rounds", type=positive, default=3, metavar="N", help="of one process per side (3 unless you choose)"
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="for the records of all rounds")
    parser.add_argument("pytest_args", nargs="*", metavar="-- PYTEST", help="arguments of pytest --bench")
    verdicts.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure both in turns, compare, and exit by the verdict."""
    from joulemark.measure import rounds
    from joulemark.report.compare import check, compare

    rule, metrics = verdicts.rule_of(args), verdicts.metrics_of(args)
    check(metrics, rule)
    old, new = (rounds.interpreter_of(one) for one in (args.old, args.new))
    if args.rounds < 3:
        say(f"{args.rounds} rounds show no spread between processes: it will be assumed (3 rounds measure it)")
    folder = args.results or new_folder("ab")
    sides = rounds.take_turns(old, new, args.rounds, folder, args.pytest_args, say)
    say(f"records: {sides[0].path} and {sides[1].path}")
    return verdicts.show(compare(*sides, metrics, rule), args)
