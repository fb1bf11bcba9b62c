"""Host and device time over the batch size, and where they cross."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from joulemark.records import Value
from joulemark.report.answers import CAUSES
from joulemark.report.evidence import Curve, Evidence, Workload
from joulemark.report.page import axes as drawing
from joulemark.report.page.parts import Figure, Mark, Section, row_of
from joulemark.report.page.throughput import Colours, findings_of
from joulemark.tandem import idle_by_cause

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUSY, ISSUE = "gpu_busy_s", "host_issue_unprofiled_s"
_MOST = 3
_HOST_TIERS = "GPU busy: torch_profiler, in a profiled step; host issue: host_clock, without the profiler"


def tandem(evidence: Evidence) -> Section:
    """Per workload the two times of each mode; per mode the causes of idle time at the smallest batch."""
    figures, missing = [], []
    for workload in evidence.shown:
        curves = [curve for curve in workload.curves if len(curve.positive(BUSY)) > 1][:_MOST]
        if curves:
            figures.append(_times(workload, curves, evidence.colours))
            figures += [one for one in (_causes(workload),) if one is not None]
        else:
            missing.append(f"{workload.title}: no profile over batch sizes (--bench-collect timing,profiler)")
    return Section(
        "tandem",
        "Is the GPU waiting for the host?",
        "Solid: the time that the GPU is busy in a step. Dashed: the time that the host needs to issue it. Left of the "
        "crossover the host is slower and the GPU waits; right of it kernels hide the host. Bands are 95 % intervals.",
        tuple(figures),
        notes=findings_of([(one.title, one.main.crossover.findings) for one in evidence.shown if one.main.line(BUSY)]),
        missing=tuple(missing),
        short="Host and GPU",
    )


def _times(workload: Workload, curves: list[Curve], colours: Colours) -> Figure:
    lines = [(curve, metric, curve.positive(metric)) for curve in curves for metric in (BUSY, ISSUE)]
    marks = [Mark(f"{curve.name}: GPU busy", colours[curve.name]) for curve in curves]
    marks += [Mark(f"{curve.name}: host issue", colours[curve.name], "dash") for curve in curves]
    crossings = "; ".join(f"{curve.name} {curve.crossover.describe()}" for curve in curves)
    return Figure(
        f"tandem-{workload.key}",
        workload.title,
        "time per step",
        f"Crossover at batch: {crossings}. {_HOST_TIERS}.",
        partial(_draw_times, lines=lines, colours=colours),
        [row_of(batch, f"{curve.name}: {metric}", value) for curve, metric, line in lines for batch, value in line],
        tuple(marks),
        workload.key,
        left=0.15,
    )


def _draw_times(axes: Axes, lines: list[tuple[Curve, str, list[tuple[int, Value]]]], colours: Colours) -> None:
    for curve, metric, line in lines:
        drawing.line(axes, line, colours[curve.name], dashed=metric == ISSUE)
    drawing.batch_axis(axes, sorted({batch for _, _, line in lines for batch, _ in line}))
    drawing.value_axis(axes, "s", log=True)
    for curve, metric, _ in lines:
        if metric == BUSY and curve.crossover.batch is not None:
            drawing.knee(axes, curve.crossover.batch, curve.crossover.interval, colours[curve.name])


def _causes(workload: Workload) -> Figure | None:
    """Idle time by cause over the batches of the main configuration."""
    curve = workload.main
    idle: dict[int, dict[str, float]] = {}
    for batch in curve.batches:
        record = curve.record(batch, lambda one: bool(idle_by_cause(one)))
        if record is not None:
            idle[batch] = idle_by_cause(record)
    names = [name for name in CAUSES if any(causes.get(name) for causes in idle.values())]
    if len(idle) < 2 or not names:
        return None
    return Figure(
        f"idle-{workload.key}",
        f"{workload.title}, {curve.name}: why the GPU idles",
        "idle time of a profiled step",
        "Medians over the profiled steps by torch_profiler, which slows the host: read the causes as shares.",
        partial(_draw_causes, idle=idle, names=names),
        [{"batch_size": batch, "cause": name, "idle_s": causes.get(name), "tier": "torch_profiler"}
         for batch, causes in idle.items() for name in names],
        tuple(Mark(name.replace("_", " "), _colour(name), "bar") for name in names),
        workload.key,
        left=0.15,
    )  # fmt: skip


def _colour(name: str) -> int:
    return list(CAUSES).index(name)


def _draw_causes(axes: Axes, idle: dict[int, dict[str, float]], names: list[str]) -> None:
    batches, bottom = list(idle), [0.0] * len(idle)
    for name in names:
        seconds = [idle[batch].get(name, 0.0) for batch in batches]
        axes.bar(range(len(batches)), seconds, bottom=bottom, color=drawing.colour(_colour(name)), width=0.78)
        bottom = [low + high for low, high in zip(bottom, seconds, strict=True)]
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlabel("batch size")
    axes.grid(visible=False, axis="x")
    drawing.value_axis(axes, "s")
