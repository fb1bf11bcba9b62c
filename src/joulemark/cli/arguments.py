"""How commands describe themselves, and the arguments that several have."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""What ``ArgumentParser.add_subparsers`` returns."""

FORMATS = ("terminal", "markdown", "csv", "json")


class Parser(argparse.ArgumentParser):
    """Says of wrong arguments which were perhaps meant, and where the help is."""

    def error(self, message: str) -> NoReturn:
        super().error(f"{message}; {self.prog} --help shows an example")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with an error about arguments that this command does not take."""
        known = [name for action in self._actions for name in action.option_strings]
        meant = [one for name in unknown for one in get_close_matches(name.partition("=")[0], known, 1)]
        also = f" (did you mean {', '.join(dict.fromkeys(meant))}?)" if meant else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{also}")


def add_command(
    commands: Commands,
    name: str,
    about: str,
    example: str,
    run: Callable[[argparse.Namespace], int],
    exit_codes: str = "0 done, 2 wrong use or unreadable",
) -> Parser:
    """Add a command whose help ends with an example.

    Args:
        commands: of the program.
        name: of the command.
        about: what it does, in one line without a full stop.
        example: a command line that works.
        run: does it and returns the exit code.
        exit_codes: what they mean.
    """
    parser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=f"example:\n  {example}\n\nexit codes: {exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, parser=parser)
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
