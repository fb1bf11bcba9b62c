"""The parent of a sweep: has items measured in the child and hands each record on as it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from joulemark.errors import ConfigurationError
from joulemark.measure.replies import unmeasured
from joulemark.measure.scaling import with_efficiency
from joulemark.plugin.budget import Budget
from joulemark.plugin.junit import properties_of
from joulemark.plugin.outcomes import conclude, hold_against
from joulemark.plugin.record import record_of
from joulemark.plugin.replay import replay
from joulemark.plugin.schedule import Planned
from joulemark.plugin.sink import Sink
from joulemark.plugin.sweep import CASE, Target, case_of_function
from joulemark.plugin.workers import Workers
from joulemark.records import Case, Environment, Json, Record

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from joulemark.plugin.baseline import Baseline
    from joulemark.plugin.options import BenchOptions


class Sweep:
    """Items, one after another: each is measured, its record handed on and its outcome told to pytest.

    Args:
        config: pytest's.
        options: of the session.
        targets: devices under test.
        sink: where records go.
        finished: ids of cases that a resumed file already holds.
        scratch: folder in which to make one for answers and output of the workers; the system's by default.
        pool: UUIDs of the GPUs that may work together, by model.

    Attributes:
        baseline: what each case is held against; None without ``--bench-baseline``.
        answers: of items that a cluster has measured, until they are stored.
        budget: of time.
        earlier: records of the file that is resumed.
        turn: entered around the measuring of a case; waits where GPUs share a power budget.
        workers: the measuring processes.
    """

    def __init__(
        self,
        config: pytest.Config,
        options: BenchOptions,
        targets: list[Target],
        sink: Sink,
        finished: frozenset[str] = frozenset(),
        scratch: Path | None = None,
        pool: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.config = config
        self.options = options
        self.targets = targets
        self.sink = sink
        self.finished = finished
        self.budget = Budget(options.budget_s, sink)
        self.workers = Workers(config, options, targets, dict(pool or {}), sink.path, scratch)
        self.answers: dict[str, dict[str, Any]] = {}
        self.earlier: tuple[Record, ...] = ()
        self.skipped_for_budget = 0
        self.unrecorded = 0
        self.baseline: Baseline | None = None
        self.turn: Callable[[Case], AbstractContextManager[None]] = lambda case: nullcontext()
        self._nodeids: dict[str, str] = {}
        self._oom: dict[str, int] = {}

    # -- running one item

    def run_item(self, item: pytest.Function, benchmark: Any) -> None:
        """Measure one item, store its record and turn its outcome into pytest's.

        Raises:
            pytest.skip.Exception: unsupported here, already in the resumed file, or the budget is spent.
            pytest.fail.Exception: failed, or flagged or out of memory under ``--bench-strict``.
        """
        # Counted until the record is stored: whatever ends the item before (another plugin's time-out, say), the file
        # does not claim to hold every case.
        self.unrecorded += 1
        case, target = self._to_measure(item)
        reply = self._reply(item, case, target)
        record = self._keep(self._record(item, case, target, reply), target, reply)
        self.unrecorded -= 1
        item.user_properties.extend(properties_of(record))
        replay(item, benchmark, record)
        if reply.get("expected"):
            pytest.xfail(record.reason or "")
        conclude(record, reply.get("longrepr"), reply.get("output", ""), self.options.strict)
        if self.baseline is not None:
            hold_against(self.baseline, item, record)

    def _to_measure(self, item: pytest.Function) -> tuple[Case, Target]:
        """The case of an item and what it runs on; ends the item where it is not to be measured."""
        try:
            case, target = self.case_of(item)
        except ConfigurationError as error:
            pytest.fail(str(error), pytrace=False)
        twin = self._nodeids.setdefault(case.case_id, item.nodeid)
        if twin != item.nodeid:
            pytest.fail(f"{case.label} is the case of {twin} already: rename one of the two functions", pytrace=False)
        if case.case_id in self.finished:
            self.unrecorded -= 1
            pytest.skip("already in the file that is resumed")
        if self.budget.spent and item.nodeid not in self.answers:
            self.skipped_for_budget += 1
            pytest.skip(
                f"the budget of {self.options.budget_s:g} s is spent; go on with --bench-resume {self.sink.path}"
            )
        return case, target

    def _reply(self, item: pytest.Function, case: Case, target: Target) -> Json:
        """What came of a case, be it measured or not."""
        known = self._fitted_not(case)
        if known is not None:
            return unmeasured("oom", f"not tried: batch {known} of this series did not fit")
        if target.lacks is not None:
            return unmeasured("unsupported", target.lacks)
        with self.turn(case):
            return self._measure(item, case, target)

    def case_of(self, item: pytest.Function) -> tuple[Case, Target]:
        """The case that an item is, and what it runs on.

        Raises:
            ConfigurationError: the item's id names no case that a later run could find again.
        """
        if CASE in item.stash:
            return item.stash[CASE]
        callspec = getattr(item, "callspec", None)
        target = callspec.params.get("joulemark_gpu", self.targets[0]) if callspec else self.targets[0]
        return case_of_function(item, target), target

    def _measure(self, item: pytest.Function, case: Case, target: Target) -> dict[str, Any]:
        """The reply for an item: that of a cluster, or of this machine's measuring processes."""
        if item.nodeid in self.answers:
            reply = self.answers.pop(item.nodeid)
        else:
            reply = self.workers.measure(item, case, target, self.budget.share)
        if reply["outcome"] == "oom":
            self.note_oom(case)
        return reply

    def _fitted_not(self, case: Case) -> int | None:
        """A smaller batch of the case's series that was out of memory."""
        known = self._oom.get(case.series.case_id)
        return known if known is not None and case.batch_size is not None and case.batch_size > known else None

    def needs_no_measuring(self, case: Case) -> bool:
        """Whether the case ends without being measured: its series did not fit, or the budget is spent."""
        return self._fitted_not(case) is not None or self.budget.spent

    def note_oom(self, case: Case) -> None:
        """Larger batches of this case's series are not tried."""
        if case.batch_size is not None:
            series = case.series.case_id
            self._oom[series] = min(case.batch_size, self._oom.get(series, case.batch_size))

    def plan(self, items: Iterable[pytest.Item]) -> list[Planned]:
        """These items with their cases, for the process that hands them out."""
        out = []
        for item in items:
            case, target = None, self.targets[0]
            if isinstance(item, pytest.Function):
                with suppress(ConfigurationError):
                    case, target = self.case_of(item)
            out.append(Planned(item.nodeid, self._slug_of_worker(target), case))
        return out

    def ranks(self, items: Iterable[pytest.Item]) -> list[Target]:
        """Of the items' targets, those that take several GPUs."""
        return list(
            dict.fromkeys(item.stash[CASE][1] for item in items if CASE in item.stash and item.stash[CASE][1].peers)
        )

    def _slug_of_worker(self, target: Target) -> str:
        """Ranks have their model's slug; a process that measures on one GPU says so of them under its own."""
        if target.world_size == 1:
            return target.slug
        return next((one.slug for one in self.targets if one.model == target.model), target.slug)

    def case_ids(self, items: Iterable[pytest.Item]) -> frozenset[str]:
        """Ids of the cases that these items are; an item whose case is not valid has none."""
        return frozenset(one.case.case_id for one in self.plan(items) if one.case is not None)

    # -- records

    def _record(self, item: pytest.Item, case: Case, target: Target, reply: Mapping[str, Any]) -> Record:
        record = record_of(item.nodeid, case, target, reply, self.options)
        return record if case.world_size == 1 else with_efficiency(record, self._of_one_rank(record))

    def _of_one_rank(self, record: Record) -> Record | None:
        """This run's record of the same case with one rank, on the GPU of rank 0."""
        case = record.case
        for one in (*self.earlier, *self.sink.records):
            same = replace(one.case, world_size=case.world_size, gpu_model=case.gpu_model) == case
            if same and one.case.world_size == 1 and one.gpu_uuid == record.gpu_uuid:
                return one
        return None

    def _keep(self, record: Record, target: Target, reply: Mapping[str, Any]) -> Record:
        told = reply.get("environment")
        elsewhere = None if told is None else Environment(told["facts"], told["tiers"], told["notes"])
        self.budget.done += 1
        return self.sink.keep(record, self.workers.seen(target, elsewhere))

    # -- in process

    def keep_in_process(self, item: pytest.Function, reply: Mapping[str, Any]) -> Record:
        """Store what this very process measured (``--bench-inprocess``, ``--pdb``)."""
        case, target = self.case_of(item)
        return self._keep(self._record(item, case, target, reply), target, reply)
