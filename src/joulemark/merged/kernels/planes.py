"""Chains of 3×3×3 convolutions in streamed planes: memoized on chip along the depth of a volume.

A block takes a tile of a volume and carries it from front to back. Each layer has warps of its own; planes go from
layer to layer through rings in shared memory (``device/planes.cuh``). Against padded bricks, halos are recomputed at a
tile's four sides only, and loads overlap with products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import prod

from joulemark.merged.kernels import chain
from joulemark.merged.kernels.chain import (
    ALIGNMENT,
    GUARD,
    MOST_THREADS,
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

_INPUT_SLOTS, _SLOTS = 5, 4


@dataclass(frozen=True)
class Plan:
    """Sizes of a kernel that are free to choose.

    Args:
        edge: planes, rows and columns of a brick; the columns are rounded up so that with their halo they are a
            multiple of 16.
        warps: of each layer.
        blocks: per multiprocessor.
    """

    edge: Shape
    warps: int = 4
    blocks: int = 1


def unsuited(description: Description) -> str | None:
    """Why there is no such kernel for a sequence; None where there is one."""
    sequence = description.sequence
    if sequence.dimensions != 3:
        return f"{sequence.dimensions} dimensions: planes are streamed in 3"
    if any(layer.residual is not None for layer in sequence.layers):
        return "a residual from inside of the chain"
    return chain.unsuited(description)


class _Planes(Lines):
    """Works out a kernel of streamed planes."""

    def __init__(self, description: Description, plan: Plan) -> None:
        depth = len(description.sequence.layers)
        super().__init__(description, registers_for(plan.warps * depth, plan.blocks), plan.warps)
        self.plan, self.blocks = plan, plan.blocks
        self.width = -(-(plan.edge[2] + 2 * depth) // 16) * 16
        self.height = plan.edge[1] + 2 * depth
        self.edge = (*plan.edge[:2], self.width - 2 * depth)
        self.starts = [ALIGNMENT]
        for tensor in range(self.depth):
            self.starts.append(self.starts[-1] + self.slots(tensor) * self.plane_bytes(tensor))
        self.shared = self.starts[-1]

    def slots(self, tensor: int) -> int:
        """Planes in a tensor's ring."""
        return _INPUT_SLOTS if tensor == 0 else _SLOTS

    def plane_bytes(self, tensor: int) -> int:
        """Bytes of a plane in shared memory."""
        bytes_ = (self.height * self.width + 2 * GUARD) * self.chunks(tensor) * 16
        return -(-bytes_ // ALIGNMENT) * ALIGNMENT

    def ring(self, tensor: int) -> str:
        """The type of a tensor's ring in ``device/planes.cuh``."""
        return f"PlaneRing<{self.slots(tensor)}, {self.plane_bytes(tensor)}>"

    def barriers(self, tensor: int) -> int:
        """Where a ring's barriers begin."""
        return sum(self.slots(earlier) for earlier in range(tensor)) * 16

    def counts(self, size: Shape, batch: int, device: Device) -> Counts:
        """What the busiest multiprocessor does, in the terms of ``stream``: its layer with most to do sets the pace."""
        out = self.description.sequence.sizes(size)[-1]
        planes = min(self.plan.edge[0], out[0])
        bricks = batch * prod(-(-n // e) for n, e in zip(out, self.edge, strict=True))
        rounds = -(-bricks // (device.multiprocessors * self.plan.blocks))
        each = rounds * min(self.plan.blocks, -(-bricks // device.multiprocessors))
        products = stores = steps = chained = 0.0
        for number, one in enumerate(self.parameters):
            many, rows = planes + 2 * (self.depth - number - 1), self.height - 2 * (number + 1)
            strips, workers = self.width // 16, self.plan.warps // one.splits
            segments = segments_for(rows, strips, workers)
            alone = many * -(-strips * segments // workers) * (-(-rows // segments) + 1.5)
            products += many * rows * strips * 27 * one.steps * one.tiles * one.splits
            stores += many * rows * strips * one.splits * one.tiles
            steps, chained = max(steps, alone), max(chained, alone * 27 * one.steps * one.tiles)
        slower = 3 if self.description.format == "fp32" else 1
        return {
            "product": each * products * slower, "store": each * stores, "step": rounds * steps,
            "chained_product": rounds * chained * slower, "round": rounds, "launch": 1,
            "chunk": each * ((planes + 2 * self.depth) * self.height * self.width * self.chunks(0)
                             + planes * prod(self.edge[1:]) * self.chunks_out),
        }  # fmt: skip

    def source(self, name: str) -> str:
        """The kernel's text."""
        field: dict[str, object] = {
            "DEPTH": 1, "HEIGHT": self.height, "WIDTH": self.width, "GUARD": GUARD, "LEVELS": self.depth,
            "WARPS": self.plan.warps * self.depth, "TILE_DEPTH": self.edge[0], "TILE_HEIGHT": self.edge[1],
            "TILE_WIDTH": self.edge[2], **brick_constants(None),
        }  # fmt: skip
        warps, layers, starts, calls = self.plan.warps, [], "", ""
        for number, layer in enumerate(self.layers):
            written = min(number + 1, self.depth - 1)
            splits = self.parameters[number].splits
            places: dict[str, object] = {
                "WARPS": warps, "TAKEN": layer.in_channels, "SOURCE": self.starts[number], "TARGET": 0, "ADDED": 0,
                "SOURCE_BARRIERS": self.barriers(number), "TARGET_RING": self.starts[written],
                "TARGET_BARRIERS": self.barriers(written),
                "SEGMENTS": segments_for(self.height - 2 * (number + 1), self.width // 16, warps // splits),
            }  # fmt: skip
            types = f" using InRing = {self.ring(number)}; using OutRing = {self.ring(written)};"
            layers.append(self.layer_text(number, places, types))
            ring = f"{self.ring(number)}{{shared + {self.starts[number]}, shared + {self.barriers(number)}}}"
            starts += f"        {ring}.prepare({32 * warps if number == 0 else warps}, {warps});\n"
            calls += (
                f"    if (warp / {warps} == {number}) plane_layer<Layer{number}, Field>(a, shared, warp % {warps});\n"
            )
        return (
            "".join(device_text(f"{part}.cuh") for part in ("rows", "chain", "planes"))
            + struct("Field", field, {"VOLUME": True})
            + "".join(layers)
            + f"KERNEL({name}, {32 * warps * self.depth}, {self.plan.blocks}) {{\n"
            f"    const u32 shared = shared_base();\n    const int warp = threadIdx.x >> 5;\n"
            f"    if (threadIdx.x == 0) {{\n{starts}    }}\n    block_sync();\n{calls}}}\n"
        )


def candidates(description: Description, size: Shape, batch: int, device: Device, limit: int = 12) -> list[Plan]:
    """Plans worth a trial for inputs of ``size``, the most promising first.

    Raises:
        ValueError: there is no plane-streaming kernel for this sequence.
    """
    refuse(unsuited(description), "plane-streaming kernel")
    plans = _all_plans(description, description.sequence.sizes(size)[-1], batch, device)
    fitting = cache(partial(_fitting, description))
    return best_plans("planes", keeping_weights(plans, fitting), fitting, (size, batch, device), limit)


def _all_plans(description: Description, out: Shape, batch: int, device: Device) -> Iterator[Plan]:
    """Tiles of all kinds, and bricks of such depths that all blocks get equally many."""
    halo = 2 * len(description.sequence.layers)
    for height, width, (warps, blocks) in product(
        (4, 8, 10, 12, 14, 16, 24), (16, 32, 48), ((3, 1), (4, 1), (4, 2), (6, 1), (8, 1))
    ):
        if not halo + 1 < width < 2 * out[2] + halo + 16:
            continue
        tile = min(height, out[1]), width - halo
        tiles = batch * prod(-(-n // e) for n, e in zip(out[1:], tile, strict=True))
        pieces = {max(1, rounds * device.multiprocessors * blocks // tiles) for rounds in (1, 2, 3, 4)}
        depths = {-(-out[0] // n) for n in pieces} | {out[0]}
        yield from (Plan((depth, *tile), warps, blocks) for depth in sorted(depths) if depth >= min(4, out[0]))


def planes(description: Description, plan: Plan) -> Kernel:
    """The kernel of a chain in streamed planes.

    Raises:
        ValueError: there is none for this sequence or plan.
    """
    made = _fitting(description, plan)
    edge = "x".join(str(n) for n in made.edge)
    name = f"planes_{description}_{edge}_w{plan.warps}b{plan.blocks}"
    threads = 32 * plan.warps * made.depth
    return Kernel(
        name,
        description,
        made.source(name),
        threads,
        made.shared,
        made.edge,
        made.pack,
        plan.blocks,
        counts=made.counts,
    )


def _fitting(description: Description, plan: Plan) -> _Planes:
    refuse(unsuited(description), "plane-streaming kernel")
    if len(plan.edge) != 3 or min(plan.edge) < 2 or plan.warps < 1:
        raise ValueError(f"edge {plan.edge}, {plan.warps} warps: give three numbers from 2 on, and warps")
    made = _Planes(description, plan)
    check_room(made.shared, made.blocks)
    if 32 * plan.warps * made.depth > MOST_THREADS:
        raise ValueError(f"{plan.warps} warps for each of {made.depth} layers: at most {MOST_THREADS // 32} in all")
    return made
