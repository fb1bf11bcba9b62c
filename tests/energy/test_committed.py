"""What is committed of calibrations and validations is valid, and recomputes itself from what stands beside it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from joulemark.energy import validation
from joulemark.energy.calibration import read_calibration, refit
from joulemark.energy.trends import QUANTITIES

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


def test_the_schema_of_published_energies_knows_the_same_quantities():
    schema = json.loads((ROOT / "docs" / "schema" / "published-energies.schema.json").read_text(encoding="utf-8"))
    assert schema["properties"]["rows"]["items"]["properties"]["quantity"]["enum"] == list(QUANTITIES)
