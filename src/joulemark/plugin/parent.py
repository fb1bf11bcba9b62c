"""The parent of a sweep: has items measured in the child and hands each record on as it ends."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from joulemark.errors import CaseTimeout, ConfigurationError, MeasurementError, WorkerDied
from joulemark.measure.assemble import assemble
from joulemark.measure.attempts import as_one, attempts
from joulemark.measure.communication import communication_measurement
from joulemark.measure.plan import ALONE
from joulemark.measure.rank_group import RankGroup, trace_of_rank
from joulemark.measure.scaling import with_efficiency
from joulemark.measure.turn import TURN_VARIABLE
from joulemark.measure.worker import SCRATCH_PREFIX, Worker, preload
from joulemark.metrics import COUNTERS
from joulemark.plugin.instruments import idle_baseline
from joulemark.plugin.journal import Seen
from joulemark.plugin.junit import properties_of
from joulemark.plugin.own_process import OwnProcess
from joulemark.plugin.profiling import PASS as PROFILING
from joulemark.plugin.profiling import ProfilingProcess
from joulemark.plugin.replay import replay
from joulemark.plugin.schedule import Planned
from joulemark.plugin.sweep import Target, case_of_function
from joulemark.records import Case, Environment, Finding, Measurement, Outcome, Record
from joulemark.stats import union_length

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from joulemark.device.lease import Leases
    from joulemark.plugin.baseline import Baseline
    from joulemark.plugin.options import BenchOptions

CASE = pytest.StashKey[tuple[Case, Target]]()
TARGETS_VARIABLE = "JOULEMARK_WORKER_TARGETS"


def child_arguments(config: pytest.Config) -> list[str]:
    """The parent's own arguments, with what must not happen twice (reports, early stops) neutralized at the end.

    The plugins behind ``--lf`` and its like are off: the child collects all items and measures those that it is
    asked for.
    """
    given = config.invocation_params.args
    # pytest takes the value of an option that names an existing folder (results, once they are there) for a part of its
    # search for the root: the child is told which root its parent has found.
    extra = ["--maxfail=0", "-Wdefault", f"--rootdir={config.rootpath}"]
    if config.inipath is not None:
        extra.append(f"--config-file={config.inipath}")
    # The options of a plugin that is switched off (-p no:terminal) do not exist in the child either.
    for plugin, options in (("terminal", ["-q", "--color=no"]), ("junitxml", ["--junitxml="])):
        extra += options if config.pluginmanager.hasplugin(plugin) else []
    for plugin in ("lfplugin", "nfplugin", "stepwiseplugin"):
        extra += ["-p", f"no:{plugin}"]
    if config.pluginmanager.hasplugin("xdist"):
        extra += ["-n0"]
    return [str(one) for one in given] + extra


class Sink(Protocol):
    """Where records go: the session's own journal, or a courier to another process that keeps it.

    Args:
        path: of the result file.
        records: what has been handed over, the latest at least.
        total: number of items that this process expects to measure.
        wall_s: wall time of the session so far, in s.
    """

    path: Path
    records: list[Record]
    total: int

    @property
    def wall_s(self) -> float: ...

    def keep(self, record: Record, seen: Seen) -> Record:
        """Store a record."""
        ...


class Sweep:
    """State of one measuring session: worker, budget and what has been measured so far.

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
        earlier: records of the file that is resumed.
        leases: of the GPUs, shared with the measuring processes; None where leases are off.
        turn: entered around the measuring of a case; waits where GPUs share a power budget.
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
        self.pool = dict(pool or {})
        self.answers: dict[str, dict[str, Any]] = {}
        self.earlier: tuple[Record, ...] = ()
        self.skipped_for_budget = 0
        self.unrecorded = 0
        self.baseline: Baseline | None = None
        self.leases: Leases | None = None
        self.turn: Callable[[Case], AbstractContextManager[None]] = lambda case: nullcontext()
        self._idle: dict[str, dict[str, Any]] = {}
        self._done = 0
        self._nodeids: dict[str, str] = {}
        self._oom: dict[str, int] = {}
        self._scratch_root = scratch
        self._folder: Path | None = None
        self._worker: Worker | RankGroup | None = None
        self._worker_target: Target | None = None
        self._counting = OwnProcess("counters", COUNTERS, lambda target: self._new_worker(target, "counters"))
        self._profiling = ProfilingProcess(lambda target: self._new_worker(target, PROFILING))

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
        if self._too_late() and item.nodeid not in self.answers:
            self.skipped_for_budget += 1
            pytest.skip(
                f"the budget of {self.options.budget_s:g} s is spent; go on with --bench-resume {self.sink.path}"
            )
        known = self._fitted_not(case)
        if known is not None:
            reply = _reply("oom", f"not tried: batch {known} of this series did not fit")
        elif target.lacks is not None:
            reply = _reply("unsupported", target.lacks)
        else:
            with self.turn(case):
                reply = self._measure(item, case, target)
        record = self._keep(self._record(item, case, target, reply), target, reply)
        self.unrecorded -= 1
        item.user_properties.extend(properties_of(record))
        replay(item, benchmark, record)
        if reply.get("expected"):
            pytest.xfail(record.reason or "")
        self.conclude(record, reply.get("longrepr"), reply.get("output", ""))
        self._hold_against_baseline(item, record)

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
        """One reply for all processes; a CUDA error is tried once more in a fresh process."""
        if item.nodeid in self.answers:
            joined = self.answers.pop(item.nodeid)
        else:
            replies = attempts(
                lambda process: self._ask(item, target, process),
                self._restart,
                self.options.processes,
                self._worker is not None,
            )
            if replies[-1]["outcome"] == "ok":
                for other in self._passes_alone(item, case, target, replies[-1].get("collect", ())):
                    replies[-1] = _joined(replies[-1], other)
            joined = as_one(replies)
        if joined["outcome"] == "oom":
            self.note_oom(case)
        return joined

    def _passes_alone(
        self, item: pytest.Function, case: Case, target: Target, collect: Iterable[str]
    ) -> Iterator[dict[str, Any]]:
        """What the passes with processes of their own add to a case's reply."""
        if "profiler" in collect:
            yield self._profile(item, case, target)
        if self._counts_alone(target, collect):
            yield self._counting.measure(item.nodeid, target, self.options.timeout_s)
        elif "counters" in collect:
            why = f"the counters are read of one GPU beside one process, and this case has {target.world_size}"
            skipped = Measurement("counters", missing=dict.fromkeys(COUNTERS, why))
            yield {"measurements": [skipped.to_json()], "findings": []}

    def _fitted_not(self, case: Case) -> int | None:
        """A smaller batch of the case's series that was out of memory."""
        known = self._oom.get(case.series.case_id)
        return known if known is not None and case.batch_size is not None and case.batch_size > known else None

    def needs_no_measuring(self, case: Case) -> bool:
        """Whether the case ends without being measured: its series did not fit, or the budget is spent."""
        return self._fitted_not(case) is not None or self._too_late()

    def note_oom(self, case: Case) -> None:
        """Larger batches of this case's series are not tried."""
        if case.batch_size is not None:
            series = case.series.case_id
            self._oom[series] = min(case.batch_size, self._oom.get(series, case.batch_size))

    def _ask(self, item: pytest.Function, target: Target, process: int) -> dict[str, Any]:
        begin = time.time()
        try:
            worker = self._worker_for(target)
            return dict(
                worker.ask(
                    item.nodeid,
                    None if self.options.processes > 1 else _next_nodeid(item),
                    self.options.timeout_s,
                    budget_s=self.share(),
                    process=process,
                )
            )
        except (CaseTimeout, WorkerDied) as error:
            what = error.what if isinstance(error, CaseTimeout) else str(error)
            return {**_reply("failed", what), "window_utc": [begin, time.time()]}

    def _worker_for(self, target: Target) -> Worker | RankGroup:
        if self._worker is not None and self._worker_target != target:
            self._worker.close()
            self._worker = None
        if self._worker is None:
            ahead = self._counts_alone(target, self.options.collect) and target.on_gpu
            if ahead:
                self._counting.prepare(target)
            if target.uuid is not None and "power" in self.options.collect and target.uuid not in self._idle:
                self._idle[target.uuid] = idle_baseline(target.uuid)
            self._worker_target = target
            passes = ",".join(one for one in self.options.collect if one not in ALONE) or "timing"
            self._worker = self._new_worker(target, passes)
            if ahead and isinstance(self._worker, Worker):
                self._worker.ensure_started()
                self._counting.open_beside()
        return self._worker

    @staticmethod
    def _counts_alone(target: Target, collect: Iterable[str]) -> bool:
        """Whether a target's cases have counters: they are read of one GPU beside one process."""
        return "counters" in collect and target.world_size == 1

    def _new_worker(self, target: Target, passes: str) -> Worker | RankGroup:
        """A measuring process for a target, or one for each of its ranks."""
        environment = child_environment(target, self.targets, self.pool)
        if self.leases is not None and target.on_gpu:
            environment |= self.leases.pass_on(*target.uuids)
        if passes == "counters":
            environment = preload(environment, self.options.cupti)
        arguments, cwd = child_arguments(self.config), self.config.invocation_params.dir
        folder = Path(tempfile.mkdtemp(dir=self._scratch()))  # answers of an earlier worker are not this one's
        if target.world_size == 1:
            environment[TURN_VARIABLE] = str(self._scratch() / f"turn-{target.slug}")
            return Worker(arguments, passes, folder, environment, cwd)
        return RankGroup(arguments, passes, folder, environment, cwd, target.world_size, target.uuids)

    def _scratch(self) -> Path:
        """Folder for answers and output of the workers; removed at the end."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=self._scratch_root))
        return self._folder

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

    def _profile(self, item: pytest.Function, case: Case, target: Target) -> dict[str, Any]:
        """The profiler pass in its own process."""
        folder = (
            self.sink.path.parent / f"{self.sink.path.stem}-traces" if self.options.keep_traces else self._scratch()
        )
        trace = folder.resolve() / f"{case.case_id}.json.gz"
        several = target.world_size > 1
        kept = trace if self.options.keep_traces or several else None
        reply = self._profiling.profile(item.nodeid, target, self.options.timeout_s, kept)
        if several:  # what a collective costs shows only beside the traces of the other ranks
            traces = [trace_of_rank(trace, rank) for rank in range(target.world_size)]
            reply["measurements"].append(communication_measurement(traces).to_json())
            for one in () if self.options.keep_traces else traces:
                one.unlink(missing_ok=True)
        return reply

    def _restart(self) -> None:
        if self._worker is not None:
            self._worker.kill()

    # -- budget

    def _too_late(self) -> bool:
        return self.options.budget_s is not None and self.sink.wall_s >= self.options.budget_s

    def share(self) -> float | None:
        """Seconds for the passes of the next case: an even share of what is left, less what cases cost besides."""
        if self.options.budget_s is None:
            return None
        left = self.options.budget_s - self.sink.wall_s
        return max(0.1, left / max(1, self.sink.total - self._done) - self._overhead())

    def _overhead(self) -> float:
        """Median time per case outside its passes so far, in s (building, warm-up, edges).

        The first case of a process pays for imports and libraries: a mean would make the next ones pay again.
        """
        outside = [
            one.window_utc[1] - one.window_utc[0] - union_length(one.measured_windows_utc)
            for one in self.sink.records[-20:]
            if one.window_utc is not None and one.measured_windows_utc
        ]
        return max(0.0, median(outside)) if len(outside) > 2 else 1.0

    # -- records

    def _record(self, item: pytest.Item, case: Case, target: Target, reply: Mapping[str, Any]) -> Record:
        if reply.get("gpu_uuid") is not None:  # a cluster's, of the model that the target names
            target = replace(target, uuid=reply["gpu_uuid"])
        findings = [Finding.from_json(one) for one in reply["findings"]]
        if target.note is not None:
            findings.append(Finding("gpu_unverified", target.note, "name the GPU by its UUID", flags=True))
        outcome: Outcome = reply["outcome"]
        uuids = target.uuids
        if uuids and self.options.anonymize:
            from joulemark.environment import anonymous

            uuids = tuple(anonymous(one) for one in uuids)
        record = assemble(
            case,
            [Measurement.from_json(one) for one in reply["measurements"]],
            run_id="",  # the journal knows both
            environment_id="",
            outcome=outcome,
            reason=reply["reason"],
            gpu_uuid=next(iter(uuids), None),
            nodeid=item.nodeid,
            findings=findings,
            window_utc=tuple(reply["window_utc"]),
            static_power_w=reply.get("static_power_w"),
        )

        if case.world_size == 1:
            return record
        ranks = uuids if target.lacks is None else ()
        return with_efficiency(replace(record, rank_gpu_uuids=ranks), self._of_one_rank(record))

    def _of_one_rank(self, record: Record) -> Record | None:
        """This run's record of the same case with one rank, on the GPU of rank 0."""
        case = record.case
        for one in (*self.earlier, *self.sink.records):
            same = replace(one.case, world_size=case.world_size, gpu_model=case.gpu_model) == case
            if same and one.case.world_size == 1 and one.gpu_uuid == record.gpu_uuid:
                return one
        return None

    def _keep(self, record: Record, target: Target, reply: Mapping[str, Any]) -> Record:
        hello = (self._worker.hello if self._worker is not None and self._worker_target == target else None) or {}
        counting = {"counters": self._counting.hello.get("counters")}
        told = reply.get("environment")
        elsewhere = None if told is None else Environment(told["facts"], told["tiers"], told["notes"])
        self._done += 1
        idle = self._idle.get(target.uuid or "", {})
        return self.sink.keep(record, Seen(target, {**hello, **counting}, idle, elsewhere))

    def conclude(self, record: Record, longrepr: str | None, output: str) -> None:
        """Turn an outcome into pytest's: failed and unsupported raise, so do flagged and oom under strict."""
        if record.outcome == "unsupported":
            pytest.skip(record.reason or "unsupported")
        if record.outcome == "failed":
            text = "\n".join(part for part in (record.reason, longrepr, output) if part)
            # The child's words may hold anything: what would steer the terminal is spelt out.
            pytest.fail(_printable_lines(text), pytrace=False)
        if self.options.strict and record.outcome in ("oom", "flagged"):
            said = record.reason or "; ".join(one.message for one in record.findings if one.flags)
            pytest.fail(f"--bench-strict: {record.outcome}: {said}", pytrace=False)

    def _hold_against_baseline(self, item: pytest.Item, record: Record) -> None:
        """Fail the item when its case got worse; an out-of-memory that is new counts as worse."""
        if self.baseline is None:
            return
        from joulemark.plugin.baseline import in_words

        worse = [in_words(row) for row in self.baseline.judge(record)]
        if worse:
            item.user_properties.append(("regressed", "; ".join(worse)))
            text = "\n".join(["regressed against " + self.baseline.run.path, *(f"  {one}" for one in worse)])
            pytest.fail(_printable_lines(text), pytrace=False)

    # -- in process

    def keep_in_process(self, item: pytest.Function, reply: Mapping[str, Any]) -> Record:
        """Store what this very process measured (``--bench-inprocess``, ``--pdb``)."""
        case, target = self.case_of(item)
        return self._keep(self._record(item, case, target, reply), target, reply)

    # -- the end

    def close(self, *, at_once: bool = False) -> None:
        """End the worker.

        Args:
            at_once: kill the worker; otherwise its fixtures are torn down first, however incomplete the sweep is.
        """
        try:
            if not at_once:  # a process with a CUDA context takes its time to end: they do so together
                self._profiling.ask_to_end()
                self._counting.ask_to_end()
            for one in (self._worker, self._profiling, self._counting):
                if one is not None and at_once:
                    one.kill()
                elif one is not None:
                    one.close()
        finally:  # an interrupt while fixtures are torn down does not leave the folder
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)


def _printable_lines(text: str) -> str:
    """A text of several lines in which nothing steers the terminal."""
    from joulemark.report.escape import printable

    return "\n".join(printable(line) for line in text.splitlines())


def _reply(outcome: str, reason: str) -> dict[str, Any]:
    now = time.time()
    return {"outcome": outcome, "reason": reason, "measurements": [], "findings": [], "window_utc": [now, now]}


def failed_reply(reason: str) -> dict[str, Any]:
    """The reply for a case that no process could measure."""
    return _reply("failed", reason)


def _joined(reply: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A case's reply with what a process of its own has added to it."""
    return {
        **reply,
        "measurements": [*reply["measurements"], *other["measurements"]],
        "findings": [*reply["findings"], *other["findings"]],
        "window_utc": [reply["window_utc"][0], time.time()],
    }


def _next_nodeid(item: pytest.Item) -> str | None:
    """The item after this one: fixtures that both share stay up in the child."""
    items = item.session.items
    index = items.index(item) + 1
    return items[index].nodeid if index < len(items) else None


def child_environment(
    target: Target, targets: list[Target], pool: Mapping[str, Sequence[str]] | None = None
) -> dict[str, str]:
    """The child sees the GPU under test alone, by UUID, and the parent's list of targets."""
    described = {"targets": [asdict(one) for one in targets], "pool": pool or {}, "current": asdict(target)}
    # A worker of pytest-xdist is this process' parent; the measuring process itself is none.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
    return {**inherited, "CUDA_VISIBLE_DEVICES": target.uuid or "", TARGETS_VARIABLE: json.dumps(described)}


@dataclass(frozen=True)
class Inherited:
    """What a measuring process knows of its parent's devices.

    Args:
        targets: the parent's, the one of this process first.
        pool: UUIDs of the GPUs that may work together, by model.
        current: what this process measures on, with the ranks that it is one of.
        several: whether the parent has more targets than it tells: ids of items then name theirs.
    """

    targets: list[Target]
    pool: Mapping[str, Sequence[str]]
    current: Target
    several: bool


def targets_from_parent() -> Inherited | None:
    """In a child: the parent's targets; None in a parent."""
    text = os.environ.get(TARGETS_VARIABLE)
    if text is None:
        return None
    data = json.loads(text)
    targets = [Target.from_json(one) for one in data["targets"]]
    if not targets:
        raise ConfigurationError(
            f"{TARGETS_VARIABLE} names no target", "it is set by joulemark for its measuring processes"
        )
    current = Target.from_json(data["current"])
    current_first = sorted(targets, key=lambda one: one.slug != current.slug)
    return Inherited(current_first, data["pool"], current, bool(data.get("several")) or len(targets) > 1)


__all__ = ["CASE", "MeasurementError", "Sweep", "child_arguments", "child_environment", "targets_from_parent"]
