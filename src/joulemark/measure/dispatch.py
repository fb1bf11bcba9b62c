"""Hands the cases of a sweep to the GPUs of a cluster, each answer exactly once, whatever is lost on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from joulemark.records import Json

MOST_ATTEMPTS = 3
"""A case that has taken this many nodes down with it is not tried again."""


@dataclass(frozen=True)
class Seat:
    """A GPU of a cluster, held for the whole sweep.

    Args:
        key: names it among the seats, for good: a GPU that comes back gets a new one.
        uuid: of the GPU; None for a CPU.
        model: slug of its model.
        node: where it is, for messages.
    """

    key: str
    uuid: str | None
    model: str
    node: str


@dataclass(frozen=True)
class Job:
    """A case to be measured.

    Args:
        nodeid: pytest's id of its item.
        case_id: of its case.
        where: the model of the GPU, or the UUID of one.
    """

    nodeid: str
    case_id: str
    where: str


@dataclass(frozen=True)
class Answer:
    """What became of a job.

    Args:
        job: that was measured.
        attempt: from 1; more than 1 after nodes were lost.
        reply: of the measuring process; None when no seat could measure it.
        seat: that measured it.
        reason: why there is no reply.
    """

    job: Job
    attempt: int
    reply: Json | None
    seat: Seat | None
    reason: str | None = None


@dataclass(frozen=True)
class Event:
    """Something that happened on a seat: it has come, has answered a job, or is lost.

    Args:
        seat: the seat.
        job, attempt: that it answers, None where it does not.
        reply: to the job.
        lost: why the seat will answer no more.
    """

    seat: Seat
    job: Job | None = None
    attempt: int = 0
    reply: Json | None = None
    lost: str | None = None


class Executor(Protocol):
    """A cluster, as the dispatcher sees it."""

    def start(self, seat: Seat, job: Job, attempt: int) -> None:
        """Have a job measured on an idle seat; an event tells the end."""
        ...

    def wait(self) -> Iterable[Event]:
        """What has happened since the last call; waits until something has, none when nothing more can happen."""
        ...


class Dispatcher:
    """A queue per GPU model and per GPU; at most one job per seat is on its way.

    So the driver holds as many jobs in flight as there are GPUs, not as there are cases. A job whose seat is lost goes
    back to the front of its queue. Of the answers for one case the first counts; a later one (from a node that was
    taken for dead) is dropped.

    Args:
        executor: the cluster.
        jobs: in the order in which they should start.
        refuse: asked before a job starts: a reply instead of measuring it (a smaller batch did not fit), or None.
    """

    def __init__(
        self, executor: Executor, jobs: Iterable[Job], refuse: Callable[[Job], Json | None] = lambda _: None
    ) -> None:
        self._executor = executor
        self._refuse = refuse
        self._queues: dict[str, deque[tuple[Job, int]]] = {}
        self._idle: list[Seat] = []
        self._seats: dict[str, Seat] = {}
        self._running: dict[str, tuple[Job, int]] = {}
        self._answered: set[str] = set()
        self.dropped = 0
        for job in jobs:
            self._queues.setdefault(job.where, deque()).append((job, 1))

    def run(self) -> Iterator[list[Answer]]:
        """All answers, those that have come together in one list, so that they may be stored together."""
        while self._queues or self._running:
            events = list(self._executor.wait())
            if not events and not self._running:
                yield self._give_up()
                return
            answers = [answer for event in events for answer in self._take(event)]
            answers += self._hand_out()
            if answers:
                yield answers

    def _take(self, event: Event) -> Iterator[Answer]:
        seat = event.seat
        if event.lost is not None:
            yield from self._lose(seat, event.lost)
        elif event.job is None:
            self._seats[seat.key] = seat
            self._idle.append(seat)
        else:
            if self._running.pop(seat.key, None) is not None:
                self._idle.append(seat)
            if event.job.case_id in self._answered:
                self.dropped += 1
            else:
                self._answered.add(event.job.case_id)
                yield Answer(event.job, event.attempt, event.reply, seat)

    def _lose(self, seat: Seat, why: str) -> Iterator[Answer]:
        self._seats.pop(seat.key, None)
        self._idle = [one for one in self._idle if one.key != seat.key]
        job, attempt = self._running.pop(seat.key, (None, 0))
        if job is None or job.case_id in self._answered:
            return
        if attempt < MOST_ATTEMPTS:
            self._queues.setdefault(job.where, deque()).appendleft((job, attempt + 1))
            return
        self._answered.add(job.case_id)
        yield Answer(job, attempt, None, seat, f"lost with its node in each of {attempt} attempts ({why})")

    def _hand_out(self) -> list[Answer]:
        """Give idle seats their next jobs; answers of jobs that are refused."""
        refused: list[Answer] = []
        still_idle: list[Seat] = []
        for seat in self._idle:
            job, attempt = self._next(seat, refused)
            if job is None:
                still_idle.append(seat)
                continue
            self._running[seat.key] = (job, attempt)
            self._executor.start(seat, job, attempt)
        self._idle = still_idle
        return refused

    def _next(self, seat: Seat, refused: list[Answer]) -> tuple[Job | None, int]:
        for where in (seat.uuid, seat.model):
            queue = self._queues.get(where or "")
            while queue:
                job, attempt = queue.popleft()
                if job.case_id in self._answered:
                    continue  # by a node that was taken for dead
                reply = self._refuse(job)
                if reply is None:
                    self._tidy(job.where)
                    return job, attempt
                self._answered.add(job.case_id)
                refused.append(Answer(job, attempt, reply, None))
            self._tidy(where or "")
        return None, 0

    def _tidy(self, where: str) -> None:
        if where in self._queues and not self._queues[where]:
            del self._queues[where]

    def _give_up(self) -> list[Answer]:
        """Answers for what no seat is left for."""
        left = [(where, one) for where, queue in self._queues.items() for one in queue]
        self._queues.clear()
        return [
            Answer(job, attempt, None, None, f"no node with the GPU {where} is left in the cluster")
            for where, (job, attempt) in left
            if job.case_id not in self._answered
        ]
