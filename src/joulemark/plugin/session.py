"""What ``--bench`` adds to a pytest session, in the parent and in the measuring process alike."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from joulemark.errors import ConfigurationError, JoulemarkError, Unsupported
from joulemark.plugin import distributed
from joulemark.plugin.left_out import LeftOut
from joulemark.plugin.options import BenchOptions
from joulemark.plugin.signals import Interrupts
from joulemark.plugin.strays import is_stray
from joulemark.plugin.sweep import CASE, CPU, SweepMarker, Target, cells, workload_of
from joulemark.plugin.targets import claim_for, pool_of, probed, select_targets, stations_of

if TYPE_CHECKING:
    from joulemark.device.gpu import Inventory
    from joulemark.device.lease import Choice, Leases
    from joulemark.measure.ray_cluster import RayCluster
    from joulemark.plugin.baseline import Baseline
    from joulemark.plugin.child import Measuring
    from joulemark.plugin.distributed import Controller, Courier
    from joulemark.plugin.fixture import Bench
    from joulemark.plugin.journal import Journal
    from joulemark.plugin.parent import Sweep
    from joulemark.plugin.schedule import Planned
    from joulemark.records import Run
    from joulemark.report.comparison import Comparison
    from joulemark.workloads.base import Step, Workload

SESSION = pytest.StashKey["BenchSession"]()


def session_of(config: pytest.Config) -> BenchSession:
    """The session's state.

    Raises:
        pytest.UsageError: a fixture of joulemark was asked for outside ``--bench``.
    """
    try:
        return config.stash[SESSION]
    except KeyError:
        raise pytest.UsageError("the fixtures bench and workload need --bench") from None


class BenchSession:
    """Hooks of a session with ``--bench``, in one of four roles.

    Alone, items are measured through :class:`joulemark.plugin.parent.Sweep` and stored in a journal. Under
    pytest-xdist the controller has the journal and each worker a sweep. In the measuring process
    (``--bench-worker``) and under a debugger, the fixtures do the work.
    """

    def __init__(self, config: pytest.Config, options: BenchOptions) -> None:
        self.config = config
        self.options = options
        self.own: dict[str, Workload] = {}
        self.journal: Journal | None = None
        self.sweep: Sweep | None = None
        self.courier: Courier | None = None
        self.controller: Controller | None = None
        self.measuring: Measuring | None = None
        self.leases: Leases | None = None
        self.cluster: RayCluster | None = None
        self.targets: list[Target] = []
        self.pool: Mapping[str, Sequence[str]] = {}
        self.stray: list[str] = []
        self.plan: Sequence[Planned] = ()
        self.resumed: Run | None = None
        self.baseline: Baseline | None = None
        self.finished: frozenset[str] = frozenset()
        self.inventory: Inventory | None = None
        self.interrupted = False
        self._uncollected = False
        self.concluded = 0
        self._late = 0
        self._interrupts = Interrupts()
        self._lease_files: list[int] = []
        self.is_child = options.worker is not None
        if self.is_child:
            self._configure_child()
        elif distributed.is_worker(config):
            self._configure_worker()
        else:
            self._configure_parent()
        if not self.is_child:
            self.several = len(self.targets) > 1
        self.left_out = LeftOut(config, options, self.targets, self.journal, self.sweep, self.resumed)
        config.pluginmanager.register(self.left_out, "joulemark-left-out")

    def _configure_child(self) -> None:
        from joulemark.device.lease import join_lease
        from joulemark.plugin.inherited import targets_from_parent

        self._lease_files = join_lease(os.environ)
        inherited = targets_from_parent()
        if inherited is None:
            self._find_devices()
            self.current, self.several = self.targets[0], len(self.targets) > 1
        else:
            self.targets, self.pool = inherited.targets, inherited.pool
            self.current, self.several = inherited.current, inherited.several
        from joulemark.plugin.child import ChildLoop, Measuring

        self.measuring = Measuring(self.options)
        loop = ChildLoop(self.options, self.measuring, self.current, self.own)
        self.config.pluginmanager.register(loop, "joulemark-child")

    def _configure_worker(self) -> None:
        """Measure on the GPU that the controller has assigned; it stores what comes of it."""
        from joulemark.plugin.parent import Sweep

        given = distributed.Assignment.of(self.config)
        self.targets = list(given.targets)
        self._read_resumed()
        self.courier = distributed.Courier(given.path, given.started)
        self.sweep = Sweep(self.config, self.options, self.targets, self.courier, self.finished, given.scratch)
        self.sweep.workers.leases = given.leases()
        self.sweep.turn = given.turns(self.options.power_budget_w)
        self.assignment = given
        self._tell_of_earlier()

    def _configure_parent(self) -> None:
        from joulemark.report.output import check_report_path
        from joulemark.store import check_writable

        for path in self.options.reports:
            check_report_path(path)
        controls = distributed.is_controller(self.config)
        if controls:
            distributed.refuse_other_ways(self.options)
        self._find_devices()
        assert self.inventory is not None
        self._read_resumed()
        self.journal = self._new_journal()
        check_writable(self.journal.path)
        if controls:
            stations = stations_of(self.options, self.inventory, self.targets)
            distributed.check_workers(self.config, stations, self.options)
            self.controller = distributed.Controller(self, stations)
            self.config.pluginmanager.register(self.controller, "joulemark-controller")
            return
        from joulemark.plugin.parent import Sweep

        self.sweep = Sweep(self.config, self.options, self.targets, self.journal, self.finished, pool=self.pool)
        self._tell_of_earlier()
        if self.cluster is not None:
            from joulemark.plugin.cluster import ClusterLoop

            loop = ClusterLoop(self.sweep, self.journal, self.cluster, self.options, self.targets)
            self.config.pluginmanager.register(loop, "joulemark-cluster")
        if not self.options.isolate:
            from joulemark.plugin.child import Measuring
            from joulemark.plugin.in_process import InProcess, show_one_gpu
            from joulemark.plugin.instruments import shared_gpu

            self.measuring = Measuring(self.options)
            uuid = self.targets[0].uuid
            if uuid is not None:
                show_one_gpu(self.config, uuid)
            shared = None if uuid is None else shared_gpu(uuid)
            self.config.pluginmanager.register(InProcess(self.sweep, shared), "joulemark-in-process")

    def _find_devices(self) -> None:
        """The GPUs of this machine, or those that a cluster gives."""
        if self.options.cluster is None:
            self.inventory = probed(self.config)
            self.targets = select_targets(self.options, self.inventory)
            self.pool = pool_of(self.options, self.inventory, self.targets)
            return
        from joulemark.plugin.cluster import open_cluster

        self.cluster = open_cluster(self.config, self.options)
        self.inventory = self.cluster.inventory()
        chosen = select_targets(self.options, self.inventory)
        self.targets = [one if one.on_gpu else replace(CPU, no_gpu=self.cluster.no_gpu) for one in chosen]

    def _read_resumed(self) -> None:
        from joulemark.store import finished_case_ids, read_run

        if self.options.resume is not None:
            self.resumed = read_run(self.options.resume)
            self.finished = frozenset(finished_case_ids(self.resumed))

    def _tell_of_earlier(self) -> None:
        """What the file that is resumed says of the cases to come."""
        assert self.sweep is not None
        self.sweep.earlier = () if self.resumed is None else self.resumed.records
        for record in () if self.resumed is None else self.resumed.records:
            if record.outcome == "oom":
                self.sweep.note_oom(record.case)

    def _new_journal(self) -> Journal:
        from joulemark.plugin.journal import Journal
        from joulemark.store import new_path, new_run_id

        assert self.inventory is not None
        if self.resumed is not None and self.options.resume is not None:
            return Journal(self.config, self.options, self.inventory, self.options.resume, self.resumed.run_id)
        run_id = new_run_id()
        folder = self.targets[0].model if len({one.model for one in self.targets}) == 1 else "several-gpus"
        path = new_path(self.options.results, folder, time.time(), run_id)
        return Journal(self.config, self.options, self.inventory, path, run_id)

    # -- leases

    def lease(self, targets: list[Target], choose: Choice | None = None) -> None:
        """Hold the GPUs of these targets, or those that ``choose`` takes, until the session ends.

        Raises:
            pytest.UsageError: another session measures on them.
        """
        from joulemark.device.lease import LeaseFolder, every

        assert self.inventory is not None
        each = {uuid: replace(one, uuid=uuid) for one in targets for uuid in one.uuids}
        claims = [claim_for(one, self.options, self.inventory) for one in each.values()]
        if self.options.lease_s is None or not claims:
            return
        folder = LeaseFolder(self.options.lease_dir)
        try:
            self.leases = folder.acquire(claims, self.options.lease_s, self.tell, choose or every)
        except JoulemarkError as error:
            raise pytest.UsageError(str(error)) from error

    def tell(self, line: str) -> None:
        """Show a line on the terminal, on one of its own."""
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(line)

    # -- collection

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Ask the project's hook for own workloads, before anything is collected; make a cancelled job end in order."""
        for given in self.config.hook.pytest_joulemark_workloads(config=self.config):
            self.own.update(given or {})
        if self.is_child:
            return
        self._check_models()
        if threading.current_thread() is threading.main_thread():
            self._interrupts.catch()
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and reporter.verbosity == 0:
            reporter.showfspath = False

    @property
    def uncollected(self) -> bool:
        """Whether a file could not be collected."""
        return self._uncollected

    def _check_models(self) -> None:
        """A model that does not exist is one error, not one of each file.

        Its module is imported by the process that measures: here, only where that is this one.

        Raises:
            pytest.UsageError: there is no such model.
        """
        from joulemark.plugin.sweep import describe, import_models

        try:
            for name in self.options.models or ():
                describe(name, self.own, self.options.rootdir)
            if not self.options.isolate and not self.config.option.collectonly:
                import_models(self.options, self.own)
        except JoulemarkError as error:
            raise pytest.UsageError(f"--bench-models: {error}") from error

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One item per cell for a benchmark that takes ``workload``, one per GPU for any other."""
        if "bench" not in metafunc.fixturenames:
            return
        try:
            marker = SweepMarker.read(metafunc.definition.iter_markers("bench"))
            if "joulemark_case" in metafunc.fixturenames:
                swept = cells(metafunc.function.__name__, marker, self.options, self.targets, self.own, self.pool)
                metafunc.parametrize(
                    ("joulemark_case", "joulemark_gpu"), swept, indirect=True, ids=[case.label for case, _ in swept]
                )
            elif self.several:
                metafunc.parametrize(
                    "joulemark_gpu", self.targets, indirect=True, ids=[one.slug for one in self.targets]
                )
        except ConfigurationError as error:
            raise pytest.Collector.CollectError(f"{metafunc.definition.nodeid}: {error}") from error

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the items that measure, each with its cell."""
        kept = [item for item in items if "bench" in getattr(item, "fixturenames", ())]
        for item in kept:
            callspec = getattr(item, "callspec", None)
            if callspec is not None and "joulemark_case" in callspec.params:
                item.stash[CASE] = (callspec.params["joulemark_case"], callspec.params["joulemark_gpu"])
        dropped = [item for item in items if item not in set(kept)]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """In the parent, fixtures other than pytest-benchmark's are left to the measuring process."""
        from joulemark.plugin import replay

        if self.sweep is None:
            return
        if self.courier is not None:
            self.courier.total = -(-len(session.items) // self.assignment.workers)
        has_benchmark = self.config.pluginmanager.hasplugin("benchmark")
        for item in session.items:
            if not isinstance(item, pytest.Function):
                continue
            if self.options.isolate:
                item.fixturenames = ["benchmark"] if has_benchmark else []
                if has_benchmark:
                    replay.prepare(item)
        if self.courier is not None:
            distributed.write_plan(self.assignment.scratch / "plan.json", self.sweep.plan(session.items), self)
        elif self.resumed is not None and not session.testsfailed:
            self.refuse_another_sweep(self.resumed, self.sweep.case_ids(session.items))
        if not self.config.option.collectonly:
            self.plan = self.sweep.plan(session.items)
            if self.journal is not None:
                self.journal.expect(self.plan)
            self.open_baseline(self.plan, self.sweep.sink.path)
            self.sweep.baseline = self.baseline

    def open_baseline(self, plan: Sequence[Planned], own: Path) -> None:
        """Find the run that this session is held against, and say which it is; a worker finds it for itself.

        Args:
            plan: the session's items.
            own: the session's own file.
        """
        if self.options.baseline is None:
            return
        from joulemark.plugin.baseline import open_baseline
        from joulemark.report.escape import printable

        planned = {one.nodeid: one.case for one in plan if one.case is not None}
        folder, results = self.config.invocation_params.dir, self.options.results
        try:
            self.baseline, lines = open_baseline(self.options.baseline, folder, results, planned, own)
        except JoulemarkError as error:
            raise pytest.UsageError(f"--bench-baseline: {error}") from error
        if self.baseline is not None:
            simulated = None if self.inventory is None else self.inventory.simulated
            self.baseline = replace(self.baseline, simulated=simulated)
            marked = " (simulated GPUs)" if self.baseline.run.simulated else ""
            lines = [*lines, f"baseline: {self.baseline.run.path}{marked}"]
        for line in lines:
            self.tell(printable(f"joulemark: {line}"))

    @staticmethod
    def refuse_another_sweep(run: Run, planned: frozenset[str]) -> None:
        """A resumed file must be of the sweep that goes on: otherwise two sweeps would stand in it as one."""
        others = [record.case.label for record in run.records if record.case_id not in planned]
        if not others:
            return
        facts = next(iter(run.environments.values())).facts if run.environments else {}
        given = " ".join(str(one) for one in facts.get("options") or ())
        raise pytest.UsageError(
            f"--bench-resume {run.path}: it holds {len(others)} cases that this sweep does not plan "
            f"({others[0]} is the first): give the options of that run again" + (f" (pytest {given})" if given else "")
        )

    def pytest_pycollect_makeitem(self, collector: pytest.Collector, name: str, obj: object) -> None:
        """A function that takes ``bench`` under a name that pytest does not collect would be lost without a word."""
        if is_stray(collector, name, obj):
            self.stray.append(f"{collector.nodeid}::{name}")

    # -- running

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Before the first case, hold the GPUs of all ranks; a controller holds them already, a cluster its own."""
        if self.sweep is None or self.journal is None or session.config.option.collectonly or not session.items:
            return
        if self.cluster is not None:
            return
        self.lease([*self.targets, *self.sweep.ranks(session.items)])
        self.sweep.workers.leases = self.leases

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """In the parent: measure in the child instead of calling the function."""
        if self.sweep is None or not self.options.isolate:
            return None
        if not self.config.pluginmanager.hasplugin("benchmark"):
            pytest.skip("joulemark needs pytest-benchmark: leave out -p no:benchmark")
        self.sweep.run_item(pyfuncitem, pyfuncitem.funcargs.get("benchmark"))
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """In a worker, put the record of a case on its report."""
        report = yield
        if self.courier is not None and call.when == "call":
            self._send(report)
        return report

    def _send(self, report: Any) -> None:
        """Have the record of a case, or that it came too late, travel to the controller with its report."""
        assert self.courier is not None
        assert self.sweep is not None
        late, self._late = self.sweep.skipped_for_budget - self._late, self.sweep.skipped_for_budget
        text = self.courier.take(late)
        if text is not None:
            setattr(report, distributed.KEY, text)

    def make_bench(self, request: pytest.FixtureRequest, target: Target) -> Bench:
        """The value of the fixture ``bench``."""
        assert self.measuring is not None
        item = request.node
        callspec = getattr(item, "callspec", None)
        case = callspec.params.get("joulemark_case") if callspec is not None else None
        bench = self.measuring.bench(item, case, target)
        for instrument in SweepMarker.read(item.iter_markers("bench")).requires:
            try:
                bench.require(instrument)
            except Unsupported as error:
                pytest.skip(str(error))
        for instrument in self.left_out.instruments_for(item):
            with suppress(Unsupported):  # a note says why its figures are missing
                bench.require(instrument)
        return bench

    def build(self, bench: Bench) -> Step:
        """The value of the fixture ``workload``."""
        from joulemark.measure.runner import warnings_as_findings

        with warnings_as_findings(bench.findings):
            return workload_of(bench.case, self.own, self.config.rootpath).build(bench.case, bench.device)

    # -- the end

    def pytest_runtest_logfinish(self) -> None:
        """Count the items that came to an end, skipped ones too."""
        self.concluded += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported leaves the sweep incomplete."""
        self._uncollected |= report.failed

    def pytest_keyboard_interrupt(self) -> None:
        """Mark the file as interrupted."""
        self.interrupted = True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Close the file and give the GPUs free; a run that measured nothing exits 5."""
        try:
            if self.sweep is not None:
                self.sweep.workers.close(at_once=self.interrupted)
        finally:
            self._end(session.config.option.collectonly)
        found = self.comparison()
        if exitstatus == 0 and found is not None and found.verdict == "regressed":
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        measured = self.journal is None or any(one.outcome in ("ok", "flagged", "oom") for one in self.journal.records)
        if exitstatus == 0 and not measured and not self.finished and not session.config.option.collectonly:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def _end(self, only_collected: bool) -> None:
        """What must happen whatever befell the worker: the file's mark, the leases, the signal's old handler."""
        try:
            if self.journal is not None and not only_collected:
                reason = self._why_incomplete(self.journal)
                if reason is None and self.resumed is not None and not self.resumed.completed:
                    self.journal.go_on_with(self.resumed)  # killed between its last case and its end: nothing was left
                self.journal.close(reason is None, reason)
        finally:
            if self.controller is not None:
                self.controller.close()
            if self.cluster is not None:
                self.cluster.close(at_once=self.interrupted)
            if self.leases is not None:
                self.leases.close()
            self._interrupts.release()

    def comparison(self) -> Comparison | None:
        """All that was measured against the baseline; None without one, or when nothing was measured."""
        if self.baseline is None or self.journal is None or not self.journal.records:
            return None
        return self.baseline.compare(self.journal.whole_run(self.plan, self.resumed))

    def _why_incomplete(self, journal: Journal) -> str | None:
        of = self.controller or self.sweep
        assert of is not None
        if self.interrupted:
            return "interrupted"
        if of.skipped_for_budget:
            return "budget spent"
        if self._uncollected:
            return "not all files could be collected"
        missing = self.concluded < journal.total or of.unrecorded
        return "not all cases were measured" if missing else None
