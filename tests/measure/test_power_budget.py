"""A power budget that processes share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from joulemark.measure.power_budget import PowerBudget

SHARE = """
import sys, time
from pathlib import Path
from joulemark.measure.power_budget import PowerBudget
with PowerBudget(Path(sys.argv[1]), 1000.0).share(float(sys.argv[2])):
    print("taken", flush=True)
    time.sleep(600)
"""


class Blocked(Exception):
    """Raised in place of a pause."""


def refuse(seconds):
    raise Blocked


@pytest.fixture
def other(tmp_path):
    """A process that holds 600 W of 1000."""
    process = subprocess.Popen(
        [sys.executable, "-c", SHARE, str(tmp_path), "600"], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "taken\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_what_fits_beside_the_others_runs_and_what_does_not_waits(tmp_path, other):
    budget = PowerBudget(tmp_path, 1000.0, refuse)
    with budget.share(400.0):
        pass
    with pytest.raises(Blocked), budget.share(401.0):
        pass


def test_the_share_of_a_process_that_was_killed_is_free(tmp_path, other):
    other.kill()
    other.wait()
    with PowerBudget(tmp_path, 1000.0, refuse).share(1000.0):
        pass


def test_alone_a_case_may_exceed_the_budget(tmp_path):
    with PowerBudget(tmp_path, 100.0, refuse).share(700.0):
        pass


def test_the_one_that_waits_goes_on_when_the_share_is_given_back(tmp_path, other):
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            other.kill()
            other.wait()

    with PowerBudget(tmp_path, 1000.0, pause).share(500.0):
        assert len(pauses) == 2
