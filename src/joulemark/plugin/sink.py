"""Where the records of a session go."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from joulemark.plugin.journal import Seen
from joulemark.records import Record


class Sink(Protocol):
    """Where records go: the session's own journal, or a courier to another process that keeps it.

    Args:
        path: of the result file.
        records: what has been handed over, the latest at least.
        total: number of items that this process expects to measure.
        wall_s: wall time of the session so far, in s.
    """

    path: Path
    records: list[Record]
    total: int

    @property
    def wall_s(self) -> float: ...

    def keep(self, record: Record, seen: Seen) -> Record:
        """Store a record."""
        ...
