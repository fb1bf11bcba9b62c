"""What a calibration measures, in which order (pure).

Count and time must not be the same variable: with a fixed window, each benchmark runs at several duties (fewer SMs, or
a pause in its loop), so that the fit has an intercept, and at three at least, so that its line can fail. Points are
interleaved in random order within a repeat, so that drift and temperature do not follow any of them, and the idle board
is weighed in between.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from joulemark.energy.microbench.suite import SUITE, Benchmark, Operands, benchmarks_for
from joulemark.energy.units import L2_REQUEST
from joulemark.energy.windows import BURST, Point


@dataclass(frozen=True)
class Duty:
    """How much of the GPU a benchmark keeps busy.

    Args:
        sm_share: of the SMs; 0 is a single one.
        paused: whether each iteration is followed by a pause as long as itself.
        bursts: whether each launch is followed by an idle device for about as long.
    """

    sm_share: float
    paused: bool = False
    bursts: bool = False

    def blocks(self, sms: int) -> int:
        """Blocks of a launch: one per active SM."""
        return max(1, round(self.sm_share * sms))


DUTIES: Mapping[str, Duty] = {
    "full": Duty(1.0),
    "three_quarters": Duty(0.75),
    "half": Duty(0.5),
    "quarter": Duty(0.25),
    "eighth": Duty(0.125),
    "single": Duty(0.0),
    "paused": Duty(1.0, paused=True),
    BURST: Duty(1.0, bursts=True),
}

Part = Literal["short", "lines", "further"]
PARTS: tuple[Part, ...] = get_args(Part)
"""What each repeat measures, in this order."""

_DUTIES_OF: Mapping[Part, Mapping[Operands, tuple[str, ...]]] = {
    "short": {"zero": ("full", "half"), "random": ("full", "half")},
    "lines": {"zero": ("quarter",), "random": ("quarter",), "normal": ("half",), "normal_fp32": ("half",)},
    "further": {
        "zero": ("paused",), "random": ("three_quarters", "paused"), "constant": ("half",), "normal": ("full",),
        "normal_fp32": ("full",),
    },
}  # fmt: skip
"""Both operands at two duties give a fit; with the third each line can fail."""
_OF_MEMORY: Mapping[str, str] = {"half": "eighth", "quarter": "single"}
"""A quarter of the SMs fills an HBM: fewer of them change its rate, and tell what it costs in use from its bytes."""
_STATIC_DUTIES: Mapping[str, tuple[str, ...]] = {
    "idle": ("full",),
    "empty": ("full",),
    "sleep": ("single", "full", "half"),
    "sleep_one_warp": ("single", "full"),
    "issue": ("full", "half", "quarter"),
}
_LAW = "wgmma_fp16_l2"
"""Meets the power limit at most duties: where the law of energy over clock is measured."""
_LAW_DUTIES: Mapping[Part, tuple[str, ...]] = {"short": ("full",), "lines": ("half",), "further": ("three_quarters",)}
_LESS: Mapping[str, str] = {"full": "half", "half": "quarter", "quarter": "eighth"}
"""With more SMs than tiles two would share one, and requests that come together reach the L2 as one."""
_IN_BURSTS = ("fp64", "fp16x2", "mma_int8", "l2_read", "hbm_read")
"""Whether the supply's loss follows power within milliseconds, or its mean: a load's gaps then cost more or less."""
_PAUSED_FIRST = ("fp64", "fp16x2", "mma_bf16", "mma_int8", "wgmma_bf16", "wgmma_fp8", "l1_read")
"""Loads whose SMs pause already among the lines: they tell the supply's loss with each SM from that of all."""
_IDLE_EVERY = 25


def plan(
    architecture: str, quick: bool = False, repeats: int = 2, seed: int = 0, last: Part = "further"
) -> list[Point]:
    """The points of a calibration in order of measurement.

    Args:
        architecture: as in ``sm_90a``.
        quick: zero and random operands at two duties, once; else more of each, ``repeats`` times, the quick part of
            each repeat first, then what completes the lines, so that a plan that is broken off still gives a fit.
        repeats: of a reference plan.
        seed: of the order.
        last: the part of a repeat that is its last; the points are the first ones of the whole plan with one repeat.
    """
    order = random.Random(seed)
    found: list[Point] = []
    parts = PARTS[: 1 if quick else PARTS.index(last) + 1]
    for repeat in range(1 if quick else repeats):
        for part in parts:
            cells = [cell for one in benchmarks_for(architecture) for cell in _cells(one, part)]
            found += [Point(*cell, repeat) for cell in order.sample(cells, len(cells))]
    return _weighed_idle(found)


def _weighed_idle(points: Sequence[Point]) -> list[Point]:
    """With the idle board in between, as often as static power may step; its repeats are numbered through."""
    found: list[Point] = []
    for number, point in enumerate(points):
        if number % _IDLE_EVERY == 0:
            found.append(Point("idle", "zero", "full", number // _IDLE_EVERY))
        found.append(point)
    return found


def _cells(benchmark: Benchmark, part: Part) -> list[tuple[str, str, str]]:
    """(benchmark, operands, duty) of one benchmark."""
    name = benchmark.name
    if name == "idle":
        return []
    if name in _STATIC_DUTIES:
        return [(name, "zero", duty) for duty in _STATIC_DUTIES[name]] if part == "short" else []
    if name == _LAW:
        return [(name, "random", duty) for duty in _LAW_DUTIES[part]]
    if benchmark.role == "check":
        kinds: Mapping[Part, tuple[Operands, ...]] = {"short": ("random",), "lines": (), "further": ("zero",)}
        return [(name, kind, "half") for kind in kinds[part]]
    cells = [(name, kind, duty) for kind in _operands(benchmark) for duty in _DUTIES_OF[part].get(kind, ())]
    if meets_limit(benchmark.name, "random", "full") and part == "lines":  # two windows of random operands are left
        cells.append((name, "random", "eighth"))
    if name in _IN_BURSTS and part == "lines":
        cells.append((name, "random", BURST))
    if name in _PAUSED_FIRST and part != "short":
        cells = [cell for cell in cells if cell[1:] != ("random", "paused")]
        if part == "lines":
            cells.append((name, "random", "paused"))
    if benchmark.unit == L2_REQUEST:
        cells = [(name, kind, _LESS[duty]) for _, kind, duty in cells if duty in _LESS]
    if benchmark.level == "hbm":
        many = [cell for cell in cells if cell[1] in ("zero", "random") and cell[2] in _OF_MEMORY]
        kept = [cell for cell in cells if cell not in many]
        cells = [*kept, *((name, kind, _OF_MEMORY[duty]) for _, kind, duty in many), *(many if part == "lines" else ())]
    return list(dict.fromkeys(cells))


def meets_limit(benchmark: str, operands: str, duty: str) -> bool:
    """Whether a point is likely to meet the power limit of its GPU: its clocks then need time to settle."""
    if benchmark == _LAW:
        return True
    heavy = SUITE[benchmark].family in ("tensor", "wgmma") or SUITE[benchmark].unit.endswith("_operands")
    return heavy and operands == "random" and duty == "full"


def _operands(benchmark: Benchmark) -> tuple[Operands, ...]:
    """Normal values say what a network's data would do where operands are data: in tensor pipes and in memory."""
    if benchmark.family not in ("tensor", "wgmma", "memory") or "constant" not in benchmark.operands:
        return benchmark.operands
    in_memory: tuple[Operands, ...] = ("normal_fp32",) if benchmark.family == "memory" else ()
    return (*benchmark.operands, "normal", *in_memory)
