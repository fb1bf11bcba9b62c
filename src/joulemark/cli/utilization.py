"""``joulemark utilization``: how much of a busy GPU works in training, and where a bigger batch stops helping."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark.cli.arguments import Commands, add_command, add_document_arguments
from joulemark.cli.console import check_places, deliver, read_runs
from joulemark.errors import ConfigurationError, UnreadableInput

if TYPE_CHECKING:
    from joulemark.records import Json, Run


def add_parser(commands: Commands) -> None:
    """Add ``utilization``."""
    parser = add_command(
        commands,
        "utilization",
        "plateaus and levels of training over batch sizes, and a waterfall from the ideal step to the real one",
        "joulemark utilization results/nvidia-h200/ --out utilization.json --plot utilization.svg",
        run,
        "0 read, 2 unreadable or nothing to show",
    )
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="RESULT", help="sweeps of training, or folders of them"
    )
    parser.add_argument(
        "--counters",
        action="append",
        default=[],
        metavar="CASE=FILE",
        help="counters of the kernels of one case (a part of its label), by Nsight Compute (.csv) or by joulemark "
        "attribution (.json): they put kernel classes right, weigh levels by the profiled timeline and tell what DRAM "
        "bounds; may be given several times",
    )
    add_document_arguments(parser, "utilization.schema.json")


def run(args: argparse.Namespace) -> int:
    """Print, write or draw the utilization of the runs."""
    from joulemark.report import utilization_plot, utilization_view
    from joulemark.utilization import summary

    check_places(args, summary.SCHEMA, "utilization document")
    runs = read_runs(args.results)
    document = summary.document_of(runs, dict(_per_kernel(given, runs) for given in args.counters))
    if not document["series"]:
        raise ConfigurationError(
            f"no training over batch sizes is in {', '.join(map(str, args.results))}",
            "run pytest --bench bench_training --bench-collect timing,profiler,counters",
        )
    deliver(document, args, utilization_view, utilization_plot)
    return 0


def _per_kernel(given: str, runs: Sequence[Run]) -> tuple[str, Json]:
    """The case that a CASE=FILE is about, and what its export holds."""
    from joulemark import utilization
    from joulemark.utilization.refine import find_record

    label, equals, file = given.rpartition("=")
    if not equals or not label or not file:
        raise ConfigurationError(f"--counters got {given!r}", "it takes CASE=FILE")
    record = find_record((one for run in runs for one in run.records), label)
    if file.endswith(".json"):
        from joulemark.attribution.feeds import read_per_kernel

        return record.case_id, read_per_kernel(Path(file))
    document = utilization.read_files([Path(file)])
    for entry in document["files"]:
        if entry["error"]:
            raise UnreadableInput(entry["error"])
    return record.case_id, document
