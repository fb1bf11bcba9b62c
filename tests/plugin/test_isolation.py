"""What one case does to its process or machine must not reach the rows after it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from joulemark.store import read_run


def outcomes(project):
    return {name: one["outcome"].replace("flagged", "ok") for name, one in project.records.items()}


TROUBLE = """
import os
import signal
import subprocess
import time
import pytest

@pytest.fixture(scope="module")
def shared():
    with open("built", "a") as file:
        file.write(f"{os.getpid()}\\n")
    yield
    with open("torn", "a") as file:
        file.write(f"{os.getpid()}\\n")

@pytest.mark.parametrize("n", [1, 2])
def bench_before(bench, shared, n):
    bench(abs, n)

def bench_hangs(bench):
    bench(time.sleep, 600)

def bench_after_hang(bench):
    bench(abs, 1)

def bench_exits(bench):
    os._exit(7)

def bench_killed(bench):
    os.kill(os.getpid(), signal.SIGKILL)

def bench_leaves_a_fork(bench):
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)

def bench_after(bench):
    bench(abs, 1)

@pytest.mark.parametrize("always", [True, False])
def bench_poisoned(bench, always):
    if always or not os.path.exists("once"):
        open("once", "w").close()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    bench(abs, 1)

def bench_last(bench):
    bench(abs, 1)
"""


def test_hangs_deaths_and_cuda_errors_cost_one_case_each(project):
    project.write({"bench_a.py": TROUBLE})
    result = project.bench("--bench-timeout=1.5")
    assert result.ret == 1
    assert outcomes(project) == {
        "bench_before[1]": "ok",
        "bench_before[2]": "ok",
        "bench_hangs": "failed",
        "bench_after_hang": "ok",
        "bench_exits": "failed",
        "bench_killed": "failed",
        "bench_leaves_a_fork": "failed",
        "bench_after": "ok",
        "bench_poisoned[True]": "failed",
        "bench_poisoned[False]": "ok",
        "bench_last": "ok",
    }
    records = project.records
    assert records["bench_hangs"]["reason"] == "killed at its timeout of 1.5 s"
    assert "exit status 7" in records["bench_exits"]["reason"]
    assert "signal SIGKILL" in records["bench_killed"]["reason"]
    assert "exit status 0" in records["bench_leaves_a_fork"]["reason"]
    assert "twice, the second time in a fresh process" in records["bench_poisoned[True]"]["reason"]
    assert project.end["completed"] is True
    assert len((project.path / "built").read_text().split()) == 1  # one process, one module: built once


def test_a_cuda_error_that_a_fresh_process_does_not_have_is_flagged(project):
    project.write({"bench_a.py": TROUBLE})
    project.bench("-k", "poisoned and False")
    assert project.outcomes["passed"] == 1
    record = project.records["bench_poisoned[False]"]
    assert record["outcome"] == "flagged"
    assert "retried" in [one["code"] for one in record["findings"]]
    assert record["metrics"]["host_time_s"]["value"] > 0


SERIES = """
import pytest

@pytest.fixture(scope="module")
def shared():
    with open("log", "a") as file:
        file.write(f"up {__name__}\\n")
    yield
    with open("log", "a") as file:
        file.write(f"down {__name__}\\n")
    if __name__.endswith("bench_a"):
        raise OSError("cannot close")

@pytest.mark.parametrize("batch", [1, 2, 4])
def bench_fit(bench, shared, batch):
    if batch > 1:
        raise MemoryError
    bench(abs, 1)
"""


def test_shared_fixtures_end_in_time_where_the_parent_skips_the_item_that_was_to_come(project):
    project.write({"bench_a.py": SERIES, "bench_b.py": SERIES})
    project.bench()
    assert project.outcomes == {"passed": 2, "oom": 4}
    records = [one for one in project.lines if one["kind"] == "record"]
    assert [one["outcome"].replace("flagged", "ok") for one in records] == ["ok", "oom", "oom"] * 2
    assert "cannot close" in json.dumps(records[3]["findings"])
    assert (project.path / "log").read_text().split() == (
        ["up", "bench_a", "down", "bench_a", "up", "bench_b", "down", "bench_b"]
    )


def test_a_resumed_sweep_remembers_what_did_not_fit(project):
    project.write({"bench_a.py": SERIES})
    project.bench("-k", "not 4")
    file = project.files[0]
    assert outcomes(project) == {"bench_fit[1]": "ok", "bench_fit[2]": "oom"}
    project.bench(f"--bench-resume={file}")
    assert project.outcomes == {"oom": 1, "skipped": 2}
    assert project.records["bench_fit[4]"]["reason"] == "not tried: batch 2 of this series did not fit"


PIDS = """
import os
import pytest

@pytest.mark.parametrize("n", [1, 2])
def bench_pid(bench, n):
    with open("pids", "a") as file:
        file.write(f"{n} {os.getpid()}\\n")
    bench.pedantic(abs, (n,), rounds=20)
"""


def test_several_processes_per_case(project):
    project.write({"bench_a.py": PIDS})
    project.bench("--bench-processes=3", "-k", "1")
    assert project.outcomes == {"passed": 1, "deselected": 1}
    assert len(set((project.path / "pids").read_text().splitlines())) == 3
    record = project.records["bench_pid[1]"]
    assert len(record["processes"]) == 3
    medians = sorted(one["host_time_s"] for one in record["processes"])
    assert record["metrics"]["host_time_s"]["value"] == medians[1]
    assert record["metrics"]["host_time_s"]["n"] == 3
    assert len(record["samples"]["host_time_s"]) == 60


def test_a_spent_budget_leaves_the_rest_for_resume(project):
    project.write(
        {
            "bench_a.py": """
import time
import pytest

@pytest.mark.parametrize("n", [1, 2, 3])
def bench_slow(bench, n):
    time.sleep(0.8)
    bench(abs, n)
"""
        }
    )
    result = project.bench("--bench-budget=1", "-rs")
    assert project.outcomes == {"passed": 1, "skipped": 2}
    assert project.end["completed"] is False
    assert project.end["reason"] == "budget spent"
    result.stdout.fnmatch_lines([f"*budget of 1 s is spent*--bench-resume {project.files[0]}"])
    first = project.files[0].read_bytes()
    project.bench(f"--bench-resume={project.files[0]}")
    assert project.outcomes == {"passed": 2, "skipped": 1}
    assert project.files[0].read_bytes().startswith(first)
    assert set(project.records) == {"bench_slow[1]", "bench_slow[2]", "bench_slow[3]"}
    assert project.end["completed"] is True
    result = project.bench(f"--bench-resume={project.files[0]}")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["joulemark: nothing was measured: all 3 cases are in the resumed file"])


KILLED = """
import os
import subprocess
import time
import pytest

@pytest.mark.parametrize("n", [1, 2, 3])
def bench_case(bench, n):
    if n == 2 and not os.path.exists("resumed"):
        helper = subprocess.Popen(["sleep", "600"])
        with open("pids.tmp", "w") as file:
            file.write(f"{os.getpid()} {helper.pid}")
        os.rename("pids.tmp", "pids")
        time.sleep(600)
    bench(abs, n)
"""


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def is_gone(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"  # dead, and not yet collected by whoever inherited it


def start(project):
    """A sweep in the middle of its second case: the parent, and what runs under it."""
    project.write({"bench_a.py": KILLED})
    command = [sys.executable, "-m", "pytest", "--bench", "--bench-gpus=cpu", "--bench-quick"]
    with (project.path / "out.txt").open("wb") as log:
        parent = subprocess.Popen(command, cwd=project.path, stdout=log, stderr=subprocess.STDOUT)
    wait_for((project.path / "pids").exists)
    return parent, [int(pid) for pid in (project.path / "pids").read_text().split()]


def finish(project):
    """Resume, and look at what the file then holds."""
    file = project.files[0]
    first = file.read_bytes()
    project.write({"resumed": ""})
    project.bench(f"--bench-resume={file}")
    assert project.outcomes == {"passed": 2, "skipped": 1}
    assert project.files == [file]
    assert file.read_bytes().startswith(first)
    run = read_run(file)
    assert run.completed
    assert run.problems == ()
    assert len(run.records) == 3


def test_a_killed_parent_loses_the_running_case_only_and_takes_its_child_along(project):
    parent, pids = start(project)
    parent.kill()
    parent.wait()
    wait_for(lambda: all(is_gone(pid) for pid in pids))
    run = read_run(project.files[0])
    assert [one.nodeid for one in run.records] == ["bench_a.py::bench_case[1]"]
    assert not run.completed
    finish(project)


def test_a_child_without_a_parent_removes_the_folder_of_answers(project, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(project.path))
    parent, pids = start(project)
    assert list(project.path.glob("joulemark-*"))
    parent.kill()
    parent.wait()
    wait_for(lambda: all(is_gone(pid) for pid in pids))
    assert not list(project.path.glob("joulemark-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_a_valid_file_that_says_so(project, number):
    parent, pids = start(project)
    parent.send_signal(number)
    assert parent.wait(20) == pytest.ExitCode.INTERRUPTED
    wait_for(lambda: all(is_gone(pid) for pid in pids))
    assert project.end["completed"] is False
    assert project.end["reason"] == "interrupted"
    assert set(project.records) == {"bench_case[1]"}
    text = (project.path / "out.txt").read_text()
    assert "INTERNALERROR" not in text
    assert "was not used" not in text  # pytest-benchmark's fixture of the case that was interrupted
    assert "bench_a.bench_case" in text  # the table of what there is
    if number is signal.SIGTERM:
        finish(project)


def test_an_answer_that_nobody_waited_for_is_not_given_to_the_next_case(project):
    project.write(
        {
            "conftest.py": """
import signal
import pytest

def give_up(number, frame):
    pytest.fail("a time-out of another plugin")

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if item.name == "bench_slow" and not item.config.getoption("joulemark_worker"):
        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, 1.5)
""",
            "bench_a.py": """
import time

def bench_slow(bench):
    time.sleep(2)
    bench(abs, 1)

def bench_next(bench):
    bench(time.sleep, 0.002)
""",
        }
    )
    try:
        project.bench()
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert project.outcomes == {"passed": 1, "failed": 1}
    assert project.records["bench_next"]["metrics"]["host_time_s"]["value"] >= 0.002


def test_another_sweep_does_not_go_into_a_resumed_file(project):
    project.write(
        {
            "bench_a.py": "def bench_x(bench):\n    bench(sum, [1])\n",
            "bench_b.py": "def bench_y(bench):\n    bench(sum, [1])\n",
        }
    )
    project.bench("bench_a.py")
    (file,) = project.files
    before = file.read_bytes()
    result = project.pytest("--bench", "bench_b.py", f"--bench-resume={file}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*holds 1 cases that this sweep does not plan (bench_a.bench_x-cpu *bench_a.py*"])
    assert file.read_bytes() == before


def test_a_resumed_sweep_reports_all_that_its_file_holds(project):
    project.write({"bench_a.py": "def bench_x(bench):\n    bench(sum, [1])\n"})
    project.bench()
    (file,) = project.files
    result = project.pytest("--bench", f"--bench-resume={file}", "--bench-report=all.csv")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["joulemark: nothing was measured: all 1 cases*", "*bench_x*"])
    assert "bench_a.bench_x" in (project.path / "all.csv").read_text()


SERVED = """
import pathlib, time
import pytest

@pytest.fixture(scope="session", autouse=True)
def server():
    log = pathlib.Path("log")
    log.write_text("up")
    yield
    log.write_text("going down")
    time.sleep(float(pathlib.Path("teardown_s").read_text()))
    log.write_text("down")

@pytest.mark.parametrize("n", range(4))
def bench_one(bench, n):
    bench(time.sleep, 0.02)
    assert n != 1
"""


@pytest.mark.parametrize("args", [["-x"], ["--bench-budget=0.5"]])
def test_fixtures_of_a_sweep_that_ends_early_are_torn_down(project, args):
    project.write({"bench_a.py": SERVED, "teardown_s": "0"})
    project.bench("--bench-collect=timing", *args)
    assert project.end["completed"] is False
    assert (project.path / "log").read_text() == "down"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_fixtures_end_costs_neither_the_mark_nor_the_folder(project, number, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(project.path))
    project.write({"bench_a.py": SERVED, "teardown_s": "60"})
    command = [sys.executable, "-m", "pytest", "--bench", "--bench-gpus=cpu", "--bench-quick", "-x"]
    sweep = subprocess.Popen(command, cwd=project.path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = project.path / "log"
    try:
        wait_for(lambda: log.exists() and log.read_text() == "going down")
        sweep.send_signal(number)
        sweep.wait(timeout=5)
    finally:
        sweep.kill()
        sweep.wait()
    assert project.end["reason"] == "not all cases were measured"
    assert not list(project.path.glob("joulemark-*"))


def test_a_clock_that_is_set_changes_neither_budget_nor_duration(project):
    project.write({"bench_a.py": SERVED, "teardown_s": "0"})
    clock = (
        "import time\nreal, begin = time.time, time.monotonic()\n"
        "time.time = lambda: real() + (3600 if time.monotonic() - begin > 0.7 else 0)\n"
    )
    project.write({"clock_is_set.py": clock})
    command = [sys.executable, "-m", "pytest", "--bench", "--bench-gpus=cpu", "--bench-quick", "--bench-budget=100"]
    done = subprocess.run([*command, "-p", "clock_is_set"], cwd=project.path, stdout=subprocess.DEVNULL, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert len(project.records) == 4
    assert project.end["completed"] is True
    assert 0 < project.end["wall_s"] < 100


def test_a_sweep_that_was_killed_before_its_end_line_gets_it_on_resume(project):
    project.write({"bench_a.py": "def bench_one(bench):\n    bench(abs, 1)\n"})
    assert project.bench("--bench-collect=timing").ret == 0
    file = project.files[0]
    killed = b"".join(file.read_bytes().splitlines(keepends=True)[:-1])
    file.write_bytes(killed)
    assert not read_run(file).completed
    assert project.bench("--bench-collect=timing", f"--bench-resume={file}").ret == 0
    assert file.read_bytes().startswith(killed)
    assert [line["kind"] for line in project.lines] == ["environment", "record", "end"]
    assert read_run(file).completed
    whole = file.read_bytes()
    assert project.bench("--bench-collect=timing", f"--bench-resume={file}").ret == 0
    assert file.read_bytes() == whole


def test_a_forked_copy_of_a_benchmark_does_not_answer_in_its_name(project):
    forks = "import os\n\ndef bench_fork(bench):\n    bench(abs, 1)\n    os.fork()\n\n"
    project.write({"bench_a.py": forks + "def bench_next(bench):\n    bench(abs, 2)\n"})
    project.bench("--bench-collect=timing")
    assert outcomes(project) == {"bench_fork": "ok", "bench_next": "ok"}


def test_a_case_that_another_plugin_ends_leaves_the_file_incomplete(project):
    project.write(
        {
            "conftest.py": """
import signal
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    def give_up(number, frame):
        pytest.fail("too long, says another plugin")

    if "--bench-worker" not in item.config.invocation_params.args and "slow" in item.name:
        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(2)
    try:
        return (yield)
    finally:
        signal.alarm(0)
""",
            "bench_a.py": "import time\n\ndef bench_slow(bench):\n    bench(time.sleep, 60)\n\n"
            "def bench_next(bench):\n    bench(abs, 2)\n",
        }
    )
    project.bench("--bench-collect=timing")
    assert outcomes(project) == {"bench_next": "ok"}
    assert project.end["completed"] is False
    assert project.end["reason"] == "not all cases were measured"


def test_two_parameter_sets_of_one_case_leave_the_file_incomplete(project):
    twice = "import pytest\n\n@pytest.mark.parametrize('n', [1, 1])\ndef bench_one(bench, n):\n    bench(abs, n)\n"
    project.write({"bench_a.py": twice})
    assert project.bench("--bench-collect=timing").ret == pytest.ExitCode.TESTS_FAILED
    assert len(project.lines) == 3
    assert project.end["completed"] is False
