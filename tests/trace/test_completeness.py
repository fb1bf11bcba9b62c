"""What makes a trace incomplete, and what is only worth a note."""

from __future__ import annotations

from typing import Any


def codes(entry: dict[str, Any]) -> dict[str, bool]:
    return {finding["code"]: finding["flags"] for finding in entry["findings"]}


def test_launches_without_kernels(writer: Any) -> None:
    for number in range(5):
        writer.launched(20 * number, 20 * number + 10, 5, number)
    writer.call("cudaLaunchKernel", 200, 5, 77)
    writer.call("cudaMemcpyAsync", 210, 5, 78)  # a copy of nothing leaves no record: no loss
    entry = writer.entry()
    assert not entry["complete"]
    assert codes(entry) == {"launches_without_kernels": True}
    assert (
        "1 of 6 kernel launch calls without a kernel (cudaLaunchKernel 1)" in entry["notes"]["launches_without_kernels"]
    )


def test_orphans_before_the_first_known_kernel_of_their_stream_are_no_loss(writer: Any) -> None:
    writer.kernel(10, 5, 500)
    writer.kernel(50, 5, 501)  # queued before the recording, run after the first recorded launch call
    writer.launched(30, 70, 5, 1)
    entry = writer.entry()
    assert entry["complete"]
    assert codes(entry) == {"kernels_without_launch": False}
    assert entry["unattributed_kernels"] == 2


def test_orphans_in_the_midst_of_the_recording_are_losses(writer: Any) -> None:
    writer.launched(10, 20, 5, 1)
    writer.kernel(50, 5, 501)
    writer.launched(70, 80, 5, 2)
    entry = writer.entry()
    assert not entry["complete"]
    assert codes(entry) == {"kernels_without_launch": True}
    assert "1 of them in the midst" in entry["notes"]["kernels_without_launch"]


def test_kernel_before_its_launch_is_clock_skew(writer: Any) -> None:
    writer.launched(100, 50, 5, 1)
    writer.launched(200, 199.5, 5, 2)  # within the resolution of old profilers
    entry = writer.entry()
    assert codes(entry) == {"clock_skew": True}
    assert not entry["complete"]
    assert "1 device event" in entry["notes"]["clock_skew"]
    assert "5e-05 s" in entry["notes"]["clock_skew"]
    assert entry["queue_depth"]["mean"] == 0


def test_host_events_without_times(writer: Any) -> None:
    writer.launched(10, 20, 5, 1)
    writer.operator("aten::mm", 0, 0)
    writer.operator("aten::mm", 5, -3)
    entry = writer.entry()
    assert codes(entry) == {"invalid_timestamps": True}
    assert entry["invalid_events"] == 0
    assert "2 host events with invalid timestamps" in entry["notes"]["invalid_timestamps"]


def test_kernels_of_no_duration_are_noted(writer: Any) -> None:
    writer.launched(10, 20, 0, 1)
    writer.launched(30, 40, 5, 2)
    entry = writer.entry()
    assert (entry["complete"], entry["kernels"]) == (True, 2)
    assert codes(entry) == {"zero_duration_kernels": False}


def test_shorter_replays_are_noted(writer: Any) -> None:
    for replay in range(5):
        at = 100 * replay
        writer.call("cudaGraphLaunch", at, 5, replay)
        for number in range(4 - (replay == 3)):
            writer.kernel(at + 10 + 10 * number, 5, replay, name=f"k{number}")
    entry = writer.entry()
    assert entry["complete"]
    assert codes(entry) == {"graph_replays_differ": False}


def test_profilers_own_log_of_losses(writer: Any) -> None:
    writer.launched(10, 20, 5, 1)
    counts = "INFO:x Record counts: Out-of-range = 41, CUPTI stopped early? = {}"
    writer.header["INFO"] = [counts.format(0)]
    assert writer.entry()["complete"]
    writer.header["INFO"] = [counts.format(1)]
    assert codes(writer.entry()) == {"profiler_reports_loss": True}
    writer.header["INFO"] = []
    writer.header["WARNING"] = ["WARNING:x Exceeded max GPU buffer count"]
    assert codes(writer.entry()) == {"profiler_reports_loss": True}


def test_begin_end_events_are_noted(writer: Any) -> None:
    writer.launched(10, 20, 5, 1)
    writer.events += [{"ph": "B", "name": "x", "ts": 1, "pid": 1, "tid": 1}, {"ph": "E", "ts": 2, "pid": 1, "tid": 1}]
    assert codes(writer.entry()) == {"trace_begin_end_events": False}


def test_kernels_with_invalid_times_are_no_lost_launches(writer: Any) -> None:
    writer.launched(10, 20, 5, 1)
    writer.launched(30, 0, 0, 2)
    entry = writer.entry()
    assert codes(entry) == {"invalid_timestamps": True}
    assert (entry["launches"], entry["kernels"], entry["invalid_events"]) == (2, 1, 1)


def test_a_correlation_id_used_twice_goes_to_the_call_before(writer: Any) -> None:
    writer.launched(0, 10, 5, 1)
    writer.launched(100, 110, 5, 1)
    writer.complete("cuda_driver", "cuCtxGetCurrent", 104, 1, correlation=1)  # issues nothing
    entry = writer.entry()
    assert entry["complete"]
    assert entry["launch_latency_s"]["max"] < 11e-6


def test_a_driver_call_inside_a_runtime_call_is_the_same_launch(writer: Any) -> None:
    for number in range(3):
        at = 100 * number
        writer.call("cudaLaunchKernel", at, 10, 2 * number)
        writer.call("cuLaunchKernel", at + 2, 6, 2 * number + 1, cat="cuda_driver")
        writer.kernel(at + 20, 5, 2 * number + number % 2)  # the profiler may give the kernel either id
    entry = writer.entry()
    assert entry["complete"]
    assert (entry["launches"], entry["kernels"]) == (3, 3)
