"""Two environments in turns: order, joined records, and one whole comparison on the CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import joulemark
from joulemark.cli import main
from joulemark.errors import ConfigurationError, MeasurementError
from joulemark.measure import rounds
from joulemark.measure.assemble import assemble, join
from joulemark.records import Case, Environment, Finding, Measurement, Run, Value
from joulemark.store import read_run

CASE = Case("sort", gpu_model="cpu")
ENVIRONMENT = Environment({"driver": None})


def record(time, outcome="ok", start=0.0, case=CASE, **more):
    measurement = Measurement(
        "latency", {"host_time_s": Value(time, "s", n=2)}, {"host_time_s": [time, time]}, windows_utc=((start, start),)
    )
    return assemble(
        case,
        [measurement] if outcome == "ok" else [],
        run_id="r",
        environment_id=ENVIRONMENT.environment_id,
        outcome=outcome,
        window_utc=(start, start + 1),
        **more,
    )


def run(*records, **more):
    return Run("x", "r", {ENVIRONMENT.environment_id: ENVIRONMENT}, records, **{"completed": True, **more})


def test_records_of_one_case_join_to_one_of_several_processes():
    made = join([record(1.0), record(4.0, start=5.0), record(2.0, start=9.0)])
    assert made.value("host_time_s") == 2.0
    assert made.metrics["host_time_s"].n == 3
    assert [one["host_time_s"] for one in made.processes] == [1.0, 4.0, 2.0]
    assert made.samples_by_process("host_time_s") == [[1.0, 1.0], [4.0, 4.0], [2.0, 2.0]]
    assert made.window_utc == (0.0, 10.0)
    assert made.measured_windows_utc == ((0.0, 0.0), (5.0, 5.0), (9.0, 9.0))


def test_a_round_that_did_not_fit_or_is_flagged_stands_for_all():
    oom = record(1.0, "oom", reason="out of memory")
    assert join([record(1.0), oom, record(2.0)]) == oom
    flagged = record(1.0, findings=[Finding("hot", "90 degC", flags=True)])
    assert join([record(1.0), flagged]).outcome == "flagged"


def test_a_joined_run_is_a_file_like_any_other(tmp_path):
    other = Case("other")
    made = rounds.joined(
        [run(record(1.0)), run(record(2.0), record(3.0, case=other), completed=False, reason="killed")]
    )
    stored = rounds.store(made, tmp_path)
    assert read_run(Path(stored.path)) == stored
    assert (stored.completed, stored.reason, stored.problems) == (False, "killed", ())
    assert [len(one.processes) for one in stored.records] == [2, 1]
    assert {one.run_id for one in stored.records} == {stored.run_id}


def test_sides_take_turns(tmp_path, monkeypatch):
    seen = []

    def session(interpreter, folder, arguments):
        seen.append((interpreter.name, folder.name, tuple(arguments)))
        return run(record(1.0 if interpreter.name == "a" else 2.0))

    monkeypatch.setattr(rounds, "session", session)
    old, new = rounds.take_turns(Path("a"), Path("b"), 3, tmp_path, ["x"])
    assert "".join(name for name, _, _ in seen) == "abbaab"
    assert len({folder for _, folder, _ in seen}) == 6
    assert (old.records[0].value("host_time_s"), new.records[0].value("host_time_s")) == (1.0, 2.0)
    assert (len(old.records[0].processes), len(new.records[0].processes)) == (3, 3)


def wrapper(path, **environment):
    """An interpreter of its own: this one, started with other variables."""
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = "".join(f"export {name}={value}\n" for name, value in environment.items())
    path.write_text(f'#!/bin/sh\n{settings}exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def test_an_environment_is_an_interpreter_or_a_folder_with_one(tmp_path):
    python = wrapper(tmp_path / "venv" / "bin" / "python")
    assert rounds.interpreter_of(tmp_path / "venv") == python
    assert rounds.interpreter_of(python) == python


def test_an_environment_that_cannot_measure_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="neither a Python interpreter nor"):
        rounds.interpreter_of(tmp_path)
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho ModuleNotFoundError: joulemark >&2\nexit 1\n")
    bare.chmod(0o755)
    with pytest.raises(ConfigurationError, match="cannot import joulemark"):
        rounds.interpreter_of(bare)


def test_a_session_that_measures_nothing_is_an_error(tmp_path):
    dead = tmp_path / "python"
    dead.write_text("#!/bin/sh\nfor n in 1 2 3 4 5; do echo header $n; done\necho ==\necho no such option\nexit 4\n")
    dead.chmod(0o755)
    says = r"measured nothing \(exit status 4\): .*session.log ends: header 4 \| header 5 \| no such option$"
    with pytest.raises(MeasurementError, match=says):
        rounds.session(dead, tmp_path / "out", [])


BENCH = """
import os
import time

def bench_wait(bench):
    bench.pedantic(time.sleep, args=(float(os.environ["WAIT_S"]),), rounds=5)
"""
QUICK = ("--bench-gpus=cpu", "--bench-quick", "--bench-collect=timing", "-pno:cacheprovider")


@pytest.fixture
def bench_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(joulemark.__file__).parents[1]))
    for name in [name for name in os.environ if name.startswith(("PYTEST_", "JOULEMARK_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")  # loads itself at the end of each session
    (tmp_path / "bench_wait.py").write_text(BENCH)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "bench_wait.py")


@pytest.mark.slow
def test_the_slower_of_two_environments_is_found(bench_file, tmp_path, capsys):
    old, new = (wrapper(tmp_path / name / "bin" / "python", WAIT_S=wait) for name, wait in (("a", 0.01), ("b", 0.03)))
    code = main(["ab", "--old", str(old.parents[1]), "--new", str(new), "--results", "out", "--", bench_file, *QUICK])
    out, err = capsys.readouterr()
    assert code == 1, err
    assert "REGRESSED" in out
    assert "spread measured between processes" in " ".join(out.split())
    assert "one after the other" not in out
    assert [line.split(": ")[-1] for line in err.splitlines() if "round" in line] == [
        "old", "new", "new", "old", "old", "new",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_gate_is_judged_on_processes_that_it_measures_itself(bench_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WAIT_S", "0.002")
    arguments = ["--processes", "6", "--pairs", "20", "--results", "out", "--out", "aa.json", "--", bench_file, *QUICK]
    assert main(["aa", *arguments]) == 0
    out, _ = capsys.readouterr()
    assert "bench_wait.bench_wait-cpu" in out
    assert "of 20 comparisons of the same binary" in " ".join(out.split())
    assert (tmp_path / "aa.json").read_text().startswith("{")
    (file,) = (tmp_path / "out").rglob("sweep-*.jsonl")
    assert main(["aa", str(file.relative_to(tmp_path)), "--pairs", "20", "--json"]) == 0
    assert capsys.readouterr().out == (tmp_path / "aa.json").read_text()
