"""The door to several processes that measure one case together: one rank each, as ``torchrun`` would start them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from joulemark.errors import CaseTimeout, JoulemarkError, WorkerDied
from joulemark.measure.ranks import join_answers
from joulemark.measure.worker import Worker
from joulemark.records import Json
from joulemark.workloads.parallel import RENDEZVOUS_VARIABLE

GRACE_S = 3.0
"""How long the other ranks may go on after one has failed: they usually hang in a collective from then on."""
_TIDY_S = 10.0


def trace_of_rank(trace: Path, rank: int) -> Path:
    """``case.json.gz`` → ``case-rank1.json.gz``."""
    stem, dot, suffixes = trace.name.partition(".")
    return trace.with_name(f"{stem}-rank{rank}{dot}{suffixes}")


def rank_environment(
    base: Mapping[str, str], rank: int, uuids: Sequence[str], world_size: int, rendezvous: Path
) -> dict[str, str]:
    """The environment of one rank: its own GPU first, torchrun's variables, and communication within this host.

    The GPUs of the other ranks stay visible behind its own one: peers exchange data through handles of each other's
    memory. Multicast over NVLink (NVLS) is off, since a hypervisor or a container may not pass it on; whoever sets
    one of these variables keeps that value.

    Args:
        base: the environment of the group.
        uuids: GPUs in order of rank; empty on the CPU. The ranks share the cores of the host evenly.
        rendezvous: a file that does not exist yet.
    """
    local = {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    local["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // world_size))
    names = {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    names |= {name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    own_first = [*uuids[rank : rank + 1], *uuids[:rank], *uuids[rank + 1 :]]
    return {
        **local,
        **base,
        **names,
        RENDEZVOUS_VARIABLE: str(rendezvous),
        "CUDA_VISIBLE_DEVICES": ",".join(own_first),
    }


@dataclass
class RankGroup:
    """Measuring processes, one per rank, that are asked, answer and end together.

    A rank that dies, fails or is late ends all of them, and is named: no rank waits for it, and no GPU stays held.

    Args:
        arguments, passes, folder, environment, cwd: as of :class:`joulemark.measure.worker.Worker`.
        world_size: number of ranks.
        uuids: GPUs in order of rank; empty on the CPU.
    """

    arguments: Sequence[str]
    passes: str
    folder: Path
    environment: Mapping[str, str]
    cwd: Path
    world_size: int
    uuids: Sequence[str] = ()
    _workers: list[Worker] = field(default_factory=list, repr=False)

    @property
    def hello(self) -> Json:
        """Rank 0's greeting; None before the first request."""
        return self._workers[0].hello if self._workers else None

    def ask(
        self, nodeid: str, next_nodeid: str | None, timeout_s: float | None, trace: str | None = None, **request: Json
    ) -> Json:
        """Have one item measured by all ranks.

        Args:
            nodeid, next_nodeid, timeout_s, request: as of :meth:`joulemark.measure.worker.Worker.ask`.
            trace: where the profiler's traces go, the rank before the suffix (:func:`trace_of_rank`).

        Returns:
            One answer: all ranks' Measurements joined, or the answer of the rank that failed, named.

        Raises:
            CaseTimeout: killed at its timeout.
            WorkerDied: a rank ended without an answer.
        """
        if not self._workers or not all(worker.is_running for worker in self._workers):
            self.kill()
            self._workers = self._new_workers()
        with ThreadPoolExecutor(self.world_size) as pool:
            futures = {
                pool.submit(
                    worker.ask,
                    nodeid,
                    next_nodeid,
                    timeout_s,
                    **request,
                    trace=None if trace is None else str(trace_of_rank(Path(trace), rank)),
                ): rank
                for rank, worker in enumerate(self._workers)
            }
            try:
                first_bad = self._await(futures)
            except BaseException:
                self._end_all()
                raise
        if first_bad is None:
            return join_answers([future.result() for future in futures])
        self.kill()  # ranks that failed apart are not in step any more
        return _blame(futures, first_bad)

    def _new_workers(self) -> list[Worker]:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        workers = []
        for rank in range(self.world_size):
            own = folder / f"rank{rank}"
            own.mkdir()
            environment = rank_environment(self.environment, rank, self.uuids, self.world_size, folder / "rendezvous")
            workers.append(Worker(self.arguments, self.passes, own, environment, self.cwd))
        return workers

    def _await(self, futures: Mapping[Future[Json], int]) -> Future[Json] | None:
        """Wait for all ranks; after the first that failed the others are killed.

        Returns:
            The first future that failed, a death before an answer; None where none did.
        """
        pending = set(futures)
        bad: list[Future[Json]] = []
        deadline: float | None = None
        while pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, pending = wait(pending, left, FIRST_COMPLETED)
            if not done:
                break
            bad += [future for future in done if _failed(future)]
            if bad and deadline is None:
                deadline = time.monotonic() + GRACE_S
        if pending:
            self._end_all()
            wait(pending)
        deaths = [future for future in bad if isinstance(future.exception(), WorkerDied)]
        return next(iter([*deaths, *bad]), None)

    def _end_all(self) -> None:
        for worker in self._workers:
            worker.signal_end()

    def kill(self) -> None:
        """End all ranks and all that they started."""
        self._end_all()
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def close(self) -> None:
        """Let all ranks end by themselves, together; kill those that take too long."""
        workers, self._workers = self._workers, []
        if workers:
            with ThreadPoolExecutor(len(workers)) as pool:
                wait([pool.submit(worker.close, _TIDY_S) for worker in workers])


def _failed(future: Future[Json]) -> bool:
    return future.exception() is not None or future.result()["outcome"] != "ok"


def _blame(futures: Mapping[Future[Json], int], first: Future[Json]) -> Json:
    """The answer of the rank that failed first; its error is raised under its name."""
    who = f"rank {futures[first]} of {len(futures)}"
    error = first.exception()
    if isinstance(error, CaseTimeout):
        raise error
    if isinstance(error, JoulemarkError):
        raise type(error)(f"{who}: {error.what}", error.remedy) from error
    if error is not None:
        raise error
    answer = dict(first.result())
    same = all(one.exception() is None and one.result()["reason"] == answer["reason"] for one in futures)
    if not same:
        answer["reason"] = f"{who}: {answer['reason']}"
    return answer
