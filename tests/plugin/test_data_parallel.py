"""Ranks that train together behind the door: gloo on the CPU here, NCCL on GPUs by the same path."""

from __future__ import annotations

import gzip
import importlib.util
import json
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest

from joulemark.errors import ConfigurationError
from joulemark.plugin.options import BenchOptions
from joulemark.plugin.sweep import CPU, SweepMarker, Target, cells

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schema" / "sweep.schema.json").read_text())
BENCHES = """
import os
import pytest

@pytest.mark.bench(models=("lenet5",), phases=("train",), batch_sizes=(8,), world_sizes=(1, 2))
def bench_trains(bench, workload):
    if bench.case.world_size > 1:
        bench.require("profiler")
        bench.require("counters")
    bench.step(workload)

@pytest.mark.bench(models=("lenet5",), phases=("train",), batch_sizes=(16,), world_sizes=(2,))
def bench_dies(bench, workload):
    if os.environ["RANK"] == "1":
        os._exit(3)
    bench.step(workload)
"""

# Not importorskip: what a test is the first to import, its inner session forgets, and torch cannot be loaded twice.
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@needs_torch
def test_two_ranks_over_gloo_give_a_scaling_table(project, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    project.write({"bench_it.py": BENCHES})
    result = project.bench("--bench-collect=timing", "--bench-keep-traces", "--bench-timeout=120")
    result.stdout.fnmatch_lines(["data parallel: batches are per GPU*", "workload*ranks*scaling*exposed comm.*"])
    one, two, dead = project.records.values()
    for record in (one, two, dead):
        jsonschema.validate(record, SCHEMA)
    assert [each["case"]["world_size"] for each in (one, two)] == [1, 2]

    together, alone = two["metrics"]["throughput_per_s"], one["metrics"]["throughput_per_s"]
    efficiency = two["metrics"]["scaling_efficiency"]
    assert efficiency["value"] == pytest.approx(together["value"] / (2 * alone["value"]))
    assert efficiency["interval"][0] <= efficiency["value"] <= efficiency["interval"][1]
    steps = [two["samples"][f"rank{rank}_host_time_s"] for rank in (0, 1)]
    assert two["samples"]["host_time_s"] == [max(pair) for pair in zip(*steps, strict=True)]
    assert together["value"] == pytest.approx(2 * 8 / two["metrics"]["host_time_s"]["value"])

    assert two["metrics"]["exposed_communication_s"]["tier"] == "torch_profiler_host"
    for rank in (0, 1):
        (trace,) = project.path.rglob(f"{two['case_id']}-rank{rank}.json.gz")
        text = gzip.decompress(trace.read_bytes())
        # Exact: as floats, microseconds since the trace's origin are off by more than a nanosecond.
        told = json.loads(text, parse_float=Decimal, parse_int=Decimal)["traceEvents"]
        events = [one for one in told if one.get("ph") == "X"]
        spent, exposed = zip(*brute_force(events), strict=True)
        assert two["samples"][f"rank{rank}_communication_s"] == pytest.approx(spent, abs=1e-12)
        assert two["samples"][f"rank{rank}_exposed_communication_s"] == pytest.approx(exposed, abs=1e-12)
        assert sum(spent) > 0

    assert two["notes"]["counted_step_s"] == "the counters are read of one GPU beside one process, and this case has 2"

    assert dead["outcome"] == "failed"
    assert dead["reason"].startswith("rank 1 of 2: the measuring process ended without an answer (exit status 3)")


def brute_force(events):
    """Per marked step (communication, exposed communication) in s, by looking at every stretch between two edges."""
    talks = [one for one in events if one["name"].startswith("gloo:")]
    works = [one for one in events if one["cat"] == "cpu_op" and not one["name"].startswith("c10d::")]
    for mark in sorted(
        (one for one in events if one["name"].startswith("joulemark.iteration")), key=lambda one: one["ts"]
    ):
        begin, end = mark["ts"], mark["ts"] + mark["dur"]
        edges = {edge for one in (*talks, *works) for edge in (one["ts"], one["ts"] + one["dur"])}
        edges = sorted({begin, end} | {edge for edge in edges if begin < edge < end})
        spent = exposed = Decimal(0)
        for low, high in pairwise(edges):
            middle = (low + high) / 2
            if _covers(talks, middle):
                spent += high - low
                exposed += 0 if _covers(works, middle) else high - low
        yield float(spent) * 1e-6, float(exposed) * 1e-6


def _covers(events, moment):
    return any(one["ts"] <= moment < one["ts"] + one["dur"] for one in events)


POOL = {"h200": ["GPU-a", "GPU-b", "GPU-c"]}
H200 = Target("GPU-a", "h200", "h200", "NVIDIA H200")


def swept(target, sizes, phases=("inference", "train"), targets=None, pool=POOL):
    marker = SweepMarker(models=("lenet5",), phases=phases, batch_sizes=(8,), world_sizes=sizes)
    return cells("bench_it", marker, BenchOptions(), targets or [target], {}, pool)


def test_only_training_takes_several_ranks_and_rows_of_one_come_first():
    found = [(case.phase, case.world_size, target.uuids) for case, target in swept(H200, (2, 1))]
    assert found == [
        ("inference", 1, ("GPU-a",)),
        ("train", 1, ("GPU-a",)),
        ("train", 2, ("GPU-a", "GPU-b")),
    ]


def test_too_few_gpus_of_a_model_are_told_with_both_numbers():
    ((case, target),) = swept(H200, (4,), ("train",))
    assert case.world_size == 4
    assert target.lacks.startswith("4 GPUs of the model h200 are needed and 3 can be used here")


def test_several_gpus_of_one_model_work_together_once():
    targets = [
        Target(uuid, f"h200-{uuid[-1]}", "h200", "NVIDIA H200") for uuid in ("GPU-b", "GPU-a")
    ]  # chosen in this order
    found = [
        (case.gpu_model, case.world_size, target.uuids) for case, target in swept(None, (1, 2), ("train",), targets)
    ]
    assert found == [
        ("h200-b", 1, ("GPU-b",)),
        ("h200", 2, ("GPU-b", "GPU-a")),
        ("h200-a", 1, ("GPU-a",)),
    ]


def test_on_a_cpu_ranks_need_no_gpu():
    ((_, target),) = swept(CPU, (2,), ("train",), pool={})
    assert (target.uuids, target.world_size, target.lacks) == ((), 2, None)


def test_each_rank_measures_on_its_own_gpu():
    target = H200.spread(3, POOL)
    assert [target.of_rank(rank).uuid for rank in range(3)] == ["GPU-a", "GPU-b", "GPU-c"]
    assert CPU.spread(2, {}).of_rank(1).uuid is None


@pytest.mark.parametrize("text", ["0", "two", "1,-2"])
def test_numbers_of_ranks_that_cannot_be(project, text):
    with pytest.raises(ConfigurationError, match="--bench-world-size got"):
        BenchOptions.from_pytest_config(project.pytester.parseconfig(f"--bench-world-size={text}"))


def test_ranks_are_processes_so_one_process_is_refused(project):
    config = project.pytester.parseconfig("--bench-world-size=1,2", "--bench-inprocess")
    with pytest.raises(ConfigurationError, match="each rank is a process"):
        BenchOptions.from_pytest_config(config)
    assert BenchOptions.from_pytest_config(project.pytester.parseconfig("--bench-world-size=1:4")).world_sizes == (
        1,
        2,
        4,
    )
