"""The measuring process of the profiler pass: it profiles one case after another and times none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from joulemark.errors import CaseTimeout, WorkerDied
from joulemark.measure.rank_group import RankGroup
from joulemark.measure.worker import Worker
from joulemark.metrics import PROFILER
from joulemark.plugin.sweep import Target
from joulemark.records import Measurement

PASS = "profiler"


@dataclass
class ProfilingProcess:
    """One process for the profiler pass of all cases, replaced where its recordings lose records.

    A process that holds torch and a CUDA context costs seconds to start, and after a profiler session it may stay
    slower: it is shared by the cases' profiler passes and by nothing else. Several sessions in one process can lose
    records without a word, so a case whose trace does not reconcile is profiled once more in a fresh process. Where
    that one does not reconcile for the same reasons, the reasons are not the sessions before: they replace no
    process again.

    Args:
        start: makes the worker of a target, or one for each of its ranks.
    """

    start: Callable[[Target], Worker | RankGroup]
    _worker: Worker | RankGroup | None = None
    _target: Target | None = None
    _sessions: int = 0
    _inherent: set[str] = field(default_factory=set)

    def profile(self, nodeid: str, target: Target, timeout_s: float | None, keep: Path | None) -> dict[str, Any]:
        """The answer for one item; whatever goes wrong costs the profiler's figures alone.

        Args:
            nodeid: pytest's id of the item.
            target: that it runs on.
            timeout_s: the process is killed after it, and the next item gets a fresh one.
            keep: where the trace stays, of several ranks with the rank before its suffix; None throws it away.
        """
        earlier = self._sessions_on(target)
        reply = self._ask(nodeid, target, timeout_s, keep)
        suspect = _doubts(reply) - self._inherent
        if (suspect or _failed(reply)) and earlier:
            self.close()
            reply = self._ask(nodeid, target, timeout_s, keep)
            self._inherent |= suspect & _doubts(reply)
        if not reply["measurements"]:  # what was measured before a later failure of the item stands
            why = f"the profiler pass ended {reply['outcome']}: {reply['reason']}"
            reply["measurements"] = [Measurement(PASS, missing=dict.fromkeys(PROFILER, why)).to_json()]
        return reply

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.close()
        self._worker, self._target, self._sessions = None, None, 0

    def kill(self) -> None:
        """End the process at once."""
        if self._worker is not None:
            self._worker.kill()

    def _sessions_on(self, target: Target) -> int:
        """How many cases this target's process has profiled; another target's process ends."""
        if self._target != target:
            self.close()
        return self._sessions

    def _ask(self, nodeid: str, target: Target, timeout_s: float | None, keep: Path | None) -> dict[str, Any]:
        if self._worker is None:
            self._worker, self._target = self.start(target), target
        self._sessions += 1
        try:
            reply = dict(self._worker.ask(nodeid, None, timeout_s, trace=None if keep is None else str(keep)))
        except (CaseTimeout, WorkerDied) as error:
            self.close()
            timed_out = isinstance(error, CaseTimeout)
            what = error.what if isinstance(error, CaseTimeout) else str(error)
            return {"outcome": "failed", "reason": what, "measurements": [], "findings": [], "timed_out": timed_out}
        if reply.get("poisoned"):
            self.close()
        return reply


def _failed(reply: Mapping[str, Any]) -> bool:
    """A failure that a fresh process might not have; a time-out would only be waited for once more."""
    return reply["outcome"] == "failed" and not reply.get("timed_out")


def _doubts(reply: Mapping[str, Any]) -> set[str]:
    """Codes of what flags the recording."""
    found = [finding for one in reply["measurements"] for finding in one["findings"]]
    return {one["code"] for one in found if one["flags"]}
