"""Kernels of a profiled step by class, as small tables that a record carries (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from joulemark.records import Json, Row
from joulemark.utilization.kernels import Classified, KernelClass, classify

LONGEST = 40
"""Kernels by name that a record keeps, the longest time first; the classes hold all."""
_NAME = 200
_COPIES = Classified("copy", "name", False, by_counters=False)


@dataclass(frozen=True)
class Kernel:
    """All launches of a kernel in a step.

    Args:
        name: as the trace has it.
        kind: its class.
        time_s: sum of its durations per step, in s.
        launches: per step.
    """

    name: str
    kind: Classified
    time_s: float
    launches: float


def kernels_of(document: Mapping[str, Json], steps: int) -> list[Kernel]:
    """Kernels, copies and sets of a trace, per step, the longest first.

    Args:
        document: of :func:`joulemark.trace.analyse.file_document`.
        steps: that the trace holds.
    """
    kernels = [
        Kernel(one["name"], classify(one["name"]), one["time_s"] / steps, one["kernels"] / steps)
        for one in document["kernel_names"] or ()
    ]
    copies = [
        Kernel(one["name"], _COPIES, one["time_s"] / steps, one["copies"] / steps)
        for one in document["copy_kinds"] or ()
    ]
    return sorted([*kernels, *copies], key=lambda one: -one.time_s)


def tables_of(
    document: Mapping[str, Json], steps: int, plain_s: Sequence[float], profiled_s: float
) -> dict[str, list[Row]]:
    """A record's tables ``kernel_classes``, ``kernels`` and ``timeline``; empty where the trace holds no device.

    Args:
        document: of :func:`joulemark.trace.analyse.file_document`.
        steps: that were recorded.
        plain_s: seconds per step of each loop without the profiler, in its process.
        profiled_s: seconds per step while it recorded.
    """
    if not document["devices"] or steps < 1:
        return {}
    kernels = kernels_of(document, steps)
    timeline: Row = {
        "steps": steps,
        "plain_s": median(plain_s),
        "profiled_s": profiled_s,
        "busy_s": document["busy_s"] / steps,
        "kernel_time_s": sum(one.time_s for one in kernels),
    }
    return {
        "kernel_classes": class_rows(kernels),
        "kernels": [_kernel_row(one) for one in kernels[:LONGEST]],
        "timeline": [timeline],
    }


def class_rows(kernels: Iterable[Kernel]) -> list[Row]:
    """Time and launches per step by class, and within a class by whether tensor cores are used; the longest first."""
    groups: dict[tuple[KernelClass, bool | None], list[Kernel]] = {}
    for one in kernels:
        groups.setdefault((one.kind.kernel_class, one.kind.uses_tensor_cores), []).append(one)
    ordered = sorted(groups.items(), key=lambda entry: -sum(one.time_s for one in entry[1]))
    return [
        {
            "class": kernel_class,
            "uses_tensor_cores": uses,
            "source": "counters" if any(one.kind.by_counters for one in members) else "name",
            "time_s": sum(one.time_s for one in members),
            "launches": sum(one.launches for one in members),
        }
        for (kernel_class, uses), members in ordered
    ]


def _kernel_row(one: Kernel) -> Row:
    return {
        "name": one.name if len(one.name) <= _NAME else one.name[: _NAME - 1] + "…",
        "class": one.kind.kernel_class,
        "uses_tensor_cores": one.kind.uses_tensor_cores,
        "time_s": one.time_s,
        "launches": one.launches,
    }
