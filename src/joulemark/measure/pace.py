"""Who decides how many steps a pass takes: this process by its own clock, or all ranks together by rank 0's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from joulemark.collect.timing import Stop
from joulemark.measure.plan import Pass
from joulemark.measure.stopping import Exactly, Precision
from joulemark.records import Json

RANK_WARM_UP = 6
"""Warm-up steps of every rank: they set up the communicator, the buckets of gradients and the allocator's blocks."""
_MOST_STEPS = 2000


class Pace(Protocol):
    """How the passes of one case are paced."""

    @property
    def alone(self) -> bool:
        """Whether no other process waits for the steps of this one."""
        ...

    @property
    def warmup_rounds(self) -> int | None:
        """Warm-up steps, None to run until they have settled."""
        ...

    def agree(self, value: Json) -> Json:
        """The value that all processes of the case go by."""
        ...

    def stop(self, one: Pass, step_s: float) -> Stop:
        """When a pass ends, given the agreed time of a step in s."""
        ...

    def steps(self, seconds: float, step_s: float) -> int | None:
        """How many steps fill ``seconds``; None to go by the clock."""
        ...


class Alone:
    """One process measures: its samples decide."""

    alone = True
    warmup_rounds: int | None = None

    def agree(self, value: Json) -> Json:
        """Nobody else is asked."""
        return value

    def stop(self, one: Pass, step_s: float) -> Stop:
        """When the interval is narrow, or the pass's time is up."""
        del step_s
        return Precision(one.budget_s, one.target, one.min_samples)

    def steps(self, seconds: float, step_s: float) -> int | None:
        """By the clock."""
        del seconds, step_s
        return None


@dataclass(frozen=True)
class InStep:
    """Ranks that meet in collectives: a rank that did one step more than the others would wait for ever.

    So every count follows from the pass and from a step time that rank 0 has published.

    Args:
        share: publishes rank 0's value and returns it on every rank; called in the same order on all of them.
    """

    share: Callable[[Json], Json]
    alone: bool = False
    warmup_rounds: int | None = RANK_WARM_UP

    def agree(self, value: Json) -> Json:
        """Rank 0's value."""
        return self.share(value)

    def stop(self, one: Pass, step_s: float) -> Stop:
        """After the number of steps that fit into the pass's time."""
        return Exactly(max(one.min_samples, self.steps(one.budget_s, step_s)))

    def steps(self, seconds: float, step_s: float) -> int:
        """As many as fit at this step time, 4 to 2000."""
        return max(4, min(_MOST_STEPS, round(seconds / max(step_s, 1e-9))))
