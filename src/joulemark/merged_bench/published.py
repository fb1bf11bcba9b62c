"""BrickDL's published table beside ours: the same networks, the same columns."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log
from typing import Any

SOURCE = (
    "Lakshminarasimhan et al., BrickDL: Graph-Level Optimizations for DNNs with Fine-Grained Data Blocking on GPUs, "
    "ICPP 2024; A100, time of merged execution over cuDNN's"
)
BRICKDL: Mapping[str, float] = {
    "resnet50": 0.85,
    "drn_26": 0.915,
    "resnet3d_34": 0.87,
    "darknet_53": 0.84,
    "vgg16": 0.933,
    "deepcam": 0.86,
    "inception_v4": 0.895,
}
"""Time over cuDNN's, per network."""
OVER_TORCHSCRIPT, OVER_XLA = 1.014, 1.009
"""Geometric means of BrickDL's gains over the compilers."""
DIFFERENCES = (
    "BrickDL ran on an A100. Here: the GPU of the file, the number format of its rows, and cuDNN is torch's eager mode "
    "(convolution, bias and ReLU apart) in channels-last under a CUDA graph; DRN-26, 3-D ResNet-34, DarkNet-53 and the "
    "DeepCAM-like network are written from their papers, the last with an encoder of ResNet-50"
)


def beside_brickdl(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per network and batch: merged over cuDNN, TorchScript, XLA and the compiler, by burst; None where missing.

    Args:
        document: of networks.
    """
    rows = []
    for row in document["rows"]:
        if row["group"] not in BRICKDL:
            continue
        found = row["rivals"]
        mine = found.get("merged", {}).get("burst_s")
        over = {
            name: mine / theirs if mine and (theirs := found.get(rival, {}).get("burst_s")) else None
            for name, rival in (("cudnn", "eager"), ("torchscript", "jit"), ("xla", "xla"), ("compile", "compile"))
        }
        rows.append({"network": row["group"], "subject": row["subject"], "brickdl": BRICKDL[row["group"]], **over})
    return rows


def markdown(document: Mapping[str, Any]) -> str:
    """The table, and what differs."""
    lines = ["| network | BrickDL / cuDNN | / cuDNN | / TorchScript | / XLA | / compile |", "|---|---|---|---|---|---|"]
    for row in (rows := beside_brickdl(document)):
        cells = [row["brickdl"], row["cudnn"], row["torchscript"], row["xla"], row["compile"]]
        shown = " | ".join("–" if one is None else f"{one:.3f}" for one in cells)
        lines.append(f"| {row['subject']} | {shown} |")
    means = [_mean([row[name] for row in rows]) for name in ("brickdl", "cudnn", "torchscript", "xla", "compile")]
    lines.append("| geometric mean | " + " | ".join("–" if one is None else f"{one:.3f}" for one in means) + " |")
    return "\n".join([*lines, "", f"Published: {SOURCE}.", f"What differs: {DIFFERENCES}."])


def _mean(values: list[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return exp(sum(log(one) for one in known) / len(known)) if known else None
