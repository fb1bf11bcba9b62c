"""Records survive the way to a file and back, and cases keep their identity."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulemark.records import (
    OUTCOMES,
    Case,
    Conditions,
    Environment,
    Finding,
    Measurement,
    Record,
    Value,
    canonical_json,
    digest,
)

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
CASES = st.builds(
    Case,
    st.text(min_size=1),
    st.sampled_from([None, "train"]),
    st.sampled_from([None, "eager"]),
    st.sampled_from([None, "bf16"]),
    st.one_of(st.none(), st.integers(1, 4096)),
    params=st.dictionaries(st.text(), SCALARS, max_size=4),
)


def through_json(value):
    return json.loads(json.dumps(value, allow_nan=False))


@given(CASES)
def test_a_case_keeps_its_id_through_json(case):
    back = Case.from_json(through_json(case.to_json()))
    assert back == case
    assert back.case_id == case.case_id


@given(CASES, CASES)
def test_unequal_cases_have_unequal_ids(one, other):
    assert (canonical_json(one.to_json()) == canonical_json(other.to_json())) == (one.case_id == other.case_id)


def test_an_id_that_was_read_once_is_no_part_of_the_case():
    case = Case("f", params={"a": 1})
    before = case.to_json()
    assert digest(before) == case.case_id
    assert case.to_json() == before


def test_the_order_of_parameters_does_not_matter():
    assert Case("f", params={"a": 1, "b": 2}).case_id == Case("f", params={"b": 2, "a": 1}).case_id
    assert Case("f", params={"a": 1}).case_id != Case("f", params={"a": True}).case_id


def test_labels_and_series():
    case = Case("resnet50", "train", "eager", "bf16", 32, "channels_last", "pinned", "nvidia-h200", 2, {"k": "v"})
    assert case.label == "resnet50-train-bf16-eager-b32-channels_last-pinned-x2-k=v-nvidia-h200"
    assert Case("f", layout="contiguous", input="device").label == "f-cpu"
    assert case.series.batch_size is None
    assert case.series.case_id == Case.from_json({**case.to_json(), "batch_size": 64}).series.case_id


@given(st.text())
def test_a_digest_takes_any_text(text):
    assert len(digest({"name": text})) == 16


def test_a_digest_takes_half_a_surrogate_pair():
    assert len(digest({"name": "\ud800"})) == 16


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_no_record_holds_a_number_that_json_does_not_know(number):
    with pytest.raises(ValueError, match="finite"):
        Value(number, "s")
    with pytest.raises(ValueError, match="finite"):
        Value(1.0, "s", (0.0, number))
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(number)


FULL = Record(
    Case("resnet50", "inference", "eager", "bf16", 8, params={"deep": True}),
    "run",
    "flagged",
    "environment",
    "a reason",
    "GPU-1",
    "bench_a.py::bench_x[8]",
    {"host_time_s": Value(0.001, "s", (0.0009, 0.0011), 0.95, 30, "host_clock"), "power_w": Value(None, "W")},
    {"host_time_s": [0.001, 0.0011]},
    {"power_w": "no sensor"},
    (Finding("unstable", "it varies", "stop it", True),),
    Conditions(1.9e9, 3.2e9, 1.98e9, 60.0, {"power_cap": 0.5}, 10),
    (1.0, 2.0),
    ((1.1, 1.5), (1.6, 1.9)),
    ({"host_time_s": 0.001},),
    sample_counts={"host_time_s": (2,)},
    rank_gpu_uuids=("GPU-1", "GPU-2"),
)


def test_a_full_record_survives():
    data = through_json(FULL.to_json())
    assert Record.from_json(data) == FULL
    assert data["case_id"] == FULL.case_id
    assert data["metrics"]["power_w"]["value"] is None
    assert (FULL.value("host_time_s"), FULL.value("power_w"), FULL.value("unknown")) == (0.001, None, None)


def test_an_empty_record_survives_and_newer_fields_are_passed_over():
    record = Record(Case("f"), "run", "oom", "environment")
    data = through_json(record.to_json())
    data["case"]["colour"] = "red"
    data["of_the_future"] = 1
    assert Record.from_json(data) == record


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_every_outcome_survives(outcome):
    record = Record(Case("f"), "run", outcome, "environment")
    assert Record.from_json(through_json(record.to_json())).outcome == outcome


def test_a_measurement_survives():
    measurement = Measurement(
        "latency", FULL.metrics, FULL.samples, {"x": "y"}, FULL.findings, FULL.conditions, ((1.0, 2.0),), 2
    )
    assert Measurement.from_json(through_json(measurement.to_json())) == measurement
    assert Measurement.from_json({"name": "plan"}) == Measurement("plan")


def test_an_environment_survives_and_its_notes_do_not_change_its_id():
    one = Environment({"driver": "550.90"}, {"energy": None}, {"energy": "no counter"})
    assert Environment.from_json(through_json(one.to_json("run", 1.5))) == one
    assert one.environment_id == Environment({"driver": "550.90"}, {"energy": None}).environment_id
    assert one.environment_id != Environment({"driver": "550.900"}, {"energy": None}).environment_id


def test_small_tables_survive_the_way_to_a_file_and_an_older_file_has_none():
    rows = [{"class": "gemm", "uses_tensor_cores": None, "time_s": 0.5, "launches": 3}]
    measurement = Measurement("counters", tables={"kernel_classes": rows})
    assert Measurement.from_json(through_json(measurement.to_json())) == measurement
    record = Record(Case("f"), "r", "ok", "e", tables={"kernel_classes": rows})
    data = through_json(record.to_json())
    assert Record.from_json(data) == record
    del data["tables"]
    assert Record.from_json(data).tables == {}
