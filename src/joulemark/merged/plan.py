"""Chooses, chain by chain, which convolutions are executed as one and by which path.

Every range of a chain that something can execute as one is predicted by the performance model; what is promising is
measured in turns against its layers one by one (each distinct range once, kept on disk), and the cuts of the chain with
the least time in all win. A path whose output is wrong on the example's shapes is left out, however fast.
"""

from __future__ import annotations

import inspect
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from math import inf, log, prod
from typing import Any

import torch
from torch import Tensor, fx

from joulemark.merged import cache
from joulemark.merged.cost import Candidate, Point, Prediction, Rates, kind_of, predict
from joulemark.merged.families import Family, Offer, Problem, limits_of, offers
from joulemark.merged.graph import Segment, Unit, find_chains, range_segment
from joulemark.merged.kernels import Description, Kernel, KernelError, build
from joulemark.merged.kernels.compile import architecture_of
from joulemark.merged.kernels.description import Format
from joulemark.merged.kernels.seconds import fitted
from joulemark.merged.paths import OWN, Executed, cudnn_tuning, kind_of_path, library_paths
from joulemark.merged.questions import (
    Given,
    added_to,
    ends,
    example,
    gate_of,
    question,
    relative_error,
    with_ordinary_weights,
)
from joulemark.merged.sequence import Shape
from joulemark.merged.stopwatch import race

DEPTH = 6
"""Most layers that are executed as one; BrickDL's best depth was 3, and six at once lost there."""
_PROMISING = 1.5
"""A range is measured when its prediction is at most this much above its layers one by one."""
_MEASURED = 3
"""Kernels for a range that are measured, the best predicted first: of 27 blocks these held the best one in 25."""
_FEWEST = 2
"""Kernels of a family that are measured at least."""
_MOST = 5
"""Kernels of a family that are measured at most, of those predicted about as fast as the best of all: of 27 blocks that
were predicted without their own points these held one within 5 % of the best each time, 5 kernels on average."""
_ALIKE = 0.08
"""Relative difference of predicted times below which candidates count as equal."""
_FLOPS_PER_ELEMENT = 400
"""FLOPs in bf16 in the time of an element's way through memory (an H200's 790 TFLOP/s and 4.3 TB/s): for an order."""
_FOR_RANKING = 0.35
"""Share of the time in which kernels of ranges are ranked; those that had no turn by then are not merged."""
_FOR_LAYERS = 0.6
"""Share of the time left then that measuring layers alone may take."""
_NO_MEMORY = "out of memory when it was measured"
_NOT_FINITE = "with these weights its layers one by one give no finite numbers"
_KEPT = dict[str, tuple[float | None, str | None]]
"""What the disk keeps of a segment: path → seconds and problem."""
_COMPILERS = max(2, min(16, len(os.sched_getaffinity(0)) - 1))
TOLERANCE: Mapping[Format, float] = {"bf16": 2e-2, "fp16": 1e-2, "tf32": 4e-3, "fp32": 2e-5}
"""Relative error (Frobenius) against the layers one by one above which a path counts as wrong."""


_Place = tuple[int, int, int]
"""Number of a chain, begin and end of a range in it."""


@dataclass
class Setting:
    """For what is planned.

    Args:
        device: of the model.
        form: number format of its convolutions; None for one that no kernel has.
        rates: of the device; None where they are not known, then nothing is predicted.
        families: of kernels.
        measured: whether candidates are timed on the device.
        deadline: on ``time.monotonic``; later nothing further is measured.
        depth: most layers as one.
        gpu: its name where its rates are not known.
    """

    device: torch.device
    form: Format | None
    rates: Rates | None
    families: tuple[Family, ...]
    measured: bool
    deadline: float = inf
    depth: int = DEPTH
    gpu: str | None = None

    @cached_property
    def capability(self) -> int | None:
        """Compute capability of the device, as 90; None where there is no GPU to ask: then all kernels are planned."""
        if self.device.type != "cuda" or not torch.cuda.is_available():
            return None
        major, minor = torch.cuda.get_device_capability(self.device)
        return int(10 * major + minor)

    @property
    def in_time(self) -> bool:
        """Whether there is time to measure."""
        return self.measured and time.monotonic() < self.deadline


@dataclass(frozen=True)
class Choice:
    """What became of one range of a chain.

    Args:
        units: names of its convolutions' nodes.
        name: its first and last convolution, as the model calls them.
        path: see :mod:`joulemark.merged.paths`.
        how: the schedule; ``unmerged`` for a single layer of a library.
        edge: of the bricks.
        predicted_s, measured_s: per call; None where not known.
        apart_s: its layers one by one, each on its best path; measured where ``measured_s`` is.
        why: it was chosen, or was not merged.
    """

    units: tuple[str, ...]
    name: str
    path: str
    how: str
    edge: Shape | None
    predicted_s: float | None
    measured_s: float | None
    apart_s: float | None
    why: str

    @property
    def merged(self) -> bool:
        """Whether several layers are executed as one."""
        return len(self.units) > 1

    @property
    def time_s(self) -> float | None:
        """The best knowledge of its time."""
        return self.predicted_s if self.measured_s is None else self.measured_s


@dataclass
class _Trial:
    """A candidate of a range and what is known of it; ``counted_s`` is told by measured seconds of its family.

    ``of_values``: its problem comes from the weights' values, which no key of the cache knows.
    """

    path: str
    how: str
    edge: Shape | None
    kernel: Kernel | None
    prediction: Prediction | None
    measured_s: float | None = None
    problem: str | None = None
    rank: int = 0
    counted_s: float | None = None
    of_values: bool = False

    @property
    def order(self) -> tuple[float, int]:
        """By predicted time; what the model cannot tell apart stays in its family's order."""
        time_s = self.predicted_s
        return (inf if not time_s else round(log(time_s) / _ALIKE), self.rank)

    @property
    def predicted_s(self) -> float | None:
        return self.counted_s if self.prediction is None else self.prediction.time_s

    @property
    def time_s(self) -> float:
        """Measured, else predicted, else unknown and never best."""
        known = self.measured_s if self.measured_s is not None else self.predicted_s
        return inf if known is None or self.problem is not None else known


def worth_measuring(ranked: List[tuple[str, float | None, bool]], most: int = _MEASURED) -> list[int]:
    """Which candidates of a range are measured: numbers into the ranking, family by family.

    Every family has its turn: how far each stays behind the rates is not known before it was measured. One whose time
    is told by what was measured of it has more of them where they are predicted about as fast as the best of all, those
    that are predicted to take the same (two of a kind) behind one of each.

    Args:
        ranked: family, predicted time and whether measured seconds told it, the fastest first.
        most: candidates of a range, shared by all families, where that gives a family more.
    """
    families: dict[str, list[int]] = {}
    for number, (family, *_) in enumerate(ranked):
        families.setdefault(family, []).append(number)
    each = max(_FEWEST, -(-most // max(len(families), 1)))
    best = min((time_s for _, time_s, told in ranked if told and time_s is not None), default=0.0)
    chosen: list[int] = []
    for members in families.values():
        fast: list[tuple[int, int]] = []  # (of how many that are predicted to take the same it is which, number)
        times: Counter[float] = Counter()
        for number in members:
            _, time_s, told = ranked[number]
            if told and time_s is not None and time_s <= (1 + _ALIKE) * best:
                fast.append((times[time_s], number))
                times[time_s] += 1
        taken = [number for _, number in sorted(fast)[:_MOST]]
        others = (number for number in members if number not in taken)
        chosen += [*taken, *islice(others, max(0, each - len(taken)))]
    return chosen


@dataclass
class Planner:
    """Plans the chains of one graph.

    Args:
        setting: device, rates, kernels.
        found: trials of ranges already tried, by what they depend on.
        candidates: of ranges that are going to be tried.
        forced: several layers are merged wherever something can, whatever they take one by one.
        most: kernels for a range that are measured, the best predicted first.
        ranges: that were tried.
        cut: whether time was up before all of them were.
        proved: range and path of what was run once and not measured.
    """

    setting: Setting
    candidates: dict[str, list[_Trial]] = field(default_factory=dict)
    found: dict[str, list[_Trial]] = field(default_factory=dict)
    forced: bool = False
    most: int = _MEASURED
    ranges: dict[str, Segment] = field(default_factory=dict)
    cut: bool = False
    proved: set[tuple[str, str]] = field(default_factory=set)

    def own_choice(self, unit: Unit) -> Choice:
        """The best generated kernel for a single layer; its best path of all where there is none that is right."""
        segment = range_segment([unit])
        assert segment is not None
        compile_ = self._compiler()
        if compile_ is not None:
            with Builds(compile_) as builds:
                builds.wait(self._promised([(segment, inf)]), self.setting.deadline)
        own = self._best(one for one in self._trials(segment, inf) if one.kernel is not None)
        return self._single(unit) if own is None else _choice(unit_names([unit]), segment, own, None, "asked for")

    @property
    def of_values(self) -> bool:
        """Whether the weights' values decided: another model of these shapes may be planned otherwise."""
        return any(one.of_values for trials in self.found.values() for one in trials)

    def points(self) -> list[Point]:
        """What was measured, for fitting the performance model."""
        found = []
        for key, trials in self.found.items():
            segment, form = self.ranges[key], self.setting.form
            for one in trials:
                if one.measured_s and one.prediction is not None and form is not None:
                    candidate = one.prediction.candidate
                    found.append(
                        Point(
                            segment.sequence, segment.size, segment.batch, form, candidate, one.measured_s, cold=False
                        )
                    )
        return found

    def table(self) -> list[dict[str, Any]]:
        """All candidates that were tried and measured or refused, for judging and fitting the performance model."""
        rows = []
        for key, trials in self.found.items():
            for one in trials:
                if one.prediction is None or (one.measured_s is None and one.problem is None):
                    continue
                candidate, segment = asdict(one.prediction.candidate), self.ranges[key]
                layers = [asdict(layer) for layer in segment.sequence.layers]
                shape = {"layers": layers, "size": segment.size, "batch": segment.batch, "form": self.setting.form}
                known = {"predicted_s": one.predicted_s, "measured_s": one.measured_s, "problem": one.problem}
                told = {"path": one.path, "bound": one.prediction.bound, "counts": self._counts(one, segment)}
                plan = None if one.kernel is None else one.kernel.plan
                rows.append({**shape, "candidate": candidate, "plan": plan, **told, **known})
        return rows

    def _counts(self, trial: _Trial, segment: Segment) -> dict[str, float] | None:
        if trial.kernel is None or trial.kernel.counts is None:
            return None
        return dict(trial.kernel.counts(segment.size, segment.batch, limits_of(self.setting.rates)))

    def plan(self, graph: fx.GraphModule) -> tuple[list[Choice], dict[str, str]]:
        """A choice for every convolution, and per convolution that no path takes the reason.

        What is to be measured is ranked first, and compiled beside what comes then; layers alone are measured before
        ranges, the most hopeful of which come first: time may be up before the last.
        """
        chains, left = find_chains(graph)
        alone = [one for chain in chains for unit in chain if (one := range_segment([unit])) is not None]
        with Builds(self._compiler()) as builds:
            if self.setting.measured:
                builds.add(self._promised((one, inf) for one in alone))
                own = ((one, trial) for one in alone for trial in self.candidates.get(self._key(one), ()))
                with self._compiling_own(own):
                    self._rank(chains, builds)
            self._measure_alone(_heaviest_first(alone), builds)
            singles = [[self._single(unit) for unit in chain] for chain in chains]
            if self.setting.measured:
                self._measure_ranges(chains, singles, builds)
        return [choice for pair in zip(chains, singles, strict=True) for choice in self._cut(*pair)], left

    def _compiler(self) -> Callable[[Kernel], object] | None:
        """What compiles a kernel for the device; None where nothing is measured on a GPU."""
        if self.setting.device.type != "cuda" or not self.setting.measured:
            return None
        return compiler_for(self.setting.device)

    def _rank(self, chains: List[List[Unit]], builds: Builds) -> None:
        """Rank the kernels of all ranges that may be measured, heavy and long ones first; have the best compiled."""
        begin = time.monotonic()
        until = begin + _FOR_RANKING * (self.setting.deadline - begin)
        spans = (chain[first:end] for chain in chains for first, end in self._spans(chain) if end - first > 1)
        ranges = [one for units in spans if (one := range_segment(list(units))) is not None]
        for segment in _heaviest_first(ranges):
            if time.monotonic() > until:
                self.cut = True
                break
            builds.add(self._promised([(segment, inf)]))

    def _measure_ranges(self, chains: List[List[Unit]], singles: List[List[Choice]], builds: Builds) -> None:
        """Measure ranges that were ranked: what is compiled already first, most saved time as predicted first."""
        asked: dict[str, tuple[float, Segment, float]] = {}
        at: dict[_Place, str] = {}
        for number, pair in enumerate(zip(chains, singles, strict=True)):
            for begin, end, segment, apart in self._ranges(*pair):
                key = at[number, begin, end] = self._key(segment)
                trials = self.candidates.get(key, self.found.get(key, []))
                saved = apart - min((one.time_s for one in trials if one.kernel), default=inf)
                before = asked.get(key, (0.0, segment, apart))[0]
                asked[key] = (before + saved, segment, apart)
        hopeful = [one[1:] for one in sorted(asked.values(), key=lambda one: -one[0])]
        for deadline in (0.0, self.setting.deadline):
            hopeful = [one for one in hopeful if not self._done_with(*one, builds, deadline, at)]
        self.cut |= bool(hopeful)

    def _done_with(
        self, segment: Segment, apart: float, builds: Builds, deadline: float, at: Mapping[_Place, str]
    ) -> bool:
        """Whether a range was measured, or needs not be."""
        key = self._key(segment)
        if key in self.candidates and self._beaten(key, at):
            self.found[key], self.ranges[key] = self.candidates.pop(key), segment
        return self._measured_if_ready(segment, apart, builds, deadline)

    def _beaten(self, key: str, at: Mapping[_Place, str]) -> bool:
        """Whether a longer range around it takes as measured what it takes as predicted: then no cut wants it."""
        kernels = [one for one in self.candidates[key] if one.kernel and one.problem is None]
        if not kernels or any(one.counted_s is None for one in kernels):
            return False
        least = (1 - _ALIKE) * min(one.time_s for one in kernels)
        places = [one for one, there in at.items() if there == key]
        return all(any(self._measured_s(at[one]) <= least for one in at if _is_around(one, place)) for place in places)

    def _measured_s(self, key: str) -> float:
        best = self._best(self.found.get(key, ()))
        return inf if best is None or best.measured_s is None else best.measured_s

    def _measured_if_ready(self, segment: Segment, apart: float, builds: Builds, deadline: float) -> bool:
        ready = self._ready(segment, apart, builds, deadline)
        if ready:
            self._trials(segment, apart)
        return ready

    def _ready(self, segment: Segment, apart: float, builds: Builds, deadline: float) -> bool:
        """Whether a range was ranked and what is to be measured of it is compiled by a deadline."""
        key = self._key(segment)
        if key in self.found:
            return True
        promising = self._promising(self.candidates.get(key, ()), apart)
        kernels = [one.kernel for one in promising if one.kernel]
        return key in self.candidates and builds.wait(kernels, deadline)

    def prove(self, graph: fx.GraphModule, choices: Iterable[Choice]) -> dict[Choice, str]:
        """Run once what was chosen and not measured; what fails or is wrong has no part in another plan.

        Returns:
            Which choices these are, and why.
        """
        units = {unit.convolution.name: unit for chain in find_chains(graph)[0] for unit in chain}
        unseen: list[tuple[Choice, Segment, _Trial]] = []
        for choice in choices:
            segment = range_segment([units[name] for name in choice.units])
            assert segment is not None
            trial = next(one for one in self.found[self._key(segment)] if one.path == choice.path)
            what = (self._key(segment), choice.path)
            if what not in self.proved:
                self.proved.add(what)
                unseen.append((choice, segment, trial))
        if self.setting.device.type == "cuda":
            build_all((trial.kernel for *_, trial in unseen if trial.kernel), self.setting.device)
        with self._compiling_own((segment, trial) for _, segment, trial in unseen):
            pass
        for _, segment, trial in unseen:
            self._tried(segment, trial, *question(segment, self.setting.device))
        return {choice: trial.problem for choice, _, trial in unseen if trial.problem is not None}

    @contextmanager
    def _compiling_own(self, trials: Iterable[tuple[Segment, _Trial]]) -> Iterator[None]:
        """Compile the kernels of paths of our own beside what is done in the context; they are there at its end.

        All together: one after another they take longer than measuring.
        """
        if self.setting.device.type != "cuda":
            yield
            return
        tasks: dict[tuple[object, ...], tuple[Segment, str]] = {}
        for segment, one in trials:
            if one.kernel is None and kind_of_path(one.path) in OWN:
                tasks.setdefault(compiled_as(segment, one.path), (segment, one.path))
        with cudnn_tuning(False), ThreadPoolExecutor(_COMPILERS) as pool:
            started = [pool.submit(_run_small, *task, self.setting.device) for task in tasks.values()]
            yield
            wait(started, None if self.setting.deadline == inf else max(self.setting.deadline - time.monotonic(), 0.0))
            pool.shutdown(wait=True, cancel_futures=True)

    def _measure_alone(self, segments: List[Segment], builds: Builds) -> None:
        """Measure layers alone, in order, for a part of the time: without any left, no range would be merged."""
        begin = time.monotonic()
        until = begin + _FOR_LAYERS * (self.setting.deadline - begin)
        for segment in segments:
            if self.setting.measured and (time.monotonic() > until or not self._ready(segment, inf, builds, until)):
                self.cut, key = True, self._key(segment)
                trials = self.candidates.pop(key, None) or self._candidates(segment)
                self.found[key], self.ranges[key] = trials, segment
            self._trials(segment, inf)

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
        return self._promised((one, inf) for one in segments if one is not None)

    def _spans(self, chain: List[Unit]) -> Iterator[tuple[int, int]]:
        """Begin and end of every range of a chain, of one unit and more."""
        for end in range(1, len(chain) + 1):
            yield from ((begin, end) for begin in range(max(0, end - self.setting.depth), end))

    def _promised(self, segments: Iterable[tuple[Segment, float]]) -> list[Kernel]:
        """Kernels that are promising for segments not seen yet, each once."""
        kernels: dict[str, Kernel] = {}
        for segment, apart in segments:
            key = self._key(segment)
            if key not in self.candidates:
                self.candidates[key] = self._candidates(segment)
                promising = self._promising(self.candidates[key], apart)
                kernels.update((one.kernel.name, one.kernel) for one in promising if one.kernel)
        return list(kernels.values())

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
        trials = self._trials(segment, inf)
        best = self._best(trials) or self._unmeasured(trials)
        why = "its best path" if best.measured_s is not None else "a single layer"
        return _choice(unit_names([unit]), segment, best, None, why)

    def _unmeasured(self, trials: Iterable[_Trial]) -> _Trial:
        """A library's path for a layer alone: torch's own operators where measuring was wanted, they need no check."""
        possible = [one for one in trials if one.kernel is None and (one.problem is None or one.path == "library")]
        return possible[-1 if self.setting.measured else 0]

    def _range(self, units: List[Unit], singles: List[Choice]) -> Choice | None:
        segment = range_segment(list(units))
        if segment is None or (self.setting.measured and not self._is_ranked(segment)):
            return None
        apart = sum(_known(one) for one in singles)
        best = self._best(self._trials(segment, apart))
        if best is None:
            return None
        why = "measured" if best.measured_s is not None else "predicted"
        return _choice(unit_names(units), segment, best, apart, why)

    def _is_ranked(self, segment: Segment) -> bool:
        """Whether its kernels were ranked while there was time for that."""
        key = self._key(segment)
        return key in self.found or key in self.candidates

    def _best(self, trials: Iterable[_Trial]) -> _Trial | None:
        """The fastest that works: among those measured where it is measured, else as predicted; None without any.

        A prediction never beats a measurement: what was not worth measuring is not worth taking. Where nothing is
        measured and several layers are merged by force, a single one is our own kernels' too.
        """
        known = [one for one in trials if one.problem is None and one.time_s < inf]
        if self.setting.measured:
            known = [one for one in known if one.measured_s is not None]
        elif self.forced:
            known = [one for one in known if one.kernel or kind_of_path(one.path) in OWN] or known
        return min(known, key=lambda one: one.time_s, default=None)

    def _trials(self, segment: Segment, apart: float) -> list[_Trial]:
        """All candidates of a segment, measured where that is wanted and promising."""
        key = self._key(segment)
        if key not in self.found:
            trials = self.candidates.pop(key, None) or self._candidates(segment)
            self._measure(segment, trials, apart)
            self.found[key], self.ranges[key] = trials, segment
        return self.found[key]

    def _key(self, segment: Segment) -> str:
        return repr((*_shape(segment), self.setting.form))

    def _candidates(self, segment: Segment) -> list[_Trial]:
        sequence, form, adds = segment.sequence, self.setting.form, segment.adds is not None
        trials = []
        if len(sequence.layers) == 1:
            layer, gated, out = sequence.layers[0], segment.gate is not None, sequence.sizes(segment.size)[-1]
            for path in library_paths(layer, adds, self.setting.device, form, gated, segment.batch, out):
                family = f"{kind_of_path(path)}/{kind_of(layer)}"
                trials.append(
                    _Trial(path, "unmerged", None, None, self._predict(segment, Candidate("unmerged", family)))
                )
        if form is not None:
            capability = self.setting.capability
            for offer in offers(self.setting.families, problem_of(segment, self.setting, form)):
                if capability is None or offer.kernel.runs_on(capability):
                    trials.append(self._offered(segment, offer))
        return trials

    def _offered(self, segment: Segment, offer: Offer) -> _Trial:
        prediction = self._predict(segment, offer.candidate)
        counted_s = offer.candidate.counted_s if offer.candidate.family in fitted().seconds else None
        given = (offer.path, offer.candidate.how, offer.kernel.edge, offer.kernel, prediction)
        trial = _Trial(*given, rank=offer.rank, counted_s=counted_s)
        if prediction is not None:
            trial.problem = prediction.why_not
        return trial

    def _predict(self, segment: Segment, candidate: Candidate) -> Prediction | None:
        rates, form = self.setting.rates, self.setting.form
        if rates is None or form is None or form not in rates.flop_per_s:
            return None
        return predict(segment.sequence, segment.size, segment.batch, form, candidate, rates, cold=False)

    def _measure(self, segment: Segment, trials: list[_Trial], apart: float) -> None:
        """Fill in the measured times of the promising trials, from the disk where they are there."""
        if not self.setting.measured:
            return
        chosen = self._promising(trials, apart)
        if not chosen:
            return
        key = cache.key_of(
            cache.device_key(self.setting.device),
            *_shape(segment),
            self.setting.form,
            [(one.path, _text_of(one)) for one in chosen],
        )
        kept = cache.read("segment", key, _KEPT)
        if kept is None or not all(one.path in kept for one in chosen):
            if not self.setting.in_time:
                self.cut = True
                return
            try:
                self._race(segment, chosen)
            except torch.OutOfMemoryError:  # beside what else the process holds: nothing is kept of it
                for one in chosen:
                    one.problem = None if one.path == "library" else _NO_MEMORY
                return
            if any(one.problem == _NO_MEMORY or one.of_values for one in chosen):
                return
            cache.write("segment", key, {one.path: [one.measured_s, one.problem] for one in chosen})
            return
        for one in chosen:
            one.measured_s, one.problem = kept[one.path]

    def _promising(self, trials: Iterable[_Trial], apart: float) -> list[_Trial]:
        """What is measured: all paths of a library, and of each family of kernels the best predicted.

        Torch's own operators have no turn where an epilogue of our own does the same with fewer kernels, unless
        schedules are forced.
        """
        trials = list(trials)
        generated = sorted((one for one in trials if one.kernel and not one.problem), key=lambda one: one.order)
        limit = inf if self.forced else _PROMISING * apart
        generated = [one for one in generated if one.predicted_s is None or one.predicted_s <= limit]
        known = [(one.path.partition("/")[0], one.predicted_s, one.counted_s is not None) for one in generated]
        chosen = [generated[number] for number in worth_measuring(known, self.most)]
        library = [one for one in trials if one.kernel is None]
        if not self.forced and any(one.path == "epilogue" for one in library):
            library = [one for one in library if one.path != "library"]
        return library + chosen

    def _race(self, segment: Segment, trials: list[_Trial]) -> None:
        given, expected = question(segment, self.setting.device)
        if not bool(expected.isfinite().all()):
            for one in trials:
                one.problem, one.of_values = _NOT_FINITE, True
            return
        tried = {one.path: self._tried(segment, one, given, expected) for one in trials}
        calls = {path: call for path, call in tried.items() if call is not None}
        with torch.no_grad():
            times = race(calls, self.setting.device)
        for one in trials:
            one.measured_s = times.get(one.path)

    def _tried(self, segment: Segment, trial: _Trial, given: Given, expected: Tensor) -> Callable[[], Tensor] | None:
        """A call of a trial that was right once; None where it was not, the trial says why."""
        try:
            return _checked(segment, trial, given, expected, self.setting.form)
        except torch.OutOfMemoryError:
            trial.problem = _NO_MEMORY
        except Exception as error:  # a compiler of kernels raises anything; the path is one of several
            said = str(error).strip().splitlines()
            trial.problem = f"{type(error).__name__}: {said[0] if said else ''}"
            trial.of_values = self._is_right_with_others(segment, trial)
        return None

    def _is_right_with_others(self, segment: Segment, trial: _Trial) -> bool:
        """Whether a trial that failed is right with ordinary weights: then the values of these are why."""
        with suppress(Exception):
            other = with_ordinary_weights(segment)
            _checked(other, trial, *question(other, self.setting.device), self.setting.form)
            return True
        return False


def _text_of(trial: _Trial) -> str | None:
    """The text that a trial's measured time depends on; None for what a library's version says."""
    if trial.kernel is not None:
        return trial.kernel.source
    if kind_of_path(trial.path) not in OWN:
        return None
    from joulemark.merged import gather, normalize, pointwise, sliding, stem

    return "".join(inspect.getsource(one) for one in (gather, normalize, pointwise, sliding, stem))


def _shape(segment: Segment) -> tuple[object, ...]:
    """What a segment's time depends on."""
    return (segment.sequence, segment.size, segment.batch, segment.adds is not None, segment.gate is not None)


def compiled_as(segment: Segment, path: str) -> tuple[object, ...]:
    """What the kernel of a path of our own is compiled for, for a layer alone."""
    from joulemark.merged.pointwise import compiled_for

    parameters = segment.parameters[0]
    shape = (segment.adds is not None, segment.gate is not None, parameters.weight.dtype.itemsize)
    biased = parameters.bias is not None
    return (biased, parameters.weight.dtype, *compiled_for(path, segment.sequence.layers[0], *shape))


def _run_small(segment: Segment, path: str, device: torch.device) -> None:
    """Run a path once for one image, so that its kernel is compiled; that it cannot be is told when it is measured."""
    with suppress(Exception), torch.no_grad(), torch.cuda.device(device):
        x = example(segment, device, segment.parameters[0].weight.dtype, batch=1)
        module = Executed(segment.sequence, segment.parameters, path, segment.adds is not None)
        module.run(x, added_to(segment, x), gate_of(segment, x))


def _heaviest_first(segments: Iterable[Segment]) -> list[Segment]:
    """Segments by the FLOPs and the elements that all of one shape have together."""
    weights: dict[str, float] = {}
    first: dict[str, Segment] = {}
    for one in segments:
        sizes, key = one.sequence.sizes(one.size), repr(_shape(one))
        moved = sum(prod(size) * one.sequence.channels(n) for n, size in enumerate(sizes))
        first.setdefault(key, one)
        weights[key] = weights.get(key, 0.0) + one.sequence.flops(one.size) + _FLOPS_PER_ELEMENT * moved
    return [first[key] for key in sorted(first, key=weights.__getitem__, reverse=True)]


def _checked(
    segment: Segment,
    one: _Trial,
    given: Given,
    expected: Tensor,
    form: Format | None,
) -> Callable[[], Tensor]:
    """A call of a trial whose output was right once.

    Raises:
        KernelError: its output is wrong.
    """
    module = Executed(segment.sequence, segment.parameters, one.path, segment.adds is not None, one.kernel)
    with torch.no_grad():
        out = module.run(*given)
        error = relative_error(ends(out), expected)
    limit = TOLERANCE[form] if form is not None else 1e-9
    if not error <= limit:
        raise KernelError(f"its output is wrong: relative error {error:.2g}, {limit:g} is allowed")
    return lambda: module.run(*given)


def _is_around(other: _Place, place: _Place) -> bool:
    """Whether a range holds another and more."""
    return other != place and other[0] == place[0] and other[1] <= place[1] and place[2] <= other[2]


def _known(choice: Choice) -> float:
    """Its time for sums; what nothing is known of counts as nothing, so that cuts compare what is known."""
    return 0.0 if choice.time_s is None else choice.time_s


def _choice(names: tuple[str, ...], segment: Segment, trial: _Trial, apart: float | None, why: str) -> Choice:
    return Choice(
        names, segment.name, trial.path, trial.how, trial.edge, trial.predicted_s, trial.measured_s, apart, why
    )


def problem_of(segment: Segment, setting: Setting, form: Format) -> Problem:
    """What families are asked for a segment."""
    description = Description(segment.sequence, form, segment.adds is not None)
    gpu = setting.gpu if setting.rates is None else setting.rates.gpu
    return Problem(description, segment.size, segment.batch, limits_of(setting.rates), gpu)


class Builds:
    """Kernels that are compiled beside what else is done, several at a time, in the order in which they are asked for.

    What does not compile says so when it is loaded. At the end of the context what has not begun is given up.

    Args:
        compile_: compiles one; None where there is nothing to compile for: then every kernel counts as ready.
    """

    def __init__(self, compile_: Callable[[Kernel], object] | None) -> None:
        self._compile = compile_
        self._pool = ThreadPoolExecutor(_COMPILERS)
        self._begun: dict[str, Future[object]] = {}

    def __enter__(self) -> Builds:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def add(self, kernels: Iterable[Kernel]) -> None:
        """Have kernels compiled, each once."""
        for kernel in kernels:
            if self._compile is not None and kernel.name not in self._begun:
                self._begun[kernel.name] = self._pool.submit(self._compile, kernel)

    def wait(self, kernels: List[Kernel], deadline: float = inf) -> bool:
        """Whether all of these are there by a deadline on ``time.monotonic``."""
        self.add(kernels)
        asked = [self._begun[one.name] for one in kernels if one.name in self._begun]
        return not wait(asked, None if deadline == inf else max(deadline - time.monotonic(), 0.0)).not_done


def compiler_for(device: torch.device) -> Callable[[Kernel], object]:
    """What compiles a kernel for a GPU."""
    architecture = architecture_of(*torch.cuda.get_device_capability(device))
    return lambda kernel: build(kernel, architecture)


def build_all(kernels: Iterable[Kernel], device: torch.device) -> None:
    """Compile kernels for a device, several at a time; what does not compile says so when it is loaded."""
    with Builds(compiler_for(device)) as builds:
        builds.wait(list(kernels))


def unit_names(units: Iterable[Unit]) -> tuple[str, ...]:
    """What identifies units in every copy of a graph."""
    return tuple(one.convolution.name for one in units)
