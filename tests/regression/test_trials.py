"""The gate judged on many processes of the same binary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_benchmark.utils import PercentageRegressionCheck
from scipy import stats

from joulemark.errors import ConfigurationError, UnreadableInput
from joulemark.records import NOT_REAL, Environment
from joulemark.regression import rivals
from joulemark.regression.processes import cells_of
from joulemark.regression.trials import draw_pairs, evaluate
from joulemark.regression.verdicts import Rule

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schema/aa.schema.json").read_text())


def document(*runs, **more):
    data = json.loads(
        json.dumps(evaluate(list(runs), **{"pairs": 200, "simulated_rows": 2000, **more}), allow_nan=False)
    )
    jsonschema.Draft202012Validator(SCHEMA).validate(data)
    return data


def rates(data, added=0.0):
    return {row["rule"]: row["rate"] for row in data["rates"] if row["added_work"] == added}


@given(st.integers(6, 40), st.integers(1, 60), st.integers(0, 9))
def test_triples_of_a_pair_and_of_a_split_are_disjoint(processes, pairs, seed):
    base, new, splits = draw_pairs(processes, pairs, np.random.default_rng(seed))
    assert len(base) == len(new) >= pairs
    per_split = len(base) // splits
    for start in range(0, len(base), per_split):
        used = np.concatenate([base[start : start + per_split], new[start : start + per_split]]).ravel()
        assert len(set(used.tolist())) == used.size == 6 * per_split
        assert used.max() < processes


def test_the_gate_is_quiet_and_finds_what_was_added(make_processes):
    data = document(make_processes(arms=(0.0, 0.03, 0.05)))
    assert rates(data)["joulemark"] <= 0.01
    assert rates(data, 0.03)["joulemark"] >= 0.9
    assert rates(data, 0.05)["joulemark"] >= 0.99
    assert rates(data)["Mann-Whitney, 5 %"] > 0.2  # takes samples of few processes for independent
    assert rates(data, 0.03)["mean + 5 %"] < 0.1
    assert data["resampling"]["independent_rows"] == 4 * 8
    for row in data["rates"]:
        assert row["interval"][0] <= row["rate"] <= row["interval"][1]
        assert row["regressed"] / row["rows"] == row["rate"]
    assert [one["ratio"] for one in data["cells"][0]["arms"]] == pytest.approx([1.0, 1.03, 1.05], abs=0.005)


def test_components_are_recovered(make_processes):
    _, cells, _ = cells_of([make_processes(cells=6, processes=300, between=0.006, within=0.012, samples=15)])
    found = [cell.components for cell in cells]
    assert np.mean([one.between for one in found]) == pytest.approx(0.006, rel=0.1)
    assert np.mean([one.within for one in found]) == pytest.approx(0.012 * 1.2533 / np.sqrt(15), rel=0.2)


def test_processes_that_stand_apart_are_told_from_scatter_and_simulated_both_ways(make_processes):
    data = document(make_processes(fast={(2, 5), (2, 6)}, arms=(0.0, 0.05)))
    apart = [one for cell in data["cells"] for one in cell["standing_apart"]]
    assert apart == data["cells"][2]["standing_apart"] == pytest.approx([0.94, 0.94], abs=0.02)
    assert data["cells"][2]["between_processes"] < 0.008
    assert rates(data, 0.05)["joulemark"] > 0.98
    rows = data["simulated"]["rates"]
    as_apart, heavy, as_scatter = ([one["rate"] for one in rows if one["model"] == name] for name in
                                   dict.fromkeys(one["model"] for one in rows))  # fmt: skip
    assert max(as_apart[0], heavy[0], as_scatter[0]) <= 0.01
    assert as_apart[2] > 0.98 > as_scatter[2]
    assert as_apart[2] > heavy[2] > as_scatter[2]


def smallest(data):
    return data["smallest_slowdown"]["of_all_rows"]


def test_clocks_that_move_on_both_sides_alike_cost_no_power(make_processes):
    quiet = {"between": 0.001, "within": 0.0005}
    rng = np.random.default_rng(0)
    readings = rng.choice([1.53e9, 1.545e9, 1.56e9, 1.98e9], (8, 24))
    unknown, calm, restless = (
        document(make_processes(**quiet, reading=reading))
        for reading in (None, lambda *_: 1.8e9, lambda cell, one, added: readings[cell, one])
    )
    assert smallest(unknown) == smallest(calm) == smallest(restless) == 0.0125
    scatter = [data["cells"][0]["sm_clock_scatter"] for data in (unknown, calm, restless)]
    assert scatter == [None, 0.0, pytest.approx(0.1, abs=0.03)]
    _, cells, _ = cells_of([make_processes(metric="host_time_s", reading=lambda *_: 1.8e9)])
    assert np.isnan(cells[0].clocks[0.0]).all()


def test_a_slowdown_that_is_the_clock_s_is_none(make_processes):
    def lower(cell, one, added):
        return 1.8e9 * (1 - added) + 1e6 * one

    steady = document(make_processes(between=0.001, arms=(0.0, 0.03), reading=lambda *_: 1.8e9))
    assert rates(steady, 0.03)["joulemark"] == 1
    assert rates(document(make_processes(between=0.001, arms=(0.0, 0.03), reading=lower)), 0.03)["joulemark"] <= 0.01


def test_measured_components_are_simulated(make_processes):
    (none, three, five, *heavy) = document(make_processes(between=0.006))["simulated"]["rates"]
    assert none["rows"] >= 2000
    assert none["rate"] <= 0.01 < 0.9 < three["rate"] < five["rate"]
    assert "heavy tails" in heavy[0]["model"]
    assert heavy[0]["rate"] <= 0.01 < heavy[1]["rate"] < heavy[2]["rate"]


def test_the_smallest_slowdown_is_found_in_so_many_pairs_and_grows_with_the_noise(make_processes):
    quiet, loud = (document(make_processes(between=sd, seed=3))["smallest_slowdown"] for sd in (0.003, 0.012))
    assert 0.01 <= quiet["of_all_rows"] < 0.03 < loud["of_all_rows"] < 0.1
    assert set(quiet["by_cell"]) == {f"cell{i}-nvidia-h200" for i in range(8)}
    hopeless = document(make_processes(between=0.5))["smallest_slowdown"]
    assert hopeless["of_all_rows"] is None


def test_the_smallest_slowdown_is_judged_as_a_row_that_is_slow_alone(make_processes):
    run = make_processes(cells=20, between=0.006, seed=4)
    found = {
        alpha: document(run, rule=Rule(alpha=alpha))["smallest_slowdown"]["of_all_rows"]
        for alpha in (0.05, 0.05 / 20, 0.0001)
    }
    assert found[0.05] == found[0.05 / 20] < found[0.0001]


def test_files_add_their_processes_and_the_same_seed_gives_the_same_document(make_processes):
    parts = [make_processes(processes=9, seed=seed) for seed in (1, 2)]
    assert document(*parts)["resampling"]["processes"] == 18
    assert document(*parts) == document(*parts)
    assert document(*parts, seed=1) != document(*parts)


def test_too_few_processes_are_refused_and_lame_cases_left_out(make_processes):
    with pytest.raises(UnreadableInput, match="5 processes with samples of host_time_s, six are needed"):
        evaluate([make_processes(processes=5, metric="host_time_s")])
    run = make_processes(cells=3)
    lame = replace(run.records[0], sample_counts={})
    name, cells, left_out = cells_of([replace(run, records=(lame, *run.records[1:]))], "device_time_s")
    assert (name, len(cells), len(left_out)) == ("device_time_s", 2, 1)
    assert left_out[0].startswith("cell0-nvidia-h200: 0 processes")


def test_the_metric_is_what_most_cells_have(make_processes):
    run = make_processes(cells=3)
    other = make_processes(cells=4, metric="host_time_s")
    renamed = [replace(one, case=replace(one.case, workload=f"x{i}")) for i, one in enumerate(other.records)]
    assert cells_of([replace(run, records=(*run.records, *renamed))])[0] == "host_time_s"
    assert cells_of([replace(run, records=(*run.records, *renamed[:3]))])[0] == "device_time_s"


def test_what_cannot_be_judged_is_refused(make_processes):
    with pytest.raises(ConfigurationError, match="not judged on 'power_w'"):
        evaluate([make_processes()], "power_w")
    with pytest.raises(ConfigurationError, match="must be positive"):
        evaluate([make_processes()], pairs=0)


# -- the other rules, against their originals


@pytest.fixture
def samples():
    rng = np.random.default_rng(5)
    return [[rng.lognormal(0, 0.05, rng.integers(5, 20)) * (1 + 0.04 * side) for _ in range(6)] for side in (0, 1)]


INDEX = np.array([[0, 1, 2], [3, 4, 5], [1, 3, 5]])


def pooled(processes, index):
    return np.concatenate([processes[i] for i in index])


def test_the_rank_test_is_scipy_s(samples):
    ours = rivals.mann_whitney(*samples, INDEX, INDEX)
    for row, index in zip(ours, INDEX, strict=True):
        old, new = (pooled(side, index) for side in samples)
        assert row == (stats.mannwhitneyu(new, old, alternative="greater", method="asymptotic").pvalue < 0.05)


def test_the_rank_test_is_scipy_s_on_few_samples_too():
    rng = np.random.default_rng(6)
    for _ in range(300):
        old, new = rng.normal(0, 1, rng.integers(3, 7)), rng.normal(1, 1, rng.integers(3, 7))
        ours = rivals.mann_whitney([old], [new], np.array([[0]]), np.array([[0]]))
        theirs = stats.mannwhitneyu(new, old, alternative="greater", method="asymptotic").pvalue < 0.05
        assert ours.tolist() == [theirs]


def test_ties_count_half():
    assert rivals._u_statistic(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0])) == 3.0


def test_pytest_benchmark_s_limit_is_pytest_benchmark_s(samples):
    check = PercentageRegressionCheck("mean", 5)
    ours = rivals.pytest_benchmark(*samples, INDEX, INDEX)
    theirs = [bool(check.fails({"mean": samples[1][i[0]].mean()}, {"mean": samples[0][i[0]].mean()})) for i in INDEX]
    assert ours.tolist() == theirs
    assert len(set(theirs)) == 2


def test_the_limit_on_the_mean_pools_all_processes(samples):
    ours = rivals.mean_limit(*samples, INDEX, INDEX)
    assert ours.tolist() == [pooled(samples[1], i).mean() > 1.05 * pooled(samples[0], i).mean() for i in INDEX]


def test_processes_whose_figures_cannot_be_are_left_out(make_processes):
    run = make_processes(cells=1, processes=8, reading=lambda cell, one, added: 0.0 if one == 2 else 1.98e9)
    (record,) = run.records
    first, *others = record.processes
    broken = replace(record, processes=({**first, "device_time_s": -1.0}, *others))
    _, (cell,), _ = cells_of([replace(run, records=(broken,))])
    assert len(cell.logs[0.0]) == 7
    assert np.isnan(cell.clocks[0.0]).all()
    assert cell.components.clocks == ()


def test_processes_on_simulated_gpus_are_marked(make_processes):
    run = make_processes()
    assert not any("simulated GPUs" in note for note in document(run)["notes"])
    fake = replace(run, environments={key: Environment({"simulated": True}) for key in run.environments})
    note = document(fake)["notes"][0]
    assert note.startswith("measured on simulated GPUs: ")
    assert note.endswith(NOT_REAL)
