"""Turns at a device: of the processes of a session that share it, one at a time works there."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TURN_VARIABLE = "JOULEMARK_WORKER_TURN"
"""Of a measuring process: the file whose lock is the turn at its device."""


@contextmanager
def turn_at(path: Path | None) -> Iterator[None]:
    """Wait for the turn and keep it over the block; the kernel takes it from a process that dies.

    Args:
        path: the file that stands for the device; None where no other process shares it.
    """
    if path is None:
        yield
        return
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a copy that the benchmark forked holds the file open
