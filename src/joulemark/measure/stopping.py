"""When enough samples are enough: precision reached, or a budget spent, and which of the two it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from joulemark.stats import summarize

PRECISION = "precision reached"
BUDGET = "budget spent"
COUNT = "count reached"


@dataclass
class Precision:
    """Stop when the median's interval is narrow, or when the time is up.

    nvbench stops at 0.5 s and a relative noise under 0.5 %; here the interval of the median itself must be narrow.

    Args:
        budget_s: wall time from the first sample on.
        target: half-width of the 95 % interval relative to the median.
        min_samples: never fewer, whatever the budget says.
        max_samples: never more.
        clock: in seconds.
    """

    budget_s: float
    target: float = 0.005
    min_samples: int = 5
    max_samples: int = 20_000
    clock: Callable[[], float] = time.perf_counter
    _start: float | None = field(default=None, repr=False)
    _next_look: int = field(default=0, repr=False)

    def __call__(self, samples: Sequence[float]) -> str | None:
        """Why to stop, or None."""
        now = self.clock()
        if self._start is None:
            self._start = now - samples[-1]
        n = len(samples)
        if n < self.min_samples:
            return None
        if now - self._start >= self.budget_s:
            return BUDGET
        if n >= self.max_samples:
            return COUNT
        # The interval is computed at a growing distance: sorting every time would cost more than short steps.
        if n < self._next_look or now - self._start < self.budget_s / 4:
            return None
        self._next_look = n + max(1, n // 4)
        return PRECISION if summarize(samples).relative_half_width <= self.target else None


@dataclass(frozen=True)
class Exactly:
    """Stop after a fixed number of rounds, as a user asked for."""

    rounds: int

    def __call__(self, samples: Sequence[float]) -> str | None:
        """Why to stop, or None."""
        return COUNT if len(samples) >= self.rounds else None
