"""Kernels that share one rate: long ones have their own, short ones are pooled (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from joulemark.attribution.timeline import Timeline
from joulemark.utilization.kernels import Classified, classify

Level = Literal["place", "kernel", "class", "pool"]
LEVELS: dict[Level, str] = {
    "place": "the kernel at its own place in the step has its own rate",
    "kernel": "all short launches of this kernel share one rate",
    "class": "all short kernels of this class that are too rare alone share one rate",
    "pool": "kernels too short and rare for a rate of their class: one rate for all of them",
}
LAUNCH, TOGETHER = 1.0, 0.25
"""Samples that a launch must last for a rate of its own, and that a group's launches of one step must last together."""
FINER = 0.4
"""Of both, for the other grouping that figures are compared with."""
_COPIES = Classified("copy", "name", False, by_counters=False)


@dataclass(frozen=True)
class Unit:
    """Launches with one rate.

    Args:
        level: how far they had to be pooled.
        label: kernel's name, class, or ``pool``.
        time_s: of all of them per step, in s.
        launches: per step.
    """

    level: Level
    label: str
    time_s: float
    launches: float


@dataclass(frozen=True)
class Units:
    """How the places of a step are grouped.

    Args:
        units: in the order of their numbers.
        of_place: number of each place's unit.
        kind: class of each place's kernel.
        time_s: of each place, per step, in s.
        working_s: the same without the ends: what rates are per second of.
        launches: of each place, per step.
    """

    units: list[Unit]
    of_place: npt.NDArray[np.int64]
    kind: list[Classified]
    time_s: npt.NDArray[np.float64]
    working_s: npt.NDArray[np.float64]
    launches: npt.NDArray[np.float64]


@cache
def kind_of(name: str) -> Classified:
    """The class of a kernel, copy or set by its name."""
    return _COPIES if name.startswith(("Memcpy", "Memset")) else classify(name)


def group(
    timeline: Timeline, sample_s: float, ends_s: tuple[float, float] = (0.0, 0.0), *, finer: bool = False
) -> Units:
    """Groups the places of a step by what samples of a length in s can resolve.

    Args:
        timeline: of the steps.
        sample_s: length of a sample.
        ends_s: at begin and end of a kernel, in which it does not work.
        finer: whether to pool less than is wise, to see what pooling does to the figures.
    """
    scale = FINER * sample_s if finer else sample_s
    launches, n = timeline.launches, len(timeline.places)
    count = np.bincount(launches.place, minlength=n).astype(np.float64)
    total = np.bincount(launches.place, launches.length_s, n)
    kind = [kind_of(timeline.place_name(place)) for place in range(n)]
    time_s = total / timeline.steps
    keys: list[tuple[Level, str]] = [("pool", "")] * n
    waiting = np.ones(n, np.bool_)
    long = total / count >= LAUNCH * scale
    for place in np.flatnonzero(long):
        name, nth = timeline.places[place]
        keys[place] = ("place", f"{timeline.names[name]}#{nth}")
    waiting &= ~long
    names = [timeline.place_name(place) for place in range(n)]
    classes = [f"{one.kernel_class}:{one.uses_tensor_cores}" for one in kind]
    level: Level
    for level, labels in (("kernel", names), ("class", classes)):
        spent: dict[str, float] = {}
        for place in np.flatnonzero(waiting):
            spent[labels[place]] = spent.get(labels[place], 0.0) + time_s[place]
        for place in np.flatnonzero(waiting):
            if spent[labels[place]] >= TOGETHER * scale:
                keys[place], waiting[place] = (level, labels[place]), False
    working = np.bincount(launches.place, launches.working(ends_s).length_s, n)
    return _numbered(keys, kind, (time_s, working / timeline.steps, count / timeline.steps))


def _numbered(
    keys: list[tuple[Level, str]],
    kind: list[Classified],
    per_step: tuple[npt.NDArray[np.float64], ...],
) -> Units:
    time_s, _, launches = per_step
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    of_place = np.array([numbers[key] for key in keys], np.int64)
    spent, count = np.bincount(of_place, time_s), np.bincount(of_place, launches)
    units = [
        Unit(level, label or level, float(spent[number]), float(count[number]))
        for (level, label), number in numbers.items()
    ]
    return Units(units, of_place, kind, *per_step)
