"""``pytest --bench -n``: a worker per GPU, one file, and what a death costs. The GPUs are simulated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise

import pytest

from joulemark.device.lease import Claim, LeaseFolder
from joulemark.store import read_run
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
CAMPAIGN = """
@pytest.mark.bench(campaign="which take days")
def bench_days(bench):
    bench(time.sleep, 0.01)
"""
QUICK = ("--bench", "--bench-quick")
TIMING = (*QUICK, "--bench-collect=timing")


@pytest.fixture
def machine(project, monkeypatch):
    """Makes the project's machine one with so many GPUs."""

    def with_gpus(*gpus):
        file = project.path / "gpus.json"
        file.write_text(json.dumps(scenario_of(gpus)))
        monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(file))
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
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
        found += [(a, b) for a, b in pairwise(windows) if b[0] < a[1]]
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
    busy = os.getloadavg()[0] > (os.cpu_count() or 1)
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
    assert project.end["completed"] is True
    print(f"serial {serial_s:.0f} s, eight workers {wall_s:.0f} s: {serial_s / wall_s:.1f} times faster")
    if busy or os.getloadavg()[0] > (os.cpu_count() or 1):
        pytest.skip("this machine has more to do than it has cores: how much faster it is cannot be seen")
    assert serial_s / wall_s >= 6


def ids(project):
    return {(one["nodeid"], one["case_id"]) for one in measured(project)}


def test_a_run_with_workers_holds_the_cases_of_one_without_and_either_goes_on_with_the_other(machine):
    project = machine(h200(0), h200(1))
    project.write({"bench_a.py": FEW})
    assert project.pytest(*TIMING, "-n", "auto", "-k", "[0] or [1] or [2]").ret == 0
    (file,) = project.files
    assert len({one["gpu_uuid"] for one in measured(project)}) == 2
    resumed = project.pytest(*TIMING, "--bench-resume", str(file))
    assert resumed.ret == 0
    assert project.outcomes == {"passed": 3, "skipped": 3}
    with_workers = ids(project)
    file.unlink()
    assert project.pytest(*TIMING).ret == 0
    assert ids(project) == with_workers
    (alone,) = project.files
    lines = alone.read_text().splitlines(keepends=True)
    alone.write_text("".join(lines[:3]))
    assert project.pytest(*TIMING, "-n", "2", "--bench-resume", str(alone)).ret == 0
    assert project.outcomes == {"passed": 4, "skipped": 2}
    assert ids(project) == with_workers
    assert project.end["completed"] is True
    other = project.pytest(*TIMING, "-n", "2", "-k", "[0]", "--bench-resume", str(alone))
    assert other.ret == pytest.ExitCode.USAGE_ERROR
    other.stderr.fnmatch_lines(["*it holds 5 cases that this sweep does not plan*"])


def test_each_gpu_has_its_own_environment_power_and_baseline(machine):
    project = machine(h200(0, 310.0), h200(1, 520.0))
    project.write({"bench_a.py": FEW.replace("range(6)", "range(2)")})
    for workers, suffix in (("-n2", ()), ("-n0", ("--bench-gpus=all",))):
        assert project.pytest(*QUICK, workers, *suffix).ret == 0
        environments = {one["environment_id"]: one for one in project.lines if one["kind"] == "environment"}
        assert len(environments) == 2
        for one in measured(project):
            watts = {"GPU-00000000": 310.0, "GPU-00000001": 520.0}[one["gpu_uuid"][:12]]
            idle = environments[one["environment_id"]]["facts"]["baselines"]["idle_power_w"]
            assert one["metrics"]["power_w"]["value"] == pytest.approx(watts, rel=0.05)
            assert idle["value"] == pytest.approx(watts, rel=0.01)
        project.files[0].unlink()


def test_gpus_that_are_named_each_measure_every_cell(machine):
    project = machine(h200(0), h200(1))
    project.write({"bench_a.py": FEW.replace("range(6)", "range(2)")})
    assert project.pytest(*TIMING, "-n", "auto", "--bench-gpus=all").ret == 0
    by_gpu = defaultdict(set)
    for one in measured(project):
        assert one["case"]["gpu_model"] == f"nvidia-h200-{one['gpu_uuid'][4:12]}"
        by_gpu[one["gpu_uuid"]].add(one["case"]["params"]["n"])
    assert list(by_gpu.values()) == [{0, 1}, {0, 1}]
    refused = project.pytest(*TIMING, "-n", "1", "--bench-gpus=all")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["*--bench got -n 1 for 2 kinds of cells*give -n 2 or more*"])


def test_unlike_gpus_measure_the_cells_of_their_own_model(machine):
    l4 = {"name": "NVIDIA L4", "power_w": 40.0, "number": 9}
    project = machine(h200(0), h200(1), l4)
    project.write({"bench_a.py": FEW})
    assert project.pytest(*TIMING, "-n", "auto").ret == 0
    records = measured(project)
    assert len(records) == 12
    models = {one["gpu_uuid"][:12]: one["case"]["gpu_model"] for one in records}
    assert models == {"GPU-00000000": "nvidia-h200", "GPU-00000001": "nvidia-h200", "GPU-00000009": "nvidia-l4"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("-n", "3"), "*--bench got -n 3 and has 2 GPUs: *time each other: drop -n (or give -n 0), or give -n auto"),
        (("-n", "2", "--dist", "loadfile"), "*--bench got --dist loadfile: *leave out --dist"),
        (("-n", "2", "--bench-inprocess"), "*--bench got -n 2 and --bench-inprocess*leave out one of the two"),
        (("-d", "--tx", "2*popen"), "*--bench got --tx 2*popen: *give -n auto"),
        (("-n", "2", "--bench-cluster=ray"), "*--bench got -n and --bench-cluster: *leave out one of the two"),
        (("-n", "2", "--bench-world-size=1,2"), "*--bench got -n and --bench-world-size 1,2: *drop -n (or give -n 0)"),
        (("-n", "2", "--bench-lease", "soon"), "*--bench-lease got 'soon': it takes wait, refuse, off or *seconds"),
    ],
)
def test_what_cannot_be_measured_side_by_side_is_refused(machine, given, said):
    project = machine(h200(0), h200(1))
    project.write({"bench_a.py": FEW})
    result = project.pytest(*TIMING, *given)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([said])
    assert project.files == []


def test_one_gpu_needs_no_worker(machine):
    project = machine(h200(0))
    project.write({"bench_a.py": FEW})
    result = project.pytest(*TIMING, "-n", "auto", "-k", "[0]")
    assert result.ret == 0
    assert "created:" not in result.stdout.str()


ENDS = """
import time
import pytest

def bench_fails(bench):
    raise ValueError("of its own")

def bench_skips(bench):
    pytest.skip("not here")

@pytest.mark.parametrize("batch", [1, 2])
def bench_does_not_fit(bench, batch):
    raise MemoryError

def bench_flagged(bench):
    bench.pedantic(time.sleep, (0.001,), rounds=1)

def bench_fine(bench):
    bench.pedantic(time.sleep, (0.01,), rounds=5, iterations=1)

def slow(bench):
    bench(abs, 1)
"""


def test_every_outcome_reaches_the_one_file_and_the_summary(machine):
    project = machine(h200(0), h200(1))
    project.write({"bench_a.py": ENDS})
    result = project.pytest(*TIMING, "-n", "2", "--junitxml=junit.xml", "--bench-report=out.md")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert {name: one["outcome"] for name, one in project.records.items() if name != "bench_flagged"} == {
        "bench_fails": "failed",
        "bench_skips": "unsupported",
        "bench_does_not_fit[1]": "oom",
        "bench_does_not_fit[2]": "oom",
        "bench_fine": project.records["bench_fine"]["outcome"],
    }
    assert project.records["bench_fails"]["reason"] == "ValueError: of its own"
    assert project.records["bench_fine"]["metrics"]["host_time_s"]["value"] == pytest.approx(0.0101, rel=0.2)
    assert project.end["completed"] is True
    result.stdout.fnmatch_lines(["*2 workers, one per GPU*", "*slow takes bench but its name is not collected*"])
    assert "bench_fine" in (project.path / "out.md").read_text()
    assert 'name="outcome" value="oom"' in (project.path / "junit.xml").read_text()


def test_a_spent_budget_leaves_the_rest_for_a_resume(machine):
    project = machine(h200(0), h200(1))
    project.write({"bench_a.py": FEW.replace("(0.01,), rounds=5", "(2.0,), rounds=3")})
    assert project.pytest(*TIMING, "-n", "2", "--bench-budget", "12").ret == 0
    assert 0 < len(measured(project)) < 6
    assert project.end["reason"] == "budget spent"
    assert project.end["completed"] is False


def test_cases_that_would_draw_more_than_the_budget_wait_for_one_another(machine):
    project = machine(h200(0, 600.0), h200(1, 600.0))
    project.write({"bench_a.py": FEW.replace("(0.01,)", "(0.1,)")})

    def side_by_side(*args):
        assert project.pytest(*TIMING, "-n", "2", *args).ret == 0
        every = [{**one, "gpu_uuid": "board"} for one in measured(project)]
        project.files[0].unlink()
        return len(overlaps(every))

    assert side_by_side("--bench-power-budget=1000") == 0
    assert side_by_side("--bench-power-budget=1400") > 0


def running(project, *args):
    """A session in the background."""
    command = [sys.executable, "-m", "pytest", *args]
    return project.pytester.popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def until(condition, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def processes_of(project):
    """Processes whose working folder is the project's."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                here = os.readlink(f"/proc/{entry}/cwd") == str(project.path)
            except OSError:
                continue
            if here:
                found.append(int(entry))
    return found


RANKS = """
import pytest

@pytest.mark.bench(models=("lenet5",), phases=("train",), batch_sizes=(8,), world_sizes=(2,))
def bench_trains(bench, workload):
    bench.step(workload)
"""


def test_ranks_that_a_marker_asks_for_are_unsupported_where_each_worker_has_one_gpu(machine):
    project = machine(h200(0), h200(1))
    project.write({"bench_a.py": RANKS})
    assert project.pytest(*TIMING, "-n", "2", "--bench-gpus=all").ret == pytest.ExitCode.NO_TESTS_COLLECTED
    (record,) = measured(project)
    assert record["outcome"] == "unsupported"
    assert "2 GPUs of the model nvidia-h200 are needed and 1 can be used here" in record["reason"]


def test_a_session_leases_the_gpus_of_all_ranks(machine):
    project = machine(h200(0), h200(1))
    project.write({"bench_a.py": RANKS + FEW})
    second = scenario_of([h200(0), h200(1)])["gpus"][1]["uuid"]
    held = LeaseFolder(project.path / "leases").acquire([Claim(second, "NVIDIA H200", (second,))], 0, print)
    try:
        assert project.pytest(*TIMING, "--bench-lease=refuse", "-k", "sleep and 0").ret == 0
        refused = project.pytest(*TIMING, "--bench-lease=refuse", "-k", "trains")
        assert refused.ret == pytest.ExitCode.USAGE_ERROR
        refused.stderr.fnmatch_lines([f"*NVIDIA H200 ({second}) is held by *"])
    finally:
        held.close()


HANGS = """
import pathlib
import time

import pytest

@pytest.mark.parametrize("n", [0, 1])
def bench_a_quick(bench, n):
    bench.pedantic(time.sleep, (0.01,), rounds=5, iterations=1)

@pytest.mark.parametrize("n", [0, 1])
def bench_hangs(bench, n):
    pathlib.Path(f"{n}-hangs").touch()
    bench(time.sleep, 600)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_the_controller_ends_nothing_is_left_and_the_gpus_are_free(machine, how):
    project = machine(h200(0), h200(1))
    project.write({"bench_a.py": HANGS})
    session = running(project, *TIMING, "-n", "2")
    until(lambda: all((project.path / f"{name}-hangs").exists() for name in "01"))
    refused = project.pytest(*TIMING, "-n", "2", "--bench-lease=refuse")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines([f"*NVIDIA H200 (GPU-0000000?-*) is held by * (pid {session.pid}, since *"])
    session.send_signal(how)
    session.wait(timeout=60)
    until(lambda: not processes_of(project))
    if how != signal.SIGKILL:
        assert project.end["reason"] == "interrupted"
    assert len(measured(project)) == 2
    assert read_run(project.files[0]).completed is False
    project.files[0].unlink()
    assert project.pytest(*TIMING, "-n", "2", "--bench-lease=refuse", "-k", "quick").ret == 0


def test_the_gpu_of_a_session_that_was_killed_at_a_case_is_free_at_once(machine):
    project = machine(h200(0))
    project.write({"bench_a.py": HANGS})
    session = running(project, *TIMING, "-k", "hangs and 0")
    until(lambda: (project.path / "0-hangs").exists())
    session.kill()
    session.wait(timeout=60)
    begin = time.monotonic()
    assert project.pytest(*TIMING, "--bench-lease=60", "-k", "quick").ret == 0
    assert time.monotonic() - begin < 30
    assert processes_of(project) == []


def test_a_file_that_cannot_be_imported_leaves_the_sweep_incomplete(machine):
    project = machine(h200(0), h200(1))
    project.write({"bench_a.py": FEW + CAMPAIGN, "bench_b.py": "import module_that_is_not_installed\n"})
    result = project.pytest(*TIMING, "-n", "2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*No module named 'module_that_is_not_installed'*"])
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
    assert len(measured(project)) == 6
    assert project.end["completed"] is False
    assert project.end["reason"] == "not all files could be collected"
    left_out = "bench_a.py: 1 case, which take days"
    result.stdout.fnmatch_lines(["left out: 1 of 7 cases, *", f"  {left_out}"])
    assert project.lines[0]["notes"]["left_out"] == f"not named; {left_out}"


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_second_session_waits_for_the_first(machine, workers):
    project = machine(h200(0), h200(1))
    project.write({"bench_a.py": FEW.replace("(0.01,)", "(0.2,)")})
    first = running(project, *TIMING, workers, "--bench-results=first")
    until(lambda: list((project.path / "leases").glob("*.json")))
    second = project.pytest(*TIMING, workers, "--bench-results=second")
    first.wait(timeout=60)
    assert first.returncode == second.ret == 0
    second.stdout.fnmatch_lines([f"*waiting up to 3600 s: NVIDIA H200 (GPU-*) is held by * (pid {first.pid}, *"])
    files = [next((project.path / name).rglob("*.jsonl")) for name in ("first", "second")]
    windows = [[one.window_utc for one in read_run(file).records] for file in files]
    assert max(end for _, end in windows[0]) < min(begin for begin, _ in windows[1])


def test_leases_can_be_switched_off(machine):
    project = machine(h200(0))
    project.write({"bench_a.py": FEW})
    assert project.pytest(*TIMING, "--bench-lease=off", "-k", "[0]").ret == 0
    assert not (project.path / "leases").exists()
    assert project.pytest(*TIMING, "-k", "[0]", "--bench-lease-dir=elsewhere").ret == 0
    assert (project.path / "elsewhere" / "arbiter.lock").exists()
    assert project.pytest(*TIMING, "--collect-only", "--bench-lease-dir=nowhere").ret == 0
    assert not (project.path / "nowhere").exists()


def test_mig_instances_of_one_board_are_not_measured_side_by_side(machine):
    project = machine(h200(0))
    scenario = json.loads((project.path / "gpus.json").read_text())
    scenario["gpus"][0]["mig"] = [{"name": "1g", "uuid": f"MIG-{n}{n}{n}"} for n in (1, 2)]
    (project.path / "gpus.json").write_text(json.dumps(scenario))
    project.write({"bench_a.py": FEW.replace("range(6)", "range(2)")})
    refused = project.pytest(*QUICK, "-n", "2", "--bench-gpus=MIG-111,MIG-222")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["*MIG instances of one board, which has one power sensor*--bench-collect timing*"])
    assert project.pytest(*TIMING, "-n", "2", "--bench-gpus=MIG-111,MIG-222").ret == 0
    assert len({one["gpu_uuid"] for one in measured(project)}) == 2


def test_workers_hold_their_cases_against_the_baseline(machine):
    project = machine(h200(0), h200(1))
    project.write({"bench_a.py": FEW})
    assert project.pytest(*TIMING, "-n", "2").ret == 0
    project.write({"bench_a.py": FEW.replace("(0.01,)", "(0.01 if n else 0.05,)")})
    result = project.pytest(*TIMING, "-n", "2", "--bench-baseline=latest")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["*joulemark: baseline: *", "*regressed against *", "*compared 6 cases*", "REGRESSED *bench_sleep*0*"]
    )
    assert result.parseoutcomes()["failed"] == 1
