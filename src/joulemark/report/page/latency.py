"""How the latency of a lone step is spread."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from joulemark.records import Record
from joulemark.report.evidence import Evidence, Workload
from joulemark.report.page import axes as drawing
from joulemark.report.page.parts import Figure, Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ENDS = (0.05, 0.25, 0.5, 0.75, 0.95)
_FEWEST = 5


def latency(evidence: Evidence) -> Section:
    """Quantiles of the host's clock over lone steps, per batch."""
    figures, missing = [], []
    for workload in evidence.shown:
        spread = _quantiles(workload)
        if spread:
            figures.append(_figure(workload, spread))
        else:
            missing.append(f"{workload.title}: no batch has {_FEWEST} lone steps")
    return Section(
        "latency",
        "How steady a lone step is",
        "Latency from the call to a synchronized device, one step at a time. Box: the middle half of the steps, with "
        "the median; whiskers: from the 5th to the 95th percentile.",
        tuple(figures),
        missing=tuple(missing),
        short="Latency",
    )


def _quantiles(workload: Workload) -> dict[int, tuple[int, list[float]]]:
    """Batch → number of samples and the ends of the box and its whiskers, in s."""
    found = {}
    for batch in workload.main.batches:
        record = workload.main.record(batch, _has_enough)
        if record is not None:
            samples = [one for one in record.samples["host_time_s"] if one > 0]
            found[batch] = (len(samples), [float(end) for end in np.quantile(samples, _ENDS)])
    return found


def _has_enough(record: Record) -> bool:
    return sum(one > 0 for one in record.samples.get("host_time_s", ())) >= _FEWEST


def _figure(workload: Workload, spread: Mapping[int, tuple[int, list[float]]]) -> Figure:
    counts = [count for count, _ in spread.values()]
    several = f"{min(counts)} to {max(counts)}" if min(counts) != max(counts) else str(counts[0])
    names = [f"p{100 * end:.0f}" for end in _ENDS]
    return Figure(
        f"latency-{workload.key}",
        workload.full_title,
        "latency of a step",
        f"By host_clock; {several} steps per batch.",
        partial(_draw, spread=spread),
        [{"batch_size": batch, "n": count, **dict(zip(names, ends, strict=True)), "unit": "s", "tier": "host_clock"}
         for batch, (count, ends) in spread.items()],
        (),
        workload.key,
        left=0.15,
    )  # fmt: skip


def _draw(axes: Axes, spread: Mapping[int, tuple[int, list[float]]]) -> None:
    blue, ink = drawing.colour(0), drawing.colour(6)
    for at, (_, (low, first, middle, third, high)) in enumerate(spread.values()):
        axes.plot([at, at], [low, high], color=blue, linewidth=1.1)
        axes.bar(at, third - first, bottom=first, width=0.6, color=blue, alpha=0.35, edgecolor=blue, linewidth=0.8)
        axes.plot([at - 0.3, at + 0.3], [middle, middle], color=ink, linewidth=1.4)
    axes.set_xticks(range(len(spread)), [str(batch) for batch in spread])
    axes.set_xlabel("batch size")
    axes.grid(visible=False, axis="x")
    drawing.value_axis(axes, "s", log=True)
