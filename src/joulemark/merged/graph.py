"""Finds sequences of convolutions in a model: traced by torch.fx, batch norms folded into the weights before them."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import TensorMetadata
from torch.nn import functional as F

from joulemark.merged import shapes
from joulemark.merged.bricks import Parameters
from joulemark.merged.folding import folded
from joulemark.merged.in_place import NotMergeable, Shapes, Tracer, keep_apart
from joulemark.merged.norms import ChannelNorm
from joulemark.merged.sequence import LEAKY_SLOPE, Activation, Conv, Sequence
from joulemark.merged.trying import told

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout2d, nn.Dropout3d)
_ACTIVATION_MODULES: dict[type[nn.Module], Activation] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
    nn.LeakyReLU: "leaky",
    nn.Hardswish: "hardswish",
}
_ACTIVATION_FUNCTIONS: dict[Callable[..., Any], Activation] = {
    F.relu: "relu",
    torch.relu: "relu",
    F.relu6: "relu6",
    F.silu: "silu",
    F.hardswish: "hardswish",
}
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_PRODUCTS = (operator.mul, operator.imul, torch.mul)


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
        adds: the node from outside whose value is added in the last layer; None without.
        gate: the node whose value, one number for each image and channel, ``source`` is multiplied by; None without.
            The product is among ``nodes`` where nothing else reads it.
    """

    name: str
    sequence: Sequence
    parameters: tuple[Parameters, ...]
    size: tuple[int, ...]
    source: fx.Node
    nodes: tuple[fx.Node, ...]
    adds: fx.Node | None = None
    gate: fx.Node | None = None

    @property
    def batch(self) -> int:
        """Images of the example."""
        return int(self.source.meta["tensor_meta"].shape[0])


@dataclass(frozen=True)
class Unit:
    """A convolution, its norm, the tensor added to it and its activation.

    Args:
        convolution: the node.
        added: whose value is added; None without.
        activation: after it.
        nodes: of all of this, the last one gives its output.
        norm: over its channels, before what is added; None without.
        adds_behind: what is added is added behind the activation.
    """

    convolution: fx.Node
    added: fx.Node | None
    activation: Activation
    nodes: tuple[fx.Node, ...]
    norm: ChannelNorm | None = None
    adds_behind: bool = False

    @property
    def output(self) -> fx.Node:
        """The node that gives its value."""
        return self.nodes[-1]


def trace(model: nn.Module, example_inputs: tuple[Any, ...], on_disk: bool = False) -> fx.GraphModule:
    """An inference copy of a model as a graph with shapes: batch norms folded, dropouts and identities gone.

    Args:
        on_disk: whether its shapes may be those that another process has found, and are kept for the next.

    Raises:
        Exception: whatever torch.fx raises for a model whose control flow depends on data.
        NotMergeable: what no graph holds: hooks of the model itself, weights, buffers or numbers that change in a
            call; it changes what it also reads through a view; or it fails on the example.
    """
    if _has_hooks(model):
        raise NotMergeable("the whole model has hooks, which no graph holds")
    with torch.inference_mode(False), torch.no_grad():
        graph = _with_shapes(model, example_inputs, on_disk)
        for node in list(graph.graph.nodes):
            _by_position(node)
            if isinstance(module_of(node), _NOTHING) or _is_stochastic_depth(node):
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
        keep_apart(graph, module_of)
        for node in list(graph.graph.nodes):
            module = module_of(node)
            if isinstance(module, _BATCH_NORMS):
                _fold(graph, node, module)
    graph.graph.lint()
    graph.recompile()
    return graph


def twin(graph: fx.GraphModule) -> fx.GraphModule:
    """The same nodes anew over the same modules: those that replace others in one leave the other as it is."""
    return fx.GraphModule(graph, copy.deepcopy(graph.graph))


def copied(graph: fx.GraphModule) -> fx.GraphModule:
    """The same nodes and modules anew over the same weights, which may be replaced in one but not changed."""
    weights = {id(one): one for one in (*graph.parameters(), *graph.buffers())}
    made: fx.GraphModule = copy.deepcopy(graph, weights)
    return made


def _with_shapes(model: nn.Module, example_inputs: tuple[Any, ...], on_disk: bool) -> fx.GraphModule:
    """A copy of a model that no call changes, as a graph that has seen its example."""
    copied = copy.deepcopy(model).eval()
    before = _state(copied)
    graph = fx.GraphModule(copied, Tracer().trace(copied))

    def run() -> None:
        _run(graph, example_inputs)
        _refuse_change(copied, before)

    if not shapes.find(graph, example_inputs, run, on_disk):
        _refuse_change(copied, before)
    return graph


def _run(graph: fx.GraphModule, example_inputs: tuple[Any, ...]) -> None:
    """Run a graph on its example, which finds the shapes of its values.

    Raises:
        NotMergeable: it fails.
    """
    try:
        Shapes(graph).run(*(one.clone() if isinstance(one, Tensor) else one for one in example_inputs))
    except Exception as error:  # whatever the model's own operations raise
        taken = _taken_for_given(graph, example_inputs)
        hint = f" (torch.fx takes {taken[0]!r} for given, which is None)" if taken else ""
        raise NotMergeable(f"it fails on the example inputs{hint}: {told(error)}") from error


def _refuse_change(model: nn.Module, before: dict[str, tuple[object, ...]]) -> None:
    """See that tracing and running a model has left it as it was.

    Raises:
        NotMergeable: it has not.
    """
    changed = [name for name, now in _state(model).items() if before.get(name, now) != now]
    if changed:
        raise NotMergeable(f"each call changes its {changed[0]!r}")


def _taken_for_given(graph: fx.GraphModule, example_inputs: tuple[object, ...]) -> list[str]:
    """Inputs that are None, where a model may have a way of its own that no trace takes."""
    taken = [node for node in graph.graph.nodes if node.op == "placeholder"]
    defaults = [node.args[0] if node.args else node for node in taken[len(example_inputs) :]]
    return [str(node.target) for node, one in zip(taken, (*example_inputs, *defaults), strict=False) if one is None]


def _state(model: nn.Module) -> dict[str, tuple[object, ...]]:
    """What tells that something was changed: a number itself; which tensor it is, and how often that was written."""
    found: dict[str, tuple[object, ...]] = {
        f"{path}.{name}".lstrip("."): (value,)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (int, float, str))
    }
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        found[name] = (id(one), 0 if one.is_inference() else one._version, one)  # held, so that no other has its id
    return found


def _is_stochastic_depth(node: fx.Node) -> bool:
    """Torchvision's, which passes everything on outside of training; its module cannot be seen through the trace."""
    training = node.kwargs.get("training", node.args[3] if len(node.args) > 3 else True)
    return getattr(node.target, "__name__", "") == "stochastic_depth" and training is False


def _by_position(node: fx.Node) -> None:
    """``layer(input=x)`` of one of torch's own as ``layer(x)``, as all that follows looks for."""
    if type(module_of(node)).__module__.startswith("torch.nn.") and not node.args and set(node.kwargs) == {"input"}:
        node.args, node.kwargs = (node.kwargs["input"],), {}


def _fold(graph: fx.GraphModule, node: fx.Node, norm: nn.Module) -> None:
    before = node.args[0]
    if not isinstance(before, fx.Node) or len(before.users) != 1 or not is_convolution(before):
        return
    if not called_once(before):  # its weights are those of its other calls too
        return
    if norm.running_mean is None:  # it takes the means of each input
        return
    graph.set_submodule(str(before.target), folded(cast(nn.Module, module_of(before)), norm))
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
        if node in taken or not is_convolution(node):
            continue
        why = _unsuited(node)
        units = [] if why else _follow(node)
        if why or len(units) < shortest:
            left[str(node.target)] = why or "what reads its output is not one other convolution alone"
            continue
        segment = _segment(units)
        found.append(segment)
        taken.update(segment.nodes)
    return found, left


def find_chains(graph: fx.GraphModule) -> tuple[list[list[Unit]], dict[str, str]]:
    """All convolutions as units, those in one chain of which each reads what the one before it gives.

    Unlike in :func:`find_segments`, a unit may add a tensor from anywhere, and what an inner unit gives may be read
    elsewhere: :func:`range_segment` says which part of a chain can be executed as one.

    Returns:
        The chains, and per convolution that is in none the reason.
    """
    taken: set[fx.Node] = set()
    units: dict[fx.Node, Unit] = {}
    left: dict[str, str] = {}
    for node in graph.graph.nodes:
        if not is_convolution(node):
            continue
        why = _unsuited(node)
        if why is not None:
            left[str(node.target)] = why
            continue
        unit = _unit(node, None, taken)
        taken.update(unit.nodes)
        units[node] = unit
    chains: list[list[Unit]] = []
    ends: dict[fx.Node, list[Unit]] = {}
    for unit in units.values():
        source = cast(fx.Node, unit.convolution.args[0])
        readers = [user for user in source.users if user in units]
        chain = ends.pop(source, None) if len(readers) == 1 else None
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(unit)
        ends[unit.output] = chain
    return _with_projections(chains), left


def _with_projections(chains: list[list[Unit]]) -> list[list[Unit]]:
    """Chains that begin with the pointwise convolution on the way around them, where that is all of another chain.

    A bottleneck that changes its channels adds a projection of its input: what both give is the sum of two pointwise
    convolutions, which is one of both their inputs (:func:`_joined`).
    """
    beginnings = {chain[0].convolution.args[0]: chain for chain in chains if len(chain) > _AROUND}
    kept = []
    for chain in chains:
        around = beginnings.get(chain[0].convolution.args[0]) if len(chain) == 1 else None
        if around is not None and _is_projection(chain[0]) and _adds_before(around[_AROUND], chain[0].output):
            around.insert(0, chain[0])
        else:
            kept.append(chain)
    return kept


_AROUND = 2
"""Number of the convolution to whose output a projection is added."""


def _adds_before(unit: Unit, node: fx.Node) -> bool:
    """Whether it adds what a node gives, before its activation."""
    return unit.added is node and not unit.adds_behind


def _is_projection(unit: Unit) -> bool:
    """Whether it is a pointwise convolution and no more."""
    module = cast(nn.Conv2d, module_of(unit.convolution))
    ones, zeros = (1,) * len(module.kernel_size), (0,) * len(module.kernel_size)
    shape = (tuple(module.kernel_size), tuple(module.stride), _padding(module), module.groups)
    return shape == (ones, ones, zeros, 1) and (unit.added, unit.activation, unit.norm) == (None, "none", None)


def range_segment(units: list[Unit]) -> Segment | None:
    """Consecutive units of a chain as one segment, with the gate of its input where there is one.

    None where something outside reads an inner output, or an inner unit adds a tensor from outside.
    """
    if not _closed(units):
        return None
    if units[1:] and units[1].convolution.args[0] is not units[0].output:
        return _joined(units)
    tensors = [cast(fx.Node, units[0].convolution.args[0]), *(unit.output for unit in units)]
    for number, unit in enumerate(units):
        inside = unit.added is None or unit.added in tensors[: number + 1]
        if not inside and number + 1 < len(units):
            return None
    return _gated(_segment(units))


def _joined(units: list[Unit]) -> Segment | None:
    """A projection and the convolutions that it goes around as one segment, whose last layer takes both their inputs.

    None where more follows than the layer to which it is added.
    """
    around, *rest = units
    last = rest[-1]
    if len(rest) != _AROUND + 1 or not _is_joinable(last):
        return None
    plain = _segment([*rest[:-1], replace(last, added=None)])
    *before, layer = plain.sequence.layers
    *given, parameters = plain.parameters
    module = cast(nn.Conv2d, module_of(around.convolution))
    both = Parameters(
        torch.cat([parameters.weight, module.weight.detach()], 1),
        sum_of(parameters.bias, None if module.bias is None else module.bias.detach()),
    )
    joined = replace(layer, in_channels=layer.in_channels + module.in_channels, joined=0)
    nodes = (*around.nodes, *(node for unit in rest for node in unit.nodes))
    name = f"{around.convolution.target} … {last.convolution.target}"
    return replace(plain, name=name, sequence=Sequence((*before, joined)), parameters=(*given, both), nodes=nodes)


def _is_joinable(unit: Unit) -> bool:
    return _is_projection(replace(unit, added=None, activation="none"))


def sum_of(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Of two biases, rounded to no less than fp32."""
    if one is None or other is None:
        return one if other is None else other
    wide = torch.promote_types(one.dtype, torch.float32)
    return one.to(wide) + other.to(wide)


def _gated(segment: Segment) -> Segment:
    """A segment that takes along the product of its input with a gate, where it alone reads that product."""
    node = segment.source
    if node.op != "call_function" or node.target not in _PRODUCTS or len(node.args) != 2 or node.kwargs:
        return segment
    if set(node.users) != {segment.nodes[0]} or any(one.residual == 0 for one in segment.sequence.layers):
        return segment
    whole = node.meta["tensor_meta"]
    opened = (*whole.shape[:2], *(1,) * (len(whole.shape) - 2))
    for x, gate in (node.args, reversed(node.args)):
        metas = [one.meta.get("tensor_meta") if isinstance(one, fx.Node) else None for one in (x, gate)]
        shapes = [(tuple(one.shape), one.dtype) for one in metas if isinstance(one, TensorMetadata)]
        if shapes == [(tuple(whole.shape), whole.dtype), (opened, whole.dtype)] and opened != tuple(whole.shape):
            source, by = cast(fx.Node, x), cast(fx.Node, gate)
            return replace(segment, source=source, nodes=(node, *segment.nodes), gate=by)
    return segment


def _follow(node: fx.Node) -> list[Unit]:
    """The longest chain from a convolution of which only the last output is read from outside."""
    tensors = [cast(fx.Node, node.args[0])]
    units: list[Unit] = []
    following: fx.Node | None = node
    while following is not None:
        unit = _unit(following, tensors)
        units.append(unit)
        tensors.append(unit.output)
        nexts = [user for user in unit.output.users if is_convolution(user) and not _unsuited(user)]
        following = nexts[0] if len(nexts) == 1 else None
    while units and not _closed(units):
        units.pop()
    return units


def _unit(convolution: fx.Node, tensors: list[fx.Node] | None, taken: set[fx.Node] | None = None) -> Unit:
    """A convolution with what follows it.

    Args:
        tensors: that may be added; None for any of the same shape.
        taken: nodes that belong to other units.
    """
    nodes, added, norm = [convolution], None, None
    follower = only_user(convolution)
    if follower is not None and follower is norm_behind(convolution):
        norm = cast(ChannelNorm, module_of(follower))
        nodes.append(follower)
        follower = only_user(follower)
    if taken and follower in taken:
        return Unit(convolution, None, "none", tuple(nodes), norm)
    added = _added_to(nodes[-1], follower, convolution, tensors)
    if added is not None:
        nodes.append(cast(fx.Node, follower))
        follower = only_user(nodes[-1])
    activation = activation_of(follower)
    if activation is None:
        return Unit(convolution, added, "none", tuple(nodes), norm)
    nodes.append(cast(fx.Node, follower))
    if added is None and (behind := only_user(nodes[-1])) is not None and behind not in (taken or ()):
        added = _added_to(nodes[-1], behind, convolution, tensors)
        if added is not None:
            return Unit(convolution, added, activation, (*nodes, behind), norm, adds_behind=True)
    return Unit(convolution, added, activation, tuple(nodes), norm)


def _added_to(
    node: fx.Node, follower: fx.Node | None, convolution: fx.Node, tensors: list[fx.Node] | None
) -> fx.Node | None:
    """What a follower adds to a node's value; None where it is no addition, or of what may not be added."""
    if follower is None or follower.target not in _ADDITIONS or len(follower.args) != 2 or follower.kwargs:
        return None
    others = [one for one in follower.args if one is not node]
    return cast(fx.Node, others[0]) if len(others) == 1 and _may_be_added(others[0], convolution, tensors) else None


def _may_be_added(other: object, convolution: fx.Node, tensors: list[fx.Node] | None) -> bool:
    if tensors is not None:
        return other in tensors
    here = convolution.meta.get("tensor_meta")
    there = other.meta.get("tensor_meta") if isinstance(other, fx.Node) else None
    return isinstance(there, TensorMetadata) and (there.shape, there.dtype) == (here.shape, here.dtype)


def _closed(units: list[Unit]) -> bool:
    """Whether every output but the last is read inside the chain alone."""
    inside = {node for unit in units for node in unit.nodes}
    return all(user in inside for unit in units[:-1] for user in unit.output.users)


def _segment(units: list[Unit]) -> Segment:
    source = cast(fx.Node, units[0].convolution.args[0])
    tensors = [source, *(unit.output for unit in units)]
    layers, parameters = [], []
    adds: fx.Node | None = None
    for number, unit in enumerate(units):
        module = cast(nn.Conv2d, module_of(unit.convolution))
        residual = None
        if unit.added in tensors[: number + 1]:
            residual = tensors.index(unit.added)
        else:
            adds = unit.added
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
                norm=None if unit.norm is None else unit.norm.eps,
                adds_behind=unit.adds_behind,
            )
        )
        bias = None if module.bias is None else module.bias.detach()
        parameters.append(Parameters(module.weight.detach(), bias, None if unit.norm is None else unit.norm.affine))
    size = tuple(source.meta["tensor_meta"].shape[2:])
    nodes = tuple(node for unit in units for node in unit.nodes)
    ends = dict.fromkeys(str(one.convolution.target) for one in (units[0], units[-1]))
    return Segment(" … ".join(ends), Sequence(tuple(layers)), tuple(parameters), size, source, nodes, adds)


def _padding(module: nn.Conv2d) -> tuple[int, ...]:
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    if module.padding == "same":
        return tuple((k - 1) * d // 2 for k, d in zip(module.kernel_size, module.dilation, strict=True))
    return tuple(cast("tuple[int, ...]", module.padding))


def _unsuited(node: fx.Node) -> str | None:
    module = cast(nn.Conv2d, module_of(node))
    shape = cast(fx.Node, node.args[0]).meta["tensor_meta"].shape
    if len(shape) != module.weight.dim():
        return f"its input of {tuple(shape)} is an image without a batch"
    if module.padding_mode != "zeros":
        return f"padding_mode={module.padding_mode!r}: bricks know zeros only"
    if module.padding == "same" and any(
        (k - 1) * d % 2 for k, d in zip(module.kernel_size, module.dilation, strict=True)
    ):
        return "padding='same' with an even kernel pads its two sides differently"
    return None


def module_of(node: fx.Node) -> nn.Module | None:
    """The module that a node calls; None for any other node, and for a module whose hooks do more than its class."""
    if node.op != "call_module" or node.graph.owning_module is None:
        return None
    module: nn.Module = node.graph.owning_module.get_submodule(str(node.target))
    return None if _has_hooks(module) else module


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_convolution(node: fx.Node) -> bool:
    """Whether a node calls a convolution of its input alone."""
    return type(module_of(node)) in _CONVOLUTIONS and len(node.args) == 1 and isinstance(node.args[0], fx.Node)


def called_once(node: fx.Node) -> bool:
    """Whether no other node calls the same module, nor reads its weights."""
    within = f"{node.target}."
    return not any(
        one.target == node.target if one.op == "call_module" else str(one.target).startswith(within)
        for one in node.graph.nodes
        if one is not node and one.op in ("call_module", "get_attr")
    )


def only_user(node: fx.Node) -> fx.Node | None:
    """The one node that reads a node; None where there are several, or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def norm_behind(convolution: fx.Node) -> fx.Node | None:
    """The norm over channels that alone reads what a convolution gives; None without."""
    follower = only_user(convolution) if is_convolution(convolution) else None
    return follower if follower is not None and isinstance(module_of(follower), ChannelNorm) else None


def attribute_of(graph: fx.GraphModule, name: str) -> Tensor:
    """A parameter or buffer by its path."""
    found: object = graph
    for part in name.split("."):
        found = getattr(found, part)
    return cast(Tensor, found)


def activation_of(node: fx.Node | None) -> Activation | None:
    """The activation that a node is; None for anything else."""
    if node is None:
        return None
    module = module_of(node)
    if module is not None:
        name = _ACTIVATION_MODULES.get(type(module))
        if name == "gelu" and getattr(module, "approximate", "none") != "none":
            return None
        return None if name == "leaky" and getattr(module, "negative_slope", None) != LEAKY_SLOPE else name
    if node.op == "call_function" and not set(node.kwargs) - {"inplace"}:
        return _ACTIVATION_FUNCTIONS.get(cast("Callable[..., Any]", node.target))
    return None
