"""Bring your own model: by the fixture, by the hook, by its name; always in the measuring process."""

from __future__ import annotations

import os

import pytest

OVERRIDDEN = """
import os
import pytest
from joulemark.workloads.base import Step

@pytest.fixture
def workload(bench):
    def run():
        with open("pids", "a") as file:
            file.write(f"{os.getpid()}\\n")
    yield Step(run, items=10, unit="images")
"""


def test_an_overridden_workload_is_measured_in_the_child(project):
    project.write(
        {
            "conftest.py": OVERRIDDEN,
            "bench_a.py": "def bench_own(bench, workload):\n    assert bench.step(workload).value('host_time_s') > 0\n",
        }
    )
    project.bench()
    assert project.outcomes == {"passed": 1}
    pids = set((project.path / "pids").read_text().split())
    assert len(pids) == 1
    assert str(os.getpid()) not in pids
    metrics = project.records["bench_own"]["metrics"]
    assert abs(metrics["throughput_per_s"]["value"] * metrics["host_time_s"]["value"] - 10) < 1e-9


WORKLOAD = """
import os
from joulemark.workloads.base import Step

class Counting:
    name = "counting"
    phases = ("inference",)

    def build(self, case, device):
        assert device == "cpu"
        with open("built", "a") as file:
            file.write(f"{os.getpid()} {case.batch_size}\\n")
        return Step(lambda: sum(range(100 * case.batch_size)), items=case.batch_size, unit="numbers")
"""

SWEPT = """
import pytest

@pytest.mark.bench(models=("counting",), batch_sizes=(4, 1, 2))
def bench_mine(bench, workload):
    record = bench.step(workload)
    assert record.case.workload.endswith("ounting")
"""


def test_the_hook(project):
    project.write(
        {
            "conftest.py": WORKLOAD
            + "\ndef pytest_joulemark_workloads(config):\n    return {'counting': Counting()}\n",
            "bench_a.py": SWEPT,
        }
    )
    project.bench()
    assert project.outcomes == {"passed": 3}
    assert [one["case"]["batch_size"] for one in project.records.values()] == [1, 2, 4]
    built = [line.split() for line in (project.path / "built").read_text().splitlines()]
    assert [size for _, size in built] == ["1", "2", "4"]
    assert str(os.getpid()) not in {pid for pid, _ in built}
    label = "bench_mine[counting-inference-fp32-eager-b2-cpu]"
    metrics = project.records[label]["metrics"]
    assert abs(metrics["throughput_per_s"]["value"] * metrics["host_time_s"]["value"] - 2) < 1e-9


def test_by_its_name_from_another_folder(project):
    project.write(
        {
            "inner/pytest.ini": "[pytest]\n",
            "inner/pkg/__init__.py": "",
            "inner/pkg/mod.py": WORKLOAD,
            "inner/bench_a.py": SWEPT,
        }
    )
    project.bench("inner", "--bench-models", "pkg.mod:Counting", "--bench-batch-sizes", "8")
    passed = project.outcomes
    assert passed["passed"] >= 1
    record = project.records["bench_mine[pkg.mod:Counting-inference-fp32-eager-b8-cpu]"]
    assert record["outcome"] in ("ok", "flagged")
    assert record["case"]["workload"] == "pkg.mod:Counting"


def test_a_name_that_does_not_exist_is_said_before_anything_is_measured(project):
    project.write({"bench_a.py": SWEPT})
    result = project.bench("--bench-models", "nowhere.mod:make")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --bench-models: 'nowhere.mod:make': there is no module 'nowhere.mod'*"])
    assert project.files == []


WRONG = """
def nothing():
    pass

def raising():
    raise ValueError("no weights\\nin the cache")
"""


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("nothing", "the factory returned a NoneType: return a Workload, a ModelSpec, a pair"),
        ("raising", "the factory raised ValueError: no weights in the cache: fix it, or name another factory"),
    ],
)
def test_a_wrong_factory_is_told_with_the_remedy_and_without_this_projects_own_code(project, factory, said):
    project.write({"mine.py": WRONG, "bench_a.py": SWEPT})
    result = project.bench("--bench-models", f"mine:{factory}", "--bench-batch-sizes", "1")
    text = result.stdout.str()
    (record,) = project.records.values()
    assert said in record["reason"]
    failures = text.partition(" FAILURES ")[2].partition(" joulemark =")[0]
    assert "loader.py" not in failures
    assert len(failures.splitlines()) < 15
    assert ("in raising" in failures and "mine.py" in failures) is (factory == "raising")
