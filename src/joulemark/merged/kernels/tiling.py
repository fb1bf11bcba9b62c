"""How bricks of inverted residuals and bottlenecks divide into tiles of a matrix instruction; both plans share it."""

from __future__ import annotations


class Tiled:
    """What follows from a brick of ``height`` × ``width`` positions, ``tiles`` per warp, narrow or not."""

    height: int
    width: int
    tiles: int
    narrow: bool

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return (2, 8) if self.narrow else (1, 16)

    @property
    def strips(self) -> int:
        """Tiles side by side."""
        return -(-self.width // self.tile[1])

    @property
    def warps(self) -> int:
        """Of a group."""
        return self.strips * self.height // (self.tiles * self.tile[0])
