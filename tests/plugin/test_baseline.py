"""``--bench-baseline``: a case that got worse fails, with its figures."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from joulemark.plugin.baseline import Baseline, open_baseline
from joulemark.records import Case, Environment, Record, Run, Value
from joulemark.report.foreign import read_result

RUNS = Path(__file__).parents[1] / "data" / "runs"
SLEEPS = """
import time

def bench_slow(bench):
    bench.pedantic(time.sleep, args=({slow},), rounds=12)

def bench_steady(bench):
    bench.pedantic(time.sleep, args=(0.005,), rounds=12)
"""
TIMING = "--bench-collect=timing"


def sleeps(project, slow):
    project.write({"bench_sleep.py": SLEEPS.format(slow=slow)})


def assert_slower(text):
    """It says that sleeps of 5 ms became some of 40; a busy machine wakes up late."""
    old, new = map(float, re.search(r"host time (\S+) ms -> (\S+) ms", text).groups())
    assert 5 <= old < 20
    assert 40 <= new < 160


@pytest.fixture
def stored(project):
    """A project whose results folder holds one run."""
    sleeps(project, 0.005)
    assert project.bench(TIMING).ret == 0
    (file,) = project.files
    return file


def test_a_case_that_got_worse_fails_with_its_figures(project, stored):
    sleeps(project, 0.04)
    result = project.bench(TIMING, f"--bench-baseline={stored.relative_to(project.path)}", "--junitxml=junit.xml")
    assert result.ret == 1
    assert project.outcomes == {"passed": 1, "failed": 1}
    result.stdout.fnmatch_lines(
        [
            "*joulemark: baseline: *sweep-*.jsonl",
            "*regressed against *sweep-*.jsonl",
            "*host time * ms -> * ms (*x, 95 % interval *..*, spread assumed)",
            "*compared 2 cases*",
        ]
    )
    properties = {
        case.get("name"): {one.get("name"): one.get("value") for one in case.iter("property")}
        for case in ElementTree.parse(project.path / "junit.xml").iter("testcase")
    }
    assert_slower(result.stdout.str())
    assert_slower(properties["bench_slow"]["regressed"])
    assert "regressed" not in properties["bench_steady"]


def test_a_case_that_got_better_passes(project, stored):
    sleeps(project, 0.0005)
    result = project.bench(TIMING, "--bench-baseline=latest")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*host time*improved*"])


def test_processes_on_both_sides_measure_the_spread(project):
    sleeps(project, 0.005)
    three = (TIMING, "--bench-processes=3")
    assert project.bench(*three).ret == 0
    sleeps(project, 0.006)
    result = project.bench(*three, "--bench-baseline=latest")
    result.stdout.fnmatch_lines(["*spread measured between processes*", "*compared 2 cases*"])


def test_latest_without_any_run_says_so_and_measures(project):
    sleeps(project, 0.002)
    result = project.bench(TIMING, "--bench-baseline=latest")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*no baseline: there is no folder*"])
    project.write({"bench_other.py": "def bench_other(bench): bench(sum, [1])"})
    result = project.bench(TIMING, "--bench-baseline=latest", "bench_other.py")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*no baseline: no run under * holds a case of this one"])


def test_a_baseline_that_cannot_be_read_is_refused_before_anything_runs(project):
    sleeps(project, 0.002)
    project.write({"old.json": "[]"})
    for name, says in (("old.json", "*holds a JSON list*"), ("gone.json", "*cannot read *gone.json*")):
        result = project.bench(TIMING, f"--bench-baseline={name}")
        assert result.ret == 4
        (result.stderr if "baseline" in result.stderr.str() else result.stdout).fnmatch_lines([says])
        assert "nothing was measured" not in result.stdout.str()
    assert project.files == []


def test_what_pytest_benchmark_stored_is_a_baseline_too(project, stored):
    assert project.bench(TIMING, "--benchmark-json=old.json").ret == 0
    sleeps(project, 0.04)
    result = project.bench(TIMING, "--bench-baseline=old.json")
    assert result.ret == 1
    assert_slower(result.stdout.str())


def test_its_own_functions_are_found_by_their_node_ids(project):
    sleeps(project, 0.005)
    assert project.bench(TIMING, "--benchmark-json=old.json").ret == 0
    old = json.loads((project.path / "old.json").read_text())
    for benchmark in old["benchmarks"]:
        benchmark["extra_info"] = {}
    old["machine_info"]["gpus"] = [{"name": "cpu"}]
    (project.path / "old.json").write_text(json.dumps(old))
    sleeps(project, 0.04)
    result = project.bench(TIMING, "--bench-baseline=old.json")
    assert result.ret == 1
    assert project.outcomes == {"passed": 1, "failed": 1}


def test_memory_that_no_longer_suffices_is_worse(project):
    text = "def bench_memory(bench):\n    def run():\n        {body}\n    bench(run)\n"
    project.write({"bench_memory.py": text.format(body="pass")})
    assert project.bench(TIMING).ret == 0
    project.write({"bench_memory.py": text.format(body="raise MemoryError")})
    result = project.bench(TIMING, "--bench-baseline=latest")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["* -> oom (now OOM)*", "REGRESSED *bench_memory*"])


def test_in_one_process_the_session_fails(project):
    sleeps(project, 0.005)
    assert project.bench(TIMING, "--bench-inprocess").ret == 0
    sleeps(project, 0.04)
    result = project.bench(TIMING, "--bench-baseline=latest", "--bench-inprocess")
    assert result.ret == 1
    assert project.outcomes == {"passed": 2}
    result.stdout.fnmatch_lines(["*host time*REGRESSED*"])


def test_a_baseline_that_judges_nothing_is_said_to(project, stored):
    project.write({"bench_sleep.py": "def bench_other(bench):\n    bench(sum, range(9))\n"})
    result = project.bench(TIMING, f"--bench-baseline={stored.relative_to(project.path)}")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["joulemark: --bench-baseline has judged nothing: nothing in common"])


def test_the_newest_usable_run_is_the_latest_and_damaged_ones_are_named(tmp_path):
    shutil.copytree(RUNS / "store", tmp_path / "store")
    (tmp_path / "store" / "0007_new.json.tmp").write_text("{")
    before = {path: path.read_bytes() for path in (tmp_path / "store").iterdir()}
    case = read_result(RUNS / "store" / "0004_good_20260904_100500.json").records[0].case
    baseline, lines = open_baseline("latest", tmp_path, tmp_path / "store", {"x": case}, None)
    assert Path(baseline.run.path).name.startswith("0004_good")
    named = [number for number in ("0001", "0002", "0003", "0004", "0005", "0006", "0007") if number in " ".join(lines)]
    assert (named, len(lines)) == (["0002", "0003", "0005", "0006"], 4)
    assert {path: path.read_bytes() for path in (tmp_path / "store").iterdir()} == before
    nothing, lines = open_baseline("latest", tmp_path, tmp_path / "store", {"x": Case("other")}, None)
    assert nothing is None
    assert lines[-1].startswith("no baseline: no run under")


@pytest.mark.parametrize(("simulated", "worse"), [(True, 1), (False, 0), (None, 1)])
def test_a_case_is_held_against_one_of_a_simulated_gpu_only_on_such_a_gpu(simulated, worse):
    place = Environment({"simulated": True})
    figures = [{"host_time_s": Value(time, "s", (0.99 * time, 1.01 * time), n=9)} for time in (1.0, 2.0)]
    old, new = (Record(Case("w"), "a" * 32, "ok", place.environment_id, metrics=one) for one in figures)
    baseline = Baseline(Run("b", "a" * 32, {place.environment_id: place}, (old,), True), simulated=simulated)
    assert len(baseline.judge(replace(new, environment_id="of this session"))) == worse
