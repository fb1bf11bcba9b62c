"""Cells of the zoo whose measured energy is split into units and memory levels, over batch sizes and formats."""

from __future__ import annotations

from bench_energy.held_out import HELD_OUT, HeldOut, network

_CELLS = (
    ("resnet50", "train", ("bf16", "fp32"), (8, 16, 32, 64, 128, 256)),
    ("resnet50", "inference", ("bf16",), (1, 8, 64, 256)),
    ("vit_b_16", "train", ("bf16",), (16, 64)),
    ("bert_base", "train", ("bf16",), (16, 64)),
    ("gpt2_small", "train", ("bf16",), (4, 16)),
    ("gpt2_small", "decode", ("bf16",), (8, 64)),
)

SPLITS: tuple[HeldOut, ...] = tuple(
    network(model, phase, dtype, batch)
    for model, phase, dtypes, batches in _CELLS
    for dtype in dtypes
    for batch in batches
)
"""The list; ResNet-50 in training is where the literature's "up to 84 %" of data movement stands."""

ALL: tuple[HeldOut, ...] = tuple({one.name: one for one in (*HELD_OUT, *SPLITS)}.values())
"""The held-out workloads, and the splits that are not among them."""
