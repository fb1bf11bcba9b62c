"""What is committed of calibrations and validations is valid, and recomputes itself from what stands beside it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from joulemark.energy import validation
from joulemark.energy.baselines import BASELINES, least_relative
from joulemark.energy.calibration import read_calibration, refit
from joulemark.energy.trends import QUANTITIES
from joulemark.energy.units import UNITS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
CALIBRATIONS = sorted(RESULTS.glob("calibration/*.json"))
PREDICTIONS = sorted([*RESULTS.glob("nvidia-*/validation.json"), *RESULTS.glob("nvidia-*/energy-split.json")])


def check(path: Path, schema: str):
    document = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    description = json.loads((ROOT / "docs" / "schema" / f"{schema}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(description).validate(document)
    return document


@pytest.mark.parametrize("path", CALIBRATIONS, ids=lambda path: path.name)
def test_a_calibration_is_valid_and_refits_from_its_raw_windows(path):
    check(path, "calibration")
    stored = read_calibration(path)
    again = refit(path.with_name(str(stored.source["file"])))
    assert again.source == stored.source
    for one, other in zip(again.coefficients, stored.coefficients, strict=True):
        assert (one.unit, one.part) == (other.unit, other.part)
        assert one.value == pytest.approx(other.value, rel=1e-6, abs=1e-18)
        assert one.interval == pytest.approx(other.interval, rel=1e-3, abs=1e-18)


@pytest.mark.parametrize("path", PREDICTIONS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_predictions_recompute_from_their_counters(path):
    stored = check(path, "energy")
    calibration = read_calibration(RESULTS / "calibration" / f"{path.parent.name}.json")
    _, rows = validation.read_measurements(path)
    for outcome, row in zip(validation.evaluate(calibration, rows), stored["rows"], strict=True):
        assert outcome.to_json()["predicted_j"] == pytest.approx(row["predicted_j"], rel=1e-6)


def test_no_simple_model_fitted_to_the_held_out_workloads_themselves_errs_by_less_than_twice_ours():
    calibration = read_calibration(RESULTS / "calibration" / "nvidia-h200.json")
    document, rows = validation.read_measurements(RESULTS / "nvidia-h200" / "validation.json")
    known = [one for one in validation.evaluate(calibration, rows) if not one.measured.capped]
    power = np.array([one.measured.measured_j / one.measured.window_s for one in known])
    rates = [{unit: n.value / one.measured.window_s for unit, n in one.counts.values.items()} for one in known]
    errors = []
    for features in BASELINES.values():
        design = np.array([[1.0, *features(row, calibration)] for row in rates])
        errors.append(np.abs(design @ least_relative(design, power) / power - 1).mean())
    assert min(errors) == pytest.approx(0.122, abs=0.001)
    assert min(errors) > 2 * document["summary"]["uncapped"]["mean_absolute"]


@pytest.mark.parametrize(
    ("workload", "flop", "ratio"),
    [
        ("gemm-bf16-2048", 2 * 2048**3, 1.0),
        ("gemm-fp16-4096", 2 * 4096**3, 1.0),
        ("gemm-tf32-4096", 2 * 4096**3, 1.0),
        ("gemm-fp64-4096", 2 * 4096**3, 0.5),
        ("gemm-fp64-512", 4 * 512**3, 0.5),
        ("gemm-int8-4096", 2 * 4096**3, 1.5),
    ],
)
def test_flop_of_products_as_the_cycles_of_tensor_pipes_count_them(workload, flop, ratio):
    """Not 1 where a library's instruction has another rate than the kernel by which cycles are counted."""
    calibration = read_calibration(RESULTS / "calibration" / "nvidia-h200.json")
    document, rows = validation.read_measurements(RESULTS / "nvidia-h200" / "energy-measurements.json")
    (steps,) = (row["steps"] for row in document["rows"] if row["workload"] == workload)
    (outcome,) = validation.evaluate(calibration, [row for row in rows if row.workload == workload])
    counted = sum(n.value for unit, n in outcome.counts.values.items() if UNITS[unit].group == "tensor")
    assert counted / (steps * flop) == pytest.approx(ratio, rel=1e-3)


def test_the_schema_of_published_energies_knows_the_same_quantities():
    schema = json.loads((ROOT / "docs" / "schema" / "published-energies.schema.json").read_text(encoding="utf-8"))
    assert schema["properties"]["rows"]["items"]["properties"]["quantity"]["enum"] == list(QUANTITIES)
