"""Linear layers over the positions of an image as the pointwise convolutions that they are.

ConvNeXt (Liu et al., *A ConvNet for the 2020s*, CVPR 2022) turns its activations to (batch, height, width, channels),
and back behind two linear layers. In memory nothing moves: channels are innermost before and after. As convolutions
they are executed with their activation, and the second one with the block's scale and its residual.
"""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import fx, nn

from joulemark.merged import permutations
from joulemark.merged.graph import activation_of, attribute_of, called_once, module_of

_CONVOLUTIONS = {4: nn.Conv2d, 5: nn.Conv3d}
_PRODUCTS = (operator.mul, torch.mul)


def as_convolutions(graph: fx.GraphModule) -> int:
    """Turn the linear layers of a traced model that see positions into convolutions; how many there were.

    Args:
        graph: with shapes; what is new has none.
    """
    found = [node for node in graph.graph.nodes if _is_linear(node)]
    for node in found:
        _turn(graph, node)
    if not found:
        return 0
    permutations.as_functions(graph)
    for node in list(graph.graph.nodes):
        _behind_activation(graph, node)
    permutations.cancel(graph)
    for node in list(graph.graph.nodes):
        _take_scale(graph, node)
    graph.graph.lint()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return len(found)


def _is_linear(node: fx.Node) -> bool:
    if type(module_of(node)) is not nn.Linear or len(node.args) != 1 or not called_once(node):
        return False
    meta = cast(fx.Node, node.args[0]).meta.get("tensor_meta")
    return meta is not None and len(meta.shape) in _CONVOLUTIONS


def _turn(graph: fx.GraphModule, node: fx.Node) -> None:
    """A linear layer as permutation, convolution, permutation back."""
    linear = cast(nn.Linear, module_of(node))
    rank = len(node.meta["tensor_meta"].shape)  # its input may be new
    weight = linear.weight
    sizes = (linear.in_features, linear.out_features, 1)
    made = _CONVOLUTIONS[rank](*sizes, bias=linear.bias is not None, device="meta")  # no weights are drawn for it
    made.weight = nn.Parameter(weight.detach().reshape(made.weight.shape), requires_grad=False)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
    graph.set_submodule(str(node.target), made)
    permutations.around(graph, node, rank)


def _behind_activation(graph: fx.GraphModule, node: fx.Node) -> None:
    """An activation of what is turned as what is turned of an activation: it looks at each element alone."""
    source = node.args[0] if node.args else None
    if activation_of(node) is None or not permutations.permutes(source) or set(cast(fx.Node, source).users) != {node}:
        return
    permuted = cast(fx.Node, source)
    node.replace_input_with(permuted, cast(fx.Node, permuted.args[0]))
    with graph.graph.inserting_after(node):
        back = graph.graph.call_function(torch.permute, (node, permuted.args[1]))
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    permutations.turn_shape(node, cast("tuple[int, ...]", permuted.args[1]))
    graph.graph.erase_node(permuted)


def _take_scale(graph: fx.GraphModule, node: fx.Node) -> None:
    """A parameter that scales each channel of a convolution's output goes into its weights."""
    found = _scaled(graph, node)
    if found is None:
        return
    scale, convolution, module = found
    wide = attribute_of(graph, str(scale.target)).detach().flatten().double()
    dtype, across = module.weight.dtype, (-1, *(1,) * (module.weight.dim() - 1))
    # Parameters of its own: those it has may be another layer's too.
    weight = (module.weight.detach().double() * wide.view(across)).to(dtype)
    module.weight = nn.Parameter(weight, requires_grad=False)
    if module.bias is not None:
        module.bias = nn.Parameter((module.bias.detach().double() * wide).to(dtype), requires_grad=False)
    node.replace_all_uses_with(convolution)
    graph.graph.erase_node(node)
    if not scale.users:
        graph.graph.erase_node(scale)


def _scaled(graph: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, fx.Node, nn.Conv2d | nn.Conv3d] | None:
    """The scale, the convolution whose output a node multiplies by it, and its module; None where it does not.

    In fp16 a scale stays apart: ConvNeXt's first ones are so small that weights times them vanish.
    """
    if node.op != "call_function" or node.target not in _PRODUCTS or len(node.args) != 2 or node.kwargs:
        return None
    scale, convolution = node.args if _is_scale(node.args[0]) else reversed(node.args)
    if not isinstance(scale, fx.Node) or not isinstance(convolution, fx.Node) or not _is_scale(scale):
        return None
    module = module_of(convolution)
    if not isinstance(module, (nn.Conv2d, nn.Conv3d)) or module.weight.dtype == torch.float16:
        return None
    shape = (module.out_channels, *(1,) * (module.weight.dim() - 2))
    alone = set(convolution.users) == {node} and called_once(convolution)
    value = attribute_of(graph, str(scale.target))
    of_its_format = torch.promote_types(value.dtype, module.weight.dtype) == module.weight.dtype
    return (scale, convolution, module) if alone and of_its_format and value.shape == shape else None


def _is_scale(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr"
