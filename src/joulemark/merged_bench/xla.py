"""A traced network in JAX, for XLA as a rival: channels innermost, weights as constants of one compiled function.

Imports JAX; only :mod:`joulemark.merged_bench.rivals` imports this module, and only where JAX is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from jax import lax
from torch import Tensor, fx, nn

from joulemark.errors import Unsupported
from joulemark.merged.graph import trace
from joulemark.merged.paths import format_of

_ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "ReLU": jax.nn.relu,
    "relu": jax.nn.relu,
    "ReLU6": lambda x: jnp.clip(x, 0, 6),
    "relu6": lambda x: jnp.clip(x, 0, 6),
    "SiLU": jax.nn.silu,
    "silu": jax.nn.silu,
    "Sigmoid": jax.nn.sigmoid,
}


def compiled(model: nn.Module, x: Tensor) -> tuple[Callable[[Tensor], Any], Callable[[Any], object]]:
    """A call on torch tensors, and what waits for its output.

    The tensor is handed over without a copy, as it lies (channels-last); the output stays JAX's until it is asked for.

    Raises:
        Unsupported: the network holds an operator that this translation does not know.
    """
    graph = trace(model, (x,))
    exact = format_of(x) == "fp32"
    values = {name: _array(one.detach()) for name, one in graph.state_dict().items()}
    program = jax.jit(lambda given, weights: _interpret(graph, given, weights, "highest" if exact else "default"))

    def call(given: Tensor) -> Any:
        order = (0, *range(2, given.dim()), 1)
        return program(_array(given.permute(order).contiguous()), values)

    return call, jax.block_until_ready


def _array(tensor: Tensor) -> Any:
    return jnp.from_dlpack(tensor.detach().contiguous())


def _interpret(graph: fx.GraphModule, given: Any, weights: Mapping[str, Any], precision: str) -> Any:
    known: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            known[node] = given
        elif node.op == "output":
            return fx.map_arg(node.args[0], lambda one: known[one])
        else:
            module = graph.get_submodule(node.target) if node.op == "call_module" else None
            arguments = fx.map_arg(node.args, lambda one: known[one])
            known[node] = _apply(node, module, arguments, weights, precision)
    raise Unsupported("the graph has no output")


def _apply(node: fx.Node, module: nn.Module | None, arguments: Any, weights: Mapping[str, Any], precision: str) -> Any:
    name = type(module).__name__ if module is not None else getattr(node.target, "__name__", str(node.target))
    x = arguments[0]
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name](x)
    if isinstance(module, (nn.Conv2d, nn.Conv3d)):
        return _convolve(module, x, weights[f"{node.target}.weight"], weights.get(f"{node.target}.bias"), precision)
    if isinstance(module, nn.Linear):
        bias = weights.get(f"{node.target}.bias", 0)
        return jnp.matmul(x, weights[f"{node.target}.weight"].T, precision=precision) + bias
    if isinstance(module, nn.MaxPool2d):
        return _max_pool(module, x)
    if isinstance(module, nn.AdaptiveAvgPool2d):
        return _average(x, module.output_size)
    if name == "adaptive_avg_pool2d":
        return _average(x, arguments[1])
    if name in ("add", "iadd"):
        return arguments[0] + arguments[1]
    if name == "mul":
        return arguments[0] * arguments[1]
    if name in ("flatten", "Flatten"):
        # Torch flattens channels first.
        return jnp.moveaxis(x, -1, 1).reshape(x.shape[0], -1)
    raise Unsupported(f"the translation to JAX does not know {name}")


def _convolve(module: nn.Conv2d | nn.Conv3d, x: Any, weight: Any, bias: Any, precision: str) -> Any:
    space = "DHW"[-len(module.kernel_size) :]
    layout = (f"N{space}C", f"OI{space}", f"N{space}C")
    padding = [(one, one) for one in module.padding]
    y = lax.conv_general_dilated(
        x, weight, module.stride, padding, rhs_dilation=module.dilation, feature_group_count=module.groups,
        dimension_numbers=layout, precision=precision,
    )  # fmt: skip
    return y if bias is None else y + bias


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _max_pool(module: nn.MaxPool2d, x: Any) -> Any:
    kernel, stride, padding = (_pair(one) for one in (module.kernel_size, module.stride, module.padding))
    around = ((0, 0), *((one, one) for one in padding), (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, *kernel, 1), (1, *stride, 1), around)


def _average(x: Any, size: Any) -> Any:
    """To one position, or unchanged where the size is already that."""
    wanted = _pair(size)
    if wanted == (1, 1):
        return x.mean(axis=(1, 2), keepdims=True)
    if tuple(x.shape[1:3]) == wanted:
        return x
    raise Unsupported(f"the translation to JAX averages to one position, not from {x.shape[1:3]} to {wanted}")
