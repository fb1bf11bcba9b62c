"""One picture of the best known workload: its four answers, each over the plot that it was read from."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark.errors import ConfigurationError
from joulemark.report import plot
from joulemark.report.answers import Answer, Tone, answers_of
from joulemark.report.escape import printable
from joulemark.report.evidence import Evidence, Workload
from joulemark.report.page import pictures
from joulemark.report.page.parts import Figure, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

QUESTIONS: Mapping[str, str] = {
    "waits": "Is the GPU waiting?",
    "works": "How much of a busy GPU works?",
    "plateau": "From which batch on is a bigger one useless?",
    "joules": "Which part takes most energy?",
}
"""What each answer is an answer to."""

_PLOTS: Mapping[str, Sequence[str]] = {
    "waits": ("tandem-{key}", "latency-{key}"),
    "works": ("utilization-{key}",),
    "plateau": ("throughput-{key}",),
    "joules": ("split-{key}", "split-{phase}", "split-{phase}-1", "energy-{key}"),
}
_COLOURS: Mapping[Tone, str] = {"good": "#0b7a55", "bad": "#b4430a", "unsure": "#8a6100", "unknown": "#5d6673"}
_ROWS, _COLUMNS = 2, 2
_COLUMN, _ROW, _GAP = 4.6, 4.2, 0.35
_WIDTH = _COLUMNS * _COLUMN + (_COLUMNS - 1) * _GAP
_TOP, _PLOT_TOP, _PLOT_BOTTOM = 0.985, 0.75, 0.345
_VERDICT_SIZE, _VERDICT_LENGTH = 12.5, 36
_LEGEND_TOP, _CAPTION_TOP, _CAPTION_WIDTH = 0.26, 0.075, 88


def draw(evidence: Evidence, sections: Sequence[Section], path: Path) -> None:
    """Draw the first workload's answers and plots into a file (.svg, .png or .pdf).

    Raises:
        ConfigurationError: no workload swept its batch size, or the disk refuses.
    """
    from matplotlib.figure import Figure as Canvas

    if not evidence.workloads:
        raise ConfigurationError("no workload swept its batch size: there is nothing to draw", "leave --picture out")
    workload = evidence.workloads[0]
    figures = {figure.key: figure for section in sections for figure in section.figures}
    with pictures.settings():
        canvas = Canvas(figsize=(_WIDTH, _ROWS * _ROW))
        title = f"{workload.full_title}, on {workload.main.case.gpu_model}"
        canvas.text(0.008, _TOP, plot.plain(title), va="top", fontsize=14, fontweight="bold")
        answers = answers_of(workload, evidence)
        for place, answer in enumerate(answers):
            _draw_panel(canvas, place, answer, _figure_for(answer, workload, figures))
        said = "; ".join(f"{QUESTIONS[answer.question]} {answer.verdict}" for answer in answers)
        plot.save(canvas, path, f"{title}: {said}")


def _figure_for(answer: Answer, workload: Workload, figures: Mapping[str, Figure]) -> Figure | None:
    names = [name.format(key=workload.key, phase=workload.main.case.phase) for name in _PLOTS[answer.question]]
    return next((figures[name] for name in names if name in figures), None)


def _draw_panel(canvas: Canvas, place: int, answer: Answer, figure: Figure | None) -> None:
    row, column = divmod(place, _COLUMNS)
    bottom, height = 1 - (row + 1) / _ROWS, 1 / _ROWS
    left, width = column * (_COLUMN + _GAP) / _WIDTH, _COLUMN / _WIDTH
    at = left + 0.008
    canvas.text(
        at, bottom + 0.895 * height, QUESTIONS[answer.question], va="top", fontsize=9, color=_COLOURS["unknown"]
    )
    verdict = plot.plain(answer.verdict)
    size = min(_VERDICT_SIZE, _VERDICT_SIZE * _VERDICT_LENGTH / max(len(verdict), 1))
    canvas.text(
        at, bottom + 0.86 * height, verdict, va="top", fontsize=size, fontweight="bold", color=_COLOURS[answer.tone]
    )
    if figure is None:
        canvas.text(at, bottom + 0.6 * height, "not measured", va="top", fontsize=9, color=_COLOURS["unknown"])
        return
    start = left + figure.left * width
    axes = canvas.add_axes(
        (start, bottom + _PLOT_BOTTOM * height, left + 0.97 * width - start, (_PLOT_TOP - _PLOT_BOTTOM) * height)
    )
    axes.set_title(plot.plain(figure.axis), loc="left", pad=6, x=(at - start) / (left + 0.97 * width - start))
    figure.draw(axes)
    handles = [pictures.handle(mark) for mark in figure.legend]
    if handles:
        corner = (left, bottom + _LEGEND_TOP * height)
        canvas.legend(handles=handles, loc="upper left", ncols=3, fontsize=7.5, handlelength=1.4, bbox_to_anchor=corner)
    lines = textwrap.wrap(printable(figure.caption), _CAPTION_WIDTH, max_lines=3, placeholder=" …")
    text = "\n".join(lines).replace("$", r"\$")
    canvas.text(at, bottom + _CAPTION_TOP * height, text, va="top", fontsize=7, color=_COLOURS["unknown"])
