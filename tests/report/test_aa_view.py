"""Trials of the gate as tables."""

from __future__ import annotations

import pytest

from joulemark.report import aa_view, formats


def render(document, form, width=None):
    return formats.render(aa_view.tables(document), form, width)


RATE = {"rows": 40, "regressed": 1, "rate": 0.025, "interval": [0.004, 0.13], "comparisons": 4, "failed": 1}
RATE |= {"failed_rate": 0.25, "failed_interval": [0.05, 0.7]}
DOCUMENT = {
    "metric": "device_time_s",
    "gpu_models": ["nvidia-h200"],
    "resampling": {"statement": "one split"},
    "rates": [
        {"rule": "joulemark", "added_work": 0.03, **RATE},
        {"rule": "joulemark", "added_work": 0.0, **RATE},
        {"rule": "mean + 5 %", "added_work": 0.0, **RATE},
    ],
    "simulated": {
        "rates": [
            {"model": model, "slowdown": 0.05, "rows": 9, "regressed": 9, "rate": rate, "interval": [0.7, 1.0]}
            for model, rate in (("some apart", 1.0), ("all normal", 0.9))
        ]
    },
    "smallest_slowdown": {"share": 0.95, "of_all_rows": 0.0225, "by_cell": {"a<b>-x": 0.02, "c": None}},
    "cells": [
        {
            "key": key,
            "median": 0.00123,
            "between_processes": 0.004,
            "within_process": 0.0011,
            "standing_apart": [0.9362] if key == "c" else [],
            "arms": [{"added_work": 0.0, "ratio": 1.0}, {"added_work": 0.03, "ratio": 1.0301}],
        }
        for key in ("a<b>-x", "c")
    ],
    "notes": ["d: 2 processes"],
}


def test_the_terminal_shows_rates_components_and_what_they_mean():
    text = render(DOCUMENT, "terminal", 160)
    lines = [line.split() for line in text.splitlines()]
    assert ["joulemark", "none", "2.50%", "0.40%..13.00%", "25.00%", "5.00%..70.00%"] in lines
    assert ["joulemark", "+3.0%", "2.50%", "0.40%..13.00%", "25.00%", "5.00%..70.00%"] in lines
    assert ["joulemark,", "simulated", "(1)", "+5.0%", "100.00%", "70.00%..100.00%", "-", "-"] in lines
    assert ["joulemark,", "simulated", "(2)", "+5.0%", "90.00%", "70.00%..100.00%", "-", "-"] in lines
    assert ["c", "1.23", "ms", "0.400%", "0.110%", "0.936x", "-", "1.0301x"] in lines
    assert ["a<b>-x", "1.23", "ms", "0.400%", "0.110%", "-", "2.00%", "1.0301x"] in lines
    for note in (
        "the gate would have failed 1 of 4 comparisons of the same binary",
        "the smallest slowdown found in 95% of trials: 2.25%",
        "one split",
        "joulemark, simulated (1): some apart",
        "d: 2 processes",
    ):
        assert note in text


@pytest.mark.parametrize("form", ["terminal", "markdown"])
def test_the_verdict_stands_first_with_the_cell_that_is_worst(form):
    first = render(DOCUMENT, form, 400).splitlines()[0]
    assert first.strip("*").startswith(
        "the gate would have failed 1 of 4 comparisons of the same binary; "
        "the smallest slowdown found in 95% of trials: 2.25%; worst: c, none up to 40 %; exit code 0"
    )


def test_one_model_has_no_number():
    one = {**DOCUMENT, "simulated": {"rates": DOCUMENT["simulated"]["rates"][:1]}}
    assert "joulemark, simulated: some apart" in render(one, "terminal", 160)


def test_no_slowdown_that_is_found_is_said():
    document = {**DOCUMENT, "smallest_slowdown": {**DOCUMENT["smallest_slowdown"], "of_all_rows": None}}
    assert "no slowdown up to 40 % is found in 95% of trials" in render(document, "terminal", 160)


@pytest.mark.parametrize("part", ["a&lt;b&gt;", "| joulemark | none | 2.50% |"])
def test_markdown_escapes_names(part):
    assert part in render(DOCUMENT, "markdown")
