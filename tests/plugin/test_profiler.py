"""The profiler pass behind the door: in a process of its own, after the others, and only where it was asked for."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import jsonschema
import pytest

from joulemark.errors import ConfigurationError
from joulemark.metrics import PROFILER
from joulemark.plugin.options import BenchOptions

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schema" / "sweep.schema.json").read_text())
BENCHES = """
import os
from pathlib import Path

def bench_one(bench):
    with Path("pids").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    bench(sum, range(1000))
"""
SEVERAL = """
import os
import sys
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", [1, 2, 3])
def bench_many(bench, number):
    passes = "profiler" if any(one.startswith("profiler:") for one in sys.argv) else "timing"
    with Path("pids").open("a") as file:
        file.write(f"{passes} {os.getpid()}\\n")
    bench(sum, range(1000))
"""
ASKS = """
def bench_asks(bench):
    bench.require("profiler")
    bench(sum, range(1000))

def bench_does_not(bench):
    bench(sum, range(1000))
"""
DIES = """
import os, sys

def bench_dies(bench):
    if any(one.startswith("profiler:") for one in sys.argv):
        os._exit(7)
    bench(sum, range(1000))
"""

# Not importorskip: what a test is the first to import, its inner session forgets, and torch cannot be loaded twice.
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def test_it_is_off_by_default(project):
    project.write({"bench_it.py": BENCHES})
    project.bench()
    assert not set(PROFILER) & set(project.records["bench_one"]["metrics"])
    assert len((project.path / "pids").read_text().split()) == 1


@needs_torch
def test_it_has_a_process_of_its_own_and_keeps_its_trace_where_asked(project):
    project.write({"bench_it.py": BENCHES})
    project.bench("--bench-collect=timing,profiler", "--bench-keep-traces")
    record = project.records["bench_one"]
    jsonschema.validate(record, SCHEMA)
    assert record["outcome"] in ("ok", "flagged")
    assert record["metrics"]["host_time_s"]["value"] > 0
    assert record["metrics"]["profiler_distortion"]["value"] > -1
    for name in set(PROFILER) - {"profiler_distortion"}:
        assert record["metrics"][name]["value"] is None
    assert record["notes"]["kernels_per_step"] == "no GPU events"
    assert "power was not asked for" in record["notes"]["power_w"]
    first, second = (project.path / "pids").read_text().split()
    assert first != second
    (file,) = project.files
    assert [one.name for one in (file.parent / f"{file.stem}-traces").iterdir()] == [f"{record['case_id']}.json.gz"]


@needs_torch
def test_one_process_times_all_cases_and_another_profiles_them(project):
    project.write({"bench_it.py": SEVERAL})
    project.bench("--bench-collect=timing,profiler")
    assert all(one["metrics"]["profiler_distortion"]["value"] > -1 for one in project.records.values())
    lines = (project.path / "pids").read_text().splitlines()
    assert [one.split()[0] for one in lines] == ["timing", "profiler"] * 3
    assert len(set(lines)) == 2


@needs_torch
def test_a_benchmark_may_ask_for_it(project):
    project.write({"bench_it.py": ASKS})
    project.bench("--bench-collect=timing")
    assert "profiler_distortion" in project.records["bench_asks"]["metrics"]
    assert "profiler_distortion" not in project.records["bench_does_not"]["metrics"]
    assert not list(project.path.rglob("*.json.gz"))


def test_its_death_costs_its_own_figures_alone(project):
    project.write({"bench_it.py": DIES})
    project.bench("--bench-collect=timing,profiler")
    record = project.records["bench_dies"]
    assert record["outcome"] in ("ok", "flagged")
    assert record["metrics"]["host_time_s"]["value"] > 0
    assert "exit status 7" in record["notes"]["exposed_overhead_s"]


def test_in_one_process_it_says_what_it_needs(project):
    project.write({"bench_it.py": BENCHES})
    project.bench("--bench-collect=timing,profiler", "--bench-inprocess")
    assert "--bench-inprocess" in project.records["bench_one"]["notes"]["hidden_ratio"]


def test_traces_name_the_host_so_they_are_not_anonymous(project):
    config = project.pytester.parseconfig("--bench-keep-traces", "--bench-anonymize")
    with pytest.raises(ConfigurationError, match="host's name"):
        BenchOptions.from_pytest_config(config)
