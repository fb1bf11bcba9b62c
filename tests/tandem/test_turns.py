"""Issue times of batches that were issued in turns, on a host that changes its speed."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from joulemark.report import formats, tandem_view
from joulemark.tandem import in_turns
from joulemark.tandem.turns import BUSY_TABLE, FEWEST_ROUNDS, TABLE, compare, exposed

from .conftest import run_of
from .test_document import document

ORACLE = Path(__file__).parents[1] / "oracle" / "issue_turns.py"


@pytest.fixture(scope="module")
def oracle():
    spec = importlib.util.spec_from_file_location("issue_turns_oracle", ORACLE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rounds(speeds, issue, case_ids=None):
    """Rows of rounds in which the host is slower by a factor; batch → issue time."""
    return [
        {"case_id": (case_ids or {}).get(batch, ""), "batch_size": batch, "round": number, "issue_s": speed * seconds}
        for number, speed in enumerate(speeds)
        for batch, seconds in issue.items()
    ]


@pytest.mark.parametrize("stays_s", [(0.06, 0.04), (4.0, 3.0)])
def test_a_host_of_two_speeds_spoils_neither_what_is_even_nor_what_is_not(oracle, stays_s):
    """The oracle script draws 200, of which batches with a time of their own are found even in 22 to 65 %."""
    draws = 12
    assert oracle.share(oracle.in_turns, oracle.BERT, stays_s, draws) == 1
    assert oracle.share(oracle.in_turns, oracle.BERT, stays_s, draws, oracle.DRIFT) <= 1 / draws
    assert oracle.share(oracle.one_by_one, oracle.BERT, stays_s, draws) < 0.9


def test_speeds_of_rounds_cancel_and_operators_divide():
    speeds = [1.0, 1.6, 1.9, 1.0, 1.7, 1.0]
    found = compare(rounds(speeds, {1: 3e-3, 8: 3.3e-3, 64: 6e-3}), {1: 10.0, 8: 10.0, 64: 20.0})
    assert found.batches == [1, 8, 64]
    assert found.deviation == pytest.approx([0, 0.1, 0])
    assert found.interval == [pytest.approx((one, one)) for one in (0, 0.1, 0)]
    assert (found.furthest, found.rounds) == (1, 6)
    assert found.issue_s[0] == pytest.approx(3e-3 * 1.3)


def test_a_burst_that_was_disturbed_moves_no_median_but_the_interval():
    rows = rounds([1.0] * 6, {1: 3e-3, 8: 3e-3, 64: 3e-3})
    for row in rows[1:12:3]:
        row["issue_s"] *= 1.8
    found = compare([*rows, *rounds([1.0] * 6, {1: 3e-3, 8: 3e-3, 64: 3e-3})], dict.fromkeys((1, 8, 64), 1.0))
    assert found.rounds == 12  # of two processes, which number their rounds alike
    assert found.deviation == pytest.approx([0, 0, 0])
    assert found.interval[1][1] > 0.1


@pytest.mark.parametrize(
    ("number", "batches"), [(FEWEST_ROUNDS - 1, (1, 8)), (9, (1,)), (9, (1, 64))], ids=["rounds", "batches", "no batch"]
)
def test_too_little_to_compare(number, batches):
    assert compare(rounds([1.0] * number, {1: 3e-3, 8: 3e-3}), dict.fromkeys(batches, 1.0)) is None


@pytest.fixture
def issued(sweep, record):
    """The sweep's eager series, and its cases issued in turns by another run: 12 % more at batch 256."""
    eager = {one.case.batch_size: one.case for one in sweep.records if one.case.mode == "eager"}
    issue = {batch: 4e-3 * (1.12 if batch == 256 else 1.0) for batch in eager}
    rows = rounds([1.0, 1.6, 1.7, 1.0, 1.0, 1.5, 1.0], issue, {batch: case.case_id for batch, case in eager.items()})
    case = replace(sweep.records[0].case, workload="bench_tandem.bench_issue_in_turns", batch_size=None, mode=None)
    turns = replace(record(case, busy=1e-3, issue=1e-3), run_id="t" * 32, metrics={}, tables={TABLE: rows})
    return replace(run_of([turns]), run_id="t" * 32)


def test_the_series_of_the_cases_says_how_even_they_are(sweep, issued):
    found = document(sweep, issued)
    eager, graph = found["series"]
    turns = eager["host_issue_per_operator_in_turns"]
    assert (turns["rounds"], turns["batch"], turns["even"], turns["note"]) == (7, 256, False, None)
    assert turns["largest_deviation"] == pytest.approx(0.12)
    assert turns["interval"] == [pytest.approx(0.12), pytest.approx(0.12)]
    assert [one["batch_size"] for one in turns["batches"]] == [1, 4, 8, 16, 32, 64, 128, 256]
    assert turns["median_s"] == pytest.approx(4e-3 / 50)
    assert "were not issued in turns" in graph["host_issue_per_operator_in_turns"]["note"]
    assert {one["run_id"] for one in found["runs"]} == {sweep.run_id, issued.run_id}
    text = formats.render(tandem_view.tables(found), "markdown")
    assert "batches in turns: 80 µs, furthest from it by +12.0%" in text


def test_the_last_run_that_has_the_cases_counts(sweep, issued):
    (record,) = issued.records
    again = [{**row, "issue_s": 5e-3} for row in record.tables[TABLE]]
    later = replace(issued, run_id="u" * 32, records=(replace(record, run_id="u" * 32, tables={TABLE: again}),))
    other = replace(record.case, workload="bench_tandem.another")
    first = replace(issued, records=(replace(record, case=other),))
    turns = document(sweep, first, later)["series"][0]["host_issue_per_operator_in_turns"]
    assert turns["even"] is True
    assert turns["median_s"] == pytest.approx(5e-3 / 50)


def stretches(speeds, issue_s, busy):
    """Rows of rounds of steps that wait for the host or for the device, whichever is slower."""
    return [
        {
            "case_id": "",
            "batch_size": batch,
            "round": number,
            "issue_s": issue_s,
            "step_s": max(speed * issue_s, one),
        }
        for number, speed in enumerate(speeds)
        for batch, one in busy.items()
    ]


BUSY = {1: 0.8e-3, 8: 1.1e-3, 32: 2.4e-3, 64: 4.4e-3}


def test_exposed_overhead_falls_however_fast_the_host_is():
    found = exposed(stretches([1.0, 1.6, 1.9, 1.0, 1.7, 1.0], 4e-3, BUSY), BUSY)
    assert found.batches == [1, 8, 32, 64]
    assert (found.rises, found.rounds) == ([], 6)
    assert found.exposed_s == pytest.approx([4e-3 * 1.3 - 0.8e-3, 4e-3 * 1.3 - 1.1e-3, 4e-3 * 1.3 - 2.4e-3, 1e-3])
    assert found.share[0] == pytest.approx((5.2 - 0.8) / 5.2)
    assert found.change_s[:2] == pytest.approx([-0.3e-3, -1.3e-3])
    assert found.change_interval_s[0] == pytest.approx((-0.3e-3, -0.3e-3))
    assert found.interval_s[0][0] == pytest.approx(3.2e-3)


def test_exposed_overhead_that_rises_is_found_between_its_batches():
    rows = stretches([1.0, 1.6, 1.9, 1.0, 1.7, 1.0], 4e-3, BUSY)
    for row in rows:
        row["step_s"] += 0.5e-3 * (row["batch_size"] == 8)
    assert exposed(rows, BUSY).rises == [(1, 8)]
    assert exposed(rows[:16], BUSY) is None
    assert exposed([{**row, "step_s": None} for row in rows], BUSY) is None


@pytest.fixture
def timed(issued):
    """The run of the turns with step times: the host's 4 ms or the device's work, which is 2 % faster in this run.

    Between two kernels a step waits 20 µs in all, at batch 256 100 µs; at batch 8 the host needs 0.5 ms more.
    """
    (record,) = issued.records
    rows = []
    for row in record.tables[TABLE]:
        batch = row["batch_size"]
        gaps_s = 1e-4 if batch == 256 else 2e-5
        step_s = max(4e-3 + 5e-4 * (batch == 8), own_busy_s(batch)) + gaps_s
        rows.append({**row, "step_s": step_s, "sm_clock_hz": 1.7e9})
    return with_tables(issued, {TABLE: rows})


def with_tables(run, tables, run_id=None):
    (record,) = run.records
    run_id = run_id or run.run_id
    return replace(run, run_id=run_id, records=(replace(record, run_id=run_id, tables=tables),))


def own_busy_s(batch):
    """Of a step in the run of the turns; in the sweep it is 2 % longer."""
    return 0.98 * (4e-4 + 9e-5 * batch)


def worked(run, busy_s=own_busy_s, without=()):
    """Rows of busy times of the cases that a run had in turns, and why ``without`` have none."""
    cases = {row["batch_size"]: row["case_id"] for row in run.records[0].tables[TABLE]}
    return [
        {
            "case_id": case_id, "batch_size": batch, "replayed": False, "busy_s": None if batch in without else
            busy_s(batch), "sm_clock_hz": 1.9e9, "reason": "no time" if batch in without else None,
        }
        for batch, case_id in cases.items()
    ]  # fmt: skip


def test_the_busy_time_of_the_run_of_the_turns_counts(sweep, timed):
    """Neither the sweep's, which is 2 % longer, nor that of another run that was profiled, too."""
    other = with_tables(timed, {BUSY_TABLE: worked(timed, lambda batch: 1.05 * own_busy_s(batch))}, "o" * 32)
    later = replace(
        other, records=tuple(replace(one, case=replace(one.case, params={"a": 1})) for one in other.records)
    )
    own = with_tables(timed, {**timed.records[0].tables, BUSY_TABLE: worked(timed)})
    found = document(sweep, own, later)
    turns = found["series"][0]["exposed_in_turns"]
    told = {one["batch_size"]: one for one in turns["batches"]}
    assert [*told] == [1, 4, 8, 16, 32, 64, 128, 256]
    assert all(one["busy_s"] == pytest.approx(own_busy_s(batch)) for batch, one in told.items())
    assert {(one["busy_from"], one["sm_clock_hz"], one["busy_sm_clock_hz"]) for one in told.values()} == {
        ("profiled", 1.7e9, 1.9e9)
    }
    assert told[128]["exposed_s"] == pytest.approx(2e-5)
    assert told[1]["exposed_s"] == pytest.approx(4.02e-3 - own_busy_s(1))
    assert {one["doubt_s"] for one in turns["changes"]} == {None}
    assert turns["note"] is None
    replays = [{**one, "replayed": True, "busy_s": 1.01 * own_busy_s(one["batch_size"])} for one in worked(timed)[-1:]]
    both = with_tables(timed, {**timed.records[0].tables, BUSY_TABLE: [*replays, *worked(timed)]})
    last = document(sweep, both)["series"][0]["exposed_in_turns"]["batches"][-1]
    assert (last["busy_from"], last["busy_s"]) == ("replayed", pytest.approx(1.01 * own_busy_s(256)))


def test_a_rise_says_where_it_is_and_whether_the_share_rises(sweep, timed):
    own = with_tables(timed, {**timed.records[0].tables, BUSY_TABLE: worked(timed)})
    found = document(sweep, own)
    turns = found["series"][0]["exposed_in_turns"]
    assert turns["rises"] == [
        {"batch_sizes": [4, 8], "where": "below the crossover", "share_rises": False, "in_doubt": False},
        {"batch_sizes": [128, 256], "where": "at the floor", "share_rises": True, "in_doubt": False},
    ]
    change = next(one for one in turns["changes"] if one["batch_sizes"] == [4, 8])
    assert change["change_s"] == pytest.approx(5e-4 - own_busy_s(8) + own_busy_s(4))
    assert change["share_change"] < 0
    text = formats.render(tandem_view.tables(found), "markdown")
    assert (
        "rises from 4 to 8 (below the crossover, no larger share of the step), from 128 to 256 (at the floor)" in text
    )


def test_a_rise_above_the_floor_lies_beyond_the_crossover_once_the_kernels_hide_the_host(sweep, timed):
    rows = [
        {**row, "step_s": row["step_s"] + 5e-3 * (row["batch_size"] == 256)} for row in timed.records[0].tables[TABLE]
    ]
    turns = document(sweep, with_tables(timed, {TABLE: rows, BUSY_TABLE: worked(timed)}))["series"][0][
        "exposed_in_turns"
    ]
    assert turns["rises"][-1] == {
        "batch_sizes": [128, 256], "where": "beyond the crossover", "share_rises": True, "in_doubt": False,
    }  # fmt: skip


def test_without_its_own_a_batch_has_the_busy_time_of_another_run_and_its_changes_are_in_doubt(sweep, timed):
    own = with_tables(timed, {**timed.records[0].tables, BUSY_TABLE: worked(timed, without=(256,))})
    found = document(sweep, own)
    turns = found["series"][0]["exposed_in_turns"]
    assert [one["busy_from"] for one in turns["batches"]] == ["profiled"] * 7 + ["other_run"]
    busy_s = found["series"][0]["rows"][-1]["metrics"]["gpu_busy_s"]["value"]
    assert turns["batches"][-1]["busy_s"] == busy_s
    assert [one["doubt_s"] for one in turns["changes"]] == [None] * 6 + [pytest.approx(0.02 * busy_s)]
    assert turns["note"] == (
        "busy time of another run at batch 256, assumed to differ by 2%; of the run of the turns: no time"
    )
    assert turns["note"] in formats.render(tandem_view.tables(found), "markdown")
    rows = [
        {**row, "step_s": row["step_s"] + 8e-4 * (row["batch_size"] == 256)} for row in timed.records[0].tables[TABLE]
    ]
    risen = with_tables(timed, {TABLE: rows, BUSY_TABLE: worked(timed, without=(256,))})
    rise = document(sweep, risen)["series"][0]["exposed_in_turns"]["rises"][-1]
    assert (rise["batch_sizes"], rise["in_doubt"]) == ([128, 256], True)


def test_the_document_says_what_is_exposed_in_turns(sweep, issued):
    assert "were not issued in turns" in document(sweep, issued)["series"][0]["exposed_in_turns"]["note"]
    (record,) = issued.records
    rows = [{**row, "step_s": row["issue_s"] + 1e-3 * (row["batch_size"] == 16)} for row in record.tables[TABLE]]
    found = document(sweep, with_tables(issued, {TABLE: rows}))
    turns = found["series"][0]["exposed_in_turns"]
    assert [8, 16] in [one["batch_sizes"] for one in turns["rises"]]
    assert [one["batch_size"] for one in turns["batches"]] == [1, 4, 8, 16, 32, 64, 128, 256]
    assert {one["busy_from"] for one in turns["batches"]} == {"other_run"}
    assert "it profiled none of them" in turns["note"]
    assert "rises from 8 to 16 (below the crossover" in formats.render(tandem_view.tables(found), "markdown")


def test_a_batch_that_is_other_work_is_said_to_be(sweep, issued):
    found = document(sweep, issued)
    turns = found["series"][0]["host_issue_per_operator_in_turns"]
    assert "launches" not in formats.render(tandem_view.tables(found), "markdown").partition("furthest")[2][:90]
    for one in turns["batches"]:
        one["launches_per_step"] = 18 if one["batch_size"] == 256 else 16
    text = formats.render(tandem_view.tables(found), "markdown")
    assert "a step of it has 18 launches, of the others 16" in text


def test_a_batch_that_comes_again_begins_a_round():
    """Two processes of a round each, both number 0: what the one had is not put among the times of the other."""
    one, other = (rounds([speed], {1: 3e-3, 8: 3e-3}) for speed in (1.0, 2.0))
    found = compare([*one, *other] * 3, {1: 10.0, 8: 10.0})
    assert found.rounds == 6
    assert found.issue_s == pytest.approx([4.5e-3, 4.5e-3])


def test_whole_seconds_are_times_too():
    rows = [{**row, "issue_s": 1, "step_s": 2} for row in rounds([1.0] * FEWEST_ROUNDS, {1: 1.0, 8: 1.0})]
    assert compare(rows, {1: 10.0, 8: 10.0}).deviation == [0, 0]
    assert exposed(rows, {1: 0.5, 8: 0.5}).exposed_s == [1.5, 1.5]


def test_figures_that_cannot_be_leave_their_batch_out():
    issued = [rounds([1.0] * FEWEST_ROUNDS, {1: 1e-3, 8: 1e-3})]
    issued[0] = [{**row, "step_s": 2e-3} for row in issued[0]]

    def row(batch, number):
        names = ("operators_per_step", "launches_per_step", "gpu_busy_s")
        return {"batch_size": batch, "metrics": {name: {"value": number} for name in names}}

    rows = [row(1, 1e-3), row(8, -1e-3)]
    impossible = [{"batch_size": 8, "replayed": False, "busy_s": seconds, "reason": ""} for seconds in (0, None)]
    for found in (in_turns.issue(rows, issued), in_turns.exposed(rows, issued, [impossible])):
        assert found["batches"] == []
        assert "fewer than two of the batches" in found["note"]
