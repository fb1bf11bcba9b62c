import json
import random
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from joulemark.errors import ConfigurationError
from joulemark.records import Case, Environment, Finding, Value
from joulemark.regression.verdicts import Rule
from joulemark.report.compare import compare
from joulemark.report.comparison import exit_code, meaning_of_exit
from joulemark.report.comparison_table import table_of
from joulemark.report.foreign import read_result

RUNS = Path(__file__).parents[1] / "data" / "runs"
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schema/compare.schema.json").read_text())


def files(base, new):
    return compare(read_result(RUNS / f"{base}.json"), read_result(RUNS / f"{new}.json"))


def document(comparison):
    text = json.dumps(comparison.to_json(), allow_nan=False)
    data = json.loads(text)
    jsonschema.Draft202012Validator(SCHEMA).validate(data)
    return data


def test_partial_overlap_is_named_and_only_common_rows_are_averaged():
    comparison = files("baseline", "candidate")
    data = document(comparison)
    assert data["summary"]["compared"] == 4
    assert [(row["key"], row["ratio"]) for row in data["rows"] if row["verdict"] == "regressed"] == [
        ("bench/test_models.py::test_infer-batch=32-model=resnet50-nvidia-h100-80gb-hbm3", pytest.approx(1.3))
    ]
    assert data["summary"]["geometric_mean"]["host_time_s"] == pytest.approx(1.06779, abs=1e-5)
    assert [key.split("-")[2] for key in data["only_in_new"]] == ["model=convnext_t"]
    assert [key.split("-")[1:3] for key in data["only_in_base"]] == [
        ["batch=8", "model=vit_b_16"],
        ["batch=32", "model=vit_b_16"],
    ]
    assert (data["verdict"], exit_code(comparison)) == ("regressed", 1)
    notes = "\n".join(table_of(comparison).notes)
    for key in data["only_in_new"] + data["only_in_base"]:
        assert key in notes


def test_missing_rows_fail_only_when_asked():
    comparison = compare(read_result(RUNS / "candidate.json"), read_result(RUNS / "baseline.json"))
    assert (exit_code(comparison), exit_code(comparison, fail_on_missing=True)) == (0, 1)


def test_nothing_in_common_is_said_and_is_no_success():
    comparison = files("baseline", "disjoint")
    assert document(comparison)["verdict"] == "inconclusive"
    assert exit_code(comparison) == 3
    assert "nothing in common: no case is in both files" in comparison.messages


def test_a_degenerate_file_equals_itself():
    comparison = files("degenerate", "degenerate")
    rows = {row["key"].split("-")[0].rpartition("::")[2]: row for row in document(comparison)["rows"]}
    assert [row.ratio for row in comparison.rows] == [1.0, 1.0, 1.0, None]
    assert rows["test_noop"]["verdict"] == "same"
    assert (comparison.verdict, exit_code(comparison)) == ("same", 0)


def test_parameter_order_and_addresses_do_not_matter_and_a_new_axis_is_hinted():
    comparison = files("ids_base", "ids_candidate")
    assert [row.ratio for row in comparison.rows] == [pytest.approx(1.3)] * 2
    assert len(comparison.only_in_base) == len(comparison.only_in_new) == 1
    assert any("parameter device more" in message for message in comparison.messages)


@pytest.mark.parametrize(
    ("new", "gated", "environment"),
    [
        ("gpu_h100_other_node", True, {}),
        ("gpu_h100_other_driver", True, {"driver": ("550.90.07", "1000.10")}),
        ("gpu_a100", False, {}),
        ("gpu_not_named", False, {"driver": ("550.90.07", None)}),
    ],
)
def test_other_gpu_models_are_shown_and_not_gated(new, gated, environment):
    comparison = files("gpu_h100", new)
    assert [row.gated for row in comparison.rows] == [gated]
    assert comparison.environment == environment
    assert bool(comparison.messages) != gated
    assert (comparison.verdict, exit_code(comparison)) == (("same", 0) if gated else ("inconclusive", 3))
    assert document(comparison)["summary"]["not_gated"] == (not gated)


@pytest.mark.parametrize("driver", ["550.144.03", "575.57.08", "1000.10"])
def test_another_driver_is_an_axis_and_no_warning(tmp_path, driver):
    text = (RUNS / "gpu_h100.json").read_text().replace("550.90.07", driver)
    (tmp_path / "new.json").write_text(text)
    comparison = compare(read_result(RUNS / "gpu_h100.json"), read_result(tmp_path / "new.json"))
    assert comparison.environment == {"driver": ("550.90.07", driver)}
    assert comparison.messages == ()
    assert f"driver: 550.90.07 -> {driver}" in table_of(comparison).notes
    assert (comparison.rows[0].gated, exit_code(comparison)) == (True, 0)


def test_the_interval_of_a_ratio_joins_both_sides_and_the_spread(make_record, make_run):
    def interval(base, new, spread):
        sides = [
            make_run(replace(make_record(), metrics={"host_time_s": Value(value, "s", bounds)}))
            for value, bounds in (base, new)
        ]
        (row,) = compare(*sides, rule=Rule(spread=spread)).rows
        return row.ratio, row.interval

    one = (1.0, (0.9, 1.2))
    assert interval(one, (2.0, (2.0, 2.0)), 0.0) == (2.0, pytest.approx((2.0 / 1.2, 2.0 / 0.9)))
    assert interval(one, one, 0.02)[1] == pytest.approx((0.8094, 1.2355), abs=1e-4)
    assert interval((1.0, None), (1.0, None), 0.02)[1] == pytest.approx((1 / 1.02, 1.02))


def test_an_interval_of_few_samples_counts_by_what_it_covers(make_record, make_run):
    def width(confidence):
        record = replace(
            make_record(), metrics={"host_time_s": Value(1.0, "s", (0.99, 1.01), confidence=confidence, n=3)}
        )
        (row,) = compare(make_run(record), make_run(record)).rows
        return row.interval[1]

    assert width(0.75) > width(0.95)


@pytest.mark.parametrize(
    ("base", "new", "verdict"),
    [(0.0, 1.0, "inconclusive"), (1.0, 0.0, "inconclusive"), (0.0, 0.0, "same"), (-1.0, 1.0, "inconclusive")],
)
def test_no_ratio_without_two_positive_figures(make_record, make_run, base, new, verdict):
    sides = [make_run(make_record(figures={"host_time_s": value})) for value in (base, new)]
    (row,) = compare(*sides).rows
    assert (row.base, row.new, row.ratio, row.interval, row.verdict) == (base, new, None, None, verdict)
    document(compare(*sides))


def test_an_interval_that_reaches_zero_decides_nothing(make_record, make_run):
    old = make_record(figures={"host_time_s": 1e-9})
    odd = replace(old, metrics={"host_time_s": Value(1e-9, "s", (0.0, 1e-9))})
    comparison = compare(make_run(old), make_run(odd))
    assert [(row.ratio, row.interval, row.verdict) for row in comparison.rows] == [(1.0, None, "inconclusive")]
    document(comparison)


@pytest.mark.parametrize(
    ("metric", "factor", "verdict", "code"),
    [
        ("device_time_s", 1.2, "regressed", 1),
        ("device_time_s", 0.8, "improved", 0),
        ("device_time_s", 1.01, "same", 0),
        ("device_time_s", 1.055, "inconclusive", 3),
        ("throughput_per_s", 0.8, "regressed", 1),
        ("throughput_per_s", 1.2, "improved", 0),
        ("energy_per_item_j", 1.2, "regressed", 1),
        ("peak_memory_bytes", 1.2, "regressed", 1),
    ],
)
def test_each_metric_in_its_better_direction(make_record, make_run, metric, factor, verdict, code):
    base, new = (make_run(make_record(figures={metric: number})) for number in (10.0, 10.0 * factor))
    comparison = compare(base, new)
    (row,) = comparison.rows
    assert (row.metric, row.verdict, row.ratio) == (metric, verdict, pytest.approx(factor))
    assert (comparison.verdict, exit_code(comparison)) == (verdict, code)


FIGURES = {"host_time_s": 1e-3}


def test_the_verdict_stands_first_with_what_changed_and_the_worst(make_record, make_run):
    def side(*times, **more):
        cells = [make_record(batch=batch, figures={"host_time_s": time}) for batch, time in enumerate(times, 1)]
        return make_run(*cells, *([make_record(batch=9, **more)] if more else []))

    def lead(base, new):
        comparison = compare(base, new)
        return table_of(comparison, meaning_of_exit(comparison)).lead

    base = side(1.0, 1.0, 1.0, 1.0)
    assert lead(base, side(1.2, 1.5, 0.5, 1.0)) == (
        "verdict: regressed (exit code 1: something is worse); 3 of 4 cases changed; worst: b2, host time 1.500x"
    )
    assert lead(base, side(0.7, 1.01, 1.0, 0.99)) == (
        "verdict: improved (exit code 0: nothing is worse); 1 of 4 cases changed; worst: b2, host time 1.010x"
    )
    assert lead(base, side(0.7, 1.055, 1.0, 1.0)) == (
        "verdict: inconclusive (exit code 3: it cannot be decided whether something is worse); 1 of 4 cases changed; "
        "worst: b2, host time 1.055x"
    )
    oom = lead(side(1.0, figures=FIGURES), side(1.5, outcome="oom", reason="full"))
    assert oom.endswith("2 of 2 cases changed; worst: b9, ok -> OOM")
    assert lead(base, side(figures=FIGURES)) == "verdict: inconclusive (exit code 3: nothing in common)"
    other = make_run(make_record(gpu="nvidia-a100", figures={"host_time_s": 9.0}, batch=1))
    assert lead(base, other) == "verdict: inconclusive (exit code 3: no figure counts)"


def test_a_throughput_that_fell_is_worse(make_record, make_run):
    def side(*rates):
        return make_run(*(make_record(batch=b, figures={"throughput_per_s": rate}) for b, rate in enumerate(rates, 1)))

    worst = compare(side(1.0, 1.0), side(0.5, 2.0)).worst()
    assert (worst.ratio, worst.verdict) == (0.5, "regressed")


@pytest.mark.parametrize("base", [False, True, None])
@pytest.mark.parametrize("new", [False, True, None])
def test_a_simulated_gpu_is_named_and_never_judged_against_a_real_one(make_record, make_run, base, new):
    def side(simulated, time):
        place = Environment({"driver": "1"} if simulated is None else {"driver": "1", "simulated": simulated})
        record = make_record(figures={"host_time_s": time})
        return make_run(replace(record, environment_id=place.environment_id), environment=place)

    comparison = compare(side(base, 1.0), side(new, 2.0))
    (row,) = comparison.rows
    mixed = {base, new} == {False, True}
    assert (row.gated, exit_code(comparison)) == (not mixed, 3 if mixed else 1)
    fakes = [name for name, simulated in (("BASE", base), ("NEW", new)) if simulated]
    assert [f"{name} was measured on simulated GPUs: no figure of power or energy is real" for name in fakes] == [
        one for one in comparison.messages if "was measured on" in one
    ]
    assert any("shown, not gated" in one for one in comparison.messages) == mixed
    lead = table_of(comparison, meaning_of_exit(comparison)).lead
    assert (f"simulated GPUs in {' and '.join(fakes)}" in lead) == bool(fakes)
    assert ("no figure counts" in lead) == mixed


def test_missing_rows_that_fail_say_so(make_record, make_run):
    both, one = (make_run(*(make_record(batch=b, figures=FIGURES) for b in batches)) for batches in ((1, 2), (1,)))
    comparison = compare(both, one)
    assert meaning_of_exit(comparison) == "exit code 0: nothing is worse"
    assert meaning_of_exit(comparison, True) == "exit code 1: NEW lacks cases or figures of BASE (--fail-on-missing)"


@pytest.mark.parametrize(
    ("base", "new", "verdict", "gated", "code", "note"),
    [
        ("ok", "oom", "regressed", True, 1, "now OOM"),
        ("oom", "ok", "improved", True, 0, "no longer OOM"),
        ("oom", "oom", "same", True, 0, "OOM on both sides"),
        ("ok", "failed", "inconclusive", True, 3, "ok → failed: why"),
        ("oom", "failed", "inconclusive", True, 3, "oom → failed: why"),
        ("ok", "unsupported", "inconclusive", True, 3, "ok → unsupported: why"),
        ("failed", "ok", "inconclusive", False, 3, "failed → ok"),
        ("failed", "oom", "inconclusive", False, 3, "failed → oom: why"),
        ("failed", "failed", "inconclusive", False, 3, "failed → failed: why"),
    ],
)
def test_rows_without_figures_have_a_verdict_too(make_record, make_run, base, new, verdict, gated, code, note):
    sides = [
        make_record(outcome=one, figures=FIGURES if one == "ok" else {}, reason=None if one == "ok" else "why")
        for one in (base, new)
    ]
    comparison = compare(*map(make_run, sides))
    (row,) = comparison.rows
    assert (row.metric, row.base, row.new, row.ratio) == ("outcome", base, new, None)
    assert (row.verdict, row.gated, row.notes) == (verdict, gated, (note,))
    assert exit_code(comparison) == code
    document(comparison)
    assert ("OOM" in table_of(comparison).rows[0]) == ("oom" in (base, new))


def test_what_base_could_not_do_either_costs_nothing_beside_rows_that_count(make_record, make_run):
    failed, good = make_record(outcome="failed", reason="why"), make_record(batch=9, figures=FIGURES)
    comparison = compare(make_run(failed, good), make_run(failed, good))
    assert (comparison.verdict, exit_code(comparison)) == ("same", 0)


def test_what_neither_side_supports_is_no_row(make_record, make_run):
    skipped = make_run(make_record(outcome="unsupported", reason="no decode"), make_record(batch=9, figures=FIGURES))
    comparison = compare(skipped, skipped)
    assert [row.metric for row in comparison.rows] == ["host_time_s"]
    assert comparison.compared == 1
    assert comparison.messages[0].startswith("unsupported on both sides (1): resnet50-")


def test_a_regression_outranks_what_cannot_be_decided(make_record, make_run):
    base = make_run(make_record(figures={"host_time_s": 1.0}), make_record(batch=9, figures={"host_time_s": 1.0}))
    new = make_run(make_record(figures={"host_time_s": 1.055}), make_record(batch=9, figures={"host_time_s": 1.5}))
    assert exit_code(compare(base, new)) == 1


def test_flagged_and_incomplete_sides_are_compared_and_marked(make_record, make_run):
    finding = Finding("throttled", "hot", "", True)
    base = make_run(make_record(figures=FIGURES))
    new = make_run(
        make_record(figures=FIGURES, outcome="flagged", findings=(finding,)),
        completed=False,
        reason="interrupted",
        problems=("line 9: not JSON",),
    )
    comparison = compare(base, new)
    assert comparison.rows[0].verdict == "same"
    assert comparison.rows[0].notes == ("flagged in NEW: throttled",)
    assert comparison.messages == ("NEW is incomplete (interrupted): run.jsonl", "NEW: line 9: not JSON")


def test_a_figure_that_went_missing_is_named_and_fails_when_asked(make_record, make_run):
    base = make_run(make_record(figures={**FIGURES, "energy_per_item_j": 1.0}))
    new = make_run(
        make_record(figures={**FIGURES, "energy_per_item_j": None}, notes={"energy_per_item_j": "no counter"})
    )
    comparison = compare(base, new)
    row = comparison.rows[1]
    assert (row.new, row.ratio, row.gated) == (None, None, False)
    assert row.notes == ("not measured in NEW: no counter",)
    assert (exit_code(comparison), exit_code(comparison, fail_on_missing=True)) == (0, 1)
    assert exit_code(compare(new, base), fail_on_missing=True) == 0


def test_rows_that_claim_to_be_one_case_are_left_out_and_named(make_record, make_run):
    twin = make_record(figures=FIGURES)
    comparison = compare(make_run(twin, twin), make_run(twin))
    assert comparison.rows == ()
    assert "cannot be told apart" in comparison.messages[0]
    assert exit_code(comparison) == 3


def test_the_function_is_named_where_two_swept_the_same(make_record, make_run):
    records = [
        make_record(case=Case("lenet5", batch_size=1, benchmark=name), figures=FIGURES)
        for name in ("bench_a", "bench_b")
    ]
    comparison = compare(make_run(*records), make_run(*records))
    assert [row.key for row in comparison.rows] == ["bench_a:lenet5-b1-cpu", "bench_b:lenet5-b1-cpu"]
    assert len({row.case_id for row in comparison.rows}) == 2


def test_versions_that_differ_are_shown_and_other_hosts_are_not(make_record, make_run):
    old = Environment({"host": {"name": "a"}, "driver": "1", "packages": {"torch": "2.1"}, "gpus": [{"vbios": "9"}]})
    new = Environment({"host": {"name": "b"}, "driver": "2", "packages": {"torch": "2.1"}, "gpus": [{"vbios": "8"}]})
    runs = [make_run(make_record(figures=FIGURES), environment=one) for one in (old, new)]
    assert compare(*runs).environment == {"driver": ("1", "2"), "vbios": ("9", "8")}
    assert "driver: 1 -> 2" in table_of(compare(*runs)).notes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"metrics": ("nothing",)}, "'nothing' is unknown"),
        ({"metrics": ("power_w",)}, "no better direction"),
        ({"rule": Rule(spread=-0.1)}, "the spread -0.1"),
        ({"rule": Rule(threshold=5.0)}, "the threshold 5.0"),
        ({"rule": Rule(spread=float("nan"))}, "the spread nan"),
        ({"rule": Rule(min_effect=1.0)}, "the minimal effect 1.0"),
    ],
)
def test_senseless_options_are_refused(make_record, make_run, options, says):
    run = make_run(make_record(figures=FIGURES))
    with pytest.raises(ConfigurationError, match=says):
        compare(run, run, **options)


def rerun(make_record, make_run, seed, slow=()):
    """Forty rows of 30 samples: level shifts of 0.4 % between runs, 0.1 % within, rare hiccups of the host."""
    rng = random.Random(seed)
    records = []
    for number in range(40):
        level = 1e-3 * (1 + number) * rng.gauss(1, 0.004) * (1.15 if number in slow else 1.0)
        samples = [
            level * rng.gauss(1, 0.001) * (rng.choice([1.5, 4]) if rng.random() < 0.02 else 1) for _ in range(30)
        ]
        samples.sort()
        record = make_record(batch=number + 1)
        records.append(
            replace(record, metrics={"host_time_s": Value(samples[15], "s", (samples[9], samples[20]), n=30)})
        )
    return make_run(*records)


def test_reruns_raise_no_alarm_and_slow_rows_are_found(make_record, make_run):
    runs = [rerun(make_record, make_run, seed) for seed in range(4)]
    for base in runs:
        for new in runs:
            assert compare(base, new).verdict == "same"
    found = compare(runs[0], rerun(make_record, make_run, 9, slow=(3, 17)))
    assert [row.key.split("-")[4] for row in found.rows if row.verdict == "regressed"] == ["b4", "b18"]
    assert exit_code(found) == 1
