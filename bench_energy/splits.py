"""Cells of the zoo whose measured energy is split into units and levels, over batch sizes, formats and modes."""

from __future__ import annotations

from bench_energy.held_out import HELD_OUT, HeldOut, network

_CELLS = (
    ("resnet50", "train", ("bf16", "fp32"), (8, 16, 32, 64, 128, 256), "eager"),
    ("resnet50", "inference", ("bf16",), (1, 8, 64, 256), "eager"),
    ("vit_b_16", "train", ("bf16",), (16, 64), "eager"),
    ("bert_base", "train", ("bf16",), (16, 64), "eager"),
    ("gpt2_small", "train", ("bf16",), (4, 16), "eager"),
    ("gpt2_small", "decode", ("bf16",), (8, 64), "eager"),
    ("resnet50", "inference", ("bf16",), (1, 8, 64, 256), "graph"),
)

SPLITS: tuple[HeldOut, ...] = tuple(
    network(model, phase, dtype, batch, mode)
    for model, phase, dtypes, batches, mode in _CELLS
    for dtype in dtypes
    for batch in batches
)
"""The list; ResNet-50 in training is where the literature's "up to 84 %" of data movement stands."""

ALL: tuple[HeldOut, ...] = tuple({one.name: one for one in (*HELD_OUT, *SPLITS)}.values())
"""The held-out workloads, and the splits that are not among them."""
