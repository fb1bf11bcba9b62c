"""The script that goes through all measurements on all GPUs of a machine, with short commands in place of them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "gpu" / "everything.py"
MARK = """import os, sys, pathlib
pathlib.Path(sys.argv[1], 'marks.csv').open('a').write(os.environ['CUDA_VISIBLE_DEVICES'] + '\\n')
"""


@pytest.fixture
def everything(monkeypatch):
    spec = importlib.util.spec_from_file_location("everything", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "everything", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_GRACE_S", 0.5)
    monkeypatch.setattr(module, "_PACK_S", 0.1)
    return module


@pytest.fixture
def run(everything, tmp_path):
    def run(*steps, limit="20", gpus="a,b"):
        folders = [str(tmp_path / "out"), "--work", str(tmp_path / "work")]
        return everything.main(steps, [*folders, "--limit", limit, "--gpus", gpus])

    return run


@pytest.fixture
def step(everything):
    def step(name, *codes, then="", **more):
        """One command per code: it writes a mark with its GPU, and ends with the code."""
        commands = [(sys.executable, "-c", f"{MARK}{then}\nsys.exit({code})", "{dir}") for code in codes]
        return everything.Step(name, tuple(commands), **{"most_s": 5.0, "least_s": 0.2, **more})

    return step


def marks(tmp_path, name, folder="out"):
    return (tmp_path / folder / name / "marks.csv").read_text().split()


def running(pid):
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_every_step_is_run_once_and_copied(run, step, tmp_path):
    assert run(step("one", 0, 0), step("two", 0), step("three", 0)) == 0
    assert [len(marks(tmp_path, name)) for name in ("one", "two", "three")] == [2, 1, 1]
    assert len(set(marks(tmp_path, "one"))) == 1
    assert run(step("one", 0, 0), step("two", 0)) == 0
    assert len(marks(tmp_path, "one")) == 2


def test_gpus_work_side_by_side(run, step, tmp_path):
    waits = "import time; [time.sleep(0.05) for _ in range(200) if not pathlib.Path(sys.argv[1], '..', '{}').exists()]"
    meet = "pathlib.Path(sys.argv[1], '..', '{}').touch(); " + waits
    assert run(step("one", 0, then=meet.format("1", "2")), step("two", 0, then=meet.format("2", "1"))) == 0
    assert {*marks(tmp_path, "one"), *marks(tmp_path, "two")} == {"a", "b"}


def test_a_cut_step_goes_on_where_it_began(run, step, tmp_path):
    assert run(step("cut", 0, 3), gpus="b") == 3
    assert run(step("cut", 0, 0), step("other", 0), gpus="a,b") == 0
    assert marks(tmp_path, "cut") == ["b"] * 3


def test_a_step_whose_gpu_is_gone_goes_on_elsewhere(run, step, tmp_path):
    assert run(step("cut", 3), gpus="b") == 3
    assert run(step("cut", 0), gpus="a") == 0
    assert marks(tmp_path, "cut") == ["b", "a"]


def test_a_failing_command_has_two_tries_and_costs_nobody_else_their_turn(run, step, tmp_path, capsys):
    assert run(step("bad", 1, 0, then="print('no such kernel', flush=True)"), step("good", 0), gpus="a") == 1
    assert (len(marks(tmp_path, "bad")), len(marks(tmp_path, "good"))) == (3, 1)
    book = json.loads((tmp_path / "out" / "everything.json").read_text())
    assert book["bad"] | {"took_s": 0} == {
        "commands_done": 2, "failures": 0, "given_up": [0], "gpu": "a", "took_s": 0, "said": "no such kernel"
    }  # fmt: skip
    assert "failed, in part at least: bad" in capsys.readouterr().out


def test_a_step_says_which_codes_ask_for_another_start_and_which_end_it(run, step, tmp_path):
    tries = "sys.exit(4 if len(pathlib.Path(sys.argv[1], 'marks.csv').read_text().split()) < 4 else 0)"
    assert run(step("again", 1, then=tries, again=(4,)), step("ends", 4, ends=(4,)), gpus="a") == 0
    assert (len(marks(tmp_path, "again")), len(marks(tmp_path, "ends"))) == (4, 1)


def test_an_error_of_pytest_is_no_cut(run, step, tmp_path):
    assert run(step("bad", 3, cut=()), gpus="a") == 1
    assert len(marks(tmp_path, "bad")) == 2


def test_an_overrun_ends_with_all_that_it_started(run, step, tmp_path):
    child = "import subprocess, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    child += " pathlib.Path(sys.argv[1], 'pid').write_text(str(p.pid)); time.sleep(60)"
    assert run(step("slow", 0, then=child, most_s=1.0), gpus="a") == 3
    pid = (tmp_path / "work" / "slow" / "pid").read_text()
    end = time.monotonic() + 10
    while running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not running(pid)
    assert marks(tmp_path, "slow") == ["a"]
    assert run(step("slow", 0, then=child, most_s=1.0), gpus="a") == 1
    assert run(step("slow", 0, then=child, most_s=1.0), gpus="a") == 1
    assert marks(tmp_path, "slow") == ["a"] * 2


def test_a_command_that_was_cut_for_want_of_time_has_not_failed(run, step, tmp_path):
    sleeps = "import time; time.sleep(60)"
    for _ in range(2):
        assert run(step("slow", 0, then=sleeps), gpus="a", limit="1.2") == 3
    book = json.loads((tmp_path / "out" / "everything.json").read_text())
    assert (book["slow"]["failures"], book["slow"]["given_up"]) == (0, [])


@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset is not on this machine")
def test_a_step_that_times_the_host_has_one_core_to_itself(run, step, tmp_path):
    cores = "pathlib.Path(sys.argv[1], 'cores.csv').write_text(' '.join(map(str, os.sched_getaffinity(0))))"
    assert run(step("bound", 0, then=cores, pinned=True), step("other", 0, then=cores), gpus="a") == 0
    bound, other = ((tmp_path / "out" / one / "cores.csv").read_text().split() for one in ("bound", "other"))
    here = os.sched_getaffinity(0)
    assert len(bound) == 1
    assert {int(core) for core in other} == (here - {int(bound[0])} or here)


def test_a_machine_that_binds_no_command_runs_it_all_the_same(run, step, tmp_path, monkeypatch):
    tool = tmp_path / "taskset"
    tool.write_text("#!/bin/sh\necho 'failed to set affinity' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert run(step("bound", 0, pinned=True), step("other", 0), gpus="a") == 0


def test_nothing_begins_that_has_no_time_left(run, step, tmp_path):
    assert run(step("long", 0, least_s=30.0), step("short", 0), limit="10", gpus="a") == 3
    assert not (tmp_path / "work" / "long").exists()
    assert marks(tmp_path, "short") == ["a"]


def test_an_unknown_step_and_a_folder_in_the_checkout_are_refused(everything, tmp_path, capsys):
    with pytest.raises(SystemExit):
        everything.main(None, [str(tmp_path), "--work", str(tmp_path / "w"), "--steps", "none"])
    assert "no step none; there are" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        everything.main((), [str(tmp_path), "--work", str(SCRIPT.parent / "w")])
    assert "lies in the checkout" in capsys.readouterr().err


def test_networks_go_on_with_the_rows_that_are_there(everything, tmp_path, monkeypatch):
    def begun():
        commands = [
            command for step in everything.steps() if step.name.startswith("networks") for command in step.commands
        ]
        return [command[command.index("--begin") + 1] if "--begin" in command else None for command in commands]

    monkeypatch.setattr(everything, "MERGED", tmp_path / "merged.json")
    assert begun() == [None, None]
    everything.MERGED.write_text("{}")
    assert begun() == [str(everything.MERGED)] * 2
