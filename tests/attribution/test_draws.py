"""Intervals hold the truth, and wrong clocks are refused, over random steps (the oracle script draws 200)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

PATH = Path(__file__).parents[1] / "oracle" / "attribution_draws.py"


def oracle():
    spec = importlib.util.spec_from_file_location("attribution_draws", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_intervals_hold_the_truth():
    draws = oracle()
    held = [held for seed in range(40) for held in draws.draw(seed)["held"].values()]
    assert np.mean(held) >= draws.HOLD


def test_a_clock_that_is_50_us_wrong_is_always_refused():
    draws = oracle()
    assert all(one for seed in range(10) for one in draws.refused(seed))
