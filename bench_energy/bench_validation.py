"""Energy of the workloads that the energy model is judged by, none of which its calibration has seen."""

import pytest

from bench_energy.held_out import HELD_OUT


@pytest.mark.bench(
    needs_gpu="whose joules the calibration of a GPU predicts",
    campaign="which judge the energy model",
)
@pytest.mark.parametrize("held_out", HELD_OUT, ids=lambda one: one.name)
def bench_validation(bench, power, held_out):
    """One step of each; on the CPU a tiny one."""
    pytest.importorskip("torch", exc_type=ImportError)
    on_cpu = bench.device == "cpu"
    if on_cpu and held_out.needs_cuda:
        pytest.skip(held_out.needs_cuda)
    bench.step(held_out.build(bench.device, on_cpu))
