"""Small traces, each with a fault met in the wild, and the figures that are right for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from joulemark.trace import analyse_files, diff, exit_code

Known = Callable[[str], dict[str, Any]]


def microseconds(value: float) -> float:
    return pytest.approx(value * 1e-6, rel=1e-9, abs=1e-15)


def test_concurrent_kernels_are_a_union_and_annotations_no_work(known: Known) -> None:
    entry = known("overlap_streams.json")
    assert entry["complete"]
    assert entry["kernel_time_s"] == microseconds(1650)
    assert entry["kernel_busy_s"] == microseconds(1000)
    assert entry["busy_s"] == microseconds(1040)
    assert entry["span_s"] == microseconds(1100)
    assert entry["kernel_busy_fraction"] == pytest.approx(0.90909, abs=1e-5)
    assert entry["gpu_busy_fraction"] == pytest.approx(0.94545, abs=1e-5)
    assert entry["communication_kernels"] == 1
    assert entry["communication_time_s"] == microseconds(700)


def test_every_kernel_of_a_graph_replay_counts(known: Known) -> None:
    entry = known("cuda_graph_replays.json")
    assert entry["kernels"] == 19
    assert entry["kernel_time_s"] == microseconds(645)
    convolution = next(row for row in entry["kernel_names"] if "fprop" in row["name"])
    assert (convolution["kernels"], convolution["time_s"]) == (6, microseconds(120))
    calls = {row["name"]: row for row in entry["launch_calls"]}
    graph = calls["cudaGraphLaunch"]
    assert graph["calls"] == 3
    assert graph["kernels_per_call"] == [6, 6]
    assert graph["device_time_per_call_s"] == [microseconds(210), microseconds(210)]
    operators = {row["name"]: row for row in entry["operators"]}
    assert operators["graph launch"]["device_time_s"] == microseconds(630)
    assert operators["aten::copy_"]["device_time_s"] == microseconds(15)
    assert (entry["launches"], entry["graph_launches"], entry["unattributed_kernels"]) == (4, 3, 0)


def test_events_without_times_are_left_out_and_said(known: Known) -> None:
    entry = known("half_zero_timestamps.json")
    assert (entry["kernels"], entry["invalid_events"]) == (6, 6)
    assert entry["kernel_time_s"] == microseconds(300)
    assert entry["span_s"] == microseconds(450)
    assert entry["gpu_busy_fraction"] == pytest.approx(2 / 3)
    assert not entry["complete"]
    assert "6 kernels with invalid timestamps" in entry["notes"]["invalid_timestamps"]


@pytest.mark.parametrize("name", ["bare_inf", "bare_na", "python_style_nan_infinity", "quoted_na_current_kineto"])
def test_numbers_that_json_forbids(known: Known, name: str) -> None:
    entry = known(f"{name}.json")
    assert (entry["kernels"], entry["copies"], entry["copied_bytes"]) == (1, 1, 200)
    assert entry["kernel_time_s"] == microseconds(42.5)
    assert entry["copy_time_s"] == 0
    copy = entry["copy_kinds"][0]
    assert (copy["bytes"], copy["bandwidth_bytes_per_s"]) == (200, None)
    assert "copy_kinds.bandwidth_bytes_per_s" in entry["notes"]
    assert json.loads(json.dumps(entry, allow_nan=False), parse_constant=pytest.fail) == entry


@pytest.mark.parametrize("name", ["cut_mid_event.json", "cut.json.gz"])
def test_cut_files_are_salvaged_and_marked(known: Known, name: str) -> None:
    entry = known(name)
    assert (entry["kernels"], entry["complete"], entry["error"]) == (18, False, None)
    assert entry["kernel_time_s"] == microseconds(216)
    assert "ends in the middle of an event at byte 21548" in entry["notes"]["trace_cut"]


def test_whole_file(known: Known) -> None:
    entry = known("full.json")
    assert (entry["kernels"], entry["complete"]) == (30, True)
    assert entry["kernel_time_s"] == microseconds(360)


def test_list_of_events_of_the_autograd_profiler(known: Known) -> None:
    entry = known("legacy_top_level_list.json")
    assert (entry["kernels"], entry["complete"]) == (3, True)
    assert entry["kernel_time_s"] == microseconds(27)
    assert entry["operators"][0]["name"] == "aten::mul"  # joined by the flow arrows: there are no correlation ids
    assert entry["operators"][0]["kernels"] == 3


def test_empty_file_is_an_error_and_others_are_analysed_all_the_same(data: Any) -> None:
    document = analyse_files([data / "empty.json", data / "full.json", data / "cut.json.gz"])
    empty, full, cut = document["files"]
    assert "is empty" in empty["error"]
    assert "empty.json" in empty["error"]
    assert empty["kernels"] is None
    assert (full["kernels"], cut["kernels"]) == (30, 18)
    assert exit_code(document) == 2
    assert exit_code({"files": [full, cut]}) == 3
    assert exit_code({"files": [full]}) == 0


def test_driver_launches_and_kernels_from_before_the_recording(known: Known) -> None:
    entry = known("driver_launch_and_orphan.json")
    seconds = {row["name"]: row["device_time_s"] for row in entry["operators"]}
    assert seconds == {
        "aten::convolution": microseconds(120),
        "triton_poi_fused_relu_0": microseconds(80),
        "triton_red_fused_mean_1": microseconds(40),
        "aten::mm": microseconds(200),
        "unattributed": microseconds(60),
    }
    assert entry["kernels"] == 5
    assert entry["kernel_time_s"] == microseconds(500)
    assert entry["unattributed_kernels"] == 1
    assert [finding["code"] for finding in entry["findings"]] == ["kernels_without_launch"]


def test_trace_without_gpu_events(known: Known) -> None:
    entry = known("cpu_only.json")
    assert (entry["kernels"], entry["host_operators"]) == (0, 5)
    for key in ("kernel_time_s", "busy_s", "span_s", "gpu_busy_fraction", "idle_s", "exposed_overhead_s"):
        assert entry[key] is None
        assert entry["notes"][key] == "no GPU events"


def test_trace_with_nothing_but_kernels(known: Known) -> None:
    entry = known("kernels_only.json")
    assert (entry["kernels"], entry["unattributed_kernels"]) == (4, 4)
    assert entry["kernel_time_s"] == microseconds(180)
    assert entry["span_s"] == microseconds(225)
    assert entry["gpu_busy_fraction"] == pytest.approx(0.8)
    assert entry["launches"] is None
    assert entry["host_operators"] is None
    assert entry["idle_s"]["unknown"] == microseconds(45)


def test_missing_gpu_side_is_no_improvement(data: Any) -> None:
    difference = diff(analyse_files([data / "kernels_only.json"]), analyse_files([data / "cpu_only.json"]))
    rows = {row["name"]: row for row in difference["metrics"]}
    assert rows["busy_s"]["base"] == pytest.approx(180e-6)
    assert rows["busy_s"]["new"] is None
    assert rows["busy_s"]["ratio"] is None
    assert rows["busy_s"]["change"] is None
    assert difference["notes"]["new"].startswith("no GPU events")
