"""The GPUs of a Ray cluster as seats: an actor on each, which holds its GPU until the sweep ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from joulemark.device.gpu import Gpu, Inventory, VisibleGpu
from joulemark.errors import ConfigurationError, Unsupported
from joulemark.measure.dispatch import Event, Job, Seat
from joulemark.measure.station import Station, StationPlan

FIRST_SEATS_S = 120.0
"""How long the sweep waits for its first GPUs; others may come later, when whoever holds them lets them go."""

_TIDY_S = 15.0


class RayCluster:
    """An executor on Ray.

    One actor per GPU that a node offers, pinned to its node, with ``num_gpus=1``: Ray gives no other task the GPU while
    it is measured, and the measuring process behind the actor is kept from case to case. No actor is restarted by Ray
    and no call is repeated by it: a lost case is the dispatcher's business.

    Args:
        address: ``auto`` or ``ray://host:port``.
        plan: of every station.

    Raises:
        Unsupported: ray is not installed.
        ConfigurationError: the cluster does not answer, or has no GPU.
    """

    def __init__(self, address: str, plan: StationPlan) -> None:
        try:
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        except ImportError as error:
            raise Unsupported("--bench-cluster needs ray", "pip install 'joulemark[ray]'") from error
        self._ray: Any = ray
        self._pin: Any = NodeAffinitySchedulingStrategy
        self._connect(address)
        self._events: list[Event] = []
        self._actors: dict[str, Any] = {}
        self._arriving: dict[Any, tuple[Any, str]] = {}
        self._busy: dict[Any, tuple[Seat, Job, int]] = {}
        self._gpus: dict[str, VisibleGpu] = {}
        self._told: dict[str, Any] = {}
        self._arrivals = 0
        self.problems: list[str] = []
        self._wanted: Callable[[Seat], bool] = lambda _: True
        self.variables: Callable[[Seat], Mapping[str, str]] = lambda _: {}
        self.budget_s: Callable[[], float | None] = lambda: None
        self._open(address, plan)

    def _connect(self, address: str) -> None:
        try:
            self._ray.init(address=address, log_to_driver=False, ignore_reinit_error=True)
        except (ConnectionError, RuntimeError, ValueError) as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise ConfigurationError(
                f"--bench-cluster: no Ray cluster answers at {address} ({first})",
                "start one (ray start --head, and ray start --address=HEAD:6379 on the nodes)",
            ) from error

    def _open(self, address: str, plan: StationPlan) -> None:
        """Ask for an actor on every GPU."""
        actor = self._ray.remote(Station)
        for node in self._ray.nodes():
            for _ in range(int(node["Resources"].get("GPU", 0)) if node["Alive"] else 0):
                pinned = self._pin(node["NodeID"], soft=False)
                handle = actor.options(num_gpus=1, num_cpus=0, max_restarts=0, scheduling_strategy=pinned).remote(plan)
                self._arriving[handle.describe.remote()] = (handle, str(node["NodeID"]))
        if not self._arriving:
            raise ConfigurationError(
                f"--bench-cluster: no node of the Ray cluster at {address} offers a GPU",
                "start the nodes with ray start --num-gpus=N",
            )

    # -- before the sweep

    def inventory(self) -> Inventory:
        """The GPUs that have come so far, as a session knows them; waits for the first, and for those that come soon.

        Raises:
            ConfigurationError: none has come; the message holds a node's own reason.
        """
        waiting = list(self._arriving)
        ready, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=FIRST_SEATS_S)
        self._events += [event for ref in ready for event in self._ended(ref)]
        if not self._actors:
            why = f" ({self.problems[0]})" if self.problems else ": they are in use, or their nodes are starting"
            raise ConfigurationError(
                f"--bench-cluster: no GPU of the cluster could be had within {FIRST_SEATS_S:g} s{why}",
                "see ray status, and the reason above",
            )
        gpus = tuple(one.gpu for one in self._gpus.values())
        visible = tuple(VisibleGpu(gpu, n, True, "held through Ray") for n, gpu in enumerate(gpus))
        return Inventory(
            gpus, visible, None, self._told.get("driver"), self._told.get("cuda_driver"), bool(self._told["simulated"])
        )

    def keep(self, wanted: Callable[[Seat], bool]) -> None:
        """Let the GPUs go that this sweep does not use, now and as they come: another driver may wait for them."""
        self._wanted = wanted
        held, self._events = self._events, []
        for event in held:
            if wanted(event.seat):
                self._events.append(event)
            else:
                self._ray.kill(self._actors.pop(event.seat.key))

    @property
    def no_gpu(self) -> str | None:
        """Why the nodes measure their CPUs; None where they have GPUs."""
        return None if self._gpus else self._told.get("no_gpu")

    @property
    def seats(self) -> int:
        """GPUs that are held now."""
        return len(self._actors)

    # -- what the dispatcher sees

    def start(self, seat: Seat, job: Job, attempt: int) -> None:
        """Have a job measured on its seat."""
        call = self._actors[seat.key].measure.remote(job.nodeid, dict(self.variables(seat)), self.budget_s())
        self._busy[call] = (seat, job, attempt)

    def wait(self) -> Iterable[Event]:
        """All that has happened, at least one event; none when nothing is on its way."""
        events, self._events = self._events, []
        while not events and (self._busy or self._arriving):
            pending = [*self._busy, *self._arriving]
            self._ray.wait(pending, num_returns=1)
            ready, _ = self._ray.wait(pending, num_returns=len(pending), timeout=0)
            events = [event for ref in ready for event in self._ended(ref)]
        return events

    def _ended(self, ref: Any) -> Iterable[Event]:
        """The events that a finished call stands for."""
        errors = self._ray.exceptions.RayError
        if ref in self._arriving:
            handle, node = self._arriving.pop(ref)
            try:
                told = self._ray.get(ref)
            except errors as error:
                self.problems.append(_first_line(error))
                return []
            return self._arrived(handle, node, told)
        seat, job, attempt = self._busy.pop(ref)
        try:
            return [Event(seat, job, attempt, self._ray.get(ref))]
        except errors as error:
            handle = self._actors.pop(seat.key)
            self._ray.kill(handle)
            return [Event(seat, lost=_first_line(error))]

    def _arrived(self, handle: Any, node: str, told: Mapping[str, Any]) -> list[Event]:
        if told["problem"] is not None:
            self.problems.append(f"node {told['node']}: {told['problem']}: the project must be there, at the same path")
            self._ray.kill(handle)
            return []
        gpu = None if told["gpu"] is None else Gpu(**told["gpu"])
        self._arrivals += 1
        key = f"{node}/{self._arrivals}"
        seat = Seat(key, None if gpu is None else gpu.uuid, "cpu" if gpu is None else gpu.slug, told["node"])
        if not self._wanted(seat):
            self._ray.kill(handle)
            return []
        self._actors[key] = handle
        self._told = self._told or dict(told)
        if gpu is not None:
            self._gpus.setdefault(gpu.uuid, VisibleGpu(gpu, len(self._gpus), True, "held through Ray"))
        return [Event(seat)]

    def close(self, *, at_once: bool = False) -> None:
        """Let all GPUs go; measuring processes that do not end in time end with their actors.

        Args:
            at_once: do not wait for them.
        """
        ending = [] if at_once else [handle.close.remote() for handle in self._actors.values()]
        if ending:
            self._ray.wait(ending, num_returns=len(ending), timeout=_TIDY_S)
        for handle in [*self._actors.values(), *(handle for handle, _ in self._arriving.values())]:
            self._ray.kill(handle)
        self._actors.clear()
        self._arriving.clear()
        self._ray.shutdown()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
