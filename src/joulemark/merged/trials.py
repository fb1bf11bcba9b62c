"""What may execute a range of a chain: its candidates, which of them are worth measuring, and what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import islice
from math import inf, log

from joulemark.merged.cost import Candidate, Prediction, kind_of, predict
from joulemark.merged.families import Offer, offers
from joulemark.merged.graph import Segment, Unit
from joulemark.merged.kernels import Kernel
from joulemark.merged.kernels.seconds import fitted
from joulemark.merged.paths import kind_of_path, library_paths
from joulemark.merged.sequence import Shape
from joulemark.merged.setting import Setting, problem_of

ALIKE = 0.08
"""Relative difference of predicted times below which candidates count as equal."""
MEASURED = 3
"""Kernels for a range that are measured, the best predicted first: of 27 blocks these held the best one in 25."""
_PROMISING = 1.5
"""A range is measured when its prediction is at most this much above its layers one by one."""
_FEWEST = 2
"""Kernels of a family that are measured at least."""
_MOST = 5
"""Kernels of a family that are measured at most, of those predicted about as fast as the best of all: of 27 blocks that
were predicted without their own points these held one within 5 % of the best each time, 5 kernels on average."""


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
class Trial:
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
        return (inf if not time_s else round(log(time_s) / ALIKE), self.rank)

    @property
    def predicted_s(self) -> float | None:
        return self.counted_s if self.prediction is None else self.prediction.time_s

    @property
    def time_s(self) -> float:
        """Measured, else predicted, else unknown and never best."""
        known = self.measured_s if self.measured_s is not None else self.predicted_s
        return inf if known is None or self.problem is not None else known


def shape_of(segment: Segment) -> tuple[object, ...]:
    """What a segment's time depends on."""
    biased = [one.bias is not None for one in segment.parameters]
    return (segment.sequence, segment.size, segment.batch, segment.adds is not None, segment.gate is not None, biased)


def unit_names(units: Iterable[Unit]) -> tuple[str, ...]:
    """What identifies units in every copy of a graph."""
    return tuple(one.convolution.name for one in units)


def candidates_of(segment: Segment, setting: Setting) -> list[Trial]:
    """Whatever can execute a segment: a library's paths, where it is a single layer, and kernels of the families."""
    sequence, form, adds = segment.sequence, setting.form, segment.adds is not None
    trials = []
    if len(sequence.layers) == 1:
        layer, gated, out = sequence.layers[0], segment.gate is not None, sequence.sizes(segment.size)[-1]
        biased = segment.parameters[0].bias is not None
        for path in library_paths(layer, adds, setting.device, form, gated, segment.batch, out, biased):
            candidate = Candidate("unmerged", f"{kind_of_path(path)}/{kind_of(layer)}")
            trials.append(Trial(path, "unmerged", None, None, _predict(segment, candidate, setting)))
    if form is not None:
        capability = setting.capability
        for offer in offers(setting.families, problem_of(segment, setting, form)):
            if capability is None or offer.kernel.runs_on(capability):
                trials.append(_offered(segment, offer, setting))
    return trials


def _offered(segment: Segment, offer: Offer, setting: Setting) -> Trial:
    prediction = _predict(segment, offer.candidate, setting)
    counted_s = offer.candidate.counted_s if offer.candidate.family in fitted().seconds else None
    given = (offer.path, offer.candidate.how, offer.kernel.edge, offer.kernel, prediction)
    trial = Trial(*given, rank=offer.rank, counted_s=counted_s)
    if prediction is not None:
        trial.problem = prediction.why_not
    return trial


def _predict(segment: Segment, candidate: Candidate, setting: Setting) -> Prediction | None:
    rates, form = setting.rates, setting.form
    if rates is None or form is None or form not in rates.flop_per_s:
        return None
    return predict(segment.sequence, segment.size, segment.batch, form, candidate, rates, cold=False)


def promising(trials: Iterable[Trial], apart: float, most: int = MEASURED, forced: bool = False) -> list[Trial]:
    """What is measured: all paths of a library, and of each family of kernels the best predicted.

    Torch's own operators have no turn where an epilogue of our own does the same with fewer kernels, or in the place
    of torch's pass for a bias, unless schedules are forced.

    Args:
        trials: of one segment.
        apart: seconds of its layers one by one.
        most: kernels that are measured, see :func:`worth_measuring`.
        forced: whatever its layers take one by one.
    """
    trials = list(trials)
    generated = sorted((one for one in trials if one.kernel and not one.problem), key=lambda one: one.order)
    limit = inf if forced else _PROMISING * apart
    generated = [one for one in generated if one.predicted_s is None or one.predicted_s <= limit]
    known = [(one.path.partition("/")[0], one.predicted_s, one.counted_s is not None) for one in generated]
    chosen = [generated[number] for number in worth_measuring(known, most)]
    library = [one for one in trials if one.kernel is None]
    if not forced and any(one.path == "epilogue" for one in library):
        library = [one for one in library if one.path != "library"]
    return library + chosen


def worth_measuring(ranked: List[tuple[str, float | None, bool]], most: int = MEASURED) -> list[int]:
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
            if told and time_s is not None and time_s <= (1 + ALIKE) * best:
                fast.append((times[time_s], number))
                times[time_s] += 1
        taken = [number for _, number in sorted(fast)[:_MOST]]
        others = (number for number in members if number not in taken)
        chosen += [*taken, *islice(others, max(0, each - len(taken)))]
    return chosen
