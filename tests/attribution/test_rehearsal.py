"""``tests/gpu/attribution.py`` from start to document on a known step: cut, killed, refused, taken up again."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
from attribution_analysis import against

from joulemark.errors import UnreadableInput
from joulemark.synthetic_run import write_trace

from .rehearsal import CYCLES_PER_S, FLUSHED, KERNELS, LAUNCH_S

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "attribution.py"
SCHEMA = json.loads((ROOT / "docs" / "schema" / "attribution-ncu.schema.json").read_text())
MODEL = "mobilenet_v2"
NCU = [f"{MODEL}-ncu-{caches}-{share}" for share in ("long", "rest") for caches in ("kept", "flushed")]
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_attribution", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_functions_are_those_of_the_first_window_whose_trace_can_be_used(script, run, tmp_path):
    recorded = run(windows=2)
    recorded.write(tmp_path)
    assert set(script.one_window(tmp_path).beacons) == {0}
    write_trace(tmp_path / "window-0.json.gz", [])
    assert set(script.one_window(tmp_path).beacons) == {1}
    write_trace(tmp_path / "window-1.json.gz", [])
    with pytest.raises(UnreadableInput):
        script.one_window(tmp_path)


@pytest.fixture(scope="module")
def ncu(tmp_path_factory):
    path = tmp_path_factory.mktemp("bin") / "ncu"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("rehearsal.py")}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def begun(out, parts, ncu, seconds=50.0, behaviour="", **options):
    places = os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": places, "REHEARSAL": behaviour}
    command = [sys.executable, str(SCRIPT), str(out), "--seconds", str(seconds), "--parts", ",".join(parts)]
    command += ["--bench", "rehearsal:bench", "--ncu", ncu, "--windows", "2"]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, **options)


def ran(*args, code=0, **options):
    process = begun(*args, **options)
    out, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == code
    return out


def read(path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, ncu):
    """A folder in which the model was recorded."""
    out = tmp_path_factory.mktemp("recorded")
    ran(out, [f"{MODEL}-record"], ncu)
    assert read(out / f"{MODEL}-record" / "done.json")["recording"] == "recording-0"
    return out


@pytest.fixture
def out(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "out")


@pytest.fixture
def part(script, out, ncu, monkeypatch):
    """Runs a part with Nsight Compute in this process; its exit code."""
    handler = signal.getsignal(signal.SIGTERM)

    def run(name, ncu=ncu, behaviour=""):
        monkeypatch.setenv("REHEARSAL", behaviour)
        (out / name).mkdir(exist_ok=True)
        (out / name / "go").touch()
        options = SimpleNamespace(out=out, ncu=ncu, ncu_seconds=35.0, until=time.time() + WITHIN_S)
        return script.run_part(name, options)

    yield run
    signal.signal(signal.SIGTERM, handler)


def analysed(script, out):
    found = json.loads(json.dumps(script.analyse(out), allow_nan=False))
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    return found["models"]


def test_all_parts_one_after_the_other(script, out, ncu):
    ran(out, NCU[:3], ncu)
    models = analysed(script, out)
    script.show(out)
    assert (out / f"attribution-{MODEL}.svg").exists()
    found = models[MODEL]
    assert found["label"] == "mobilenet_v2-inference-bf16-eager-b256-channels_last-synthetic-gpu"
    assert found["recording"]["checks"]["totals within 2 %"] is True
    slower = [found["recording"][name] for name in ("slowdown", "slowdown_from_bare")]
    assert found["recording"]["checks"]["at most 5 % slower"] is (max(slower) <= 0.05)
    kept, flushed = found["ncu"]["kept"], found["ncu"]["flushed"]
    assert kept["parts"]["long"]["functions"][1:] == ["vectorized_elementwise_kernel"]
    assert kept["parts"]["rest"]["functions"] == ["reduce_kernel"]
    options = kept["parts"]["long"]["options"]
    assert options[options.index("--kernel-name") + 1].endswith("|vectorized_elementwise_kernel)$")
    assert options[options.index("--cache-control") + 1] == "none"
    assert kept["missing"] == {}
    assert flushed["missing"]["rest"]["error"] == "NotMeasured"
    for one, launches, share in ((kept, len(KERNELS), 1.0), (flushed, 4, 340 / 395)):
        assert one["compared"]["differing"] == []
        assert one["compared"]["compared"] == one["compared"]["launches"] == launches
        assert one["compared"]["time_compared"] == pytest.approx(share, rel=0.01)
    assert [one["class"] for one in kept["compared"]["classes"]] == ["tensor_gemm", "elementwise", "reduction"]
    assert [one["class"] for one in kept["compared"]["classes_of_long_launches"]] == ["tensor_gemm", "elementwise"]
    assert abs(kept["largest_errors"]["dram_error"]) < 0.02
    assert abs(kept["largest_errors"]["tensor_error"]) < 0.02
    moved = sum(length * (FLUSHED * read + written) for _, length, _, read, written in KERNELS[::3])
    gemm = next(one for one in flushed["compared"]["classes"] if one["class"] == "tensor_gemm")
    assert gemm["ncu_dram_bytes"] == pytest.approx(moved)
    assert gemm["dram_error"] < -0.1
    assert kept["times_as_long"] == pytest.approx(LAUNCH_S * len(KERNELS) / found["recording"]["in_windows_s"])
    alone = kept["one_window"]
    assert (alone["window"], alone["keeps_limits"]) == (0, True)
    assert alone["times_as_long"] == pytest.approx(LAUNCH_S * len(KERNELS) / alone["seconds"])
    assert kept["checks"]["over 100 times faster"] is (alone["times_as_long"] > 100)
    assert gemm["ncu_sm_cycles_per_s"] == pytest.approx(CYCLES_PER_S)
    assert gemm["sm_cycles_per_s"] is None  # the known run does not count them
    steps = found["recording"]["steps"]
    slower = steps["recorded_s"] / steps["bare_s"] - 1
    assert found["recording"]["slowdown_from_bare"] == pytest.approx(slower)
    assert flushed["checks"] == {}
    figures, errors = (table.splitlines() for table in script.tables({"models": models}).split("\n\n"))
    assert figures[0] == "| | MobileNetV2 | held to |"  # the others were not recorded
    assert [line.split(" | ")[1] for line in errors[2:]] == ["tensor_gemm", "elementwise"]  # both have all launches
    assert models["resnet50"]["why"]["message"] == "not recorded"
    assert script.checks_of(models["resnet50"]) == [None]
    assert ran(out, NCU[:3], ncu) == ""  # all are done: nothing is begun again


def test_a_refusal_is_said_once_and_takes_nothing_away(script, out, ncu):
    said = ran(out, NCU[:2], ncu, behaviour="refused")
    assert f"{NCU[1]}: not begun, as {NCU[0]}" in said
    for part in NCU[:2]:
        failed = read(out / part / "failed.json")
        assert failed["error"] == "NotPermitted"
        assert "ERR_NVGPUCTRPERM" in failed["message"]
        assert failed["remedy"]
    found = analysed(script, out)[MODEL]
    assert found["recording"]["checks"]["totals within 2 %"] is True
    assert found["ncu"]["kept"]["missing"]["long"]["error"] == "NotPermitted"
    assert found["ncu"]["kept"]["missing"]["rest"]["error"] == "NotMeasured"
    assert set(found["ncu"]["kept"]["checks"].values()) == {None}


def test_without_nsight_compute_the_reason_is_kept(script, out, part):
    assert part(NCU[0], ncu=str(out / "nowhere")) == 1
    assert read(out / NCU[0] / "failed.json")["error"] == "CountersUnavailable"
    assert against(out, MODEL, "kept", [], {"in_windows_s": 1.0})["missing"]["long"]["message"]


def gone(pid):
    """Whether a process has ended, or is about to be forgotten."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def eventually(true):
    end = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_replay_without_end_is_cut_by_the_limit_and_taken_up_again(out, ncu, part):
    said = ran(out, NCU[:1], ncu, seconds=10.0, behaviour="hangs", code=3)
    assert f"{NCU[0]}: exit 1" in said
    assert read(out / NCU[0] / "failed.json")["error"] == "CaseTimeout"
    eventually(lambda: gone(int((out / NCU[0] / "pid").read_text())))
    assert part(NCU[0]) == 0
    assert read(out / NCU[0] / "done.json")["launches"] == 4


def test_what_is_killed_ends_what_it_has_begun(out, ncu):
    process = begun(out, NCU[:2], ncu, behaviour="hangs")
    eventually((out / NCU[0] / "pid").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WITHIN_S)
    eventually(lambda: gone(int((out / NCU[0] / "pid").read_text())))


def test_a_step_that_was_let_go_is_compared_as_far_as_it_was_seen(script, out, part):
    assert part(NCU[0], behaviour="cut") == 0
    compared = analysed(script, out)[MODEL]["ncu"]["kept"]["compared"]
    assert (compared["launches"], compared["compared"], compared["differing"]) == (1, 1, [])
    assert compared["time_compared"] == pytest.approx(120 / 395, rel=0.02)


def test_a_recording_that_was_cut_short_is_analysed_and_made_anew(script, out, ncu):
    folder = out / f"{MODEL}-record"
    (folder / "done.json").unlink()
    recording = read(folder / "recording-0" / "recording.json")
    recording["windows"] = recording["windows"][:1]
    for name in ("recorded_step_s", "plain_step_s"):
        recording[name] = recording[name][:1]
    (folder / "recording-0" / "recording.json").write_text(json.dumps(recording))
    found = analysed(script, out)[MODEL]["recording"]
    assert (found["ended"], found["recorded_s"], len(found["counts_best_at_s"])) == (False, None, 1)
    ran(out, [f"{MODEL}-record"], ncu)
    assert script.best_recording(out, MODEL).name == "recording-1"


def test_functions_are_chosen_by_their_long_launches_and_by_what_fits(script):
    functions = [script.Function(name, launches, 1e-3, 0.0) for name, launches in (("a", 50), ("b", 300), ("c", 10))]
    assert script.fitting(functions, 1000) == ["a", "b", "c"]
    assert script.fitting(functions, 100) == ["a"]
    assert script.fitting(functions[1:], 100) == ["b"]
    assert script.fitting([], 100) == []


def test_every_part_is_known_and_the_recordings_come_first(script):
    parts = script.parts()
    assert len(parts) == len(set(parts)) == 15
    assert [script.is_ncu(part) for part in parts] == [False] * 3 + [True] * 12
    assert parts[3].endswith("-ncu-kept-long")
