"""A sweep on a local Ray cluster of two nodes with simulated GPUs, one of which is killed while it measures."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (joulemark[ray])"),
]

CASES, SEATS = 200, 2
BENCHES = f"""
import pytest, time

@pytest.mark.parametrize("n", range({CASES}))
def bench_one(bench, n):
    bench.pedantic(time.sleep, args=(0.01,), rounds=5, warmup_rounds=1, iterations=1)
"""
STORE_BYTES = 80 * 2**20


def gpus(folder, node, name):
    """A scenario of simulated GPUs, whose UUIDs name their node."""
    path = folder / f"{node}.json"
    entries = [
        {"name": name, "uuid": f"GPU-{node}{n:07d}-0000", "pci": f"00000000:{n:02X}:00.0", "power_mw": 300000}
        for n in range(SEATS)
    ]
    path.write_text(json.dumps({"driver": "580.1", "gpus": entries}))
    return {"JOULEMARK_FAKE_GPUS": str(path)}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A head with two simulated GPUs, and what adds a second node; what ray warns of is not ours."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with warnings.catch_warnings(action="ignore"):
        from ray.cluster_utils import Cluster

        common = {"num_gpus": SEATS, "num_cpus": 2, "object_store_memory": STORE_BYTES}
        head = {**common, "include_dashboard": False, "env_vars": gpus(tmp_path, "aaa", "NVIDIA H100 Fake")}
        one = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield one, lambda name: one.add_node(**common, env_vars=gpus(tmp_path, "bbb", name))
        finally:
            one.shutdown()


def start(folder, address, *args):
    """``pytest --bench`` on the cluster, in a process of its own."""
    (folder / "bench_many.py").write_text(BENCHES)
    command = [sys.executable, "-m", "pytest", "--bench", "--bench-cluster=ray", "--bench-collect=timing", *args]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
        "RAY_ADDRESS": address,
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [*command, "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--bench-results", str(folder / "results")],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def lines(folder: Path) -> list[dict]:
    files = list(folder.rglob("sweep-*.jsonl"))
    assert len(files) <= 1
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]


def records(folder):
    return [one for one in lines(folder) if one["kind"] == "record"]


def test_a_node_that_is_killed_midway_costs_no_record_and_doubles_none(cluster, tmp_path):
    nodes, add_node = cluster
    second = add_node("NVIDIA H100 Fake")
    project = tmp_path / "project"
    project.mkdir()
    sweep = start(project, nodes.address)
    try:
        deadline = time.monotonic() + 90
        while sum(one["gpu_uuid"].startswith("GPU-bbb") for one in records(project)) < 20:
            assert sweep.poll() is None, sweep.communicate()[0]
            assert time.monotonic() < deadline, "the second node measures nothing"
            time.sleep(0.1)
        nodes.remove_node(second, allow_graceful=False)
        output, _ = sweep.communicate(timeout=120)
    finally:
        sweep.kill()
    assert sweep.returncode == 0, output
    found = records(project)
    assert len(found) == CASES
    assert set(Counter(one["case_id"] for one in found).values()) == {1}
    assert sorted(one["case"]["params"]["n"] for one in found) == list(range(CASES))
    assert {one["outcome"] for one in found} <= {"ok", "flagged"}
    assert {one["gpu_uuid"][:7] for one in found} == {"GPU-aaa", "GPU-bbb"}
    told = lines(project)
    known = {one["environment_id"] for one in told if one["kind"] == "environment"}
    assert {one["environment_id"] for one in found} <= known
    assert (told[-1]["kind"], told[-1]["completed"]) == ("end", True)
    lost = [one for one in found if any(finding["code"] == "node_lost" for finding in one["findings"])]
    assert 1 <= len(lost) <= SEATS
    assert all(one["gpu_uuid"].startswith("GPU-aaa") for one in lost)
