"""``joulemark attribution``: counters of each kernel class, operator and module of a recorded run, without replay."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark.cli.arguments import Commands, add_command, add_document_arguments
from joulemark.cli.console import check_places, deliver, say
from joulemark.errors import ConfigurationError, UnreadableInput, in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from joulemark.records import Json
    from joulemark.report.evidence import Document


def add_parser(commands: Commands) -> None:
    """Add ``attribution``."""
    parser = add_command(
        commands,
        "attribution",
        "counters of each kernel class, operator and module of a recorded run, without replay",
        "joulemark attribution results/nvidia-h200/sweep-20261130T101500Z-1a2b3c.jsonl",
        run,
        "0 read, 2 unreadable, or its clocks cannot be mapped",
    )
    parser.add_argument(
        "sources",
        type=Path,
        nargs="+",
        metavar="RESULT",
        help="a result file of pytest --bench --bench-collect attribution, or a folder of them: its documents; one of "
        "these documents; a recording that was kept (--bench-keep-traces): it is analysed anew",
    )
    add_document_arguments(parser, "attribution.schema.json")


def run(args: argparse.Namespace) -> int:
    """Print the attributions of what was given; write or draw one."""
    from joulemark.attribution import SCHEMA
    from joulemark.report import attribution_plot, attribution_view

    check_places(args, SCHEMA, "attribution document")
    found = [one for source in args.sources for one in _documents(source)]
    one_alone = [name for name in ("json", "out", "plot") if getattr(args, name)]
    if args.format == "json":
        one_alone.append("format json")
    if len(found) > 1 and one_alone:
        what = f"--{one_alone[0]} takes one attribution, and {len(found)} were found"
        raise ConfigurationError(what, f"name one: {', '.join(str(name) for name, _ in found[:3])} …")
    for _, document in found:
        deliver(document, args, attribution_view, attribution_plot)
    return 0


def _documents(source: Path) -> list[tuple[Path, dict[str, Json]]]:
    """The attributions of a recording, a document, a result file or a folder of results.

    Raises:
        UnreadableInput: there is none, or one that is named is not whole.
    """
    from joulemark.attribution import attribute
    from joulemark.attribution.recording import FILE
    from joulemark.attribution.stored import folder_beside
    from joulemark.report import documents

    if source.suffix == ".jsonl" and source.is_file():
        return _whole(source, *documents.in_folder(folder_beside(source), ("attribution",)))
    if source.is_file():
        return [(source, _shown(documents.read(source, "attribution")))]
    if source.is_dir() and not (source / FILE).exists():
        return _whole(source, *documents.in_folder(source, ("attribution",)))
    return [(source, attribute(source))]


def _whole(source: Path, held: Sequence[Document], unusable: Iterable[str]) -> list[tuple[Path, dict[str, Json]]]:
    """What was found with results; files that cannot be used are named."""
    for line in unusable:
        say(f"left out: {line}")
    if not held:
        what = f"no attribution stands {'in' if source.is_dir() else 'beside'} {source}"
        raise UnreadableInput(what, "measure with pytest --bench --bench-collect timing,power,attribution on a GPU")
    return [(Path(one.path), _shown(one)) for one in held]


def _shown(read: Document) -> dict[str, Json]:
    """An attribution that was written before, with all that its tables show."""
    from joulemark.report import attribution_view

    document = dict(read.content)
    try:
        list(attribution_view.tables(document))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{read.path} is no whole document of joulemark attribution ({in_words(error)})"
        raise UnreadableInput(what, "make it again from its recording") from error
    return document
