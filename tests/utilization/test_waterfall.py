"""Waterfalls that add up to the step, of records whose parts are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from joulemark.records import Case, Record, Value
from joulemark.utilization.waterfall import (
    IDEAL,
    TITLES,
    UNEXPLAINED,
    Waterfall,
    class_shares,
    no_tensor_share,
    waterfall_of,
)

CLASSES = [
    {"class": "tensor_gemm", "uses_tensor_cores": True, "source": "name", "time_s": 4e-3, "launches": 10},
    {"class": "normalization", "uses_tensor_cores": False, "source": "name", "time_s": 3e-3, "launches": 5},
    {"class": "attention", "uses_tensor_cores": None, "source": "name", "time_s": 1e-3, "launches": 5},
]
TIMELINE = {"steps": 5, "plain_s": 10e-3, "profiled_s": 13e-3, "busy_s": 7.9e-3, "kernel_time_s": 8e-3}
REFERENCE = {
    "dtype": "bf16",
    "flop_per_s": 1e15,
    "counter": "pipe_tensor_cycles",
    "share": 0.9,
    "flop_per_count": 1.0,
    "peak_counts_per_s": 1.5e12,
    "step_share": 0.225,
    "step_peak_counts_per_s": 2e12,
}
METRICS = {"device_time_s": 10e-3, "step_flops": 2e12, "peak_flop_per_s": 1e15, "counted_step_s": 10.4e-3}


def record(metrics=METRICS, dtype="bf16", tables=None, **more):
    values = {name: Value(value, "s") for name, value in {**metrics, **more}.items()}
    chosen = {"kernel_classes": CLASSES, "timeline": [TIMELINE], "reference": [REFERENCE]} if tables is None else tables
    return Record(Case("m", "train", "eager", dtype, 8), "r", "ok", "e", metrics=values, tables=chosen)


def test_every_bar_and_their_sum():
    found = waterfall_of(record())
    assert isinstance(found, Waterfall)
    assert found.bars == pytest.approx(
        {
            "ideal": 2e-3,
            "clock": -0.5e-3,  # the unit's clock is 4/3 of what it was at the peak
            "other_work": 0.225 * 10.4e-3 / 0.9 - 1.5e-3,
            "below_peak": 4e-3 - 0.225 * 10.4e-3 / 0.9,
            "no_matrix_kernels": 3e-3,
            "untold_kernels": 1e-3,
            "overlap": -0.1e-3,
            "gpu_idle": 2.1e-3,
            "unexplained": 0.0,
        },
        abs=1e-12,
    )
    assert list(found.bars) == list(TITLES)
    assert sum(found.bars.values()) == pytest.approx(found.step_s)


def test_what_instruments_do_not_agree_on_stays_unexplained():
    """Kernels that the profiler saw take longer than the step had: no bar hides it."""
    slow = {**TIMELINE, "busy_s": 10.7e-3}
    found = waterfall_of(record(tables={"kernel_classes": CLASSES, "timeline": [slow], "reference": [REFERENCE]}))
    assert found.bars["gpu_idle"] == 0
    assert found.unexplained_share == pytest.approx(-0.07)


def test_a_replay_tells_the_idle_time_in_the_process_of_the_step():
    found = waterfall_of(record(device_time_graph_s=8.3e-3))
    assert found.idle_source == "cuda_graph"
    assert found.bars["gpu_idle"] == pytest.approx(1.7e-3)
    assert found.bars[UNEXPLAINED] == pytest.approx(8.3e-3 - 7.9e-3)
    assert waterfall_of(record(device_time_graph_s=10.5e-3)).bars["gpu_idle"] == 0


def test_the_profiler_tells_it_where_nothing_can_be_replayed_without_what_it_adds():
    found = waterfall_of(record())
    assert found.idle_source == "torch_profiler"
    hidden = {**TIMELINE, "profiled_s": 8.0e-3}  # its own timeline shows less idle time than its plain step has
    less = waterfall_of(record(tables={"kernel_classes": CLASSES, "timeline": [hidden], "reference": [REFERENCE]}))
    assert less.bars["gpu_idle"] == pytest.approx(0.1e-3)
    assert less.bars[UNEXPLAINED] == pytest.approx(2e-3)


def test_without_a_counter_of_the_unit_its_bars_are_one():
    tables = {"kernel_classes": CLASSES, "timeline": [TIMELINE], "reference": [{**REFERENCE, "step_share": None}]}
    found = waterfall_of(record(tables=tables))
    assert not {"clock", "other_work"} & set(found.bars)
    assert found.bars["below_peak"] == pytest.approx(2e-3)
    assert sum(found.bars.values()) == pytest.approx(10e-3)
    assert "one bar" in found.notes[0]


def test_fp32_products_run_on_the_ordinary_pipes():
    classes = [
        {"class": "gemm", "uses_tensor_cores": False, "time_s": 5e-3, "launches": 1},
        {"class": "elementwise", "uses_tensor_cores": False, "time_s": 2e-3, "launches": 1},
    ]
    own = record(dtype="fp32", tables={"kernel_classes": classes, "timeline": [{**TIMELINE, "busy_s": 7e-3}]})
    found = waterfall_of(own)
    assert found.unit == "fma"
    assert found.bars[IDEAL] + found.bars["below_peak"] == pytest.approx(5e-3)
    assert found.bars["no_matrix_kernels"] == pytest.approx(2e-3)
    assert no_tensor_share(own) == pytest.approx((0.7, 0.7))


def test_a_compiled_step_may_take_its_flop_from_the_eager_one():
    without = record({name: value for name, value in METRICS.items() if name != "step_flops"})
    assert "ideal time is not known" in waterfall_of(without)
    assert waterfall_of(without, 2e12).bars[IDEAL] == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"metrics": {"step_flops": 1.0, "peak_flop_per_s": 1.0}}, "not timed on the device"),
        ({"device_time_s": 0.0}, "not timed on the device"),
        ({"peak_flop_per_s": -1.0}, "ideal time is not known"),
        ({"tables": {}}, "no timeline of kernels"),
        ({"metrics": {"device_time_s": 1.0, "step_flops": 1.0}}, "ideal time is not known: no counters pass"),
    ],
)
def test_why_there_is_none(change, why):
    assert why in waterfall_of(record(**change))


def test_the_reason_of_the_record_is_the_reason():
    noted = replace(record({"device_time_s": 1.0}), notes={"peak_flop_per_s": "out of memory beside this step"})
    assert "out of memory beside this step" in waterfall_of(noted)


def test_shares_of_the_unprofiled_step():
    assert no_tensor_share(record()) == pytest.approx((0.3, 0.4))
    assert dict(class_shares(record())) == pytest.approx({"tensor_gemm": 0.4, "normalization": 0.3, "attention": 0.1})
    assert no_tensor_share(record(tables={})) is None
    assert dict(class_shares(record(tables={}))) == {}
    assert no_tensor_share(record({})) == pytest.approx((3 / 13, 4 / 13))


def test_strict_json():
    document = waterfall_of(record()).to_json()
    assert sum(bar["share"] for bar in document["bars"]) == pytest.approx(1)
    assert all(bar["about"] for bar in document["bars"])
