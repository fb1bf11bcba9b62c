"""Chooses, chain by chain, which convolutions are executed as one and by which path.

Every range of a chain that something can execute as one is predicted by the performance model; what is promising is
measured in turns against its layers one by one (each distinct range once, kept on disk), and the cuts of the chain with
the least time in all win. A path whose output is wrong on the example's shapes is left out, however fast.

Here is in which order that happens, and how a chain is cut. What may execute a range is told by
:mod:`joulemark.merged.trials`, what is known of each range by :mod:`joulemark.merged.ranges`;
:mod:`joulemark.merged.builds` compiles beside, :mod:`joulemark.merged.measuring` checks and times.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf, prod

from torch import fx

from joulemark.merged.builds import Builds, build_all, builds_for, compiling_own
from joulemark.merged.graph import Segment, Unit, find_chains, range_segment
from joulemark.merged.kernels import Kernel
from joulemark.merged.measuring import works
from joulemark.merged.ranges import Ranges
from joulemark.merged.setting import Setting
from joulemark.merged.spent import Spent
from joulemark.merged.trials import ALIKE, MEASURED, Choice, Trial, shape_of, unit_names

_FLOPS_PER_ELEMENT = 400
"""FLOPs in bf16 in the time of an element's way through memory (an H200's 790 TFLOP/s and 4.3 TB/s): for an order."""
_FOR_RANKING = 0.35
"""Share of the time in which kernels of ranges are ranked; those that had no turn by then are not merged."""
_FOR_LAYERS = 0.6
"""Share of the time left then that measuring layers alone may take."""
_FEWEST_PASSES = ("fused", "epilogue")
"""Paths of a layer that had no turn, as they are tried."""
_Place = tuple[int, int, int]
"""Number of a chain, begin and end of a range in it."""


@dataclass
class Planner:
    """Plans the chains of one graph.

    Args:
        setting: device, rates, kernels.
        forced: several layers are merged wherever something can, whatever they take one by one.
        most: kernels for a range that are measured, the best predicted first.
        proved: range and path of what was run once and not measured.
        spent: where seconds are counted: of ranking kernels, of waiting for our own of layers alone that are compiled
            beside (``own kernels``), of measuring layers alone and of measuring ranges.
    """

    setting: Setting
    forced: bool = False
    most: int = MEASURED
    proved: set[tuple[str, str]] = field(default_factory=set)
    spent: Spent = field(default_factory=Spent)

    def __post_init__(self) -> None:
        self.ranges = Ranges(self.setting, self.forced, self.most)

    def own_choice(self, unit: Unit) -> Choice:
        """The best generated kernel for a single layer; its best path of all where there is none that is right."""
        segment = range_segment([unit])
        assert segment is not None
        with builds_for(self.setting) as builds:
            builds.wait(self.ranges.promised([segment]), self.setting.deadline)
        own = self.ranges.best(one for one in self.ranges.trials(segment, inf) if one.kernel is not None)
        return self._single(unit) if own is None else _choice(unit_names([unit]), segment, own, None, "asked for")

    def plan(self, graph: fx.GraphModule) -> tuple[list[Choice], dict[str, str]]:
        """A choice for every convolution, and per convolution that no path takes the reason.

        What is to be measured is ranked first, and compiled beside what comes then; layers alone are measured before
        ranges, the most hopeful of which come first: time may be up before the last.
        """
        chains, left = find_chains(graph)
        alone = [one for chain in chains for unit in chain if (one := range_segment([unit])) is not None]
        with builds_for(self.setting) as builds:
            if self.setting.measured:
                with ExitStack() as compiling:
                    with self.spent.on("ranking"):
                        builds.add(self.ranges.promised(alone))
                        found = self.ranges.candidates
                        own = ((one, trial) for one in alone for trial in found.get(self.ranges.key(one), ()))
                        compiling.enter_context(compiling_own(own, self.setting))
                        self._rank(chains, builds)
                    with self.spent.on("own kernels"):
                        compiling.close()
            with self.spent.on("layers"):
                self._measure_alone(self._hopeful_first(alone), builds)
                singles = [[self._single(unit) for unit in chain] for chain in chains]
            if self.setting.measured:
                with self.spent.on("ranges"):
                    self._measure_ranges(chains, singles, builds)
        return [choice for pair in zip(chains, singles, strict=True) for choice in self._cut(*pair)], left

    def _rank(self, chains: List[List[Unit]], builds: Builds) -> None:
        """Rank the kernels of all ranges that may be measured, heavy and long ones first; have the best compiled."""
        begin = time.monotonic()
        until = begin + _FOR_RANKING * (self.setting.deadline - begin)
        spans = (chain[first:end] for chain in chains for first, end in self._spans(chain) if end - first > 1)
        ranges = [one for units in spans if (one := range_segment(list(units))) is not None]
        for segment in _heaviest_first(ranges):
            if time.monotonic() > until:
                self.ranges.cut = True
                break
            builds.add(self.ranges.promised([segment]))

    def _measure_ranges(self, chains: List[List[Unit]], singles: List[List[Choice]], builds: Builds) -> None:
        """Measure ranges that were ranked: what is compiled already first, most saved time as predicted first."""
        asked: dict[str, tuple[float, Segment, float]] = {}
        at: dict[_Place, str] = {}
        for number, pair in enumerate(zip(chains, singles, strict=True)):
            for begin, end, segment, apart in self._ranges(*pair):
                key = at[number, begin, end] = self.ranges.key(segment)
                trials = self.ranges.candidates.get(key, self.ranges.found.get(key, []))
                saved = apart - min((one.time_s for one in trials if one.kernel), default=inf)
                before = asked.get(key, (0.0, segment, apart))[0]
                asked[key] = (before + saved, segment, apart)
        hopeful = [one[1:] for one in sorted(asked.values(), key=lambda one: -one[0])]
        for deadline in (0.0, self.setting.deadline):
            hopeful = [one for one in hopeful if not self._done_with(*one, builds, deadline, at)]
        self.ranges.cut |= bool(hopeful)

    def _done_with(
        self, segment: Segment, apart: float, builds: Builds, deadline: float, at: Mapping[_Place, str]
    ) -> bool:
        """Whether a range was measured, or needs not be."""
        key = self.ranges.key(segment)
        if key in self.ranges.candidates and self._beaten(key, at):
            self.ranges.leave(segment)
        ready = self.ranges.ready(segment, apart, builds, deadline)
        if ready:
            self.ranges.trials(segment, apart)
        return ready

    def _beaten(self, key: str, at: Mapping[_Place, str]) -> bool:
        """Whether a longer range around it takes as measured what it takes as predicted: then no cut wants it."""
        kernels = [one for one in self.ranges.candidates[key] if one.kernel and one.problem is None]
        if not kernels or any(one.counted_s is None for one in kernels):
            return False
        least = (1 - ALIKE) * min(one.time_s for one in kernels)
        places = [one for one, there in at.items() if there == key]
        around = ([at[one] for one in at if _is_around(one, place)] for place in places)
        return all(any(self.ranges.measured_s(one) <= least for one in keys) for keys in around)

    def prove(self, graph: fx.GraphModule, choices: Iterable[Choice]) -> dict[Choice, str]:
        """Run once what was chosen and not measured; what fails or is wrong has no part in another plan.

        Returns:
            Which choices these are, and why.
        """
        units = {unit.convolution.name: unit for chain in find_chains(graph)[0] for unit in chain}
        unseen: list[tuple[Choice, Segment, Trial]] = []
        for choice in choices:
            segment = range_segment([units[name] for name in choice.units])
            assert segment is not None
            trial = next(one for one in self.ranges.found[self.ranges.key(segment)] if one.path == choice.path)
            what = (self.ranges.key(segment), choice.path)
            if what not in self.proved:
                self.proved.add(what)
                unseen.append((choice, segment, trial))
        if self.setting.device.type == "cuda":
            build_all((trial.kernel for *_, trial in unseen if trial.kernel), self.setting.device)
        with compiling_own(((segment, trial) for _, segment, trial in unseen), self.setting):
            pass
        for _, segment, trial in unseen:
            works(segment, trial, self.setting)
        return {choice: trial.problem for choice, _, trial in unseen if trial.problem is not None}

    def _hopeful_first(self, alone: Iterable[Segment]) -> list[Segment]:
        """Layers by weight, those first that a kernel of ours may convolve: what they may gain is most.

        Others are a library's in any case; cuDNN's trials may take seconds of each, and time may be up before the last.
        """
        return sorted(_heaviest_first(alone), key=lambda one: not self.ranges.has_own(one))

    def _measure_alone(self, segments: List[Segment], builds: Builds) -> None:
        """Measure layers alone, in order, for a part of the time: without any left, no range would be merged."""
        begin = time.monotonic()
        until, measured = begin + _FOR_LAYERS * (self.setting.deadline - begin), self.setting.measured
        for segment in segments:
            if measured and (time.monotonic() > until or not self.ranges.ready(segment, inf, builds, until)):
                self.ranges.cut = True
                self.ranges.leave(segment)
            self.ranges.trials(segment, inf)

    def _ranges(self, chain: List[Unit], singles: List[Choice]) -> Iterator[tuple[int, int, Segment, float]]:
        """Every range of a chain that may be executed as one: begin, end, and the time of its layers one by one."""
        for end in range(2, len(chain) + 1):
            for begin in range(max(0, end - self.setting.depth), end - 1):
                segment = range_segment(list(chain[begin:end]))
                if segment is not None:
                    yield begin, end, segment, sum(_known(one) for one in singles[begin:end])

    def wanted(self, graph: fx.GraphModule) -> list[Kernel]:
        """The kernels that a plan of this graph may measure, as far as that is known before anything is measured."""
        chains, _ = find_chains(graph)
        ranges = [chain[begin:end] for chain in chains for begin, end in self._spans(chain)]
        segments = [range_segment(list(units)) for units in ranges]
        return self.ranges.promised(one for one in segments if one is not None)

    def _spans(self, chain: List[Unit]) -> Iterator[tuple[int, int]]:
        """Begin and end of every range of a chain, of one unit and more."""
        for end in range(1, len(chain) + 1):
            yield from ((begin, end) for begin in range(max(0, end - self.setting.depth), end))

    def _cut(self, chain: List[Unit], singles: List[Choice]) -> list[Choice]:
        """The cheapest cuts of a chain: dynamic programming over its ends."""
        best: list[tuple[float, list[Choice]]] = [(0.0, [])]
        for end in range(1, len(chain) + 1):
            alone = singles[end - 1]
            options = [(best[end - 1][0] + _known(alone), [*best[end - 1][1], alone])]
            for begin in range(max(0, end - self.setting.depth), end - 1):
                choice = self._range(chain[begin:end], singles[begin:end])
                if choice is not None:
                    options.append((best[begin][0] + _known(choice), [*best[begin][1], choice]))
            ours = [one for one in options[1:] if one[1][-1].time_s is not None]
            best.append(min(ours if self.forced and ours else options, key=lambda one: one[0]))
        return best[-1][1]

    def _single(self, unit: Unit) -> Choice:
        segment = range_segment([unit])
        assert segment is not None
        trials = self.ranges.trials(segment, inf)
        best = self.ranges.best(trials) or self._unmeasured(segment, trials)
        why = "its best path" if best.measured_s is not None else "a single layer"
        return _choice(unit_names([unit]), segment, best, None, why)

    def _unmeasured(self, segment: Segment, trials: Iterable[Trial]) -> Trial:
        """A library's path for a layer alone; where measuring was wanted, one that does all in the fewest passes.

        That is cuDNN's fused kernels, then a convolution with an epilogue, if they work; else torch's own operators,
        which need no check.
        """
        possible = [one for one in trials if one.kernel is None and (one.problem is None or one.path == "library")]
        if not self.setting.measured:
            return possible[0]
        fewest = (one for path in _FEWEST_PASSES for one in possible if one.path == path)
        return next((one for one in fewest if self._works(segment, one)), possible[-1])

    def _works(self, segment: Segment, trial: Trial) -> bool:
        """Whether a path is right once, asked once for all layers of a shape."""
        what = (self.ranges.key(segment), trial.path)
        if what not in self.proved:
            self.proved.add(what)
            works(segment, trial, self.setting)
        return trial.problem is None

    def _range(self, units: List[Unit], singles: List[Choice]) -> Choice | None:
        segment = range_segment(list(units))
        if segment is None or (self.setting.measured and not self.ranges.is_ranked(segment)):
            return None
        apart = sum(_known(one) for one in singles)
        best = self.ranges.best(self.ranges.trials(segment, apart))
        if best is None:
            return None
        why = "measured" if best.measured_s is not None else "predicted"
        return _choice(unit_names(units), segment, best, apart, why)


def _heaviest_first(segments: Iterable[Segment]) -> list[Segment]:
    """Segments by the FLOPs and the elements that all of one shape have together."""
    weights: dict[str, float] = {}
    first: dict[str, Segment] = {}
    for one in segments:
        sizes, key = one.sequence.sizes(one.size), repr(shape_of(one))
        moved = sum(prod(size) * one.sequence.channels(n) for n, size in enumerate(sizes))
        first.setdefault(key, one)
        weights[key] = weights.get(key, 0.0) + one.sequence.flops(one.size) + _FLOPS_PER_ELEMENT * moved
    return [first[key] for key in sorted(first, key=weights.__getitem__, reverse=True)]


def _is_around(other: _Place, place: _Place) -> bool:
    """Whether a range holds another and more."""
    return other != place and other[0] == place[0] and other[1] <= place[1] and place[2] <= other[2]


def _known(choice: Choice) -> float:
    """Its time for sums; what nothing is known of counts as nothing, so that cuts compare what is known."""
    return 0.0 if choice.time_s is None else choice.time_s


def _choice(names: tuple[str, ...], segment: Segment, trial: Trial, apart: float | None, why: str) -> Choice:
    return Choice(
        names, segment.name, trial.path, trial.how, trial.edge, trial.predicted_s, trial.measured_s, apart, why
    )
