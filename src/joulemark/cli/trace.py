"""``joulemark trace``: how busy torch.profiler traces show the GPU, and what it waits for."""

from __future__ import annotations

import argparse
from pathlib import Path

from joulemark.cli.arguments import Commands, add_command, add_form_arguments
from joulemark.cli.console import say, show
from joulemark.errors import ConfigurationError


def add_parser(commands: Commands) -> None:
    """Add ``trace``."""
    parser = add_command(
        commands,
        "trace",
        "how busy a torch.profiler trace shows the GPU, and what it waits for",
        "joulemark trace trace.json.gz --json",
        run,
        "0 all complete, 2 unreadable, 3 a trace is incomplete",
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="a Chrome trace, .json or .json.gz")
    add_form_arguments(parser, "trace.schema.json")
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="what changed from A to B")
    parser.add_argument("--ranks", action="store_true", help="FILEs are the ranks of one run: their communication")


def run(args: argparse.Namespace) -> int:
    """Analyse traces, or what changed between two."""
    from joulemark import trace
    from joulemark.report import trace_view

    if bool(args.files) == (args.diff is not None):
        raise ConfigurationError(
            f"trace got {len(args.files)} files and {'a' if args.diff else 'no'} --diff", "give FILE…, or --diff A B"
        )
    if args.ranks:
        return _ranks(args)
    if args.diff is not None:
        base, new = (trace.analyse_files([path]) for path in args.diff)
        document = trace.diff(base, new)
        sides = [document["base"], document["new"]]
    else:
        document = trace.analyse_files(args.files)
        sides = document["files"]
    show(document, args, trace_view)
    for side in sides:
        if side["error"]:
            say(f"error: {side['error']}")
    return trace.exit_code(document)


def _ranks(args: argparse.Namespace) -> int:
    from joulemark.report import ranks_view
    from joulemark.trace.communication import ranks_document

    if len(args.files) < 2:
        raise ConfigurationError(f"trace --ranks got {len(args.files)} files", "give the trace of every rank")
    document = ranks_document(args.files)
    show(document, args, ranks_view)
    return 0
