"""From the ideal time of a step to its real one: losses named level by level, with what stays unexplained (pure).

Three instruments that do not see each other stand behind it:

- the *clock*: CUDA events around unprofiled steps in the process of the timing pass, as they are and replayed as a CUDA
  graph, which leaves no gap for the host to fill;
- the *timeline*: how long kernels run, in a profiled step in the process of the profiler pass;
- the *counters*: how long the unit for the products was active, in the process of the counters pass, and what a big
  product reaches there.

The step and the GPU's idle time are the clock's (step minus replay), the time of kernels is the timeline's, and the
counters divide the time of the matrix kernels. What remains is the unexplained bar: where a step can be replayed, it is
the replay less the timeline's busy time, one instrument's measure of the same work less the other's. It holds gaps
between kernels, what the profiler does to their durations, and what differs between processes (clocks, heat, choice of
algorithms). Where a step cannot be replayed (it is long, or not capturable), the idle time is the profiler process's:
its unprofiled step minus its busy time; what remains is then the difference between two processes' steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from joulemark.records import Json, Record, Row

IdleSource = Literal["cuda_graph", "torch_profiler"]
IDEAL, UNEXPLAINED = "ideal", "unexplained"
TITLES: Mapping[str, str] = {
    IDEAL: "the step's FLOP at the measured peak",
    "clock": "the unit's clock in the step, against its clock at the peak",
    "other_work": "work of the unit beyond the step's FLOP (padding, recomputation), or FLOP done elsewhere",
    "below_peak": "matrix kernels below the peak (issue, memory, edges)",
    "no_matrix_kernels": "kernels that use no tensor core",
    "untold_kernels": "kernels of which neither name nor counters tell",
    "overlap": "kernels at the same time (negative)",
    "gpu_idle": "nothing runs on the GPU",
    UNEXPLAINED: "left between the step and all of these",
}
"""Bars in their order, and what each is."""


@dataclass(frozen=True)
class Waterfall:
    """A step's time in parts that add up to it exactly.

    Args:
        step_s: unprofiled, in s.
        bars: name → seconds, in the order of ``TITLES``; a negative one is a gain.
        unit: which does the products: ``tensor`` or ``fma``.
        idle_source: what tells the idle time, see :func:`idle_s`.
        notes: what could not be told apart, and why.
    """

    step_s: float
    bars: Mapping[str, float]
    unit: str
    idle_source: IdleSource
    notes: tuple[str, ...] = ()

    @property
    def unexplained_share(self) -> float:
        """Of the step, signed."""
        return self.bars[UNEXPLAINED] / self.step_s

    def to_json(self) -> dict[str, Json]:
        """Strict JSON, in s."""
        return {
            "step_s": self.step_s,
            "unit": self.unit,
            "idle_source": self.idle_source,
            "bars": [
                {"name": name, "about": TITLES[name], "time_s": seconds, "share": seconds / self.step_s}
                for name, seconds in self.bars.items()
            ],
            "notes": list(self.notes),
        }


def waterfall_of(record: Record, flops: float | None = None) -> Waterfall | str:
    """The waterfall of a record that was timed, profiled and counted, or why there is none.

    Args:
        record: of one case.
        flops: FLOP of its step where the record has none (a compiled step hides them; the eager one has the same).
    """
    step_s, peak = record.value("device_time_s"), record.value("peak_flop_per_s")
    work = record.value("step_flops") if flops is None else flops
    timeline, classes = record.tables.get("timeline"), record.tables.get("kernel_classes")
    if not step_s or step_s < 0:
        return "the step was not timed on the device (--bench-collect timing)"
    if not timeline or not classes:
        return "the record has no timeline of kernels (--bench-collect profiler)"
    if not peak or peak < 0 or work is None:
        lacking = "step_flops" if peak and peak > 0 else "peak_flop_per_s"
        return (
            f"the ideal time is not known: {record.notes.get(lacking, 'no counters pass (--bench-collect counters)')}"
        )
    reference = (record.tables.get("reference") or [{}])[0]
    unit = "fma" if record.case.dtype == "fp32" else "tensor"
    matrix, other, untold = _kernel_times(classes, unit)
    bars = {IDEAL: work / peak}
    notes = []
    gains = _unit_bars(reference, bars[IDEAL], record.value("counted_step_s"))
    if gains is None:
        notes.append("no counter of the unit: clock, other work and kernels below the peak are one bar")
    bars.update(gains or {})
    bars["below_peak"] = matrix - sum(bars.values())
    bars["no_matrix_kernels"] = other
    bars["untold_kernels"] = untold
    busy = number(timeline[0], "busy_s")
    bars["overlap"] = busy - (matrix + other + untold)
    bars["gpu_idle"], source = idle_s(record, timeline[0], step_s)
    bars[UNEXPLAINED] = step_s - sum(bars.values())
    return Waterfall(step_s, {name: bars[name] for name in TITLES if name in bars}, unit, source, tuple(notes))


def idle_s(record: Record, timeline: Row, step_s: float) -> tuple[float, IdleSource]:
    """Time of an unprofiled step in which nothing runs on the GPU, and what tells it; never less than nothing.

    The replay as a CUDA graph does the same work without waiting for the host, in the same process as the step. Where
    there is none, the profiler's process tells: the profiler makes the host slower, not the kernels, so what it adds to
    the step is taken from the idle time that its timeline shows.
    """
    replayed = record.value("device_time_graph_s")
    if replayed is not None:
        return max(0.0, step_s - replayed), "cuda_graph"
    busy = number(timeline, "busy_s")
    seen = max(0.0, number(timeline, "profiled_s") - busy)
    return min(seen, max(0.0, number(timeline, "plain_s") - busy)), "torch_profiler"


def _kernel_times(classes: Sequence[Row], unit: str) -> tuple[float, float, float]:
    """Seconds per step in kernels that run products on the unit, in those that do not, and in those nobody knows of."""
    matrix, other, untold = 0.0, 0.0, 0.0
    for row in classes:
        spent, uses = number(row, "time_s"), row["uses_tensor_cores"]
        if unit == "fma":
            uses = row["class"] in ("gemm", "tensor_gemm", "attention")
        if uses is None:
            untold += spent
        elif uses:
            matrix += spent
        else:
            other += spent
    return matrix, other, untold


def _unit_bars(reference: Row, ideal_s: float, counted_step_s: float | None) -> dict[str, float] | None:
    """The clock's bar and the other work's, from how active the unit was; None where no counter tells.

    The time that the unit's active cycles of a step take at the step's own clock, at the activity u of the big
    product, is u_step · T_step / u. The ideal time at the step's clock is the ideal time times the ratio of the clocks.
    """
    names = ("share", "peak_counts_per_s", "step_share", "step_peak_counts_per_s")
    share, clock, step_share, step_clock = (reference.get(name) for name in names)
    if not (share and clock and step_share and step_clock and counted_step_s):
        return None
    at_clock = ideal_s * float(clock) / float(step_clock)
    active = float(step_share) * counted_step_s / float(share)
    return {"clock": at_clock - ideal_s, "other_work": active - at_clock}


def number(row: Row, name: str) -> float:
    """A figure of a row that always has one."""
    value = row[name]
    assert isinstance(value, (int, float))
    return float(value)


def no_tensor_share(record: Record) -> tuple[float, float] | None:
    """Share of the step in kernels that use no tensor core: certainly, and at most (with those nobody knows of).

    The denominator is the unprofiled step where it was timed, else the profiled one. None without a timeline.
    """
    timeline, classes = record.tables.get("timeline"), record.tables.get("kernel_classes")
    if not timeline or not classes:
        return None
    step_s = record.value("device_time_s") or number(timeline[0], "profiled_s")
    _, other, untold = _kernel_times(classes, "tensor")
    return other / step_s, (other + untold) / step_s


def class_shares(record: Record) -> Iterator[tuple[str, float]]:
    """(class, share of the unprofiled step) of a record's kernels, the longest first."""
    timeline = record.tables.get("timeline")
    if not timeline:
        return
    step_s = record.value("device_time_s") or number(timeline[0], "profiled_s")
    totals: dict[str, float] = {}
    for row in record.tables.get("kernel_classes", ()):
        name = str(row["class"])
        totals[name] = totals.get(name, 0.0) + number(row, "time_s")
    yield from ((name, spent / step_s) for name, spent in sorted(totals.items(), key=lambda one: -one[1]))
