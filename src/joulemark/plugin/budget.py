"""``--bench-budget``: the wall time of a session, and how much of it a case may take."""

from __future__ import annotations

from statistics import median

from joulemark.plugin.sink import Sink
from joulemark.stats import union_length


class Budget:
    """What is left of the time for all cases.

    Args:
        limit_s: for all of them, in s; None for any.
        sink: knows how long the session has run and what its cases took.

    Attributes:
        done: number of cases that have ended.
    """

    def __init__(self, limit_s: float | None, sink: Sink) -> None:
        self.limit_s = limit_s
        self.sink = sink
        self.done = 0

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self.limit_s is not None and self.sink.wall_s >= self.limit_s

    def share(self) -> float | None:
        """Seconds for the passes of the next case: an even share of what is left, less what cases cost besides."""
        if self.limit_s is None:
            return None
        left = self.limit_s - self.sink.wall_s
        return max(0.1, left / max(1, self.sink.total - self.done) - self.overhead_s())

    def overhead_s(self) -> float:
        """Median time per case outside its passes so far, in s (building, warm-up, edges).

        The first case of a process pays for imports and libraries: a mean would make the next ones pay again.
        """
        outside = [
            one.window_utc[1] - one.window_utc[0] - union_length(one.measured_windows_utc)
            for one in self.sink.records[-20:]
            if one.window_utc is not None and one.measured_windows_utc
        ]
        return max(0.0, median(outside)) if len(outside) > 2 else 1.0
