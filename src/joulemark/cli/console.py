"""What commands say and return: messages on stderr, documents on stdout, exit codes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from joulemark.records import Json, Run, Table

EXIT_REFUSED, EXIT_WRONG, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 130, 141


def say(message: str) -> None:
    """Print a message on stderr, never on stdout, even where stderr is closed; text from outside is spelt out."""
    from joulemark.report.escape import printable

    if sys.stderr is not None:
        print(f"joulemark: {printable(message)}", file=sys.stderr)


def print_json(document: Json) -> None:
    """Print one strict JSON document on stdout."""
    from joulemark.report.jsonout import dumps

    sys.stdout.write(dumps(document))


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs of result files and folders; what cannot be used is named on stderr."""
    from joulemark.report.foreign import read_results

    runs, unusable = read_results(list(paths))
    for line in unusable:
        say(f"left out: {line}")
    return runs


class View(Protocol):
    """A module of joulemark.report that shows one kind of document."""

    def tables(self, document: Mapping[str, Any]) -> Iterable[Table]:
        """Its tables."""
        ...


class Plot(Protocol):
    """A module of joulemark.report that draws one kind of document."""

    def draw(self, document: Mapping[str, Any], path: Path) -> None:
        """Draw it into a file."""
        ...


def check_places(args: argparse.Namespace, schema: str, what: str) -> None:
    """Refuse an ``--out`` or ``--plot`` that could not be written, before anything is read.

    Args:
        schema: of the document; a file of another kind is not overwritten.
        what: the document in words.

    Raises:
        ConfigurationError: one of them cannot be written.
    """
    from joulemark.report import output, plot

    if args.out is not None:
        output.check_document_path(args.out, schema, what)
    if args.plot is not None:
        plot.check_path(args.plot)


def show(document: Mapping[str, Any], args: argparse.Namespace, view: View) -> None:
    """Print a document as ``--json`` and ``--format`` say."""
    from joulemark.report import formats

    if args.json or args.format == "json":
        print_json(document)
    else:
        sys.stdout.write(formats.render(view.tables(document), args.format))


def deliver(document: Mapping[str, Any], args: argparse.Namespace, view: View, plot: Plot) -> None:
    """Draw, write or print a document as ``--plot``, ``--out``, ``--json`` and ``--format`` say."""
    from joulemark.report import formats, jsonout
    from joulemark.whole_files import write_text

    if args.plot is not None:
        plot.draw(document, args.plot)
        say(f"wrote {args.plot}")
    if args.out is not None:
        as_json = args.out.suffix.lower() == ".json"
        text = jsonout.dumps(document) if as_json else formats.render(view.tables(document), "markdown")
        write_text(text, args.out)
        say(f"wrote {args.out}")
    else:
        show(document, args, view)
