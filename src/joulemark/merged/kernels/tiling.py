"""How bricks of inverted residuals and bottlenecks divide into tiles of a matrix instruction; both plans share it."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

G = TypeVar("G")


class Tiled:
    """What follows from a brick of ``height`` × ``width`` positions, ``tiles`` per warp, narrow or not."""

    height: int
    width: int
    tiles: int
    narrow: bool

    @cached_property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return (2, 8) if self.narrow else (1, 16)

    @cached_property
    def strips(self) -> int:
        """Tiles side by side."""
        return -(-self.width // self.tile[1])

    @cached_property
    def warps(self) -> int:
        """Of a group."""
        return self.strips * self.height // (self.tiles * self.tile[0])


def for_blocks(geometry: G, resident: int) -> G:
    """A geometry of the same plan for other blocks of a multiprocessor: no size depends on them, so all known stay."""
    made: Any = copy.copy(geometry)
    object.__setattr__(made, "plan", replace(made.plan, resident=resident))
    return made  # type: ignore[no-any-return]
