"""The measuring process of the profiler pass: it profiles one case after another and times none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from joulemark.measure.rank_group import RankGroup
from joulemark.measure.worker import Worker
from joulemark.metrics import PROFILER
from joulemark.plugin.own_process import OwnProcess
from joulemark.plugin.sweep import Target

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
    _inherent: set[str] = field(default_factory=set)
    _own: OwnProcess = field(init=False)

    def __post_init__(self) -> None:
        self._own = OwnProcess(PASS, PROFILER, self.start)

    def profile(self, nodeid: str, target: Target, timeout_s: float | None, keep: Path | None) -> dict[str, Any]:
        """The answer for one item; whatever goes wrong costs the profiler's figures alone.

        Args:
            nodeid: pytest's id of the item.
            target: that it runs on.
            timeout_s: the process is killed after it, and the next item gets a fresh one.
            keep: where the trace stays, of several ranks with the rank before its suffix; None throws it away.
        """
        trace = None if keep is None else str(keep)
        earlier = self._own.cases_on(target)
        reply = self._own.ask(nodeid, target, timeout_s, trace=trace)
        suspect = _doubts(reply) - self._inherent
        if (suspect or _failed(reply)) and earlier:
            self._own.close()
            reply = self._own.ask(nodeid, target, timeout_s, trace=trace)
            self._inherent |= suspect & _doubts(reply)
        return self._own.filled(reply)

    def ask_to_end(self) -> None:
        """Tell the process to end; :meth:`close` waits for it."""
        self._own.ask_to_end()

    def close(self) -> None:
        """End the process."""
        self._own.close()

    def kill(self) -> None:
        """End the process at once."""
        self._own.kill()


def _failed(reply: Mapping[str, Any]) -> bool:
    """A failure that a fresh process might not have; a time-out would only be waited for once more."""
    return reply["outcome"] == "failed" and not reply.get("timed_out")


def _doubts(reply: Mapping[str, Any]) -> set[str]:
    """Codes of what flags the recording."""
    found = [finding for one in reply["measurements"] for finding in one["findings"]]
    return {one["code"] for one in found if one["flags"]}
