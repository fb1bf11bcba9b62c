"""The script of the gate's trial on a GPU, rehearsed on a CPU with few processes."""

from __future__ import annotations

import io
import json
import runpy
import sys
import time
import types
from pathlib import Path

import jsonschema
import pytest

from joulemark.store import read_run

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs/schema/aa.schema.json").read_text())


@pytest.fixture
def trial(monkeypatch):
    """The script as a module, with short stretches of small steps; its processes measure in this one."""
    script = ROOT / "tests/gpu/aa_cells.py"
    module = types.ModuleType("aa_cells")
    monkeypatch.setitem(sys.modules, "aa_cells", module)
    exec(compile(script.read_text(), str(script), "exec"), vars(module))
    module.UNITS.update({0.0: 10, 0.03: 11, 0.05: 12})
    monkeypatch.setattr(module, "STRETCH_S", 2e-3)
    monkeypatch.setattr(module, "ON_CPU", module.ON_CPU[1:])
    module.spoiled, module.clock = (), 0.0
    monkeypatch.setattr(module, "time", types.SimpleNamespace(time=time.time, monotonic=lambda: module.clock))

    class Process:
        """Stands for a process: measures when it is told to, by its number not at all or with a failure."""

        def __init__(self, options, number, parts):
            self.options, self.number, self.file, self.returncode = options, number, parts[number], None

        def communicate(self, said, timeout):
            self.returncode = 1 if self.number in module.spoiled else 0
            module.clock += 10.0
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdin", io.StringIO(said.decode() if self.returncode == 0 else ""))
                module.child("cpu", self.number, self.file, module.cells_on(self.options))

        def poll(self):
            return self.returncode

        def kill(self):
            self.returncode = -9

        def wait(self):
            return self.returncode

    monkeypatch.setattr(module, "_started", Process)
    return module


@pytest.fixture
def run(trial, monkeypatch, tmp_path):
    def run(*arguments):
        command = ["aa_cells.py", "--device", "cpu", "--processes", "6", "--parts", str(tmp_path / "parts")]
        monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path / "out" / "cpu"), *arguments])
        return trial.main()

    run.parts, run.out = tmp_path / "parts", tmp_path / "out" / "cpu"
    return run


def test_a_trial_that_was_cut_and_whose_process_failed_goes_on_to_its_verdicts(run, trial, capsys):
    assert run("--limit", "15") == 3  # a process takes 10 s
    assert [one.name for one in sorted(run.parts.glob("*.json"))] == ["process-000.json"]
    trial.spoiled = (2,)
    assert run() == 1
    assert "process 3 ended with 1: run the same command again" in capsys.readouterr().err
    kept = {one: one.read_bytes() for one in run.parts.glob("*.json")}
    assert len(kept) == 2
    trial.spoiled = ()
    assert run() == 0
    assert all(path.read_bytes() == content for path, content in kept.items())
    document = json.loads((run.out / "aa.json").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert {row["rule"] for row in document["rates"]} == {
        "joulemark", "mean + 5 %", "--benchmark-compare-fail=mean:5%", "Mann-Whitney, 5 %"
    }  # fmt: skip
    assert {row["added_work"] for row in document["rates"]} == {0.0, 0.03, 0.05}
    assert all(row["rows"] >= 10_000 for row in document["simulated"]["rates"])
    (stored,) = run.out.glob("aa-*.jsonl")
    assert document["sources"] == [stored.name]
    records = read_run(stored).records
    assert len(records) == 2 * 3
    for one in records:
        assert len(one.processes) == 6
        assert all(len(stretches) == 3 for stretches in one.samples_by_process("stretch_time_s"))


def test_parts_of_another_trial_are_refused_before_anything_is_measured(run, trial, capsys):
    assert run("--limit", "15") == 3
    trial.UNITS[0.05] = 13
    assert run() == 1
    assert "is of another trial" in capsys.readouterr().err
    assert len(list(run.parts.glob("*.json"))) == 1


def test_a_process_that_is_told_nothing_measures_nothing(trial, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    trial.child("cpu", 0, tmp_path / "part.json", trial.ON_CPU)
    assert list(tmp_path.iterdir()) == []


def test_arms_take_turns_at_every_place():
    turns = runpy.run_path(str(ROOT / "tests/gpu/aa_cells.py"))["turns"]
    for process in range(4):
        rounds = turns(5, process)
        assert [sorted(one) for one in rounds] == [list(range(15))] * 3
        for cell in range(5):
            of_cell = [one[3 * cell : 3 * cell + 3] for one in rounds]
            assert [{arm // 3 for arm in one} for one in of_cell] == [{cell}] * 3
            assert [len({one[place] for one in of_cell}) for place in range(3)] == [3, 3, 3]
