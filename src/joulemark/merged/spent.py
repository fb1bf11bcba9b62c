"""What the seconds of merging went to, part by part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Spent:
    """Seconds of parts, none of which is counted twice: a part within another one interrupts that.

    Args:
        clock: in s.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._within: list[str] = []
        self._since = 0.0

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Adds what is done in the context to a part."""
        self._count()
        self._within.append(part)
        try:
            yield
        finally:
            self._count()
            self._within.pop()

    def _count(self) -> None:
        """The time since the last change belongs to the innermost part."""
        now = self._clock()
        if self._within:
            part = self._within[-1]
            self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now
