import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from joulemark.cli import main
from joulemark.errors import ConfigurationError
from joulemark.metrics import find
from joulemark.records import Environment
from joulemark.report import terminal
from joulemark.report.jsonout import dumps
from joulemark.report.plateau_table import check_metric, document, plateaus_of, table_of

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schema/plateaus.schema.json").read_text())
RESULTS = Path(__file__).parents[2] / "results"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
THROUGHPUT, ENERGY = find("throughput_per_s"), find("energy_per_item_j")


@pytest.fixture
def make_sweep(make_record, make_run):
    """A run whose throughput grows with the batch up to a knee, measured by some processes."""

    def make(knee, driver="580.65.06", gpu="nvidia-h200", batches=BATCHES, processes=3, oom_from=None, **run):
        environment = Environment({"driver": driver})
        records = []
        for batch in batches:
            level = 100.0 * min(batch, knee)
            own = [{"throughput_per_s": level * (1 + 0.004 * k)} for k in range(-1, processes - 1)]
            figures = {"throughput_per_s": level, "energy_per_item_j": 50 / level}
            records.append(
                make_record(batch=batch, gpu=gpu, figures=figures, processes=tuple(own if processes > 1 else ()))
            )
        if oom_from is not None:
            records.append(make_record(batch=oom_from, gpu=gpu, outcome="oom", figures={"throughput_per_s": None}))
        records = [replace(record, environment_id=environment.environment_id) for record in records]
        return make_run(*records, environment=environment, **run)

    return make


def test_plateaus_stand_side_by_side_over_gpus_and_drivers_as_versions_are_sorted(make_sweep):
    runs = [
        make_sweep(32, driver="580.159.04", path="c.jsonl"),
        make_sweep(8, driver="580.65.06", path="b.jsonl"),
        make_sweep(16, gpu="nvidia-a100", path="a.jsonl"),
    ]
    rows = plateaus_of(runs, THROUGHPUT)
    assert [(row.series.gpu_model, row.driver) for row in rows] == [
        ("nvidia-a100", "580.65.06"),
        ("nvidia-h200", "580.65.06"),
        ("nvidia-h200", "580.159.04"),
    ]
    for row, knee in zip(rows, (16, 8, 32), strict=True):
        lo, hi = row.plateau.interval
        assert lo <= knee <= hi
        assert hi / lo < 1.5
    table = table_of(rows, THROUGHPUT)
    assert [row[3] for row in table.rows] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert [row[-1] for row in table.rows] == ["plateau"] * 3
    assert table.rows[1][4].startswith("7.") or table.rows[1][4].startswith("8")
    assert table.rows[1][5] == "800"


def test_the_inverse_of_what_is_better_lower_has_the_same_knee(make_sweep):
    rows = plateaus_of([make_sweep(16, processes=1)], ENERGY)
    assert rows[0].plateau.interval[0] <= 16 <= rows[0].plateau.interval[1]
    table = table_of(rows, ENERGY)
    assert table.rows[0][5] == "31.2 mJ"
    assert any("1 / energy/item" in note for note in table.notes)
    assert any("a spread of 2% between processes is assumed" in note for note in table.notes)


def test_what_limits_a_series_is_said(make_sweep):
    rows = plateaus_of([make_sweep(1e9), make_sweep(1e9, driver="590.1", oom_from=256)], THROUGHPUT)
    assert [row[-1] for row in table_of(rows, THROUGHPUT).rows] == [
        "not reached by 128",
        "not reached by 128: larger ones did not fit",
    ]
    assert [row[4] for row in table_of(rows, THROUGHPUT).rows] == ["n/a", "n/a"]


def test_series_of_few_batches_are_named_and_have_no_row(make_sweep, make_run, make_record):
    few = make_sweep(16, batches=(8, 64))
    none = make_run(make_record(batch=None, figures={"throughput_per_s": 1.0}))
    table = table_of(plateaus_of([few, none], THROUGHPUT), THROUGHPUT)
    assert table.rows == ()
    assert table.notes == ("resnet50-train-bf16-eager: too few batch sizes for a plateau",)
    assert "too few batch sizes" in terminal.render([table], 100)


def test_the_document_is_as_its_schema_says(make_sweep):
    rows = plateaus_of([make_sweep(16), make_sweep(1e9, driver="1"), make_sweep(4, batches=(1, 2))], THROUGHPUT)
    found = json.loads(dumps(document(rows, THROUGHPUT)), parse_constant=pytest.fail)
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert sorted(row["plateau"]["verdict"] for row in found["rows"]) == ["not_reached", "plateau", "too_few_points"]


def test_an_unknown_metric_is_refused():
    with pytest.raises(ConfigurationError, match="'speed' is unknown"):
        check_metric("speed")


def call(capsys, *args):
    code = main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_shows_plateaus_of_committed_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "180")
    (run,) = (RESULTS / "nvidia-h200").glob("*-4b96b6.jsonl")
    code, out, _ = call(capsys, "report", run, "--plateaus")
    assert code == 0
    assert "plateaus of items/s over the batch size" in out
    assert "vgg16-inference-bf16-eager-channels_last" in out
    code, out, _ = call(capsys, "report", run, "--plateaus", "energy_per_item_j", "--format", "json")
    assert json.loads(out)["metric"] == "energy_per_item_j"
    for _ in range(2):  # a report may replace a report
        code, _, err = call(capsys, "report", run, "--plateaus", "--out", tmp_path / "p.json")
        assert (code, "wrote" in err) == (0, True)
    assert json.loads((tmp_path / "p.json").read_text())["schema"] == "joulemark/plateaus/1"
    call(capsys, "report", run, "--plateaus", "--out", tmp_path / "p.md")
    assert (tmp_path / "p.md").read_text().startswith("### plateaus of items/s")


@pytest.mark.parametrize(
    ("args", "says"),
    [(["--plateaus", "speed"], "'speed' is unknown"), (["--plateaus", "--format", "csv"], "plateaus have no csv form")],
)
def test_wrong_use_is_one_line(capsys, args, says):
    code, out, err = call(capsys, "report", RESULTS / "nvidia-h200", *args)
    assert (code, out) == (2, "")
    assert says in err


def test_what_is_no_report_is_not_replaced(capsys, tmp_path):
    (tmp_path / "mine.json").write_text('{"my": "own"}')
    code, _, err = call(capsys, "report", RESULTS / "nvidia-h200", "--plateaus", "--out", tmp_path / "mine.json")
    assert code == 2
    assert "is not a joulemark report" in err
    assert (tmp_path / "mine.json").read_text() == '{"my": "own"}'
