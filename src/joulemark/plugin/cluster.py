"""``--bench-cluster``: the items of a session are measured on the GPUs of a cluster, and stored here as they end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from joulemark.errors import ConfigurationError
from joulemark.measure.dispatch import Answer, Dispatcher, Job, Seat
from joulemark.measure.plan import ALONE
from joulemark.measure.replies import unmeasured
from joulemark.measure.station import StationPlan
from joulemark.plugin.inherited import child_arguments, variables_for
from joulemark.plugin.parent import Sweep
from joulemark.plugin.sweep import Target
from joulemark.records import Case, Finding

if TYPE_CHECKING:
    from joulemark.measure.ray_cluster import RayCluster
    from joulemark.plugin.journal import Journal
    from joulemark.plugin.options import BenchOptions


def open_cluster(config: pytest.Config, options: BenchOptions) -> RayCluster:
    """Connect, and ask for an actor on every GPU.

    Raises:
        ConfigurationError: the cluster does not answer, or has no GPU.
        Unsupported: ray is not installed.
    """
    from joulemark.measure.ray_cluster import RayCluster

    assert options.cluster is not None
    given = tuple(str(one) for one in config.invocation_params.args)
    plan = StationPlan(
        tuple(child_arguments(config)),
        ",".join(one for one in options.collect if one not in ALONE) or "timing",
        str(config.invocation_params.dir),
        options.processes,
        options.timeout_s,
        options.anonymize,
        given,
        None if options.cupti is None else str(options.cupti),
    )
    return RayCluster(options.cluster, plan)


class ClusterLoop:
    """Replaces pytest's own loop over items: they are concluded in the order in which their answers come.

    Args:
        sweep: reports.
        journal: stores.
        cluster: measures.
        options: of the session.
        targets: that were chosen, a model or a GPU each.
    """

    def __init__(
        self, sweep: Sweep, journal: Journal, cluster: RayCluster, options: BenchOptions, targets: list[Target]
    ) -> None:
        self.sweep = sweep
        self.journal = journal
        self.planned: dict[str, Case] = {}
        self.cluster = cluster
        self.options = options
        self._targets = {_where(one, options): one for one in targets}
        journal.keeps_samples = False  # a cluster's sweep may have millions of records: their samples are in the file
        cluster.keep(lambda seat: seat.uuid in self._targets or seat.model in self._targets)
        cluster.variables = self._variables
        cluster.budget_s = self._budget_s

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Measure all items."""
        if session.config.option.collectonly or session.testsfailed:
            return None  # pytest's own loop says what is wrong with a collection that failed
        items = {item.nodeid: item for item in session.items}
        jobs = self._jobs(items)
        planned = {job.nodeid for job in jobs}
        for nodeid, item in items.items():
            if nodeid not in planned:  # nothing to measure: its own protocol says why
                self._conclude(session, item)
        for answers in Dispatcher(self.cluster, jobs, self._refuse).run():
            with self.journal.together():
                for answer in answers:
                    self._take(answer)
                    self._conclude(session, items[answer.job.nodeid])
        return True

    def _jobs(self, items: Mapping[str, pytest.Item]) -> list[Job]:
        jobs: dict[str, Job] = {}
        for nodeid, item in items.items():
            if not isinstance(item, pytest.Function):
                continue
            try:
                case, target = self.sweep.case_of(item)
            except ConfigurationError:
                continue
            if case.case_id not in self.sweep.finished and target.lacks is None:
                jobs.setdefault(case.case_id, Job(nodeid, case.case_id, _where(target, self.options)))
                self.planned[case.case_id] = case
        return list(jobs.values())

    def _refuse(self, job: Job) -> dict[str, Any] | None:
        """Anything but None where the item concludes by itself: its series did not fit, or the budget is spent."""
        return {} if self.sweep.needs_no_measuring(self.planned[job.case_id]) else None

    def _take(self, answer: Answer) -> None:
        """Put an answer where the item finds it; one that was refused has none."""
        reply = answer.reply
        if answer.reason is not None:
            reply = unmeasured("failed", answer.reason)
        if not reply:
            return
        if answer.attempt > 1 and answer.reason is None:
            text = f"measured in attempt {answer.attempt}: the node of the one before was lost"
            reply["findings"] = [*reply["findings"], Finding("node_lost", text).to_json()]
        self.sweep.answers[answer.job.nodeid] = reply

    @staticmethod
    def _conclude(session: pytest.Session, item: pytest.Item) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _variables(self, seat: Seat) -> dict[str, str]:
        """For a seat's measuring process: its own GPU, under the name that the session's target has."""
        target = self._targets.get(seat.uuid or "") or self._targets[seat.model]
        here = replace(target, uuid=seat.uuid)
        return variables_for(here, [here], {}, several=len(self._targets) > 1)

    def _budget_s(self) -> float | None:
        """Seconds for a case's passes: its share of what is left, times the GPUs that work beside each other."""
        share = self.sweep.budget.share()
        return None if share is None else share * max(1, self.cluster.seats)


def _where(target: Target, options: BenchOptions) -> str:
    """A target that was named as one GPU is measured on that GPU, one that stands for a model on any of it."""
    named = any(part.strip().upper().startswith(("GPU-", "MIG-")) for part in options.gpus.split(","))
    alone = options.gpus.strip() == "all" or named or target.slug != target.model
    return target.uuid if alone and target.uuid is not None else target.model
