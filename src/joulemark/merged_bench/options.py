"""With which rivals a subject is measured, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from joulemark.merged.executor import BUDGET_S
from joulemark.merged_bench import rivals
from joulemark.merged_bench.subjects import Subject

_BURST_S, _SETTLED_S, _COUNTED_S = 0.01, 0.5, 1.0
"""Of a row's seconds, about: a burst, what a steady window takes beside itself, counters of one rival."""


@dataclass(frozen=True)
class Options:
    """How long a subject is measured.

    Args:
        dtype: bf16, fp16, tf32 or fp32.
        names: of rivals.
        rounds: bursts of each.
        sustain_s: of each sustained window; 0 leaves them out.
        turns: sustained windows of each rival.
        most_inputs: that rotate.
        limit_s: after which no further rival of a subject is built.
        rival_s: of building one rival.
        ends_s: on ``time.perf_counter``, when the last row is to be there: rivals are built until they can still be
            measured by then.
        merge_s: budget of merging.
        kernels: of a range that a forced schedule measures.
        sustain_best: rivals that get sustained windows beside our own, the fastest in bursts; None for all.
        steady_unmerged: whether our unmerged kernels get sustained windows too.
        tiny: the subject's size for tests.
        by_schedule: subjects and groups of which schedules other than padded are measured by themselves; None for all.
    """

    dtype: str = "bf16"
    names: tuple[str, ...] = rivals.EVERY
    rounds: int = 25
    sustain_s: float = 2.2
    turns: int = 1
    most_inputs: int = 16
    limit_s: float = 400.0
    rival_s: float = 200.0
    ends_s: float = inf
    merge_s: float = BUDGET_S
    kernels: int = rivals.EVERY_KERNEL
    sustain_best: int | None = None
    steady_unmerged: bool = True
    tiny: bool = False
    by_schedule: frozenset[str] | None = None

    @property
    def measuring_s(self) -> float:
        """What measuring a subject's rivals takes, about."""
        return self.rounds * len(self.names) * _BURST_S + self.steady_s

    @property
    def steady_s(self) -> float:
        """What follows the bursts takes, about; counters are not counted for each rival."""
        steady = len(self.names) if self.sustain_best is None else self.sustain_best + 1 + self.steady_unmerged
        return steady * (self.turns * (self.sustain_s + _SETTLED_S) + _COUNTED_S)

    def of(self, subject: Subject) -> Options:
        """With the rivals that this subject gets."""
        if self.by_schedule is None or {subject.name, subject.group} & self.by_schedule:
            return self
        return replace(self, names=tuple(one for one in self.names if one not in rivals.OTHER_SCHEDULES))
