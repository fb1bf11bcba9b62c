"""The measuring process: takes items one at a time from its parent and answers with what it measured."""

from __future__ import annotations

import gc
import importlib
import json
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from joulemark.collect.timing import first_line, is_out_of_memory, is_poisoned
from joulemark.errors import ConfigurationError, JoulemarkError, Unsupported
from joulemark.measure.pace import Alone, InStep, Pace
from joulemark.measure.plan import ALONE, plan_alone
from joulemark.measure.replies import unmeasured
from joulemark.measure.turn import TURN_VARIABLE, turn_at
from joulemark.measure.worker import (
    FD_VARIABLE,
    HELLO,
    IMPORTED,
    OPENING,
    SCRATCH_PREFIX,
    WAIT_VARIABLE,
    LineReader,
    send,
)
from joulemark.plugin.fixture import Bench, Instruments
from joulemark.plugin.instruments import counters_hello, energy_tier, open_instruments
from joulemark.plugin.sweep import Target, case_of_function, import_models
from joulemark.records import Finding
from joulemark.workloads.parallel import join, leave, rank_of_process

if TYPE_CHECKING:
    from joulemark.plugin.options import BenchOptions
    from joulemark.workloads.base import Workload

BENCH = pytest.StashKey[Bench]()
REQUEST = pytest.StashKey[dict[str, Any]]()
_PACKAGE = str(Path(__file__).parents[1])


class Measuring:
    """Builds the fixture ``bench``; its instruments are opened with the first case of a target.

    Attributes:
        turn: the turn at the device (:mod:`joulemark.measure.turn`); None where no other process shares it.
    """

    def __init__(self, options: BenchOptions) -> None:
        self.options = options
        self.turn: Path | None = None
        self._instruments: dict[str, Instruments] = {}
        self._together = 0

    def instruments(self, target: Target, collect: tuple[str, ...]) -> Instruments:
        """The instruments of a target, opened once per process; of several ranks, those of this one."""
        rank = rank_of_process() or 0
        key = f"{target.slug} {target.world_size}"
        if key not in self._instruments:
            alone = self.options.alone
            wanted = tuple(one for one in collect if one not in ALONE) if alone is None else (alone,)
            self._instruments[key] = open_instruments(
                target.of_rank(rank), wanted, alone is None, self.options.cupti, rank
            )
        return self._instruments[key]

    def _pace(self, case: Any, device: str) -> Pace:
        """Ranks go by rank 0; each case has a topic of its own in their store."""
        if case is None or case.world_size == 1:
            return Alone()
        self._together += 1
        return InStep(join(device).sharer(f"case {self._together}"))

    def bench(self, item: pytest.Function, case: Any, target: Target) -> Bench:
        """The fixture's value for one item."""
        request = item.stash.get(REQUEST, {})
        collect = self.options.collect
        instruments = self.instruments(target, collect)
        instruments.memory.reset()
        _reset_compiler()
        trace, document = request.get("trace"), request.get("document")
        bench = Bench(
            case or case_of_function(item, target),
            instruments,
            collect,
            self.options.quick,
            request.get("budget_s"),
            request.get("process", 0),
            plan_alone(self.options.alone, self.options.quick),
            None if trace is None else Path(trace),
            None if document is None else Path(document),
            self._pace(case, instruments.device),
            self.turn,
        )
        item.stash[BENCH] = bench
        return bench


class ChildLoop:
    """Replaces pytest's own loop over items.

    Args:
        options: of the session.
        measuring: builds the fixture ``bench``.
        target: that this process measures on.
        own: the project's own workloads.
    """

    def __init__(
        self, options: BenchOptions, measuring: Measuring, target: Target, own: Mapping[str, Workload]
    ) -> None:
        self.options = options
        self.measuring = measuring
        self.target = target
        self.own = own
        self._reports: list[pytest.TestReport] = []
        self._error: BaseException | None = None
        self._announced: str | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Answer requests until the parent says stop or is gone."""
        if session.config.option.collectonly:
            return None
        assert self.options.worker is not None
        own = os.getpid()
        descriptor = os.environ.pop(FD_VARIABLE, None)
        if descriptor is None:
            self._all_of(session)
            return True
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        connection = socket.socket(fileno=int(descriptor))
        requests = _listen(connection, self.options.worker[1])
        turn = os.environ.pop(TURN_VARIABLE, None)
        self.measuring.turn = None if turn is None else Path(turn)
        waits = os.environ.pop(WAIT_VARIABLE, None) is not None
        if waits and not _may_open(connection, requests):
            return True
        with turn_at(self.measuring.turn):
            if waits:
                send(connection, {OPENING: True})
            hello = self.measuring.instruments(self.target, self.options.collect)
        refused = self._refused()
        # What the imports left will not become garbage: collections between cases then take no time.
        gc.collect()
        gc.freeze()
        send(
            connection,
            {
                HELLO: {
                    "facts": dict(hello.facts),
                    "no_power": hello.no_power,
                    "no_clock": hello.no_clock,
                    "power": energy_tier(hello.power),
                    "counters": counters_hello(hello.counting),
                    "pid": os.getpid(),
                    "refused": refused,
                }
            },
        )
        by_id = {item.nodeid: item for item in session.items}
        with self.options.worker[1].open("a", encoding="utf-8") as answers:
            while not (request := requests.get()).get("stop"):
                reply = self._answer(by_id, request)
                if os.getpid() != own:
                    os._exit(1)  # a benchmark has forked and its copy came back: it must not answer too
                answers.write(json.dumps(reply) + "\n")
                answers.flush()
                send(connection, {"done": request["nodeid"]})
        leave()
        return True

    def _refused(self) -> str | None:
        """Why a model that was named cannot be measured; the process that times the cases asks, before any."""
        if self.options.alone is not None:
            return None
        try:
            import_models(self.options, self.own)
        except JoulemarkError as error:
            return f"--bench-models: {error}"
        return None

    def _all_of(self, session: pytest.Session) -> None:
        """Started by hand with node ids: measure each and write its answer."""
        assert self.options.worker is not None
        by_id = {item.nodeid: item for item in session.items}
        with self.options.worker[1].open("a", encoding="utf-8") as answers:
            for nodeid in by_id:
                answers.write(json.dumps(self._answer(by_id, {"nodeid": nodeid, "next": None})) + "\n")

    def _answer(self, by_id: dict[str, pytest.Item], request: dict[str, Any]) -> dict[str, Any]:
        item = by_id.get(request["nodeid"])
        if item is None:
            why = "the measuring process does not collect this item: its id differs between processes"
            return {"nodeid": request["nodeid"], **unmeasured("failed", why)}
        item.stash[REQUEST] = request
        begin = time.time()
        trouble = self._tear_down_for(item)
        self._announced = request.get("next")
        following = by_id.get(self._announced or "")
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        reply = self._reply(item, (begin, time.time()))
        reply["findings"] += trouble
        # The exception's frames hold the case's memory.
        self._reports, self._error = [], None
        _forget(item)
        return reply

    def _tear_down_for(self, item: pytest.Item) -> list[dict[str, Any]]:
        """Where another item comes than the one announced (its series ended, say), end the fixtures it does not share.

        pytest has no public call for it; rerun plugins use this one too.
        """
        if self._announced in (None, item.nodeid):
            return []
        try:
            item.session._setupstate.teardown_exact(item)
        except Exception as error:
            text = f"a fixture of earlier cases failed in its teardown ({type(error).__name__}: {first_line(error)})"
            return [Finding("teardown_failed", text).to_json()]
        return []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Note the first exception of the item, whatever phase it came from."""
        if call.excinfo is not None and self._error is None:
            self._error = call.excinfo.value
        report = yield
        self._reports.append(report)  # type: ignore[arg-type]
        return report

    def _reply(self, item: pytest.Item, window: tuple[float, float]) -> dict[str, Any]:
        bench = item.stash.get(BENCH, None)
        outcome, reason = outcome_of(self._error, bench)
        poisoned = self._error is not None and outcome == "failed" and is_poisoned(self._error)
        bad = next((report for report in self._reports if report.failed), None)
        return {
            "nodeid": item.nodeid,
            "outcome": outcome,
            "reason": reason,
            "poisoned": poisoned,
            "expected": isinstance(self._error, pytest.xfail.Exception),
            "case": None if bench is None else bench.case.to_json(),
            "collect": [] if bench is None else list(bench.collect),
            "measurements": [] if bench is None else [one.to_json() for one in bench.measurements],
            "findings": [] if bench is None else [one.to_json() for one in bench.findings],
            "static_power_w": None if bench is None else bench.instruments.static_power_w,
            "window_utc": list(window),
            "longrepr": None if bad is None or outcome != "failed" else _where(self._error, bad),
            "output": "" if bad is None else "\n".join(text for _, text in bad.sections)[-4000:],
        }


def _may_open(connection: socket.socket, requests: queue.Queue[dict[str, Any]]) -> bool:
    """Import what the cases will need, touching no device, and wait for the parent's word; False to stop instead."""
    for name in ("torch", "torch._dynamo", "torchvision"):  # the second is imported by every optimizer of torch
        # Instruments and cases say what is wrong with it. A torchvision that does not fit torch raises a RuntimeError.
        with suppress(ImportError, OSError, RuntimeError):
            importlib.import_module(name)
    send(connection, {IMPORTED: True})
    return not requests.get().get("stop")


def outcome_of(error: BaseException | None, bench: Bench | None) -> tuple[str, str | None]:
    """Outcome and reason of an item, from its first exception and its fixture."""
    if error is None:
        if bench is None or not bench.used:
            return "failed", "the benchmark took the fixture bench and never measured with it"
        return "ok", None
    if is_out_of_memory(error):
        return "oom", "out of memory"
    if isinstance(error, (pytest.skip.Exception, pytest.xfail.Exception, Unsupported)):
        return "unsupported", str(error)
    lines = str(error).strip().splitlines()
    # Of an error that says what to do every line is to be read, the remedy is its last one.
    shown = lines if isinstance(error, ConfigurationError) else lines[:1]
    return "failed", f"{type(error).__name__}: {' '.join(shown)}".rstrip(": ")


def _where(error: BaseException | None, report: pytest.TestReport) -> str | None:
    """Where a failure comes from: of wrong use only the user's own code, if any raised; else what pytest shows."""
    if not isinstance(error, ConfigurationError):
        return report.longreprtext
    if error.__cause__ is None:
        return None
    told = traceback.TracebackException.from_exception(error.__cause__)
    told.stack = traceback.StackSummary.from_list(
        [frame for frame in told.stack if not frame.filename.startswith(_PACKAGE)]
    )
    return "".join(told.format()).rstrip()


def _reset_compiler() -> None:
    """Forget earlier shapes: the recompile limit of torch.compile must not turn a later case into an eager one.

    Every optimizer imports the compiler; where it has compiled nothing there is nothing to forget, and the first reset
    beside CUDA would import all of the inductor.
    """
    compiler = sys.modules.get("torch._dynamo")
    if compiler is None:
        return
    compiled: int | None = getattr(getattr(compiler, "convert_frame", None), "FRAME_COUNTER", None)
    if compiled is None or compiled > 0:
        compiler.reset()


def _listen(connection: socket.socket, answers: Path) -> queue.Queue[dict[str, Any]]:
    """Requests, read beside the measurement; when the parent is gone this process ends at once.

    Args:
        answers: this process's file, in the parent's folder; without a parent nobody else removes that.
    """
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    reader = LineReader(connection)

    def listen() -> None:
        while True:
            try:
                requests.put(reader.read(None))
            except EOFError:
                scratch = next((one for one in answers.parents if one.name.startswith(SCRATCH_PREFIX)), None)
                if scratch is not None:
                    shutil.rmtree(scratch, ignore_errors=True)
                if os.getpgrp() == os.getpid():
                    os.killpg(0, signal.SIGKILL)  # what the benchmark started goes too
                os._exit(1)

    threading.Thread(target=listen, daemon=True, name="joulemark-requests").start()
    return requests


def _forget(item: pytest.Item) -> None:
    """Drop what keeps a case's memory alive: tracebacks, the fixture's closures, torch's cached blocks."""
    if BENCH in item.stash:
        del item.stash[BENCH]
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        try:
            torch.cuda.empty_cache()
        except RuntimeError:
            os.write(2, b"joulemark: the CUDA context is unusable; this process will be replaced\n")
