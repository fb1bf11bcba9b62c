"""From a recording to one strict-JSON document: classes, kernels, operators, modules and a roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from joulemark.attribution import units
from joulemark.attribution.clock import Floats
from joulemark.attribution.figures import Pass, Rows, cells
from joulemark.attribution.recording import HOST, Recording, read_recording, read_series
from joulemark.attribution.roofline import Roofs, point, roofs_of
from joulemark.attribution.solve import LEVEL, Window
from joulemark.attribution.stored import POOLED, SCHEMA
from joulemark.attribution.timeline import Timeline, read_timeline, with_host
from joulemark.attribution.windows import Mapped, map_windows
from joulemark.counter_series import CounterSeries
from joulemark.errors import UnreadableInput
from joulemark.metrics import format_value
from joulemark.records import Finding, Json
from joulemark.stats import summarize
from joulemark.utilization.kernels import TENSOR_ACTIVE, Classified, classify

TOTALS_AGREE = 0.02
"""Counts of all kernels over those of the run may be off 1 by this."""
DISTURBS = 0.05
"""Slow-down by both instruments beyond which a reader must know of it."""
_TENSOR = "pipe_tensor"
_TOLD_BY_TENSOR = ("tensor_gemm", "gemm", "attention", "other")
_USED, _NOT_USED = 0.03, TENSOR_ACTIVE
"""Tensor activity that shows that a kernel uses tensor cores, and that it does not."""
_RESOLVED, _ENOUGH = 0.5, 100.0
"""A kernel's samples can contradict its name where launches that last a sample hold this share of its time, or all its
launches together last so many samples; else a few samples decide, most of which its neighbours fill."""


def attribute(folder: Path) -> dict[str, Json]:
    """The document of ``joulemark attribution --json`` (``docs/schema/attribution.schema.json``).

    Args:
        folder: as :func:`joulemark.measure.attribution.record` wrote it.

    Raises:
        UnreadableInput: a file of it cannot be read, or its clocks cannot be mapped.
    """
    return Attribution.of(folder).document()


def document_of(recording: Recording, timeline: Timeline, series: Mapping[int, CounterSeries]) -> dict[str, Json]:
    """The document of a recording that was read.

    Args:
        recording: what was recorded.
        timeline: of its traces.
        series: number of a window → its samples.

    Raises:
        UnreadableInput: clocks cannot be mapped, or the counts contradict the mapping.
    """
    return Attribution(recording, timeline, series).document()


class Attribution:
    """A recording that was attributed: its document, and what is too much for that.

    Args:
        recording: what was recorded.
        timeline: of its traces.
        series: number of a window → its samples.

    Raises:
        UnreadableInput: clocks cannot be mapped, or the counts contradict the mapping.
    """

    def __init__(self, recording: Recording, timeline: Timeline, series: Mapping[int, CounterSeries]) -> None:
        self._recording, self._timeline, self._series = recording, timeline, series
        self._mapped = map_windows(recording, timeline, series)
        self._grouped = self._mapped.units
        by_group: dict[str, list[Window]] = {}
        for one in self._mapped.windows:
            by_group.setdefault(one.series.group, []).append(one)
        self.passes = [
            Pass(members, self._grouped, self._mapped.finer, self._mapped.at_once) for members in by_group.values()
        ]
        names = [timeline.place_name(place) for place in range(len(timeline.places))]
        self.kernels = self.table(names, "name")
        self._kept: dict[str, float] = {}
        self._labels = self._classes_of(names)

    @classmethod
    def of(cls, folder: Path) -> Attribution:
        """The attribution of a stored recording.

        Raises:
            UnreadableInput: a file of it cannot be read, or its clocks cannot be mapped.
        """
        recording = read_recording(folder)
        timeline = read_timeline(folder, recording)
        if (folder / HOST).exists():
            try:
                timeline = with_host(timeline, folder / HOST)
            except UnreadableInput as error:
                recording = replace(recording, notes={**recording.notes, "modules": error.what})
        return cls(recording, timeline, {one.number: read_series(folder / one.file) for one in recording.windows})

    def document(self) -> dict[str, Json]:
        """All of it as strict JSON."""
        recording, timeline, mapped = self._recording, self._timeline, self._mapped
        roofs = _roofs(recording, self._series)
        document: dict[str, Json] = {
            "schema": SCHEMA,
            "label": recording.label,
            "facts": dict(recording.facts),
            "confidence": LEVEL,
            "clock": {"mode": recording.mode, "windows": mapped.clocks},
            "steps": self.steps(),
            "sampling": {"interval_s": mapped.sample_s, "samples": {one.group: one.samples for one in self.passes}},
            "counters": self.counters(),
            "classes": self.classes(roofs if isinstance(roofs, Roofs) else None),
            "kernels": self.kernels,
            "operators": self.table(timeline.operator, "operator") if timeline.operator else None,
            "modules": self.table(timeline.module, "module") if timeline.module else None,
            "pooling": self.pooling(),
            "roofline": roofs.to_json() if isinstance(roofs, Roofs) else None,
            "findings": [],
            "notes": dict(recording.notes),
        }
        if isinstance(roofs, str):
            document["notes"]["roofline"] = roofs
        for name, known in (("operators", timeline.operator), ("modules", timeline.module)):
            if not known:
                document["notes"].setdefault(name, "no trace with the host's operators and modules was recorded")
        found = (*timeline.findings, *_refused(mapped), *_findings(document), *_kept(self._kept, mapped.sample_s))
        document["findings"] = [one.to_json() for one in found]
        return document

    def places(self) -> list[dict[str, Json]]:
        """A row per launch of a step, in the order in which they begin: its kernel, class and counters.

        ``sm_cycles_per_s`` is the clock while it ran, summed over SMs; None where that was not counted.
        """
        clocks = self.passes[0].clocks()
        labels = [str(place) for place in range(len(self._timeline.places))]
        rows = {int(one.pop("place")): one for one in self.table(labels, "place")}
        launches = self._timeline.launches
        begun = np.full(self._timeline.steps, np.inf)
        np.minimum.at(begun, launches.step, launches.start_s)
        behind = np.bincount(launches.place, launches.start_s - begun[launches.step]) / np.bincount(launches.place)
        for place, row in rows.items():
            row["name"] = self._timeline.place_name(place)
            row["class"], row["uses_tensor_cores"] = self._labels[place]
            row["sm_cycles_per_s"] = clocks.get(place)
        return [rows[int(place)] for place in np.argsort(behind, kind="stable")]

    def steps(self) -> dict[str, Json]:
        """How many, how long, and what the instruments cost."""
        plain, recorded = self._recording.plain_step_s, self._recording.recorded_step_s
        before = self._recording.bare_step_s or plain[:1]  # the first plain stretch stands before any session, too
        bare, own, beside = (median(some) if some else None for some in (before, plain, recorded))
        return {
            "recorded": self._timeline.steps,
            "kernels_per_step": float(self._grouped.launches.sum()),
            "kernel_time_s": float(self._grouped.time_s.sum()),
            "bare_s": bare,
            "plain_s": own,
            "recorded_s": beside,
            "slowdown_from_bare": beside / bare - 1 if bare and beside else None,
            **_slowdown(plain, recorded),
        }

    def counters(self) -> dict[str, Json]:
        """Per counter what was measured and what all kernels together are given, per step."""
        out: dict[str, Json] = {}
        for one in self.passes:
            for column, name in enumerate(one.counters):
                measured, given = float(one.measured[column]), float(one.attributed[column])
                outside = float(one.outside[column])
                entry = {
                    "unit": one.unit_of[name],
                    "raw": one.raw.get(name),
                    "group": one.group,
                    "measured": measured,
                    "attributed": given,
                    "ratio": given / measured if measured else None,
                    "outside_kernels": outside / measured if measured else None,
                }
                out.setdefault(name, entry)
        return out

    def table(self, labels: Sequence[str], key: str) -> list[dict[str, Json]]:
        """A row per label, the longest time first."""
        rows, grouped = Rows.by(labels), self._grouped
        time_s, launches = rows.members @ grouped.time_s, rows.members @ grouped.launches
        whole = float(grouped.time_s.sum())
        entries: list[dict[str, Json]] = [
            {
                key: label,
                "time_s": float(time_s[row]),
                "time_share": float(time_s[row]) / whole,
                "launches": float(launches[row]),
                "by_level": self._levels(rows.members[row]),
                "counters": counters,
            }
            for row, (label, counters) in enumerate(zip(rows.order, cells(self.passes, rows, time_s), strict=True))
        ]
        return sorted(entries, key=lambda one: -one["time_s"])

    def classes(self, roofs: Roofs | None) -> list[dict[str, Json]]:
        """A row per class of kernel, by name and tensor activity."""
        kind_of = {f"{name}|{uses}": (name, uses) for name, uses in self._labels}
        entries = self.table([f"{name}|{uses}" for name, uses in self._labels], "class")
        for entry in entries:
            entry["class"], entry["uses_tensor_cores"] = kind_of[entry["class"]]
            entry["roofline"] = None if roofs is None else point(roofs, entry)
        return entries

    def _classes_of(self, names: Sequence[str]) -> list[tuple[str, bool | None]]:
        """Class of each place and whether it uses tensor cores; ``pooled`` where it has no rate of its class."""
        grouped = self._grouped
        rows = {one["name"]: one for one in self.kernels}
        labels: list[tuple[str, bool | None]] = []
        for place, name in enumerate(names):
            if grouped.units[int(grouped.of_place[place])].level == "pool":
                labels.append((POOLED, None))
                continue
            kind = self._told(grouped.kind[place], rows[name])
            labels.append((kind.kernel_class, kind.uses_tensor_cores))
        for entry in self.kernels:
            found = {labels[place] for place, name in enumerate(names) if name == entry["name"]}
            entry["class"], entry["uses_tensor_cores"] = max(found, key=lambda one: one[0] != POOLED)
        return labels

    def _told(self, named: Classified, row: Mapping[str, Json]) -> Classified:
        """A kernel's class by its counters, or by its name where that says tensor cores and its samples are too few."""
        told = _put_right(row["name"], named, row["counters"].get(_TENSOR))
        recorded_s = row["time_s"] * self._timeline.steps
        resolved = row["by_level"].get("place", 0.0) >= _RESOLVED or recorded_s >= _ENOUGH * self._mapped.sample_s
        if resolved or not named.uses_tensor_cores or told.uses_tensor_cores:
            return told
        self._kept[row["name"]] = row["time_s"] / row["launches"]
        return named

    def _levels(self, members: Floats) -> dict[str, float]:
        """Share of a row's time by how far its kernels had to be pooled."""
        spent: dict[str, float] = {}
        for place in np.flatnonzero(members):
            level = self._grouped.units[int(self._grouped.of_place[place])].level
            spent[level] = spent.get(level, 0.0) + float(self._grouped.time_s[place])
        whole = sum(spent.values())
        return {level: time / whole for level, time in spent.items()} if whole else {}

    def pooling(self) -> list[dict[str, Json]]:
        """What shares a rate, and why: one row per level."""
        rows: list[dict[str, Json]] = []
        for level, about in units.LEVELS.items():
            members = [one for one in self._grouped.units if one.level == level]
            if members:
                time_s, launches = sum(one.time_s for one in members), sum(one.launches for one in members)
                rows.append(
                    {"level": level, "about": about, "rates": len(members), "time_s": time_s, "launches": launches}
                )
        return rows


def slowdowns(plain: Sequence[float], recorded: Sequence[float]) -> list[float]:
    """Of each window its step over that of the stretches next to it without instruments, minus 1."""
    beside = [plain[number : number + 2] for number in range(len(recorded))]
    return [one * len(two) / sum(two) - 1 for one, two in zip(recorded, beside, strict=True) if two]


def _slowdown(plain: Sequence[float], recorded: Sequence[float]) -> dict[str, Json]:
    """Their median over windows."""
    ratios = slowdowns(plain, recorded)
    if not ratios:
        return {"slowdown": None, "slowdown_interval": None}
    found = summarize(ratios)
    return {"slowdown": found.median, "slowdown_interval": None if found.interval is None else list(found.interval)}


def _put_right(name: str, kind: Classified, active: Mapping[str, Json] | None) -> Classified:
    """A matrix kernel's class by its tensor activity, where its interval leaves no doubt (see also ``_told``).

    Neighbours in time leak a little into each other, so the limits are wider than for counters of a kernel alone.
    """
    if active is None or active["interval"] is None or kind.kernel_class not in _TOLD_BY_TENSOR:
        return kind
    low, high = active["interval"]
    return classify(name, active["value"]) if low >= _USED or high < _NOT_USED else kind


def _roofs(recording: Recording, series: Mapping[int, CounterSeries]) -> Roofs | str:
    products, streams = recording.of_role("product"), recording.of_role("stream")
    if not products or not streams:
        return recording.notes.get("roofline", "no reference was recorded")
    product, stream = products[-1], streams[-1]
    if product.flop is None or product.seconds is None or stream.seconds is None:
        return "the references were not timed"
    return roofs_of(series[product.number], product.flop, product.seconds, series[stream.number], stream.seconds)


def _kept(names: Mapping[str, float], sample_s: float) -> list[Finding]:
    """That names stand against counts.

    Args:
        names: kernel → seconds of a launch.
        sample_s: length of a sample.
    """
    if not names:
        return []
    name, launch_s = max(names.items(), key=lambda one: one[1])
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        Finding(
            "attribution_name_kept",
            f"{name}{more} counts as using tensor cores, as its name says: no tensor activity was told, but its "
            f"launches of {format_value(launch_s, 's')} are too short and few for samples of "
            f"{format_value(sample_s, 's')}",
            "Nsight Compute tells it (joulemark counters), and so do shorter samples",
        )
    ]


def _refused(mapped: Mapped) -> list[Finding]:
    if not mapped.refused:
        return []
    return [
        Finding(
            "attribution_windows_refused",
            f"{len(mapped.refused)} windows are left out; {mapped.refused[0]}",
            "their clocks are not trusted; the figures are of the others",
            flags=True,
        )
    ]


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
