"""Shapes of a graph's values: found by running it on an example, once; another process has them from the disk.

To run a model that is only to be traced costs a new process more than most of merging by a plan from the disk: its
layers are cuDNN's then, each of which picks and loads a kernel that nothing calls afterwards: ``tracing`` in
``results/nvidia-h200/merged-restarts-before.json``.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import TensorMetadata
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from joulemark.merged import cache
from joulemark.merged.in_place import BASE
from joulemark.merged.meaning import says_all, words_of

_BY_VALUE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Of operators whose output has a shape, or is a number of Python's, that depends on values."""
_READING = {"tolist", "numpy", "tensor_split"}
"""Calls that read values where no dispatch sees it."""


def find(graph: fx.GraphModule, inputs: tuple[Any, ...], run: Callable[[], object], on_disk: bool) -> bool:
    """Have each node of a graph know the shapes of its value.

    Args:
        graph: its nodes get ``tensor_meta`` as torch.fx's ``ShapeProp`` gives it, and what else ``run`` finds.
        inputs: of the graph.
        run: runs the graph on them and finds that.
        on_disk: whether shapes are read from the disk, and kept there: not those that depend on values, nor those of
            a graph that does more than its text says.

    Returns:
        Whether it ran.
    """
    if not on_disk or _under_autocast() or not says_all(graph) or _reads_values(graph):
        run()
        return True
    key = _key(graph, inputs)
    if _read(graph, key):
        return False
    watch = _Watch()
    with watch:
        run()
    if not watch.by_value:
        _write(graph, key)
    return True


@dataclass(frozen=True)
class _Tensor:
    """What ``tensor_meta`` says of a tensor; formats as torch prints them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    memory_format: str | None
    requires_grad: bool


@dataclass(frozen=True)
class _Value:
    """What a node has: a tensor, several of them (``many``) or none; ``base`` is the place of the node whose memory."""

    tensors: tuple[_Tensor, ...]
    many: bool
    base: int | None


class _Watch(TorchDispatchMode):
    """Sees whether anything depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.by_value = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler, seconds, to keep that away from what it does not compile."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.by_value |= not _BY_VALUE.isdisjoint(func.tags)
        return func(*args, **(kwargs or {}))


def _under_autocast() -> bool:
    return bool(torch._C._is_any_autocast_enabled())


def _reads_values(graph: fx.GraphModule) -> bool:
    """Whether a node reads values past torch's dispatcher, where no watch sees it."""
    called = (one.target for one in graph.graph.nodes if one.op in ("call_function", "call_method"))
    return any((one if isinstance(one, str) else getattr(one, "__name__", "")) in _READING for one in called)


def _key(graph: fx.GraphModule, inputs: tuple[Any, ...]) -> str:
    """What shapes and strides depend on: the nodes, what they call, and the layouts of weights and inputs."""
    given = pytree.tree_map_only(Tensor, _layout, inputs)
    held = [(name, _layout(one)) for name, one in (*graph.named_parameters(), *graph.named_buffers())]
    devices = sorted({one.device for one in pytree.tree_leaves(inputs) if isinstance(one, Tensor)}, key=str)
    where = [cache.device_key(one) for one in devices]
    how = torch.backends.cudnn.enabled, torch.get_default_dtype()
    what = cache.model_key(graph), words_of(graph), held, given
    return cache.key_of("shapes", cache.code_key(), where, how, *what)


def _layout(x: Tensor) -> tuple[object, ...]:
    return tuple(x.shape), x.stride(), str(x.dtype), x.device.type


def _read(graph: fx.GraphModule, key: str) -> bool:
    """Whether the disk knows the shapes; the nodes have them then."""
    kept: tuple[_Value, ...] | None = cache.read("shapes", key, tuple[_Value, ...])
    nodes = list(graph.graph.nodes)
    if kept is None or len(kept) != len(nodes) or any(not -1 < (one.base or 0) < len(nodes) for one in kept):
        return False
    try:
        metas = [tuple(map(_meta_of, one.tensors)) for one in kept]
    except AttributeError:  # a format that this torch does not have
        return False
    for node, one, given in zip(nodes, kept, metas, strict=True):
        if given or one.many:
            node.meta["tensor_meta"] = given if one.many else given[0]
        if one.base is not None:
            node.meta[BASE] = nodes[one.base]
    return True


def _write(graph: fx.GraphModule, key: str) -> None:
    """Keep what the nodes have, where all of it can be kept."""
    place = {node: number for number, node in enumerate(graph.graph.nodes)}
    values: list[_Value] = []
    for node in place:
        meta, base = node.meta.get("tensor_meta"), node.meta.get(BASE)
        many = isinstance(meta, (tuple, list)) and not isinstance(meta, TensorMetadata)
        tensors = meta if many else () if meta is None else (meta,)
        if not all(isinstance(one, TensorMetadata) and not one.is_quantized for one in tensors):
            return
        values.append(_Value(tuple(map(_told, tensors)), many, place.get(base)))
    cache.write("shapes", key, [asdict(one) for one in values])


def _told(meta: TensorMetadata) -> _Tensor:
    memory = None if meta.memory_format is None else str(meta.memory_format)
    return _Tensor(tuple(meta.shape), tuple(meta.stride), str(meta.dtype), memory, meta.requires_grad)


def _meta_of(one: _Tensor) -> TensorMetadata:
    """As torch.fx has it.

    Raises:
        AttributeError: torch has no such format.
    """
    memory = None if one.memory_format is None else _of_torch(one.memory_format)
    return TensorMetadata(torch.Size(one.shape), _of_torch(one.dtype), one.requires_grad, one.stride, memory, False, {})


def _of_torch(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))
