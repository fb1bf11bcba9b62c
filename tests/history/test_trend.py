import numpy as np
import pytest
from scipy import stats

from joulemark.history.runs import Figures, PastRun, differences, setup_of, sorted_drivers
from joulemark.history.trend import Ratio, trend_of, trimmed_ratio
from joulemark.records import Case, Environment
from tests.history.simulated import DRIVERS, drivers_by_run, levels


def figures_of(times, drivers, **more):
    runs = [PastRun(f"{at:04d}.jsonl", f"{at:032x}", 1.7e9 + at, driver, {"driver": driver, **more.get("setup", {})})
            for at, driver in enumerate(drivers)]  # fmt: skip
    cases = tuple(Case(f"model{row}", batch_size=1) for row in range(times.shape[0]))
    return Figures("device_time_s", tuple(runs), cases, times)


@pytest.mark.parametrize(("base", "new"), [(2, 2), (3, 5), (12, 7), (40, 100)])
def test_the_ratio_and_its_interval_are_those_of_yuen(base, new):
    rng = np.random.default_rng(base)
    a, b = np.exp(rng.normal(0, 0.1, base)), np.exp(rng.normal(0.2, 0.3, new))
    expected = stats.ttest_ind(np.log(b), np.log(a), equal_var=False, trim=0.2)
    found = trimmed_ratio(a, b, confidence=0.9)
    reference = expected.confidence_interval(0.9)
    assert found.interval == pytest.approx((np.exp(reference.low), np.exp(reference.high)))
    assert found.value == pytest.approx(np.exp(stats.trim_mean(np.log(b), 0.2) - stats.trim_mean(np.log(a), 0.2)))


def test_what_has_no_ratio_has_none():
    some = np.array([1.0, 2.0, 3.0])
    assert trimmed_ratio(some, np.array([4.0])) == Ratio(pytest.approx(4 / 6 ** (1 / 3)), None)
    assert trimmed_ratio(some, np.array([])) == Ratio()
    assert trimmed_ratio(some, np.array([1.0, 0.0])) == Ratio()
    assert trimmed_ratio(np.array([2.0, 2.0]), np.array([4.0, 4.0])) == Ratio(pytest.approx(2), pytest.approx((2, 2)))


def test_drivers_are_sorted_as_versions_are():
    mixed = ["580.159.04", "580.65.06", "unknown", "575.51.03", "580.65.06", "1000.1"]
    assert sorted_drivers(mixed) == ["unknown", "575.51.03", "580.65.06", "580.159.04", "1000.1"]


def test_a_change_is_named_with_its_drivers_and_its_rows():
    times = levels(np.random.default_rng(2), 10, 90, ((30, 1.06, 0.3), (60, 0.95, 1.0)))
    trend = trend_of(figures_of(times, drivers_by_run(90, (30, 60)), setup={"torch": "2.14"}))
    assert [(one.at, one.before.driver, one.run.driver) for one in trend.changes] == [
        (30, DRIVERS[0], DRIVERS[1]),
        (60, DRIVERS[1], DRIVERS[2]),
    ]
    first, second = trend.changes
    assert {row.case.workload for row in first.rows} == {"model0", "model1", "model2"}
    assert len(second.rows) == 10
    for change, true in ((first, 1.06), (second, 0.95)):
        assert change.ratio.interval[0] <= true <= change.ratio.interval[1]
        assert change.ratio.interval[1] / change.ratio.interval[0] < 1.03
        assert change.differences == {"driver": (change.before.driver, change.run.driver)}
    assert first.rows[0].after / first.rows[0].before == pytest.approx(1.06, rel=0.02)


def test_the_interval_of_a_change_of_all_rows_knows_that_a_run_shares_its_luck():
    """With the rows taken for independent, it would miss the true ratio most of the time."""
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(40):
        times = levels(rng, 30, 40, ((20, 1.2, 1.0),), own=0.005, common=0.03)
        changes = [one for one in trend_of(figures_of(times, ["1"] * 40)).changes if abs(one.at - 20) <= 1]
        hits += any(one.ratio.interval[0] <= 1.2 <= one.ratio.interval[1] for one in changes)
    assert hits >= stats.binom.ppf(0.001, 40, 0.95)


def test_a_driver_change_that_cannot_be_told_from_the_place_is_the_place():
    times = levels(np.random.default_rng(5), 3, 60, ((30, 1.04, 1.0),), common=0.02)
    free = trend_of(figures_of(times, ["580.1"] * 60)).changes
    assert len(free) == 1
    first, last = free[0].between
    beside = last if last != free[0].at else first
    assert beside != free[0].at
    named = trend_of(figures_of(times, ["580.1"] * beside + ["590.1"] * (60 - beside))).changes
    assert [(one.at, one.run.driver) for one in named] == [(beside, "590.1")]


def test_levels_by_driver_have_ratios_to_the_driver_before():
    times = np.array([[1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0], [np.nan] * 3 + [5.0] * 3 + [np.nan] * 3])
    drivers = ["580.159"] * 3 + ["580.65"] * 3 + ["575.1"] * 3
    trend = trend_of(figures_of(times, drivers))
    assert trend.drivers == ("575.1", "580.65", "580.159")
    medians = {driver: (level.median, level.runs) for driver, level in trend.levels[0].items()}
    assert medians == {"575.1": (3.0, 3), "580.65": (2.0, 3), "580.159": (1.0, 3)}
    assert trend.levels[0]["580.159"].ratio.value == pytest.approx(0.5)
    assert trend.levels[0]["575.1"].ratio is None
    assert trend.levels[1].keys() == {"580.65"}
    assert trend.changes == ()


def test_figures_that_are_not_above_zero_change_without_a_ratio():
    times = levels(np.random.default_rng(7), 2, 60, ((30, 3.0, 1.0),)) * 0 + np.random.default_rng(7).normal(
        size=(2, 60)
    )
    times[:, 30:] += 20.0
    (change,) = trend_of(figures_of(times - 10, ["1"] * 60)).changes
    assert (change.at, change.ratio) == (30, Ratio())


def test_a_setup_is_what_may_move_a_figure():
    gpus = [{"vbios": "96.00", "power_limit_w": 700.0, "ecc": True}, {"vbios": "96.00", "power_limit_w": 500.0}]
    facts = {"driver": "580.1", "cuda": None, "packages": {"torch": "2.14", "scipy": None}, "gpus": gpus, "git": None,
             "host": {"name": "a"}}  # fmt: skip
    assert setup_of(Environment(facts)) == {"driver": "580.1", "host": "a", "torch": "2.14", "vbios": "96.00",
                               "power_limit_w": "500.0, 700.0", "ecc": "True"}  # fmt: skip
    assert setup_of(Environment({"gpus": "none", "host": 3, "packages": []})) == {}
    one, other = (
        PastRun("", "", None, "", setup) for setup in ({"torch": "1", "cuda": "13"}, {"torch": "2", "x": "y"})
    )
    assert differences(one, other) == {"torch": ("1", "2"), "cuda": ("13", None), "x": (None, "y")}
