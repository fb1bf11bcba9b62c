"""Steps back to back, in stretches that are spread over the time of a case.

A GPU has states that last longer than one short window and shorter than a process: its power regulation takes about
0.1 s of load to settle, and small kernels may run some percent faster from one second to the next. So the steady steps
of a case are sampled several times, each time after steps that are not kept, and the stretches are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from joulemark.collect.timing import Run, Stop, Timer
from joulemark.measure.pace import Pace
from joulemark.measure.plan import Pass
from joulemark.records import Value
from joulemark.stats import summarize

Clock = Callable[[], float | None]
"""Reads the SM clock in Hz, None where it cannot be read; called while the device works, so it must be quick."""

STRETCHES = 3
_SHORTEST_S = 0.1
"""A stretch shorter than this would not outlast the power regulation's settling."""
_FEWEST_STEPS = 4
LEAD_S = 0.08
"""Load before the first sample of a stretch. Matrix products that draw much power begin 4-8 % faster than they go on;
measured on an H200, they have settled to 0.5 % between processes after this time (see ``docs/metrics.md``)."""
_LONGEST_LEAD = 0.5
"""The lead-in's share of a stretch at most."""
_BETWEEN_READINGS_S = 0.02


@dataclass(frozen=True)
class Stretch:
    """Samples of one unbroken run of steps.

    Args:
        step_s: time per step, in s; the steps of the lead-in are left out.
        start, end: of the samples, on ``time.perf_counter``.
        stopped: why it ended.
        sm_clock_hz: median of the SM clock while it ran; None where it was not read.
    """

    step_s: list[float]
    start: float
    end: float
    stopped: str
    sm_clock_hz: float | None = None

    @property
    def median_s(self) -> float:
        """Of the samples, in s."""
        return median(self.step_s)


def unknown_clock() -> None:
    """The clock of a device that has none to read."""


def stretches_of(one: Pass, step_s: float, pace: Pace) -> int:
    """How many stretches a steady pass is taken in: fewer for short passes and for long steps, one for ranks."""
    if not pace.alone:
        return 1
    by_steps = one.budget_s / (_FEWEST_STEPS * max(step_s, 1e-9))
    return max(1, min(STRETCHES, int(one.budget_s / _SHORTEST_S + 1e-9), int(by_steps)))


def take(timer: Timer, run: Run, one: Pass, step_s: float, pace: Pace, clock: Clock = unknown_clock) -> Stretch:
    """One stretch.

    Args:
        timer: of the device.
        run: the step.
        one: the time of the stretch with its lead-in, its least samples and its aim.
        step_s: about the time of a step, in s; all ranks of a case give the same.
        pace: who decides when it ends.
        clock: read while the device works.
    """
    lead_s = min(LEAD_S, _LONGEST_LEAD * one.budget_s)
    lead = int(lead_s / max(step_s, 1e-9))
    stop = pace.stop(replace(one, budget_s=one.budget_s - lead_s), step_s)
    readings: list[float] = []
    found = timer.steady(run, _reading(_after(lead, stop), clock, readings), step_s)
    kept = found.step_s[lead:] or found.step_s
    start = found.start + sum(found.step_s[: len(found.step_s) - len(kept)])
    return Stretch(kept, min(start, found.end), found.end, found.stopped, median(readings) if readings else None)


def _after(lead: int, stop: Stop) -> Stop:
    def stop_after(samples: Sequence[float]) -> str | None:
        return stop(samples[lead:]) if len(samples) > lead else None

    return stop_after


def _reading(stop: Stop, clock: Clock, readings: list[float]) -> Stop:
    """Read the clock now and then while the device still has a chunk of work."""
    due = 0.0

    def stop_and_read(samples: Sequence[float]) -> str | None:
        nonlocal due
        if (now := time.perf_counter()) >= due:
            due = now + _BETWEEN_READINGS_S
            if hertz := clock():
                readings.append(hertz)
        return stop(samples)

    return stop_and_read


def time_of(stretches: Sequence[Stretch], tier: str) -> Value:
    """The time of a step: the median of the stretches' medians.

    Its interval is that of the stretch in the middle, widened to the medians of all: where the stretches agree, it is
    as narrow as one stretch's.
    """
    ordered = sorted((summarize(one.step_s) for one in stretches), key=lambda one: one.median)
    middle = ordered[len(ordered) // 2]
    value = median(one.median for one in ordered)
    interval = middle.interval
    if interval is not None and len(ordered) > 1:
        interval = (min(interval[0], ordered[0].median), max(interval[1], ordered[-1].median))
    return Value(value, "s", interval, middle.confidence, sum(one.n for one in ordered), tier)


def samples_of(stretches: Sequence[Stretch]) -> dict[str, list[float]]:
    """What a record keeps of the stretches: all samples in a row, and per stretch its steps, its median, its clock."""
    clocks = [one.sm_clock_hz for one in stretches]
    known = [clock for clock in clocks if clock is not None]
    return {
        "device_time_s": [seconds for one in stretches for seconds in one.step_s],
        "stretch_steps": [float(len(one.step_s)) for one in stretches],
        "stretch_time_s": [one.median_s for one in stretches],
        **({"stretch_sm_clock_hz": known} if len(known) == len(clocks) else {}),
    }
