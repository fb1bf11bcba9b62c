"""Chains of 3×3 convolutions in memoized bricks: each computed once, kept in rings in L2, guarded by flags.

The method is BrickDL's (:func:`joulemark.merged.partition.schedule`); the order of the tasks, and why nobody waits in a
circle, is in ``device/memoized.cuh``. Blocks stay on their multiprocessors and take task after task; a task reads a
brick and its halo of the tensor before from the ring of that tensor, and writes one brick of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import prod

from joulemark.merged.kernels import chain
from joulemark.merged.kernels.chain import (
    GUARD,
    Lines,
    best_plans,
    brick_constants,
    check_room,
    keeping_weights,
    refuse,
    registers_for,
    segments_for,
    struct,
)
from joulemark.merged.kernels.compile import device_text
from joulemark.merged.kernels.description import Description
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.kernel import Kernel
from joulemark.merged.kernels.seconds import Counts
from joulemark.merged.sequence import Shape

_HEADER_BYTES = 256
_TICKET_BYTES = 128
_LEAST_RING = 4
_READ_ROWS = 3
"""Of bricks: those that a brick's rows and their halo lie in."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a kernel that are free to choose.

    Args:
        edge: rows and columns of a brick; the columns are rounded up so that with the halo they are a multiple of 16.
        warps: of a block.
        blocks: per multiprocessor.
        lanes: images that are worked on side by side.
        ring: rows of bricks that are kept of each intermediate, at least 4.
    """

    edge: Shape
    warps: int = 8
    blocks: int = 2
    lanes: int = 2
    ring: int = 5


def unsuited(description: Description) -> str | None:
    """Why there is no such kernel for a sequence; None where there is one."""
    sequence = description.sequence
    if sequence.dimensions != 2:
        return f"{sequence.dimensions} dimensions: bricks are memoized in 2"
    for number, layer in enumerate(sequence.layers):
        if layer.residual not in (None, 0):
            return f"layer {number} adds tensor {layer.residual}: only the input is kept for that long"
    return chain.unsuited(description)


class _Memoized(Lines):
    """Works out a kernel of memoized bricks."""

    def __init__(self, description: Description, plan: Plan) -> None:
        super().__init__(description, registers_for(plan.warps, plan.blocks), plan.warps)
        self.plan, self.blocks = plan, plan.blocks
        self.width = -(-(plan.edge[1] + 2) // 16) * 16
        self.edge = (plan.edge[0], self.width - 2)
        chunks = max(self.chunks(tensor) for tensor in range(self.depth))
        self.shared = _TICKET_BYTES + ((plan.edge[0] + 2) * self.width + 2 * GUARD) * chunks * 16

    def counts(self, size: Shape, batch: int, device: Device) -> Counts:
        """What the busiest multiprocessor does, in the terms of ``chain``; flags and their waits are not in it.

        A task begins with its layer's weights (``weight_load``). While a brick is read with the rows around it, three
        of a ring's, as many rows of each layer as the ring has beside them can be worked on.
        """
        rows, across = -(-size[0] // self.edge[0]), -(-size[1] // self.edge[1])
        bricks = batch * rows * across
        ahead = rows if self.depth == 1 else min(rows, self.plan.ring - _READ_ROWS)
        lanes = min(self.plan.lanes, batch) * across * self.depth * ahead
        slots = min(device.multiprocessors * self.plan.blocks, lanes)  # what can be worked on at the same time
        rounds = max(1.0, bricks / slots)
        each = rounds * min(self.plan.blocks, -(-slots // device.multiprocessors))
        height, strips, slower = self.plan.edge[0], self.width // 16, 3 if self.description.format == "fp32" else 1
        products = stores = chunks = steps = chained = weights = 0.0
        for number, one in enumerate(self.parameters):
            workers = self.plan.warps // one.splits
            segments = segments_for(height, strips, workers)
            alone = -(-strips * segments // workers) * (-(-height // segments) + 1.5)
            products += height * strips * 9 * one.steps * one.tiles * one.splits
            stores += height * strips * one.splits * one.tiles
            chunks += (height + 2) * self.width * self.chunks(number) + prod(self.edge) * self.chunks(number)
            weights += 9 * one.steps * one.tiles * self.plan.warps * (1 if one.resident else height)
            steps += alone
            chained += alone * one.steps * one.tiles * 9
        return {
            "product": each * products * slower, "store": each * stores, "chunk": each * chunks,
            "step": rounds * steps, "chained_product": rounds * chained * slower, "round": rounds * self.depth,
            "weight_load": each * weights, "launch": 1,
        }  # fmt: skip

    def rows(self, batch: int, size: Shape) -> int:
        """Rows of bricks of a lane, through all of its images."""
        return -(-batch // self.plan.lanes) * -(-size[0] // self.edge[0])

    def flag_bytes(self, batch: int, size: Shape) -> int:
        """Bytes of all flags, a whole number of 256."""
        flags = self.depth * self.rows(batch, size) * self.plan.lanes * -(-size[1] // self.edge[1])
        return -(-4 * flags // _HEADER_BYTES) * _HEADER_BYTES

    def scratch(self, batch: int, size: Shape) -> int:
        """Bytes of header, flags and rings."""
        pixels = self.plan.lanes * self.plan.ring * self.edge[0] * size[1]
        rings = sum(self.chunks(tensor) * 16 for tensor in range(1, self.depth)) * pixels
        return _HEADER_BYTES + self.flag_bytes(batch, size) + rings

    def ring(self, tensor: int) -> int:
        """Bytes per pixel of the rings before a tensor's: its place, since all rings have as many pixels."""
        return sum(self.chunks(earlier) * 16 for earlier in range(1, tensor))

    def source(self, name: str) -> str:
        """The kernel's text."""
        plan = self.plan
        field: dict[str, object] = {
            "HEIGHT": plan.edge[0] + 2, "WIDTH": self.width, "GUARD": GUARD, "WARPS": plan.warps, "RING": plan.ring,
            "LEVELS": self.depth, "LANES": plan.lanes, "TILE_HEIGHT": self.edge[0], "TILE_WIDTH": self.edge[1],
            "TICKET": _TICKET_BYTES, "HEADER": _HEADER_BYTES, **brick_constants(None),
        }  # fmt: skip
        layers = []
        for number, layer in enumerate(self.layers):
            last = number == self.depth - 1
            places: dict[str, object] = {
                "SEGMENTS": segments_for(plan.edge[0], self.width // 16, plan.warps // self.parameters[number].splits),
                "TAKEN": layer.in_channels,
                "STORED": layer.out_channels if last else self.padded(layer.out_channels),
                "SOURCE_RING": self.ring(number), "TARGET_RING": self.ring(number + 1),
            }  # fmt: skip
            layers.append(self.layer_text(number, places, kept="GLOBAL"))
        cases = "".join(f"        run.template make<Layer{n}>();\n" for n in range(self.depth))
        return (
            "".join(device_text(f"{part}.cuh") for part in ("rows", "chain", "memoized"))
            + struct("Field", field, {"VOLUME": False})
            + "".join(layers)
            + f"KERNEL({name}, {32 * plan.warps}, {plan.blocks}) {{\n"
            f"    Run<Field> run(a);\n    while (run.next()) {{\n{cases}    }}\n    run.end();\n}}\n"
        )


def candidates(description: Description, size: Shape, batch: int, device: Device, limit: int = 12) -> list[Plan]:
    """Plans worth a trial for inputs of ``size``, the most promising first.

    Raises:
        ValueError: there is no memoizing kernel for this sequence.
    """
    refuse(unsuited(description), "memoizing kernel")
    plans = _all_plans(size, batch)
    fitting = cache(partial(_fitting, description))
    return best_plans("memoized", keeping_weights(plans, fitting), fitting, (size, batch, device), limit)


def _all_plans(size: Shape, batch: int) -> Iterator[Plan]:
    """Bricks that with their halo are whole groups of 16; lanes of images are what blocks find work in."""
    sizes = product((8, 16, 32), (14, 30, 62), ((8, 2), (8, 1), (4, 4), (16, 1)), (1, 2, 4, 8, 16, 32, 64))
    for rows, columns, (warps, blocks), lanes in sizes:
        if lanes <= batch and columns < 2 * size[1] + 16:
            yield Plan((max(2, min(rows, size[0])), columns), warps, blocks, lanes)


def memoized(description: Description, plan: Plan) -> Kernel:
    """The kernel of a chain in memoized bricks.

    Raises:
        ValueError: there is none for this sequence or plan.
    """
    made = _fitting(description, plan)
    chosen = f"w{plan.warps}b{plan.blocks}l{plan.lanes}r{plan.ring}"
    name = f"memoized_{description}_{made.edge[0]}x{made.edge[1]}_{chosen}"
    return Kernel(
        name,
        description,
        made.source(name),
        32 * plan.warps,
        made.shared,
        made.edge,
        made.pack,
        persistent=plan.blocks,
        scratch=made.scratch,
        counts=made.counts,
    )


def _fitting(description: Description, plan: Plan) -> _Memoized:
    refuse(unsuited(description), "memoizing kernel")
    if len(plan.edge) != 2 or min(plan.edge) < 2:
        raise ValueError(f"edge {plan.edge}: give rows and columns from 2 on")
    if plan.ring < _LEAST_RING or plan.warps < 2:
        raise ValueError(f"a ring of {plan.ring} rows of bricks, {plan.warps} warps: give {_LEAST_RING} and 2 at least")
    made = _Memoized(description, plan)
    check_room(made.shared, made.blocks)
    return made
