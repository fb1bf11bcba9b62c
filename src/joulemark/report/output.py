"""From runs to text in a chosen format, and to a file whose name chooses it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from joulemark.errors import ConfigurationError
from joulemark.records import Run, Table
from joulemark.report import answers_view, csv, formats, jsonout, markdown, plateau_table, terminal
from joulemark.report.evidence import Evidence, gather
from joulemark.report.tables import tables_of
from joulemark.whole_files import write_text

if TYPE_CHECKING:
    from joulemark.report.comparison import Comparison
    from joulemark.report.evidence import Document

Format = Literal["terminal", "markdown", "csv", "json", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)

_BY_SUFFIX: dict[str, Format] = {
    ".html": "html", ".htm": "html", ".md": "markdown", ".csv": "csv", ".json": "json",
}  # fmt: skip
_SCHEMAS = (jsonout.SCHEMA, plateau_table.SCHEMA)
FILE_WIDTH = 200
"""Columns of a terminal's tables in a file."""
_WAYS_OUT = "use a name that ends in .html, .md, .csv or .json"


def render(runs: Sequence[Run], form: Format, width: int | None = None, documents: Sequence[Document] = ()) -> str:
    """Runs as text.

    Args:
        runs: as read from the store or made by a sweep.
        form: ``terminal``, ``markdown``, ``html``, ``csv`` or ``json``.
        width: of the terminal, in columns; its own by default.
        documents: beside the runs, see :mod:`joulemark.report.documents`; ``csv`` and ``json`` hold runs alone.

    Raises:
        ConfigurationError: HTML is asked for, and jinja2 or matplotlib is not installed.
    """
    if form == "csv":
        return csv.render(runs)
    if form == "json":
        return jsonout.render(runs)
    evidence = gather(runs, documents)
    if form == "html":
        from joulemark.report import page  # jinja2 and matplotlib are no need of other formats

        return page.render(evidence)
    return render_tables(evidence, tables_of(runs), form, width)


def render_tables(
    evidence: Evidence, tables: Sequence[Table], form: Literal["terminal", "markdown"], width: int | None = None
) -> str:
    """The answers, and some tables under them.

    Args:
        evidence: what the answers are drawn from.
        tables: of the same runs.
        form: of both.
        width: of the terminal, in columns; its own by default.
    """
    if form == "markdown":
        return answers_view.render_markdown(evidence) + markdown.render(tables)
    columns = width or terminal.width()
    return answers_view.render(evidence, columns, terminal.shows_blocks()) + terminal.render(tables, columns) + "\n"


def render_comparison(comparison: Comparison, form: Format, width: int | None = None, ends: str = "") -> str:
    """A comparison as text, see :func:`render`; ``ends`` as in :func:`joulemark.report.comparison_table.table_of`."""
    if form == "csv":
        return csv.render_rows([row.to_json() for row in comparison.rows])
    if form == "json":
        return jsonout.dumps(comparison.to_json())
    from joulemark.report.comparison_table import table_of  # the statistics take a while to load

    return formats.render([table_of(comparison, ends)], form, width)


def format_of(path: Path) -> Format:
    """The format that a report's file name asks for.

    Raises:
        ConfigurationError: its suffix stands for none.
    """
    suffix = path.suffix.lower()
    if suffix in _BY_SUFFIX:
        return _BY_SUFFIX[suffix]
    raise ConfigurationError(f"no report format has this suffix (report {str(path)!r})", _WAYS_OUT)


def check_report_path(path: Path) -> None:
    """Refuse a report that could not be written, before a sweep spends its time.

    Raises:
        ConfigurationError: of an unknown suffix, in a folder that cannot be made or written, in the place of
            a file that is no report, or a page without what it is made with.
    """
    if format_of(path) == "html":
        from joulemark.report import page

        page.check_installed()
    if path.is_dir():
        raise ConfigurationError(f"the report {path} is a folder", "give a file name in it")
    if path.exists():
        _refuse_foreign(path)
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"the report {path} cannot be written: no access to {folder}", "choose another folder")


def _refuse_foreign(path: Path, schemas: Sequence[str] = _SCHEMAS, kind: str = "report") -> None:
    """A report may replace a report; JSON of another kind, whatever its name, may be somebody's only copy of a run."""
    try:
        with path.open("rb") as file:
            head = file.read(200)
    except OSError as error:
        what = f"{path} is there already and cannot be read ({error.strerror or error})"
        raise ConfigurationError(what, "choose another name") from error
    if (
        head
        and (path.suffix.lower() == ".json" or head.lstrip()[:1] in (b"{", b"["))
        and not any(schema.encode() in head for schema in schemas)
    ):
        raise ConfigurationError(f"{path} is there already and is not a joulemark {kind}", "choose another name")


def write_report(
    runs: Sequence[Run], path: Path, form: Format | None = None, documents: Sequence[Document] = ()
) -> None:
    """Write a report; its file is whole or not there, even if the process dies meanwhile.

    Args:
        runs: to report on.
        path: its suffix chooses the format; missing folders are made.
        form: chosen by hand, whatever the suffix.
        documents: beside the runs.

    Raises:
        ConfigurationError: as of :func:`check_report_path`, or the disk refuses.
    """
    if form is None:
        check_report_path(path)
    write_checked(render(runs, form or format_of(path), FILE_WIDTH, documents), path)


def write_checked(text: str, path: Path) -> None:
    """Put a report's text into a file that is none yet, or holds a report.

    Raises:
        ConfigurationError: the file holds something else, or the disk refuses.
    """
    if path.exists():
        _refuse_foreign(path)
    write_text(text, path)


def check_document_path(path: Path, schema: str, kind: str, suffixes: Sequence[str] = (".json", ".md")) -> None:
    """Refuse the place of a document before the work for it is done.

    Args:
        path: of the document.
        schema: of the document; only a file that holds it may be replaced.
        kind: what users call the document.
        suffixes: that it may have: ``.json``, and ``.md`` for its tables.

    Raises:
        ConfigurationError: of another suffix, a folder, or in the place of another JSON file.
    """
    if path.suffix.lower() not in suffixes:
        ways_out = f"use a name that ends in {' or '.join(suffixes)}"
        raise ConfigurationError(f"no {kind} has the suffix of {str(path)!r}", ways_out)
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder", "give a file name in it")
    if path.exists():
        _refuse_foreign(path, (schema,), kind)
