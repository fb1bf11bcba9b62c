"""Wall time of the stages of a pass, so that a record tells what its figures cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from joulemark.records import Row


@dataclass
class Stages:
    """Seconds and number of times of each stage, in the order in which they were first seen."""

    _seen: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, stage: str, seconds: float) -> None:
        """Once more a stage, of a length in s."""
        spent, times = self._seen.get(stage, (0.0, 0))
        self._seen[stage] = (spent + seconds, times + 1)

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        """The block is a stage, however it ends."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - begin)

    def rows(self) -> list[Row]:
        """Of the table ``stages``: name, s in all, times."""
        return [{"stage": stage, "time_s": spent, "times": times} for stage, (spent, times) in self._seen.items()]
