"""How bricks of inverted residuals and bottlenecks divide into tiles of a matrix instruction; both plans share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from joulemark.merged.kernels.columns import Columns, crossed, kept, where
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.sequence import Shape


class Tiled:
    """What follows from a brick of ``height`` × ``width`` positions, ``tiles`` per warp, narrow or not."""

    height: int
    width: int
    tiles: int
    narrow: bool

    @cached_property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return where(self.narrow, 2, 1), where(self.narrow, 8, 16)

    @cached_property
    def strips(self) -> int:
        """Tiles side by side."""
        return -(-self.width // self.tile[1])

    @cached_property
    def warps(self) -> int:
        """Of a group."""
        return self.strips * self.height // (self.tiles * self.tile[0])


def for_residents(
    blocks: Iterable[Columns], geometry_of: Callable[[Columns], Any], place: tuple[Shape, int, Device], spared: int
) -> Iterator[Columns]:
    """Each plan with the blocks of a multiprocessor that fit, and with those that do where registers are spared.

    One whose blocks take brick after brick is left out where there is no second brick for them.

    Args:
        blocks: plans without ``resident``.
        geometry_of: what follows from such plans, with its ``plan`` and how many blocks are ``resident``, 0 for none.
        place: spatial size of the output, batch, device.
        spared: registers fewer than counted, the second time.
    """
    out, batch, device = place

    def placed() -> Iterator[Columns]:
        for rows in crossed(blocks, spared=(0, spared)):
            fewer = rows.pop("spared")
            geometry = geometry_of(rows)
            resident = geometry.resident(device, fewer)
            new = (fewer == 0) | (resident > geometry.resident(device))
            enough = geometry.plan.bricks(out, batch) > resident * device.multiprocessors
            rows["resident"] = resident * (new & (enough | ~geometry.plan.ahead))
            yield rows

    return kept(placed(), lambda rows: rows["resident"] > 0)
