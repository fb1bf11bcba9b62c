"""A suite must survive whatever is switched off, and pay nothing for what it does not use."""

from __future__ import annotations

import os

import pytest

BENCH = "def bench_sum(bench):\n    bench(sum, [1, 2])\n"

LIGHT = """
import sys

def pytest_unconfigure():
    heavy = [name for name in ("torch", "numpy", "scipy", "pynvml", "joulemark.records") if name in sys.modules]
    assert heavy == [], heavy
"""


def test_a_plain_pytest_skips_benchmarks_and_imports_nothing_heavy(project):
    project.copy("plain_and_bench")
    project.write({"light.py": LIGHT})
    result = project.pytest("-p", "light", "-rs", "--strict-markers")
    assert project.outcomes == {"passed": 1, "skipped": 2}
    result.stdout.fnmatch_lines(["SKIPPED*needs --bench"])
    assert project.files == []
    assert project.pytest("-p", "light", "--version").ret == 0


IMPORTED = """
import sys
from pathlib import Path

def pytest_unconfigure(config):
    who = "child" if config.getoption("joulemark_worker") else "parent"
    Path(who).write_text(" ".join(sys.modules))
"""


def test_a_sweep_imports_what_it_uses(project):
    """No scipy without a baseline; a measuring process analyses no trace."""
    project.write({"bench_a.py": BENCH, "conftest.py": IMPORTED})
    assert project.pytest("--bench", "--bench-gpus=cpu", "--bench-quick").ret == 0
    parent, child = ((project.path / who).read_text().split() for who in ("parent", "child"))
    assert "joulemark.measure.runner" in child
    assert "joulemark.report.output" in parent
    assert "scipy" not in parent + child
    assert "joulemark.trace" not in child


def test_the_marker_is_registered(project):
    result = project.pytester.runpytest_inprocess("--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.bench(models, phases, batch_sizes*"])


@pytest.mark.parametrize("strict", [(), ("--strict-markers",)])
def test_without_pytest_benchmark_plain_tests_pass_and_one_line_says_what_is_missing(project, strict):
    project.copy("plain_and_bench")
    result = project._last = project.pytester.runpytest_inprocess("-p", "no:benchmark", *strict)
    assert project.outcomes == {"passed": 1, "skipped": 2}
    result = project.bench("-p", "no:benchmark", *strict)
    assert project.outcomes == {"skipped": 2, "deselected": 1}
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["*joulemark needs pytest-benchmark*leave out -p no:benchmark"])
    for text in ("INTERNALERROR", "Traceback"):
        assert text not in result.stdout.str() + result.stderr.str()
    assert project.files == []


def test_without_the_plugin_plain_tests_pass(project):
    project.copy("plain_and_bench")
    result = project._last = project.pytester.runpytest_inprocess("-p", "no:joulemark", "--strict-markers")
    assert project.outcomes == {"passed": 1, "errors": 2}
    result.stdout.fnmatch_lines(["*fixture 'bench' not found"])
    assert project.pytester.runpytest_inprocess("-p", "no:joulemark", "test_plain.py").ret == 0


def test_workers_side_by_side_are_refused(project, monkeypatch):
    log = project.path / "calls.log"
    monkeypatch.setenv("CALLS", str(log))
    project.copy("parallel")
    result = project.pytest("--bench", "--bench-gpus=cpu", "--bench-quick", "-n", "2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --bench got -n 2 and has no GPU, only a CPU: *time each other: drop -n (or give -n 0)*"]
    )
    assert not log.exists()
    assert project.files == []
    project.bench("-n", "0")
    assert project.outcomes == {"passed": 4}
    rounds = [len(one["samples"]["host_time_s"]) for one in project.records.values()]
    assert rounds == [10] * 4
    calls = [line.split() for line in log.read_text().splitlines()]
    assert {worker for worker, *_ in calls} == {"main"}
    per_case = [sum(index == str(case) for _, index, _ in calls) for case in range(4)]
    assert min(per_case) > 10  # ten rounds each, after a warm-up of the harness's own


def test_a_file_that_cannot_be_imported(project):
    project.copy("one_file_broken")
    result = project.bench()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*ERROR collecting test_needs_missing_module.py*"])
    assert project.files == []
    result = project.bench("--continue-on-collection-errors")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert project.outcomes == {"passed": 1, "errors": 1}
    result.stdout.fnmatch_lines(
        ["*ERROR collecting test_needs_missing_module.py*", "*ERROR test_needs_missing_module.py*"]
    )
    assert project.records["test_infer"]["metrics"]["host_time_s"]["value"] > 0
    assert project.end["completed"] is False
    assert project.end["reason"] == "not all files could be collected"


def test_in_one_process(project):
    project.write(
        {
            "bench_a.py": """
import os
import pathlib

def bench_here(bench):
    pathlib.Path("pid").write_text(str(bench(os.getpid)))

def bench_wrong(bench):
    raise ValueError("of its own")

def bench_big(bench):
    raise MemoryError
"""
        }
    )
    result = project.bench("--bench-inprocess")
    assert project.outcomes == {"passed": 1, "failed": 2}
    assert (project.path / "pid").read_text() == str(os.getpid())
    assert project.records["bench_here"]["metrics"]["host_time_s"]["value"] > 0
    assert project.records["bench_wrong"]["reason"] == "ValueError: of its own"
    assert project.records["bench_big"]["outcome"] == "oom"
    assert project.end["completed"] is True
    result.stdout.fnmatch_lines(["*in this process: no timeout, no recovery*"])


@pytest.mark.parametrize("plugin", ["terminal", "junitxml"])
def test_without_a_plugin_whose_options_the_child_would_be_given(project, plugin):
    project.write({"bench_a.py": "def bench_sum(bench):\n    bench(sum, [1, 2])\n"})
    assert project.pytest("--bench", "--bench-gpus=cpu", "--bench-quick", "-p", f"no:{plugin}").ret == 0
    assert project.records["bench_sum"]["outcome"] in ("ok", "flagged")
