"""``pytest --bench -n``: a worker per GPU, one file, and what a death costs. The GPUs are simulated."""

from __future__ import annotations

import json
import time
from collections import defaultdict

import pytest

from joulemark.testing import scenario_of

CONFTEST = """
import os
import sys

sys.modules["torch"] = None  # without torch there is no device clock, but NVML's sensors answer

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        os.environ["WORKER_PID"] = str(os.getpid())
"""
CASES, ROUNDS, PAUSE_S, KILLERS = 200, 10, 0.15, (40, 90, 140)
SLEEPS = f"""
import os
import signal
import time

import pytest

@pytest.mark.parametrize("n", range({CASES}))
def bench_sleep(bench, n):
    assert bench.target.uuid == os.environ["CUDA_VISIBLE_DEVICES"]
    if n in {KILLERS} and "WORKER_PID" in os.environ:
        os.kill(int(os.environ["WORKER_PID"]), signal.SIGKILL)
        time.sleep(60)
    bench.pedantic(time.sleep, ({PAUSE_S},), rounds={ROUNDS}, iterations=1, warmup_rounds=1)
"""
FEW = """
import time

import pytest

@pytest.mark.parametrize("n", range(6))
def bench_sleep(bench, n):
    bench.pedantic(time.sleep, (0.01,), rounds=5, iterations=1)
"""
QUICK = ("--bench", "--bench-quick", "-p", "no:hypothesispytest", "-p", "no:syrupy")
TIMING = (*QUICK, "--bench-collect=timing")


@pytest.fixture
def machine(project, monkeypatch, tmp_path_factory):
    """Makes the project's machine one with so many GPUs."""

    def with_gpus(*gpus):
        file = project.path / "gpus.json"
        file.write_text(json.dumps(scenario_of(gpus)))
        monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(file))
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        # Sixteen processes import the same modules: compiled once.
        monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.getbasetemp() / "compiled"))
        project.write({"conftest.py": CONFTEST})
        return project

    return with_gpus


def h200(number, power_w=300.0):
    return {"name": "NVIDIA H200", "power_w": power_w, "number": number}


def measured(project):
    return [one for one in project.lines if one["kind"] == "record"]


def overlaps(records):
    """Pairs of cases that were measured on one GPU at one time."""
    by_gpu = defaultdict(list)
    for one in records:
        by_gpu[one["gpu_uuid"]].append((*one["window_utc"], one["nodeid"]))
    found = []
    for windows in by_gpu.values():
        windows.sort()
        found += [(a, b) for a, b in zip(windows, windows[1:], strict=False) if b[0] < a[1]]
    return found


def test_the_check_of_overlaps_sees_one():
    def of(gpu, begin, end):
        return {"gpu_uuid": gpu, "window_utc": [begin, end], "nodeid": ""}

    assert overlaps([of("a", 1, 3), of("a", 2, 4), of("b", 1, 9)])
    assert not overlaps([of("a", 1, 3), of("a", 3, 4), of("b", 2, 9)])


@pytest.mark.slow
def test_eight_gpus_two_hundred_cases_and_three_killed_workers(machine):
    project = machine(*map(h200, range(8)))
    project.write({"bench_a.py": SLEEPS})
    begin = time.monotonic()
    assert project.pytest(*TIMING, "-n0", "-k", "[0] or [1] or [2] or [3]").ret == 0
    alone_s = time.monotonic() - begin
    alone = measured(project)
    project.files[0].unlink()
    assert len(alone) == 4
    per_case_s = (alone[-1]["window_utc"][1] - alone[0]["window_utc"][0]) / len(alone)
    serial_s = alone_s + (CASES - len(alone)) * per_case_s

    begin = time.monotonic()
    result = project.pytest(*TIMING, "-n", "8")
    wall_s = time.monotonic() - begin
    records = measured(project)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert len(records) == len({one["case_id"] for one in records}) == CASES
    failed = [one for one in records if one["outcome"] == "failed"]
    assert sorted(one["case"]["params"]["n"] for one in failed) == sorted(KILLERS)
    assert all("worker gw" in one["reason"] and "died" in one["reason"] for one in failed)
    assert len({one["gpu_uuid"] for one in records}) == 8
    assert overlaps(records) == []
    # Whoever took over for a worker that was killed did so on its GPU.
    for lost in failed:
        assert any(
            one["gpu_uuid"] == lost["gpu_uuid"] and one["window_utc"][0] > lost["window_utc"][1] for one in records
        )
    assert project.end["completed"] is True
    print(f"serial {serial_s:.0f} s, eight workers {wall_s:.0f} s: {serial_s / wall_s:.1f} times faster")
    assert serial_s / wall_s >= 6
