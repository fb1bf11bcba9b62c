"""What is known of every distinct range of a graph: its candidates, and what was measured of them, each once."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

from joulemark.merged.builds import Builds
from joulemark.merged.cost import Point
from joulemark.merged.families import limits_of
from joulemark.merged.graph import Segment
from joulemark.merged.kernels import Kernel
from joulemark.merged.measuring import measure
from joulemark.merged.paths import CONVOLVING, OWN, kind_of_path
from joulemark.merged.setting import Setting
from joulemark.merged.trials import MEASURED, Trial, candidates_of, promising, shape_of


@dataclass
class Ranges:
    """Ranges of a graph, those of one shape as one.

    Args:
        setting: device, rates, kernels.
        forced: several layers are merged wherever something can, whatever they take one by one.
        most: kernels for a range that are measured, the best predicted first.
        candidates: key → trials of a range that is going to be tried.
        found: key → trials of a range that was tried.
        segments: key → a segment of those that were tried.
        cut: whether time was up before something was measured.
    """

    setting: Setting
    forced: bool = False
    most: int = MEASURED
    candidates: dict[str, list[Trial]] = field(default_factory=dict)
    found: dict[str, list[Trial]] = field(default_factory=dict)
    segments: dict[str, Segment] = field(default_factory=dict)
    cut: bool = False

    def key(self, segment: Segment) -> str:
        """The same for all ranges of one shape."""
        return repr((*shape_of(segment), self.setting.form))

    def promised(self, segments: Iterable[Segment]) -> list[Kernel]:
        """Kernels that are promising for segments not seen yet, each once."""
        kernels: dict[tuple[str, str], Kernel] = {}
        for segment in segments:
            if not self.is_ranked(segment):
                candidates = self.candidates[self.key(segment)] = candidates_of(segment, self.setting)
                chosen = self._promising(candidates, inf)
                kernels.update((one.kernel.text, one.kernel) for one in chosen if one.kernel)
        return list(kernels.values())

    def is_ranked(self, segment: Segment) -> bool:
        """Whether its kernels were ranked while there was time for that."""
        key = self.key(segment)
        return key in self.found or key in self.candidates

    def has_own(self, segment: Segment) -> bool:
        """Whether one of its candidates that is not tried yet convolves by a kernel of ours."""
        candidates = self.candidates.get(self.key(segment), ())
        return any(one.kernel is not None or kind_of_path(one.path) in CONVOLVING for one in candidates)

    def ready(self, segment: Segment, apart: float, builds: Builds, deadline: float) -> bool:
        """Whether a range was ranked and what is to be measured of it is compiled by a deadline."""
        key = self.key(segment)
        if key in self.found:
            return True
        chosen = self._promising(self.candidates.get(key, ()), apart)
        kernels = [one.kernel for one in chosen if one.kernel]
        return key in self.candidates and builds.wait(kernels, deadline)

    def trials(self, segment: Segment, apart: float) -> list[Trial]:
        """All candidates of a segment, measured where that is wanted and promising.

        Args:
            apart: seconds of its layers one by one.
        """
        if self.key(segment) not in self.found:
            trials = self.leave(segment)
            chosen = self._promising(trials, apart) if self.setting.measured else []
            self._measure(segment, chosen)
            if chosen and all(one.problem is not None for one in chosen):  # Triton found no compiler, say
                self._measure(segment, [one for one in trials if one.path == "library" and one not in chosen])
        return self.found[self.key(segment)]

    def _measure(self, segment: Segment, chosen: List[Trial]) -> None:
        if chosen and not measure(segment, chosen, self.setting):
            self.cut = True

    def leave(self, segment: Segment) -> list[Trial]:
        """Its candidates, which count as tried from now on: nothing more is measured of them."""
        key = self.key(segment)
        trials = self.candidates.pop(key, None)
        if trials is None:  # none at all is an answer too, which took time to find
            trials = candidates_of(segment, self.setting)
        self.found[key], self.segments[key] = trials, segment
        return trials

    def best(self, trials: Iterable[Trial]) -> Trial | None:
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

    def measured_s(self, key: str) -> float:
        """What its best takes as measured; infinite where nothing was."""
        best = self.best(self.found.get(key, ()))
        return inf if best is None or best.measured_s is None else best.measured_s

    def _promising(self, trials: Iterable[Trial], apart: float) -> list[Trial]:
        return promising(trials, apart, self.most, self.forced)

    @property
    def of_values(self) -> bool:
        """Whether the weights' values decided: another model of these shapes may be planned otherwise."""
        return any(one.of_values for trials in self.found.values() for one in trials)

    def points(self) -> list[Point]:
        """What was measured, for fitting the performance model."""
        form = self.setting.form
        return [
            Point(at.sequence, at.size, at.batch, form, one.prediction.candidate, one.measured_s, cold=False)
            for at, one in self._tried()
            if one.measured_s and one.prediction is not None and form is not None
        ]

    def table(self) -> list[dict[str, Any]]:
        """All candidates that were tried and measured or refused, for judging and fitting the performance model."""
        rows = []
        for segment, one in self._tried():
            if one.prediction is None or (one.measured_s is None and one.problem is None):
                continue
            layers = [asdict(layer) for layer in segment.sequence.layers]
            shape = {"layers": layers, "adds": segment.adds is not None, "size": segment.size}
            shape |= {"batch": segment.batch, "form": self.setting.form}
            known = {"predicted_s": one.predicted_s, "measured_s": one.measured_s, "problem": one.problem}
            told = {"path": one.path, "bound": one.prediction.bound, "counts": self._counts(one, segment)}
            plan = None if one.kernel is None else one.kernel.plan
            rows.append({**shape, "candidate": asdict(one.prediction.candidate), "plan": plan, **told, **known})
        return rows

    def _tried(self) -> List[tuple[Segment, Trial]]:
        return [(self.segments[key], one) for key, trials in self.found.items() for one in trials]

    def _counts(self, trial: Trial, segment: Segment) -> dict[str, float] | None:
        if trial.kernel is None or trial.kernel.counts is None:
            return None
        return dict(trial.kernel.counts(segment.size, segment.batch, limits_of(self.setting.rates)))
