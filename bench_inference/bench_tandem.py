"""CPU-GPU tandem of inference: device time against the host's issue time over batch sizes and modes."""

import pytest

_DOUBLINGS = (1, 4, 8, 16, 32, 64, 128, 256)


@pytest.mark.bench(
    models=("lenet5", "resnet50", "bert_base"),
    phases=("inference",),
    # A step of LeNet-5 has so little work per image that it takes thousands to hide its launches.
    batch_sizes={"lenet5": (1, 64, 512, 2048, 4096, 8192, 16384, 32768), "*": _DOUBLINGS},
    dtypes=("bf16",),
    modes=("eager", "jit", "compile", "graph"),
    cpu={"models": ("lenet5",), "batch_sizes": (1, 16), "dtypes": ("fp32",), "modes": ("eager",)},
)
def bench_tandem(bench, workload, profiler):
    """One forward pass, timed without the profiler and then profiled."""
    bench.step(workload)
