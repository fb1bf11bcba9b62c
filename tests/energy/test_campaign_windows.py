"""What entered the model, each by windows of the committed calibration that were left out and predicted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from joulemark.energy.calibration import read_calibration
from joulemark.energy.fit import design_of, fit
from joulemark.energy.microbench.suite import SUITE
from joulemark.energy.model import voltage
from joulemark.energy.windows import read_windows

FOLDER = Path(__file__).parents[2] / "results" / "calibration"


@pytest.fixture(scope="module")
def windows():
    return read_windows(FOLDER / "nvidia-h200-windows.jsonl").windows


def error_w(windows, monkeypatch, told_apart: bool, family: str) -> float:
    """Paused windows of a family of benchmarks with random operands, predicted from all other windows: rms."""
    monkeypatch.setattr("joulemark.energy.fit._FEWEST_PAUSED", 5 if told_apart else 10**6)
    whole = design_of(windows)

    def left_out(window) -> bool:
        point = window.point
        return (SUITE[point.benchmark].family, point.operands, point.duty) == (family, "random", "paused")

    kept = np.array([not left_out(window) for window in whole.windows])
    others = tuple(window for window in whole.windows if not left_out(window))
    parts = {name: getattr(whole, name)[kept] for name in ("rates", "power", "sigma", "repeat")}
    fitted = fit(dataclasses.replace(whole, **parts, windows=others), draws=2)
    errors = [
        float(fitted.power_w(row, fitted.offset_w(window))) - power
        for row, power, window in zip(whole.rates, whole.power, whole.windows, strict=True)
        if left_out(window)
    ]
    assert len(errors) >= 6
    return float(np.sqrt(np.mean(np.square(errors))))


@pytest.mark.parametrize(("family", "with_w", "without_w"), [("tensor", 6, 13), ("wgmma", 10, 20)])
def test_sms_that_pause_are_predicted_from_those_that_do_not(windows, monkeypatch, family, with_w, without_w):
    assert error_w(windows, monkeypatch, True, family) < with_w
    assert error_w(windows, monkeypatch, False, family) > without_w


def test_the_lowest_clocks_are_predicted_from_the_higher_ones():
    clock, energy = np.array(read_calibration(FOLDER / "nvidia-h200.json").frequency_law["points"]).T
    drop, volts, low = 1 - clock, np.sqrt(energy), clock < 0.85
    assert 1 <= low.sum() <= 4
    curve = np.linalg.lstsq(np.column_stack([drop, -(drop**2)])[~low], 1 - volts[~low], rcond=None)[0]
    line = float(drop[~low] @ (1 - volts[~low]) / (drop[~low] @ drop[~low]))
    assert np.abs([voltage(x, *curve) for x in clock[low]] - volts[low]).max() < 0.01
    assert np.abs(1 - line * drop[low] - volts[low]).min() > 0.04
