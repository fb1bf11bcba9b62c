"""Tables in GitHub's Markdown, for reports and the summary page of a CI job."""

from __future__ import annotations

from collections.abc import Iterable

from joulemark.records import Table
from joulemark.report.escape import markdown


def render(tables: Iterable[Table]) -> str:
    """Tables with their titles as headings, their notes as lists, and over them what is to be read first."""
    return "\n\n".join(render_table(table) for table in tables) + "\n"


def render_table(table: Table) -> str:
    """One table; text from outside shows as it is and never as markup."""
    lines = [f"**{markdown(table.lead)}**", ""] if table.lead else []
    lines += [f"### {markdown(table.title)}", ""] if table.title else []
    if table.rows:
        rule = ["---:" if index in table.numeric else ":---" for index in range(len(table.columns))]
        lines += [_row(map(markdown, table.columns)), _row(rule)]
        lines += [_row(map(markdown, row)) for row in table.rows]
        lines.append("")
    lines += [f"- {markdown(note)}" for note in table.notes]
    return "\n".join(lines).rstrip()


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
