"""Comparisons of runs that measured each case in several processes."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from joulemark.records import Value
from joulemark.regression.verdicts import Rule
from joulemark.report.compare import compare
from joulemark.report.comparison import exit_code
from joulemark.report.comparison_table import table_of
from joulemark.report.foreign import read_result
from joulemark.report.output import render_comparison

RUNS = Path(__file__).parents[1] / "data" / "runs"
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schema/compare.schema.json").read_text())


@pytest.fixture
def make_processes(make_record):
    """Builds a record of several processes: per process its figures by metric name."""

    def make(processes, batch=8, **more):
        units = {"throughput_per_s": "1/s", "energy_per_item_j": "J", "peak_memory_bytes": "B", "sm_clock_hz": "Hz"}
        metrics = {
            name: Value(float(np.median([one[name] for one in processes])), units.get(name, "s"), n=len(processes))
            for name in processes[0]
        }
        return replace(make_record(batch=batch, **more), metrics=metrics, processes=tuple(processes))

    return make


@pytest.fixture
def make_sides(make_processes, make_run):
    """Builds BASE and NEW of many cases: NEW is slower by a fraction per case; processes scatter by ``sd``."""

    def make(slowdowns, sd=0.004, n=3, seed=0, metric="device_time_s"):
        rng = np.random.default_rng(seed)
        sides = []
        for side in (0, 1):
            records = []
            for batch, slowdown in enumerate(slowdowns, 1):
                level = 1e-3 * batch * (1 + slowdown * side)
                records.append(
                    make_processes([{metric: level * float(np.exp(rng.normal(0, sd)))} for _ in range(n)], batch)
                )
            sides.append(make_run(*records))
        return sides

    return make


def document(comparison):
    data = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    jsonschema.Draft202012Validator(SCHEMA).validate(data)
    return data


@pytest.mark.parametrize(("factor", "verdict"), [(0.9, "same"), (1.03, "same"), (1.1, "inconclusive")])
def test_a_process_that_stood_apart_is_named_and_one_that_got_worse_is_not_explained_away(make_sides, factor, verdict):
    base, new = make_sides([0.0] * 8, sd=0.001)
    record = new.records[2]
    times = [one["device_time_s"] for one in record.processes]
    moved = replace(record, processes=tuple({"device_time_s": t} for t in (times[0] * factor, *times[1:])))
    new = replace(new, records=(*new.records[:2], moved, *new.records[3:]))
    row = next(row for row in compare(base, new).rows if row.case_id == record.case_id)
    assert row.verdict == verdict
    assert row.processes == (3, 3)
    assert row.ratio == pytest.approx(1, abs=0.003)
    (note,) = row.notes
    assert re.match(r"one process of NEW stood apart and was left out: its figure is \d\.\d+x that of the others", note)
    assert float(note.split()[-5][:-1]) == pytest.approx(factor, abs=0.004)
    back = next(row for row in compare(new, base).rows if row.case_id == record.case_id)
    assert back.verdict == "same"
    assert "one process of BASE" in back.notes[0]


def test_a_slowdown_well_below_the_threshold_is_found_where_the_spread_was_measured(make_sides):
    comparison = compare(*make_sides([0.0, 0.03, 0.0, 0.0, -0.03, 0.0, 0.0, 0.0]))
    assert [row.verdict for row in comparison.rows] == [
        "same", "regressed", "same", "same", "improved", "same", "same", "same",
    ]  # fmt: skip
    assert {row.spread for row in comparison.rows} == {"measured"}
    assert {row.processes for row in comparison.rows} == {(3, 3)}
    assert exit_code(comparison) == 1
    data = document(comparison)
    assert data["spread"]["source"] == "measured"
    assert data["spread"]["between_processes"]["device_time_s"] == pytest.approx(0.004, rel=0.4)
    assert all(0.01 < row["detectable"] < 0.04 for row in data["rows"])
    notes = "\n".join(table_of(comparison).notes)
    assert "spread measured between processes" in notes
    assert "spread assumed" not in notes


def test_what_the_data_cannot_show_is_inconclusive_and_says_what_it_could_have_seen(make_sides):
    comparison = compare(*make_sides([0.02] * 4, sd=0.05))
    assert comparison.verdict == "inconclusive"
    assert exit_code(comparison) == 3
    assert all(row.detectable > 0.1 for row in comparison.rows)
    assert comparison.detectable()["device_time_s"][1] == max(row.detectable for row in comparison.rows)


def test_a_run_of_one_process_leaves_the_spread_assumed_and_says_so(make_sides, make_processes, make_run):
    base, _ = make_sides([0.0] * 3)
    alone = make_run(*(replace(one, processes=one.processes[:1]) for one in base.records))
    comparison = compare(base, alone)
    assert {row.spread for row in comparison.rows} == {"assumed"}
    assert any(note.startswith("spread assumed: two runs") for note in table_of(comparison).notes)
    mixed = make_run(base.records[0], *alone.records[1:])
    comparison = compare(base, mixed)
    assert document(comparison)["spread"]["source"] == "mixed"
    verdicts = [row[-1] for row in table_of(comparison).rows]
    assert verdicts == ["same", "same (spread assumed)", "same (spread assumed)"]


def test_one_slowdown_is_one_row(make_processes, make_run):
    def side(factor):
        return make_run(
            *(
                make_processes(
                    [
                        {
                            "device_time_s": 1e-3 * factor * jitter,
                            "throughput_per_s": 8e3 / (factor * jitter),
                            "host_time_s": 2e-3 * jitter,
                        }
                        for jitter in (1.0, 1.002, 0.999)
                    ],
                    batch,
                )
                for batch in (1, 2, 3)
            )
        )

    comparison = compare(side(1.0), side(1.1))
    gated = [(row.metric, row.verdict) for row in comparison.rows if row.gated]
    assert gated == [("device_time_s", "regressed"), ("host_time_s", "same")] * 3
    (throughput, *_) = [row for row in comparison.rows if row.metric == "throughput_per_s"]
    assert (throughput.verdict, throughput.gated) == ("regressed", False)
    assert "restates the time: not counted twice" in throughput.notes
    named = compare(side(1.0), side(1.1), ("throughput_per_s",))
    assert [row.gated for row in named.rows] == [True] * 3


def test_more_memory_is_a_regression_however_equal_the_processes(make_processes, make_run):
    def side(size):
        return make_run(*(make_processes([{"peak_memory_bytes": float(size)}] * 3, batch) for batch in (1, 2)))

    assert compare(side(1000), side(1000)).verdict == "same"
    assert compare(side(1000), side(1005)).verdict == "same"
    assert compare(side(1000), side(1020)).verdict == "regressed"


def clocked(make_processes, make_run, clocks, times):
    return make_run(
        *(
            make_processes(
                [
                    {"device_time_s": time * batch, "sm_clock_hz": clock}
                    for clock, time in zip(clocks, times, strict=True)
                ],
                batch,
            )
            for batch in (1, 2, 3, 4)
        )
    )


@pytest.mark.parametrize(
    ("clock", "factor", "verdict"),
    [
        (0.96, 1 / 0.96, "same"),  # computes: as many cycles as before
        (0.96, 1.0, "same"),  # waits for memory: as long as before, in fewer cycles
        (1.04, 1.0, "same"),  # the same, and more cycles than before: no alarm
        (0.96, 1.10, "regressed"),  # worse either way
        (1.04, 1.03, "regressed"),
        (0.90, 1 / 0.90, "inconclusive"),  # 11 % slower, and the clock may not be all of it
    ],
)
def test_where_the_clock_moved_the_verdict_holds_in_time_and_in_cycles(
    make_processes, make_run, clock, factor, verdict
):
    jitter = np.array([1.0, 1.001, 0.999])
    base = clocked(make_processes, make_run, [1.98e9] * 3, 1e-3 * jitter)
    new = clocked(make_processes, make_run, [1.98e9 * clock] * 3, 1e-3 * factor * jitter[::-1])
    comparison = compare(base, new, ("device_time_s",))
    assert {row.verdict for row in comparison.rows} == {verdict}
    assert all("per cycle" in note for row in comparison.rows for note in row.notes)


def test_a_clock_that_stands_still_is_not_looked_at(make_processes, make_run):
    base = clocked(make_processes, make_run, [1.98e9, 1.98e9, 1.975e9], [1e-3] * 3)
    assert [row.notes for row in compare(base, base, ("device_time_s",)).rows] == [()] * 4


def test_clocks_of_single_processes_count_too(make_record, make_run):
    sides = [
        make_run(
            replace(
                make_record(),
                metrics={
                    "device_time_s": Value(1e-3 / clock, "s", (0.999e-3 / clock, 1.001e-3 / clock)),
                    "sm_clock_hz": Value(1.98e9 * clock, "Hz"),
                },
            )
        )
        for clock in (1.0, 0.9)
    ]
    (row,) = compare(*sides, ("device_time_s",)).rows
    assert row.ratio == pytest.approx(1.111, abs=1e-3)
    assert row.verdict == "inconclusive"
    assert "per cycle 1.000x" in row.notes[0]


def test_levels_are_shown_in_their_better_direction_and_do_not_count(make_processes, make_run):
    def side(busy):
        return make_run(
            *(make_processes([{"device_time_s": 1e-3, "gpu_busy_fraction": busy}] * 3, batch) for batch in (1, 2))
        )

    comparison = compare(side(0.9), side(0.6))
    levels = [(row.verdict, row.gated) for row in comparison.rows if row.metric == "gpu_busy_fraction"]
    assert levels == [("regressed", False)] * 2
    assert exit_code(comparison) == 0
    assert exit_code(compare(side(0.9), side(0.6), ("gpu_busy_fraction",))) == 1
    assert compare(side(0.6), side(0.9), ("gpu_busy_fraction",)).verdict == "improved"


def test_runs_that_did_not_take_turns_are_marked(make_sides, make_run):
    base, new = make_sides([0.0, 0.0])

    def at(run, start):
        return make_run(*(replace(one, window_utc=(start, start + 10)) for one in run.records))

    assert not compare(at(base, 0), at(new, 5)).messages
    (message,) = compare(at(base, 0), at(new, 20)).messages
    assert "one after the other" in message


def test_rows_without_a_counterpart_still_show_the_spread(make_sides, make_run):
    base, new = make_sides([0.0] * 12, sd=0.006, seed=2)
    few = make_run(*new.records[:1])
    pooled = compare(base, few).rows[0].detectable
    alone = compare(make_run(*base.records[:1]), few).rows[0].detectable
    assert pooled < alone


def test_the_minimal_effect_and_the_family_are_options(make_sides):
    sides = make_sides([0.03] * 8, sd=0.004)
    assert compare(*sides).verdict == "regressed"
    assert compare(*sides, rule=Rule(min_effect=0.04)).verdict == "same"
    assert compare(*sides, rule=Rule(family=10**9)).verdict == "same"


def test_a_session_without_a_comparison_does_not_pay_for_the_statistics():
    program = "import sys, joulemark.report.output, joulemark.plugin.session; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0


# -- stored results of other tools


def test_reruns_of_one_binary_raise_no_alarm_and_the_two_slow_rows_are_found():
    runs = [read_result(RUNS / "reruns" / f"same_{number}.json") for number in range(5)]
    found = [compare(base, new) for base in runs for new in runs if new is not base]
    assert len(found) == 20
    assert [exit_code(one) for one in found] == [0] * 20
    slow = compare(runs[0], read_result(RUNS / "reruns" / "two_slow.json"))
    assert [row.key.split("-")[1:3] for row in slow.rows if row.verdict == "regressed"] == [
        ["batch=32", "model=m03"],
        ["batch=1", "model=m07"],
    ]
    assert exit_code(slow) == 1
    assert table_of(slow).notes[-1].startswith("compared 40 cases, 40 rows: 2 regressed, 38 same")


@pytest.mark.parametrize("form", ["terminal", "markdown", "csv", "json"])
@pytest.mark.parametrize(("number", "name"), [(0, "007"), (1, "1e3"), (2, "inf"), (3, "0x10")])
def test_identifiers_are_printed_character_for_character(form, number, name):
    run = read_result(RUNS / f"identifiers_{number}.json")
    text = html.unescape(render_comparison(compare(run, run), form, 200))
    assert re.search(rf"=\\?{name}\b", text)


@pytest.mark.parametrize("form", ["terminal", "markdown", "json"])
def test_commits_and_drivers_are_no_numbers(form):
    runs = [read_result(RUNS / f"identifiers_{number}.json") for number in range(4)]
    shown = [html.unescape(render_comparison(compare(*pair), form, 200)) for pair in pairwise(runs)]
    for text, names in zip(
        shown,
        [("1234567e8", "0005747", "550.90", "550.900"), ("9e99999", "535.10"), ("nan", "470.0")],
        strict=True,
    ):
        for name in names:
            assert re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text), name
