"""Paddings that a model has for odd sizes and that pad nothing of others, which torch copies all the same."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import TensorMetadata
from torch.nn import functional as F

from joulemark.merged.graph import is_convolution

_SHAPES = ("shape", "size", "dim", "ndim", "dtype", "device")


def fitted(x: Tensor, pad: List[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """``F.pad``, but ``x`` itself where nothing is padded."""
    return F.pad(x, pad, mode, value) if any(pad) else x


def without_needless_paddings(graph: fx.GraphModule) -> int:
    """Replace paddings that give the example as it is; how many there were.

    Only where their values are joined or convolved: who changes them in place would change what was padded.

    Args:
        graph: with shapes.
    """
    found = [node for node in graph.graph.nodes if _pads_nothing(node)]
    for node in found:
        node.target = fitted
    if found:
        graph.recompile()
    return len(found)


def _pads_nothing(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not F.pad or not node.args:
        return False
    source: Any = node.args[0]
    before, after = source.meta.get("tensor_meta"), node.meta.get("tensor_meta")
    if not (isinstance(before, TensorMetadata) and isinstance(after, TensorMetadata) and before.shape == after.shape):
        return False
    return all(user.target in (torch.cat, torch.concat) or is_convolution(user) for user in readers(node))


def readers(node: fx.Node) -> list[fx.Node]:
    """Nodes that read a node's values, not its shape alone."""
    return [user for user in node.users if not _reads_shape(user)]


def _reads_shape(node: fx.Node) -> bool:
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in _SHAPES
    return node.op == "call_method" and node.target in _SHAPES
