"""Time limits: for what cannot be asked to stop, compilers that tune for minutes, and for the process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S = 2.0
"""The signal comes again until it has got out of everything that catches it."""


class TooLong(BaseException):
    """Time is up. No ``Exception``: a compiler that skips a choice after any error would go on."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Run a block for at most so many seconds, by a signal to this process's main thread.

    Python's own code is interrupted, a call into a library once it returns. Outside of the main thread, where no
    signals arrive, there is no limit.

    Raises:
        TooLong: time was up.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def ends_when_asked(code: int) -> Iterator[None]:
    """End by ``SystemExit`` with this code at SIGTERM: so a process that is at work is told from one that hangs.

    Outside of the main thread the signal does what it did.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise SystemExit(code)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
