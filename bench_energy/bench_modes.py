"""Energy per item over batch sizes: what a bigger batch and a CUDA graph save."""

import pytest


@pytest.mark.bench(
    models=("resnet50", "mobilenet_v2"),
    phases=("inference",),
    batch_sizes=(1, 8, 64),
    dtypes=("bf16",),
    modes=("eager", "graph"),
    requires=("power",),
    first_look={"models": "resnet50"},
    cpu={"models": ("lenet5",), "batch_sizes": (1, 16), "modes": ("eager",), "dtypes": ("fp32",)},
)
def bench_energy(bench, workload):
    """The same forward pass, launch by launch and as a graph."""
    bench.step(workload)
