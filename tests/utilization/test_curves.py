"""Of which records a plateau is made, and that everyone who shows one gives the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from joulemark.metrics import find
from joulemark.records import Case, Record, Value
from joulemark.report.evidence import gather
from joulemark.report.foreign import read_results
from joulemark.report.plateau_table import plateaus_of
from joulemark.utilization.curves import by_batch, plateau_of, points_of
from joulemark.utilization.summary import document_of

H200 = Path(__file__).parents[2] / "results" / "nvidia-h200"
METRICS = ("throughput_per_s", "energy_per_item_j")


def record(batch, rate, run="a", when=1.0, outcome="ok", processes=()):
    values = {"throughput_per_s": rate, "energy_per_item_j": 1 / rate} if outcome == "ok" else {}
    return Record(
        Case("m", "train", "eager", "bf16", batch),
        run,
        outcome,
        "e",
        window_utc=(when, when + 1),
        metrics={name: Value(value, "1") for name, value in values.items()},
        processes=[{"throughput_per_s": one} for one in processes],
    )


def run_of(rates, **more):
    return [record(batch, rate, **more) for batch, rate in rates.items()]


RISES = {batch: 100.0 * batch for batch in (1, 2, 4, 8)}
LEVELS_OFF = {batch: 100.0 * min(batch, 4) for batch in (2, 4, 8, 16)}


def drawn_from(records):
    measured, _ = by_batch(records)
    return {int(point.batch): point.processes for point in points_of(measured)}


def test_of_several_runs_the_one_that_reached_furthest():
    records = [*run_of(LEVELS_OFF), *run_of(RISES, run="b", when=9.0)]
    for given in (records, records[::-1]):
        assert drawn_from(given) == {batch: (rate,) for batch, rate in LEVELS_OFF.items()}
        assert plateau_of(*by_batch(given)) == plateau_of(*by_batch(run_of(LEVELS_OFF)))


def test_of_those_that_reached_as_far_the_newest():
    faster = {batch: 2 * rate for batch, rate in RISES.items()}
    for when, rates in ((2.0, faster), (0.5, RISES)):
        given = [*run_of(RISES), *run_of(faster, run="b", when=when)]
        assert drawn_from(given) == {batch: (rate,) for batch, rate in rates.items()}


def test_runs_that_are_too_short_by_themselves_are_taken_together():
    given = [*run_of({1: 100.0, 2: 190.0}), *run_of({2: 200.0, 4: 390.0, 8: 700.0}, run="b")]
    assert drawn_from(given) == {1: (100.0,), 2: (190.0, 200.0), 4: (390.0,), 8: (700.0,)}


def test_each_process_has_its_level_and_energy_gains_upwards():
    measured, _ = by_batch([record(8, 100.0, processes=(99.0, 101.0))])
    assert points_of(measured)[0].processes == (99.0, 101.0)
    assert points_of(measured, "energy_per_item_j")[0].processes == (100.0,)


@pytest.mark.parametrize(
    ("outcome", "batch", "why"), [("oom", 16, "memory"), ("oom", 4, "asked for"), ("failed", 16, "asked for")]
)
def test_memory_limits_where_it_ended_the_sweep(outcome, batch, why):
    given = [*run_of(RISES), record(batch, 1.0, outcome=outcome, run="b")]
    measured, did_not_fit = by_batch(given)
    assert plateau_of(measured, did_not_fit).limited_by.endswith(why)
    assert list(measured) == [1, 2, 4, 8]


def test_all_who_show_a_plateau_of_the_committed_runs_give_the_same():
    """`joulemark utilization`, the report (and what it puts side by side), and the table of the run that counts."""
    runs, _ = read_results([H200])
    curves = [curve for workload in gather(runs).workloads for curve in workload.curves]
    shown = {curve.case.case_id: curve for curve in curves if curve.case.phase == "train"}
    told = {}
    for one in document_of(runs)["series"]:
        case = Case.from_json(
            {**{key: one[key] for key in Case.__dataclass_fields__ if key in one}, "batch_size": None}
        )
        if one["benchmark"] == "bench_training":
            told[replace(case, benchmark=None).case_id] = one["throughput_plateau"]
    assert len(told) > 8
    assert {key: shown[key].plateau.to_json() for key in told} == told
    verdicts = {(row.run.run_id, row.series.label): row.plateau for row in plateaus_of(runs, find("throughput_per_s"))}
    for key in told:
        curve = shown[key]
        of_runs = {one.run_id: one.case.series.label for found in curve.records.values() for one in found}
        assert curve.plateau in [verdicts[one] for one in of_runs.items()] or len(curve.batches) < 4
