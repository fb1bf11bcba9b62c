"""Counters of each kernel laid over the timeline of a step: classes put right, and levels by U = Σ t·u / T (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from joulemark.errors import ConfigurationError
from joulemark.metrics import LEVELS
from joulemark.records import Json, Record, Row
from joulemark.utilization.kernels import classify
from joulemark.utilization.levels import combine
from joulemark.utilization.waterfall import number

_NOISE = re.compile(r"^void\s|\s|\(anonymous namespace\)::|<unnamed>::|(?<=\d)ul\b")
_TIMES = ("time_s", "launches")
_Rows = dict[tuple[Json, Json], dict[str, Json]]
"""Rows of the table ``kernel_classes`` by class and use of tensor cores."""


@dataclass(frozen=True)
class Refined:
    """A record with what counters of each kernel say of its step.

    Args:
        record: with its table ``kernel_classes`` by counters where they saw the kernel.
        levels: level → (share over the step, share of the kernels' time that counters saw). Kernels that were not seen
            count as 0: a lower bound.
        moved: names of kernels whose class or use of tensor cores is not what their name says.
        dram_bound: bar of the waterfall → (time in s that DRAM at its peak needs for the bytes of its kernels, share of
            the kernels' time that counters saw). Of matrix kernels what exceeds the tensor pipe's own active time.
    """

    record: Record
    levels: Mapping[str, tuple[float, float]]
    moved: tuple[str, ...]
    dram_bound: Mapping[str, tuple[float, float]]


def refine(record: Record, document: Mapping[str, Json]) -> Refined:
    """Join counters of each kernel with the profiled step of the same case.

    Kernels are joined by name, without parameters and blanks; one that stands there under several classes, or not at
    all, stays as its name has it.

    Args:
        record: with the tables of the profiler pass.
        document: of :func:`joulemark.utilization.read_files`, or an attribution's by
            :func:`joulemark.attribution.feeds.per_kernel`.
    """
    counted = _by_name(document["kernels"])
    kernels = list(record.tables.get("kernels", ()))
    rows: _Rows = {
        (row["class"], row["uses_tensor_cores"]): dict(row) for row in record.tables.get("kernel_classes", ())
    }
    moved = []
    for kernel in kernels:
        found = counted.get(joined_name(str(kernel["name"])))
        if found is None or found["uses_tensor_cores"] is None:
            continue
        told = classify(str(kernel["name"]), 1.0 if found["uses_tensor_cores"] else 0.0)
        old, new = (kernel["class"], kernel["uses_tensor_cores"]), (told.kernel_class, told.uses_tensor_cores)
        if old != new:
            _move(rows, old, new, kernel)
            moved.append(str(kernel["name"]))
    classes: list[Row] = [row for row in rows.values() if row["launches"] > 0]
    tables = {**record.tables, "kernel_classes": sorted(classes, key=lambda row: -number(row, "time_s"))}
    levels, bound = _levels(record, kernels, counted), _dram_bound(kernels, counted)
    return Refined(replace(record, tables=tables), levels, tuple(moved), bound)


def _by_name(entries: Iterable[Mapping[str, Json]]) -> dict[str, Mapping[str, Json]]:
    """Kernels of the export by their joined name; a name that stands for several classes tells nothing."""
    out: dict[str, Mapping[str, Json]] = {}
    unclear = set()
    for entry in entries:
        key = joined_name(entry["name"])
        if key in out and out[key]["uses_tensor_cores"] != entry["uses_tensor_cores"]:
            unclear.add(key)
        out.setdefault(key, entry)
    return {key: entry for key, entry in out.items() if key not in unclear}


def joined_name(name: str) -> str:
    """What two tools call the same kernel: no return type, blanks, parameters, and no more than a record keeps."""
    plain = _NOISE.sub("", name.removesuffix("…"))
    template, _, _ = plain.partition(">(")
    return template[:120]


def _move(
    rows: dict[tuple[Json, Json], dict[str, Json]], old: tuple[Json, Json], new: tuple[Json, Json], kernel: Row
) -> None:
    empty = {"class": new[0], "uses_tensor_cores": new[1], "source": "counters", **dict.fromkeys(_TIMES, 0.0)}
    target = rows.setdefault(new, empty)
    target["source"] = "counters"
    for name in _TIMES:
        target[name] += kernel[name]
        rows[old][name] -= kernel[name]
    if rows[old]["launches"] < 0.5:
        rows[old].update(dict.fromkeys(_TIMES, 0.0))


def _levels(
    record: Record, kernels: Iterable[Row], counted: Mapping[str, Mapping[str, Json]]
) -> dict[str, tuple[float, float]]:
    timeline = record.tables.get("timeline")
    step_s = record.value("device_time_s")
    if not timeline or step_s is None:
        return {}
    times = [(number(one, "time_s"), counted.get(joined_name(str(one["name"])), {})) for one in kernels]
    rest = max(0.0, number(timeline[0], "kernel_time_s") - sum(time for time, _ in times))
    out = {}
    for level in LEVELS:
        found = combine([*((time, figures.get(level)) for time, figures in times), (rest, None)], step_s)
        if found is not None:
            out[level] = found
    return out


def _dram_bound(kernels: Iterable[Row], counted: Mapping[str, Mapping[str, Json]]) -> dict[str, tuple[float, float]]:
    """Per bar of the waterfall the time that its kernels' DRAM traffic needs at the DRAM's peak, t · u_dram."""
    spent: dict[str, list[tuple[float, float | None]]] = {}
    for kernel in kernels:
        found, time_s = counted.get(joined_name(str(kernel["name"])), {}), number(kernel, "time_s")
        tensor, dram = found.get("tensor_active_fraction"), found.get("dram_fraction")
        uses = found.get("uses_tensor_cores", kernel["uses_tensor_cores"])
        own = None if dram is None else max(0.0, dram - tensor) if uses and tensor is not None else dram
        spent.setdefault("below_peak" if uses else "no_matrix_kernels", []).append((time_s, own))
    out = {}
    for bar, times in spent.items():
        whole = sum(time for time, _ in times)
        seen = [(time, share) for time, share in times if share is not None]
        if seen and whole:
            out[bar] = sum(time * share for time, share in seen), sum(time for time, _ in seen) / whole
    return out


def find_record(records: Iterable[Record], label: str) -> Record:
    """The one record whose case's label holds a text.

    Raises:
        ConfigurationError: none or several cases do.
    """
    cases = {record.case_id: record for record in records}
    found = {case_id: record for case_id, record in cases.items() if label in record.case.label}
    if len(found) != 1:
        labels = [record.case.label for record in (found or cases).values()]
        some = ", ".join(get_close_matches(label, labels, 3, 0.0)) or "none"
        raise ConfigurationError(
            f"--counters got the case {label!r}, which {len(found)} of {len(cases)} cases are",
            f"give a part of one case's label alone, such as of {some}",
        )
    return next(iter(found.values()))
