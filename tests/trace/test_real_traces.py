"""Real traces against a plain brute force over their JSON, in decimal arithmetic."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data" / "trace"
TRACES = sorted(path.relative_to(DATA).as_posix() for path in DATA.rglob("*.json.gz") if path.name != "cut.json.gz")
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "hipLaunchKernel", "hipExtModuleLaunchKernel"}

Event = dict[str, Any]


def number(text: str) -> Decimal:
    """A number of the file as the float64 that its writer printed, to the nanosecond."""
    return round(Decimal(float(text)), 3)


def load(name: str) -> list[Event]:
    text = gzip.decompress((DATA / name).read_bytes()).decode("utf-8", "replace")
    events = json.loads(text, strict=False, parse_float=number)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def union(intervals: list[tuple[Decimal, Decimal]]) -> Decimal:
    total, reach = Decimal(0), None
    for start, end in sorted(intervals):
        if reach is None or start > reach:
            total, reach = total + end - start, end
        elif end > reach:
            total, reach = total + end - reach, end
    return total


def intervals(events: list[Event]) -> list[tuple[Decimal, Decimal]]:
    return [(Decimal(e["ts"]), Decimal(e["ts"]) + Decimal(e["dur"])) for e in events]


def owner(kernel: Event, calls: dict[int, Event], operators: dict[tuple[Any, Any], list[Event]]) -> str:
    call = calls.get(kernel["args"]["correlation"])
    if call is None:
        return "unattributed"
    around = [
        op
        for op in operators[call["pid"], call["tid"]]
        if op["ts"] <= call["ts"] and call["ts"] < Decimal(op["ts"]) + Decimal(op["dur"])
    ]
    return str(max(around, key=lambda op: (op["ts"], -op["dur"]))["name"]) if around else "outside any operator"


@pytest.mark.parametrize("name", TRACES)
def test_times_and_counts(known: Callable[[str], Event], name: str) -> None:
    entry, events = known(name), load(name)
    device = [e for e in events if e.get("cat") in DEVICE]
    kernels = [e for e in device if e["cat"] == "kernel"]
    assert entry["kernels"] == len(kernels)
    assert entry["copies"] == sum(e["cat"] == "gpu_memcpy" for e in device)
    assert entry["sets"] == sum(e["cat"] == "gpu_memset" for e in device)
    assert entry["invalid_events"] == 0
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and e["name"] in LAUNCHES]
    assert entry["launches"] == (len(calls) if any(e.get("cat") == "cuda_runtime" for e in events) else None)
    if not device:
        assert entry["busy_s"] is None
        return
    assert len({e["args"]["device"] for e in device}) == 1
    spans = intervals(device)
    span = max(end for _, end in spans) - min(start for start, _ in spans)
    close = {"rel": 1e-9, "abs": 1e-12}
    assert entry["kernel_time_s"] == pytest.approx(float(sum(Decimal(e["dur"]) for e in kernels)) * 1e-6, **close)
    assert entry["kernel_busy_s"] == pytest.approx(float(union(intervals(kernels))) * 1e-6, **close)
    assert entry["busy_s"] == pytest.approx(float(union(spans)) * 1e-6, **close)
    assert entry["span_s"] == pytest.approx(float(span) * 1e-6, **close)
    assert entry["gpu_busy_fraction"] == pytest.approx(float(union(spans) / span), rel=1e-9)
    assert sum(entry["idle_s"].values()) == pytest.approx(entry["span_s"] - entry["busy_s"], abs=1e-12)
    for iteration in entry["iterations"]:
        assert iteration["exposed_overhead_s"] == pytest.approx(iteration["wall_s"] - iteration["busy_s"], abs=1e-12)
        assert sum(iteration["idle_s"].values()) == pytest.approx(iteration["exposed_overhead_s"], abs=1e-12)


@pytest.mark.parametrize("name", [name for name in TRACES if "ns_resolution" not in name])
def test_time_by_operator(known: Callable[[str], Event], name: str) -> None:
    entry, events = known(name), load(name)
    calls = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    operators: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            operators[event["pid"], event["tid"]].append(event)
    expected: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in DEVICE:
            expected[owner(event, calls, operators)] += event["dur"]
    found = {row["name"]: row["device_time_s"] for row in entry["operators"]}
    assert found == {name: pytest.approx(float(time) * 1e-6) for name, time in expected.items()}


@pytest.mark.parametrize("name", TRACES)
def test_only_the_counter_profilers_trace_is_incomplete(known: Callable[[str], Event], name: str) -> None:
    entry = known(name)
    assert entry["complete"] is ("cupti_profiler" not in name)
    if not entry["complete"]:
        assert "77 of 77 kernel launch calls without a kernel" in entry["notes"]["launches_without_kernels"]


def test_three_forward_passes_without_marks(known: Callable[[str], Event]) -> None:
    entry = known("torch_profiler_resnet18_b8_h200.json.gz")
    assert entry["iteration_source"] == "period"
    assert [row["kernels"] for row in entry["iterations"]] == [119, 119, 119]
    assert [row["launches"] for row in entry["iterations"]] == [119, 119, 119]
    assert entry["iterations"][0]["idle_s"]["profiler"] == pytest.approx(
        2.487927e-3
    )  # a buffer request of the profiler


def test_windows_follow_the_device_where_the_host_runs_ahead(known: Callable[[str], Event]) -> None:
    iterations = known("hta/ns_resolution_trace.json.gz")["iterations"]
    assert [row["name"] for row in iterations] == [f"ProfilerStep#{step}" for step in range(101, 106)]
    assert iterations[0]["mark_s"] < 0.04  # the host has issued this step in a third of the time that it takes
    for row in iterations[1:]:
        assert row["wall_s"] == pytest.approx(0.0956, rel=0.01)
        assert row["busy_s"] / row["wall_s"] > 0.98
        assert row["host_issue_s"] == pytest.approx(0.0314, rel=0.03)  # a full queue holds launches up: no issue time
