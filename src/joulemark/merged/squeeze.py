"""Squeeze-and-excitation as one module: pooling, two small products and a sigmoid, by two kernels on a GPU.

Source: Hu, Shen, Sun, *Squeeze-and-Excitation Networks* (CVPR 2018). In a graph it is a mean over all positions, two
pointwise convolutions, a (hard) sigmoid, and a product with what was pooled; that product stays in the graph, where a
pointwise convolution that follows takes it along (:attr:`joulemark.merged.graph.Segment.gate`).
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from joulemark.merged.bricks import ACTIVATIONS
from joulemark.merged.compiling import seen_by_compiler
from joulemark.merged.graph import activation_of, module_of, only_user
from joulemark.merged.sequence import Activation
from joulemark.merged.trying import compile_at_once, has_triton, told

_GATES = {nn.Sigmoid: False, nn.Hardsigmoid: True}
_AGREES = {2: 2e-2, 4: 1e-3, 8: 1e-6}
"""Bytes of a number → relative error up to which two ways agree."""
_GATE_FUNCTIONS = {torch.sigmoid: False, F.sigmoid: False, F.hardsigmoid: True}


class Excitation(nn.Module):
    """The gate [batch, channels, 1, …] of an activation [batch, channels, *size].

    Args:
        first: pointwise convolution to fewer channels, with a bias.
        activation: behind it.
        second: and back, with a bias.
        hard: whether a hard sigmoid ends it.
    """

    def __init__(self, first: nn.Conv2d, activation: Activation, second: nn.Conv2d, hard: bool) -> None:
        super().__init__()
        self.activation, self.hard = activation, hard
        assert first.bias is not None
        assert second.bias is not None
        self.register_buffer("first_weight", first.weight.detach().flatten(1).contiguous())
        self.register_buffer("first_bias", first.bias.detach())
        self.register_buffer("second_weight", second.weight.detach().flatten(1).t().contiguous())
        self.register_buffer("second_bias", second.bias.detach())
        self.own = has_triton() and first.weight.dtype != torch.float64

    @property
    def _given(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (self.first_weight, self.first_bias, self.second_weight, self.second_bias)

    @property
    def kind(self) -> tuple[object, ...]:
        """What its kernels are compiled for, which are in Triton."""
        from joulemark.merged.excitation import compiled_for

        weight = self.first_weight
        return (*compiled_for(weight.shape[1], weight.shape[0]), weight.dtype, self.activation, self.hard)

    def forward(self, x: Tensor) -> Tensor:
        """The gate."""
        if self.own and x.is_cuda:
            return self._by_kernels(x)
        return in_operators(x, *self._given, self.activation, self.hard)

    def _by_kernels(self, x: Tensor) -> Tensor:
        given = (x, *self._given, self.activation, self.hard)
        # torch imports its compiler to call an operator that is written in Python; where a gradient is asked for of
        # one, it says that there is none.
        if not seen_by_compiler() and not (x.requires_grad and torch.is_grad_enabled()):
            return _excited(*given)
        out: Tensor = torch.ops.joulemark.excitation(*given)
        return out

    def run_small(self) -> Tensor:
        """What its kernels alone give for a small activation: no thread that compiles them gets memory of cuBLAS."""
        return self._by_kernels(self._small)

    @property
    def _small(self) -> Tensor:
        channels, like = self.first_weight.shape[1], self.first_weight
        return torch.linspace(-1, 1, 2 * channels * 9, device=like.device).to(like.dtype).view(2, channels, 3, 3)

    def prove(self, run: Callable[[Tensor], Tensor] | None = None) -> str | None:
        """Try its kernels on a small activation; where they fail or are wrong, torch's operators stand in from then on.

        Args:
            run: in place of the kernels.

        Returns:
            Why the kernels are not used; None where they are, and where there are none to try.
        """
        weight = self.first_weight
        if run is None and not (self.own and weight.is_cuda):
            return None
        x, why = self._small, None
        try:
            out, expected = (run or self._by_kernels)(x), in_operators(x, *self._given, self.activation, self.hard)
            error = float((out.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
            if not error <= _AGREES[weight.dtype.itemsize]:
                why = f"its kernels are {error:.2g} off"
        except Exception as error:  # a compiler of kernels raises anything; torch's operators do the same
            why = told(error)[:200]
        self.own = self.own and why is None
        return why


def in_operators(
    x: Tensor, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor, activation: str, hard: bool
) -> Tensor:
    """The same in torch's operators, weights [squeezed, channels] both."""
    pooled = x.mean(tuple(range(2, x.dim())), keepdim=True).flatten(1)
    hidden = ACTIVATIONS[cast(Activation, activation)](F.linear(pooled, first, first_bias))
    gate = F.linear(hidden, second.t(), second_bias)
    gate = F.hardsigmoid(gate) if hard else gate.sigmoid()
    return gate.view(*gate.shape, *(1,) * (x.dim() - 2))


def _excited(
    x: Tensor,
    first: Tensor,
    first_bias: Tensor,
    second: Tensor,
    second_bias: Tensor,
    activation: Activation,
    hard: bool,
) -> Tensor:
    """An excitation by its kernels."""
    if not x.shape[0]:
        return x.new_empty((*x.shape[:2], *(1,) * (x.dim() - 2)))
    from joulemark.merged.excitation import squeeze_and_excite

    memory = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    with torch.cuda.device(x.device):
        return squeeze_and_excite(
            x.contiguous(memory_format=memory),
            (first, first_bias),
            (second, second_bias),
            activation,
            hard,
        )


_run = torch.library.custom_op(
    "joulemark::excitation",
    _excited,
    mutates_args=(),
    schema="(Tensor x, Tensor first, Tensor first_bias, Tensor second, Tensor second_bias, str activation, bool hard)"
    " -> Tensor",
)
"""The same as one operator, for compilers that need not look inside."""


@_run.register_fake  # type: ignore[untyped-decorator]
def _shape(
    x: Tensor,
    first: Tensor,
    first_bias: Tensor,
    second: Tensor,
    second_bias: Tensor,
    activation: Activation,
    hard: bool,
) -> Tensor:
    del first, first_bias, second, second_bias, activation, hard
    return x.new_empty((*x.shape[:2], *(1,) * (x.dim() - 2)))


def replace_excitations(graph: fx.GraphModule) -> dict[str, str]:
    """Put an :class:`Excitation` in the place of each squeeze-and-excitation of a traced model.

    Returns:
        Per first convolution, as the model calls it, what became of it and its second.
    """
    found: list[tuple[str, Excitation]] = []
    number = count()  # of nodes: layers may be called more than once
    for pool in list(graph.graph.nodes):
        nodes = _matched(pool)
        if nodes is None:
            continue
        first, second, activation, hard = nodes[1], nodes[-2], nodes[2] if len(nodes) == 5 else None, nodes[-1]
        kind = activation_of(activation) or "none"
        module = Excitation(
            cast(nn.Conv2d, module_of(first)), kind, cast(nn.Conv2d, module_of(second)), bool(_hard(hard))
        )
        name = f"excitation_{next(number)}"
        graph.add_submodule(name, module)
        with graph.graph.inserting_after(hard):
            new = graph.graph.call_module(name, (pool.args[0],))
        new.meta = dict(hard.meta)
        hard.replace_all_uses_with(new)
        for node in reversed(nodes):
            graph.graph.erase_node(node)
        found.append((f"{first.target} … {second.target}", module))
    if not found:
        return {}
    graph.graph.lint()
    graph.delete_all_unused_submodules()
    graph.recompile()
    device = found[0][1].first_weight.device
    compile_at_once(((module.kind, module.run_small) for _, module in found if module.own), device)
    return {name: _how(module.prove()) for name, module in found}


def _how(why: str | None) -> str:
    how = "as one" if why is None else f"in torch's operators ({why})"
    return f"squeeze-and-excitation: pooling, both layers and the gate {how}"


def _matched(pool: fx.Node) -> list[fx.Node] | None:
    """Pooling, convolution, activation or none, convolution, sigmoid; None where these are not there."""
    if not _pools(pool):
        return None
    nodes = [pool]
    while len(nodes) < 5:
        following = only_user(nodes[-1])
        if following is None:
            return None
        nodes.append(following)
        if _hard(following) is not None:
            break
    activated = nodes[2] if len(nodes) == 5 else None
    if len(nodes) < 4 or _hard(nodes[-1]) is None or (activated is not None and activation_of(activated) is None):
        return None
    first, second = module_of(nodes[1]), module_of(nodes[-2])
    if not (_is_dense_pointwise(first) and _is_dense_pointwise(second)):
        return None
    one, other = cast(nn.Conv2d, first), cast(nn.Conv2d, second)
    batched = len(pool.meta["tensor_meta"].shape) == one.weight.dim()
    return nodes if batched and one.in_channels == other.out_channels else None


def _pools(node: fx.Node) -> bool:
    """Whether a node is the mean over all positions, which stay as dimensions of one."""
    module = module_of(node)
    if isinstance(module, (nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)):
        return _ones(module.output_size)
    if node.op == "call_function" and node.target in (F.adaptive_avg_pool2d, F.adaptive_avg_pool3d):
        return len(node.args) == 2 and _ones(node.args[1])
    return False


def _ones(size: object) -> bool:
    return size == 1 or (isinstance(size, (tuple, list)) and set(size) == {1})


def _is_dense_pointwise(module: nn.Module | None) -> bool:
    if not isinstance(module, (nn.Conv2d, nn.Conv3d)):
        return False
    shape = (set(module.kernel_size), set(module.stride), module.groups)
    return shape == ({1}, {1}, 1) and module.padding in ((0, 0), (0, 0, 0)) and module.bias is not None


def _hard(node: fx.Node) -> bool | None:
    """Whether a node is a hard sigmoid; None for one that is no sigmoid."""
    module = module_of(node)
    if module is not None:
        return _GATES.get(type(module))
    if node.op == "call_function":
        return _GATE_FUNCTIONS.get(node.target)
    return False if node.op == "call_method" and node.target in ("sigmoid", "sigmoid_") else None
