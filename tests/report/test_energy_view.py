"""Tables of the energy split, for a reader in a terminal."""

from __future__ import annotations

from joulemark.report.energy_view import workload_tables
from joulemark.report.formats import render


def series(name, verdict, text, batches):
    cell = {"items_per_s": 1.0, "energy_per_item_j": 1.0, "dynamic_per_item_j": 0.5, "power_w": 100.0}
    plateau = {"verdict": verdict, "text": text}
    cells = [{**cell, "batch_size": size} for size in batches]
    return {"series": name, "cells": cells, "throughput_plateau": plateau, "energy_plateau": plateau}


def document(*found):
    judged = {name: {"n": 0} for name in ("uncapped", "uncapped_dynamic", "networks", "capped")}
    summary = {**judged, "baselines": {}, "power": {"below_70_percent_of_limit": None}}
    return {"rows": [], "series": found, "summary": summary, "notes": [], "what_if": [], "trends": []}


def test_series_of_too_few_batches_share_a_line():
    short = [series(name, "too_few_points", "too few points", (8,)) for name in ("a", "b")]
    text = render(
        workload_tables(document(*short, series("c", "plateau", "plateau from 32 [28, 41]", (8, 16)))), "terminal", 80
    )
    assert "too few batch sizes for a plateau: a, b" in text
    assert text.count("too few") == 1
    assert "c, throughput: plateau from 32 [28, 41]\nc, energy: plateau from 32 [28, 41]" in text
