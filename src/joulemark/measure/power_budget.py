"""A power budget that the GPUs of one machine share: cases that would draw more together wait for one another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

_POLL_S = 0.1


class PowerBudget:
    """Shares of a budget, taken by processes that use one folder.

    Each share is a file that its process holds a lock on, so that the share of a process that was killed is free.

    Args:
        folder: of the shares; made where it is missing.
        limit_w: the budget, in W.
        sleep: waits some seconds.
    """

    def __init__(self, folder: Path, limit_w: float, sleep: Callable[[float], None] = time.sleep) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.limit_w = limit_w
        self._sleep = sleep

    @contextmanager
    def share(self, watts: float) -> Iterator[None]:
        """Wait until ``watts`` are left of the budget and hold them; alone, a process may exceed it."""
        own = FileLock(self.folder / f"{os.getpid()}.share", thread_local=False)
        while not self._take(own, watts):
            self._sleep(_POLL_S)
        try:
            yield
        finally:
            own.release()

    def _take(self, own: FileLock, watts: float) -> bool:
        with FileLock(self.folder / "arbiter.lock"):
            taken = sum(self._taken(path) for path in self.folder.glob("*.share") if str(path) != str(own.lock_file))
            if taken and taken + watts > self.limit_w:
                return False
            own.acquire(timeout=0)
            self._watts_of(Path(own.lock_file)).write_text(repr(watts), encoding="ascii")
            return True

    def _taken(self, path: Path) -> float:
        """What a share holds, in W; 0.0 for one that nobody holds any more."""
        lock = FileLock(path, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return float(self._watts_of(path).read_text(encoding="ascii"))
        lock.release()
        return 0.0

    @staticmethod
    def _watts_of(share: Path) -> Path:
        return share.with_suffix(".watts")
