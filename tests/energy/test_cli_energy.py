"""The commands `calibrate` and `energy`, on simulated GPUs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import jsonschema
import pytest

from joulemark.cli import main
from joulemark.energy.calibrate import Progress
from joulemark.energy.counters import Counts, Range
from joulemark.energy.plan import plan
from joulemark.synthetic_gpu import SyntheticGpu

ROOT = Path(__file__).parents[2]
UUID = "GPU-00000000-0000-4000-8000-000000000000"


def validate(text: str, schema: str):
    document = json.loads(text, parse_constant=pytest.fail)
    description = json.loads((ROOT / "docs" / "schema" / f"{schema}.schema.json").read_text())
    jsonschema.Draft202012Validator(description).validate(document)
    return document


def run(capsys, *args):
    code = main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def synthetic_machine(tmp_path, monkeypatch):
    """A machine with one synthetic GPU, seen by NVML and by CUDA alike."""
    scenario = {
        "gpus": [
            {"name": "Synthetic GPU", "uuid": UUID, "pci": "00000000:1B:00.0", "power_mw": 120000, "limit_mw": 700000}
        ]
    }
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps(scenario))
    monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    gpu = SyntheticGpu(seed=11, limit_w=420.0, peak_w=400.0)

    class Engine(SyntheticGpu):
        def __enter__(self):
            return gpu

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("joulemark.energy.cuda_engine.CudaEngine", lambda *_: Engine())
    monkeypatch.setattr("joulemark.energy.calibrate.SampledMeter", lambda _: gpu.meter)
    return gpu


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return synthetic_machine(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def calibration_folder(tmp_path_factory):
    """What the command wrote, once for all tests that only need it to be there."""
    folder = tmp_path_factory.mktemp("calibrated")
    with pytest.MonkeyPatch.context() as patch:
        synthetic_machine(folder, patch)
        assert main(["calibrate", "--quick"]) == 0
    return folder / "results"


@pytest.fixture
def calibrated(machine, calibration_folder):
    shutil.copytree(calibration_folder, "results")
    return Path("results/calibration/synthetic-gpu-quick.json")


def test_quick_calibrates_writes_and_shows(machine, capsys):
    code, out, err = run(capsys, "calibrate", "--quick")
    assert code == 0
    document = validate(Path("results/calibration/synthetic-gpu-quick.json").read_text(), "calibration")
    assert document["gpu"]["power_limit_w"] == 700
    assert document["caches"]["l2"]["fits_bytes"] > 30 << 20
    assert len(document["windows"]) == 138
    assert document["source"]["file"] == "synthetic-gpu-quick-windows.jsonl"
    assert "HBM read" in out
    assert "R² of dynamic power" in out
    assert "wrote results/calibration/synthetic-gpu-quick.json" in err
    assert "fp32/random/full/0:" in err


def test_time_that_is_up_is_gone_on_with(machine, capsys, monkeypatch):
    ticks = iter(range(0, 10**7, 20))
    monkeypatch.setattr("joulemark.energy.calibrate.time.perf_counter", lambda: float(next(ticks)))
    from joulemark.energy import calibrate

    original = calibrate.measure
    monkeypatch.setattr(
        "joulemark.energy.calibrate.measure",
        lambda *args, **kwargs: original(*args, clock=lambda: float(next(ticks)), **kwargs),
    )
    code, _, err = run(capsys, "calibrate", "--quick", "--limit", "300")
    assert code == 3
    assert "run the same command with --resume" in err
    assert "no fit yet" in err
    assert not Path("results/calibration/synthetic-gpu-quick.json").exists()
    assert run(capsys, "calibrate", "--quick")[0] == 2  # nothing is overwritten
    assert run(capsys, "calibrate", "--quick", "--resume", "--limit", "100000")[0] == 0
    assert Path("results/calibration/synthetic-gpu-quick.json").exists()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [(("--until", "lines"), {"repeats": 1, "last": "lines"}), (("--repeats", "3"), {"repeats": 3, "last": "further"})],
)
def test_a_plan_ends_where_it_is_told_to(machine, capsys, monkeypatch, arguments, wanted):
    seen = []

    def measured(engine, meter, points, *_, **__):
        seen.append(points)
        return Progress(0, len(points))

    monkeypatch.setattr("joulemark.energy.calibrate.measure", measured)
    code, _, err = run(capsys, "calibrate", *arguments)
    assert code == 3
    assert seen == [plan("sm_90a", **wanted)]
    assert f"{len(seen[0])} more to measure" in err


def test_a_refit_needs_no_gpu_and_gives_the_same(calibrated, capsys, monkeypatch):
    monkeypatch.delenv("JOULEMARK_FAKE_GPUS")
    windows = calibrated.with_name("synthetic-gpu-quick-windows.jsonl")
    code, out, _ = run(capsys, "calibrate", "--refit", windows, "--json")
    assert code == 0
    assert validate(out, "calibration") == json.loads(calibrated.read_text())


def test_without_a_gpu_calibrate_says_so(capsys, monkeypatch, tmp_path):
    path = tmp_path / "none.json"
    path.write_text('{"gpus": []}')
    monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(path))
    code, out, err = run(capsys, "calibrate", "--quick")
    assert (code, out) == (2, "")
    assert "no GPU is visible" in err


def test_a_gpu_that_cuda_does_not_reach(capsys, monkeypatch, tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"gpus": [{"name": "NVIDIA H200", "uuid": UUID, "pci": "0", "power_mw": 1000}]}))
    monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code, _, err = run(capsys, "calibrate", "--quick", "--out", tmp_path / "c.json")
    assert code == 2
    assert "CUDA does not answer" in err or "no microbenchmark can run" in err
    assert not list(tmp_path.glob("c*"))


@pytest.fixture
def measured(tmp_path):
    counters = {
        "instructions": 1e12, "sm_active_cycles": 132 * 1.9e9, "pipe_fma_instructions": 1e11,
        "pipe_alu_instructions": 1e11, "pipe_xu_instructions": 1e9, "pipe_tensor_cycles": 1e11,
        "pipe_tensor_hmma_cycles": 1e11, "shared_wavefronts": 1e10, "l1_sectors": 3e10, "l2_bytes": 2e12,
        "dram_read_bytes": 8e11, "dram_write_bytes": 3e11,
    }  # fmt: skip
    row = {
        "workload": "resnet50 <b>\x1b[31m", "kind": "network", "dtype": "bf16", "batch_size": 64, "window_s": 1.0,
        "measured_j": 420.0, "counters": counters, "sm_clock_hz": 1.98e9, "max_sm_clock_hz": 1.98e9,
    }  # fmt: skip
    document = {"schema": "joulemark/energy-measurements/1", "gpu": "Synthetic GPU", "gpu_uuid": UUID, "rows": [row]}
    validate(json.dumps(document), "energy-measurements")
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(document))
    return path


def test_energy_predicts_splits_and_asks_what_if(calibrated, measured, capsys):
    arguments = ("energy", measured, "--calibration", calibrated, "--scale", "hbm=0.5")
    code, out, _ = run(capsys, *arguments, "--published", ROOT / "results" / "published", "--json")
    assert code == 0
    document = validate(out, "energy")
    (row,) = document["rows"]
    assert row["split"]["parts"]["hbm"]["control"] > 0
    assert document["what_if"][0]["new_energy_j"] < document["what_if"][0]["energy_j"]
    assert len(document["trends"]) == 9
    code, out, _ = run(capsys, *arguments, "--published", ROOT / "results" / "published")
    assert code == 0
    assert "where the joules went" in out
    assert "\x1b" not in out
    assert "SC'25" in out
    code, out, _ = run(capsys, *arguments, "--format", "markdown")
    assert code == 0
    assert "<b>" not in out


def test_a_what_if_begins_at_the_prediction_of_its_row(calibrated, measured, capsys):
    """Static power weighed before the work is in both, and so is the power limit that held the clocks down."""
    law = {"beta": 0.9, "interval": [0.8, 1.0], "curvature": 0.0, "covariance": None, "reason": None}
    document = json.loads(calibrated.read_text())
    document["frequency_law"] |= law
    calibrated.write_text(json.dumps(document))
    rows = json.loads(measured.read_text())
    weighed = rows["rows"][0] | {"idle_w": 140.0}
    held = weighed | {"workload": "held", "capped": True, "power_limit_w": 250.0, "sm_clock_hz": 1.2e9}
    measured.write_text(json.dumps(rows | {"rows": [weighed, held]}))
    code, out, _ = run(capsys, "energy", measured, "--calibration", calibrated, "--scale", "hbm=0.5", "--json")
    assert code == 0
    document = validate(out, "energy")
    predicted = [row["predicted_j"] for row in document["rows"]]
    assert [row["energy_j"] for row in document["what_if"]] == pytest.approx(predicted)
    assert document["what_if"][1]["slowdown"] < 1  # what costs less is held down less


def test_a_narrow_terminal_has_the_largest_part_and_the_error(calibrated, measured, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, "energy", measured, "--calibration", calibrated, "--json")
    assert code == 0
    (row,) = json.loads(out)["rows"]
    spent = {name: sum(part.values()) for name, part in row["split"]["parts"].items()}
    largest = max(spent, key=lambda one: spent[one])
    code, out, _ = run(capsys, "energy", measured, "--calibration", calibrated)
    split, predicted = out.split("\n\n")[:2]
    assert split.startswith("where the joules went")
    assert f"{largest} {100 * spent[largest] / row['measured_j']:.0f} %" in split
    assert f"{row['error']:+.1%}" in predicted


def test_a_power_cap_without_a_law_says_why(calibrated, measured, capsys):
    """At two duties and one repeat, few windows meet the limit."""
    document = json.loads(calibrated.read_text())
    document["frequency_law"] |= {"beta": None, "interval": None, "reason": "0 capped windows"}
    calibrated.write_text(json.dumps(document))
    code, out, _ = run(capsys, "energy", measured, "--calibration", calibrated, "--power-cap", "150", "--json")
    assert code == 0
    (row,) = validate(out, "energy")["what_if"]
    assert row["new_energy_j"] is None
    assert "0 capped windows" in row["reason"]


def test_the_calibration_alone(calibrated, capsys):
    code, out, _ = run(capsys, "energy", "--calibration", calibrated)
    assert code == 0
    assert "energies of Synthetic GPU (quick)" in out
    code, out, _ = run(capsys, "energy", "--calibration", calibrated, "--json")
    assert validate(out, "energy")["rows"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--scale", "warp=2"), "give NAME=FACTOR"),
        (("--scale", "hbm=1e308"), "give NAME=FACTOR"),
        (("--power-cap", "-5"), "give watts"),
        (("--published", "PUBLISHED"), "holds no published energies"),
    ],
)
def test_wrong_use_is_one_clear_line(calibrated, measured, capsys, tmp_path, arguments, words):
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "x.json").write_text("{}")
    given = [folder if one == "PUBLISHED" else one for one in arguments]
    code, out, err = run(capsys, "energy", measured, "--calibration", calibrated, *given)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"sm_clock_hz": "fast"},
        {"max_sm_clock_hz": [[]]},
        {"activity": "high"},
        {"batch_size": "8"},
        {"window_s": 1e308},
        {"window_s": 5e-324},
        {"measured_j": 0},
        {"measured_j": -1},
        {"counters": []},
        {"counters": {"l1_sectors": 1e300}},
        {"counters": {"l1_sectors": None}},
        {"mix": {"l2_read": 1e308}},
        {"workload": 3},
        {"core_share": 2},
    ],
    ids=str,
)
def test_a_row_that_cannot_be_is_refused(calibrated, measured, capsys, change):
    document = json.loads(measured.read_text())
    document["rows"][0] |= change
    measured.write_text(json.dumps(document))
    code, out, err = run(capsys, "energy", measured, "--calibration", calibrated)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [("--scale", "hbm=0.5"), ("--power-cap", "300"), ("--published", "nowhere")])
def test_questions_without_what_they_are_about(calibrated, capsys, arguments):
    code, out, err = run(capsys, "energy", "--calibration", calibrated, *arguments)
    assert (code, out) == (2, "")
    assert arguments[0] in err


def test_a_calibration_replaces_nothing_but_a_calibration(calibrated, capsys, tmp_path):
    windows = calibrated.with_name(f"{calibrated.stem}-windows.jsonl")
    other = tmp_path / "tandem.json"
    other.write_text('{"schema": "joulemark/tandem/1"}')
    for place in (windows, other, tmp_path):
        kept = place.read_bytes() if place.is_file() else None
        code, out, err = run(capsys, "calibrate", "--refit", windows, "--out", place)
        assert (code, out) == (2, "")
        assert str(place) in err
        assert kept is None or place.read_bytes() == kept
    assert run(capsys, "calibrate", "--refit", windows, "--out", calibrated)[0] == 0


def test_files_that_cannot_be_read(calibrated, measured, capsys, tmp_path):
    assert run(capsys, "energy", measured, "--calibration", tmp_path / "none.json")[0] == 2
    assert run(capsys, "energy", tmp_path / "none.json", "--calibration", calibrated)[0] == 2
    assert run(capsys, "energy", calibrated, "--calibration", calibrated)[0] == 2
    assert run(capsys, "calibrate", "--refit", measured)[0] == 2
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    assert run(capsys, "energy", measured, "--calibration", deep)[0] == 2
    assert run(capsys, "energy", deep, "--calibration", calibrated)[0] == 2
    assert run(capsys, "energy", "--calibration", calibrated, "--published", tmp_path)[0] == 2
    assert run(capsys, "calibrate", "--refit", deep)[0] == 2
    for wrong in (("--repeats", "0"), ("--limit", "-1"), ("--window", "0.1"), ("--window", "nan")):
        code, out, err = run(capsys, "calibrate", *wrong)
        assert (code, out) == (2, "")
        assert wrong[0] in err


def test_shorter_windows(machine, capsys):
    assert run(capsys, "calibrate", "--quick", "--window", "1.2")[0] == 0
    document = json.loads(Path("results/calibration/synthetic-gpu-quick.json").read_text())
    assert document["gpu"]["window_s"] == 1.2
    assert {10, 11, 12} >= {row["updates"] for row in document["windows"]}


def test_counting_comes_before_windows_too(machine, capsys, counted):
    code, _, err = run(capsys, "calibrate", "--quick", "--count")
    assert code == 3
    assert "no fit yet" in err
    assert run(capsys, "calibrate", "--quick", "--resume")[0] == 0
    document = json.loads(Path("results/calibration/synthetic-gpu-quick.json").read_text())
    assert document["factors"]["fp32"]["instructions"] > 0


def test_a_kernel_that_fails_costs_itself_only(machine, capsys, monkeypatch):
    loaded = machine.load

    def load(benchmark, operands, tiles):
        if benchmark.name == "fp64_tile":
            raise RuntimeError("illegal address")
        loaded(benchmark, operands, tiles)

    monkeypatch.setattr(machine, "load", load)
    code, _, err = run(capsys, "calibrate", "--quick")
    assert code == 4
    assert "fp64_tile failed: illegal address" in err
    assert run(capsys, "calibrate", "--quick", "--resume")[0] == 0
    document = validate(Path("results/calibration/synthetic-gpu-quick.json").read_text(), "calibration")
    assert any(note.startswith("fp64_tile did not run") for note in document["notes"])
    assert "fp64" in {one["unit"] for one in document["coefficients"]}


def test_counting_says_what_it_lacks(machine, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "joulemark.collect.counters", None)
    code, _, err = run(capsys, "calibrate", "--quick", "--count")
    assert code == 2
    assert "leave --count out" in err


@pytest.fixture
def counted(monkeypatch):
    """Hardware counters that always count 500 instructions per launch."""

    class Series:
        units: ClassVar = {"instructions": "inst"}

        def total(self, name):
            return 40 * 500.0

    class Source:
        groups = ("all",)

        def record(self, group, run, expected_s):
            run()
            return Series()

    class Ladder:
        source = Source()
        refused: ClassVar = {}

        def close(self):
            pass

    fake = SimpleNamespace(open_counters=lambda uuid, device, memory_requests: Ladder())
    monkeypatch.setitem(sys.modules, "joulemark.collect.counters", fake)


def test_counting_writes_factors(machine, calibrated, capsys, counted):
    assert run(capsys, "calibrate", "--quick", "--resume", "--count")[0] == 0
    factors = json.loads(calibrated.read_text())["factors"]
    assert len(factors) >= 20
    assert factors["fp32"]["instructions"] > 0
    assert run(capsys, "calibrate", "--quick", "--resume")[0] == 0
    assert json.loads(calibrated.read_text())["factors"] == factors


def test_published_energies_are_valid():
    for path in (ROOT / "results" / "published").glob("*.json"):
        validate(path.read_text(), "published-energies")


def test_counts_hold_ranges():
    assert Counts({"fp32": Range.exact(1.0)}).notes == ()


def test_caches_whose_ends_do_not_show_cost_no_calibration(machine, capsys):
    machine.chase = lambda size: 300.0
    code, _, err = run(capsys, "calibrate", "--quick")
    assert code == 0
    assert "no end of the L1" in err
    document = validate(Path("results/calibration/synthetic-gpu-quick.json").read_text(), "calibration")
    assert document["caches"] is None
    header = json.loads(Path("results/calibration/synthetic-gpu-quick-windows.jsonl").read_text().splitlines()[0])
    assert len(header["chase"]) > 20
    assert run(capsys, "calibrate", "--quick", "--resume")[0] == 0


@pytest.mark.parametrize("columns", ["50", "60", "72", "100"])
def test_intervals_are_whole_or_not_there_in_a_narrow_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    stored = ROOT / "results" / "calibration" / "nvidia-h200.json"
    code, out, _ = run(capsys, "energy", "--calibration", stored)
    table = out.partition("\n\n")[0]
    assert code == 0
    assert all("…" not in line[22:] for line in table.splitlines())  # names may be cut, figures never
    head, _, rows = table.partition("---")
    assert ("interval" in head) == (" W to " in rows)
