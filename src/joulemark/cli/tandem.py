"""``joulemark tandem``: from which batch on the kernels of inference hide the framework."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from joulemark.cli.arguments import Commands, add_command
from joulemark.cli.console import print_json, say


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
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/schema/tandem.schema.json)")
    parser.add_argument("--format", choices=("terminal", "markdown", "json"), help="terminal unless you choose")
    parser.add_argument("--out", type=Path, metavar="F", help="write to F (.json or .md) instead of the terminal")
    parser.add_argument("--plot", type=Path, metavar="F", help="draw into F (.svg, .png or .pdf; needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Print, write or draw the tandem of the runs."""
    from joulemark import tandem
    from joulemark.report import foreign, output, tandem_plot, tandem_view

    if args.out is not None:
        output.check_document_path(args.out, tandem.SCHEMA, "tandem document")
    if args.plot is not None:
        tandem_plot.check_path(args.plot)
    runs, unusable = foreign.read_results(args.results)
    for line in unusable:
        say(f"left out: {line}")
    document = tandem.tandem_document(runs)
    if args.plot is not None:
        tandem_plot.draw(document, args.plot)
        say(f"wrote {args.plot}")
    if args.out is not None:
        output.write_text(tandem_view.text_for(document, args.out), args.out)
        say(f"wrote {args.out}")
    elif args.json or args.format == "json":
        print_json(document)
    else:
        sys.stdout.write(tandem_view.render(document, "markdown" if args.format == "markdown" else "terminal"))
    return tandem.exit_code(document)
