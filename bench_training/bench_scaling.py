"""Data-parallel training over numbers of GPUs: throughput, efficiency, communication and energy of all of them."""

import pytest


@pytest.mark.bench(
    models=("resnet50", "gpt2_small"),
    phases=("train",),
    batch_sizes=(32,),
    dtypes=("bf16",),
    world_sizes=(1, 2),
    campaign="which train on several GPUs",
    cpu={"models": ("lenet5",), "batch_sizes": (32,), "dtypes": ("fp32",), "world_sizes": (1,)},
)
def bench_scaling(bench, workload, profiler):
    """The same batch on every GPU (weak scaling); traces of all ranks show what communication costs.

    On a CPU one rank, unless --bench-world-size says otherwise.
    """
    bench.step(workload)
