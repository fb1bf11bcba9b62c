"""The held-out workloads run at tiny size on the CPU and compute what they are called."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from bench_energy import held_out  # noqa: E402
from bench_energy.held_out import HELD_OUT  # noqa: E402
from bench_energy.splits import ALL  # noqa: E402
from joulemark.energy.microbench.suite import SUITE  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_the_list_covers_what_it_must():
    assert len(HELD_OUT) >= 20
    assert len({one.name for one in HELD_OUT}) == len(HELD_OUT)
    kinds = Counter(one.kind for one in HELD_OUT)
    assert set(kinds) == {"network", "gemm", "memory", "hpc"}
    assert kinds["network"] >= 8
    names = {one.name for one in HELD_OUT}
    for wanted in (
        "copy", "gather", "reduction", "softmax-bf16", "fft-1d", "spmv-fp64", "conjugate-gradient-fp64",
        "stencil-fp64", "n-body-fp32", "gpt2_small-decode-bf16-b32",
    ):  # fmt: skip
        assert wanted in names
    assert {one.dtype for one in HELD_OUT if one.kind == "gemm"} >= {"bf16", "fp16", "tf32", "fp32", "fp64", "int8"}


def test_what_is_committed_holds_every_workload_of_both_lists_and_every_split():
    measured = json.loads((ROOT / "results" / "nvidia-h200" / "energy-measurements.json").read_text())
    rows = {row["workload"]: row for row in measured["rows"]}
    assert set(rows) == {one.name for one in ALL}
    assert all(row["counters"] and row["idle_w"] for row in rows.values())


def test_a_wave_neither_dies_nor_grows():
    step = held_out._wave("cpu", True)
    sizes = [float(step().abs().max()) for _ in range(300)]
    assert min(sizes[100:]) > 0.1
    assert max(sizes) < 20 * sizes[0]


def test_a_partly_loaded_service_waits(monkeypatch):
    slept, done = [], []
    monkeypatch.setattr(held_out.time, "sleep", slept.append)
    step = held_out._partly_loaded(lambda device, tiny: lambda: done.append(1), 3, 0.02, "cuda:0", False)
    step()
    assert (len(done), slept) == (3, [0.02])


def test_none_of_it_is_a_microbenchmark():
    assert not {one.name for one in HELD_OUT} & set(SUITE)


@pytest.mark.parametrize("one", [one for one in HELD_OUT if not one.needs_cuda], ids=lambda one: one.name)
def test_it_runs_twice_on_the_cpu(one):
    step = one.build("cpu", True)
    step()
    result = step()
    if isinstance(result, torch.Tensor):
        assert torch.isfinite(torch.view_as_real(result) if result.is_complex() else result).all()


def test_the_poisson_matrix_is_the_laplacian():
    matrix = held_out._quietly(held_out._poisson, "cpu", 4).to_dense().numpy()
    line = 2 * np.eye(4) - np.eye(4, k=1) - np.eye(4, k=-1)
    assert (matrix == np.kron(line, np.eye(4)) + np.kron(np.eye(4), line)).all()


def test_conjugate_gradients_converge_and_start_anew():
    step = held_out._conjugate_gradient("cpu", True)
    for _ in range(40):
        step()
    residual = step.right - step.matrix @ step.x
    assert residual.norm() < 1e-8 * step.right.norm()
    step.restart_after = 41
    step()
    assert step.iteration == 41
    step()
    assert step.iteration == 1


def test_the_stencil_keeps_a_constant_field():
    step = held_out._stencil("cpu", True)
    field = step.__closure__[0].cell_contents
    field.fill_(3.0)
    assert step()[1:-1, 1:-1, 1:-1].numpy() == pytest.approx(3.0)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_n_body_forces_cancel(dtype):
    step = held_out._n_body(dtype, "cpu", True)
    names = step.__code__.co_freevars
    cells = dict(zip(names, (cell.cell_contents for cell in step.__closure__), strict=True))
    total = (cells["mass"][:, None] * step()).sum(0)
    assert total.abs().max() < 1e-3 * step().abs().max()
    place, mass = (cells[name].double().numpy() for name in ("place", "mass"))
    by_hand = sum(
        mass[j] * (place[j] - place[0]) / (((place[j] - place[0]) ** 2).sum() + 1e-3) ** 1.5 for j in range(len(mass))
    )
    assert step()[0].double().numpy() == pytest.approx(by_hand, rel=1e-3)


def test_formats_are_kept():
    assert held_out._gemm(8, 8, 8, "fp64", "cpu", True)().dtype == torch.float64
    assert held_out._gemm(8, 8, 8, "bf16", "cpu", True)().dtype == torch.bfloat16
    assert held_out._normal("cpu", "tf32", 4).dtype == torch.float32
