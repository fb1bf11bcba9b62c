"""What is passed over in a folder, and what a note that several workloads share says."""

from joulemark.records import Finding
from joulemark.report.foreign import read_results
from joulemark.report.page.throughput import findings_of
from joulemark.store import kind_of


def test_documents_made_of_runs_are_no_runs_that_went_wrong(tmp_path):
    for name, schema in (("tandem.json", "tandem"), ("windows.jsonl", "calibration-windows")):
        (tmp_path / name).write_text(f'{{"schema": "joulemark/{schema}/1"}}\n')
        assert kind_of(tmp_path / name) == schema
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "newer.jsonl").write_text('{"kind":"record","schema":"joulemark/sweep/2"}\n')
    runs, unusable = read_results([tmp_path])
    assert runs == []
    assert len(unusable) == 2
    assert "newer.jsonl" in unusable[0]
    assert "other.json" in unusable[1]


def test_figures_in_a_note_are_those_of_the_workload_named_first():
    knees = [(name, [Finding("knee", f"a knee at {knee}", "look")]) for name, knee in (("a", 8), ("b", 16), ("c", 8))]
    assert findings_of(knees) == ("a: a knee at 8 (look); with figures of their own: b, c",)
    assert findings_of(knees[::2]) == ("a, c: a knee at 8 (look)",)
