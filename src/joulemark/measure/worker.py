"""The one door to a fresh process: cases are measured in a child that can be killed and replaced.

The parent starts ``python -m pytest … --bench --bench-worker PASSES:FILE``. The child collects the same
items with the same options, so overridden fixtures, hooks and models that come from options all work in it.
Each answer is a line of JSON in FILE; a socket pair carries the requests and wakes the parent. When the
parent dies, the child reads the end of the stream and dies too.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from joulemark.errors import CaseTimeout, WorkerDied
from joulemark.records import Json

FD_VARIABLE = "JOULEMARK_WORKER_FD"
HELLO = "hello"
WAIT_VARIABLE = "JOULEMARK_WORKER_WAIT"
"""Set for a child that imports and then waits for :data:`OPEN` before it touches its device."""
IMPORTED, OPEN, OPENING = "imported", "open", "opening"
SCRATCH_PREFIX = "joulemark-"
"""Of the parent's folder for answers and output; each worker has a folder of its own in it."""
_LOOK_S = 1.0


def send(connection: socket.socket, message: Json) -> None:
    """Send one JSON message as a line."""
    connection.sendall(json.dumps(message).encode() + b"\n")


@dataclass
class LineReader:
    """Reads JSON lines off a socket, with a deadline."""

    connection: socket.socket
    _buffer: bytes = b""

    def read(self, timeout_s: float | None, is_alive: Callable[[], bool] | None = None) -> Json:
        """The next message.

        Args:
            timeout_s: None waits for ever.
            is_alive: of the other side; asked once a second, since a process that it forked may hold the socket open.

        Raises:
            TimeoutError: none came in time.
            EOFError: the other side has ended.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        ended = False
        while b"\n" not in self._buffer:
            wait = min(deadline - time.monotonic(), math.inf if is_alive is None else _LOOK_S)
            if not self._ready(0.0 if ended else wait):
                if ended:
                    raise EOFError
                if time.monotonic() >= deadline:
                    raise TimeoutError
                ended = is_alive is not None and not is_alive()
                continue
            try:
                data = self.connection.recv(65536)
            except ConnectionError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _ready(self, wait_s: float) -> bool:
        ready, _, _ = select.select([self.connection], [], [], None if math.isinf(wait_s) else max(0.0, wait_s))
        return bool(ready)


@dataclass
class Worker:
    """A measuring process; started on the first request, replaced after it died or was killed.

    Args:
        arguments: pytest's arguments for the child, without ``--bench-worker``.
        passes: the instruments, as ``--bench-collect`` takes them.
        folder: where answers and the child's output go.
        environment: of the child process.
        start_timeout_s: for imports and collection.
        open_timeout_s: for the instruments of a child that was started ahead (:meth:`prepare`).
    """

    arguments: Sequence[str]
    passes: str
    folder: Path
    environment: Mapping[str, str]
    cwd: Path
    start_timeout_s: float = 300.0
    open_timeout_s: float = 60.0
    hello: Json = None
    started: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _connection: socket.socket | None = field(default=None, repr=False)
    _reader: LineReader | None = field(default=None, repr=False)
    _answers: IO[str] | None = field(default=None, repr=False)
    _log: Path | None = field(default=None, repr=False)
    _stage: str = field(default=HELLO, repr=False)
    """Of a child's start, what it says next; empty once it has greeted."""
    _ending: bool = field(default=False, repr=False)

    @property
    def is_running(self) -> bool:
        """Whether the child lives."""
        return self._is_alive()

    @property
    def waits(self) -> bool:
        """Whether the child was started ahead and has not been let at its device."""
        return self._is_alive() and self._stage == IMPORTED

    def ensure_started(self) -> Json:
        """Start the child if none runs; its greeting (software facts, baselines).

        Raises:
            WorkerDied: it ended before it was ready; the message holds the end of its output.
        """
        if not self._is_alive():
            if self._process is not None and self._stage == OPENING:
                raise self._death("did not start")
            self._start({})
        if self._stage == IMPORTED:
            self.open_instruments()
        if self._stage:
            limit = self.open_timeout_s if self._stage == OPENING else self.start_timeout_s
            self.hello, self._stage = self._await(HELLO, limit), ""
        return self.hello

    def prepare(self) -> None:
        """Start the child ahead: it imports, and waits for :meth:`open_instruments` before it touches its device."""
        self._start({WAIT_VARIABLE: "1"})
        self._stage = IMPORTED

    def open_instruments(self) -> None:
        """Let a prepared child open its instruments; returns when it has the turn at its device and begins.

        Raises:
            WorkerDied: it ended before.
        """
        self._await(IMPORTED, self.start_timeout_s)
        assert self._connection is not None
        with suppress(ConnectionError):  # its death shows when it is read
            send(self._connection, {OPEN: True})
        self._await(OPENING, self.open_timeout_s)
        self._stage = OPENING

    def _await(self, what: str, timeout_s: float) -> Json:
        """What a starting child says next."""
        assert self._reader is not None
        try:
            return self._reader.read(timeout_s, self._is_alive)[what]
        except (EOFError, TimeoutError) as error:
            raise self._death("did not start") from error

    def _start(self, more: Mapping[str, str]) -> None:
        self.kill()
        self._stage, self._ending = HELLO, False
        self.started += 1
        answers = self.folder / f"measurements-{self.started}.jsonl"
        answers.touch()
        self._log = self.folder / f"worker-{self.started}.log"
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "pytest", *self.arguments, "--bench-worker", f"{self.passes}:{answers}"]
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.environment, **more, FD_VARIABLE: str(theirs.fileno())},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._connection, self._reader = ours, LineReader(ours)
        self._answers = answers.open(encoding="utf-8")

    def ask(self, nodeid: str, next_nodeid: str | None, timeout_s: float | None, **request: Json) -> Json:
        """Have one item measured.

        Args:
            nodeid: pytest's id of the item.
            next_nodeid: of the item that follows, so that shared fixtures may stay up; None tears all down.
            timeout_s: the child is killed after it.
            request: anything else that the child must know (budget, process number).

        Returns:
            The child's answer, see :func:`joulemark.plugin.child.answer`.

        Raises:
            CaseTimeout: killed at its timeout.
            WorkerDied: the child ended without an answer.
        """
        self.ensure_started()
        assert self._connection is not None
        assert self._reader is not None
        assert self._answers is not None
        try:
            send(self._connection, {"nodeid": nodeid, "next": next_nodeid, **request})
            self._reader.read(timeout_s, self._is_alive)
        except TimeoutError:
            self.kill()
            raise CaseTimeout(
                f"killed at its timeout of {timeout_s:g} s", "raise --bench-timeout if the case needs longer"
            ) from None
        except (EOFError, BrokenPipeError, ConnectionError) as error:
            raise self._death("ended without an answer") from error
        except BaseException:
            self.kill()  # its answer must not be taken for that of the next request
            raise
        answer = json.loads(self._answers.readline())
        if answer.get("nodeid") != nodeid:
            self.kill()
            raise WorkerDied(f"the measuring process was asked for {nodeid} and answered for {answer.get('nodeid')}")
        return answer

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _death(self, what: str) -> WorkerDied:
        process, log = self._process, self._log
        code = None
        if process is not None:
            try:
                code = process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                code = None
        self.kill()
        if code is not None and code < 0:
            try:
                what += f" (signal {signal.Signals(-code).name})"
            except ValueError:
                what += f" (signal {-code})"
        elif code is not None:
            what += f" (exit status {code})"
        return WorkerDied(f"the measuring process {what}", f"the end of its output: {tail(log)}")

    def signal_end(self) -> None:
        """Kill the child and all that it started; whoever waits for its answer sees its death. For other threads."""
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):  # neither the child nor anything that it started is left
                os.killpg(process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the child and all that it started."""
        if self._process is not None:
            self.signal_end()
            self._process.wait()
        for resource in (self._connection, self._answers):
            if resource is not None:
                resource.close()
        self._process = self._connection = self._reader = self._answers = None

    def close(self, timeout_s: float = 10.0) -> None:
        """Let the child end by itself: its fixtures are torn down; kill it if that takes too long."""
        if self._process is None:
            return
        try:
            self.ask_to_end()
            with suppress(subprocess.TimeoutExpired):  # it is killed then
                self._process.wait(timeout_s)
        finally:
            self.kill()

    def ask_to_end(self) -> None:
        """Tell the child to end, and do not wait for it: several end together."""
        if self._connection is not None and not self._ending:
            self._ending = True
            with suppress(OSError):  # its end of the connection is closed: it has ended, or is about to
                send(self._connection, {"stop": True})


def preload(environment: Mapping[str, str], library: Path | None) -> dict[str, str]:
    """The environment of a child that loads a library with itself, if there is one.

    A conftest may import torch, whose own library of that name would be the one in use.
    """
    preloaded = ":".join(one for one in (str(library or ""), environment.get("LD_PRELOAD", "")) if one)
    return {**environment, **({"LD_PRELOAD": preloaded} if library is not None else {})}


def tail(path: Path | None, characters: int = 1500) -> str:
    """The end of a text file, for an error message."""
    if path is None or not path.exists():
        return "(none)"
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    return text[-characters:] or "(empty)"
