"""From the ideal time of a training step to its real one, loss by loss."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from joulemark.metrics import format_value
from joulemark.report.evidence import Evidence, Workload
from joulemark.report.page import axes as drawing
from joulemark.report.page.parts import Figure, Mark, Number, Section
from joulemark.report.utilization_view import BARS
from joulemark.utilization.waterfall import TITLES, Waterfall

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Mapping[str, int] = {
    "ideal": 2, "clock": 5, "other_work": 7, "below_peak": 0, "no_matrix_kernels": 1, "untold_kernels": 3,
    "overlap": 8, "gpu_idle": 4, "unexplained": 6,
}  # fmt: skip
_ALWAYS = ("ideal", "unexplained")
_VISIBLE = 0.0005


def waterfall(evidence: Evidence) -> Section:
    """Per workload one waterfall at its plateau, and the shares over all batches."""
    figures, stacks, missing = [], [], []
    for workload in evidence.shown:
        found = {batch: one for batch, one in workload.main.waterfalls.items() if isinstance(one, Waterfall)}
        if found:
            figures.append(_falls(workload, found))
            stacks.append(_stacks(workload, found))
        else:
            missing.append(f"{workload.title}: {workload.main.waterfalls[workload.main.batches[-1]]}")
    seen = [name for name in TITLES if any(_has(figure, name) for figure in figures)]
    return Section(
        "waterfall",
        "From the ideal step to the real one",
        "The ideal step does its FLOP at the peak that this GPU reached in a big product. Each bar is time lost on the "
        "way to the measured step; the bars add up to it exactly, and what no instrument explains is a bar of its own.",
        (*figures, *stacks),
        notes=tuple(f"{BARS[name]}: {TITLES[name]}" for name in seen),
        missing=tuple(missing),
        short="Waterfalls",
    )


def _has(figure: Figure, name: str) -> bool:
    return any(row["bar"] == name for row in figure.rows)


def _rows(batch: int, one: Waterfall) -> list[dict[str, Number]]:
    return [
        {"batch_size": batch, "bar": name, "about": TITLES[name], "time_s": seconds, "share": seconds / one.step_s,
         "step_s": one.step_s, "idle_source": one.idle_source}
        for name, seconds in one.bars.items()
    ]  # fmt: skip


def _falls(workload: Workload, found: Mapping[int, Waterfall]) -> Figure:
    wanted = workload.main.plateau_batch or max(found)
    batch = min(found, key=lambda one: (abs(one - wanted), -one))
    one = found[batch]
    idle = "a replay as a CUDA graph" if one.idle_source == "cuda_graph" else "torch_profiler"
    left = f"{100 * abs(one.unexplained_share):.1f} %"
    return Figure(
        f"waterfall-{workload.key}",
        f"{workload.full_title}, batch {batch}",
        f"time of a step of {format_value(one.step_s, 's')}",
        f"Step by cuda_events, kernels by torch_profiler, unit by counters, idle by {idle}. Uncertainty: {left} of the "
        "step is unexplained.",
        partial(_draw_falls, one=one),
        _rows(batch, one),
        (),
        workload.key,
        left=0.28,
    )


def _draw_falls(axes: Axes, one: Waterfall) -> None:
    names = [name for name, seconds in one.bars.items() if name in _ALWAYS or abs(seconds) > _VISIBLE * one.step_s]
    at = 0.0
    step = one.step_s
    for row, name in enumerate(names):
        seconds = one.bars[name]
        axes.barh(row, seconds, left=at, color=drawing.colour(_COLOURS[name]), height=0.66)
        at += seconds
        axes.text(max(at, at - seconds) + 0.012 * step, row, f"{100 * seconds / step:.1f} %", va="center", fontsize=8)
    axes.barh(len(names), step, color=drawing.colour(8), height=0.66)
    axes.text(1.012 * step, len(names), "100 %", va="center", fontsize=8)
    axes.set_yticks(range(len(names) + 1), [*(BARS[name] for name in names), "measured step"])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * step)
    axes.grid(visible=False, axis="y")
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda x, _: format_value(x, "s"))


def _stacks(workload: Workload, found: Mapping[int, Waterfall]) -> Figure:
    names = [name for name in TITLES if any(name in one.bars for one in found.values())]
    worst = max(abs(one.unexplained_share) for one in found.values())
    return Figure(
        f"shares-{workload.key}",
        workload.full_title,
        "share of the step",
        f"Gains stand below zero. Uncertainty: at most {100 * worst:.1f} % of a step is unexplained.",
        partial(_draw_stacks, found=found, names=names),
        [row for batch, one in sorted(found.items()) for row in _rows(batch, one)],
        tuple(Mark(BARS[name], _COLOURS[name], "bar") for name in names),
        workload.key,
    )


def _draw_stacks(axes: Axes, found: Mapping[int, Waterfall], names: list[str]) -> None:
    batches = sorted(found)
    above, below = [0.0] * len(batches), [0.0] * len(batches)
    for name in names:
        shares = [found[batch].bars.get(name, 0.0) / found[batch].step_s for batch in batches]
        bottom = [above[at] if share >= 0 else below[at] for at, share in enumerate(shares)]
        axes.bar(range(len(batches)), shares, bottom=bottom, color=drawing.colour(_COLOURS[name]), width=0.78)
        above = [top + max(0.0, share) for top, share in zip(above, shares, strict=True)]
        below = [low + min(0.0, share) for low, share in zip(below, shares, strict=True)]
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlabel("batch size")
    axes.grid(visible=False, axis="x")
    drawing.value_axis(axes, "%")
