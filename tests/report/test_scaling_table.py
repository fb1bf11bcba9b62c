from dataclasses import replace

import pytest

from joulemark.records import Value
from joulemark.report.scaling_table import scaling_table
from joulemark.report.tables import tables_of_run


@pytest.fixture
def of_ranks(make_record):
    """Builds the record of a number of ranks."""

    def make(world_size, figures, **more):
        one = make_record(figures=figures, **more)
        return replace(one, case=replace(one.case, world_size=world_size))

    return make


def rows_of(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_cases_of_several_ranks_stand_beside_that_of_one(of_ranks, make_run):
    two = of_ranks(
        2,
        {"device_time_s": 0.011, "throughput_per_s": 1454.0, "exposed_communication_s": 8e-4, "straggler_wait_s": 1e-4},
    )
    two.metrics["scaling_efficiency"] = Value(0.909, "1", (0.89, 0.93))
    four = of_ranks(4, {"device_time_s": 0.012, "straggler_wait_s": 1e-3}, notes={"throughput_per_s": "lost"})
    four.metrics["straggler_rank"] = Value(3.0, "1")
    one = of_ranks(1, {"device_time_s": 0.010, "throughput_per_s": 800.0})
    other = of_ranks(1, {"device_time_s": 0.002}, workload="lenet5")
    run = make_run(four, other, two, one)
    table = tables_of_run(run)[-1]
    assert table.notes  # the notes of all tables stand under the last
    first, second, third = rows_of(table)
    assert [row["ranks"] for row in (first, second, third)] == ["1", "2", "4"]
    assert (first["scaling"], first["exposed comm."], first["straggler"]) == ("-", "-", "-")
    assert (second["scaling"], second["straggler"]) == ("0.909 [0.89, 0.93]", "none")
    assert (second["exposed comm."], second["items/s"]) == ("800 µs", "1.45 k")
    assert (third["scaling"], third["items/s"], third["straggler"]) == ("n/a", "n/a", "rank 3")
    assert "energy/item" not in table.columns


def test_a_run_of_single_ranks_has_no_such_table(of_ranks, make_run):
    run = make_run(of_ranks(1, {"device_time_s": 0.010}))
    assert scaling_table(run.records) is None
    assert len(tables_of_run(run)) == 1
