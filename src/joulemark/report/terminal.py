"""Tables for a terminal, no wider than it is; the only module besides the command line that prints."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from typing import TextIO

from joulemark.records import Table
from joulemark.report.escape import display_width, printable, shorten

_LONGEST_CELL = 48
_SHORTEST_CELL = 8


def print_tables(tables: Iterable[Table], stream: TextIO | None = None, width: int | None = None) -> None:
    """Print tables one under the other.

    Args:
        tables: their text may come from anyone: what would steer the terminal is spelt out.
        stream: standard output by default.
        width: columns of the terminal; by default its own (``COLUMNS`` where there is none).
    """
    print(render(tables, width), file=stream or sys.stdout)


def render(tables: Iterable[Table], width: int | None = None) -> str:
    """Tables as text, an empty line between them."""
    columns = width or shutil.get_terminal_size().columns
    return "\n\n".join(render_table(table, columns) for table in tables)


def render_table(table: Table, width: int) -> str:
    """One table as text.

    Too wide for the terminal, it first loses its numeric columns from the right (the last column, the outcome,
    stays), named in a note; then the longest text cells are shortened in their middle.

    Args:
        table: of any text.
        width: in columns.
    """
    plain = replace(
        table,
        columns=tuple(printable(title) for title in table.columns),
        rows=tuple(tuple(printable(cell) for cell in row) for row in table.rows),
    )
    fitted, dropped = _fit(plain, width)
    notes = [printable(note) for note in table.notes]
    if dropped:
        notes.insert(
            0, f"not shown for want of width: {', '.join(dropped)} (widen the terminal, or use another format)"
        )
    lines = [shorten(printable(table.title), width)] if table.title else []
    if fitted.rows:
        lines += _grid(fitted)
    lines += [line for note in notes for line in _wrap(note, width)]
    return "\n".join(lines)


def _wrap(note: str, width: int) -> list[str]:
    # Names are not broken: a reader copies them from here.
    return textwrap.wrap(note, max(width, 20), subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _fit(table: Table, width: int) -> tuple[Table, list[str]]:
    dropped: list[str] = []
    fitted = _shortened(table, _LONGEST_CELL) if _width(table) > width else table
    while _width(fitted) > width and len(fitted.numeric) > 1:
        index = max(fitted.numeric)
        dropped.insert(0, fitted.columns[index])
        fitted = _without(fitted, index)
    longest = _LONGEST_CELL
    while _width(fitted) > width and longest > _SHORTEST_CELL:
        longest -= 1
        fitted = _shortened(fitted, longest)
    return fitted, dropped


def _without(table: Table, index: int) -> Table:
    return replace(
        table,
        columns=table.columns[:index] + table.columns[index + 1 :],
        rows=tuple(row[:index] + row[index + 1 :] for row in table.rows),
        numeric=frozenset(one - (one > index) for one in table.numeric if one != index),
    )


def _shortened(table: Table, longest: int) -> Table:
    return replace(
        table,
        columns=tuple(shorten(title, longest) for title in table.columns),
        rows=tuple(
            tuple(cell if i in table.numeric else shorten(cell, longest) for i, cell in enumerate(row))
            for row in table.rows
        ),
    )


def _column_widths(table: Table) -> list[int]:
    return [
        max(display_width(cell) for cell in (table.columns[index], *(row[index] for row in table.rows)))
        for index in range(len(table.columns))
    ]


def _width(table: Table) -> int:
    return sum(_column_widths(table)) + 2 * (len(table.columns) - 1)


def _grid(table: Table) -> list[str]:
    from tabulate import tabulate

    text = tabulate(
        table.rows,
        headers=table.columns,
        tablefmt="simple",
        # Numbers come formatted: what looks like one may be a hash, a version or a serial.
        disable_numparse=True,
        colalign=["right" if index in table.numeric else "left" for index in range(len(table.columns))],
    )
    return [line.rstrip() for line in text.splitlines()]
