"""Kernels of a trace as tables of a record."""

from __future__ import annotations

import pytest

from joulemark.utilization.kernel_table import LONGEST, tables_of

GEMM, NORM = "nvjet_sm90_tst_128x256", "batch_norm_transform_input_kernel"
FLASH = "flash_fwd_kernel<cutlass::bfloat16_t>"


def document(kernels, copies=(), devices=({"device": 0},)):
    return {
        "kernel_names": [{"name": name, "time_s": time, "kernels": count} for name, time, count in kernels],
        "copy_kinds": [{"name": name, "time_s": time, "copies": count} for name, time, count in copies],
        "devices": list(devices),
        "busy_s": 0.8,
    }


def test_classes_add_up_per_step():
    seen = document(
        [(GEMM, 0.4, 8), (GEMM + "_b", 0.2, 4), (NORM, 0.1, 2), ("mine", 0.05, 2)], [("Memset (Device)", 0.05, 2)]
    )
    tables = tables_of(seen, 2, [0.5, 0.4, 0.45], 0.6)
    rows = {row["class"]: row for row in tables["kernel_classes"]}
    assert [row["class"] for row in tables["kernel_classes"]] == ["tensor_gemm", "normalization", "other", "copy"]
    assert rows["tensor_gemm"]["time_s"] == pytest.approx(0.3)
    assert rows["tensor_gemm"]["launches"] == 6
    assert [rows[name]["uses_tensor_cores"] for name in ("tensor_gemm", "normalization", "copy", "other")] == [
        True,
        False,
        False,
        None,
    ]
    assert sum(row["time_s"] for row in rows.values()) == pytest.approx(0.4)
    (timeline,) = tables["timeline"]
    assert timeline == pytest.approx(
        {"steps": 2, "plain_s": 0.45, "profiled_s": 0.6, "busy_s": 0.4, "kernel_time_s": 0.4}
    )


def test_attention_stands_once_with_and_once_without_tensor_cores():
    seen = document([(FLASH, 0.4, 2), ("flash_bwd_dot_do_o_kernel<cutlass::bfloat16_t>", 0.1, 2)])
    rows = tables_of(seen, 2, [0.5], 0.6)["kernel_classes"]
    assert [(row["class"], row["uses_tensor_cores"]) for row in rows] == [("attention", True), ("attention", False)]


def test_long_lists_and_long_names_are_cut_and_classes_are_not():
    seen = document([(f"{'n' * 400}{number}", 1.0, 1) for number in range(LONGEST + 5)])
    tables = tables_of(seen, 1, [1.0], 1.0)
    assert len(tables["kernels"]) == LONGEST
    assert max(len(row["name"]) for row in tables["kernels"]) == 200
    assert tables["kernel_classes"][0]["launches"] == LONGEST + 5


def test_a_trace_without_a_device_has_no_tables():
    assert tables_of(document([], devices=()), 3, [1.0], 1.0) == {}
