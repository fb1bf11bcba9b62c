"""``pytest --bench -n``: a worker of pytest-xdist for each GPU, one file for all, kept by the controller.

The controller leases the GPUs, gives each worker its own and stores the records, which travel on pytest's reports as
their cases end. A worker is the parent of a measuring process, as a session without ``-n`` is. One that dies loses
the case that it was at; its GPU stays leased and goes to the worker that replaces it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from joulemark.errors import ConfigurationError
from joulemark.plugin.sweep import Target
from joulemark.plugin.targets import shown
from joulemark.records import Case, Record

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

    from joulemark.device.lease import Claim, Leases
    from joulemark.plugin.journal import Journal, Seen
    from joulemark.plugin.options import BenchOptions
    from joulemark.plugin.schedule import Expected, LongestFirst, Planned
    from joulemark.plugin.session import BenchSession

KEY = "joulemark"
"""In a worker's input, and the attribute of a report that carries a record."""

_DEVICES_SHARED = "benchmarks that run side by side on one device would time each other"


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker of pytest-xdist."""
    return hasattr(config, "workerinput")


def is_controller(config: pytest.Config) -> bool:
    """Whether this process hands items out to workers of pytest-xdist."""
    if is_worker(config) or config.option.collectonly:
        return False
    return getattr(config.option, "dist", "no") != "no" and bool(getattr(config.option, "tx", None))


def refuse_other_ways(options: BenchOptions) -> None:
    """Refuse to spread a sweep in two ways at once.

    Raises:
        ConfigurationError: with both options and the way out.
    """
    if options.cluster is not None:
        raise ConfigurationError(
            "--bench got -n and --bench-cluster: the cluster hands the cases to its own GPUs",
            "leave out one of the two",
        )
    if options.world_sizes is not None and max(options.world_sizes) > 1:
        sizes = ",".join(str(one) for one in options.world_sizes)
        raise ConfigurationError(
            f"--bench got -n and --bench-world-size {sizes}: a worker has one GPU, and ranks take several",
            "drop -n (or give -n 0)",
        )


def check_workers(config: pytest.Config, stations: Sequence[Target], options: BenchOptions) -> None:
    """Refuse what cannot be measured side by side.

    Raises:
        ConfigurationError: with the option and the way out.
    """
    workers = config.option.numprocesses
    if not workers or config.option.tx != ["popen"] * len(config.option.tx):
        raise ConfigurationError(
            f"--bench got --tx {' '.join(config.option.tx)}: workers measure on the GPUs of this machine",
            "give -n auto",
        )
    if config.option.dist != "load":
        raise ConfigurationError(
            f"--bench got --dist {config.option.dist}: the longest cases go first, each to a GPU that is free",
            "leave out --dist",
        )
    if not options.isolate:
        raise ConfigurationError(
            f"--bench got -n {workers} and --bench-inprocess (--pdb, --trace), which measure in this very process",
            "leave out one of the two",
        )
    workers = len(config.option.tx)
    if workers > len(stations):
        have = f"{len(stations)} GPU{'s' if len(stations) > 1 else ''}" if stations[0].on_gpu else "no GPU, only a CPU"
        raise ConfigurationError(
            f"--bench got -n {workers} and has {have}: {_DEVICES_SHARED}", "drop -n (or give -n 0), or give -n auto"
        )
    slugs = {one.slug for one in stations}
    if workers < len(slugs):
        raise ConfigurationError(
            f"--bench got -n {workers} for {len(slugs)} kinds of cells ({', '.join(sorted(slugs))}), "
            "each measured on its own GPU",
            f"give -n {len(slugs)} or more, or fewer with --bench-gpus",
        )


@dataclass(frozen=True)
class Assignment:
    """What the controller tells a worker.

    Args:
        targets: of the session; where several GPUs stand behind one, this worker's own.
        uuid: of this worker's GPU; None for the CPU.
        path: of the result file.
        started: when the session began, on the machine's monotonic clock, in s.
        workers: how many there are.
        scratch: folder that all of them share.
        lease: ``folder``, ``keys`` and ``token`` of the GPU's lease; None without one.
        limit_w: power that a case may draw which was never measured, in W.
    """

    targets: tuple[Target, ...]
    uuid: str | None
    path: Path
    started: float
    workers: int
    scratch: Path
    lease: dict[str, Any] | None = None
    limit_w: float | None = None

    @classmethod
    def of(cls, config: pytest.Config) -> Assignment:
        """What this worker was told.

        Raises:
            ConfigurationError: it was started by something else than a controller with ``--bench``.
        """
        text = config.workerinput.get(KEY)  # type: ignore[attr-defined]
        if text is None:
            raise ConfigurationError("--bench reached a worker whose controller does not know it", "give it with -n")
        data = json.loads(text)
        data["targets"] = tuple(Target.from_json(one) for one in data["targets"])
        return cls(**{**data, "path": Path(data["path"]), "scratch": Path(data["scratch"])})

    def to_text(self) -> str:
        """JSON for :meth:`of`."""
        return json.dumps({**asdict(self), "path": str(self.path), "scratch": str(self.scratch)})

    def leases(self) -> Leases | None:
        """The controller's lease of this worker's GPU, to be passed on to the measuring process."""
        from joulemark.device.lease import Claim, Leases

        if self.lease is None or self.uuid is None:
            return None
        claim = Claim(self.uuid, "", tuple(self.lease["keys"]))
        return Leases((claim,), Path(self.lease["folder"]), self.lease["token"])

    def turns(self, budget_w: float | None) -> Any:
        """What a case waits for where the GPUs share a power budget: see :class:`joulemark.plugin.parent.Sweep`."""
        from joulemark.measure.power_budget import PowerBudget

        if budget_w is None:
            return lambda case: nullcontext()
        budget = PowerBudget(self.scratch / "power", budget_w)
        expected: dict[str, float] = json.loads((self.scratch / "watts.json").read_text(encoding="utf-8"))

        def turn(case: Case) -> AbstractContextManager[None]:
            return budget.share(expected.get(case.case_id, self.limit_w or budget_w))

        return turn


@dataclass
class Courier:
    """In a worker: hands records to the report of their case, on which they travel to the controller."""

    path: Path
    started: float
    total: int = 0
    records: list[Record] = field(default_factory=list)
    _message: dict[str, Any] | None = None
    _greeted: bool = False

    @property
    def wall_s(self) -> float:
        """Wall time of the session so far, in s."""
        return time.monotonic() - self.started

    def keep(self, record: Record, seen: Seen) -> Record:
        """Have a record travel with the next report."""
        self.records = [*self.records[-19:], record]
        self._message = {"record": record.to_json()}
        if not self._greeted:
            self._message |= {"hello": dict(seen.hello), "idle": dict(seen.idle)}
            self._greeted = bool(seen.hello)
        return record

    def take(self, late: int = 0) -> str | None:
        """What the next report carries.

        Args:
            late: number of cases that were left out since the last report because the budget was spent.
        """
        message, self._message = self._message, None
        if late:
            message = {**(message or {}), "late": late}
        return None if message is None else json.dumps(message)


def write_plan(path: Path, planned: Sequence[Planned], session: BenchSession) -> None:
    """Tell the controller, which collects nothing, what a worker's session has collected. All workers write the same.

    Args:
        path: of the plan.
        planned: the items.
        session: knows what is not among them.
    """
    items = [[one.nodeid, one.slug, None if one.case is None else one.case.to_json()] for one in planned]
    own = path.with_suffix(f".{os.getpid()}")
    left_out = {"lines": session.left_out.lines, "note": session.left_out.note}
    plan = {"items": items, "stray": session.stray, "left_out": left_out}
    own.write_text(json.dumps(plan), encoding="utf-8")
    own.replace(path)


def read_plan(path: Path, session: BenchSession) -> list[Planned]:
    """The items; the controller's session learns what the workers have not collected."""
    from joulemark.plugin.schedule import Planned

    data = json.loads(path.read_text(encoding="utf-8"))
    items = [
        Planned(nodeid, slug, None if case is None else Case.from_json(case)) for nodeid, slug, case in data["items"]
    ]
    session.stray = data["stray"]
    session.left_out.say(**data["left_out"])
    return items


class Controller:
    """Hooks of the process that hands out the items.

    Args:
        session: whose journal stores the records.
        stations: where workers may measure.
    """

    def __init__(self, session: BenchSession, stations: Sequence[Target]) -> None:
        self.session = session
        self.options = session.options
        self.stations = list(stations)
        self.scratch = Path(tempfile.mkdtemp(prefix="joulemark-"))
        self.workers = len(session.config.option.tx)
        self.skipped_for_budget = 0
        self.unrecorded = 0
        self._free: list[Target] = []
        self._at: dict[str, Target] = {}
        self._errors: dict[str, str] = {}
        self._begun: dict[str, float] = {}
        self._plan: list[Planned] | None = None
        self._expected: dict[str, Expected] = {}

    @property
    def _journal(self) -> Journal:
        assert self.session.journal is not None
        return self.session.journal

    # -- GPUs

    @pytest.hookimpl(tryfirst=True)
    def pytest_xdist_setupnodes(self) -> None:
        """Lease the GPUs before the workers start; tell them what cases took before."""
        from joulemark.plugin.schedule import expectations, recent_runs

        self.session.lease(self.stations, self._choose)
        held = None if self.session.leases is None else {one.uuid for one in self.session.leases.claims}
        usable = [one for one in self.stations if held is None or one.uuid is None or one.uuid in held]
        self._free = usable if held is not None else one_per_slug_first(usable)[: self.workers]
        resumed = [] if self.session.resumed is None else [self.session.resumed]
        self._expected = expectations([*resumed, *recent_runs(self.options.results)])
        watts = {key: one.power_w for key, one in self._expected.items() if one.power_w is not None}
        (self.scratch / "watts.json").write_text(json.dumps(watts), encoding="utf-8")

    def _choose(self, free: Sequence[Claim], wanted: Sequence[Claim]) -> Sequence[Claim] | None:
        """As many free GPUs as there are workers, one of each kind at least."""
        by_uuid = {one.uuid: one for one in self.stations}
        picked = one_per_slug_first([by_uuid[claim.uuid] for claim in free])[: self.workers]
        slugs = {one.slug for one in self.stations}
        if len(picked) < self.workers or {one.slug for one in picked} != slugs:
            return None
        uuids = {one.uuid for one in picked}
        return [claim for claim in free if claim.uuid in uuids]

    def pytest_configure_node(self, node: WorkerController) -> None:
        """Give a worker its GPU: one that none has, or that of the worker which it replaces."""
        station = self._free.pop(0)
        self._at[node.gateway.id] = station
        targets = tuple(station if one.slug == station.slug else one for one in self.session.targets)
        inventory, leases = self.session.inventory, self.session.leases
        gpu = None if inventory is None or station.uuid is None else inventory.by_uuid(station.uuid)
        node.workerinput[KEY] = Assignment(
            targets,
            station.uuid,
            self._journal.path,
            self._journal.started,
            self.workers,
            self.scratch,
            None if leases is None or station.uuid is None else leases.described(station.uuid),
            None if gpu is None else gpu.power_limit_w,
        ).to_text()

    def pytest_testnodedown(self, node: WorkerController, error: object) -> None:
        """The GPU of a worker that ended is free for its replacement."""
        self._free.insert(0, self._at[node.gateway.id])
        self._errors[node.gateway.id] = str(error)

    # -- items

    def pytest_xdist_make_scheduler(self, config: pytest.Config) -> LongestFirst:
        """The longest cases first."""
        from joulemark.measure.plan import plan_for
        from joulemark.plugin.schedule import LongestFirst, longest_first

        collect = self.options.collect
        nominal = plan_for(collect, self.stations[0].on_gpu, "power" in collect, self.options.quick).nominal_s
        return LongestFirst(
            config,
            self.workers,
            lambda node: self._at[node.gateway.id].slug,
            self._planned,
            lambda plan: longest_first(plan, self._expected, nominal * self.options.processes),
        )

    def _planned(self) -> list[Planned]:
        """The items; read when the first worker has collected them.

        Raises:
            pytest.UsageError: the file that is resumed is of another sweep.
        """
        if self._plan is None:
            self._plan = self.session.plan = read_plan(self.scratch / "plan.json", self.session)
            for line in self.session.left_out.lines:
                self.session.tell(line)
            self._journal.expect(self._plan)
            if self.session.resumed is not None:
                planned = frozenset(one.case.case_id for one in self._plan if one.case is not None)
                self.session.refuse_another_sweep(self.session.resumed, planned)
            self.session.open_baseline(self._plan, self._journal.path)
        return self._plan

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note when an item began, in case its worker dies."""
        self._begun[nodeid] = time.time()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        """Store the record that a report carries, before anything is printed about it."""
        text = getattr(report, KEY, None)
        if text is None:
            self.unrecorded += report.when == "call" and report.failed
            return
        message = json.loads(text)
        self.skipped_for_budget += message.get("late", 0)
        if "record" in message:
            self._store(Record.from_json(message["record"]), report.node.gateway.id, message)

    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        """The case of a worker that died is recorded as failed."""
        from joulemark.measure.assemble import assemble

        worker = report.node.gateway.id
        station, now = self._at[worker], time.time()
        case = next((one.case for one in self._planned() if one.nodeid == crashitem), None)
        self.session.concluded += 1  # xdist tells of no end for it
        if case is None:
            self.unrecorded += 1
            return
        record = assemble(
            case,
            [],
            run_id="",
            environment_id="",
            outcome="failed",
            reason=f"its worker {worker} died ({self._errors.get(worker, 'no reason known')})",
            gpu_uuid=None if station.uuid is None else shown(station.uuid, self.options),
            nodeid=crashitem,
            window_utc=(self._begun.get(crashitem, now), now),
        )
        self._store(record, worker, {})

    def _store(self, record: Record, worker: str, message: dict[str, Any]) -> None:
        from joulemark.plugin.journal import Seen

        self._journal.keep(record, Seen(self._at[worker], message.get("hello") or {}, message.get("idle") or {}))

    def close(self) -> None:
        """Remove what the workers shared."""
        shutil.rmtree(self.scratch, ignore_errors=True)


def one_per_slug_first(stations: Sequence[Target]) -> list[Target]:
    """The same stations, led by the first of each kind."""
    firsts = {one.slug: one for one in reversed(stations)}
    lead = [one for one in stations if firsts[one.slug] is one]
    return [*lead, *(one for one in stations if one not in lead)]
