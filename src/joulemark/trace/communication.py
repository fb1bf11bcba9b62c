"""Communication of data-parallel ranks, from one trace per rank: how much of it nothing hides, and who comes last.

On a GPU a collective is a kernel of its library (NCCL, RCCL); it runs from the moment its own rank has reached it until
all have, so that a rank which waits shows a long kernel and the rank that comes last a short one. On a CPU torch marks
each collective of gloo on gloo's own threads (``gloo:all_reduce``), and operators of the framework are the computation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import fmean, median

import numpy as np

from joulemark.errors import UnreadableInput
from joulemark.records import Json
from joulemark.trace.analyse import Analysis, analyse
from joulemark.trace.events import ANNOTATION, KERNEL, OPERATOR, PS_PER_S, Ints, Mask, Trace
from joulemark.trace.intervals import Intervals, union
from joulemark.trace.launch import communication_kernels

SCHEMA = "joulemark/ranks/1"

DEVICE, HOST = "device", "host"
"""Where collectives were seen: as kernels, or as ranges of gloo's threads."""

_GLOO = re.compile(r"gloo:\w+")
_DISPATCH = re.compile(r"c10d::|gloo:")
_CHANCE = 0.05


@dataclass(frozen=True)
class RankCommunication:
    """One rank's communication, per iteration and in s.

    Args:
        rank: as its trace says, or else its place among the traces.
        source: ``device`` or ``host``.
        communication_s: time in which a collective ran (a union).
        exposed_s: time in which a collective ran and no computation did.
        compute_s: time in which computation ran (a union).
        collectives: in all iterations together.
    """

    rank: int
    source: str
    communication_s: list[float]
    exposed_s: list[float]
    compute_s: list[float]
    collectives: int

    @property
    def overlap_fraction(self) -> float | None:
        """Share of the communication that computation hides; None without communication."""
        total = sum(self.communication_s)
        return 1 - sum(self.exposed_s) / total if total else None


@dataclass(frozen=True)
class Straggler:
    """The rank that reaches the collectives last.

    Args:
        rank: its number.
        last_in: iterations in which it came last.
        iterations: seen of all ranks.
    """

    rank: int
    last_in: int
    iterations: int


@dataclass(frozen=True)
class Communication:
    """What the traces of all ranks say together; per iteration the mean over the ranks.

    Args:
        ranks: in order of rank.
        communication_s, exposed_s: per iteration.
        wait_s: per iteration, how much longer the rank that waits longest is in collectives than the last to come.
        straggler: None where no rank comes last more often than chance would have it.
    """

    ranks: tuple[RankCommunication, ...]
    communication_s: list[float]
    exposed_s: list[float]
    wait_s: list[float]
    straggler: Straggler | None

    @property
    def overlap_s(self) -> list[float]:
        """Share of each iteration's communication that is hidden, of iterations that have some."""
        pairs = zip(self.communication_s, self.exposed_s, strict=True)
        return [1 - exposed / total for total, exposed in pairs if total]


def rank_communication(analysis: Analysis, place: int) -> RankCommunication | None:
    """Communication of the rank whose trace this is.

    Args:
        analysis: of its trace, with iterations.
        place: among the traces, the rank of a trace that does not tell.

    Returns:
        None where the trace has no iteration.
    """
    iterations = analysis.iterations
    if not len(iterations):
        return None
    source, talk, work, count = _on_device(analysis) if analysis.has_device else _on_host(analysis.trace)
    start, end = iterations.start, iterations.end
    either = union(np.concatenate([talk.start, work.start]), np.concatenate([talk.end, work.end]))
    spent, computed = talk.within(start, end), work.within(start, end)
    exposed = either.within(start, end) - computed
    return RankCommunication(
        _rank(analysis.trace, place), source, _seconds(spent), _seconds(exposed), _seconds(computed), count
    )


def _on_device(analysis: Analysis) -> tuple[str, Intervals, Intervals, int]:
    """Kernels of communication, all other kernels, and the number of the former within iterations."""
    device = analysis.trace.device
    talks = communication_kernels(analysis.trace)
    works = (device.kind == KERNEL) & ~talks
    inside = talks & (analysis.iterations.of_event >= 0)
    talk, work = union(device.start[talks], device.end[talks]), union(device.start[works], device.end[works])
    return DEVICE, talk, work, int(inside.sum())


def _on_host(trace: Trace) -> tuple[str, Intervals, Intervals, int]:
    """Ranges of gloo, operators that do not only hand over to it, and the number of the former."""
    ranges = trace.ranges
    talks = _named(trace, _GLOO) & np.isin(ranges.kind, (ANNOTATION, OPERATOR))
    works = (ranges.kind == OPERATOR) & ~_named(trace, _DISPATCH)
    talk, work = union(ranges.start[talks], ranges.end[talks]), union(ranges.start[works], ranges.end[works])
    return HOST, talk, work, int(talks.sum())


def _named(trace: Trace, pattern: re.Pattern[str]) -> Mask:
    codes = [code for code, name in enumerate(trace.names) if pattern.match(name)]
    found: Mask = np.isin(trace.ranges.name, codes)
    return found


def _seconds(ps: Ints) -> list[float]:
    return [float(one) / PS_PER_S for one in ps]


def _rank(trace: Trace, place: int) -> int:
    told = trace.header.get("distributedInfo")
    rank = told.get("rank") if isinstance(told, dict) else None
    return rank if isinstance(rank, int) and rank >= 0 else place


def ranks_document(paths: Sequence[Path]) -> dict[str, Json]:
    """The document of ``joulemark trace --ranks --json`` (``docs/schema/ranks.schema.json``).

    Args:
        paths: one trace per rank of the same run, in order of rank.

    Raises:
        UnreadableInput: a file cannot be read, holds no iteration, or belongs to another kind of device.
    """
    ranks = []
    for place, path in enumerate(paths):
        found = rank_communication(analyse(path), place)
        if found is None:
            raise UnreadableInput(f"{path} holds no iterations", "mark the steps (prof.step(), joulemark.iteration#N)")
        ranks.append(found)
    if len({one.source for one in ranks}) != 1:
        raise UnreadableInput(f"{paths[0]} and another trace are of different kinds of device", "give ranks of one run")
    seen = across(ranks)
    late = seen.straggler
    return {
        "schema": SCHEMA,
        "source": ranks[0].source,
        "iterations": len(seen.communication_s),
        "communication_s": _median(seen.communication_s),
        "exposed_communication_s": _median(seen.exposed_s),
        "overlap_fraction": _median(seen.overlap_s),
        "straggler_wait_s": _median(seen.wait_s),
        "straggler": None if late is None else {"rank": late.rank, "last_in": late.last_in},
        "ranks": [_rank_entry(one) for one in seen.ranks],
    }


def _rank_entry(one: RankCommunication) -> dict[str, Json]:
    return {
        "rank": one.rank,
        "collectives": one.collectives,
        "communication_s": _median(one.communication_s),
        "exposed_communication_s": _median(one.exposed_s),
        "compute_s": _median(one.compute_s),
        "overlap_fraction": one.overlap_fraction,
    }


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def across(ranks: Sequence[RankCommunication]) -> Communication:
    """All ranks together; iterations beyond the shortest trace are left out.

    Raises:
        ValueError: no rank, or ranks seen on devices beside ranks seen on hosts.
    """
    if not ranks or len({one.source for one in ranks}) != 1:
        raise ValueError("traces of ranks on one kind of device are needed")
    ordered = tuple(sorted(ranks, key=lambda one: one.rank))
    spent = list(zip(*(one.communication_s for one in ordered), strict=False))
    exposed = list(zip(*(one.exposed_s for one in ordered), strict=False))
    return Communication(
        ordered,
        [fmean(one) for one in spent],
        [fmean(one) for one in exposed],
        [max(one) - min(one) for one in spent],
        straggler_of([one.rank for one in ordered], spent),
    )


def straggler_of(ranks: Sequence[int], spent: Sequence[Sequence[float]]) -> Straggler | None:
    """The rank that is shortest in collectives, for it comes last and waits for nobody.

    It is named when it came last in so many iterations that equal ranks would do so in less than one run of twenty
    (one-sided binomial test, with a chance of 1 in N per iteration and Bonferroni's correction for N ranks).

    Args:
        ranks: their numbers.
        spent: per iteration the communication time of each rank, in the same order.
    """
    if len(ranks) < 2 or not spent:
        return None
    last = [min(range(len(ranks)), key=times.__getitem__) for times in spent if max(times) > min(times)]
    counts = [last.count(place) for place in range(len(ranks))]
    most = max(range(len(ranks)), key=counts.__getitem__)
    n, chance = len(spent), 1 / len(ranks)
    tail = sum(comb(n, k) * chance**k * (1 - chance) ** (n - k) for k in range(counts[most], n + 1))
    return Straggler(ranks[most], counts[most], n) if tail * len(ranks) < _CHANCE else None
