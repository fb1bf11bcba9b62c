"""What a calibration measures, in which order (pure).

Count and time must not be the same variable: with a fixed window, each benchmark runs at several duties (fewer SMs, or
a pause in its loop), so that the fit has an intercept. Points are interleaved in random order within a repeat, so that
drift and temperature do not follow any of them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from joulemark.energy.microbench.suite import Benchmark, Operands, benchmarks_for
from joulemark.energy.windows import Point


@dataclass(frozen=True)
class Duty:
    """How much of the GPU a benchmark keeps busy.

    Args:
        sm_share: of the SMs; 0 is a single one.
        paused: whether each iteration is followed by a pause as long as itself.
    """

    sm_share: float
    paused: bool = False

    def blocks(self, sms: int) -> int:
        """Blocks of a launch: one per active SM."""
        return max(1, round(self.sm_share * sms))


DUTIES: Mapping[str, Duty] = {
    "full": Duty(1.0),
    "three_quarters": Duty(0.75),
    "half": Duty(0.5),
    "quarter": Duty(0.25),
    "single": Duty(0.0),
    "paused": Duty(1.0, paused=True),
}

_QUICK: Mapping[Operands, tuple[str, ...]] = {"zero": ("full", "half"), "random": ("full", "half")}
_REFERENCE: Mapping[Operands, tuple[str, ...]] = {
    "zero": ("full", "half", "paused"),
    "random": ("full", "three_quarters", "half", "quarter", "paused"),
    "constant": ("half",),
    "normal": ("half",),
}
_STATIC_DUTIES: Mapping[str, tuple[str, ...]] = {
    "idle": ("full",),
    "empty": ("full",),
    "sleep": ("single", "full", "half"),
    "sleep_one_warp": ("single", "full"),
    "issue": ("full", "half", "paused"),
}


def plan(architecture: str, quick: bool = False, repeats: int = 2, seed: int = 0) -> list[Point]:
    """The points of a calibration in order of measurement.

    Args:
        architecture: as in ``sm_90a``.
        quick: zero and random operands at two duties, once; else more of each, ``repeats`` times, the quick part of
            each repeat first, so that a plan that is broken off still gives a fit.
        repeats: of a reference plan.
        seed: of the order.
    """
    order = random.Random(seed)
    short = [cell for one in benchmarks_for(architecture) for cell in _cells(one, quick=True)]
    if quick:
        return [Point(*cell, 0) for cell in order.sample(short, len(short))]
    full = [cell for one in benchmarks_for(architecture) for cell in _cells(one, quick=False)]
    rest = [cell for cell in full if cell not in set(short)]
    points = []
    for repeat in range(repeats):
        for part in (short, rest):
            points += [Point(*cell, repeat) for cell in order.sample(part, len(part))]
    return points


def _cells(benchmark: Benchmark, quick: bool) -> list[tuple[str, str, str]]:
    """(benchmark, operands, duty) of one benchmark."""
    name = benchmark.name
    if name in _STATIC_DUTIES:
        return [(name, "zero", duty) for duty in _STATIC_DUTIES[name]]
    if benchmark.role == "check":
        kinds: tuple[Operands, ...] = ("random",) if quick else ("zero", "random")
        return [(name, kind, "half") for kind in kinds]
    wanted = _QUICK if quick else _REFERENCE
    kinds = (*benchmark.operands, "normal") if _stores_numbers(benchmark) else benchmark.operands
    return [(name, kind, duty) for kind in kinds for duty in wanted.get(kind, ())]


def _stores_numbers(benchmark: Benchmark) -> bool:
    """Whether normal values say what a network's data would do: tensor pipes and memory, whose operands are data."""
    return benchmark.family in ("tensor", "wgmma", "memory") and "constant" in benchmark.operands
