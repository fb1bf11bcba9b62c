"""Figures that no machine has are refused where files are read, by name."""

from __future__ import annotations

import json

import pytest

from joulemark.bounds import AMOUNTS, LEAST, MOST, check_figures
from joulemark.metrics import all_metrics, find
from joulemark.records import Case, Environment, Record, Value
from joulemark.store import RunWriter, read_run


def figures(name, value, unit="s", interval=None):
    return {name: Value(value, unit, interval)}


@pytest.mark.parametrize("unit", MOST)
def test_the_largest_figure_passes_and_what_is_larger_does_not(unit):
    for value in (MOST[unit], -MOST[unit], 0.0, 1.0, None):
        check_figures(figures("any", value, unit, (-1.0, 1.0)), {}, ())
    for sign in (1, -1):
        with pytest.raises(ValueError, match=r"metrics\.any\.value is .* and no such figure is beyond"):
            check_figures(figures("any", sign * 1.01 * MOST[unit], unit), {}, ())
        with pytest.raises(ValueError, match=r"metrics\.any\.interval is"):
            check_figures(figures("any", 1.0, unit, (0.0, sign * 1.01 * MOST[unit])), {}, ())


@pytest.mark.parametrize("name", sorted(AMOUNTS))
def test_an_amount_is_zero_or_not_below_its_least(name):
    unit = find(name).unit
    for value in (LEAST[unit], 0.0, -LEAST[unit] / 2):
        check_figures(figures(name, value, unit), {name: [value, 1.0]}, ({name: value},))
    for held in (
        (figures(name, LEAST[unit] / 2, unit), {}, ()),
        ({}, {name: [1.0, LEAST[unit] / 2]}, ()),
        ({}, {}, ({name: 1.0}, {name: LEAST[unit] / 2})),
    ):
        with pytest.raises(ValueError, match=f"{name}.* and no such amount is below"):
            check_figures(*held)


def test_differences_come_as_close_to_zero_as_they_like():
    check_figures(figures("exposed_overhead_unprofiled_s", 5e-17), {"idle_tail_s": [1e-18]}, ())


def test_what_has_no_known_unit_passes():
    check_figures(figures("own", 1e80, "furlongs"), {"own": [1e80]}, ({"own": 1e80},))


def test_names_of_samples_tell_their_units():
    for metric in all_metrics():
        if metric.unit in ("s", "1/s", "J", "W", "Hz", "B", "degC") and metric.name != "warmup_s":
            with pytest.raises(ValueError, match=rf"samples\.{metric.name} is .* {metric.unit},"):
                check_figures({}, {metric.name: [1.0, 2 * MOST[metric.unit]]}, ())


@pytest.mark.parametrize("value", [1e-300, 1e-13, 2e9, 1e99])
def test_a_file_with_such_a_figure_is_read_without_its_record_and_says_where(tmp_path, value):
    path, environment = tmp_path / "run.jsonl", Environment({})
    with RunWriter(path, "ab" * 16, environment, 1.7e9) as out:
        for batch in (1, 2):
            record = Record(Case("lenet5", batch_size=batch), "ab" * 16, "ok", environment.environment_id,
                            metrics=figures("host_time_s", 0.5))  # fmt: skip
            out.write(record)
    lines = path.read_text().splitlines()
    damaged = json.loads(lines[2])
    damaged["metrics"]["host_time_s"]["value"] = value
    path.write_text("\n".join([*lines[:2], json.dumps(damaged)]) + "\n")
    run = read_run(path)
    assert [one.case.batch_size for one in run.records] == [1]
    (problem,) = run.problems
    assert problem.startswith(
        f"line 3: a record line that does not hold what it should (metrics.host_time_s.value is {value!r} s, "
    )
