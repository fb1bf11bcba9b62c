"""The windows of a recording whose clocks are mapped and not contradicted by their counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from joulemark.attribution import check
from joulemark.attribution.clock import fit_clock
from joulemark.attribution.recording import RecordedWindow, Recording
from joulemark.attribution.solve import Window
from joulemark.attribution.timeline import Timeline
from joulemark.attribution.units import Units, group
from joulemark.counter_series import CounterSeries
from joulemark.errors import UnreadableInput
from joulemark.records import Json

_AGAIN = "a clock is wrong: record again"


@dataclass(frozen=True)
class Mapped:
    """Windows that can be attributed.

    Args:
        windows: with their clocks.
        clocks: of each, as the document has it.
        units: how the launches of a step are grouped.
        finer: another grouping, which pools less.
        at_once: the same grouping, of kernels that count from the end of their launch on.
        sample_s: length of a sample.
        refused: why other windows are left out.
    """

    windows: list[Window]
    clocks: list[dict[str, Json]]
    units: Units
    finer: Units
    at_once: Units
    sample_s: float
    refused: list[str]


def map_windows(recording: Recording, timeline: Timeline, series: Mapping[int, CounterSeries]) -> Mapped:
    """Maps the clocks of all windows of steps, and leaves out those whose mapping fails or is contradicted.

    Args:
        recording: what was recorded.
        timeline: of its trace.
        series: number of a window → its samples.

    Raises:
        UnreadableInput: no window is left.
    """
    refused: list[UnreadableInput] = []
    found: list[tuple[RecordedWindow, Window]] = []
    for one in recording.of_role("steps"):
        try:
            found.append((one, _mapped(one, timeline, series[one.number])))
        except UnreadableInput as error:
            refused.append(error)
    if not found:
        raise refused[0] if refused else UnreadableInput("the recording has no window of steps", "record again")
    sample_s = float(np.median(np.concatenate([one.series.duration_s for _, one in found])))
    launch_s = median(one.clock.launch_s for _, one in found)
    error_s = math.hypot(*(one.clock.launch_error_s for _, one in found)) / len(found)
    at_once = group(timeline, sample_s, (launch_s / 2, launch_s / 2))
    windows, clocks = [], []
    for recorded, window in found:
        working = replace(window, clock=replace(window.clock, launch_s=launch_s, launch_error_s=error_s))
        try:
            by_counts = checked(working, at_once, recorded.number)
            clocks.append({**_entry(recorded, window), "check": by_counts.to_json()})
            windows.append(replace(working, clock=replace(working.clock, counts_off_s=by_counts.off_s)))
        except UnreadableInput as error:
            refused.append(error)
    if not windows:
        raise refused[0]
    head_s = check.idle_head(windows, at_once)
    windows = [replace(one, clock=replace(one.clock, head_s=head_s)) for one in windows]
    ends_s = windows[0].clock.ends_of_kernels_s
    units, finer = group(timeline, sample_s, ends_s), group(timeline, sample_s, ends_s, finer=True)
    clocks = [{**one, "head_s": head_s} for one in clocks]
    return Mapped(windows, clocks, units, finer, at_once, sample_s, [error.what for error in refused])


def _mapped(recorded: RecordedWindow, timeline: Timeline, series: CounterSeries) -> Window:
    if recorded.number not in timeline.beacons:
        why = timeline.refused.get(recorded.number, "the trace has no steps between beacons")
        raise UnreadableInput(f"window {recorded.number}: {why}", "record again")
    try:
        clock = fit_clock(series, timeline.beacons[recorded.number])
    except UnreadableInput as error:
        raise UnreadableInput(f"window {recorded.number}: {error.what}", error.remedy) from error
    return Window(series, timeline.of_window(recorded.number), clock)


def checked(window: Window, units: Units, number: int) -> check.Profile:
    """What trial offsets say of a window's mapping.

    Raises:
        UnreadableInput: the counts fit the timeline better at another offset.
    """
    found = check.profile(window, units)
    if not found.fits:
        raise UnreadableInput(
            f"window {number}: the counts fit the timeline best {found.best_s * 1e6:+.1f} µs off the mapping by "
            f"beacons (± {window.clock.uncertainty_s * 1e6:.2f} µs, {found.tolerance_s * 1e6:.1f} µs allowed)",
            _AGAIN,
        )
    return found


def _entry(recorded: RecordedWindow, window: Window) -> dict[str, Json]:
    own = {"clock": window.series.clock, "ticks_per_s": window.series.source.get("ticks_per_s")}
    return {"window": recorded.number, "group": recorded.group, **own, **window.clock.to_json()}
