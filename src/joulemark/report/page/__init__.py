"""The HTML report: one file that holds all it shows and asks for nothing.

A section is a function from the evidence to a :class:`~joulemark.report.page.parts.Section`; ``SECTIONS`` is their
order. A new one (another analysis, another document) is a module with such a function and a line here; documents that
no run holds reach it by ``evidence.of_kind(…)``, see :mod:`joulemark.report.documents`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from joulemark.errors import ConfigurationError
from joulemark.records import Table
from joulemark.report.answers import Answer, answers_of
from joulemark.report.escape import printable, together
from joulemark.report.evidence import Evidence, model_of
from joulemark.report.page import (
    energy,
    latency,
    listing,
    pictures,
    poster,
    records,
    roofline,
    tandem,
    throughput,
    waterfall,
)  # fmt: skip
from joulemark.report.page.parts import Build, Figure, Section

SECTIONS: tuple[Build, ...] = (
    throughput.throughput,
    throughput.utilization,
    waterfall.waterfall,
    roofline.roofline,
    tandem.tandem,
    energy.energy,
    latency.latency,
    listing.several_gpus,
    listing.findings,
    listing.missing,
    listing.environment,
)
"""In their order on the page; the table of records stands before the Findings."""
_TABLE_BEFORE = "findings"


def check_installed() -> None:
    """Say what is missing before any work is done.

    Raises:
        ConfigurationError: jinja2 or matplotlib is not installed.
    """
    pictures.check_matplotlib("an HTML report")
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise ConfigurationError("an HTML report needs jinja2", "pip install 'joulemark[html]'") from None


def sections_of(evidence: Evidence) -> list[Section]:
    """The sections that have something to show."""
    return [section for build in SECTIONS if not (section := build(evidence)).is_empty]


def figures_of(sections: Sequence[Section]) -> Iterator[Figure]:
    """All plots of a report."""
    for section in sections:
        yield from section.figures


def render(evidence: Evidence, sections: Sequence[Section] | None = None) -> str:
    """The page as text; names from outside are escaped.

    Args:
        evidence: what is reported on.
        sections: of :func:`sections_of`, where they are made already.

    Raises:
        ConfigurationError: jinja2 or matplotlib is not installed.
    """
    check_installed()
    import jinja2
    from markupsafe import Markup

    here = files(__package__)
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (here / name).read_text(encoding="utf-8")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_plain,
    )
    environment.filters["together"] = together
    shown = sections_of(evidence) if sections is None else sections
    return environment.get_template("page.html.jinja").render(
        title=_title(evidence),
        headline=listing.headline(evidence),
        workloads=[_card(one.key, one.title, one.configuration, answers_of(one, evidence)) for one in evidence.shown],
        questions=poster.QUESTIONS,
        sections=shown,
        table_before=_TABLE_BEFORE,
        data=Markup(records.script_json(records.table_data(evidence))),
        inline=lambda figure: Markup(pictures.inline(figure)),
        alternative=pictures.alternative,
        cells=_cells,
        style=Markup((here / "page.css").read_text(encoding="utf-8")),
        script=Markup((here / "page.js").read_text(encoding="utf-8")),
    )


def _plain(value: Any) -> Any:
    """Text from outside on one line, with nothing that steers or hides; markup of our own as it is."""
    return printable(value) if type(value) is str else value


def _title(evidence: Evidence) -> str:
    gpus = sorted(set(map(model_of, evidence.records)))
    gpus += ["simulated GPUs"] if any(run.simulated for run in evidence.runs) else []
    return f"joulemark: {', '.join(gpus)}" if gpus else "joulemark"


def _card(key: str, title: str, configuration: str, answers: Sequence[Answer]) -> dict[str, Any]:
    return {"key": key, "title": title, "configuration": configuration, "answers": answers}


def _cells(table: Table) -> list[list[tuple[str, bool]]]:
    """Rows of a table with whether each cell is a figure."""
    return [[(cell, at in table.numeric) for at, cell in enumerate(row)] for row in table.rows]
