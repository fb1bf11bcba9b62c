"""A metric's history as one HTML page with charts in SVG: no script, nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from joulemark.errors import ConfigurationError
from joulemark.history.runs import Floats, Source
from joulemark.history.trend import Trend
from joulemark.metrics import find, format_value
from joulemark.records import Table
from joulemark.report.escape import printable
from joulemark.report.history_view import problems_of, tables_of
from joulemark.report.names import namer

_ROWS = 12
"""Charts of single rows: those that changed most."""
_WIDTH, _HEIGHT = 960.0, 150.0


@dataclass(frozen=True)
class Chart:
    """One series over runs.

    Args:
        title: above it.
        dots: an SVG path, one dot per run.
        top, bottom: the ends of its axis, as text.
        beyond: dots that lie outside and are drawn at its edge.
    """

    title: str
    dots: str
    top: str
    bottom: str
    beyond: int


@dataclass(frozen=True)
class Mark:
    """A vertical line at a run.

    Args:
        x: where, in the chart's units.
        text: beside it.
        kind: ``driver`` or ``change``.
    """

    x: float
    text: str
    kind: str


def check_path(path: Path) -> None:
    """Refuse a place for the page before any work is done.

    Raises:
        ConfigurationError: a folder, or not the name of an HTML file, or jinja2 is not installed.
    """
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise ConfigurationError(f"--html {str(path)!r} is no name of an HTML file", "use a name that ends in .html")
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise ConfigurationError("an HTML page needs jinja2", "pip install joulemark[html]") from None


def render(trend: Trend, sources: Sequence[Source]) -> str:
    """The page; text from outside is escaped.

    Args:
        trend: of :func:`joulemark.history.trend.trend_of`.
        sources: the files that were looked at; those with problems are named.
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
    )
    levels, *changes = tables_of(trend)
    return environment.from_string(_PAGE).render(
        title=f"{find(trend.figures.metric).title} over {len(trend.figures.runs)} runs"
        + (" on simulated GPUs" if trend.figures.simulated else ""),
        metric=find(trend.figures.metric),
        charts=charts_of(trend),
        marks=_marks(trend),
        tables=[_cells(table) for table in (*changes, levels)],
        problems=problems_of(sources),
        width=_WIDTH,
        height=_HEIGHT,
    )


def _cells(table: Table) -> dict[str, object]:
    """A table with what each cell's alignment is."""
    kinds = ["figure" if at in table.numeric else "text" for at in range(len(table.columns))]
    rows = [list(zip(row, kinds, strict=True)) for row in table.rows]
    return {"title": table.title, "columns": list(zip(table.columns, kinds, strict=True)), "rows": rows,
            "notes": table.notes}  # fmt: skip


def charts_of(trend: Trend) -> list[Chart]:
    """All rows together, and the rows that changed most (the first ones where none did)."""
    figures = trend.figures
    unit, name = find(figures.metric).unit, namer(figures.cases)
    moved = dict.fromkeys(row.case.case_id for change in trend.changes for row in change.rows)
    places = {case.case_id: at for at, case in enumerate(figures.cases)}
    shown = [places[case_id] for case_id in moved][:_ROWS] or list(range(len(figures.cases)))[:_ROWS]
    charts = [_chart(name(figures.cases[at]), figures.values[at], unit) for at in shown]
    if len(figures.cases) > 1 and not (figures.values <= 0).any():
        charts.insert(0, _chart("all cases: geometric mean, 1 is its median", _together(figures.values), "1"))
    return charts


def _together(values: Floats) -> Floats:
    logs = np.log(values)
    logs = logs - np.nanmedian(logs, axis=1, keepdims=True)
    return np.asarray(np.exp(np.nanmean(logs, axis=0)), dtype=float)


def _chart(title: str, values: Floats, unit: str) -> Chart:
    seen = np.flatnonzero(np.isfinite(values))
    lo, hi = (float(one) for one in np.quantile(values[seen], (0.01, 0.99)))
    margin = 0.1 * (hi - lo) or 0.05 * abs(hi) or 1.0
    lo, hi = lo - margin, hi + margin
    share = (values[seen] - lo) / (hi - lo)
    height = _HEIGHT * (1 - np.clip(share, 0, 1))
    dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in zip(_x(seen, values.size), height, strict=True))
    beyond = int(((share < 0) | (share > 1)).sum())
    return Chart(title, dots, format_value(hi, unit), format_value(lo, unit), beyond)


def _x(runs: Floats | np.typing.NDArray[np.intp], count: int) -> Floats:
    return np.asarray((runs + 0.5) * _WIDTH / count, dtype=float)


def _marks(trend: Trend) -> list[Mark]:
    runs = trend.figures.runs
    drivers = [at for at in range(len(runs)) if at == 0 or runs[at].driver != runs[at - 1].driver]
    edges = _x(np.array([*drivers, *(one.at for one in trend.changes)]) - 0.5, len(runs)).tolist()
    texts = [*(runs[at].driver for at in drivers), *(str(number) for number in range(1, len(trend.changes) + 1))]
    kinds = ["driver"] * len(drivers) + ["change"] * len(trend.changes)
    return [Mark(round(x, 1), text, kind) for x, text, kind in zip(edges, texts, kinds, strict=True)]


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
figure { margin: 1rem 0; } figcaption { font-size: .85rem; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; border: 1px solid #8886; }
svg text { font-size: 11px; fill: currentColor; }
.dots { fill: none; stroke: #3b78c4; stroke-width: 3; stroke-linecap: round; stroke-opacity: .7; }
.driver { stroke: #888; stroke-dasharray: 3 3; } .change { stroke: #d1462f; stroke-width: 1.5; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .2rem .6rem; text-align: left; border-bottom: 1px solid #8884; white-space: nowrap; }
.figure { text-align: right; font-variant-numeric: tabular-nums; }
li { font-size: .85rem; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ metric.about }}. Dashed lines: another driver. Red lines: a change, by its number. Left is old.</p>
{% for chart in charts %}
<figure>
<figcaption>{{ chart.title }}{% if chart.beyond %} ({{ chart.beyond }} dots at the edge lie beyond it)\
{% endif %}</figcaption>
<svg viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="{{ chart.title }}">
{% for mark in marks %}
<line class="{{ mark.kind }}" x1="{{ mark.x }}" x2="{{ mark.x }}" y1="0" y2="{{ height }}"/>
<text x="{{ mark.x + 3 }}" y="{{ 12 if mark.kind == 'driver' else 25 }}">{{ mark.text }}</text>
{% endfor %}
<path class="dots" d="{{ chart.dots }}"/>
<text x="{{ width - 4 }}" y="12" text-anchor="end">{{ chart.top }}</text>
<text x="{{ width - 4 }}" y="{{ height - 4 }}" text-anchor="end">{{ chart.bottom }}</text>
</svg>
</figure>
{% endfor %}
{% for table in tables %}
<h2>{{ table.title }}</h2>
{% if table.rows %}
<div class="scroll"><table>
<tr>{% for text, kind in table.columns %}<th class="{{ kind }}">{{ text }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr>{% for text, kind in row %}<td class="{{ kind }}">{{ text }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endif %}
<ul>{% for note in table.notes %}<li>{{ note }}</li>{% endfor %}</ul>
{% endfor %}
{% if problems %}
<h2>files that could not be read wholly</h2>
<ul>{% for line in problems %}<li>{{ line }}</li>{% endfor %}</ul>
{% endif %}
</body>
</html>
"""
