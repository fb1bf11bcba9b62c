"""Toggling of bits stands for the activity that the calibration's own operands showed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from joulemark.energy import bits
from joulemark.energy.calibration import read_calibration

H200 = Path(__file__).parents[2] / "results" / "calibration" / "nvidia-h200.json"


def test_equal_words_do_not_toggle_and_random_ones_do():
    words = np.random.default_rng(1).integers(0, 2**32, 1 << 16, dtype=np.uint32)
    assert bits.toggling(np.full(64, 0xA5, dtype=np.uint64)) == 0
    assert bits.toggling(words) == pytest.approx(1.0, abs=0.01)
    assert bits.toggling(words.astype(np.int64)) == pytest.approx(0.5, abs=0.01)  # an index: its upper half is zero
    assert bits.toggling(np.tile(np.uint64([0, 0, 0, 0, 2**64 - 1, 2**64 - 1, 2**64 - 1, 2**64 - 1]), 9)) == 2.0
    with pytest.raises(ValueError, match="40 bytes hold no two sectors"):
        bits.toggling(np.zeros(5))


@pytest.mark.parametrize(("kind", "within"), [("constant", 0.05), ("normal", 0.04), ("normal_fp32", 0.02)])
@pytest.mark.parametrize("level", ["hbm_read", "hbm_write"])
def test_an_hbm_showed_the_activity_that_the_bits_say(kind, within, level):
    shown = {(row["benchmark"], row["operands"]): row["activity"] for row in read_calibration(H200).activities}
    assert shown[level, kind] == pytest.approx(bits.of_operands(kind), abs=within)


def test_other_levels_are_read_off_what_they_showed():
    measured = {"normal": 0.8, "normal_fp32": 0.94}
    assert bits.activity(bits.of_operands("normal"), measured) == pytest.approx(0.8)
    assert bits.activity(bits.of_operands("normal_fp32"), measured) == pytest.approx(0.94)
    assert bits.activity(0.0, measured) == 0
    assert bits.activity(bits.of_operands("normal") / 2, measured) == pytest.approx(0.4)
    assert bits.activity(0.37, {}) == pytest.approx(0.37)
