"""Tables for a terminal, no wider than it is; the only module besides the command line that prints."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TextIO

from joulemark.records import Table
from joulemark.report.escape import display_width, printable, shorten, shorten_apart

_LONGEST_CELL = 48
_READABLE_CELL = 40
_SHORTEST_CELL = 8
_STEP = 8
"""By which longer cells are shortened."""
_LONG_HEADING = 10
_INTERVAL = re.compile(r" ±\d[\d.]*%$")


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
    return "\n\n".join(render_table(table, width or shutil.get_terminal_size().columns) for table in tables)


def width() -> int:
    """Columns of the terminal (``COLUMNS`` where there is none)."""
    return shutil.get_terminal_size().columns


def shows_blocks(stream: TextIO | None = None) -> bool:
    """Whether a stream (standard output unless given) can be written block characters."""
    try:
        "▁█".encode(getattr(stream or sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def render_table(table: Table, width: int) -> str:
    """One table as text.

    Too wide for the terminal, it gives up in this order, as far as it must: columns that say the same in every
    row (said once above it), headings on one line, the middle of long cells, intervals, and numeric columns from the
    right. The first and the last column stay, and what is not shown is named in a note.

    Args:
        table: of any text.
        width: in columns.
    """
    plain = replace(
        table,
        columns=tuple(printable(title) for title in table.columns),
        rows=tuple(tuple(printable(cell) for cell in row) for row in table.rows),
    )
    fitted, said, hidden = _fit(plain, width)
    lines = [*_wrap(printable(table.lead), width), ""] if table.lead else []
    lines += _wrap(printable(table.title), width) if table.title else []
    if said:
        lines += _wrap(f"in all rows: {', '.join(said)}", width)
    if fitted.rows:
        lines += _grid(fitted)
    if hidden:
        note = f"not shown for want of width: {', '.join(hidden)} (widen the terminal, or use another format)"
        lines += _wrap(note, width)
    lines += [line for note in table.notes for line in _wrap(printable(note), width)]
    return "\n".join(lines)


def _wrap(note: str, width: int) -> list[str]:
    # Names are not broken: a reader copies them from here.
    return textwrap.wrap(note, max(width, 20), subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _fit(table: Table, width: int) -> tuple[Table, list[str], list[str]]:
    """The table within a width, what all its rows have in common, and what is not shown."""
    said: list[str] = []
    hidden: list[str] = []
    if _width(table) > width and len(table.rows) > 1:
        table, said = _without_constants(table)
    if _width(table) > width:
        table = replace(table, columns=tuple(_broken(title) for title in table.columns))
    longest = _longest_cell(table, width, _LONGEST_CELL)
    if _width(_shortened(table, longest)) > width and any(_INTERVAL.search(cell) for row in table.rows for cell in row):
        table = replace(table, rows=tuple(tuple(_INTERVAL.sub("", cell) for cell in row) for row in table.rows))
        hidden.append("intervals")
    longest = _longest_cell(table, width, _READABLE_CELL)
    table, dropped = _without_figures(table, width, longest, kept=2)
    longest = _longest_cell(table, width, _SHORTEST_CELL)
    table, more = _without_figures(table, width, longest, kept=1)
    longest = _longest_cell(table, width, _SHORTEST_CELL)  # of what is left
    return _shortened(table, longest), said, hidden + more + dropped


def _longest_cell(table: Table, width: int, least: int) -> int:
    """How long text cells may be for a table to fit, not under ``least``."""
    lengths = (sys.maxsize, *range(width, _LONGEST_CELL, -_STEP), *range(_LONGEST_CELL, least, -1))
    return next((longest for longest in lengths if _width(_shortened(table, longest)) <= width), least)


def _without_figures(table: Table, width: int, longest: int, kept: int) -> tuple[Table, list[str]]:
    dropped: list[str] = []
    while _width(_shortened(table, longest)) > width and len(table.numeric) > kept:
        index = max(table.numeric)
        dropped.insert(0, table.columns[index].replace("/\n", "/").replace("\n", " "))
        table = _without(table, index)
    return table, dropped


def _broken(title: str) -> str:
    return "\n".join((title if len(title) < _LONG_HEADING else title.replace("/", "/ ")).split())


def _without_constants(table: Table) -> tuple[Table, list[str]]:
    said: list[str] = []
    for index in range(len(table.columns) - 2, 0, -1):
        cells = {row[index] for row in table.rows}
        if index not in table.numeric and len(cells) == 1:
            cell = cells.pop()
            if cell:  # a mark that no row has says nothing
                said.insert(0, f"{table.columns[index]} {cell}")
            table = _without(table, index)
    return table, said


def _without(table: Table, index: int) -> Table:
    return replace(
        table,
        columns=table.columns[:index] + table.columns[index + 1 :],
        rows=tuple(row[:index] + row[index + 1 :] for row in table.rows),
        numeric=frozenset(one - (one > index) for one in table.numeric if one != index),
    )


def _shortened(table: Table, longest: int) -> Table:
    """Text cells cut in their middle; figures and the last column, the outcome, are left whole."""
    last = len(table.columns) - 1
    whole = table.numeric | {last}
    short = [shorten_apart((row[i] for row in table.rows), longest) for i in range(len(table.columns))]
    return replace(
        table,
        columns=tuple(
            title if i == last else "\n".join(shorten(line, longest) for line in title.split("\n"))
            for i, title in enumerate(table.columns)
        ),
        rows=tuple(tuple(cell if i in whole else short[i][cell] for i, cell in enumerate(row)) for row in table.rows),
    )


def _widths(table: Table) -> list[int]:
    return [
        max(display_width(text) for text in (*title.split("\n"), *(row[index] for row in table.rows)))
        for index, title in enumerate(table.columns)
    ]


def _width(table: Table) -> int:
    return sum(_widths(table)) + 2 * (len(table.columns) - 1)


def _grid(table: Table) -> list[str]:
    from tabulate import tabulate

    text = tabulate(
        # The headings are rows of their own: as headings, tabulate would widen every column by two.
        [*_heading_rows(table.columns), ["-" * width for width in _widths(table)], *table.rows],
        tablefmt="plain",
        # Numbers come formatted: what looks like one may be a hash, a version or a serial.
        disable_numparse=True,
        colalign=["right" if index in table.numeric else "left" for index in range(len(table.columns))],
    )
    return [line.rstrip() for line in text.splitlines()]


def _heading_rows(titles: Sequence[str]) -> list[list[str]]:
    """Headings of several lines, the last of which stand directly over their columns."""
    parts = [title.split("\n") for title in titles]
    height = max(map(len, parts))
    padded = [[""] * (height - len(part)) + part for part in parts]
    return [[part[line] for part in padded] for line in range(height)]
