"""How commands describe themselves, and the arguments that several have."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What ``ArgumentParser.add_subparsers`` returns."""

FORMATS = ("terminal", "markdown", "csv", "json")


def add_command(
    commands: Commands,
    name: str,
    about: str,
    example: str,
    run: Callable[[argparse.Namespace], int],
    exit_codes: str | None = None,
) -> argparse.ArgumentParser:
    """Add a command whose help ends with an example.

    Args:
        commands: of the program.
        name: of the command.
        about: what it does, in one line without a full stop.
        example: a command line that works.
        run: does it and returns the exit code.
        exit_codes: what they mean, where they mean more than 0 fine and 2 wrong use.
    """
    parser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=f"example:\n  {example}" + (f"\n\nexit codes: {exit_codes}" if exit_codes else ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_form_arguments(parser: argparse.ArgumentParser, schema: str) -> None:
    """Add how a command prints its document: ``--json --format``.

    Args:
        schema: name of the document's schema in docs/schema.
    """
    parser.add_argument("--json", action="store_true", help=f"one JSON document (docs/schema/{schema})")
    parser.add_argument("--format", choices=("terminal", "markdown", "json"), help="terminal unless you choose")


def add_document_arguments(parser: argparse.ArgumentParser, schema: str) -> None:
    """Add where and how a command gives its document and a picture of it: ``--json --format --out --plot``.

    Args:
        schema: name of the document's schema in docs/schema.
    """
    add_form_arguments(parser, schema)
    parser.add_argument("--out", type=Path, metavar="F", help="write to F (.json or .md) instead of the terminal")
    parser.add_argument("--plot", type=Path, metavar="F", help="draw into F (.svg, .png or .pdf; needs matplotlib)")


def new_folder(command: str) -> Path:
    """Where pytest --bench would store: the project's results, or a folder that git ignores."""
    parent = Path("results") if Path("results").is_dir() else Path(".joulemark")
    return parent / command / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
