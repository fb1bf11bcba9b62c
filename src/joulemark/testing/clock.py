"""A clock that a test moves."""

from __future__ import annotations


class FakeClock:
    """A clock that moves only when told, in s.

    It serves as ``time.perf_counter``, as ``time.sleep`` (:meth:`sleep`) and as the sampler's wait.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += max(0.0, seconds)
