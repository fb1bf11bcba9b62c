"""``joulemark aa``: how often the gate cries wolf, and the smallest slowdown that it finds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark.argument_types import positive
from joulemark.cli.arguments import Commands, add_command, add_form_arguments, new_folder
from joulemark.cli.console import read_runs, say, show
from joulemark.errors import ConfigurationError

if TYPE_CHECKING:
    from joulemark.records import Run


def add_parser(commands: Commands) -> None:
    """Add ``aa``."""
    parser = add_command(
        commands,
        "aa",
        "how often the gate cries wolf on this machine, and the smallest slowdown that it finds",
        "joulemark aa --processes 24 --out results/nvidia-h200/aa.json -- bench_training --bench-quick",
        run,
    )
    parser.add_argument(
        "what",
        nargs="*",
        metavar="RESULT",
        help="stored runs of one binary with many processes; with --processes, arguments of pytest --bench",
    )
    parser.add_argument(
        "--processes",
        type=positive,
        metavar="N",
        help="measure first, each case in N processes (six at least, better 24 or more)",
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="where that run is stored")
    parser.add_argument("--metric", metavar="NAME", help="device_time_s or host_time_s")
    parser.add_argument(
        "--pairs",
        type=positive,
        default=1000,
        metavar="N",
        help="how many pairs of triples of processes are judged, at least (1000 by default)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random splits")
    add_form_arguments(parser, "aa.schema.json")
    parser.add_argument("--out", type=Path, metavar="F.json", help="also write the JSON document to F.json")


def run(args: argparse.Namespace) -> int:
    """Judge the gate, print the table, and write the document."""
    from joulemark.regression import processes, trials
    from joulemark.report import aa_view, jsonout, output
    from joulemark.whole_files import write_text

    if args.processes is not None and args.processes < processes.LEAST:
        what = f"--processes {args.processes} are too few to judge the gate on"
        raise ConfigurationError(what, f"give {processes.LEAST} at least, better 24")
    if args.out is not None:
        output.check_document_path(args.out, trials.SCHEMA, "document of aa", (".json",))
    runs = _stored(args.what) if args.processes is None else [_measured(args)]
    document = trials.evaluate(runs, args.metric, pairs=args.pairs, seed=args.seed)
    if args.out is not None:
        write_text(jsonout.dumps(document), args.out)
        say(f"wrote {args.out}")
    show(document, args, aa_view)
    return 0


def _stored(results: list[str]) -> list[Run]:
    if not results:
        raise ConfigurationError("aa got no results", "give RESULT…, or --processes 24 to measure first")
    for one in results:
        if one.startswith("-"):
            raise ConfigurationError(f"aa got {one!r}, which is no result", "give --processes 24 too, to measure")
    return read_runs(map(Path, results))


def _measured(args: argparse.Namespace) -> Run:
    from joulemark.measure import rounds

    say(f"measuring each case in {args.processes} processes")
    arguments = [f"--bench-processes={args.processes}", "--bench-collect=timing", *args.what]
    run = rounds.session(Path(sys.executable), args.results or new_folder("aa"), arguments)
    say(f"records: {run.path}")
    return run
