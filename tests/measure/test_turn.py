"""Turns at a device, by the lock of a file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from joulemark.measure.turn import turn_at

HOLDER = """
import sys, time
from pathlib import Path
from joulemark.measure.turn import turn_at
with turn_at(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has the turn."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "turn")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"mine\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_one_waits_for_the_other_and_gets_the_turn_of_one_that_dies(tmp_path, holder):
    got = threading.Event()

    def wait():
        with turn_at(tmp_path / "turn"):
            got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not got.wait(0.3)
    holder.kill()
    assert got.wait(5)
    thread.join()


def test_a_copy_of_the_process_does_not_keep_it(tmp_path):
    path = tmp_path / "turn"
    with turn_at(path):
        copy = os.fork()
        if copy == 0:
            time.sleep(600)
    try:
        begin = time.monotonic()
        with turn_at(path):
            assert time.monotonic() - begin < 5
    finally:
        os.kill(copy, 9)
        os.waitpid(copy, 0)


def test_nobody_waits_where_the_device_is_not_shared():
    with turn_at(None):
        pass
