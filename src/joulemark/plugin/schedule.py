"""The order in which cases go to the workers of pytest-xdist: the longest first, each to a GPU that may run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from joulemark.errors import UnreadableInput
from joulemark.records import Case, Run
from joulemark.store import read_run

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

_RECENT_FILES = 12
_AHEAD = 2
"""A worker of xdist begins an item only when it knows the next one."""


@dataclass(frozen=True)
class Planned:
    """One item, as the workers have collected it.

    Args:
        nodeid: pytest's.
        slug: of the target that may run it.
        case: None where the item has no valid one.
    """

    nodeid: str
    slug: str
    case: Case | None


@dataclass(frozen=True)
class Expected:
    """What a case took when it was measured last.

    Args:
        seconds: wall time of the whole case.
        power_w: of the board, in W; None when it was not measured.
    """

    seconds: float
    power_w: float | None


def recent_runs(results: Path) -> list[Run]:
    """The newest result files under a folder, newest first; what cannot be read is left out."""
    paths = sorted(results.glob("*/sweep-*.jsonl"), key=lambda path: path.name, reverse=True)
    runs = []
    for path in paths[:_RECENT_FILES]:
        try:
            runs.append(read_run(path))
        except UnreadableInput:
            continue
    return runs


def expectations(runs: Iterable[Run]) -> dict[str, Expected]:
    """By case id, of the first run that has measured the case."""
    found: dict[str, Expected] = {}
    for run in runs:
        for record in run.records:
            if record.outcome in ("ok", "flagged") and record.window_utc is not None:
                begin, end = record.window_utc
                found.setdefault(record.case_id, Expected(end - begin, record.value("power_w")))
    return found


def longest_first(plan: Sequence[Planned], expected: Mapping[str, Expected], otherwise_s: float) -> list[int]:
    """Positions in ``plan``, by the time that a case will take; among equals the larger batch, then the plan's order.

    Args:
        plan: items as collected.
        expected: see :func:`expectations`.
        otherwise_s: for a case that was never measured, in s.
    """

    def key(index: int) -> tuple[float, int, int]:
        case = plan[index].case
        known = None if case is None else expected.get(case.case_id)
        seconds = otherwise_s if known is None else known.seconds
        return -seconds, -(0 if case is None or case.batch_size is None else case.batch_size), index

    return sorted(range(len(plan)), key=key)


class LongestFirst:
    """Implements xdist's protocol ``Scheduling``: each worker gets the longest case left that its GPU may run.

    Args:
        config: pytest's.
        workers: number of workers at the start.
        slug_of: of a worker, the slug of the target that it measures.
        order: see :func:`longest_first`; asked once, when all workers have collected.
        plan: of the items.
    """

    def __init__(
        self,
        config: pytest.Config,
        workers: int,
        slug_of: Callable[[WorkerController], str],
        plan: Callable[[], Sequence[Planned]],
        order: Callable[[Sequence[Planned]], Sequence[int]],
    ) -> None:
        self.config = config
        self._workers = workers
        self._slug_of = slug_of
        self._ask_plan = plan
        self._ask_order = order
        self._collected: dict[WorkerController, list[str]] = {}
        self._given: dict[WorkerController, list[int]] = {}
        self._plan: Sequence[Planned] | None = None
        self._rank: dict[int, int] = {}
        self._left: dict[str, list[int]] = {}

    @property
    def nodes(self) -> list[WorkerController]:
        """Workers that are up."""
        return list(self._given)

    @property
    def collection_is_completed(self) -> bool:
        """Whether every worker has collected; later ones replace those that died."""
        return self._plan is not None or len(self._collected) >= self._workers

    @property
    def tests_finished(self) -> bool:
        """Whether nothing is left to hand out and no worker waits for more."""
        if self._plan is None:
            return False
        return not any(self._left.values()) and all(len(given) < _AHEAD for given in self._given.values())

    @property
    def has_pending(self) -> bool:
        """Whether an item has not ended."""
        return any(self._left.values()) or any(self._given.values())

    def add_node(self, node: WorkerController) -> None:
        """A worker has come up."""
        self._given[node] = []

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        """A worker has collected.

        Raises:
            pytest.UsageError: other items than the worker before it.
        """
        first = next(iter(self._collected.values()), None)
        if first is not None and list(collection) != first:
            odd = next((a for a, b in zip(collection, first, strict=False) if a != b), "their number")
            raise pytest.UsageError(
                f"--bench -n: the workers do not collect the same benchmarks ({odd} differs): "
                "give parameters a fixed order and fixed ids"
            )
        self._collected[node] = list(collection)

    def schedule(self) -> None:
        """Hand out the first items: the longest to each worker, then a second one to the least loaded first."""
        if self._plan is None:
            self._plan = self._ask_plan()
            for rank, index in enumerate(self._ask_order(self._plan)):
                self._rank[index] = rank
                self._left.setdefault(self._plan[index].slug, []).append(index)
            for node in self.nodes:
                self._give(node)
            for node in reversed(self.nodes):
                self._feed(node)
        else:
            self._feed_all()

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """A worker has ended an item."""
        self._given[node].remove(item_index)
        self._feed(node)

    def mark_test_pending(self, item: str) -> None:
        """An item is to be run again."""
        assert self._plan is not None
        self._return([next(index for index, one in enumerate(self._plan) if one.nodeid == item)])

    def remove_pending_tests_from_node(self, node: WorkerController, indices: Sequence[int]) -> None:
        """Never called: nothing is taken back from a worker that lives."""
        raise NotImplementedError

    def remove_node(self, node: WorkerController) -> str | None:
        """A worker has ended; the item that it was at if it died, and what it had not begun goes to others."""
        given = self._given.pop(node)
        if self._plan is None:
            self._collected.pop(node, None)
            return None
        if not given:
            return None
        self._return(given[1:])
        return self._plan[given[0]].nodeid

    def _return(self, indices: Sequence[int]) -> None:
        assert self._plan is not None
        for index in indices:
            queue = self._left.setdefault(self._plan[index].slug, [])
            queue.append(index)
            queue.sort(key=self._rank.__getitem__)
        self._feed_all()

    def _feed_all(self) -> None:
        for node in self.nodes:
            if node in self._collected:
                self._feed(node)

    def _feed(self, node: WorkerController) -> None:
        """Keep a worker supplied; one for which nothing is left may end."""
        while len(self._given[node]) < _AHEAD and self._give(node):
            pass
        if len(self._given[node]) < _AHEAD and not node.shutting_down:
            node.shutdown()

    def _give(self, node: WorkerController) -> bool:
        queue = self._left.get(self._slug_of(node))
        if not queue or node.shutting_down:
            return False
        index = queue.pop(0)
        self._given[node].append(index)
        node.send_runtest_some([index])
        return True
