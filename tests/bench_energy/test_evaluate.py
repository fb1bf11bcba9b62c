"""From a synthetic GPU's windows to fit, predictions, splits, pictures and comparison tables, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest

pytest.importorskip("matplotlib", exc_type=ImportError)

from bench_energy import evaluate
from bench_energy.held_out import HELD_OUT
from bench_energy.splits import ALL
from joulemark.cli import main
from joulemark.energy.calibrate import WINDOW_S, measure, measure_caches
from joulemark.energy.calibration import read_calibration, refit
from joulemark.energy.fit import with_loss
from joulemark.energy.plan import plan
from joulemark.energy.units import UNITS
from joulemark.energy.windows import WindowWriter
from joulemark.synthetic_gpu import Noise, SyntheticGpu

ROOT = Path(__file__).parents[2]
WINDOW = 2.3
ACTIVITY = 0.8
MOVING = {
    "wgmma_bf16": 1.2e14, "fp32": 6e11, "logic": 3e11, "shared_read": 3e12, "l1": 5e12, "l2_read": 1.6e12,
    "l2_write": 8e11, "hbm_read": 9e11, "hbm_write": 4e11, "instruction": 4e10, "fp32_operands": 0.8 * 6e11,
    "memory_access": 0.6 * (4e10 - 9e11 / 32), "l1_request": 0.12 * 5e12 / 32, "l2_request": 0.27 * 2.4e12 / 32,
}  # fmt: skip
"""Counts per second of a network at its largest batch."""
STEP_W = 9.0
"""By how much static power stood higher with the workloads than in the calibration."""


def counters_of(rates: dict[str, float]) -> dict[str, float]:
    """What hardware counters would show of counts that they see without doubt."""
    return {
        "instructions": rates["instruction"],
        "sm_active_cycles": 132 * 1.98e9,
        "pipe_fma_instructions": rates["fp32"] / 32,
        "pipe_fmaheavy_instructions": rates["fp32"] / 64,
        "pipe_alu_instructions": rates["logic"] / 32,
        "pipe_xu_instructions": 0.0,
        "pipe_tensor_cycles": rates["wgmma_bf16"] / 1024,
        "pipe_tensor_hmma_cycles": rates["wgmma_bf16"] / 1024,
        "shared_wavefronts": (rates["shared_read"] + rates["wgmma_bf16"] * 2 * (64 + 256) / (2 * 64 * 256)) / 128,
        "l1_sectors": rates["l1"] / 32,
        "l2_bytes": rates["l2_read"] + rates["l2_write"],
        "dram_read_bytes": rates["hbm_read"],
        "dram_write_bytes": rates["hbm_write"],
    }


def watts(gpu: SyntheticGpu, unit: str, rate: float) -> float:
    """Dynamic power of a unit."""
    control, datapath = (gpu.coefficients.get((unit, part), 0.0) for part in ("control", "datapath"))
    return rate * (control + ACTIVITY * datapath)


def busy(batch_size: int) -> float:
    """Share of its time that a workload keeps the GPU busy: more with every batch."""
    return 1 - 0.9 * float(np.exp(-batch_size / 16))


def row_of(gpu: SyntheticGpu, one, share: float) -> dict:
    """A workload that keeps the GPU busy for a share of the time, as the sensors and the counters see it."""
    rates = {unit: rate * share for unit, rate in MOVING.items()}
    moved = sum(watts(gpu, unit, rate) for unit, rate in rates.items() if UNITS[unit].group == "hbm")
    memory = moved + watts(gpu, "hbm_active", 1.0)
    dynamic = sum(watts(gpu, unit, rate) for unit, rate in rates.items())
    core = np.array(132 * gpu.coefficients["sm_active", "static"] + dynamic - moved)
    static = gpu.coefficients["static", "static"] + STEP_W
    power = static + memory + float(with_loss(core, gpu.coefficients["supply", "static"]))
    mix = {"fma": {"fp32": 1.0}, "shared_read": 1.0, "l2_read": 0.7}
    return {
        "workload": one.name, "kind": one.kind, "dtype": "bf16", "batch_size": one.batch_size,
        "items": None if one.batch_size is None else 4000.0 * share * WINDOW, "window_s": WINDOW,
        "measured_j": power * WINDOW, "mix": mix, "activity": ACTIVITY,
        "counters": {name: rate * WINDOW for name, rate in counters_of(rates).items()},
        "sm_clock_hz": 1.98e9, "max_sm_clock_hz": 1.98e9, "capped": False, "idle_w": static,
    }  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """What the command makes of a calibration and of all workloads on one synthetic GPU."""
    folder = tmp_path_factory.mktemp("campaign")
    gpu = SyntheticGpu(noise=Noise(drift_w=0.5, edge_s=0.002), limit_w=700.0, peak_w=380.0, seed=3)
    header = {"gpu": "NVIDIA H200", "gpu_uuid": "GPU-1", "architecture": "sm_90a", "sms": 132, "driver": "580.1"}
    windows = folder / "windows.jsonl"
    writer = WindowWriter(windows, header)
    points = plan("sm_90a", repeats=1, last="lines")
    measure(gpu, gpu.meter, points, measure_caches(gpu), writer, clock=lambda: 0.0, window_s=WINDOW_S)
    rows = [row_of(gpu, one, busy(one.batch_size or 16)) for one in ALL]
    document = {
        "schema": "joulemark/energy-measurements/1", "gpu": "NVIDIA H200", "gpu_uuid": "GPU-1", "driver": "580.1",
        "measured_utc": "2026-11-29T21:00:00+00:00", "rows": rows,
    }  # fmt: skip
    measurements = folder / "measurements.json"
    measurements.write_text(json.dumps(document))
    assert evaluate.main([str(windows), str(measurements), "--out", str(folder / "results")]) == 0
    return folder / "results"


def read(results: Path, name: str) -> dict:
    document = json.loads((results / "nvidia-h200" / f"{name}.json").read_text(), parse_constant=pytest.fail)
    schema = json.loads((ROOT / "docs" / "schema" / "energy.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    return document


def test_the_calibration_stands_beside_its_windows_and_refits_to_itself(results):
    path = results / "calibration" / "nvidia-h200.json"
    stored = read_calibration(path)
    assert refit(path.with_name("nvidia-h200-windows.jsonl")) == stored
    assert {one.unit for one in stored.coefficients} >= {"hbm_read", "l2_read", "l1", "wgmma_bf16"}


def test_workloads_are_predicted(results):
    summary = read(results, "validation")["summary"]
    assert summary["uncapped"]["n"] == len(HELD_OUT)
    assert summary["uncapped"]["mean_absolute"] < 0.02
    assert summary["uncapped_dynamic"]["mean_absolute"] < 0.04
    assert all(one["mean_absolute"] > 0.04 for one in summary["baselines"].values())


def test_shares_sum_to_one_inside_their_intervals(results):
    document = read(results, "energy-split")
    for row in document["rows"]:
        split = row["split"]
        shares = {group: sum(parts.values()) / split["measured_j"] for group, parts in split["parts"].items()}
        shares["residual"] = split["residual_share"]
        assert sum(shares.values()) == pytest.approx(1.0)
        assert set(split["share_intervals"]) == set(shares)
        for name, (low, high) in split["share_intervals"].items():
            assert low - 0.02 <= shares[name] <= high + 0.02
        low, high = split["movement_interval"]
        assert low <= split["movement_share"] <= high
        assert split["path_interval"][0] < split["path_share"] < split["path_interval"][1]


def test_the_true_share_of_data_movement_lies_in_its_interval(results):
    gpu = SyntheticGpu()
    for row in read(results, "energy-split")["rows"]:
        rates = {unit: rate * busy(row["batch_size"]) for unit, rate in MOVING.items()} | {"hbm_active": 1.0}
        energy = {unit: watts(gpu, unit, rate) for unit, rate in rates.items()}
        moved = sum(joules for unit, joules in energy.items() if UNITS[unit].group in ("shared", "l1", "l2", "hbm"))
        low, high = row["split"]["movement_interval"]
        assert low < moved / sum(energy.values()) < high


def test_energy_and_throughput_reach_their_plateaus(results):
    (bf16,) = [one for one in read(results, "energy-split")["series"] if one["series"] == "resnet50-train-bf16"]
    assert [cell["batch_size"] for cell in bf16["cells"]] == [8, 16, 32, 64, 128, 256]
    per_item = [cell["energy_per_item_j"] for cell in bf16["cells"]]
    assert per_item == sorted(per_item, reverse=True)
    assert bf16["throughput_plateau"]["verdict"] == bf16["energy_plateau"]["verdict"] == "plateau"
    assert bf16["energy_plateau"]["knee"] < bf16["throughput_plateau"]["knee"]  # static power alone stops paying


def test_pictures_are_drawn_without_dates(results):
    for name in ("validation", "energy-split"):
        text = (results / "nvidia-h200" / f"{name}.svg").read_text()
        assert text.count("<path") > 50
        assert "dc:date" not in text


def test_shares_of_two_runs_stand_side_by_side(results, tmp_path, capsys):
    document = read(results, "energy-split")
    later = tmp_path / "later.json"
    later.write_text(json.dumps({**document, "driver": "590.2", "measured_utc": "2026-12-01T00:00:00+00:00"}))
    first = results / "nvidia-h200" / "energy-split.json"
    assert main(["report", "--shares", str(first), str(later), "--format", "markdown"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| resnet50-train-bf16-b64 ")]
    assert ["580.1" in line for line in lines] == [True, False]
    assert all(line.count("[") == 11 for line in lines)  # ten groups and the residual, each with its interval
    later.write_text(first.read_text())  # one measurement, split again: files tell the rows apart
    assert main(["report", "--shares", str(first), str(later), "--format", "markdown"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| resnet50-train-bf16-b64 ")]
    assert [sum(path.name in line for line in lines) for path in (first, later)] == [1, 1]
    later.write_text(json.dumps({**document, "rows": document["rows"][:1] * 2}))
    assert main(["report", "--shares", str(later)]) == 2
    assert "stands twice" in capsys.readouterr().err
    assert main(["report", "--shares", str(results / "calibration" / "nvidia-h200.json")]) == 2
    assert "holds no split of energy" in capsys.readouterr().err
    assert main(["report", "--shares", str(first), "--format", "csv"]) == 2


def test_the_command_draws_and_writes(results, tmp_path, capsys):
    document, calibration = (results / one for one in ("nvidia-h200/energy-split.json", "calibration/nvidia-h200.json"))
    out, plot = tmp_path / "again.json", tmp_path / "split.svg"
    fixed = ["energy", str(document), "--calibration", str(calibration)]
    assert main([*fixed, "--out", str(out), "--plot", str(plot)]) == 0
    assert json.loads(out.read_text())["rows"] == json.loads(document.read_text())["rows"]
    assert plot.read_text().startswith("<?xml")
    capsys.readouterr()
    assert main(fixed) == 0
    said = capsys.readouterr().out
    assert "largest residual" in said
    assert "resnet50-train-bf16, energy: plateau from" in said
    assert main(["energy", "--calibration", str(calibration), "--plot", str(plot)]) == 2
    assert "name a FILE" in capsys.readouterr().err
