"""What a model changes in place, made safe to be moved: all that rewrites a graph takes values for constant.

``y += x`` is traced as what it is, and whatever else reads the tensor that an operation changes keeps the value that it
had there: the operation works on a copy then, and later readers read that. What alone reads a tensor may change it.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import TensorMetadata, _extract_tensor_metadata
from torch.utils import _pytree as pytree

_OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
}
"""In place → not."""
BASE = "base of its memory"


class NotMergeable(Exception):
    """A model is left as it is; the message says why in one clause."""


class Tracer(fx.Tracer):
    """torch.fx's, to which ``y += x`` is not ``y = y + x``, and which looks into no merged part of a model."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A value that knows operators in place."""
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one node."""
        merged = type(m).__module__.startswith("joulemark.merged.")
        return merged or super().is_leaf_module(m, module_qualified_name)


class _Proxy(fx.Proxy):
    """A value of a trace; its operators in place stand below."""


def _traced(of: Callable[..., Any]) -> Callable[[fx.Proxy, object], fx.Proxy]:
    def operate(self: fx.Proxy, other: object) -> fx.Proxy:
        made: fx.Proxy = self.tracer.create_proxy("call_function", of, (self, other), {})
        return made

    return operate


for _of in _OPERATORS:
    setattr(_Proxy, f"__{_of.__name__}__", _traced(_of))


class Shapes(fx.Interpreter):
    """Shapes of all nodes, and for each the node whose memory it lies in.

    torch.fx's own ``ShapeProp`` prints a stack where a model fails on its example and names a node, not the fault.
    """

    def run_node(self, n: fx.Node) -> Any:
        """The node's value."""
        result = super().run_node(n)
        if isinstance(result, Tensor):
            n.meta["tensor_meta"] = _extract_tensor_metadata(result)
        held = _storages(result)
        shared = (one for one in n.all_input_nodes if held & _storages(self.env[one]))
        n.meta[BASE] = next((one.meta[BASE] for one in shared), n)
        return result


def _storages(value: object) -> set[int]:
    return {one.untyped_storage()._cdata for one in pytree.tree_leaves(value) if isinstance(one, Tensor)}


def keep_apart(graph: fx.GraphModule, module_of: Callable[[fx.Node], object]) -> None:
    """Let no operation of a traced graph change what another one reads, nor what the graph is given.

    Args:
        graph: with what :class:`Shapes` finds.
        module_of: what a node calls.

    Raises:
        NotMergeable: a tensor is changed that is also read through a view of it.
    """
    for node in list(graph.graph.nodes):
        changed = changed_by(node, module_of)
        if changed is None or not isinstance(changed.meta.get("tensor_meta"), TensorMetadata):
            continue
        alike = [one for one in graph.graph.nodes if one.meta.get(BASE) is changed.meta[BASE]]
        before = alike[: alike.index(node)] if node in alike else alike
        readers = {user for one in before for user in one.users} - {node, *before}
        if not readers and before[0].op != "placeholder":
            continue
        if before != [changed]:
            raise NotMergeable(f"its {node.name} changes in place what is also read through a view")
        _separate(graph, node, changed)


def _separate(graph: fx.GraphModule, node: fx.Node, changed: fx.Node) -> None:
    """Let a node work on a copy, or not in place, and later readers of what it changes read that."""
    order = {one: number for number, one in enumerate(graph.graph.nodes)}
    later = [user for user in changed.users if order[user] > order[node]]
    instead = node
    if node.target in _OPERATORS and _of_one_format(node):
        node.target = _OPERATORS[cast("Callable[..., Any]", node.target)]
        node.meta[BASE] = node
    else:
        with graph.graph.inserting_before(node):
            instead = graph.graph.call_function(torch.clone, (changed,))
        instead.meta = {**changed.meta, BASE: instead}
        node.replace_input_with(changed, instead)
        if node.meta.get(BASE) is changed.meta[BASE]:
            node.meta[BASE] = instead
    for user in later:
        user.replace_input_with(changed, instead)


def _of_one_format(node: fx.Node) -> bool:
    """Whether both operands have one format, so that the result has it in place or not."""
    metas = [one.meta.get("tensor_meta") for one in node.args if isinstance(one, fx.Node)]
    return len(metas) == len(node.args) and len({one.dtype for one in metas if isinstance(one, TensorMetadata)}) == 1


def changed_by(node: fx.Node, module_of: Callable[[fx.Node], object]) -> fx.Node | None:
    """What a node changes in place; None where it changes nothing."""
    first = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    changes = False
    if node.op == "call_module":
        changes = getattr(module_of(node), "inplace", False) is True
    elif node.op == "call_method":
        changes = str(node.target).endswith("_") and not str(node.target).endswith("__")
    elif node.op == "call_function":
        if isinstance(node.kwargs.get("out"), fx.Node):
            return cast(fx.Node, node.kwargs["out"])
        name, home = getattr(node.target, "__name__", ""), getattr(node.target, "__module__", "")
        changes = node.target in _OPERATORS or node.target is operator.setitem or _asked_for(node)
        changes = changes or (name.endswith("_") and not name.endswith("__") and home != "_operator")
    return first if changes and isinstance(first, fx.Node) else None


def _asked_for(node: fx.Node) -> bool:
    """Whether a function is called with ``inplace``."""
    try:
        given = inspect.signature(cast("Callable[..., Any]", node.target)).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # it has no signature
        return bool(node.kwargs.get("inplace", False))
    return given.arguments.get("inplace", False) is True
