"""Layer norms over the channels of images, wherever a model has its channels, as modules with one place for them.

ConvNeXt turns its activations for each of its norms, and back; a norm that reads and writes channels-last tensors needs
neither (:class:`joulemark.merged.norms.ChannelNorm`).
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from joulemark.merged import permutations
from joulemark.merged.graph import attribute_of, module_of, norm_behind
from joulemark.merged.in_place import changed_by
from joulemark.merged.norms import ChannelNorm
from joulemark.merged.trying import compile_at_once

_RANKS = (4, 5)


@dataclass(frozen=True)
class Norms:
    """What became of the layer norms of images.

    Args:
        taken: as the model calls them → how they run.
        left: → why they stay as they are.
    """

    taken: dict[str, str]
    left: dict[str, str]


def as_channel_norms(graph: fx.GraphModule) -> Norms:
    """Put a :class:`ChannelNorm` in the place of each layer norm over the channels of images.

    Args:
        graph: with shapes; what is new has none.
    """
    made: dict[str, fx.Node] = {}
    number = count()  # of nodes: a norm may be called more than once
    left: dict[str, str] = {}
    for node in list(graph.graph.nodes):
        found = _norm_of(graph, node)
        if isinstance(found, str):
            left[_name(graph, node)] = found
        elif found is not None:
            name = _name(graph, node)
            made[name] = _replaced(graph, node, f"channel_norm_{next(number)}", found)
    if made:
        permutations.as_functions(graph)
        permutations.cancel(graph)
        graph.graph.eliminate_dead_code(_does_more)
        graph.graph.lint()
        graph.delete_all_unused_submodules()
        graph.recompile()
    there = set(graph.graph.nodes)
    left |= dict.fromkeys((name for name, node in made.items() if node not in there), "nothing reads what it gives")
    return Norms(_how({name: node for name, node in made.items() if node in there}), left)


def _does_more(node: fx.Node) -> bool:
    """Whether a node does something though nothing reads its value: it changes what others read, say."""
    return node.is_impure() or changed_by(node, module_of) is not None


def _norm_of(graph: fx.GraphModule, node: fx.Node) -> ChannelNorm | str | None:
    """What a node is as a norm over channels; why it is none; None where it is no layer norm of images."""
    given = _arguments(graph, node)
    meta = node.meta.get("tensor_meta")
    if given is None or meta is None or len(meta.shape) not in _RANKS:
        return None
    shape, scale, shift, eps = given
    if node.op == "call_module" and module_of(node) is None:
        return "its hooks see it"
    channels = meta.shape[-1]
    if not isinstance(shape, (tuple, list)) or not all(isinstance(one, int) for one in shape):
        return "what it normalizes over is computed in each call"
    if tuple(shape) != (channels,):
        return f"it normalizes over {tuple(shape)} of {tuple(meta.shape)}, not over the last dimension alone"
    values = [_value(graph, one) for one in (scale, shift)]
    wrong = [one for one in values if one is not None and (one.dtype, tuple(one.shape)) != (meta.dtype, (channels,))]
    if wrong or any(value is None and one is not None for value, one in zip(values, (scale, shift), strict=True)):
        return f"its scale or shift is no parameter of {channels} numbers in {meta.dtype}"
    device = next((one.device for one in (*values, *graph.parameters()) if one is not None), torch.device("cpu"))
    ones = torch.ones(channels, dtype=meta.dtype, device=device)
    rows = [one if value is None else value for one, value in zip((ones, torch.zeros_like(ones)), values, strict=True)]
    return ChannelNorm(torch.stack(rows), eps)


def _arguments(graph: fx.GraphModule, node: fx.Node) -> tuple[Any, Any, Any, float] | None:
    """Normalized shape, scale, shift and epsilon of a layer norm; None for any other node."""
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        if type(module) is not nn.LayerNorm or len(node.args) != 1:
            return None
        return module.normalized_shape, module.weight, module.bias, module.eps
    if node.op != "call_function" or node.target is not F.layer_norm or not node.args:
        return None
    names = ("normalized_shape", "weight", "bias", "eps")
    given = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    if not set(given) <= set(names):
        return None
    return given["normalized_shape"], given.get("weight"), given.get("bias"), given.get("eps", 1e-5)


def _value(graph: fx.GraphModule, given: object) -> Tensor | None:
    """A parameter itself, or the one that a node gets; None for what is computed, or is nothing."""
    if isinstance(given, fx.Node) and given.op == "get_attr":
        given = attribute_of(graph, str(given.target))
    return given.detach() if isinstance(given, Tensor) else None


def _name(graph: fx.GraphModule, node: fx.Node) -> str:
    """As the model calls it: a function by the module that holds its scale."""
    if node.op == "call_module":
        return str(node.target)
    arguments = _arguments(graph, node)
    scale = None if arguments is None else arguments[1]
    holder = str(scale.target).rpartition(".")[0] if isinstance(scale, fx.Node) and scale.op == "get_attr" else ""
    return holder or node.name


def _replaced(graph: fx.GraphModule, node: fx.Node, name: str, norm: ChannelNorm) -> fx.Node:
    """The node of a norm that stands for a layer norm, between permutations."""
    graph.add_submodule(name, norm)
    with graph.graph.inserting_after(node):
        new = graph.graph.call_module(name, (node.args[0],))
    node.replace_all_uses_with(new)
    graph.graph.erase_node(node)
    permutations.around(graph, new, len(node.meta["tensor_meta"].shape))
    return new


def _how(norms: dict[str, fx.Node]) -> dict[str, str]:
    """How norms run, as far as that is known before convolutions have their paths."""
    alone = {name: cast(ChannelNorm, module_of(node)) for name, node in norms.items() if not _is_behind(node)}
    device = next((one.affine.device for one in alone.values()), torch.device("cpu"))
    compile_at_once(((one.kind, copy(one).prove) for one in alone.values() if one.own), device)
    whys = {name: one.prove() for name, one in alone.items()}
    told = {name: "by itself" if why is None else f"by torch's operator ({why})" for name, why in whys.items()}
    return {name: f"over channels, {told.get(name, 'in the layer before it')}" for name in norms}


def _is_behind(node: fx.Node) -> bool:
    """Whether a norm is a part of the convolution before it."""
    source = node.args[0]
    return isinstance(source, fx.Node) and norm_behind(source) is node
