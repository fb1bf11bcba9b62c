"""From a recording to the document, its tables, its picture and its command."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from joulemark.attribution import attribute
from joulemark.attribution.clock import Beacons
from joulemark.attribution.document import document_of
from joulemark.attribution.feeds import per_kernel, read_per_kernel
from joulemark.attribution.recording import FILE, HOST, RecordedWindow, read_recording, read_series, write_series
from joulemark.cli import main
from joulemark.errors import UnreadableInput
from joulemark.report import attribution_plot, attribution_view, formats
from joulemark.synthetic_run import write_trace

from .conftest import ADD, GEMM, LAUNCH_S, STEP, SUM, TINY

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schema" / "attribution.schema.json").read_text())


def valid(document):
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(document, allow_nan=False)))
    return document


def document(one):
    return valid(document_of(*one.recorded()))


def by(entries, key):
    return {entry[key]: entry for entry in entries}


def test_every_class_gets_its_own(run):
    found = document(run())
    classes = by(found["classes"], "class")
    assert list(classes) == ["tensor_gemm", "elementwise", "reduction", "pooled"]
    for name, kernel, launches in (("tensor_gemm", GEMM, 3), ("elementwise", ADD, 2), ("reduction", SUM, 3)):
        entry = classes[name]
        assert entry["launches"] == launches
        assert entry["time_s"] == pytest.approx(launches * (kernel.length_s + LAUNCH_S), rel=0.01)
        cell = entry["counters"]["dram_read_bytes"]
        true = launches * kernel.length_s * kernel.rates["dram_read_bytes"]
        assert cell["interval"][0] <= true <= cell["interval"][1]
        assert cell["value"] == pytest.approx(true, rel=0.04)
        tensor = kernel.rates["pipe_tensor"] * kernel.length_s / (kernel.length_s + LAUNCH_S)
        assert entry["counters"]["pipe_tensor"]["value"] == pytest.approx(tensor, abs=0.01)
    assert classes["pooled"]["by_level"] == {"pool": pytest.approx(1.0)}
    assert sum(entry["time_share"] for entry in found["classes"]) == pytest.approx(1)


def test_a_kernel_of_no_duration_has_no_shares(run):
    recording, timeline, series = run().recorded()
    here = timeline.launches.name == timeline.names.index(TINY.name)
    end_s = np.where(here, timeline.launches.start_s, timeline.launches.end_s)
    without = replace(timeline, launches=replace(timeline.launches, end_s=end_s))
    found = valid(document_of(recording, without, series))
    kernel = by(found["kernels"], "name")[TINY.name]
    assert (kernel["time_s"], kernel["launches"]) == (0.0, 1.0)
    assert set(found["counters"]) - set(kernel["counters"]) == {"pipe_tensor"}
    assert len(list(attribution_view.tables(found))) > 2


def test_totals_over_classes_are_the_runs(run):
    one = run(windows=2)
    found = document(one)
    for name, counter in found["counters"].items():
        assert counter["ratio"] == pytest.approx(1, abs=0.02), name
        scale = {entry["class"]: entry["time_s"] if counter["unit"] == "1" else 1 for entry in found["classes"]}
        total = sum(entry["counters"][name]["value"] * scale[entry["class"]] for entry in found["classes"])
        assert total == pytest.approx(counter["attributed"], rel=0.01), name
    assert found["counters"]["dram_read_bytes"]["measured"] == pytest.approx(
        one.true_per_step("dram_read_bytes"), rel=0.01
    )
    assert found["findings"] == []


def test_operators_and_kernels_hold_the_same_counts(run, tmp_path):
    one = run()
    one.write(tmp_path)
    without = valid(attribute(tmp_path))
    assert (without["operators"], without["modules"]) == (None, None)
    assert {"operators", "modules"} <= set(without["notes"])
    write_trace(tmp_path / HOST, one.host_events(one.window(1, 2)[1]))
    found = valid(attribute(tmp_path))
    operators = by(found["operators"], "operator")
    assert set(operators) == {"aten::mm", "aten::add", "aten::sum", "aten::zero_"}
    kernels = by(found["kernels"], "name")
    assert operators["aten::mm"]["counters"] == kernels[GEMM.name]["counters"]
    assert found["modules"] is None  # no kernel of this step is launched in a module's forward
    assert "modules" in found["notes"]


@pytest.mark.parametrize("wrong_s", [-50e-6, 50e-6])
def test_beacons_of_a_clock_that_is_50_us_wrong_are_refused(run, wrong_s):
    recording, timeline, series = run().recorded()
    own = timeline.beacons[0]
    wrong = Beacons(own.start_s + wrong_s, own.end_s + wrong_s, own.before)
    with pytest.raises(UnreadableInput, match=r"window 0: the counts fit the timeline best [+-]\d\d\.\d µs off"):
        document_of(recording, replace(timeline, beacons={0: wrong}), series)


def test_a_window_whose_clock_is_wrong_does_not_spoil_the_others(run):
    recording, timeline, series = run(windows=3).recorded()
    own = timeline.beacons[1]
    wrong = Beacons(own.start_s + 50e-6, own.end_s + 50e-6, own.before)
    found = valid(document_of(recording, replace(timeline, beacons={**timeline.beacons, 1: wrong}), series))
    assert [one["window"] for one in found["clock"]["windows"]] == [0, 2]
    (finding,) = found["findings"]
    assert finding["code"] == "attribution_windows_refused"
    assert "window 1" in finding["message"]
    assert found["counters"]["dram_read_bytes"]["ratio"] == pytest.approx(1, abs=0.02)


def test_a_clock_that_jumps_during_the_run_is_refused(run):
    recording, timeline, series = run(steps=40).recorded()
    own = timeline.beacons[0]
    jump = np.where(np.arange(12) >= own.before, 50e-6, 0.0)
    wrong = Beacons(own.start_s + jump, own.end_s + jump, own.before)
    with pytest.raises(UnreadableInput, match="off the mapping by beacons"):
        document_of(recording, replace(timeline, beacons={0: wrong}), series)


def test_counts_outside_of_kernels_are_not_given_to_any(run):
    recording, timeline, series = run([*STEP, replace(TINY, gap_s=100e-6)]).recorded()
    values = dict(series[0].values)
    values["dram_read_bytes"] = values["dram_read_bytes"] + 4e6
    found = valid(document_of(recording, timeline, {0: replace(series[0], values=values)}))
    counter = found["counters"]["dram_read_bytes"]
    assert counter["ratio"] < 0.98
    assert counter["outside_kernels"] > 0.02
    assert [one["code"] for one in found["findings"]] == ["attribution_totals_differ"]


def test_a_product_without_tensor_activity_changes_its_class(run):
    plain = replace(GEMM, rates={**GEMM.rates, "pipe_tensor": 0.0})
    found = by(document(run([plain, ADD, SUM, SUM, SUM]))["classes"], "class")
    assert found["gemm"]["uses_tensor_cores"] is False
    assert "tensor_gemm" not in found


@pytest.mark.parametrize(("launches", "kind", "kept"), [(1, "tensor_gemm", True), (24, "gemm", False)])
def test_a_few_short_launches_do_not_contradict_their_name(run, launches, kind, kept):
    short = replace(
        ADD,
        name="cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16",
        length_s=6.6e-6,
        rates={**ADD.rates, "pipe_tensor": 0.0},
    )
    found = document(run([ADD, *[short] * launches, SUM, SUM, SUM]))
    kernel = by(found["kernels"], "name")[short.name]
    assert kernel["counters"]["pipe_tensor"]["interval"][1] < 0.005
    assert kernel["by_level"] == {"kernel": pytest.approx(1)}
    assert (kernel["class"], kernel["uses_tensor_cores"]) == (kind, kept)
    assert kind in by(found["classes"], "class")
    findings = [one["message"] for one in found["findings"] if one["code"] == "attribution_name_kept"]
    assert [one.startswith(f"{short.name} counts as using tensor cores") for one in findings] == [True] * kept


def test_a_slow_recording_is_a_finding(run):
    recording, timeline, series = run().recorded()
    slow = replace(recording, recorded_step_s=(1.2 * recording.plain_step_s[0],))
    found = valid(document_of(slow, timeline, series))
    assert found["steps"]["slowdown"] == pytest.approx(0.2)
    assert found["steps"]["slowdown_interval"] is None
    assert [one["code"] for one in found["findings"]] == ["attribution_step_time"]


def test_windows_are_compared_with_the_stretches_next_to_them(run):
    """A clock that falls over the recording slows both alike; one window is disturbed."""
    recording, timeline, series = run().recorded()
    bare = [1e-3 * (1 + 0.05 * number) for number in range(7)]
    beside = [1.02 * (before + behind) / 2 for before, behind in pairwise(bare)]
    beside[2] *= 1.5
    found = valid(document_of(replace(recording, plain_step_s=bare, recorded_step_s=beside), timeline, series))
    assert found["steps"]["slowdown"] == pytest.approx(0.02)
    assert found["steps"]["slowdown_interval"] == [pytest.approx(0.02), pytest.approx(0.53)]
    assert found["findings"] == []


def with_references(run):
    """A run with the peaks of its GPU: 800 TFLOP/s at 90 % of the tensor pipe, 4 TB/s."""
    cycles = 1e9
    kernels = [
        replace(
            one,
            rates={**one.rates, "pipe_tensor_cycles": one.rates["pipe_tensor"] * 1e12, "pipe_fma_instructions": 1e10},
        )
        for one in STEP
    ]
    recording, timeline, series = run(kernels).recorded()
    product = replace(
        series[0],
        values={"pipe_tensor_cycles": np.full(len(series[0]), cycles / len(series[0]))},
        units={"pipe_tensor_cycles": "cycle"},
    )
    moved = {name: np.full(len(series[0]), 2e10 / len(series[0])) for name in ("dram_read_bytes", "dram_write_bytes")}
    stream = replace(series[0], values=moved, units=dict.fromkeys(moved, "B"))
    windows = (
        *recording.windows,
        RecordedWindow(7, "product", "pass1", 10, flop=8e12, seconds=0.01),
        RecordedWindow(8, "stream", "pass1", 10, seconds=0.01),
    )
    return replace(recording, windows=windows), timeline, {**series, 7: product, 8: stream}


def test_a_roofline_stands_on_measured_peaks(run):
    found = valid(document_of(*with_references(run)))
    assert found["roofline"]["flop_per_s"] == pytest.approx(8e14)
    assert found["roofline"]["bytes_per_s"] == pytest.approx(4e12)
    assert found["roofline"]["flop_per_tensor_cycle"] == pytest.approx(8000)
    point = by(found["classes"], "class")["elementwise"]["roofline"]
    assert point["bound_by"] == "dram"
    assert point["bytes_per_s"] == pytest.approx(3.5e12, rel=0.03)
    assert point["flop_per_s"] == pytest.approx(64e10, rel=0.03)
    assert point["of_roof"] == pytest.approx(3.5 / 4, rel=0.03)


def test_what_other_analyses_take(run, tmp_path):
    found = document(run())
    fed = by(per_kernel(found)["kernels"], "name")
    assert TINY.name not in fed  # its rate is not its own
    assert fed[GEMM.name]["tensor_active_fraction"] == pytest.approx(0.6, abs=0.01)
    assert fed[ADD.name]["dram_read_bytes"] == pytest.approx(2 * 47e-6 * 2.5e12, rel=0.03)
    (tmp_path / "a.json").write_text(json.dumps(found))
    assert read_per_kernel(tmp_path / "a.json") == json.loads(json.dumps(per_kernel(found)))
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(UnreadableInput, match="is no attribution"):
        read_per_kernel(tmp_path / "b.json")


def test_the_command_prints_writes_and_draws(run, tmp_path, capsys):
    run(windows=2).write(tmp_path / "recorded", label="my *step*")
    out, picture = tmp_path / "a.json", tmp_path / "a.svg"
    assert main(["attribution", str(tmp_path / "recorded"), "--out", str(out), "--plot", str(picture)]) == 0
    written = valid(json.loads(out.read_text()))
    assert "<svg" in picture.read_text()
    capsys.readouterr()
    assert main(["attribution", str(tmp_path / "recorded"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == written == json.loads(json.dumps(attribute(tmp_path / "recorded")))
    assert main(["attribution", str(tmp_path / "recorded"), "--format", "markdown"]) == 0
    shown = capsys.readouterr().out
    assert "GEMM and convolution on tensor cores" in shown
    assert r"my \*step\*" in shown
    assert main(["attribution", str(out), "--format", "markdown"]) == 0
    assert capsys.readouterr().out == shown
    out.write_text(json.dumps({name: value for name, value in written.items() if name != "kernels"}))
    assert main(["attribution", str(out)]) == 2
    assert "no whole document of joulemark attribution ('kernels' is missing)" in capsys.readouterr().err


def test_names_from_a_recording_are_shown_harmless(run):
    bad = replace(GEMM, name="gemm_bf16<script>\x1b[31m|$x$", operator="<b>|op")
    found = document(run([bad, ADD]))
    text = formats.render(attribution_view.tables(found), "markdown")
    assert "<script>" not in text
    assert "\x1b" not in text


def test_a_roofline_is_shown_and_drawn(run, tmp_path):
    found = document_of(*with_references(run))
    assert "roofs, both measured here: 800 TFLOP/s" in formats.render(attribution_view.tables(found))
    for name in ("dram_read_bytes", "dram_write_bytes"):
        found["classes"][1]["counters"][name]["interval"] = [0.0, 1e9]
    attribution_plot.draw(found, tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    for text in ("FLOP per byte of DRAM", "roofs, both measured: 800 TFLOP/s", "no place: elementwise"):
        assert text in drawn


@pytest.mark.parametrize("damage", ["no folder", "no recording", "cut samples", "not a number", "other schema"])
def test_what_cannot_be_read_says_so(run, tmp_path, capsys, damage):
    folder = tmp_path / "recorded"
    run().write(folder)
    if damage == "no folder":
        folder = tmp_path / "nothing"
    elif damage == "no recording":
        (folder / FILE).unlink()
    elif damage == "cut samples":
        path = folder / "window-0.npz"
        path.write_bytes(path.read_bytes()[:300])
    elif damage == "not a number":
        series = read_series(folder / "window-0.npz")
        values = {name: samples * np.nan for name, samples in series.values.items()}
        write_series(folder / "window-0.npz", replace(series, values=values))
    else:
        (folder / FILE).write_text('{"schema": "other"}')
    assert main(["attribution", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("joulemark: error: ")


def test_a_recording_is_read_as_it_was_written(run, tmp_path):
    one = run()
    one.write(tmp_path)
    recording = read_recording(tmp_path)
    assert recording.windows == (RecordedWindow(0, "steps", "pass1", 15, own_trace=True),)
    series = read_series(tmp_path / "window-0.npz")
    assert series.units["pipe_tensor"] == "1"
    assert len(series) == len(series.values["pipe_tensor"])


def test_the_time_in_which_kernels_count_nothing_yet_is_found(run):
    for head_s in (0.0, 2e-6):
        found = document(run(steps=20, head_s=head_s))
        assert found["clock"]["windows"][0]["head_s"] == pytest.approx(head_s, abs=0.4e-6)
