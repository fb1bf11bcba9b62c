"""Step time, throughput, memory, power and energy of training over models and batch sizes.

How much of the GPU works, where a bigger batch stops helping and the waterfall need more instruments:
``pytest --bench bench_training --bench-collect timing,profiler,counters``, then ``joulemark utilization FILE``.
"""

import pytest


@pytest.mark.bench(
    models=("resnet50", "vgg16", "vit_b_16", "bert_base", "gpt2_small"),
    phases=("train",),
    batch_sizes=(8, 16, 32, 64, 128, 256, 512, 1024),
    dtypes=("bf16", "tf32", "fp32"),
    first_look={
        "models": ("resnet50", "bert_base"),
        "batch_sizes": (8, 32, 128, 512),
        "dtypes": "bf16",
        "collect": ("profiler", "counters"),
    },
    cpu={"models": ("lenet5", "mobilenet_v2"), "batch_sizes": {"lenet5": (4, 16), "*": (4,)}, "dtypes": ("fp32",)},
)
def bench_training(bench, workload):
    """Forward, backward and the optimizer's step."""
    bench.step(workload)


@pytest.mark.bench(
    models=("resnet50", "vgg16", "vit_b_16", "bert_base", "gpt2_small"),
    phases=("train",),
    batch_sizes=(8, 32, 128, 512),
    dtypes=("bf16",),
    modes=("compile",),
    campaign="which compile every step",
    cpu={"models": ("lenet5",), "batch_sizes": (4,), "dtypes": ("fp32",), "modes": ("eager",)},
)
def bench_compiled(bench, workload):
    """The same iteration compiled: fewer kernels, fewer bytes, other limits."""
    bench.step(workload)
