"""The measuring processes of a sweep: which there are, what each is asked, when each ends."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from joulemark.attribution.stored import folder_beside
from joulemark.errors import CaseTimeout, WorkerDied
from joulemark.measure.attempts import attempts
from joulemark.measure.communication import communication_measurement
from joulemark.measure.plan import ALONE
from joulemark.measure.rank_group import RankGroup, trace_of_rank
from joulemark.measure.replies import as_one, died, joined, unmeasured
from joulemark.measure.turn import TURN_VARIABLE
from joulemark.measure.worker import SCRATCH_PREFIX, Worker, preload
from joulemark.metrics import ATTRIBUTION, COUNTERS
from joulemark.plugin.inherited import child_arguments, child_environment
from joulemark.plugin.instruments import idle_baseline, shared_gpu
from joulemark.plugin.journal import Seen
from joulemark.plugin.own_process import OwnProcess
from joulemark.plugin.profiling import PASS as PROFILING
from joulemark.plugin.profiling import ProfilingProcess
from joulemark.plugin.sweep import Target
from joulemark.records import Case, Environment, Finding, Json, Measurement

if TYPE_CHECKING:
    from joulemark.device.lease import Leases
    from joulemark.plugin.options import BenchOptions


class Workers:
    """One process that times the cases of a target, and one for each pass that has its own; all started when needed.

    Args:
        config: pytest's.
        options: of the session.
        targets: devices under test.
        pool: UUIDs of the GPUs that may work together, by model.
        results: file of the records; what else is kept of cases goes into folders beside it.
        scratch: folder in which to make one for answers and output; the system's by default.

    Attributes:
        leases: of the GPUs, shared with the measuring processes; None where leases are off.
    """

    def __init__(
        self,
        config: pytest.Config,
        options: BenchOptions,
        targets: list[Target],
        pool: Mapping[str, Sequence[str]],
        results: Path,
        scratch: Path | None = None,
    ) -> None:
        self.config = config
        self.options = options
        self.targets = targets
        self.pool = pool
        self._traces = results.with_name(f"{results.stem}-traces").resolve()
        self._documents = folder_beside(results).resolve()
        self.leases: Leases | None = None
        self._idle: dict[str, dict[str, Any]] = {}
        self._shared: dict[str, Finding | None] = {}
        self._scratch_root = scratch
        self._folder: Path | None = None
        self._worker: Worker | RankGroup | None = None
        self._worker_target: Target | None = None
        self._counting = OwnProcess("counters", COUNTERS, lambda target: self._new_worker(target, "counters"))
        self._attributing = OwnProcess(
            "attribution", ATTRIBUTION, lambda target: self._new_worker(target, "attribution")
        )
        self._profiling = ProfilingProcess(lambda target: self._new_worker(target, PROFILING))

    def measure(self, item: pytest.Function, case: Case, target: Target, share: Callable[[], float | None]) -> Json:
        """One reply for all processes; a CUDA error is tried once more in a fresh process.

        Args:
            item: to measure.
            case: that it is.
            target: that it runs on.
            share: seconds for the passes of the next process; None for any.
        """
        replies = attempts(
            lambda process: self._ask(item, target, process, share),
            self._restart,
            self.options.processes,
            self._worker is not None,
        )
        if replies[-1]["outcome"] == "ok":
            for other in self._passes_alone(item, case, target, replies[-1].get("collect", ())):
                replies[-1] = joined(replies[-1], other)
        reply = as_one(replies)
        shared = [one.to_json() for uuid in target.uuids if (one := self._shared.get(uuid)) is not None]
        return {**reply, "findings": [*reply["findings"], *shared]}

    def seen(self, target: Target, elsewhere: Environment | None) -> Seen:
        """What the processes have told of a device.

        Args:
            target: the device.
            elsewhere: the environment of another node, which measured instead; None for this machine.
        """
        hello = (self._worker.hello if self._worker is not None and self._worker_target == target else None) or {}
        counting = {"counters": self._counting.hello.get("counters")}
        return Seen(target, {**hello, **counting}, self._idle.get(target.uuid or "", {}), elsewhere)

    def _ask(
        self, item: pytest.Function, target: Target, process: int, share: Callable[[], float | None]
    ) -> dict[str, Any]:
        begin = time.time()
        try:
            worker = self._worker_for(target)
            if isinstance(worker, Worker) and (refused := worker.ensure_started().get("refused")):
                return self._refuse(refused)
            return dict(
                worker.ask(
                    item.nodeid,
                    None if self.options.processes > 1 else _next_nodeid(item),
                    self.options.timeout_s,
                    budget_s=share(),
                    process=process,
                )
            )
        except (CaseTimeout, WorkerDied) as error:
            return died(error, begin)

    def _refuse(self, why: str) -> dict[str, Any]:
        """End the session for want of a model that it names; where several workers measure, each case tells why.

        Raises:
            pytest.exit.Exception: with the exit status of wrong use.
        """
        if hasattr(self.config, "workerinput"):  # as pytest-xdist's workers have
            return unmeasured("failed", why)
        pytest.exit(why, pytest.ExitCode.USAGE_ERROR)

    def _worker_for(self, target: Target) -> Worker | RankGroup:
        if self._worker is not None and self._worker_target != target:
            self._worker.close()
            self._worker = None
        if self._worker is None:
            for uuid in target.uuids:  # while no process of this session holds a context there
                if uuid not in self._shared:
                    self._shared[uuid] = shared_gpu(uuid)
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

    def _restart(self) -> None:
        if self._worker is not None:
            self._worker.kill()

    def _passes_alone(
        self, item: pytest.Function, case: Case, target: Target, collect: Iterable[str]
    ) -> Iterator[dict[str, Any]]:
        """What the passes with processes of their own add to a case's reply."""
        if "profiler" in collect:
            yield self._profile(item, case, target)
        if self._counts_alone(target, collect):
            yield self._counting.measure(item.nodeid, target, self.options.timeout_s)
        elif "counters" in collect:
            yield _of_one_process("counters", COUNTERS, target)
        if "attribution" in collect:
            several = target.world_size > 1
            yield (
                _of_one_process("attribution", ATTRIBUTION, target) if several else self._attribute(item, case, target)
            )

    def _profile(self, item: pytest.Function, case: Case, target: Target) -> dict[str, Any]:
        """The profiler pass in its own process."""
        folder = self._traces if self.options.keep_traces else self._scratch().resolve()
        trace = folder / f"{case.case_id}.json.gz"
        several = target.world_size > 1
        kept = trace if self.options.keep_traces or several else None
        reply = self._profiling.profile(item.nodeid, target, self.options.timeout_s, kept)
        if several:  # what a collective costs shows only beside the traces of the other ranks
            traces = [trace_of_rank(trace, rank) for rank in range(target.world_size)]
            reply["measurements"].append(communication_measurement(traces).to_json())
            for one in () if self.options.keep_traces else traces:
                one.unlink(missing_ok=True)
        return reply

    def _attribute(self, item: pytest.Function, case: Case, target: Target) -> dict[str, Any]:
        """The attribution pass in a process that ends with it: many sessions of the profiler stand in it."""
        kept = str(self._traces / f"{case.case_id}-attribution") if self.options.keep_traces else None
        document = str(self._documents / f"{case.case_id}.json")
        reply = self._attributing.measure(item.nodeid, target, self.options.timeout_s, trace=kept, document=document)
        self._attributing.close()
        return reply

    @staticmethod
    def _counts_alone(target: Target, collect: Iterable[str]) -> bool:
        """Whether a target's cases have counters: they are read of one GPU beside one process."""
        return "counters" in collect and target.world_size == 1

    def _new_worker(self, target: Target, passes: str) -> Worker | RankGroup:
        """A measuring process for a target, or one for each of its ranks."""
        environment = child_environment(target, self.targets, self.pool)
        if self.leases is not None and target.on_gpu:
            environment |= self.leases.pass_on(*target.uuids)
        if passes in ("counters", "attribution"):
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

    def close(self, *, at_once: bool = False) -> None:
        """End the processes.

        Args:
            at_once: kill them; otherwise fixtures are torn down first, however incomplete the sweep is.
        """
        try:
            if not at_once:  # a process with a CUDA context takes its time to end: they do so together
                self._profiling.ask_to_end()
                self._counting.ask_to_end()
            for one in (self._worker, self._profiling, self._counting, self._attributing):
                if one is not None and at_once:
                    one.kill()
                elif one is not None:
                    one.close()
        finally:  # an interrupt while fixtures are torn down does not leave the folder
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)


def _of_one_process(name: str, metrics: Sequence[str], target: Target) -> dict[str, Any]:
    """What a pass that reads counters adds to the reply of a case with several ranks: why there are none."""
    why = f"the counters are read of one GPU beside one process, and this case has {target.world_size}"
    skipped = Measurement(name, missing=dict.fromkeys(metrics, why))
    return {"measurements": [skipped.to_json()], "findings": []}


def _next_nodeid(item: pytest.Item) -> str | None:
    """The item after this one: fixtures that both share stay up in the child."""
    items = item.session.items
    index = items.index(item) + 1
    return items[index].nodeid if index < len(items) else None
