"""Step time, throughput, memory, power and energy of training over models and batch sizes."""

import pytest


@pytest.mark.bench(
    models=("resnet50", "vgg16", "vit_b_16", "bert_base", "gpt2_small"),
    phases=("train",),
    batch_sizes=(8, 16, 32, 64, 128, 256),
    dtypes=("bf16", "fp32"),
    cpu={"models": ("lenet5", "mobilenet_v2"), "batch_sizes": (4, 16), "dtypes": ("fp32",)},
)
def bench_training(bench, workload):
    """Forward, backward and the optimizer's step."""
    bench.step(workload)
