"""The JSON document: its schema, its strictness, its keys; and differences of two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from joulemark.errors import ConfigurationError
from joulemark.trace import DIFF_SCHEMA, SCHEMA, analyse_files, diff, exit_code

DATA = Path(__file__).parents[1] / "data" / "trace"
SCHEMA_FILE = Path(__file__).parents[2] / "docs" / "schema" / "trace.schema.json"
FILES = sorted(path for path in DATA.rglob("*.json*") if "ns_resolution" not in path.name)


def test_documents_follow_the_schema_and_strict_json() -> None:
    document = analyse_files([*FILES, DATA / "absent\nfile.json"])
    schema = json.loads(SCHEMA_FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    text = json.dumps(document, allow_nan=False)
    assert json.loads(text.encode("utf-8"), parse_constant=pytest.fail) == document
    assert document["schema"] == SCHEMA
    assert [entry["path"] for entry in document["files"][:-1]] == [str(path) for path in FILES]
    assert exit_code(document) == 2


def test_a_null_has_its_reason_in_the_notes() -> None:
    for entry in analyse_files(FILES)["files"]:
        if entry["error"]:
            continue
        for key, value in entry.items():
            if value is None and key not in ("error", "iteration_source"):
                assert entry["notes"].get(key), (entry["path"], key)
        assert entry["iteration_source"] or entry["notes"]["iterations"]


def test_the_same_keys_whether_readable_or_not() -> None:
    good, bad = analyse_files([DATA / "full.json", DATA / "empty.json"])["files"]
    assert list(good) == list(bad)


def test_path_that_is_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "trace\udcff.json"
    path.write_bytes((DATA / "full.json").read_bytes())
    document = analyse_files([path])
    assert document["files"][0]["kernels"] == 30
    assert "\ufffd" in document["files"][0]["path"]
    json.dumps(document).encode("utf-8")


def two(writer: Any, second: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A trace of two steps, and another that ``second`` writes."""
    for step in range(2):
        writer.mark(f"ProfilerStep#{step}", 1000 * step, 1000)
        writer.operator("aten::mm", 1000 * step + 10, 50)
        writer.launched(1000 * step + 20, 1000 * step + 30, 200, 2 * step)
        writer.operator("aten::relu", 1000 * step + 300, 50)
        writer.launched(1000 * step + 310, 1000 * step + 320, 100, 2 * step + 1)
    base = writer.document()
    writer.events = []
    second(writer)
    return base, analyse_files([writer.save("second.json")])


def slower(writer: Any) -> None:
    for step in range(4):
        writer.mark(f"ProfilerStep#{step}", 2000 * step, 2000)
        writer.operator("aten::mm", 2000 * step + 10, 50)
        writer.launched(2000 * step + 20, 2000 * step + 30, 600, 2 * step)
        writer.operator("aten::gelu", 2000 * step + 1000, 50)
        writer.launched(2000 * step + 1010, 2000 * step + 1020, 100, 2 * step + 1)


def test_diff_names_operators_and_causes_per_iteration(writer: Any) -> None:
    difference = diff(*two(writer, slower))
    assert difference["schema"] == DIFF_SCHEMA
    assert (difference["basis"], difference["complete"]) == ("iteration", True)
    metrics = {row["name"]: row for row in difference["metrics"]}
    assert metrics["wall_s"]["ratio"] == pytest.approx(2)
    assert metrics["busy_s"]["change"] == pytest.approx(400e-6)
    operators = difference["operators"]
    assert [(row["name"], row["ratio"]) for row in operators] == [("aten::mm", pytest.approx(3))]
    assert [row["name"] for row in difference["only_in_new"]] == ["aten::gelu"]
    assert [row["name"] for row in difference["only_in_base"]] == ["aten::relu"]
    assert difference["only_in_base"][0]["change"] is None
    idle = {row["name"]: row["change"] for row in difference["idle"]}
    assert idle["outside_operators"] == pytest.approx(300e-6)  # 10 + 70 µs of host time, now 10 + 370
    assert idle["tail"] == pytest.approx(300e-6)
    assert difference["idle"][0]["name"] in ("outside_operators", "tail")
    assert sum(idle.values()) == pytest.approx(metrics["exposed_overhead_s"]["change"])
    json.dumps(difference, allow_nan=False)


def test_diff_of_whole_traces_where_one_has_no_iterations(writer: Any) -> None:
    difference = diff(*two(writer, lambda w: w.launched(0, 10, 50, 1)))
    assert difference["basis"] == "trace"
    assert "whole traces" in difference["notes"]["basis"]


def test_incomplete_or_unreadable_sides_are_said(writer: Any) -> None:
    good = analyse_files([DATA / "full.json"])
    cut = diff(good, analyse_files([DATA / "cut_mid_event.json"]))
    assert (cut["complete"], exit_code(cut)) == (False, 3)
    assert "incomplete: the file ends in the middle of an event" in cut["notes"]["new"]
    unread = diff(analyse_files([DATA / "empty.json"]), good)
    assert (unread["complete"], exit_code(unread)) == (False, 2)
    assert unread["notes"]["base"].startswith("not read")
    assert all(row["ratio"] is None for row in unread["metrics"])
    assert exit_code(diff(good, good)) == 0


def test_diff_takes_one_file_a_side() -> None:
    one = analyse_files([DATA / "full.json"])
    with pytest.raises(ConfigurationError, match="one file on each side, not 2"):
        diff(one, analyse_files([DATA / "full.json", DATA / "full.json"]))
