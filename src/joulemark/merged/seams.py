"""Layouts where paths meet: channels innermost throughout, so that nothing is transposed between two of them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from joulemark.merged import shapes

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Dimensions of a tensor → the layout with channels innermost."""
_CATS = (torch.cat, torch.concat)


def weights_channels_last(graph: fx.GraphModule) -> fx.GraphModule:
    """The same graph, its weights in the layout that every path reads."""
    for module in graph.modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            module.to(memory_format=torch.channels_last)
        elif isinstance(module, (nn.Conv3d, nn.ConvTranspose3d)):
            module.to(memory_format=torch.channels_last_3d)
    return graph


def keep_channels_last(graph: fx.GraphModule, inputs: tuple[Any, ...], on_disk: bool = False) -> int:
    """Arrange what is joined to channels-last tensors and is not, an expanded average say; how many there were.

    Otherwise torch joins them in the other layout, and all of it is turned for the next convolution.

    Args:
        graph: a traced model with weights in channels-last; where something is joined, or a node has no shape yet,
            shapes are found anew.
        inputs: of the model.
        on_disk: whether shapes may be those that another process has found, and are kept for the next.
    """
    nodes = [node for node in graph.graph.nodes if node.op != "output"]
    if all("tensor_meta" in node.meta and node.target not in _CATS for node in nodes):
        return 0
    arranged = tuple(
        one.contiguous(memory_format=FORMATS[one.dim()]) if isinstance(one, Tensor) and one.dim() in FORMATS else one
        for one in inputs
    )
    _find_shapes(graph, arranged, on_disk)
    count = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in _CATS:
            continue
        if not node.args or not isinstance(node.args[0], (list, tuple)):  # by name, or what is split as one
            continue
        parts = list(cast("list[fx.Node]", node.args[0]))
        strangers = [one for one in parts if not _is_channels_last(one)]
        if not strangers or len(strangers) == len(parts):
            continue
        with graph.graph.inserting_before(node):
            for one in strangers:
                memory = FORMATS[len(one.meta["tensor_meta"].shape)]
                made = graph.graph.call_method("contiguous", (one,), {"memory_format": memory})
                node.replace_input_with(one, made)
                count += 1
    if count:
        graph.recompile()
        _find_shapes(graph, arranged, on_disk)
    return count


def _find_shapes(graph: fx.GraphModule, inputs: tuple[Any, ...], on_disk: bool) -> None:
    shapes.find(graph, inputs, lambda: ShapeProp(graph).propagate(*inputs), on_disk)


def _is_channels_last(node: fx.Node) -> bool:
    """Whether a tensor lies with channels innermost, a part of another perhaps; of other ranks all count as such."""
    meta = node.meta.get("tensor_meta")
    if meta is None or len(meta.shape) not in FORMATS:
        return True
    shape, stride = meta.shape, meta.stride
    return (shape[1] == 1 or stride[1] == 1) and all(
        step >= shape[1] for step, size in zip(stride[2:], shape[2:], strict=True) if size > 1
    )
