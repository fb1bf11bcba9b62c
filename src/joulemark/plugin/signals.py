"""Signals that end a sweep in order."""

from __future__ import annotations

import signal
from typing import Any


class Interrupts:
    """A cancelled job gets SIGTERM, a closed terminal SIGHUP: both end the sweep as an interrupt does."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def catch(self) -> None:
        """Until :meth:`release`; what is ignored already, as SIGHUP is under nohup, stays so. In the main thread."""
        for one in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(one) is not signal.SIG_IGN:
                self._before[one] = signal.signal(one, _interrupt)

    def release(self) -> None:
        """Put the old handlers back."""
        for number, before in self._before.items():
            signal.signal(number, before)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(f"signal {signal.Signals(number).name}")
