"""Causes of idle time, owners of device work and iterations, on timelines drawn by hand (µs)."""

from __future__ import annotations

from typing import Any

import pytest


def us(value: float) -> Any:
    return pytest.approx(value * 1e-6, rel=1e-9, abs=1e-15)


def nonzero(idle: dict[str, float]) -> dict[str, float]:
    return {cause: value for cause, value in idle.items() if value}


LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def test_pageable_input_and_a_slow_loader(writer: Any) -> None:
    """Three steps: a stall of 3000 µs in the loader, then a copy call that stages for 400 µs before it moves data."""
    for step in range(3):
        at = 1000 + 5000 * step
        writer.mark(f"ProfilerStep#{step}", at, 5000)
        writer.mark(LOADER, at + 100, 3000)
        writer.operator("aten::copy_", at + 3200, 700)
        writer.call("cudaMemcpyAsync", at + 3210, 680, 10 * step + 1)
        writer.copy(at + 3610, 270, 10 * step + 1)  # the call began 400 µs before and returns 10 µs after
        writer.operator("aten::mm", at + 3950, 50)
        writer.launched(at + 3970, at + 3990, 900, 10 * step + 2, call=10)
        writer.call("cudaDeviceSynchronize", at + 4010, 900, 10 * step + 3)
    entry = writer.entry()
    for row in entry["iterations"]:
        idle = nonzero(row["idle_s"])
        assert idle["input"] == us(3000)
        assert idle["copy"] == us(400 + 10)
        assert row["busy_s"] == us(270 + 900)
        assert row["copy_only_s"] == us(270)
        assert row["exposed_overhead_s"] == us(5000 - 1170)
        assert sum(idle.values()) == us(5000 - 1170)
        assert row["host_issue_s"] == us(3980)
        assert row["hidden_ratio"] == pytest.approx(1 - 3830 / 3980)
    longest = entry["idle_gaps"][0]
    assert longest["annotations"] == ["ProfilerStep#0", "ProfilerStep#1", LOADER]
    assert nonzero(longest["idle_s"])["input"] == us(3000)
    assert entry["idle_s"]["input"] == us(2 * 3000)  # the first stall comes before the span's first device event


def test_every_part_of_one_gap(writer: Any) -> None:
    writer.launched(0, 10, 90, 1)  # busy from 10 to 100
    writer.call("cudaStreamSynchronize", 20, 85, 2)  # waits until 100, returns at 105
    writer.operator("aten::add", 120, 60)
    writer.call("cudaMalloc", 130, 10, 3)
    writer.launched(150, 170, 30, 4, call=8)
    entry = writer.entry()
    assert nonzero(entry["idle_s"]) == {
        "synchronize": us(5),  # 100-105
        "outside_operators": us(15),  # 105-120
        "framework": us(10 + 10),  # 120-130, 140-150
        "runtime_call": us(10),  # 130-140
        "launch_call": us(8),  # 150-158
        "queued": us(12),  # 158-170
    }
    gap = entry["idle_gaps"][0]
    assert (gap["duration_s"], gap["start_s"]) == (us(70), us(90))
    assert gap["host"][0] == {"name": "aten::add", "time_s": us(10 + 10 + 12)}  # beside its calls


def test_the_thread_that_launches_next_names_the_cause(writer: Any) -> None:
    writer.launched(0, 10, 10, 1)
    writer.operator("aten::add", 20, 80, tid=1)  # busy all the time, but it launches nothing
    writer.call("cudaEventSynchronize", 20, 30, 2, tid=2)
    writer.operator("MulBackward0", 60, 40, tid=2)
    writer.call("cudaLaunchKernel", 90, 5, 3, tid=2)
    writer.kernel(95, 5, 3)
    entry = writer.entry()
    assert nonzero(entry["idle_s"]) == {
        "synchronize": us(30),
        "framework": us(10 + 30),  # thread 2 was outside everything for 10 µs: the other thread's state counts
        "launch_call": us(5),
    }
    assert {row["name"] for row in entry["operators"]} == {"outside any operator", "MulBackward0"}


def test_operators_nest_and_the_innermost_owns(writer: Any) -> None:
    writer.operator("aten::linear", 0, 100)
    writer.operator("aten::addmm", 10, 80)
    writer.mark("my annotation", 15, 50)  # no operator
    writer.launched(20, 30, 5, 1)
    writer.operator("aten::relu", 110, 20)
    writer.launched(115, 140, 5, 2)
    entry = writer.entry()
    assert {row["name"]: row["kernels"] for row in entry["operators"]} == {"aten::addmm": 1, "aten::relu": 1}


def test_operator_by_external_id_where_threads_do_not_match(writer: Any) -> None:
    writer.operator("aten::mm", 0, 100, tid=1, **{"External id": 5})
    writer.complete("cuda_runtime", "cudaLaunchKernel", 10, 5, tid=99, correlation=1, **{"External id": 5})
    writer.kernel(20, 5, 1)
    writer.kernel(30, 5, -1, **{"External id": 5})  # no correlation at all
    assert [row["name"] for row in writer.entry()["operators"]] == ["aten::mm"]


def test_modules_where_recorded(writer: Any) -> None:
    writer.complete("python_function", "nn.Module: Net_0", 0, 100)
    writer.complete("python_function", "nn.Module: Linear_0", 10, 50)
    writer.complete("python_function", "model.py(3): forward", 5, 90)
    writer.launched(20, 30, 5, 1)
    writer.launched(70, 80, 5, 2)
    writer.launched(120, 130, 5, 3)
    rows = {row["name"]: row["kernels"] for row in writer.entry()["modules"]}
    assert rows == {"Linear_0": 1, "Net_0": 1, "outside any module": 1}


def test_launches_under_capture_issue_nothing(writer: Any) -> None:
    writer.call("cudaStreamBeginCapture", 0, 5, 1)
    writer.call("cudaLaunchKernel", 10, 5, 2)
    writer.call("cudaLaunchKernel", 20, 5, 3)
    writer.call("cudaStreamEndCapture_v2", 30, 5, 4)
    writer.call("cudaGraphLaunch", 40, 10, 5)
    writer.kernel(60, 10, 5)
    writer.kernel(71, 10, 5)
    entry = writer.entry()
    assert entry["complete"]
    assert (entry["launches"], entry["graph_launches"], entry["captured_launches"], entry["kernels"]) == (1, 1, 2, 2)
    assert entry["graph_launch_latency_s"]["median"] == us(20)
    assert entry["launch_latency_s"] is None


def test_several_devices_add_and_their_fractions_are_means(writer: Any) -> None:
    writer.header["deviceProperties"] = [{"id": 0, "name": "GPU A"}, {"id": 1, "name": "GPU B"}]
    writer.launched(0, 100, 50, 1, device=0)
    writer.launched(10, 200, 50, 2, device=0)  # span 150, busy 100
    writer.launched(20, 100, 20, 3, device=1)
    writer.launched(30, 180, 20, 4, device=1)  # span 100, busy 40
    entry = writer.entry()
    assert entry["span_s"] == us(250)
    assert entry["busy_s"] == us(140)
    assert entry["gpu_busy_fraction"] == pytest.approx((100 / 150 + 40 / 100) / 2)
    assert [(row["device"], row["name"], row["kernels"]) for row in entry["devices"]] == [
        (0, "GPU A", 2),
        (1, "GPU B", 2),
    ]
    assert sum(entry["idle_s"].values()) == us(110)


def test_launch_latency_and_queue_depth(writer: Any) -> None:
    writer.launched(0, 10, 100, 1)
    writer.launched(20, 110, 10, 2)
    writer.launched(30, 120, 10, 3)
    entry = writer.entry()
    assert entry["launch_latency_s"]["median"] == us(90)
    assert entry["launch_latency_s"]["max"] == us(90)
    assert entry["queue_depth"]["max"] == 2
    assert entry["queue_depth"]["mean"] == pytest.approx((90 + 90) / 120)
    assert entry["queue_depth"]["empty_fraction"] == pytest.approx((10 + 10) / 120)


def test_own_marks_win_over_profiler_steps(writer: Any) -> None:
    writer.mark("ProfilerStep#7", 0, 1000)
    for number in range(2):
        writer.mark(f"joulemark.iteration#{number}", 100 + 300 * number, 200)
        writer.mark("joulemark.input", 100 + 300 * number, 50)
        writer.launched(160 + 300 * number, 170 + 300 * number, 100, number + 1)
    entry = writer.entry()
    assert entry["iteration_source"] == "marks"
    assert [row["wall_s"] for row in entry["iterations"]] == [us(200), us(200)]
    assert nonzero(entry["iterations"][0]["idle_s"]) == {
        "input": us(50), "outside_operators": us(10), "launch_call": us(5), "queued": us(5), "tail": us(30),
    }  # fmt: skip


def test_marks_are_cut_to_the_recording(writer: Any) -> None:
    writer.complete("Trace", "PyTorch Profiler (0)", 50, 200, pid="Spans", tid="PyTorch Profiler")
    writer.mark("ProfilerStep#1", 0, 100)
    writer.mark("ProfilerStep#2", 100, 9999)
    writer.launched(60, 70, 10, 1)
    entry = writer.entry()
    assert [row["wall_s"] for row in entry["iterations"]] == [us(50), us(150)]
    assert "2 of 2 marks reach beyond the recording" in entry["notes"]["iterations"]
    assert entry["iterations"][1]["host_issue_s"] is None
    assert entry["iterations"][1]["hidden_ratio"] is None
    assert entry["notes"]["iterations.host_issue_s"] == "nothing was launched in it"


def repeated(writer: Any, names: str, times: int, pause: float = 500) -> None:
    at, number = 0.0, 0
    for _ in range(times):
        for name in names:
            writer.operator("aten::op", at, 15)
            writer.launched(at + 2, at + 12, 5, number, name=name)
            at, number = at + 20, number + 1
        at += pause


def test_iterations_from_the_period_of_the_work(writer: Any) -> None:
    repeated(writer, "abcabcdabce", 4)
    entry = writer.entry()
    assert entry["iteration_source"] == "period"
    assert [row["kernels"] for row in entry["iterations"]] == [11] * 4
    assert [row["wall_s"] for row in entry["iterations"][:3]] == [us(11 * 20 + 500)] * 3
    assert "repeats every 11 device events" in entry["notes"]["iterations"]


def test_period_begins_behind_the_pause_even_after_a_prelude(writer: Any) -> None:
    for number in range(3):
        writer.launched(1 + 20 * number, 15 + 20 * number, 5, 1000 + number, name=f"init{number}")
    prelude = list(writer.events)
    writer.events = []
    repeated(writer, "abcdefg", 5)
    for event in writer.events:
        event["ts"] += 1000
    writer.events = prelude + writer.events
    entry = writer.entry()
    assert [row["kernels"] for row in entry["iterations"]] == [7] * 5
    assert "3 device events stand outside whole periods" in entry["notes"]["iterations"]


@pytest.mark.parametrize("names", ["aaaaaaaaaaaaaaaaaaaa", "abababababababababab", "abcdefghijklmnopqrstuvw"])
def test_no_period(writer: Any, names: str) -> None:
    repeated(writer, names, 1)
    entry = writer.entry()
    assert (entry["iterations"], entry["iteration_source"]) == ([], None)
    assert "does not repeat" in entry["notes"]["iterations"]


def test_host_issue_per_operator_is_of_the_outermost_ones_that_issue_work(writer: Any) -> None:
    """Steps of 1000 µs: operators of 40, 20 and 90 µs issue work, one of 500 µs does not; 30 of the 90 are waited."""
    for step in range(2):
        at = 1000 * step
        writer.mark(f"ProfilerStep#{step}", at, 1000)
        writer.operator("aten::conv2d", at, 40)
        writer.operator("aten::convolution", at + 1, 38)
        writer.launched(at + 5, at + 10, 10, 10 * step + 1)
        writer.launched(at + 15, at + 20, 10, 10 * step + 2)
        writer.operator("aten::relu", at + 50, 20)
        writer.launched(at + 55, at + 60, 100, 10 * step + 3)
        writer.operator("aten::size", at + 100, 500)
        writer.operator("aten::item", at + 700, 90)
        writer.call("cudaMemcpyAsync", at + 710, 5, 10 * step + 4)
        writer.copy(at + 720, 30, 10 * step + 4)
        writer.call("cudaStreamSynchronize", at + 720, 30, 10 * step + 5)
    for row in writer.entry()["iterations"]:
        assert (row["operators"], row["host_issue_per_operator_s"]) == (3, us(40))


def test_without_operators_there_is_no_issue_time_of_one(writer: Any) -> None:
    writer.mark("ProfilerStep#0", 0, 100)
    writer.launched(10, 20, 30, 1)
    entry = writer.entry()
    assert (entry["iterations"][0]["operators"], entry["iterations"][0]["host_issue_per_operator_s"]) == (0, None)
    assert "no operator issued work" in entry["notes"]["iterations.host_issue_per_operator_s"]
