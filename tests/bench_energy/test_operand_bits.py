"""What workloads hold in memory is found, and its bits are counted."""

from __future__ import annotations

import json
from functools import partial

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from bench_energy import operand_bits  # noqa: E402
from bench_energy.held_out import HELD_OUT  # noqa: E402

ROWS = {one.name: one for one in HELD_OUT}


def test_what_a_step_holds_is_found_in_closures_arguments_and_attributes():
    still, moving = torch.zeros(1 << 12), torch.randn(1 << 12, generator=torch.Generator().manual_seed(3))
    assert operand_bits.memory_bits(lambda: still) == 0
    assert operand_bits.memory_bits(partial(torch.clone, moving)) == pytest.approx(0.85, abs=0.02)
    mixed = operand_bits.memory_bits(lambda: (still, moving)[:1])
    assert mixed == pytest.approx(0.425, abs=0.02)  # by bytes: half of them never move
    assert operand_bits.memory_bits(lambda: None) is None


def test_a_sparse_matrix_of_constants_hardly_toggles():
    bits = operand_bits.memory_bits(ROWS["spmv-l2-fp64"].build("cpu", False))
    assert 0.1 < bits < 0.4
    assert bits < operand_bits.memory_bits(ROWS["wave-l2-fp64"].build("cpu", False))


def test_the_command_adds_it_to_measured_workloads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(operand_bits, "_within", lambda limit_s, one: 0.25 if one.name == "copy" else None)
    path = tmp_path / "measurements.json"
    path.write_text(json.dumps({"rows": [{"workload": name} for name in ("copy", "sort", "gemm-bf16-768")]}))
    assert operand_bits.main([str(path)]) == 0
    copy, sort, gemm = json.loads(path.read_text())["rows"]
    assert (copy["memory_bits"], sort["memory_bits"]) == (0.25, None)
    assert "memory_bits" not in gemm
    assert "sort: not found" in capsys.readouterr().out
