"""From a recording to one strict-JSON document: classes, kernels, operators, modules and a roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from joulemark.attribution import check, units
from joulemark.attribution.clock import ClockMap, fit_clock
from joulemark.attribution.figures import Figures, figures_of, rows_of
from joulemark.attribution.recording import MODULES, TRACE, RecordedWindow, Recording, read_recording, read_series
from joulemark.attribution.roofline import Roofs, point, roofs_of
from joulemark.attribution.solve import LEVEL, Window
from joulemark.attribution.timeline import Timeline, read_timeline
from joulemark.attribution.units import Units
from joulemark.counter_series import CounterSeries
from joulemark.errors import UnreadableInput
from joulemark.records import Finding, Json
from joulemark.utilization.kernels import CLASSES, classify

SCHEMA = "joulemark/attribution/1"
POOLED = "pooled"
"""Class of kernels that are too short and rare to be told apart."""
TOTALS_AGREE = 0.02
"""Counts of all kernels over those of the run may be off 1 by this."""
DISTURBS = 0.05
"""Slow-down by both instruments beyond which a reader must know of it."""
_TENSOR = "pipe_tensor"


def attribute(folder: Path) -> dict[str, Json]:
    """The document of ``joulemark attribution --json`` (``docs/schema/attribution.schema.json``).

    Args:
        folder: as :func:`joulemark.collect.together.record` wrote it.

    Raises:
        UnreadableInput: a file of it cannot be read, or its clocks cannot be mapped.
    """
    recording = read_recording(folder)
    modules = folder / MODULES
    timeline = read_timeline(folder / TRACE, modules if modules.exists() else None)
    series = {one.number: read_series(folder / one.file) for one in recording.windows}
    return document_of(recording, timeline, series)


def document_of(recording: Recording, timeline: Timeline, series: Mapping[int, CounterSeries]) -> dict[str, Json]:
    """The document of a recording that was read.

    Args:
        recording: what was recorded.
        timeline: of its trace.
        series: number of a window → its samples.

    Raises:
        UnreadableInput: clocks cannot be mapped, or the counts contradict the mapping.
    """
    chosen = [one for one in recording.of_role("steps") if one.number in timeline.beacons]
    if not chosen:
        raise UnreadableInput("no window of the recording has steps between beacons", "record again")
    sample_s = float(np.median(np.concatenate([series[one.number].duration_s for one in chosen])))
    grouped = units.group(timeline, sample_s)
    windows = [_window(one, timeline, grouped, series[one.number]) for one in chosen]
    clocks = [_clock_entry(one, window) for one, window in zip(chosen, windows, strict=True)]
    body = _Body(recording, timeline, grouped, windows)
    roofs = _roofs(recording, series)
    document: dict[str, Json] = {
        "schema": SCHEMA,
        "label": recording.label,
        "facts": dict(recording.facts),
        "confidence": LEVEL,
        "clock": {"mode": "one process", "windows": clocks},
        "steps": body.steps(),
        "sampling": {"interval_s": sample_s, "samples": {one.group: one.samples for one in body.figures}},
        "counters": body.counters(),
        "classes": body.classes(roofs if isinstance(roofs, Roofs) else None),
        "kernels": body.table(body.kernel_names, "name"),
        "operators": body.table(timeline.operator, "operator"),
        "modules": body.table(timeline.module, "module") if timeline.module else None,
        "pooling": body.pooling(),
        "roofline": roofs.to_json() if isinstance(roofs, Roofs) else None,
        "findings": [],
        "notes": dict(recording.notes),
    }
    if isinstance(roofs, str):
        document["notes"]["roofline"] = roofs
    if not timeline.module:
        document["notes"].setdefault("modules", "no trace with the modules' forward calls was recorded")
    document["findings"] = [one.to_json() for one in (*timeline.findings, *_findings(document))]
    return document


def _window(recorded: RecordedWindow, timeline: Timeline, grouped: Units, series: CounterSeries) -> Window:
    launches = timeline.of_window(recorded.number)
    try:
        clock = fit_clock(series, timeline.beacons[recorded.number])
    except UnreadableInput as error:
        raise UnreadableInput(f"window {recorded.number}: {error.what}", error.remedy) from error
    return Window(series, launches, grouped.of_place[launches.place], clock)


def _clock_entry(recorded: RecordedWindow, window: Window) -> dict[str, Json]:
    """Mapping of a window, and what trial offsets say of it.

    Raises:
        UnreadableInput: the counts fit the timeline better at another offset.
    """
    found = check.profile(window)
    refuse_misfit(found, f"window {recorded.number}", window.clock)
    source = window.series.source
    own = {"clock": window.series.clock, "ticks_per_s": source.get("ticks_per_s")}
    return {"window": recorded.number, "group": recorded.group, **own, **window.clock.to_json(), "check": found.to_json()}


def refuse_misfit(found: check.Profile, what: str, clock: ClockMap) -> None:
    """Refuse a mapping that the counts contradict.

    Raises:
        UnreadableInput: another offset fits better.
    """
    if not found.fits:
        raise UnreadableInput(
            f"{what}: the counts fit the timeline best {found.best_s * 1e6:+.1f} µs off the mapping by beacons "
            f"(± {clock.uncertainty_s * 1e6:.2f} µs, {found.tolerance_s * 1e6:.1f} µs allowed)",
            "a clock is wrong: record again",
        )


class _Body:
    """The tables of a document."""

    def __init__(self, recording: Recording, timeline: Timeline, grouped: Units, windows: Sequence[Window]) -> None:
        self._recording, self._timeline, self._grouped = recording, timeline, grouped
        self.kernel_names = [timeline.place_name(place) for place in range(len(timeline.places))]
        by_group: dict[str, list[Window]] = {}
        for one in windows:
            by_group.setdefault(one.series.group, []).append(one)
        self._by_group = by_group
        everything = rows_of(["all"] * len(self.kernel_names), ["all"], grouped)
        self.figures = [figures_of(members, everything) for members in by_group.values()]

    def steps(self) -> dict[str, Json]:
        """How many, how long, and what the instruments cost."""
        plain, recorded = self._recording.plain_step_s, self._recording.recorded_step_s
        own, beside = (median(some) if some else None for some in (plain, recorded))
        return {
            "recorded": self._timeline.steps,
            "kernels_per_step": float(self._grouped.launches.sum()),
            "kernel_time_s": float(self._grouped.time_s.sum()),
            "plain_s": own,
            "recorded_s": beside,
            "slowdown": None if own is None or beside is None else beside / own - 1,
        }

    def counters(self) -> dict[str, Json]:
        """Per counter what was measured and what all kernels together are given, per step."""
        out: dict[str, Json] = {}
        for one in self.figures:
            raw = self._by_group[one.group][0].series.raw
            for column, name in enumerate(one.counters):
                if name in out:
                    continue
                measured, given = float(one.measured[column]), float(one.attributed[column])
                out[name] = {
                    "unit": one.units_of[name],
                    "raw": raw.get(name),
                    "group": one.group,
                    "measured": measured,
                    "attributed": given,
                    "ratio": given / measured if measured else None,
                    "outside_kernels": float(one.outside[column]) / measured if measured else None,
                }
        return out

    def table(self, labels: Sequence[str], key: str) -> list[Json]:
        """A row per label, the longest time first."""
        order = list(dict.fromkeys(labels))
        rows = rows_of(labels, order, self._grouped)
        found = [figures_of(members, rows) for members in self._by_group.values()]
        launches = rows.members @ self._grouped.launches
        entries = []
        whole = float(self._grouped.time_s.sum())
        for row, label in enumerate(order):
            time_s = float(rows.time_s[row])
            entries.append(
                {
                    key: label,
                    "time_s": time_s,
                    "time_share": time_s / whole if whole else 0.0,
                    "launches": float(launches[row]),
                    "by_level": self._levels(rows.members[row]),
                    "counters": _cells(found, row, time_s),
                }
            )
        return sorted(entries, key=lambda one: -one["time_s"])

    def classes(self, roofs: Roofs | None) -> list[Json]:
        """A row per class of kernel, by name and tensor activity."""
        labels = self._class_labels()
        entries = self.table([f"{one}|{uses}" for one, uses in labels], "class")
        uses_of = {f"{one}|{uses}": (one, uses) for one, uses in labels}
        for entry in entries:
            entry["class"], entry["uses_tensor_cores"] = uses_of[entry["class"]]
            entry["roofline"] = None if roofs is None else point(roofs, entry["time_s"], entry["counters"])
        return entries

    def _class_labels(self) -> list[tuple[str, bool | None]]:
        """Class of each place, put right by its tensor activity where it has a rate of its own."""
        grouped, labels = self._grouped, []
        tensor = next((one for one in self.figures if _TENSOR in one.counters), None)
        for place, name in enumerate(self.kernel_names):
            unit = int(grouped.of_place[place])
            level = grouped.units[unit].level
            kind = grouped.kind[place]
            if level == "pool":
                labels.append((POOLED, None))
                continue
            if tensor is not None and level in ("place", "kernel") and not name.startswith(("Memcpy", "Memset")):
                kind = classify(name, float(tensor.rate[unit, tensor.counters.index(_TENSOR)]))
            labels.append((kind.kernel_class, kind.uses_tensor_cores))
        return labels

    def _levels(self, members: np.ndarray[tuple[int], np.dtype[np.float64]]) -> dict[str, float]:
        """Share of a row's time by how far its kernels had to be pooled."""
        spent: dict[str, float] = {}
        for place in np.flatnonzero(members):
            level = self._grouped.units[int(self._grouped.of_place[place])].level
            spent[level] = spent.get(level, 0.0) + float(self._grouped.time_s[place])
        whole = sum(spent.values())
        return {level: time / whole for level, time in spent.items()} if whole else {}

    def pooling(self) -> list[Json]:
        """What shares a rate, and why: one row per level."""
        rows = []
        for level, about in units.LEVELS.items():
            members = [one for one in self._grouped.units if one.level == level]
            if members:
                time_s = sum(one.time_s for one in members)
                row = {"level": level, "about": about, "rates": len(members), "time_s": time_s}
                rows.append({**row, "launches": sum(one.launches for one in members)})
        return rows


def _cells(found: Sequence[Figures], row: int, time_s: float) -> dict[str, Json]:
    out: dict[str, Json] = {}
    for one in found:
        for name in one.counters:
            out.setdefault(name, one.cell(row, name, time_s))
    return out


def _roofs(recording: Recording, series: Mapping[int, CounterSeries]) -> Roofs | str:
    products, streams = recording.of_role("product"), recording.of_role("stream")
    if not products or not streams:
        return recording.notes.get("roofline", "no reference was recorded")
    product, stream = products[-1], streams[-1]
    if product.flop is None or product.seconds is None or stream.seconds is None:
        return "the references were not timed"
    return roofs_of(series[product.number], product.flop, product.seconds, series[stream.number], stream.seconds)


def _findings(document: Mapping[str, Json]) -> list[Finding]:
    found = []
    off = {
        name: one["ratio"]
        for name, one in document["counters"].items()
        if one["ratio"] is not None and abs(one["ratio"] - 1) > TOTALS_AGREE
    }
    if off:
        name, ratio = max(off.items(), key=lambda one: abs(one[1] - 1))
        found.append(
            Finding(
                "attribution_totals_differ",
                f"kernels are given {ratio:.3f} of what was counted of {name} ({len(off)} counters differ)",
                "counts fall where the timeline has no kernel: another process, or records that were lost",
                flags=True,
            )
        )
    untold = [one["window"] for one in document["clock"]["windows"] if not one["check"]["telling"]]
    if untold:
        found.append(
            Finding(
                "attribution_clock_not_confirmed",
                f"the counts of {len(untold)} windows fit any offset equally well",
                "their clocks rest on the beacons alone",
            )
        )
    slower = document["steps"]["slowdown"]
    if slower is not None and slower > DISTURBS:
        found.append(
            Finding(
                "attribution_step_time",
                f"steps beside both instruments took {slower:+.0%} of the time without them",
                "a step that waits for the host is slowed by the profiler; its kernels are not",
            )
        )
    return found


CLASS_NAMES = (*CLASSES, POOLED)
