"""A measuring process for one instrument that suffers no other: kept over the cases of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from joulemark.errors import CaseTimeout, WorkerDied
from joulemark.measure.rank_group import RankGroup
from joulemark.measure.worker import Worker
from joulemark.plugin.sweep import Target
from joulemark.records import Json, Measurement


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
    _target: Target | None = None

    @property
    def hello(self) -> Json:
        """The greeting of the process that runs, or ran last; empty before the first."""
        return {} if self._worker is None else self._worker.hello or {}

    def measure(self, nodeid: str, target: Target, timeout_s: float | None, **request: Json) -> dict[str, Any]:
        """The answer for one item, with a Measurement in every case: where all failed, it says why."""
        if self._target != target:
            self.close()
            self._worker, self._target = self.start(target), target
        assert self._worker is not None
        try:
            reply = dict(self._worker.ask(nodeid, None, timeout_s, **request))
        except (CaseTimeout, WorkerDied) as error:
            what = error.what if isinstance(error, CaseTimeout) else str(error)
            reply = {"outcome": "failed", "reason": what, "measurements": [], "findings": []}
        if reply.get("poisoned"):
            self._worker.kill()
        if not reply["measurements"]:  # what was measured before a later failure of the item stands
            why = f"the {self.name} pass ended {reply['outcome']}: {reply['reason']}"
            reply["measurements"] = [Measurement(self.name, missing=dict.fromkeys(self.metrics, why)).to_json()]
        return reply

    def close(self) -> None:
        """Let the process end by itself; a later case starts another."""
        if self._worker is not None:
            self._worker.close()

    def kill(self) -> None:
        """End the process at once."""
        if self._worker is not None:
            self._worker.kill()
