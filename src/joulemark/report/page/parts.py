"""What a page is made of: sections of figures, tables and notes. A section is a function of the evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from joulemark.records import Table, Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from joulemark.report.evidence import Evidence

Stroke = Literal["line", "dash", "bar", "band"]
Number = str | int | float | None


@dataclass(frozen=True)
class Mark:
    """An entry of a legend.

    Args:
        label: untrusted text is fine.
        colour: index into the palette.
        stroke: how it is drawn.
    """

    label: str
    colour: int
    stroke: Stroke = "line"


@dataclass(frozen=True)
class Figure:
    """A plot that knows its data.

    Args:
        key: of its files and its anchor, unique in a report.
        title: over it.
        axis: what its values are, with their unit.
        caption: what is drawn, by which instrument, with which uncertainty.
        draw: draws it on axes, in colours of :data:`joulemark.report.plot.PALETTE`.
        rows: its data in base units, for a CSV file.
        legend: beside it.
        workload: key of the workload that it is about; empty for several.
        left: width of its left margin, as a share of the figure.
    """

    key: str
    title: str
    axis: str
    caption: str
    draw: Callable[[Axes], None]
    rows: Sequence[Mapping[str, Number]]
    legend: tuple[Mark, ...] = ()
    workload: str = ""
    left: float = 0.13


@dataclass(frozen=True)
class Seen:
    """A kind of Finding, and the cases that it is about.

    Args:
        code: of the Finding, or an outcome.
        message: the first one's.
        remedy: what to do; empty when nothing helps.
        flags: whether a record is flagged for it.
        cases: names.
    """

    code: str
    message: str
    remedy: str
    flags: bool
    cases: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        key: its anchor.
        title: its heading.
        lead: one or two sentences: what is to be seen, and how to read it.
        figures: in their order.
        tables: under them.
        seen: Findings with remedies.
        notes: lines under the tables.
        missing: what was not measured, and why.
        tables_first: whether the tables stand over the figures.
        short: its name in the page's menu; the title unless given.
    """

    key: str
    title: str
    lead: str
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    seen: tuple[Seen, ...] = ()
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    tables_first: bool = False
    short: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether it would show nothing."""
        return not (self.figures or self.tables or self.seen or self.notes or self.missing)


Build = Callable[["Evidence"], Section]
"""A section of the page is such a function; :data:`joulemark.report.page.SECTIONS` lists them in their order."""


def row_of(batch: int, series: str, value: Value) -> dict[str, Number]:
    """A row of a figure's CSV: a figure with its interval, unit and instrument."""
    lo, hi = value.interval or (None, None)
    return {"series": series, "batch_size": batch, "value": value.value, "lo": lo, "hi": hi, "unit": value.unit,
            "n": value.n, "tier": value.tier}  # fmt: skip


def tiers_of(values: Sequence[Value]) -> str:
    """The instruments behind some figures: ``cuda_events, host_clock``."""
    return ", ".join(dict.fromkeys(one.tier for one in values if one.tier)) or "an instrument that is not named"
