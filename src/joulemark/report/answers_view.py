"""The answers in short, with a small plot in characters, for a terminal and for Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from joulemark.metrics import format_value
from joulemark.records import Table
from joulemark.report import attribution_view, markdown
from joulemark.report.answers import Answer, answers_of, is_answered
from joulemark.report.escape import NO_BREAK, printable, shorten, together
from joulemark.report.evidence import Curve, Evidence
from joulemark.report.utilization_view import BARS
from joulemark.utilization.waterfall import Waterfall

HEADINGS = {"waits": "GPU waits?", "works": "GPU works?", "plateau": "plateau", "joules": "joules"}
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-:=+*#"
_NAME = 11
_BAR = 20
"""Characters of a whole step."""
_SEEN = 0.02


def spark(values: Sequence[float], blocks: bool = True) -> str:
    """A line of characters, the higher the larger: ``▁▂▅▇█``; plain ones where a terminal has no blocks."""
    signs = _BLOCKS if blocks else _ASCII
    lo, hi = min(values), max(values)
    span = hi - lo or 1.0
    return "".join(signs[round((value - lo) / span * (len(signs) - 1))] for value in values)


def render(evidence: Evidence, width: int, blocks: bool = True) -> str:
    """Four answers per workload, no line wider than the terminal; empty where nothing can be answered.

    Args:
        evidence: what is reported on.
        width: of the terminal, in columns.
        blocks: whether it shows block characters.
    """
    return "".join(f"{line}\n" for line in _lines(evidence, max(width, 30), blocks))


def _lines(evidence: Evidence, width: int, blocks: bool) -> Iterator[str]:
    for workload in evidence.shown:
        answers = answers_of(workload, evidence)
        if not _worth(workload.main, answers):
            continue
        yield shorten(printable(workload.full_title), width)
        for answer in answers:
            said = f"{answer.verdict}: {answer.brief}" if answer.brief else answer.verdict
            yield from _wrapped(HEADINGS[answer.question], printable(said), width)
        for name, plot in (("rate", _plot(workload.main, blocks)), ("step", _step(workload.main, blocks))):
            if plot:
                yield from _wrapped(name, plot, width)
        yield ""
    for document in evidence.of_kind("attribution"):
        yield shorten(printable(f"{document.content['label']}: time of its kernels"), width)
        yield from _wrapped("classes", attribution_view.largest(document.content), width)
        yield ""


def render_brief(evidence: Evidence, width: int, blocks: bool = True) -> str:
    """A line for each workload and each verdict, none wider than the terminal; empty where nothing can be answered.

    Arguments as of :func:`render`.
    """
    return "".join(f"{shorten(line, max(width, 30))}\n" for line in _brief_lines(evidence, blocks))


def _brief_lines(evidence: Evidence, blocks: bool) -> Iterator[str]:
    for workload in evidence.shown:
        answers = answers_of(workload, evidence)
        if _worth(workload.main, answers):
            yield f"{printable(workload.full_title)}  {_plot(workload.main, blocks)}".rstrip()
            yield from (f"  {HEADINGS[one.question]:<{_NAME}}{printable(one.verdict)}" for one in answers)
    for document in evidence.of_kind("attribution"):
        yield f"{printable(document.content['label'])}: time of its kernels"
        yield f"  {'classes':<{_NAME}}{printable(attribution_view.largest(document.content).partition('; ')[0])}"
    yield ""


def _worth(curve: Curve, answers: tuple[Answer, ...]) -> bool:
    return len(curve.batches) > 1 and is_answered(answers)


def _wrapped(name: str, text: str, width: int) -> list[str]:
    begin = f"  {name:<{_NAME}}"
    lines = textwrap.wrap(
        together(text), width, initial_indent=begin, subsequent_indent=" " * len(begin), break_on_hyphens=False
    )
    return [line.replace(NO_BREAK, " ") for line in lines]


def _plot(curve: Curve, blocks: bool) -> str:
    line = curve.positive("throughput_per_s")
    if len(line) < 2:
        return ""
    drawn = spark([value.value or 0.0 for _, value in line], blocks)
    ends = (format_value(line[at][1].value, "1/s") for at in (0, -1))
    return f"{drawn}  batch {line[0][0]} … {line[-1][0]}: {' … '.join(ends)} items/s"


def _step(curve: Curve, blocks: bool) -> str:
    """What a step at the plateau is made of: ``███ ideal 17 %  ██████████████ no tensor core 71 %``.

    Shares may add up to more than the step; negative ones, which make up for that, stand in brackets as gained.
    """
    found = curve.waterfalls.get(curve.plateau_batch or 0)
    if not isinstance(found, Waterfall):
        return ""
    sign = _BLOCKS[-1] if blocks else _ASCII[-1]
    shares = {BARS[name]: seconds / found.step_s for name, seconds in found.bars.items()}
    long = {name: min(max(1, round(_BAR * share)), 2 * _BAR) for name, share in shares.items() if share >= _SEEN}
    parts = [f"{sign * length} {name} {100 * shares[name]:.0f} %" for name, length in long.items()]
    gained = [f"{name} {-100 * share:.0f} %" for name, share in shares.items() if share <= -_SEEN]
    less = f"; gained: {', '.join(gained)}" if gained else ""
    return f"{'  '.join(parts)} (batch {curve.plateau_batch}{less})"


def render_markdown(evidence: Evidence) -> str:
    """A table of verdicts for a pull request; empty where nothing can be answered."""
    rows = []
    for workload in evidence.shown:
        answers = answers_of(workload, evidence)
        if _worth(workload.main, answers):
            cells = (f"{one.verdict} ({one.source})" if one.source else one.verdict for one in answers)
            rows.append((workload.full_title, *cells, _plot(workload.main, True)))
    kernels = tuple((str(one.content["label"]), attribution_view.largest(one.content))
                    for one in evidence.of_kind("attribution"))  # fmt: skip
    tables = [
        Table(("workload", *HEADINGS.values(), "rate"), tuple(rows), title="answers"),
        Table(("recorded step", "classes of its kernels, by time"), kernels, title="kernels"),
    ]
    shown = [one for one in tables if one.rows]
    return markdown.render(shown) + "\n" if shown else ""
