"""The parent of a sweep: has items measured in the child, stores each record as it ends, and reports."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from joulemark.errors import CaseTimeout, ConfigurationError, JoulemarkError, MeasurementError, WorkerDied
from joulemark.measure.assemble import assemble
from joulemark.measure.worker import Worker
from joulemark.metrics import PROFILER
from joulemark.plugin.instruments import idle_baseline
from joulemark.plugin.replay import progress_line, replay
from joulemark.plugin.sweep import Target, case_of_function
from joulemark.records import Case, Environment, Finding, Measurement, Outcome, Record
from joulemark.report.escape import printable
from joulemark.stats import union_length
from joulemark.store import RunWriter

if TYPE_CHECKING:
    from joulemark.device.gpu import Inventory
    from joulemark.plugin.baseline import Baseline
    from joulemark.plugin.options import BenchOptions
    from joulemark.records import Run

CASE = pytest.StashKey[tuple[Case, Target]]()
TARGETS_VARIABLE = "JOULEMARK_WORKER_TARGETS"


def child_arguments(config: pytest.Config) -> list[str]:
    """The parent's own arguments, with what must not happen twice (reports, early stops) neutralized at the end.

    The plugins behind ``--lf`` and its like are off: the child collects all items and measures those that it is
    asked for.
    """
    given = config.invocation_params.args
    extra = ["--maxfail=0", "-Wdefault"]
    # The options of a plugin that is switched off (-p no:terminal) do not exist in the child either.
    for plugin, options in (("terminal", ["-q", "--color=no"]), ("junitxml", ["--junitxml="])):
        extra += options if config.pluginmanager.hasplugin(plugin) else []
    for plugin in ("lfplugin", "nfplugin", "stepwiseplugin"):
        extra += ["-p", f"no:{plugin}"]
    if config.pluginmanager.hasplugin("xdist"):
        extra += ["-n0"]
    return [str(one) for one in given] + extra


class Sweep:
    """State of one session: worker, store, budget and what has been measured so far.

    Args:
        config: pytest's.
        options: of the session.
        targets: devices under test.
        inventory: GPUs as NVML shows them.
        path: of the result file.
        run_id: of this run.
        finished: ids of cases that a resumed file already holds.
    """

    def __init__(
        self,
        config: pytest.Config,
        options: BenchOptions,
        targets: list[Target],
        inventory: Inventory,
        path: Path,
        run_id: str,
        finished: frozenset[str] = frozenset(),
    ) -> None:
        self.config = config
        self.options = options
        self.targets = targets
        self.inventory = inventory
        self.path = path
        self.run_id = run_id
        self._writer: RunWriter | None = None
        self.finished = finished
        self.baseline: Baseline | None = None
        self.records: list[Record] = []
        self.begin = time.time()
        self._started = time.monotonic()  # the clock on the wall may be set while the sweep runs
        self.total = 0
        self.done = 0
        self.skipped_for_budget = 0
        self.unrecorded = 0
        self.environment: Environment | None = None
        self.idle: dict[str, Any] = {}
        self.completed = False
        self._nodeids: dict[str, str] = {}
        self._oom: dict[str, int] = {}
        self._folder: Path | None = None
        self._worker: Worker | None = None
        self._worker_target: Target | None = None

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
            case, target = self._case(item)
        except ConfigurationError as error:
            pytest.fail(str(error), pytrace=False)
        twin = self._nodeids.setdefault(case.case_id, item.nodeid)
        if twin != item.nodeid:
            pytest.fail(f"{case.label} is the case of {twin} already: rename one of the two functions", pytrace=False)
        if case.case_id in self.finished:
            self.unrecorded -= 1
            pytest.skip("already in the file that is resumed")
        if self._too_late():
            self.skipped_for_budget += 1
            pytest.skip(f"the budget of {self.options.budget_s:g} s is spent; go on with --bench-resume {self.path}")
        known = self._oom.get(case.series.case_id)
        if known is not None and case.batch_size is not None and case.batch_size > known:
            reply = _reply("oom", f"not tried: batch {known} of this series did not fit")
        else:
            reply = self._measure(item, case, target)
        record = self._record(item, case, target, reply)
        self._keep(record)
        self.unrecorded -= 1
        item.user_properties.append(("outcome", record.outcome))
        item.user_properties.append(("case_id", record.case_id))
        replay(item, benchmark, record)
        self.conclude(record, reply.get("longrepr"), reply.get("output", ""))
        self._hold_against_baseline(item, record)

    def _case(self, item: pytest.Function) -> tuple[Case, Target]:
        if CASE in item.stash:
            return item.stash[CASE]
        callspec = getattr(item, "callspec", None)
        target = callspec.params.get("joulemark_gpu", self.targets[0]) if callspec else self.targets[0]
        return case_of_function(item, target), target

    def _measure(self, item: pytest.Function, case: Case, target: Target) -> dict[str, Any]:
        """One reply for all processes; a CUDA error is tried once more in a fresh process."""
        replies: list[dict[str, Any]] = []
        for process in range(self.options.processes):
            if process or (self.options.processes > 1 and self._worker is not None):
                self._restart()
            reply = self._ask(item, target, process)
            if reply.get("poisoned"):
                self._restart()
                first = reply["reason"]
                reply = self._ask(item, target, process)
                if reply.get("poisoned"):
                    self._restart()
                    reply["reason"] = f"{reply['reason']} (twice, the second time in a fresh process)"
                else:
                    reply["findings"] = [*reply["findings"], _retried(first).to_json()]
            replies.append(reply)
            if reply["outcome"] != "ok":
                break
        if replies[-1]["outcome"] == "ok" and "profiler" in replies[-1].get("collect", ()):
            profiled = self._profile(item, case, target)
            replies[-1] = {
                **replies[-1],
                "measurements": [*replies[-1]["measurements"], *profiled["measurements"]],
                "findings": [*replies[-1]["findings"], *profiled["findings"]],
                "window_utc": [replies[-1]["window_utc"][0], time.time()],
            }
        joined = dict(replies[-1])
        joined["measurements"] = [one for reply in replies for one in reply["measurements"]]
        joined["findings"] = [one for reply in replies for one in reply["findings"]]
        joined["window_utc"] = [replies[0]["window_utc"][0], replies[-1]["window_utc"][1]]
        if joined["outcome"] == "oom":
            self.note_oom(case)
        return joined

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
                    budget_s=self._share(),
                    process=process,
                )
            )
        except (CaseTimeout, WorkerDied) as error:
            what = error.what if isinstance(error, CaseTimeout) else str(error)
            return {**_reply("failed", what), "window_utc": [begin, time.time()]}

    def _worker_for(self, target: Target) -> Worker:
        if self._worker is not None and self._worker_target != target:
            self._worker.close()
            self._worker = None
        if self._worker is None:
            if target.uuid is not None and "power" in self.options.collect and not self.idle:
                self.idle = idle_baseline(target.uuid)
            self._worker_target = target
            self._worker = Worker(
                child_arguments(self.config),
                ",".join(one for one in self.options.collect if one != "profiler") or "timing",
                Path(tempfile.mkdtemp(dir=self._scratch())),  # answers of an earlier worker are not this one's
                child_environment(target, self.targets),
                self.config.invocation_params.dir,
            )
        return self._worker

    def _scratch(self) -> Path:
        """Folder for answers and output of the workers; removed at the end."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="joulemark-"))
        return self._folder

    def cases(self, items: Iterable[pytest.Item]) -> dict[str, Case]:
        """The cases that these items are, by node id; an item whose case is not valid has none."""
        out = {}
        for item in items:
            if isinstance(item, pytest.Function):
                with suppress(ConfigurationError):
                    out[item.nodeid] = self._case(item)[0]
        return out

    def _profile(self, item: pytest.Function, case: Case, target: Target) -> dict[str, Any]:
        """The profiler pass in a worker of its own, which ends with it; whatever goes wrong costs its figures alone."""
        worker = Worker(
            child_arguments(self.config),
            "profiler",
            Path(tempfile.mkdtemp(dir=self._scratch())),
            child_environment(target, self.targets),
            self.config.invocation_params.dir,
        )
        trace = self.path.parent / f"{self.path.stem}-traces" / f"{case.case_id}.json.gz"
        kept = str(trace.resolve()) if self.options.keep_traces else None
        try:
            reply = worker.ask(item.nodeid, None, self.options.timeout_s, trace=kept)
        except (CaseTimeout, WorkerDied) as error:
            reply = _reply("failed", error.what if isinstance(error, CaseTimeout) else str(error))
        finally:
            worker.close()
        if not reply["measurements"]:  # what was measured before a later failure of the item stands
            why = f"the profiler pass ended {reply['outcome']}: {reply['reason']}"
            reply["measurements"] = [Measurement("profiler", missing=dict.fromkeys(PROFILER, why)).to_json()]
        return dict(reply)

    def _restart(self) -> None:
        if self._worker is not None:
            self._worker.kill()

    # -- budget

    def _too_late(self) -> bool:
        return self.options.budget_s is not None and self.wall_s >= self.options.budget_s

    def _share(self) -> float | None:
        """Seconds for the passes of the next case: an even share of what is left, less what cases cost besides."""
        if self.options.budget_s is None:
            return None
        left = self.options.budget_s - self.wall_s
        return max(0.1, left / max(1, self.total - self.done) - self._overhead())

    def _overhead(self) -> float:
        """Median time per case outside its passes so far, in s (building, warm-up, edges).

        The first case of a process pays for imports and libraries: a mean would make the next ones pay again.
        """
        outside = [
            one.window_utc[1] - one.window_utc[0] - union_length(one.measured_windows_utc)
            for one in self.records[-20:]
            if one.window_utc is not None and one.measured_windows_utc
        ]
        return max(0.0, median(outside)) if len(outside) > 2 else 1.0

    # -- records

    def _record(self, item: pytest.Item, case: Case, target: Target, reply: Mapping[str, Any]) -> Record:
        environment = self._environment()
        findings = [Finding.from_json(one) for one in reply["findings"]]
        if target.note is not None:
            findings.append(Finding("gpu_unverified", target.note, "name the GPU by its UUID", flags=True))
        outcome: Outcome = reply["outcome"]
        uuid = target.uuid
        if uuid is not None and self.options.anonymize:
            from joulemark.environment import anonymous

            uuid = anonymous(uuid)
        return assemble(
            case,
            [Measurement.from_json(one) for one in reply["measurements"]],
            run_id=self.run_id,
            environment_id=environment.environment_id,
            outcome=outcome,
            reason=reply["reason"],
            gpu_uuid=uuid,
            nodeid=item.nodeid,
            findings=findings,
            window_utc=tuple(reply["window_utc"]),
            static_power_w=reply.get("static_power_w"),
        )

    def _environment(self) -> Environment:
        if self.environment is None:
            from joulemark.environment import gather

            hello = (self._worker.hello if self._worker is not None else None) or {}
            framework = dict(hello.get("facts") or {})
            if self.idle:
                framework["baselines"] = {**framework.get("baselines", {}), **self.idle}
            found = gather(
                self.inventory,
                self.config.rootpath,
                anonymize=self.options.anonymize,
                framework=framework,
                options=[str(one) for one in self.config.invocation_params.args],
            )
            clock = "host_clock" if hello.get("no_clock") or not self.targets[0].on_gpu else "cuda_events"
            seen = {"energy": hello.get("no_power"), "timing": hello.get("no_clock")}
            self.environment = replace(
                found,
                tiers={**found.tiers, "timing": clock, "energy": hello.get("power")},
                notes={**found.notes, **{name: why for name, why in seen.items() if why}},
            )
            self._writer = RunWriter(self.path, self.run_id, self.environment, self.begin)
        return self.environment

    def _keep(self, record: Record) -> None:
        assert self._writer is not None
        try:
            self._writer.write(record)
        except JoulemarkError as error:
            pytest.exit(f"joulemark: {error}", returncode=pytest.ExitCode.USAGE_ERROR)
        self.records.append(record)
        self.done += 1

    def conclude(self, record: Record, longrepr: str | None, output: str) -> None:
        """Turn an outcome into pytest's: failed and unsupported raise, so do flagged and oom under strict."""
        if record.outcome == "unsupported":
            pytest.skip(record.reason or "unsupported")
        if record.outcome == "failed":
            text = "\n".join(part for part in (record.reason, longrepr, output) if part)
            # The child's words may hold anything: what would steer the terminal is spelt out.
            pytest.fail(printable_lines(text), pytrace=False)
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
            pytest.fail(printable_lines(text), pytrace=False)

    # -- in process

    def keep_in_process(self, item: pytest.Function, reply: Mapping[str, Any]) -> Record:
        """Store what this very process measured (``--bench-inprocess``, ``--pdb``)."""
        case, target = self._case(item)
        record = self._record(item, case, target, reply)
        self._keep(record)
        return record

    # -- the end

    def go_on_with(self, run: Run) -> None:
        """Open a resumed file to which this session had no record to add, so that it gets its end."""
        if self._writer is None and run.environments:
            last = list(run.environments.values())[-1]
            self._writer = RunWriter(self.path, self.run_id, last, self.begin)

    def status(self, record: Record) -> str:
        """``[12/96, 2 min left] resnet50-… 1.23 ms``."""
        done, total = self.done, max(self.total, self.done)
        left = self.wall_s / max(1, done) * (total - done)
        # The first cases pay for imports, and skipped ones for nothing: no estimate is better than theirs.
        costly = sum(one.outcome in ("ok", "flagged") for one in self.records)
        estimate = f", about {_duration(left)} left" if costly >= 3 and done < total else ""
        return f"[{done}/{total}{estimate}] {record.case.label}: {progress_line(record)}"

    def close(self, completed: bool, reason: str | None, *, at_once: bool = False) -> None:
        """End the worker and mark the file.

        Args:
            completed: whether every case has its record.
            reason: why it is not complete.
            at_once: kill the worker; otherwise its fixtures are torn down first, however incomplete the sweep is.
        """
        self.completed = completed
        try:
            if self._worker is not None:
                if at_once:
                    self._worker.kill()
                else:
                    self._worker.close()
        finally:  # an interrupt while fixtures are torn down costs neither the file's mark nor the folder
            self._finish(completed, reason)

    def _finish(self, completed: bool, reason: str | None) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._writer is not None:
            with suppress(JoulemarkError):  # a file that cannot be written has ended the session with this very error
                self._writer.end(completed=completed, wall_s=self.wall_s, measured_s=self.measured_s, reason=reason)
            self._writer.close()

    @property
    def wall_s(self) -> float:
        """Wall time of the session so far, in s."""
        return time.monotonic() - self._started

    @property
    def measured_s(self) -> float:
        """Union of the windows whose samples are stored, in s."""
        return union_length(window for record in self.records for window in record.measured_windows_utc)


def printable_lines(text: str) -> str:
    """A text of several lines in which nothing steers the terminal."""
    return "\n".join(printable(line) for line in text.splitlines())


def _retried(first: str | None) -> Finding:
    return Finding("retried", f"a CUDA error ended the first try ({first}); measured in a fresh process", flags=True)


def _reply(outcome: str, reason: str) -> dict[str, Any]:
    now = time.time()
    return {"outcome": outcome, "reason": reason, "measurements": [], "findings": [], "window_utc": [now, now]}


def _next_nodeid(item: pytest.Item) -> str | None:
    """The item after this one: fixtures that both share stay up in the child."""
    items = item.session.items
    index = items.index(item) + 1
    return items[index].nodeid if index < len(items) else None


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def child_environment(target: Target, targets: list[Target]) -> dict[str, str]:
    """The child sees the GPU under test alone, by UUID, and the parent's list of targets."""
    described = [asdict(one) for one in targets]
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": target.uuid or "",
        TARGETS_VARIABLE: json.dumps({"targets": described, "current": target.slug}),
    }


def targets_from_parent() -> list[Target] | None:
    """In a child: the parent's targets, the one of this process first; None in a parent."""
    text = os.environ.get(TARGETS_VARIABLE)
    if text is None:
        return None
    data = json.loads(text)
    targets = [Target(**one) for one in data["targets"]]
    if not targets:
        raise ConfigurationError(
            f"{TARGETS_VARIABLE} names no target", "it is set by joulemark for its measuring processes"
        )
    return sorted(targets, key=lambda one: one.slug != data["current"])


__all__ = ["CASE", "MeasurementError", "Sweep", "child_arguments", "child_environment", "targets_from_parent"]
