"""What is committed under results/ is what the schemas say, and what the reader reads."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from joulemark.store import read_run

ROOT = Path(__file__).parents[1]
RUNS = sorted((ROOT / "results").glob("nvidia-*/*-*Z-*.jsonl"))
TRIALS = sorted((ROOT / "results").glob("nvidia-*/aa.json"))


def test_there_are_runs_on_real_gpus():
    assert RUNS


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_line_of_a_committed_run_is_valid(path):
    schema = json.loads((ROOT / "docs" / "schema" / "sweep.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    for line in path.read_text(encoding="utf-8").splitlines():
        validator.validate(json.loads(line))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_a_committed_run_is_complete_and_real(path):
    run = read_run(path)
    assert run.completed
    assert not run.problems
    assert run.wall_s is not None
    assert run.measured_s is not None
    assert 0 < run.measured_s < run.wall_s
    facts = next(iter(run.environments.values())).facts
    assert not facts["simulated"]
    uuids = {gpu["uuid"] for gpu in facts["gpus"]}
    assert {record.gpu_uuid for record in run.records} <= uuids


def test_committed_trials_of_the_gate_are_valid_and_their_sources_are_there():
    schema = json.loads((ROOT / "docs" / "schema" / "aa.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    for path in TRIALS:
        trials = json.loads(path.read_text(encoding="utf-8"))
        jsonschema.Draft202012Validator(schema).validate(trials)
        assert all((ROOT / source).exists() for source in trials["sources"])
