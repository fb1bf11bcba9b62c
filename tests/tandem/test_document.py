"""From stored sweeps to the document, its tables, its picture and its command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from joulemark.cli import main
from joulemark.errors import ConfigurationError
from joulemark.records import Case, Environment, Finding, Value
from joulemark.report import formats, tandem_plot, tandem_view
from joulemark.store import RunWriter
from joulemark.tandem import tandem_document
from joulemark.tandem.document import METRICS, exit_code

from .conftest import ENVIRONMENT, run_of

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schema" / "tandem.schema.json").read_text())


def document(*runs):
    found = tandem_document(runs)
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(found, allow_nan=False)))
    return found


@pytest.fixture
def stored(sweep, tmp_path):
    path = tmp_path / "sweep-1.jsonl"
    with RunWriter(path, sweep.run_id, ENVIRONMENT, 1.7e9) as out:
        for record in sweep.records:
            out.write(record)
        out.end(completed=True, wall_s=10.0, measured_s=7.0)
    return path


def command(capsys, *args):
    code = main(["tandem", *map(str, args)])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def test_crossover_memory_and_what_is_exposed(sweep):
    found = document(sweep)
    assert (found["runs"][0]["gpus"], found["runs"][0]["torch"]) == (["NVIDIA H200"], "2.11.0")
    eager, graph = found["series"]
    assert eager["mode"] == "eager"
    assert eager["crossover"]["interval"][0] <= 40 <= eager["crossover"]["interval"][1]
    assert eager["crossover"]["batch"] == pytest.approx(40, rel=0.05)
    assert eager["crossover_profiled"]["batch"] == pytest.approx(57.8, rel=0.05)
    assert eager["memory"]["smallest_batch"] == 1
    assert eager["memory"]["at_crossover_bytes"] == pytest.approx(1.4e8, rel=0.02)
    assert eager["memory"]["ratio"] == pytest.approx(140 / 101, rel=0.02)
    beyond = eager["exposed_from_twice_the_crossover"]
    assert beyond["batches"] == [128, 256]
    assert beyond["largest_share"] == pytest.approx(50e-6 / 11.97e-3, rel=0.5)
    assert beyond["holds"] is True
    assert eager["exposed_rises"] == []
    even = eager["host_issue_per_operator"]
    assert even["median_s"] == pytest.approx(1.4 * 4e-3 / 50, rel=0.01)
    assert even["even"] is True
    assert eager["host_issue_per_operator_unprofiled"]["median_s"] == pytest.approx(4e-3 / 50, rel=0.01)

    assert graph["crossover"]["text"] == "at or below 1"
    assert graph["memory"]["ratio"] is None
    assert graph["memory"]["note"] == "crossover at or below 1"
    assert graph["exposed_from_twice_the_crossover"]["batches"] == [4, 8, 16, 32, 64, 128, 256]


def test_a_row_has_all_figures_or_their_reasons(sweep):
    row = document(sweep)["series"][0]["rows"][0]
    assert set(row["metrics"]) == set(METRICS)
    for name, value in row["metrics"].items():
        assert (value["value"] is None) == (name in row["notes"])
    assert row["notes"]["hidden_ratio"] == "nothing was launched in it"
    assert row["exposed_share"] == pytest.approx((4.05 - 0.49) / 4.05, rel=0.01)
    assert row["hidden_ratio_unprofiled"] == pytest.approx(1 - (4.05 - 0.49) / 4, rel=0.05)
    assert row["process_drift"] == pytest.approx(0.1, abs=0.01)
    assert row["kernels_reconciled"] is True
    assert row["idle_s"] == {"framework": pytest.approx(5.6e-3 - 0.49e-3 + 50e-6, rel=0.01)}
    assert row["metrics"]["profiler_distortion"]["value"] == 0.4


def test_graph_against_eager_at_the_smallest_batch(sweep):
    (found,) = document(sweep)["against_eager"]
    assert (found["mode"], found["batch_size"]) == ("graph", 1)
    assert found["eager_s"] == pytest.approx(3.56e-3, rel=0.01)
    assert found["mode_s"] == pytest.approx(30e-6, rel=0.2)
    assert found["ratio"] == pytest.approx(30 / 3560, rel=0.2)
    assert found["interval"][0] < found["ratio"] < found["interval"][1]


def test_series_of_other_world_sizes_are_told_apart(sweep):
    two = [replace(one, case=replace(one.case, world_size=2)) for one in sweep.records]
    found = document(replace(sweep, records=(*sweep.records, *two)))
    titles = [table.title for table in tandem_view.tables(found)]
    assert len(set(titles)) == len(titles)
    alone = document(sweep)["against_eager"]
    assert found["against_eager"] == [{**one, "world_size": size} for size in (1, 2) for one in alone]


def test_issue_time_that_depends_on_the_batch_is_not_even(record):
    cases = [Case("m", "inference", "eager", "bf16", batch, gpu_model="nvidia-h200") for batch in (1, 2, 4)]
    records = [record(one, busy=1e-3, issue=2e-3 * (1.3 if one.batch_size == 4 else 1)) for one in cases]
    (series,) = document(run_of(records))["series"]
    assert series["host_issue_per_operator"]["even"] is False
    assert series["host_issue_per_operator"]["batch"] == 4
    assert series["host_issue_per_operator"]["largest_deviation"] == pytest.approx(0.3, abs=0.01)
    assert series["exposed_rises"] == [[2, 4]]
    assert series["crossover"]["text"] == "not reached (above 4)"
    assert series["exposed_from_twice_the_crossover"]["holds"] is None


def test_a_host_that_changes_its_speed_is_compared_at_one_speed(record):
    slow = {1: 1.6, 16: 1.6}
    records = [
        record(
            Case("m", "inference", "eager", "bf16", batch, gpu_model="nvidia-h200"),
            busy=4e-4 + 9e-5 * batch,
            issue=4e-3,
            slowness=slow.get(batch, 1.0),
        )
        for batch in (1, 4, 16, 64, 256)
    ]
    (series,) = document(run_of(records))["series"]
    assert series["host_issue_per_operator_unprofiled"]["even"] is False
    even = series["host_issue_per_operator_at_one_speed"]
    assert even["even"] is True
    assert even["median_s"] == pytest.approx(4e-3 / 50, rel=0.01)
    assert series["crossover_at_one_speed"]["batch"] == pytest.approx(40, rel=0.05)
    low, high = series["crossover_at_one_speed"]["interval"]
    assert low <= 40 <= high
    raw_low, raw_high = series["crossover"]["interval"]
    assert high / low < raw_high / raw_low


def test_without_reference_work_nothing_is_said_about_one_speed(sweep):
    eager = document(sweep)["series"][0]
    assert eager["host_issue_per_operator_at_one_speed"]["median_s"] is None
    assert eager["crossover_at_one_speed"] is None
    assert eager["host_issue_per_operator_at_one_speed"]["note"] == "fewer than two batch sizes have it"
    row = eager["rows"][0]
    assert row["host_issue_per_operator_at_one_speed_s"] is None
    assert "host_issue_per_operator_at_one_speed_s" in row["notes"]


def test_cells_that_were_not_measured_or_not_profiled_do_not_disturb(sweep, record):
    failed = replace(sweep.records[2], outcome="failed", reason="x", metrics={}, samples={})
    bare = replace(sweep.records[3], metrics={"device_time_s": Value(1e-3, "s")}, samples={}, notes={})
    found = document(run_of([*sweep.records[:2], failed, bare, *sweep.records[4:8]]))["series"][0]
    assert [row["batch_size"] for row in found["rows"]] == [1, 4, 16, 32, 64, 128, 256]
    assert found["rows"][2]["notes"]["gpu_busy_s"] == "not measured in this run"
    assert found["rows"][2]["kernels_reconciled"] is None
    assert found["crossover"]["batch"] == pytest.approx(40, rel=0.05)


def test_a_case_of_several_runs_counts_by_its_last(sweep, record):
    again = record(sweep.records[0].case, busy=1e-3, issue=4e-3)
    again = replace(again, run_id="s" * 32)
    found = document(sweep, replace(run_of([again]), run_id="s" * 32))
    assert len(found["series"][0]["rows"]) == 8
    assert found["series"][0]["rows"][0]["metrics"]["gpu_busy_s"]["value"] == pytest.approx(1e-3, rel=0.01)
    assert len(found["runs"]) == 2
    failed = replace(again, outcome="failed", reason="x", metrics={}, samples={})
    assert document(sweep, replace(run_of([failed]), run_id="s" * 32)) == document(sweep)


def test_a_case_of_several_runs_counts_by_the_newest_in_any_order(sweep, record):
    """Those of a folder come newest first."""
    again = replace(record(sweep.records[0].case, busy=1e-3, issue=4e-3), run_id="s" * 32)
    newer = replace(run_of([again]), run_id="s" * 32, started_utc=sweep.started_utc + 1)
    assert document(newer, sweep) == document(sweep, newer)
    assert document(newer, sweep)["series"][0]["rows"][0]["run_id"] == newer.run_id


def test_inputs_without_a_batch_are_cells(sweep, record):
    case = Case("bench_input.bench_slow_loader", gpu_model="nvidia-h200", params={"sleep_ms": 20})
    copy = replace(record(case, busy=1e-3, issue=2e-3), case=replace(case, workload="bench_input.bench_copy"))
    copy = replace(copy, metrics={"device_time_s": Value(1e-3, "s")})
    other = replace(copy, case=replace(case, workload="bench_units.bench_matmul"), run_id="s" * 32)
    run = run_of([*sweep.records[:2], record(case, busy=1e-3, issue=2e-3), copy])
    found = document(run, replace(run_of([other]), run_id="s" * 32))
    assert [one["label"].split("-")[0] for one in found["cells"]] == [
        "bench_input.bench_slow_loader",
        "bench_input.bench_copy",
    ]
    assert found["cells"][0]["params"] == {"sleep_ms": 20}
    assert [one["run_id"] for one in found["runs"]] == ["r" * 32]
    assert "bench_slow_loader" in formats.render(tandem_view.tables(found), "markdown")


def test_records_that_were_lost_give_status_3(sweep):
    assert exit_code(document(sweep)) == 0
    lost = Finding("kernels_and_launches_differ", "59 kernels for 60 launches", flags=True)
    records = [replace(sweep.records[0], findings=(lost,)), *sweep.records[1:]]
    found = document(run_of(records))
    assert found["series"][0]["rows"][0]["kernels_reconciled"] is False
    assert exit_code(found) == 3
    assert "launches and kernels do not agree" in formats.render(tandem_view.tables(found))


@pytest.mark.parametrize("gpus", [[None], [[]], "none"])
def test_a_list_of_gpus_that_holds_none_is_no_crash(sweep, gpus):
    environment = Environment({"gpus": gpus})
    assert document(replace(sweep, environments={"e": environment}))["runs"][0]["gpus"] is None


def test_without_a_profile_there_is_nothing_to_say(sweep):
    with pytest.raises(ConfigurationError, match="--bench-collect timing,profiler"):
        tandem_document([run_of([replace(sweep.records[0], metrics={})])])


def test_the_tables_say_what_was_found(sweep):
    text = formats.render(tandem_view.tables(document(sweep)), "markdown")
    assert "on nvidia-h200: crossover 39" in text
    assert "at or below 1" in text
    assert "memory at the crossover" in text
    assert "exposed overhead against eager" in text
    assert "n/a" not in text.split("exposed overhead against eager")[1]


def test_series_with_a_crossover_come_first(sweep, record):
    case = Case("m", "inference", "eager", "bf16", 4, gpu_model="nvidia-h200")
    late = [record(replace(case, workload="late", batch_size=n), busy=1e-3, issue=9e-3) for n in (1, 2)]
    found = document(run_of([record(case, busy=1e-3, issue=2e-3), *late, *sweep.records[8:], *sweep.records[:8]]))
    answers, first, *others = tandem_view.tables(found)
    titles = [table.title.partition(" ")[0] for table in (first, *others)]
    assert titles[:4] == ["resnet50", "resnet50", "late", "m"]
    assert found["series"][0]["workload"] == "m"
    assert "crossover 39" in first.title
    assert [row[0].split(" ")[0] for row in answers.rows] == ["resnet50", "resnet50", "late"]
    assert answers.rows[0][2].startswith("39")
    assert "1 series of too few batch sizes" in answers.notes[-1]


def test_one_with_a_profile_tells_before_a_later_one_without(sweep):
    bare = [replace(one, run_id="s" * 32, metrics={}, samples={}) for one in sweep.records[:8]]
    later = replace(run_of(bare), run_id="s" * 32)
    assert document(sweep, later) == document(sweep) == document(later, sweep)


def test_a_host_that_waits_for_a_full_queue_is_left_out(record):
    """From batch 16 on the device is slower than the host, which therefore waits for room in the queue."""
    case = Case("m", "train", "eager", "bf16", gpu_model="nvidia-h200")
    rows = []
    for batch in (1, 2, 4, 8, 16, 32, 64):
        busy = 1e-3 * batch
        one = record(replace(case, batch_size=batch), busy=busy, issue=max(6e-3, busy if batch > 8 else 0))
        launches = replace(one.metrics["launches_per_step"], value=900.0)
        rows.append(replace(one, metrics={**one.metrics, "launches_per_step": launches}))
    crossover = document(run_of(rows))["series"][0]["crossover"]
    assert crossover["batch"] == pytest.approx(6, rel=0.02)
    assert crossover["largest_batch"] == 8
    assert [one["code"] for one in crossover["findings"]] == ["queue_full"]
    assert "at batch 16, 32, 64 the host waited" in crossover["findings"][0]["message"]


def test_the_picture_is_the_same_each_time_and_shows_names_as_they_are(sweep, tmp_path):
    pytest.importorskip("matplotlib")
    hostile = [replace(one, case=replace(one.case, workload="_$x^2$<b>\x1b[31m")) for one in sweep.records]
    found = document(run_of(hostile))
    for name in ("a.svg", "b.svg", "c.png"):
        tandem_plot.draw(found, tmp_path / name)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "a.svg").read_text()
    assert "<b>" not in text
    assert "\x1b" not in text
    assert "dc:date" not in text


def test_the_command_prints_tables(stored, capsys):
    code, out, err = command(capsys, stored)
    assert (code, err) == (0, "")
    assert "resnet50 inference bf16 eager" in out


def test_the_command_writes_json_tables_and_a_picture(stored, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, _ = command(capsys, stored, "--json")
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(out))
    target, picture = tmp_path / "tandem.json", tmp_path / "tandem.svg"
    for _ in range(2):  # a tandem document may be replaced by one
        code, shown, err = command(capsys, stored, "--out", target, "--plot", picture)
        assert (code, shown) == (0, "")
        assert str(target) in err
    assert target.read_text() == out
    assert picture.read_text().startswith("<?xml")
    assert command(capsys, stored, "--out", tmp_path / "t.md")[0] == 0
    assert (tmp_path / "t.md").read_text().startswith(("#", "|", "*", "**"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--out", "x.html"), ".json or .md"),
        (("--plot", "x.gif"), ".svg, .png, .pdf"),
        (("--out", "."), "suffix"),
        (("--plot", "."), ".svg"),
    ],
)
def test_places_that_cannot_be(stored, capsys, args, said):
    code, out, err = command(capsys, stored, *args)
    assert (code, out) == (2, "")
    assert said in err


def test_another_json_file_is_not_replaced(stored, capsys, tmp_path):
    (tmp_path / "x.json").write_text('{"schema": "joulemark/report/1"}')
    code, _, err = command(capsys, stored, "--out", tmp_path / "x.json")
    assert code == 2
    assert "is not a joulemark tandem document" in err
    assert (tmp_path / "x.json").read_text() == '{"schema": "joulemark/report/1"}'


def test_a_run_without_profiles_says_so(capsys):
    code, _, err = command(capsys, Path(__file__).parents[1] / "data" / "runs" / "baseline.json")
    assert code == 2
    assert "profiled step" in err


def test_runs_on_simulated_gpus_are_marked(sweep):
    real = next(iter(formats.render([one], "markdown") for one in tandem_view.tables(document(sweep))))
    assert "simulated" not in real
    simulated = Environment({**ENVIRONMENT.facts, "simulated": True})
    records = tuple(replace(one, environment_id=simulated.environment_id) for one in sweep.records)
    found = document(replace(sweep, records=records, environments={simulated.environment_id: simulated}))
    assert [one["simulated"] for one in found["runs"]] == [True]
    assert any("(simulated GPUs); of simulated GPUs no figure" in note for one in tandem_view.tables(found)
               for note in one.notes)  # fmt: skip
