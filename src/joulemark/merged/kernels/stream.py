"""Chains of 3×3 convolutions in streamed rows: memoized on chip, nothing recomputed from row to row.

A block takes a band of columns and carries it from top to bottom. Each layer has warps of its own that keep their
weights in registers throughout; rows go from layer to layer through small rings in shared memory
(``device/stream.cuh``). Only the columns at a band's sides, and the rows at the ends of a brick (a piece of a band),
are computed by two blocks. The first layer's warps bring the input ahead of time, so that loads, matrix instructions
and stores of all layers overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

from joulemark.merged.kernels import chain
from joulemark.merged.kernels.chain import ALIGNMENT, GUARD, MOST_SHARED, Lines, brick_constants, registers_for, struct
from joulemark.merged.kernels.compile import device_text
from joulemark.merged.kernels.description import Description
from joulemark.merged.kernels.kernel import Kernel

_MOST_WARPS = 32
_BARRIER_BYTES = 16
"""Two barriers of each row of a ring: written, read."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a kernel that are free to choose.

    Args:
        width: columns of a band with its halo, a multiple of 16.
        rows: of the output that a brick has; a block takes brick after brick.
        blocks: per multiprocessor.
        ahead: rows of the input's ring, a power of two.
        between: rows of the other rings, a power of two.
    """

    width: int
    rows: int = 128
    blocks: int = 1
    ahead: int = 16
    between: int = 4


def unsuited(description: Description) -> str | None:
    """Why there is no such kernel for a sequence; None where there is one."""
    if description.sequence.dimensions != 2:
        return f"{description.sequence.dimensions} dimensions: rows are streamed in 2"
    return chain.unsuited(description)


@dataclass(frozen=True)
class _Ring:
    """Rows of a tensor in shared memory; offsets in bytes."""

    rows: int
    pitch: int
    readers: int
    writers: int
    slots: int
    barriers: int

    @property
    def type(self) -> str:
        """Its type in ``device/stream.cuh``."""
        return f"Ring<{self.rows}, {self.pitch}, {self.readers}, {self.writers}>"


class _Stream(Lines):
    """Works out a kernel of streamed rows."""

    def __init__(self, description: Description, plan: Plan) -> None:
        self.plan, self.strips = plan, plan.width // 16
        fewest = sum(max(-(-layer.out_channels // 16), 1) for layer in description.sequence.layers) * self.strips
        super().__init__(description, registers_for(fewest, plan.blocks), _MOST_WARPS)
        self.groups = [self.strips * one.splits for one in self.parameters]
        self.warps = sum(self.groups)
        if self.warps > _MOST_WARPS or registers_for(self.warps, plan.blocks) < self.registers:
            raise ValueError(
                f"a band of {plan.width} columns takes {self.warps} warps × {plan.blocks} blocks: too many"
            )
        if not all(one.resident for one in self.parameters):
            raise ValueError(f"the weights do not fit into {self.registers} registers of {self.warps} warps")
        self.rings, self.shared = self._place_rings()

    def _place_rings(self) -> tuple[list[_Ring], int]:
        rings: list[_Ring] = []
        at = ALIGNMENT
        for tensor in range(self.depth):
            adders = [n for n, layer in enumerate(self.layers) if layer.residual == tensor]
            rows = self.plan.ahead if tensor == 0 else self.plan.between
            behind = max((n + 1 - tensor for n in adders), default=0)
            while rows < 2 * (behind + 2 + (tensor == 0)):
                rows *= 2
            if tensor == 0:
                self.lag = max(rows // 4, behind + 3)
            readers = self.groups[tensor] + sum(self.groups[n] for n in adders)
            writers = 32 * self.groups[0] if tensor == 0 else self.groups[tensor - 1]
            pitch = self.plan.width * self.chunks(tensor) * 16
            barriers = sum(ring.rows for ring in rings) * _BARRIER_BYTES
            rings.append(_Ring(rows, pitch, readers, writers, at, barriers))
            at += rows * pitch + 2 * GUARD * self.chunks(tensor) * 16
            at = -(-at // ALIGNMENT) * ALIGNMENT
        if rings[-1].barriers + rings[-1].rows * _BARRIER_BYTES > ALIGNMENT:
            raise ValueError(f"{sum(ring.rows for ring in rings)} rows in rings: too many barriers")
        return rings, at

    def source(self, name: str) -> str:
        """The kernel's text."""
        halo = 2 * self.depth
        field: dict[str, object] = {
            "DEPTH": 1, "HEIGHT": self.plan.rows + halo, "WIDTH": self.plan.width, "GUARD": GUARD, "WARPS": self.warps,
            "LEVELS": self.depth, "TILE_DEPTH": 1, "TILE_HEIGHT": self.plan.rows, "TILE_WIDTH": self.plan.width - halo,
            **brick_constants(None),
        }  # fmt: skip
        layers = []
        for number, layer in enumerate(self.layers):
            read, written = self.rings[number], self.rings[min(number + 1, self.depth - 1)]
            added = self.rings[layer.residual or 0]
            places: dict[str, object] = {
                "SOURCE": read.slots, "SOURCE_BARRIERS": read.barriers, "TARGET": written.slots,
                "TARGET_BARRIERS": written.barriers, "ADDED": added.slots, "ADDED_BARRIERS": added.barriers,
                "ADDED_LEVEL": layer.residual or 0, "TAKEN": layer.in_channels, "LAG": self.lag,
            }  # fmt: skip
            types = f" using InRing = {read.type}; using OutRing = {written.type}; using AddedRing = {added.type};"
            layers.append(self.layer_text(number, places, types))
        starts = "".join(f"        {ring.type}::start(shared + {ring.barriers});\n" for ring in self.rings)
        calls = ""
        for number, group in enumerate(self.groups):
            before = sum(self.groups[:number])
            how = f"{'next' if number else 'first'}<Layer{number}, Field>(a, shared, warp - {before})"
            calls += f"    if (warp < {before + group}) return stream_{how};\n"
        return (
            "".join(device_text(f"{part}.cuh") for part in ("rows", "chain", "stream"))
            + struct("Field", field, {"VOLUME": False})
            + "".join(layers)
            + f"KERNEL({name}, {32 * self.warps}, {self.plan.blocks}) {{\n"
            f"    const u32 shared = shared_base();\n"
            f"    const int warp = threadIdx.x >> 5;\n"
            f"    if (threadIdx.x == 0) {{\n{starts}    }}\n    block_sync();\n{calls}}}\n"
        )


def stream(description: Description, plan: Plan) -> Kernel:
    """The kernel of a chain in streamed rows.

    Raises:
        ValueError: there is none for this sequence or plan.
    """
    why = unsuited(description)
    if why:
        raise ValueError(f"no streaming kernel for this chain: {why}")
    depth = len(description.sequence.layers)
    if plan.width % 16 or plan.width <= 2 * depth:
        raise ValueError(f"a band of {plan.width} columns: give a multiple of 16 above {2 * depth}")
    made = _Stream(description, plan)
    if made.shared > MOST_SHARED:
        raise ValueError(f"the rings take {made.shared} bytes of shared memory, {MOST_SHARED} are there")
    name = f"stream_{description}_{plan.rows}x{plan.width - 2 * depth}_b{plan.blocks}r{plan.ahead}_{plan.between}"
    edge = (plan.rows, plan.width - 2 * depth)
    return Kernel(name, description, made.source(name), 32 * made.warps, made.shared, edge, made.pack, plan.blocks)
