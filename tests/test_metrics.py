"""Figures as a person reads them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulemark.metrics import Metric, all_metrics, find, format_ratio, format_value, register


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.00123, "s", "1.23 ms"),
        (2.5e-9, "s", "2.5 ns"),
        (3e-16, "s", "0.3 fs"),
        (90.0, "s", "90 s"),
        (0.0, "s", "0 s"),
        (-0.002, "s", "-2 ms"),
        (1.5e6, "1/s", "1.5 M"),
        (812.0, "1/s", "812"),
        (0.711, "1/s", "0.711"),
        (2e-5, "1/s", "2e-05"),
        (0.31, "J", "310 mJ"),
        (700.0, "W", "700 W"),
        (1.98e9, "Hz", "1.98 GHz"),
        (5 * 2**20, "B", "5 MiB"),
        (1000.0, "B", "1000 B"),
        (1023 * 2**20, "B", "1023 MiB"),
        (0.031, "1", "0.031"),
        (61.0, "degC", "61 °C"),
        (2e15, "1/s", "2000 T"),
        (None, "s", "n/a"),
        (math.nan, "s", "n/a"),
        (math.inf, "J", "n/a"),
        (3.25, "furlongs", "3.25 furlongs"),
        (1e-300, "s", "1e-300 s"),
        (-1e-300, "J", "-1e-300 J"),
        (1e300, "s", "1e+300 s"),
        (1.23456e19, "1/s", "1.23e+19"),
        (1e300, "B", "1e+300 B"),
        (1e300, "1", "1e+300"),
    ],
)
def test_values_in_their_units(value, unit, text):
    assert format_value(value, unit) == text


def test_the_number_of_digits():
    assert format_value(0.00123456, "s", 5) == "1.2346 ms"
    assert format_value(0.00123456, "s", 1) == "1 ms"


@given(st.floats(1e-15, 1e15), st.sampled_from(["s", "J", "W", "Hz", "B", "1/s"]))
def test_nothing_is_lost_but_digits(value, unit):
    number, _, suffix = format_value(value, unit).partition(" ")
    prefix = suffix.removesuffix("" if unit == "1/s" else unit)
    factors = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1, "m": 1e-3, "µ": 1e-6, "n": 1e-9, "p": 1e-12, "f": 1e-15}
    if unit == "B":
        factors = {"": 1} | {f"{one}i": 2.0 ** (10 * power) for power, one in enumerate("KMGT", 1)}
    assert float(number) * factors[prefix] == pytest.approx(value, rel=0.006)


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(1.0984, "1.098"), (0.0213, "0.021"), (0.0, "0.000"), (52134.2, "5.21e+04"), (3e-9, "3e-09"), (1e299, "1e+299")],
)
def test_ratios_have_few_digits(ratio, text):
    assert format_ratio(ratio) == text


def test_every_metric_is_described():
    names = [one.name for one in all_metrics()]
    assert len(set(names)) == len(names)
    for one in all_metrics():
        assert one.unit
        assert one.title
        assert one.about
        assert one.better in ("lower", "higher", "neither")


def test_an_unknown_metric_is_shown_as_it_is():
    assert find("made_up") == Metric("made_up", "", "neither", "made_up", "not known to this version")
    with pytest.raises(ValueError, match="registered twice"):
        register(find("host_time_s"))
