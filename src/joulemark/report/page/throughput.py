"""Throughput over the batch size with the knee, and how much of the chip works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from joulemark.metrics import find, format_value
from joulemark.records import Finding, Value
from joulemark.report.answers import idle_share
from joulemark.report.evidence import Curve, Evidence, Workload
from joulemark.report.formats import capital
from joulemark.report.page import axes as drawing
from joulemark.report.page.parts import Figure, Mark, Section, row_of, tiers_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Lines = list[tuple[Curve, list[tuple[int, Value]]]]
Colours = Mapping[str, int]
MOST_CURVES = 4
_KNEE = 6
LEVELS = ("sm_active_fraction", "issue_slot_fraction", "tensor_active_fraction", "dram_fraction")
"""From the whole SM down to the tensor cores, and the memory."""


def curves_of(workload: Workload, metric: str) -> Lines:
    """The first configurations that have a metric at two batch sizes or more."""
    lines = [(curve, curve.positive(metric)) for curve in workload.curves]
    return [(curve, line) for curve, line in lines if len(line) > 1][:MOST_CURVES]


def throughput(evidence: Evidence) -> Section:
    """Items per second over the batch."""
    figures = [found for one in evidence.shown if (found := _throughput_figure(one, evidence.colours)) is not None]
    return Section(
        "throughput",
        "Where a bigger batch stops helping",
        "Throughput over the batch size. The dotted line is the knee of the first configuration: beyond it no doubling "
        "of the batch gains more than 5 %. Its band is a 90 % interval; lines have bands of 95 %.",
        tuple(figures),
        notes=findings_of([(one.title, one.main.plateau.findings) for one in evidence.shown]),
        short="Plateaus",
    )


def findings_of(seen: Sequence[tuple[str, Sequence[Finding]]]) -> tuple[str, ...]:
    """What an analysis found, by kind: the first one's words and figures, and the other workloads that it is about.

    Args:
        seen: (workload, its Findings).
    """
    kinds: dict[str, dict[str, Finding]] = {}
    for title, found in seen:
        for finding in found:
            kinds.setdefault(finding.code, {}).setdefault(title, finding)
    return tuple(_found(by_title) for by_title in kinds.values())


def _found(by_title: Mapping[str, Finding]) -> str:
    (title, first), *others = by_title.items()
    remedy = f" ({first.remedy})" if first.remedy else ""
    if all(finding.message == first.message for _, finding in others):
        return f"{', '.join(by_title)}: {first.message}{remedy}"
    also = ", ".join(name for name, _ in others)
    return f"{title}: {first.message}{remedy}; with figures of their own: {also}"


def _throughput_figure(workload: Workload, colours: Colours) -> Figure | None:
    lines = curves_of(workload, "throughput_per_s")
    if not lines:
        return None
    plateau, tiers = workload.main.plateau, tiers_of([value for _, line in lines for _, value in line])
    marks = [Mark(curve.name, colours[curve.name]) for curve, _ in lines]
    if plateau.knee is not None:
        marks.append(Mark("knee, 90 % interval", _KNEE, "band"))
    return Figure(
        f"throughput-{workload.key}",
        workload.title,
        "items per second",
        f"{workload.main.name}: {plateau.describe()}. By {tiers}.",
        partial(_draw_throughput, lines=lines, colours=colours),
        [row_of(batch, curve.name, value) for curve, line in lines for batch, value in line],
        tuple(marks),
        workload.key,
        left=0.15,
    )


def _draw_throughput(axes: Axes, lines: Lines, colours: Colours) -> None:
    for curve, line in lines:
        drawing.line(axes, line, colours[curve.name])
    plateau = lines[0][0].plateau
    drawing.batch_axis(axes, sorted({batch for _, line in lines for batch, _ in line}))
    drawing.value_axis(axes, "1/s", log=True)
    if plateau.knee is not None:
        drawing.knee(axes, plateau.knee, plateau.interval, _KNEE)


def utilization(evidence: Evidence) -> Section:
    """Shares of peak over the batch."""
    figures, missing = [], []
    for workload in evidence.shown:
        lines = _levels_of(workload.main)
        if lines:
            figures.append(_levels_figure(workload, lines))
        if not any(name in LEVELS for name in lines):
            why = workload.main.records[workload.main.batches[-1]][-1].notes.get("sm_active_fraction")
            missing.append(f"{workload.title}: {why or 'counters were not asked for (--bench-collect counters)'}")
    return Section(
        "utilization",
        "How much of a busy GPU works",
        "Shares of a step: GPU busy is when anything runs on it, SM active when an SM holds a warp, then the issue "
        "slots and the tensor cores in use, and the memory's share of its peak rate. Busy is not working.",
        tuple(figures),
        missing=tuple(missing),
        short="Utilization",
    )


def _levels_of(curve: Curve) -> dict[str, list[tuple[int, Value]]]:
    """Level → its line, GPU busy first."""
    idle = [(batch, found) for batch in curve.batches if (found := idle_share(curve, batch)) is not None]
    busy = [
        (batch, Value(1 - one.share, "1", None if one.interval is None else (1 - one.interval[1], 1 - one.interval[0]),
                      tier=one.tier))
        for batch, one in idle
    ]  # fmt: skip
    lines = {"gpu_busy_fraction": busy, **{level: curve.line(level) for level in LEVELS}}
    return {name: line for name, line in lines.items() if len(line) > 1}


def _levels_figure(workload: Workload, lines: dict[str, list[tuple[int, Value]]]) -> Figure:
    order = ("gpu_busy_fraction", *LEVELS)
    titles = {name: find(name).title for name in order}
    by = {name: tiers_of([value for _, value in line]) for name, line in lines.items()}
    told: dict[str, list[str]] = {}
    for name, tier in by.items():
        told.setdefault(tier, []).append(titles[name])
    return Figure(
        f"utilization-{workload.key}",
        workload.full_title,
        "share of the step, or of peak over it",
        ". ".join(f"{capital(', '.join(names))}: {tier}" for tier, names in told.items()) + f". {_step(workload.main)}",
        partial(_draw_levels, lines=lines),
        [row_of(batch, name, value) for name, line in lines.items() for batch, value in line],
        tuple(Mark(titles[name], order.index(name)) for name in lines),
        workload.key,
    )


def _step(curve: Curve) -> str:
    value = curve.value(curve.batches[-1], "device_time_s")
    return "" if value is None else f"A step of batch {curve.batches[-1]} takes {format_value(value.value, 's')}."


def _draw_levels(axes: Axes, lines: dict[str, list[tuple[int, Value]]]) -> None:
    order = ("gpu_busy_fraction", *LEVELS)
    for name, line in lines.items():
        drawing.line(axes, line, order.index(name))
    drawing.batch_axis(axes, sorted({batch for line in lines.values() for batch, _ in line}))
    axes.set_ylim(0, 1.02)
    drawing.value_axis(axes, "%")
