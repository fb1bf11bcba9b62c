"""Biases of shortcuts, moved to where a kernel adds them anyway.

A residual block that changes its shape adds a convolution of its input to its last one: ``relu(last(y) + b + (around(x)
+ c))``. Behind ``around`` there is nothing but its bias, for which torch goes through memory once more; the kernel that
finishes ``last`` adds a bias, b or b + c, with the rest.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx, nn

from joulemark.merged.graph import Unit, called_once, find_chains, module_of, only_user, sum_of


def move_biases(graph: fx.GraphModule) -> int:
    """Give the bias of a convolution that is only added to another one's output to that one; how many there were.

    Sums are rounded once. What :func:`find_chains` lets add decides: two tensors of one shape and format.

    Args:
        graph: with shapes.
    """
    units = {unit.output: unit for chain in find_chains(graph)[0] for unit in chain}
    added = [(unit, units.get(cast(fx.Node, unit.added))) for unit in units.values()]
    found = [(unit, around) for unit, around in added if around is not None and _takes(unit) and _gives(around)]
    return sum(_move(*(cast(nn.Conv2d, module_of(one.convolution)) for one in pair)) for pair in found)


def _move(last: nn.Conv2d, shortcut: nn.Conv2d) -> bool:
    """Give one convolution the other's bias too; not where the format has no such numbers."""
    both = sum_of(*(None if one.bias is None else one.bias.detach() for one in (last, shortcut)))
    assert both is not None
    rounded = both.to(last.weight.dtype)
    if not torch.equal(rounded.isfinite(), both.isfinite()):
        return False
    # A parameter of its own: the one it has may be another layer's too.
    last.bias, shortcut.bias = nn.Parameter(rounded, requires_grad=False), None
    return True


def _takes(unit: Unit) -> bool:
    """Whether a convolution's output is added to before anything else is done with it."""
    return unit.norm is None and not unit.adds_behind and called_once(unit.convolution)


def _gives(unit: Unit) -> bool:
    """Whether it is a convolution with a bias and no more, which one node reads and no other calls."""
    biased = cast(nn.Conv2d, module_of(unit.convolution)).bias is not None
    alone = unit.nodes == (unit.convolution,) and only_user(unit.convolution) is not None
    return biased and alone and called_once(unit.convolution)
