"""A GPU of a cluster at work: it measures cases behind the door to a fresh process, on the node that it stands on."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from joulemark.device.gpu import Inventory, probe_gpus
from joulemark.environment import gather, why_no_gpu, with_instruments
from joulemark.errors import CaseTimeout, WorkerDied
from joulemark.measure.attempts import attempts
from joulemark.measure.replies import as_one, died, filled, joined
from joulemark.measure.worker import Worker, preload
from joulemark.metrics import COUNTERS, PROFILER
from joulemark.records import Json


@dataclass(frozen=True)
class StationPlan:
    """What every station of a sweep is told.

    Args:
        arguments: pytest's, for the measuring process.
        passes: the instruments, as ``--bench-collect`` takes them.
        cwd: folder in which the driver was started; the same path holds the project on every node.
        processes: fresh processes per case.
        timeout_s: per case, None for none.
        anonymize: leave out host names and paths.
        options: the command line, for the record's environment.
        cupti: path of the libcupti to count with, at the same place on every node; None for torch's own.
    """

    arguments: tuple[str, ...]
    passes: str
    cwd: str
    processes: int = 1
    timeout_s: float | None = None
    anonymize: bool = False
    options: tuple[str, ...] = ()
    cupti: str | None = None


_PASSES_ALONE = {"profiler": PROFILER, "counters": COUNTERS}
"""Pass with a process of its own → what it gives."""


class Station:
    """One GPU, as the process that holds it sees it through ``CUDA_VISIBLE_DEVICES``.

    Args:
        plan: of the sweep.
    """

    def __init__(self, plan: StationPlan) -> None:
        self._plan = plan
        # Numbers in the variable are then those of NVML, whatever CUDA's own order: the child gets the UUID.
        self._inventory: Inventory = probe_gpus({**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
        self._gpu = next((one.gpu for one in self._inventory.visible), None)
        self._folder = Path(tempfile.mkdtemp(prefix="joulemark-"))
        self._worker: Worker | None = None
        self._environment: Json = None
        self._counters: Json = None

    def describe(self) -> dict[str, Any]:
        """The GPU, the node, and what keeps this station from measuring."""
        problem = None
        if not Path(self._plan.cwd).is_dir():
            problem = f"there is no folder {self._plan.cwd}"
        return {
            "gpu": None if self._gpu is None else asdict(self._gpu),
            "no_gpu": why_no_gpu(self._inventory),
            "simulated": self._inventory.simulated,
            "driver": self._inventory.driver,
            "cuda_driver": self._inventory.cuda_driver,
            "node": socket.gethostname(),
            "problem": problem,
        }

    def measure(self, nodeid: str, variables: Mapping[str, str], budget_s: float | None = None) -> dict[str, Any]:
        """Have one item measured here.

        Args:
            nodeid: pytest's id.
            variables: for the measuring process: its GPU and target.
            budget_s: wall time for its passes.

        Returns:
            The reply, with the UUID of the GPU and the environment that the record belongs to.
        """
        if self._worker is None:
            self._worker = self._new_worker(self._plan.passes, variables)
        replies = attempts(
            lambda process: self._ask(self._worker, nodeid, budget_s=budget_s, process=process),
            self._worker.kill,
            self._plan.processes,
            self._worker.is_running,
        )
        reply = as_one(replies)
        collect = reply.get("collect", ()) if reply["outcome"] == "ok" else ()
        for name in _PASSES_ALONE:
            if name in collect:
                reply = joined(reply, self._alone(name, nodeid, variables))
        uuid = None if self._gpu is None else self._gpu.uuid
        return {**reply, "gpu_uuid": uuid, "environment": self._facts()}

    def close(self) -> None:
        """Let the measuring process end: its fixtures are torn down."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _new_worker(self, passes: str, variables: Mapping[str, str]) -> Worker:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        environment = {**os.environ, **variables}
        if passes == "counters" and self._plan.cupti is not None:
            environment = preload(environment, Path(self._plan.cupti))
        return Worker(self._plan.arguments, passes, folder, environment, Path(self._plan.cwd))

    def _ask(self, worker: Worker | None, nodeid: str, **request: Json) -> dict[str, Any]:
        assert worker is not None
        begin = time.time()
        try:
            return dict(worker.ask(nodeid, None, self._plan.timeout_s, **request))
        except (CaseTimeout, WorkerDied) as error:
            return died(error, begin)

    def _alone(self, name: str, nodeid: str, variables: Mapping[str, str]) -> dict[str, Any]:
        """A pass in a worker that ends with it; whatever goes wrong costs its figures alone."""
        worker = self._new_worker(name, variables)
        try:
            reply = self._ask(worker, nodeid)
            self._counters = (worker.hello or {}).get("counters") or self._counters
        finally:
            worker.close()
        return filled(reply, name, _PASSES_ALONE[name])

    def _facts(self) -> Json:
        """The environment of this station's records; gathered once its measuring process has said what it has."""
        hello = (self._worker.hello if self._worker is not None else None) or {}
        if self._environment is None or (hello and not self._environment["greeted"]):
            found = gather(
                self._inventory,
                Path(self._plan.cwd),
                anonymize=self._plan.anonymize,
                framework=hello.get("facts") or {},
                options=self._plan.options,
            )
            known = with_instruments(found, {**hello, "counters": self._counters}, on_gpu=self._gpu is not None)
            self._environment = {
                "greeted": bool(hello),
                "facts": dict(known.facts),
                "tiers": dict(known.tiers),
                "notes": dict(known.notes),
            }
        return self._environment
