"""Counters of each kernel over a step's timeline."""

from __future__ import annotations

import pytest

from joulemark.records import Case, Record, Value
from joulemark.utilization.refine import refine

GEMM = "void precomputed_convolve_gemm_f16<__half, 128, 6>(int, int, int, __half const*)"
ADD = "void at::native::vectorized_elementwise_kernel<8, at::native::AddFunctor<float>, std::array<char*, 3ul> >(int)"
ATTENTION = "flash_fwd_kernel"


def record():
    kernels = [
        {"name": GEMM, "class": "tensor_gemm", "uses_tensor_cores": True, "time_s": 4e-3, "launches": 2.0},
        {"name": ADD, "class": "elementwise", "uses_tensor_cores": False, "time_s": 2e-3, "launches": 4.0},
        {"name": ATTENTION, "class": "attention", "uses_tensor_cores": None, "time_s": 1e-3, "launches": 1.0},
    ]
    classes = [
        {"class": "tensor_gemm", "uses_tensor_cores": True, "source": "name", "time_s": 5e-3, "launches": 3.0},
        {"class": "elementwise", "uses_tensor_cores": False, "source": "name", "time_s": 2e-3, "launches": 4.0},
        {"class": "attention", "uses_tensor_cores": None, "source": "name", "time_s": 1e-3, "launches": 1.0},
    ]
    timeline = {"steps": 3, "plain_s": 0.01, "profiled_s": 0.01, "busy_s": 8e-3, "kernel_time_s": 8e-3}
    tables = {"kernels": kernels, "kernel_classes": classes, "timeline": [timeline]}
    metrics = {"device_time_s": Value(0.01, "s")}
    return Record(Case("m", "train", "eager", "bf16", 8), "r", "ok", "e", metrics=metrics, tables=tables)


def entry(name, uses, tensor, dram=None):
    return {"name": name, "uses_tensor_cores": uses, "tensor_active_fraction": tensor, "dram_fraction": dram}


NCU_ADD = "at::native::vectorized_elementwise_kernel<8, at::native::AddFunctor<float>, std::array<char *, 3>>(int)"
COUNTED = {
    "kernels": [
        entry(GEMM, uses=False, tensor=0.0, dram=0.5),
        entry(NCU_ADD, uses=False, tensor=0.0, dram=0.9),
        entry(ATTENTION, uses=True, tensor=0.6, dram=0.1),
    ]
}


def test_a_product_that_never_touches_the_tensor_pipe_changes_its_class():
    found = refine(record(), COUNTED)
    rows = {(row["class"], row["uses_tensor_cores"]): row for row in found.record.tables["kernel_classes"]}
    assert rows["gemm", False]["time_s"] == pytest.approx(4e-3)
    assert rows["gemm", False]["source"] == "counters"
    assert rows["tensor_gemm", True]["time_s"] == pytest.approx(1e-3)  # what the export did not name
    assert rows["attention", True]["time_s"] == pytest.approx(1e-3)
    assert ("attention", None) not in rows
    assert sum(row["time_s"] for row in rows.values()) == pytest.approx(8e-3)
    assert found.moved == (GEMM, ATTENTION)


def test_levels_are_weighted_by_the_timeline_and_say_what_they_saw():
    found = refine(record(), COUNTED)
    assert found.levels["dram_fraction"] == pytest.approx(((4 * 0.5 + 2 * 0.9 + 0.1) / 10, 7 / 8))
    assert found.levels["tensor_active_fraction"] == pytest.approx((0.06, 7 / 8))
    assert "issue_slot_fraction" not in found.levels


def test_time_that_dram_needs_is_told_by_bar_of_the_waterfall():
    found = refine(record(), COUNTED)
    assert found.dram_bound["no_matrix_kernels"] == pytest.approx((4e-3 * 0.5 + 2e-3 * 0.9, 1.0))
    assert found.dram_bound["below_peak"] == pytest.approx((0.0, 1.0))  # the tensor pipe is busier than DRAM
    busy = {"kernels": [entry(GEMM, uses=True, tensor=0.2, dram=0.5)]}
    assert refine(record(), busy).dram_bound == {"below_peak": pytest.approx((4e-3 * 0.3, 1.0))}


def test_what_the_export_does_not_settle_stays_as_named():
    twice = {"kernels": [entry(GEMM, uses=False, tensor=0.0), entry(GEMM, uses=True, tensor=0.5)]}
    found = refine(record(), twice)
    assert found.record == record()
    assert found.moved == ()
    assert refine(record(), {"kernels": []}).levels == {}
