"""The door to a fresh process, with small children that speak its language."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from joulemark.errors import CaseTimeout, WorkerDied
from joulemark.measure.worker import LineReader, Worker, send, tail

CHILD = """
import json, os, signal, socket, sys, time

answers = open(sys.argv[-1].split(":", 1)[1], "a")
connection = socket.socket(fileno=int(os.environ["JOULEMARK_WORKER_FD"]))
stream = connection.makefile("r")

def say(message):
    connection.sendall(json.dumps(message).encode() + b"\\n")

mode = os.environ.get("MODE", "")
if mode == "no start":
    sys.exit("cannot import the model")
if os.environ.get("JOULEMARK_WORKER_WAIT"):
    say({"imported": True})
    assert json.loads(stream.readline()) == {"open": True}
    open(mode + "-opens", "w").close()
    say({"opening": True})
    if mode == "hangs opening":
        time.sleep(600)
    if mode == "dies opening":
        sys.exit("no counters")
say({"hello": {"pid": os.getpid()}})
for line in stream:
    request = json.loads(line)
    if request.get("stop"):
        break
    what = request["nodeid"]
    if what == "hang":
        time.sleep(600)
    if what == "exit":
        print("last words", flush=True)
        os._exit(5)
    if what == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "fork":
        if os.fork() == 0:
            time.sleep(600)
        os._exit(5)
    if what == "slow":
        time.sleep(0.5)
    answers.write(json.dumps({"nodeid": what, "pid": os.getpid(), "budget": request.get("budget_s")}) + "\\n")
    answers.flush()
    say({"done": what})
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A worker whose child is the small one above."""
    (tmp_path / "child").mkdir()
    (tmp_path / "child" / "pytest.py").write_text(CHILD)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "child")}
    one = Worker([], "timing", tmp_path, environment, tmp_path)
    yield one
    one.kill()


def test_one_process_answers_one_request_after_the_other(worker):
    first = worker.ask("a", None, 10, budget_s=1.5)
    second = worker.ask("b", None, 10)
    assert (first["nodeid"], first["budget"]) == ("a", 1.5)
    assert second["nodeid"] == "b"
    assert first["pid"] == second["pid"] == worker.hello["pid"] != os.getpid()
    assert worker.started == 1


def test_a_child_that_is_started_ahead_waits_before_it_opens_its_instruments(worker):
    opens = worker.cwd / "-opens"
    worker.prepare()
    time.sleep(0.3)
    assert worker.is_running
    assert not opens.exists()
    worker.open_instruments()
    assert opens.exists()
    pid = worker.ensure_started()["pid"]
    assert worker.ask("a", None, 10)["pid"] == pid
    assert worker.started == 1


def test_a_child_that_was_started_ahead_may_be_asked_at_once(worker):
    worker.prepare()
    assert worker.ask("a", None, 10)["pid"] == worker.hello["pid"]
    assert worker.started == 1


@pytest.mark.parametrize(("mode", "seen_s"), [("hangs opening", 0.0), ("dies opening", 0.0), ("dies opening", 10.0)])
def test_a_child_that_does_not_open_its_instruments_is_ended_and_replaced(worker, mode, seen_s):
    """However late that is seen."""
    worker.environment = {**worker.environment, "MODE": mode}
    worker.open_timeout_s = 0.5
    worker.prepare()
    worker.open_instruments()
    end = time.monotonic() + seen_s
    while worker.is_running and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(WorkerDied, match="did not start"):
        worker.ensure_started()
    assert not worker.is_running
    assert worker.ask("a", None, 10)["nodeid"] == "a"
    assert worker.started == 2


def test_a_case_is_killed_at_its_timeout_and_the_next_has_a_fresh_process(worker):
    worker.ensure_started()
    pid, begin = worker.hello["pid"], time.monotonic()
    with pytest.raises(CaseTimeout, match=r"killed at its timeout of 0.3 s"):
        worker.ask("hang", None, 0.3)
    assert time.monotonic() - begin < 3
    assert worker.ask("a", None, 10)["pid"] != pid
    assert worker.started == 2


@pytest.mark.parametrize(
    ("what", "said"),
    [("exit", r"exit status 5.*last words"), ("segv", "signal SIGSEGV"), ("fork", "exit status 5")],
)
def test_a_death_is_told_with_its_cause(worker, what, said):
    begin = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        worker.ask(what, None, 60)
    assert time.monotonic() - begin < 10
    assert re.search(said, str(caught.value), re.DOTALL)
    assert worker.ask("a", None, 10)["nodeid"] == "a"


def test_a_child_that_does_not_start_says_why(worker, monkeypatch):
    worker.environment = {**worker.environment, "MODE": "no start"}
    with pytest.raises(WorkerDied, match=r"(?s)did not start \(exit status 1\).*cannot import the model"):
        worker.ask("a", None, 10)


def test_an_interrupted_wait_leaves_no_answer_for_the_next_case(worker):
    worker.ensure_started()

    def ring(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.ask("slow", None, 10)
    finally:
        signal.signal(signal.SIGALRM, before)
    time.sleep(0.5)
    assert worker.ask("next", None, 10)["nodeid"] == "next"


def test_close_lets_the_child_end_and_is_harmless_twice(worker):
    worker.ask("a", None, 10)
    pid = worker.hello["pid"]
    worker.close()
    worker.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_child_that_was_asked_to_end_ends_beside_others_and_is_waited_for(worker):
    worker.ask("a", None, 10)
    pid = worker.hello["pid"]
    for _ in range(2):
        worker.ask_to_end()
    deadline = time.monotonic() + 10
    while worker.is_running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not worker.is_running
    worker.close()
    assert not Path(f"/proc/{pid}").exists()
    assert worker.ask("b", None, 10)["nodeid"] == "b"


def test_lines_arrive_whole_however_they_are_cut():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = LineReader(ours)
        theirs.sendall(b'{"a": ')
        with pytest.raises(TimeoutError):
            reader.read(0.05)
        theirs.sendall(b'1}\n{"b": 2}\n')
        assert reader.read(1) == {"a": 1}
        assert reader.read(0) == {"b": 2}
        send(theirs, {"c": "é"})
        theirs.shutdown(socket.SHUT_WR)
        assert reader.read(None) == {"c": "é"}
        with pytest.raises(EOFError):
            reader.read(None)


def test_the_end_of_a_log(tmp_path):
    assert tail(None) == "(none)"
    log = tmp_path / "log"
    log.write_text("")
    assert tail(log) == "(empty)"
    log.write_bytes(b"x" * 50 + b"\xff end\n")
    assert tail(log, 5).endswith("end")
    assert len(tail(log, 5)) == 5
