"""The recording of a few steps, with the real torch.profiler on the CPU."""

from __future__ import annotations

import re
import warnings

import pytest

from joulemark.collect.torch_profiler import MARK, Recording, TorchProfiler, prepare, seconds_per_step
from joulemark.measure.profile import measurement_of
from joulemark.metrics import PROFILER
from joulemark.records import Case
from joulemark.trace.analyse import analyse, file_document
from joulemark.trace.iterations import OWN_MARK
from joulemark.workloads import zoo


def test_the_marks_are_those_that_the_analysis_looks_for():
    assert MARK == OWN_MARK


def test_distortion_is_against_the_median_unprofiled_step():
    assert Recording([1.0, 9.0, 2.0], 3.0, 5, 0.0, 15.0).distortion == pytest.approx(0.5)


@pytest.mark.parametrize(("with_setup", "expected"), [(False, "f012f"), (True, "sf0fsf1fsf2f")])
def test_fences_stand_around_all_steps_or_around_each_behind_its_setup(with_setup, expected):
    log = []
    setup = (lambda: log.append("s")) if with_setup else None
    assert seconds_per_step(lambda number: log.append(str(number)), setup, 3, lambda: log.append("f")) >= 0
    assert "".join(log) == expected


def test_a_session_is_set_up_without_a_word_of_cycles_and_stops_without_making_events(tmp_path, monkeypatch, recwarn):
    torch = pytest.importorskip("torch")

    def made(_):
        raise AssertionError("events were made of what only the trace wants")

    monkeypatch.setattr(torch.autograd.profiler.profile, "_ensure_function_events", made)
    path = tmp_path / "trace.json"
    TorchProfiler().record(lambda: torch.ones(1).add_(1), None, 2, lambda: None, path)
    assert "aten::add_" in path.read_text()

    class Wordy:
        def prepare_trace(self):
            warnings.warn("Warning: Profiler clears events at the end of each cycle.Only events", stacklevel=1)
            warnings.warn("another", stacklevel=1)

    recwarn.clear()
    prepare(Wordy())
    assert [str(one.message) for one in recwarn] == ["another"]


def test_lenet_on_the_cpu_gives_marks_and_no_device_figures(tmp_path):
    pytest.importorskip("torch")
    case = Case("lenet5", "inference", "eager", "fp32", 1, "contiguous", "device")
    step = zoo.find("lenet5").build(case, "cpu")
    path = tmp_path / "trace.json.gz"
    recording = TorchProfiler().record(step.run, None, 3, lambda: None, path)
    document = file_document(analyse(path))
    assert (document["iteration_source"], document["complete"]) == ("marks", True)
    assert [one["name"] for one in document["iterations"]] == [f"{MARK}#{number}" for number in range(3)]
    assert document["host_operators"] > 3 * 5
    assert (recording.steps, len(recording.plain_s)) == (3, 3)
    assert recording.end > recording.start

    seen = measurement_of(recording, path)
    assert set(seen.values) == {"profiler_distortion"}
    assert set(seen.missing) == set(PROFILER) - {"profiler_distortion"}
    assert seen.missing["gpu_busy_fraction"] == seen.missing["kernels_per_step"] == "no GPU events"
    assert re.search("no calls into the CUDA or HIP runtime", seen.missing["host_issue_s"])
    assert seen.findings == ()
    assert set(seen.samples) == {"plain_step_s", "profiled_step_s"}
