"""The index's own reader: what it reads it reads as the store does, and it reads nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from joulemark.errors import UnreadableInput
from joulemark.history.index import _lean
from joulemark.history.lean import LeanReader
from joulemark.records import Case, Environment, Finding, Record, Value
from joulemark.store import RunWriter, read_run

RESULTS = sorted(Path(__file__).parents[2].glob("results/*/*-2*.jsonl"))
STORED = sorted((Path(__file__).parents[1] / "data" / "runs").rglob("*.json*"))


def careful(path):
    try:
        return _lean(read_run(path))
    except UnreadableInput:
        return None


def same(path):
    """Whether the lean reader read the file; where it did, exactly what the store's reader makes of it."""
    found = LeanReader().read(path)
    if found is not None:
        expected = careful(path)
        assert found == expected
        assert [one.case.case_id for one in found.records] == [one.case.case_id for one in expected.records]
    return found is not None


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_committed_results_need_no_other_reader(path):
    assert same(path)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_files_of_other_kinds_are_read_alike_or_left(path):
    same(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file of two records with something in every field, one of them measured again."""
    path = tmp_path_factory.mktemp("lean") / "run.jsonl"
    environment = Environment({"driver": "580.65.06"})
    value = Value(0.25, "s", (0.2, 0.3), n=3)
    record = Record(
        Case("lenet5", batch_size=4, params={"p": 1, "q": "ü"}), "ab" * 16, "ok", environment.environment_id,
        metrics={"device_time_s": value, "power_w": Value(None, "W")}, samples={"device_time_s": [0.2, 0.25, 0.3]},
        notes={"power_w": "off"}, findings=(Finding("unstable", "varies"),), processes=({"device_time_s": 0.25},),
        tables={
            "kernels": [{"name": "gemm", "class": "gemm", "uses_tensor_cores": True, "time_s": 0.1}], "own": [{"a": 1}]
        },
        sample_counts={"device_time_s": (3,)},
        measured_windows_utc=((1.0, 2.0),), window_utc=(0.0, 3.0), gpu_uuid="GPU-1",
    )  # fmt: skip
    with RunWriter(path, "ab" * 16, environment, 1.7e9) as out:
        out.write(record)
        out.write(Record(Case("vgg16"), "ab" * 16, "flagged", environment.environment_id))
        out.write(record)
        out.end(completed=True, wall_s=1.0, measured_s=0.5)
    return path


def test_a_case_that_was_measured_again_counts_by_its_last_line(whole):
    assert same(whole)
    assert [one.case.workload for one in LeanReader().read(whole).records] == ["vgg16", "lenet5"]
    (_, again) = LeanReader().read(whole).records
    assert again.figures == {"device_time_s": 0.25}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"outcome":"ok"', '"outcome":"good"'),
        ('"value":0.25', '"value":"0.25"'),
        ('"value":0.25', '"value":1e999'),
        ('"value":0.25', '"value":NaN'),
        ('"n":3', '"n":-3'),
        ('"n":3', '"n":3.0'),
        ('"samples":{', '"samples":{"x":["y"],'),
        ('"batch_size":4', '"batch_size":0'),
        ('"batch_size":4', '"batch_size":4,"size":5'),
        ('"nodeid":null', '"nodeid":null,"newer":1'),
        ('"nodeid":null', '"nodeid":7'),
        ("joulemark/sweep/1", "joulemark/sweep/2"),
        ("joulemark/sweep/1", "joulemark/sweep/1\\n"),
        ('"kind":"record"', '"kind":"note"'),
        ('"run_id":"abab', '"run_id":7,"x":"abab'),
        ('"confidence":0.95', '"confidence":95'),
        ("\n", "\nnot JSON\n"),
        ("\n", "\r\n"),
        ("\n", "\n\n"),
        ('"name":"gemm"', '"name":"\\ud800"'),
        ('"name":"gemm"', '"name":"a\tb"'),
        ('"message":"varies"', '"message":5'),
        ('"value":0.25', '"value":25e-2'),
        ('"value":0.25', '"value":1'),
        ('"value":0.25', '"value":123456789012345678901234567890'),
        ('"value":0.25', '"value":true'),
        ('"value":0.25', '"value":1e-300'),
        ('"value":0.25', '"value":1e12'),
        ('"samples":{"device_time_s":[0.2', '"samples":{"device_time_s":[1e-13'),
        ('"processes":[{"device_time_s":0.25', '"processes":[{"device_time_s":2e9'),
    ],
)
def test_a_changed_line_is_read_alike_or_left(whole, tmp_path, old, new):
    text = whole.read_text("utf-8")
    assert old in text
    changed = tmp_path / "changed.jsonl"
    changed.write_text(text.replace(old, new, 1), "utf-8", newline="")
    same(changed)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_damage_is_read_alike_or_left(whole, tmp_path, data):
    text = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        cut = data.draw(st.integers(0, 3))
        text[at : at + cut] = data.draw(st.sampled_from([b"", b"0", b"-", b'"', b"\xff", b"\n", b"}", b"1e5", b"\x01"]))
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_bytes(bytes(text))
    same(damaged)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
json_values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2), max_leaves=4)  # fmt: skip  # noqa: E501


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_value_of_any_field_is_read_alike_or_left(whole, tmp_path, data):
    lines = [json.loads(line) for line in whole.read_text("utf-8").splitlines()]
    holder = data.draw(st.sampled_from(lines))
    while True:
        key = data.draw(st.sampled_from(sorted(holder)))
        if not (isinstance(holder[key], dict) and holder[key] and data.draw(st.booleans())):
            break
        holder = holder[key]
    holder[key] = data.draw(json_values)
    changed = tmp_path / "changed.jsonl"
    changed.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    same(changed)


def test_a_file_that_cannot_be_opened_is_left(tmp_path):
    assert LeanReader().read(tmp_path / "none.jsonl") is None
    assert LeanReader().read(tmp_path) is None


@pytest.mark.parametrize("at", range(0, 1600, 7))
def test_bytes_that_are_no_text_are_left_to_the_other_reader(whole, tmp_path, at):
    text = whole.read_bytes()
    assert at < len(text)
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_bytes(text[:at] + b"\xff" + text[at:])
    assert LeanReader().read(damaged) is None
