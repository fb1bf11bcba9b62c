"""pytest-benchmark's own files, comparison and markers see exactly the samples that a record holds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ON_CPU = ("--bench", "--bench-gpus=cpu", "--bench-quick")
BENCH = """
import time
import pytest

@pytest.mark.benchmark(group="sleepers", min_rounds=3)
@pytest.mark.parametrize("ms", [1, 2])
def bench_sleep(bench, ms):
    bench.pedantic(time.sleep, (ms / 1000,), rounds=7)

def bench_free(bench):
    bench(sum, [1, 2])

def bench_fails(bench):
    raise ValueError
"""


def test_the_json_holds_the_records_samples_and_can_be_compared(project):
    project.write({"bench_a.py": BENCH})
    # In a process of its own: pytest-benchmark leaves the file open.
    result = project.pytest(*ON_CPU, "--benchmark-json=out.json", "--benchmark-only", "-k", "not fails")
    assert project.outcomes == {"passed": 3, "deselected": 1}
    result.stdout.no_fnmatch_line("*Rounds*")  # our table holds the same figures
    stored = json.loads((project.path / "out.json").read_text())
    assert stored["machine_info"]["joulemark"]["gpus"] == []
    assert len(stored["benchmarks"]) == 3
    for one in stored["benchmarks"]:
        record = project.records[one["name"]]
        assert one["stats"]["data"] == pytest.approx(record["samples"]["host_time_s"], rel=1e-9)
        assert one["stats"]["rounds"] == len(record["samples"]["host_time_s"])
        assert one["stats"]["median"] == pytest.approx(record["metrics"]["host_time_s"]["value"])
        assert one["extra_info"]["joulemark_case_id"] == record["case_id"]
        assert one["group"] == ("sleepers" if "sleep" in one["name"] else None)
    assert len(project.records["bench_sleep[1]"]["samples"]["host_time_s"]) == 7
    compared = subprocess.run(
        [sys.executable, "-m", "pytest_benchmark", "compare", "out.json", "--columns=median,rounds"],
        cwd=project.path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "bench_sleep[1]" in compared.stdout + compared.stderr


def test_saving_and_comparing_in_the_session(project):
    project.write({"bench_a.py": BENCH})
    project.bench("--benchmark-autosave", "-k", "sleep")
    assert len(list((project.path / ".benchmarks").rglob("*.json"))) == 1
    result = project.bench("--benchmark-compare", "--benchmark-compare-fail=median:0.5", "-k", "sleep")
    assert result.ret == 0
    assert project.outcomes["passed"] == 2
    result.stdout.fnmatch_lines(["*benchmark 'sleepers'*"])
    assert len(list((project.path / ".benchmarks").rglob("*.json"))) == 1


def test_disabled_our_own_samples_stand(project):
    project.write({"bench_a.py": BENCH, "pytest.ini": "[pytest]\naddopts = --benchmark-disable\n"})
    result = project.bench("-k", "sleep or fails")
    assert result.ret == 1
    assert len(project.records["bench_sleep[2]"]["samples"]["host_time_s"]) == 7
    assert project.records["bench_sleep[2]"]["metrics"]["host_time_s"]["value"] >= 0.002
    assert project.records["bench_fails"]["outcome"] == "failed"
