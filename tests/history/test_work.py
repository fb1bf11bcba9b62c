"""What a sample is of, as far as a record says."""

from __future__ import annotations

import pytest

from joulemark.history.work import work_of

TURNS = [{"case_id": "a", "batch_size": batch, "round": 0, "issue_s": 1e-3} for batch in (64, 1, 8)]


@pytest.mark.parametrize(
    ("figures", "tables", "work"),
    [
        ({"device_time_s": 2e-3, "host_time_s": 3e-3, "throughput_per_s": 4000.0}, {}, "8 items"),
        ({"host_time_s": 2e-3, "throughput_per_s": 500.0000001}, {}, "1 item"),
        ({"host_time_s": 2e-3, "throughput_per_s": 650.0}, {}, ""),
        ({"host_time_s": 2e-3}, {"kernels": [{"time_s": 1.0}]}, ""),
        ({"host_time_s": 0.0, "throughput_per_s": 650.0}, {}, ""),
        ({}, {"issue_turns": TURNS}, "issue_s of batches 1 8 64"),
        ({}, {"issue_turns": [{**one, "step_s": 1e-3} for one in TURNS]}, "issue_s step_s of batches 1 8 64"),
        ({}, {"issue_turns": TURNS[:2], "busy_turns": [{"batch_size": 1, "busy_s": None}]},
         "issue_s of batches 1 64, busy_s of batches 1"),
    ],
)  # fmt: skip
def test_work_is_told_from_figures_and_tables(figures, tables, work):
    assert work_of(figures, tables) == work
