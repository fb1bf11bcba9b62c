"""Tables as text in the forms that people read, and the parts that views have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from joulemark.records import Table
from joulemark.report import markdown, terminal


def render(tables: Iterable[Table], form: str | None = None, width: int | None = None) -> str:
    """Tables as text, ending with a line break; names from outside are shown harmless.

    Args:
        tables: of a view.
        form: ``markdown``; anything else is for a terminal.
        width: of the terminal, in columns; its own by default.
    """
    text = markdown.render(tables) if form == "markdown" else terminal.render(tables, width)
    return text.rstrip("\n") + "\n"


def table_of(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    notes: Sequence[str] = (),
    numeric: Iterable[int] | None = None,
) -> Table:
    """A table whose first column is text; the others are figures unless said otherwise."""
    right = frozenset(range(1, len(columns)) if numeric is None else numeric)
    return Table(tuple(columns), tuple(map(tuple, rows)), right, tuple(notes), title)


def capital(text: str) -> str:
    """A text as it begins a sentence."""
    return text[:1].upper() + text[1:]


def percent(value: float | None, digits: int = 1) -> str:
    """``12.5 %``; ``n/a`` for what was not measured."""
    return "n/a" if value is None else f"{100 * value:.{digits}f} %"
