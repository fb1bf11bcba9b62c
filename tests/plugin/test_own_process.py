"""A process for one instrument that is started ahead of its first case."""

from __future__ import annotations

import os
import sys
import time

import pytest

from joulemark.measure.turn import turn_at
from joulemark.measure.worker import Worker
from joulemark.metrics import COUNTERS
from joulemark.plugin.own_process import OwnProcess
from joulemark.plugin.sweep import Target

CHILD = """
import json, os, socket, sys, time
from pathlib import Path

from joulemark.measure.turn import turn_at

answers = open(sys.argv[-1].split(":", 1)[1], "a")
connection = socket.socket(fileno=int(os.environ["JOULEMARK_WORKER_FD"]))
stream = connection.makefile("r")

def say(message):
    connection.sendall(json.dumps(message).encode() + b"\\n")

if os.environ.get("JOULEMARK_WORKER_WAIT"):
    say({"imported": True})
    if json.loads(stream.readline()).get("stop"):
        sys.exit()
with turn_at(Path("turn")):
    if os.environ.get("JOULEMARK_WORKER_WAIT"):
        say({"opening": True})
    time.sleep(float(os.environ["OPENS_S"]))
say({"hello": {"pid": os.getpid()}})
for line in stream:
    request = json.loads(line)
    if request.get("stop"):
        break
    reply = {"nodeid": request["nodeid"], "outcome": "ok", "measurements": [{"name": "counters"}], "findings": []}
    answers.write(json.dumps({**reply, "pid": os.getpid()}) + "\\n")
    answers.flush()
    say({"done": True})
"""
ONE, OTHER = (Target(f"GPU-{name}", f"slug-{name}", "model", "name") for name in "ab")


@pytest.fixture
def own(tmp_path):
    """The process, whose workers take half a second to open."""
    (tmp_path / "child").mkdir()
    (tmp_path / "child" / "pytest.py").write_text(CHILD)
    path = os.pathsep.join([str(tmp_path / "child"), *sys.path])
    started = []

    def start(target):
        environment = {**os.environ, "PYTHONPATH": path, "OPENS_S": opens[0]}
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Worker([], "counters", folder, environment, tmp_path, open_timeout_s=3))
        return started[-1]

    opens = ["0.5"]
    process = OwnProcess("counters", COUNTERS, start)
    process.started, process.opens = started, opens
    yield process
    process.kill()


def test_it_opens_while_others_work_and_answers_from_the_same_process(own):
    own.prepare(ONE)
    begin = time.monotonic()
    own.open_beside()
    reply = own.ask("a", ONE, 10)
    assert time.monotonic() - begin > 0.5
    assert reply["pid"] == own.hello["pid"]
    assert len(own.started) == own.started[0].started == 1


def test_one_that_runs_already_is_not_opened_twice(own):
    own.ask("a", ONE, 10)
    own.prepare(ONE)
    own.open_beside()
    assert own.ask("b", ONE, 10)["nodeid"] == "b"
    assert own.started[0].started == 1


def test_one_that_hangs_while_it_opens_is_killed_and_gives_its_turn_back(own, tmp_path):
    own.opens[0] = "600"
    own.prepare(ONE)
    own.started[0].open_timeout_s = 0.5
    own.open_beside()
    begin = time.monotonic()
    with turn_at(tmp_path / "turn"):
        assert 0.2 < time.monotonic() - begin < 30  # its limit, and 5 s in which it might have ended by itself
    while own.started[0].is_running and time.monotonic() - begin < 30:
        time.sleep(0.01)
    assert not own.started[0].is_running


def test_what_is_prepared_for_one_target_ends_with_it(own):
    own.prepare(ONE)
    begin = time.monotonic()
    own.prepare(OTHER)
    assert time.monotonic() - begin < 5  # by itself: it would be killed after 10 s
    assert not own.started[0].is_running
    assert own.ask("a", OTHER, 10)["pid"] == own.hello["pid"]


@pytest.mark.parametrize("opened", [False, True])
def test_an_interrupt_ends_it_at_once(own, opened):
    own.opens[0] = "600"
    own.prepare(ONE)
    if opened:
        own.open_beside()
    begin = time.monotonic()
    own.kill()
    assert time.monotonic() - begin < 2
    assert not own.started[0].is_running
