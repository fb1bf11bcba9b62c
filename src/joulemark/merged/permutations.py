"""Permutations in a graph around what sees channels last: those that undo each other go, in memory nothing moved."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx
from torch.fx.passes.shape_prop import TensorMetadata


def as_functions(graph: fx.GraphModule) -> None:
    """``x.permute(0, 2, 3, 1)`` as ``torch.permute(x, (0, 2, 3, 1))``, everywhere; not where the order is computed."""
    for node in list(graph.graph.nodes):
        _as_function(graph, node)


def around(graph: fx.GraphModule, node: fx.Node, rank: int) -> None:
    """Between permutations what stands for a node that has channels last, and now has them behind the batch.

    Args:
        rank: of its input.
    """
    with graph.graph.inserting_before(node):
        turned = graph.graph.call_function(torch.permute, (node.args[0], (0, rank - 1, *range(1, rank - 1))))
    node.args = (turned,)
    order = (0, *range(2, rank), 1)
    with graph.graph.inserting_after(node):
        back = graph.graph.call_function(torch.permute, (node, order))
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    turn_shape(node, order)


def turn_shape(node: fx.Node, order: tuple[int, ...]) -> None:
    """The shape of a node, where it has one, from what it was to what ``order`` permutes to that."""
    meta = node.meta.get("tensor_meta")
    if not isinstance(meta, TensorMetadata):
        return
    rank = len(order)
    at = sorted(range(rank), key=lambda one: order[one] % rank)
    shape, stride = torch.Size(meta.shape[one] for one in at), tuple(meta.stride[one] for one in at)
    node.meta["tensor_meta"] = meta._replace(shape=shape, stride=stride)


def cancel(graph: fx.GraphModule) -> None:
    """Nothing in the place of two permutations that undo each other."""
    for node in list(graph.graph.nodes):
        _cancel(graph, node)


def permutes(node: object) -> bool:
    """Whether a node is a permutation as :func:`as_functions` leaves them."""
    known = isinstance(node, fx.Node) and node.op == "call_function" and node.target is torch.permute
    return known and len(cast(fx.Node, node).args) == 2 and _are_numbers(cast(fx.Node, node).args[1])


def _as_function(graph: fx.GraphModule, node: fx.Node) -> None:
    if (node.op, node.target) not in (("call_method", "permute"), ("call_function", torch.permute)) or permutes(node):
        return
    given = node.args[1:] or (node.kwargs.get("dims"),)
    order = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    if not node.args or not _are_numbers(order):
        return
    with graph.graph.inserting_before(node):
        made = graph.graph.call_function(torch.permute, (node.args[0], tuple(order)))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.graph.erase_node(node)


def _are_numbers(order: object) -> bool:
    return isinstance(order, (tuple, list)) and all(isinstance(one, int) for one in order)


def _cancel(graph: fx.GraphModule, node: fx.Node) -> None:
    if not permutes(node) or not permutes(node.args[0]):
        return
    first = cast(fx.Node, node.args[0])
    one, two = (cast("tuple[int, ...]", permuted.args[1]) for permuted in (first, node))
    rank = len(one)
    if [one[at % rank] % rank for at in two] != list(range(rank)):
        return
    node.replace_all_uses_with(cast(fx.Node, first.args[0]))
    graph.graph.erase_node(node)
    if not first.users:
        graph.graph.erase_node(first)
