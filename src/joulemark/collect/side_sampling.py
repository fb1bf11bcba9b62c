"""PM sampling by a process of its own, for work that runs in this one.

A GPU is sampled as a whole, so a process that only samples sees what others run on it. It is the way out where the
sampler and another instrument do not bear each other in one process; clocks then differ even more surely.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from joulemark.collect.counters import open_counters
from joulemark.collect.pm_sampling import Pace
from joulemark.counter_series import CounterSeries, Tier
from joulemark.errors import CountersUnavailable, DeviceError, NotSupported

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_READY_S, _ANSWER_S, _END_S = 120.0, 120.0, 10.0
_BEGIN, _END = "begin", "end"


class SideSource:
    """A counter source whose sampler lives in another process.

    Args:
        uuid, device, libcupti, pace, wanted: see :func:`joulemark.collect.counters.open_counters`.

    Raises:
        DeviceError: the other process has no PM sampling; its type says why.
    """

    tier: Tier = "pm_sampling"

    def __init__(
        self,
        uuid: str,
        device: str = "cuda:0",
        libcupti: str | None = None,
        pace: Pace | None = None,
        wanted: Collection[str] | None = None,
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, other = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(other, uuid, device, libcupti, pace, wanted), daemon=True)
        self._process.start()
        other.close()
        try:
            self._counters: dict[str, tuple[str, ...]] = self._answer(_READY_S)
        except BaseException:
            self.close()
            raise

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the other process's passes."""
        return tuple(self._counters)

    def counters(self, group: str) -> tuple[str, ...]:
        """Canonical names that a pass gives."""
        return self._counters[group]

    def record(self, group: str, run: Callable[[], object], expected_s: float | None = None) -> CounterSeries:
        """See :meth:`joulemark.counter_series.CounterSource.record`.

        Raises:
            DeviceError: nothing could be counted; its type says why.
        """
        self._send((group, expected_s))
        while True:
            answer = self._answer(_ANSWER_S)
            if isinstance(answer, CounterSeries):
                return answer
            run()
            self._send(_END)

    def _send(self, what: Any) -> None:
        try:
            self._connection.send(what)
        except OSError as error:
            raise CountersUnavailable(f"the sampling process has ended ({error})", "see what it wrote") from error

    def _answer(self, within_s: float) -> Any:
        """What the other process says.

        Raises:
            DeviceError: what it raised; or it says nothing.
        """
        try:
            if not self._connection.poll(within_s):
                raise CountersUnavailable(f"the sampling process said nothing for {within_s:g} s", "try again")
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise CountersUnavailable(f"the sampling process has ended ({error})", "see what it wrote") from error
        if isinstance(answer, DeviceError):
            raise answer
        return answer

    def close(self) -> None:
        """Ends the other process."""
        with suppress(OSError):  # it has ended by itself
            self._connection.send(None)
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()


def _serve(
    connection: Connection,
    uuid: str,
    device: str,
    libcupti: str | None,
    pace: Pace | None,
    wanted: Collection[str] | None,
) -> None:
    """The other process: opens the sampler, then samples while it is told that work runs."""
    ladder = open_counters(uuid, device, libcupti, pace, wanted=wanted)
    source = ladder.source
    if source is None or source.tier != "pm_sampling":
        connection.send(_refusal(ladder.refused))
        return
    connection.send({group: source.counters(group) for group in source.groups})

    def work() -> None:
        connection.send(_BEGIN)
        connection.recv()

    try:
        while (request := connection.recv()) is not None:
            try:
                connection.send(source.record(request[0], work, request[1]))
            except DeviceError as error:
                connection.send(error)
    except EOFError:
        pass  # the process that asked has ended
    finally:
        ladder.close()


def _refusal(refused: Mapping[Tier, DeviceError]) -> DeviceError:
    return refused.get("pm_sampling") or NotSupported("this GPU has no PM sampling")
