"""BrickDL's published table beside ours: the same networks, the same columns (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from joulemark.merged_bench.gains import dram_bytes
from joulemark.merged_bench.remarks import of_use
from joulemark.records import Table

SOURCE = (
    "Published: Lakshminarasimhan et al., BrickDL: Graph-Level Optimizations for DNNs with Fine-Grained Data Blocking "
    "on GPUs, ICPP 2024, on an A100: time of merged execution over cuDNN's per network; over TorchScript and XLA the "
    "geometric means alone; DRAM transactions fall by 4 to 21 %, per network none are given"
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
    "What differs: BrickDL ran on an A100. Here: the GPU of the file, the number format of its rows, every way to run "
    "a network but XLA as a CUDA graph, and cuDNN is torch's eager mode (convolution, bias and ReLU apart) in "
    "channels-last; DRN-26, 3-D ResNet-34, DarkNet-53 and the DeepCAM-like network are written from their papers, the "
    "last with an encoder of ResNet-50"
)
_MEANS = (
    "A geometric mean is over the networks of one batch, as many as its row says; a number behind a figure says that "
    "so many of them have it. BrickDL's is over its seven networks, a figure each; at which batch is not known here."
)
_RIVALS = {"cudnn": "eager", "torchscript": "jit", "xla": "xla", "compile": "compile"}
_COLUMNS = ("cudnn", "torchscript", "xla", "compile", "dram")


def beside_brickdl(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per network and batch, in the published order: merged over cuDNN, TorchScript, XLA and the compiler.

    Times by burst, ``dram`` the bytes through DRAM over cuDNN's; None where one is missing.

    Args:
        document: of networks; rows that only test the command are left out.
    """
    rows = []
    order = list(BRICKDL)
    found = [one for one in of_use(document) if one["group"] in BRICKDL]
    for row in sorted(found, key=lambda one: _place(one, order)):
        over = {name: _ratio(row, rival, _burst) for name, rival in _RIVALS.items()}
        over["dram"] = _ratio(row, "eager", dram_bytes)
        names = {"network": row["group"], "batch": row["shape"][0], "subject": row["subject"]}
        rows.append({**names, "brickdl": BRICKDL[row["group"]], **over})
    return rows


def _place(row: Mapping[str, Any], order: list[str]) -> tuple[int, int]:
    return order.index(row["group"]), row["shape"][0]


def _burst(rival: Mapping[str, Any]) -> float | None:
    return rival.get("burst_s")


def _ratio(row: Mapping[str, Any], rival: str, figure: Any) -> float | None:
    mine, theirs = (figure(row["rivals"].get(name, {})) for name in ("merged", rival))
    return mine / theirs if mine and theirs else None


def brickdl_table(document: Mapping[str, Any]) -> Table:
    """The published table beside ours, a mean per batch as BrickDL's is of one, and what differs."""
    rows = beside_brickdl(document)
    cells = [(row["subject"], *(_shown(row[name]) for name in ("brickdl", *_COLUMNS))) for row in rows]
    for batch in sorted({row["batch"] for row in rows}):
        cells.append(_means(batch, [row for row in rows if row["batch"] == batch]))
    theirs = [_mean(BRICKDL.values()), None, 1 / OVER_TORCHSCRIPT, 1 / OVER_XLA, None, None]
    cells.append(("BrickDL's, over its seven", *map(_shown, theirs)))
    columns = ("network", "BrickDL / cuDNN", "/ cuDNN", "/ TorchScript", "/ XLA", "/ compile", "DRAM bytes / cuDNN")
    return Table(
        columns,
        tuple(cells),
        frozenset(range(1, len(columns))),
        (f"{SOURCE}.", f"{DIFFERENCES}.", _MEANS, "– was not measured, or not published."),
        f"BrickDL's table beside ours ({document['gpu']}): time of merged execution over another's",
    )


def _means(batch: int, rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Geometric means over the networks of a batch; of how many of them, where a figure is missing of others."""
    cells = []
    for name in ("brickdl", *_COLUMNS):
        known = [row[name] for row in rows if row[name] is not None]
        cells.append(_shown(_mean(known)) + (f" ({len(known)})" if 0 < len(known) < len(rows) else ""))
    return f"geometric mean, batch {batch}, of {len(rows)}", *cells


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return geometric_mean(known) if known else None
