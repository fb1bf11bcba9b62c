"""Chains of 3×3 convolutions in streamed rows: memoized on chip, nothing recomputed from row to row.

A block takes a band of columns and carries it from top to bottom. Each layer has warps of its own that keep their
weights in registers throughout; rows go from layer to layer through small rings in shared memory
(``device/stream.cuh``). Only the columns at a band's sides, and the rows at the ends of a brick (a piece of a band),
are computed by two blocks. The first layer's warps bring the input ahead of time, so that loads, matrix instructions
and stores of all layers overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from joulemark.merged.kernels import chain
from joulemark.merged.kernels.chain import (
    ALIGNMENT,
    GUARD,
    Lines,
    best_plans,
    brick_constants,
    check_room,
    refuse,
    registers_for,
    struct,
)
from joulemark.merged.kernels.compile import device_text
from joulemark.merged.kernels.description import Description
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.kernel import Kernel
from joulemark.merged.kernels.seconds import Counts
from joulemark.merged.sequence import Shape

_MOST_WARPS = 32


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
class Ring:
    """Rows of a tensor in shared memory; offsets in bytes."""

    BARRIER_BYTES: ClassVar[int] = 16
    """Two barriers of each row: written, read."""

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
        self.plan, self.blocks, self.strips = plan, plan.blocks, plan.width // 16
        for most in (16, 8):  # channels of a warp: more of them take more registers, fewer of them more warps
            warps = sum(-(-layer.out_channels // most) for layer in description.sequence.layers) * self.strips
            super().__init__(description, registers_for(warps, plan.blocks), _MOST_WARPS)
            self.groups = [self.strips * one.splits for one in self.parameters]
            self.warps = sum(self.groups)
            enough = registers_for(self.warps, plan.blocks) >= self.registers
            if enough and all(one.resident for one in self.parameters):
                break
        else:
            raise ValueError(
                f"a band of {plan.width} columns, {plan.blocks} blocks: the weights do not fit into registers"
            )
        if self.warps > _MOST_WARPS:
            raise ValueError(f"a band of {plan.width} columns takes {self.warps} warps: too many")
        self.rings, self.shared = self._place_rings()

    def _place_rings(self) -> tuple[list[Ring], int]:
        rings: list[Ring] = []
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
            barriers = sum(ring.rows for ring in rings) * Ring.BARRIER_BYTES
            rings.append(Ring(rows, pitch, readers, writers, at, barriers))
            at += rows * pitch + 2 * GUARD * self.chunks(tensor) * 16
            at = -(-at // ALIGNMENT) * ALIGNMENT
        if rings[-1].barriers + rings[-1].rows * Ring.BARRIER_BYTES > ALIGNMENT:
            raise ValueError(f"{sum(ring.rows for ring in rings)} rows in rings: too many barriers")
        return rings, at

    def counts(self, size: Shape, batch: int, device: Device) -> Counts:
        """What the busiest multiprocessor does; ``step`` is a row of the layer with most, ``round`` a brick's start."""
        out = self.description.sequence.sizes(size)[-1]
        height, width = min(self.plan.rows, out[0]), self.plan.width - 2 * self.depth
        bricks = batch * -(-out[0] // self.plan.rows) * -(-out[1] // width)
        rounds = -(-bricks // (device.multiprocessors * self.plan.blocks))
        each = rounds * min(self.plan.blocks, -(-bricks // device.multiprocessors))
        taken = (height + 2 * self.depth) * self.plan.width  # pixels of the input
        products = stores = chained = 0.0
        for number, one in enumerate(self.parameters):
            rows = height + 2 * (self.depth - number - 1)
            products += rows * self.strips * 9 * one.steps * one.tiles * one.splits
            stores += rows * self.strips * one.splits * one.tiles
            chained = max(chained, rows * 9.0 * one.steps * one.tiles)
        slower = 3 if self.description.format == "fp32" else 1
        return {
            "product": each * products * slower, "store": each * stores,
            "step": rounds * (height + 2.0 * (self.depth - 1)), "chained_product": rounds * chained * slower,
            "chunk": each * (taken * self.chunks(0) + height * width * self.chunks_out), "round": rounds, "launch": 1,
        }  # fmt: skip

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
                "BRINGERS": self.groups[0],
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


def candidates(description: Description, size: Shape, batch: int, device: Device, limit: int = 12) -> list[Plan]:
    """Plans worth a trial for inputs of ``size``, the most promising first.

    Raises:
        ValueError: there is no streaming kernel for this sequence.
    """
    refuse(unsuited(description), "streaming kernel")
    plans = _all_plans(description, description.sequence.sizes(size)[-1], batch, device)
    return best_plans("stream", plans, lambda plan: _fitting(description, plan), (size, batch, device), limit)


def _all_plans(description: Description, out: Shape, batch: int, device: Device) -> Iterator[Plan]:
    """Bands of all widths, and bricks of such heights that all blocks get equally many."""
    halo = 2 * len(description.sequence.layers)
    for width, blocks in product((16, 32, 48, 64, 80, 96, 128, 256), (1, 2, 4)):
        if not halo < width < 2 * out[1] + halo + 16:
            continue
        bands, slots = batch * -(-out[1] // (width - halo)), device.multiprocessors * blocks
        pieces = {max(1, rounds * slots // bands) for rounds in (1, 2, 3, 4)}
        heights = {-(-out[0] // n) for n in pieces} | {out[0], *(one for one in (32, 64, 128) if one < out[0])}
        yield from (Plan(width, rows, blocks) for rows in sorted(heights) if rows >= min(8, out[0]))


def stream(description: Description, plan: Plan) -> Kernel:
    """The kernel of a chain in streamed rows.

    Raises:
        ValueError: there is none for this sequence or plan.
    """
    made = _fitting(description, plan)
    edge = (plan.rows, plan.width - 2 * made.depth)
    name = f"stream_{description}_{edge[0]}x{edge[1]}_b{plan.blocks}r{plan.ahead}_{plan.between}"
    return Kernel(
        name,
        description,
        made.source(name),
        32 * made.warps,
        made.shared,
        edge,
        made.pack,
        plan.blocks,
        counts=made.counts,
    )


def _fitting(description: Description, plan: Plan) -> _Stream:
    refuse(unsuited(description), "streaming kernel")
    depth = len(description.sequence.layers)
    if plan.width % 16 or plan.width <= 2 * depth:
        raise ValueError(f"a band of {plan.width} columns: give a multiple of 16 above {2 * depth}")
    made = _Stream(description, plan)
    check_room(made.shared, made.blocks)
    return made
