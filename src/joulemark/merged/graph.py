"""Finds sequences of convolutions in a model: traced by torch.fx, batch norms folded into the weights before them."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from joulemark.merged.bricks import Parameters
from joulemark.merged.sequence import Activation, Conv, Sequence

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout2d, nn.Dropout3d)
_ACTIVATION_MODULES: dict[type[nn.Module], Activation] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
}
_ACTIVATION_FUNCTIONS: dict[Callable[..., Any], Activation] = {
    F.relu: "relu",
    torch.relu: "relu",
    F.relu6: "relu6",
    F.silu: "silu",
}
_ADDITIONS = (operator.add, operator.iadd, torch.add)


@dataclass(frozen=True)
class Segment:
    """A sequence found in a graph.

    Args:
        name: its first and last convolution, as the model calls them.
        sequence: its description.
        parameters: per layer.
        size: spatial, of its input.
        source: the node whose value it takes.
        nodes: that it replaces, the last one gives its output.
    """

    name: str
    sequence: Sequence
    parameters: tuple[Parameters, ...]
    size: tuple[int, ...]
    source: fx.Node
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class _Unit:
    """A convolution, the tensor added to it and its activation."""

    convolution: fx.Node
    added: fx.Node | None
    activation: Activation
    nodes: tuple[fx.Node, ...]

    @property
    def output(self) -> fx.Node:
        return self.nodes[-1]


def trace(model: nn.Module, example_inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    """An inference copy of a model as a graph with shapes: batch norms folded, dropouts and identities gone.

    Raises:
        Exception: whatever torch.fx raises for a model whose control flow depends on data.
    """
    graph = fx.symbolic_trace(copy.deepcopy(model).eval())
    ShapeProp(graph).propagate(*example_inputs)
    for node in list(graph.graph.nodes):
        module = _module(node)
        if isinstance(module, _NOTHING):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif isinstance(module, _BATCH_NORMS):
            _fold(graph, node, module)
    graph.graph.lint()
    graph.recompile()
    return graph


def _fold(graph: fx.GraphModule, node: fx.Node, norm: nn.Module) -> None:
    before = node.args[0]
    if not isinstance(before, fx.Node) or len(before.users) != 1 or not _is_convolution(before):
        return
    fused = fuse_conv_bn_eval(cast(Any, _module(before)), cast(Any, norm))
    graph.set_submodule(str(before.target), fused)
    node.replace_all_uses_with(before)
    graph.graph.erase_node(node)


def find_segments(graph: fx.GraphModule, shortest: int = 2) -> tuple[list[Segment], dict[str, str]]:
    """Sequences of at least ``shortest`` convolutions whose intermediates nothing else reads.

    Returns:
        The segments, and per convolution that is in none the reason.
    """
    taken: set[fx.Node] = set()
    found: list[Segment] = []
    left: dict[str, str] = {}
    for node in graph.graph.nodes:
        if node in taken or not _is_convolution(node):
            continue
        why = _unsuited(node)
        units = [] if why else _follow(node)
        if why or len(units) < shortest:
            left[str(node.target)] = why or "no other convolution follows that alone reads its output"
            continue
        segment = _segment(units)
        found.append(segment)
        taken.update(segment.nodes)
    return found, left


def _follow(node: fx.Node) -> list[_Unit]:
    """The longest chain from a convolution of which only the last output is read from outside."""
    tensors = [cast(fx.Node, node.args[0])]
    units: list[_Unit] = []
    following: fx.Node | None = node
    while following is not None:
        unit = _unit(following, tensors)
        units.append(unit)
        tensors.append(unit.output)
        nexts = [user for user in unit.output.users if _is_convolution(user) and not _unsuited(user)]
        following = nexts[0] if len(nexts) == 1 else None
    while units and not _closed(units):
        units.pop()
    return units


def _unit(convolution: fx.Node, tensors: list[fx.Node]) -> _Unit:
    nodes, added = [convolution], None
    follower = _only_user(convolution)
    if follower is not None and follower.target in _ADDITIONS and len(follower.args) == 2 and not follower.kwargs:
        others = [one for one in follower.args if one is not convolution]
        if len(others) == 1 and others[0] in tensors:
            added = cast(fx.Node, others[0])
            nodes.append(follower)
            follower = _only_user(follower)
    activation = _activation(follower)
    if activation is not None and follower is not None:
        nodes.append(follower)
    return _Unit(convolution, added, activation or "none", tuple(nodes))


def _closed(units: list[_Unit]) -> bool:
    """Whether every output but the last is read inside the chain alone."""
    inside = {node for unit in units for node in unit.nodes}
    return all(user in inside for unit in units[:-1] for user in unit.output.users)


def _segment(units: list[_Unit]) -> Segment:
    source = cast(fx.Node, units[0].convolution.args[0])
    tensors = [source, *(unit.output for unit in units)]
    layers, parameters = [], []
    for unit in units:
        module = cast(nn.Conv2d, _module(unit.convolution))
        residual = None if unit.added is None else tensors.index(unit.added)
        layers.append(
            Conv(
                module.in_channels,
                module.out_channels,
                tuple(module.kernel_size),
                tuple(module.stride),
                _padding(module),
                tuple(module.dilation),
                module.groups,
                unit.activation,
                residual,
            )
        )
        parameters.append(Parameters(module.weight.detach(), None if module.bias is None else module.bias.detach()))
    size = tuple(source.meta["tensor_meta"].shape[2:])
    nodes = tuple(node for unit in units for node in unit.nodes)
    name = f"{units[0].convolution.target} … {units[-1].convolution.target}"
    return Segment(name, Sequence(tuple(layers)), tuple(parameters), size, source, nodes)


def _padding(module: nn.Conv2d) -> tuple[int, ...]:
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    if module.padding == "same":
        return tuple((k - 1) * d // 2 for k, d in zip(module.kernel_size, module.dilation, strict=True))
    return tuple(cast("tuple[int, ...]", module.padding))


def _unsuited(node: fx.Node) -> str | None:
    module = cast(nn.Conv2d, _module(node))
    if module.padding_mode != "zeros":
        return f"padding_mode={module.padding_mode!r}: bricks know zeros only"
    if module.padding == "same" and any(
        (k - 1) * d % 2 for k, d in zip(module.kernel_size, module.dilation, strict=True)
    ):
        return "padding='same' with an even kernel pads its two sides differently"
    return None


def _module(node: fx.Node) -> nn.Module | None:
    if node.op != "call_module":
        return None
    return node.graph.owning_module.get_submodule(str(node.target)) if node.graph.owning_module else None


def _is_convolution(node: fx.Node) -> bool:
    return type(_module(node)) in _CONVOLUTIONS and len(node.args) == 1 and isinstance(node.args[0], fx.Node)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _activation(node: fx.Node | None) -> Activation | None:
    """The activation that a node is; None for anything else."""
    if node is None:
        return None
    module = _module(node)
    if module is not None:
        name = _ACTIVATION_MODULES.get(type(module))
        return None if name == "gelu" and getattr(module, "approximate", "none") != "none" else name
    if node.op == "call_function" and not set(node.kwargs) - {"inplace"}:
        return _ACTIVATION_FUNCTIONS.get(cast("Callable[..., Any]", node.target))
    return None
