"""Activations in bricks: contiguous small blocks of positions, as an alternative to channels-last."""

from __future__ import annotations

from torch import Tensor

from joulemark.merged.sequence import Shape


def to_bricks(x: Tensor, edge: Shape) -> Tensor:
    """[batch, channels, height, width] → [batch, bricks down, bricks across, *edge, channels], contiguous.

    Raises:
        ValueError: the size is not a whole number of bricks.
    """
    size = tuple(x.shape[2:])
    if any(n % e for n, e in zip(size, edge, strict=True)):
        raise ValueError(f"a tensor of {size} is no whole number of bricks of {edge}")
    down, across = edge
    split = x.reshape(*x.shape[:2], size[0] // down, down, size[1] // across, across)
    return split.permute(0, 2, 4, 3, 5, 1).contiguous()


def from_bricks(bricks: Tensor) -> Tensor:
    """[batch, bricks down, bricks across, *edge, channels] → [batch, channels, height, width]."""
    batch, rows, columns, down, across, channels = bricks.shape
    return bricks.permute(0, 5, 1, 3, 2, 4).reshape(batch, channels, rows * down, columns * across)
