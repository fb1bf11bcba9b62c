"""A measuring process for one instrument that suffers no other: kept over the cases of a sweep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from joulemark.errors import CaseTimeout, WorkerDied
from joulemark.measure.rank_group import RankGroup
from joulemark.measure.replies import died, filled
from joulemark.measure.worker import Worker
from joulemark.plugin.sweep import Target
from joulemark.records import Json


@dataclass
class OwnProcess:
    """One process for one pass of all cases on a target; whatever goes wrong costs that pass's figures alone.

    A process with torch and a CUDA context takes seconds to start, so it is kept until it dies, times out, reports a
    CUDA error, or another target comes.

    Args:
        name: of the pass.
        metrics: that the pass gives.
        start: makes the worker of a target.
    """

    name: str
    metrics: Sequence[str]
    start: Callable[[Target], Worker | RankGroup]
    _worker: Worker | RankGroup | None = None
    _last: Worker | RankGroup | None = None
    _target: Target | None = None
    _cases: int = 0
    _opening: threading.Thread | None = field(default=None, repr=False)

    @property
    def hello(self) -> Json:
        """The greeting of the process that runs, or ran last; empty before the first."""
        return {} if self._last is None else self._last.hello or {}

    def cases_on(self, target: Target) -> int:
        """How many cases the process that runs has had on a target; another target's process ends."""
        if self._target != target:
            self.close()
        return self._cases

    def prepare(self, target: Target) -> None:
        """Start the process of a target ahead of its first case: it imports, and touches no device before it may."""
        self.cases_on(target)
        if self._worker is None:
            worker = self._worker = self._last = self.start(target)
            self._target = target
            if isinstance(worker, Worker):
                worker.prepare()

    def open_beside(self) -> None:
        """Let the prepared process open its instruments; returns once it has the turn at the device.

        So it has its turn before any case of the process that times, which imports and builds meanwhile and waits for
        the turn before its warm-up. A process that fails here is started again with its first case, which says why;
        one that hangs is killed.
        """
        worker = self._worker
        if not isinstance(worker, Worker) or not worker.waits:
            return
        with suppress(WorkerDied):
            worker.open_instruments()
            self._opening = threading.Thread(target=self._greet, args=(worker,), name="joulemark-opening", daemon=True)
            self._opening.start()

    @staticmethod
    def _greet(worker: Worker) -> None:
        with suppress(WorkerDied):
            worker.ensure_started()

    def _opened(self) -> None:
        """Wait for the thread that waits for the process."""
        thread, self._opening = self._opening, None
        if thread is not None:
            thread.join()

    def measure(self, nodeid: str, target: Target, timeout_s: float | None, **request: Json) -> dict[str, Any]:
        """The answer for one item, with a Measurement in every case: where all failed, it says why."""
        return self.filled(self.ask(nodeid, target, timeout_s, **request))

    def ask(self, nodeid: str, target: Target, timeout_s: float | None, **request: Json) -> dict[str, Any]:
        """The answer for one item; that of a process that died or timed out is ``failed``, and the next is fresh."""
        self.cases_on(target)
        self._opened()
        if self._worker is None:
            self._worker = self._last = self.start(target)
            self._target = target
        self._cases += 1
        begin = time.time()
        try:
            reply = dict(self._worker.ask(nodeid, None, timeout_s, **request))
        except (CaseTimeout, WorkerDied) as error:
            self.close()
            return {**died(error, begin), "timed_out": isinstance(error, CaseTimeout)}
        if reply.get("poisoned"):
            self.kill()
        return reply

    def filled(self, reply: dict[str, Any]) -> dict[str, Any]:
        """The answer with a Measurement that says why there is none; what was measured before a failure stands."""
        return filled(reply, self.name, self.metrics)

    def ask_to_end(self) -> None:
        """Tell the process to end; :meth:`close` waits for it."""
        if isinstance(self._worker, Worker) and self._opening is None:
            self._worker.ask_to_end()

    def close(self) -> None:
        """Let the process end by itself; a later case starts another."""
        self._opened()
        if self._worker is not None:
            self._worker.close()
        self._forget()

    def kill(self) -> None:
        """End the process at once; a later case starts another."""
        if self._opening is not None and isinstance(self._worker, Worker):
            self._worker.signal_end()
        self._opened()
        if self._worker is not None:
            self._worker.kill()
        self._forget()

    def _forget(self) -> None:
        self._worker, self._target, self._cases = None, None, 0
