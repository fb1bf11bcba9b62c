"""Seconds of a kernel, from counts of what its busiest multiprocessor does.

A family counts, for a plan and a shape, what takes time (products of the tensor cores, rows that wait for each other,
rounds of blocks …); each count times its seconds, all added, is the kernel's time. Bytes through DRAM, where a family
counts them, move beside all that; the longer of both tells the time, nearly, as a norm of high order does::

    S = Σ counts[term] · seconds[family][term], D = counts[DRAM] · seconds[family][DRAM], T = (S⁴ + D⁴)^¼

The seconds are fitted to kernels that were measured on one GPU (``seconds.json`` says on which and from what, and
``python -m joulemark.merged_bench.refit`` fits them anew), none is a data sheet's. A count that is zero in a fit has no
term. On other GPUs, and for families that borrow another's seconds or have derived ones until they are measured, the
sum only ranks plans.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import zip_longest
from math import inf, prod
from typing import Any, Protocol, TypeVar

from joulemark.merged.kernels.columns import Columns, each, length, row
from joulemark.merged.kernels.description import Description
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.sequence import Shape

Counts = Mapping[str, float]
P = TypeVar("P")
_ALIKE = 2
"""Plans of a kind that are kept."""
_ROUNDING = 1e-9
"""Relative, above what sums of the same numbers differ by: Python rounds them otherwise than numpy from 3.12 on."""
DRAM = "dram"
"""The term of bytes through DRAM."""
BESIDE = 4
"""Order of the norm of what DRAM takes and all else: 3, 4 and 8 err alike."""
_KEPT_BYTES = 30 * 2**20
"""Half of an H200's L2: a tensor up to this size is still there for the next kernel (:mod:`joulemark.merged.cost`)."""


@dataclass(frozen=True)
class Fitted:
    """What ``seconds.json`` holds.

    Args:
        gpu: that was measured.
        origin: file and commits of the measured kernels.
        seconds: family → term → seconds of one count.
        borrowed: family that was not measured → family whose seconds it takes.
        derived: family → term that was not measured → seconds that follow from other measurements.
        derived_from: which those are.
    """

    gpu: str
    origin: str
    seconds: Mapping[str, Mapping[str, float]]
    borrowed: Mapping[str, str]
    derived: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    derived_from: str = ""

    def of(self, family: str) -> Mapping[str, float] | None:
        """The seconds of a family's terms, derived ones where a term was not measured; None where there are none."""
        source = family if family in self.seconds else self.borrowed.get(family, family)
        found = {**self.derived.get(family, {}), **self.seconds.get(source, {})}
        return found or None


@cache
def fitted() -> Fitted:
    """The seconds that this version has."""
    return Fitted(**json.loads((resources.files(__package__) / "seconds.json").read_text(encoding="utf-8")))


def seconds_of(family: str, counts: Counts) -> float | None:
    """The time of a kernel on the GPU that was measured; None where its family was not."""
    seconds = fitted().of(family)
    return None if seconds is None else time_of(counts, seconds)


def time_of(counts: Counts, seconds: Counts) -> float:
    """T of counts by the seconds of their terms; a term without seconds takes none."""
    beside = counts.get(DRAM, 0.0) * seconds.get(DRAM, 0.0)
    added = sum(seconds.get(term, 0.0) * count for term, count in counts.items()) - beside
    return (added**BESIDE + beside**BESIDE) ** (1 / BESIDE) if beside else added


def dram_bytes(description: Description, size: Shape, batch: int) -> float:
    """Bytes of the input and the output of a sequence where the L2 has no room for them."""
    sequence = description.sequence
    ends = ((0, size), (len(sequence.layers), sequence.sizes(size)[-1]))
    tensors = (batch * prod(shape) * sequence.channels(number) * description.itemsize for number, shape in ends)
    return float(sum(one for one in tensors if one > _KEPT_BYTES))


class CountedByOutput(Protocol):
    """What knows a kernel's counts by the size of its output."""

    def counts(self, out: Shape, batch: int, device: Device) -> Counts:
        """What the busiest multiprocessor does."""


def counts_by_output(
    geometry: CountedByOutput, description: Description, size: Shape, batch: int, device: Device
) -> Counts:
    """The counts of a geometry for an input of ``size``."""
    return geometry.counts(description.sequence.sizes(size)[-1], batch, device)


def varied(plans: Iterable[P], kind: Callable[[P], Hashable]) -> list[P]:
    """The same plans, the first of each kind before the second of any: what is measured first differs most."""
    kinds: dict[Hashable, list[P]] = {}
    for plan in plans:
        kinds.setdefault(kind(plan), []).append(plan)
    return [one for turn in zip_longest(*kinds.values()) for one in turn if one is not None]


def cheapest(
    family: str, plans: Iterable[P], counts: Callable[[P], Counts], limit: int, kind: Callable[[P], Hashable] = id
) -> list[P]:
    """The plans that take least, the best first; a plan whose sizes do not fit together (ValueError) is left out.

    Args:
        family: whose seconds are taken.
        plans: to rank; of equals the earlier goes first.
        counts: of a plan.
        limit: most plans.
        kind: of a plan; at most two of a kind are kept, so that a short measured pass sees different ones.

    Raises:
        KeyError: the family has no seconds.
    """
    seconds = _seconds(family)
    ranked: list[tuple[float, int, P]] = []
    for number, plan in enumerate(plans):
        try:
            found = counts(plan)
        except ValueError:
            continue
        ranked.append((time_of(found, seconds), number, plan))
    kept: list[P] = []
    kinds: Counter[Hashable] = Counter()
    for *_, plan in sorted(ranked, key=lambda one: one[:2]):
        kinds[kind(plan)] += 1
        if kinds[kind(plan)] <= _ALIKE and len(kept) < limit:
            kept.append(plan)
    return kept


def cheapest_of(
    family: str,
    blocks: Iterable[Columns],
    made: Callable[[Mapping[str, Any]], P],
    counts: Callable[[P], Counts],
    limit: int,
    kind: Callable[[P], tuple[Any, ...]],
) -> list[P]:
    """:func:`cheapest` of plans whose sizes stand in columns: the same ones, each block of them counted in one go.

    Args:
        blocks: sizes of plans that fit together.
        made: of the sizes of a plan, or of columns of them.
        counts, kind: of what is made; of columns they are columns.
    """
    seconds = _seconds(family)
    plans: list[tuple[Columns, int]] = []
    times: list[float] = []
    kinds: list[tuple[Any, ...]] = []
    for block in blocks:
        all_ = made(block)
        plans += [(block, number) for number in range(length(block))]
        times += each(time_of(counts(all_), seconds), block)
        kinds += zip(*(each(one, block) for one in kind(all_)), strict=True)
    chosen = sorted(_shortlist(times, kinds, limit))
    return cheapest(family, (made(row(*plans[number])) for number in chosen), counts, limit, kind)


def _shortlist(times: Sequence[float], kinds: Sequence[Hashable], limit: int) -> list[int]:
    """Which plans may be among the cheapest, were their times off by rounding."""
    chosen: list[int] = []
    alike: dict[Hashable, list[float]] = {}
    last, kept = inf, 0
    for number in sorted(range(len(times)), key=times.__getitem__):
        if times[number] > last:
            break
        faster = alike.setdefault(kinds[number], [])
        if len(faster) < _ALIKE:
            faster.append(times[number])
            kept += 1
            last = times[number] * (1 + _ROUNDING) if kept == limit else last
        elif times[number] > faster[-1] * (1 + _ROUNDING):
            continue
        chosen.append(number)
    return chosen


def _seconds(family: str) -> Mapping[str, float]:
    seconds = fitted().of(family)
    if seconds is None:
        raise KeyError(f"no seconds for {family}")
    return seconds
