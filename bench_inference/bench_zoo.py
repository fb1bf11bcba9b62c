"""Latency, throughput, memory, power and energy of inference over models and batch sizes."""

import pytest


@pytest.mark.bench(
    models=("lenet5", "resnet50", "mobilenet_v2", "vit_b_16", "bert_base", "gpt2_small"),
    phases=("inference", "prefill", "decode"),
    batch_sizes=(1, 2, 4, 8, 16, 32, 64, 128),
    dtypes=("bf16",),
    first_look={"models": "gpt2_small", "batch_sizes": (1, 8, 32, 128)},
    cpu={
        "models": ("lenet5", "mobilenet_v2", "resnet18"),
        "batch_sizes": {"lenet5": (1, 4, 16), "*": (1, 4)},
        "dtypes": ("fp32",),
    },
)
def bench_inference(bench, workload):
    """One forward pass, one prompt, or one generated token per sequence."""
    bench.step(workload)
