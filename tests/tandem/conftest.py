from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from joulemark.measure.assemble import assemble
from joulemark.metrics import find
from joulemark.records import Case, Environment, Measurement, Record, Run, Value
from joulemark.stats import summarize

FACTS = {"gpus": [{"name": "NVIDIA H200"}], "driver": "580.1", "torch": "2.11.0"}
ENVIRONMENT = Environment(FACTS)


def figure(samples: list[float], name: str, tier: str) -> Value:
    found = summarize(samples)
    return Value(found.median, find(name).unit, found.interval, found.confidence, found.n, tier)


def measured(
    case: Case,
    *,
    busy: float,
    issue: float,
    operators: int = 50,
    gap: float = 0.0,
    seed: int = 0,
    slowness: float | None = None,
) -> Record:
    """A record as the passes make it: the step lasts as long as the longer of both, and ``gap`` on top.

    With a ``slowness`` of its host, whose reference work takes 0.2 ms otherwise, the steps are issued slower by it.
    """
    issue *= slowness or 1.0
    rng = np.random.default_rng(seed + (case.batch_size or 0))

    def around(value: float, n: int) -> list[float]:
        return [float(one) for one in value * (1 + 0.002 * rng.standard_normal(n))]

    step, slowed = max(busy, issue) + gap, 1.4 * issue
    profiled = {
        "gpu_busy_s": around(busy, 10),
        "exposed_overhead_s": around(max(slowed - busy, 0) + gap, 10),
        "host_issue_s": around(slowed, 10),
        "host_issue_per_operator_s": around(slowed / operators, 10),
        "operators_per_step": [float(operators)] * 10,
        "kernels_per_step": [60.0] * 10,
        "launches_per_step": [60.0] * 10,
        "idle_framework_s": around(max(slowed - busy, 0) + gap, 10),
    }
    timed = {"device_time_s": around(step, 60)}
    lone = {"host_issue_unprofiled_s": around(issue, 40), "host_time_s": around(step, 40)}
    if slowness is not None:
        lone["host_reference_s"] = around(2e-4 * slowness, 40)
    peak = Value(1e8 + 1e6 * (case.batch_size or 1), "B", n=1, tier="torch_allocator")
    measurements = [
        Measurement(
            "latency", {name: figure(one, name, "host_clock") for name, one in lone.items()}
            | {"peak_memory_bytes": peak}, lone,
        ),
        Measurement("steady", {"device_time_s": figure(timed["device_time_s"], "device_time_s", "cuda_events")}, timed),
        Measurement(
            "profiler",
            {name: figure(one, name, "torch_profiler") for name, one in profiled.items() if not name.startswith("idle")}
            | {"profiler_distortion": Value(0.4, "1", n=1)},
            {**profiled, "plain_step_s": [1.1 * step] * 3},
            {"hidden_ratio": "nothing was launched in it"},
        ),
    ]  # fmt: skip
    return assemble(
        case, measurements, run_id="r" * 32, environment_id=ENVIRONMENT.environment_id, outcome="ok",
        nodeid=f"bench_tandem.py::{case.label}",
    )  # fmt: skip


@pytest.fixture
def record() -> Callable[..., Record]:
    return measured


@pytest.fixture
def sweep() -> Run:
    """ResNet-50 whose host needs 4 ms per step eagerly and 20 µs as a graph; 0.4 ms and 90 µs per image on the GPU.

    The truth: 40 images; with the profiler's 5.6 ms 57.8. As a graph batch 1 is past it. Memory: 101 MB, 140 MB.
    """
    records = []
    for mode, issue, gap in (("eager", 4e-3, 50e-6), ("graph", 20e-6, 30e-6)):
        for batch in (1, 4, 8, 16, 32, 64, 128, 256):
            case = Case("resnet50", "inference", mode, "bf16", batch, "channels_last", "device", "nvidia-h200")
            case = replace(case, benchmark="bench_tandem")
            records.append(measured(case, busy=4e-4 + 9e-5 * batch, issue=issue, gap=gap))
    return run_of(records)


def run_of(records: list[Record]) -> Run:
    environments = {ENVIRONMENT.environment_id: ENVIRONMENT}
    return Run("somewhere/sweep-1.jsonl", "r" * 32, environments, tuple(records), True, started_utc=1.7e9)
