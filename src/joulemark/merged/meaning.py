"""What a traced model computes, in words, as far as its graph and its modules say it.

A program holds all of a model but its weights. A module's own text leaves much out: torch's prints neither whether an
``AvgPool2d`` counts its padding, nor an ``Upsample``'s ``align_corners``, nor the heads of a ``MultiheadAttention``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from joulemark.merged.cache import is_changed

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_KNOWN = ("torch", "joulemark", "operator", "_operator", "builtins", "math")
"""Packages whose texts every key knows."""
_VERSIONED = ("torchvision", "timm")
"""Packages whose texts are told by their versions."""
_OF_MERGING = ("took_s", "cached")
"""What a merged part says of how it was merged, another thing in each process."""


def words_of(graph: fx.GraphModule) -> list[object]:
    """Texts of a graph and of those in it, all that their modules hold, of functions the names, and versions."""
    used = [one for one in _VERSIONED if one in _packages(graph)]
    versions = [(one, getattr(sys.modules.get(one), "__version__", None)) for one in used]
    return [*versions, *((name, type(one).__qualname__, _held_by(one)) for name, one in graph.named_modules())]


def says_all(graph: fx.GraphModule) -> bool:
    """Whether these words tell a graph from all others: nothing in it is a user's own text, or changed by hooks."""
    return _packages(graph) <= {*_KNOWN, *_VERSIONED} and not any(map(is_changed, graph.modules()))


def _packages(graph: fx.GraphModule) -> set[str]:
    """Where the functions that are called, those that modules hold, and the modules' classes come from."""
    graphs = [one for one in graph.modules() if isinstance(one, fx.GraphModule)]
    called = [node.target for one in graphs for node in one.graph.nodes if node.op == "call_function"]
    held = [value for one in graph.modules() for value in vars(one).values() if isinstance(value, FunctionType)]
    parts: list[Any] = [*called, *held, *map(type, graph.modules())]
    # Operators in C++ name no module.
    return {str(getattr(one, "__module__", None) or "torch").partition(".")[0] for one in parts}


def _held_by(module: nn.Module) -> list[str]:
    if isinstance(module, fx.GraphModule):
        return [str(module.graph)]
    held = vars(module).items()
    return sorted(f"{key} {' '.join(_words(value))}" for key, value in held if key not in _OF_MERGING)


def _words(value: object) -> Iterator[str]:
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, list | tuple):
        yield str(len(value))
        for one in value:
            yield from _words(one)
    else:
        yield str(getattr(value, "__qualname__", type(value).__qualname__))
