"""One window of each model that an H200 recorded, beside what Nsight Compute said of the same steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attribution_analysis import against, one_window_alone
from attribution_parts import CACHES, MODELS, best_recording
from attribution_tables import errors_table, figures_table

from joulemark.attribution.recording import read_recording

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "attribution" / "models"
KEPT = ROOT / "results" / "nvidia-h200" / "attribution-ncu.json"
BOOST_HZ = 132 * 1.98e9


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """A model's window alone, and both comparisons."""
    alone = one_window_alone(best_recording(DATA, request.param))
    held = {"in_windows_s": alone.seconds, "recorded_s": None}
    found = {caches: against(DATA, request.param, caches, alone.places, held, alone) for caches in CACHES}
    return request.param, alone, found


def test_one_window_says_what_nsight_compute_says(model):
    _, alone, found = model
    kept = found["kept"]
    assert set(kept["checks"].values()) == {True}
    assert [one["compared"]["passes"] for one in found.values()] == [1, 1]
    assert kept["compared"]["differing"] == []
    assert kept["compared"]["time_compared"] > 0.75
    long = kept["compared"]["classes_of_long_launches"]
    assert sum(one["time_s"] for one in long) > 0.5 * sum(one["time_s"] for one in kept["compared"]["classes"])
    assert all(0.75 * BOOST_HZ < one["sm_cycles_per_s"] < 1.01 * BOOST_HZ for one in long)
    assert all(abs(ratio - 1) < 0.01 for ratio in alone.totals.values())


def test_nsight_compute_s_flush_takes_writes_away_and_adds_reads(model):
    """It writes back what the kernels before have left, which else leaves the L2 under the next ones."""
    _, _, found = model
    kept, flushed = (sums(found[caches]["compared"]["classes"]) for caches in ("kept", "flushed"))
    assert flushed["read"] > 1.01 * kept["read"]
    assert flushed["written"] < 0.8 * kept["written"]


def sums(classes):
    read = sum(one["ncu_dram_read_bytes"] for one in classes)
    return {"read": read, "written": sum(one["ncu_dram_bytes"] for one in classes) - read}


def test_another_board_says_the_same_of_long_kernels(model):
    """What is committed was recorded later, with the device held, on another board than this window and ``ncu``."""
    name, alone, found = model
    held = json.loads(KEPT.read_text())["models"][name]
    assert held["label"] == read_recording(best_recording(DATA, name)).label
    for caches, one in found.items():
        assert held["ncu"][caches]["profiled_s"] == pytest.approx(one["profiled_s"])
    kept = held["ncu"]["kept"]["compared"]["classes_of_long_launches"]
    for one, two in zip(kept, found["kept"]["compared"]["classes_of_long_launches"], strict=True):
        assert one["class"] == two["class"]
        assert one["dram_error"] == pytest.approx(two["dram_error"], abs=0.03)
    assert alone.window in (0, 1)


@pytest.mark.parametrize("table", [figures_table, errors_table])
def test_documentation_shows_the_tables_of_what_is_committed(table):
    lines = (ROOT / "docs" / "attribution-h200.md").read_text().splitlines()
    told = list(table(json.loads(KEPT.read_text())))
    assert len(told) > 10
    assert told == lines[lines.index(told[0]) :][: len(told)]
