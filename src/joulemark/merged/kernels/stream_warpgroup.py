"""Chains of few channels in streamed rows by ``wgmma``, without products that are multiplied in vain.

``wide`` fills the 64 rows of a product with channels, which from 64 on are there; with 32 a quarter of its products are
zeros. Here the rows are pixels and the columns three output rows' channels (``device/stream_warpgroup.cuh``): each row
of the input is read once for all three. Weights lie in shared memory, so that a warpgroup's registers hold sums alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels import chain
from joulemark.merged.kernels.chain import (
    ALIGNMENT,
    MOST_THREADS,
    LayerPlan,
    Lines,
    P,
    best_plans,
    brick_constants,
    check_room,
    refuse,
    registers_for,
    struct,
)
from joulemark.merged.kernels.compile import device_text
from joulemark.merged.kernels.description import STORED, Description
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.fragments import column_channels, pad_channels
from joulemark.merged.kernels.kernel import Kernel
from joulemark.merged.kernels.seconds import DRAM, Counts, dram_bytes, varied
from joulemark.merged.kernels.stream import Ring
from joulemark.merged.kernels.warpgroup import FORMATS, ROWS, vocabulary
from joulemark.merged.sequence import Shape

D = TypeVar("D")
_BRINGERS, _MOST_BRINGERS, _BROUGHT = 2, 8, 3
"""Warps that bring rows; for planes at most so many, each about so many rows of it."""
_MOST_CHANNELS, _MOST_LAYERS = 32, 4
_SLICES = (2, 1, 0, 2, 1)
"""Slices of a layer's weights as they lie: any three neighbours are what three output slices take."""
_AHEAD = (12, 8, 6, 4)
"""Rows of the input's ring, the deepest first: what is under way hides the latency of memory."""
_OTHER_REGISTERS = {2: 24, 3: 32}
"""Registers beside sums and biases, by dimensions."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a kernel that are free to choose.

    Args:
        tiles: of 64 pixels that a band has.
        rows: of the output that a brick has; a block takes brick after brick.
        blocks: per multiprocessor.
        ahead: rows of the input's ring.
        between: rows of the other rings.
    """

    tiles: int = 1
    rows: int = 128
    blocks: int = 1
    ahead: int = 8
    between: int = 4


def unsuited(description: Description) -> str | None:
    """Why there is no such kernel for a sequence; None where there is one."""
    if description.sequence.dimensions != 2:
        return f"{description.sequence.dimensions} dimensions: rows are streamed in 2"
    return unsuited_slices(description)


def unsuited_slices(description: Description) -> str | None:
    """Why slices of a sequence, rows or planes, cannot be streamed by warpgroups; None where they can."""
    sequence = description.sequence
    layers = sequence.layers
    if len(layers) > _MOST_LAYERS:
        return f"{len(layers)} layers: at most {_MOST_LAYERS}"
    if description.format not in FORMATS:
        return f"{description.format}: there is one for bf16 and fp16"
    most = max(sequence.channels(tensor) for tensor in range(len(layers) + 1))
    if most > _MOST_CHANNELS:
        return f"{most} channels: at most {_MOST_CHANNELS}"
    if any(one.residual is not None for one in layers[:-1]) or layers[-1].residual not in (None, 0):
        return "a residual that is not the input, added last"
    return chain.unsuited(description)


class Thirds(Lines):
    """Works out a kernel of slices, rows or planes, streamed by warpgroups.

    Args:
        blocks: per multiprocessor.
        warpgroups: of a layer, of which each makes 64 pixels of a slice.
        field: rows and columns of a slice with what its taps need.
        edge: of a brick.
        rings: slices of the input's ring, and of the others.
    """

    def __init__(
        self,
        description: Description,
        blocks: int,
        warpgroups: int,
        field: tuple[int, int],
        edge: Shape,
        rings: tuple[int, int],
    ) -> None:
        self.blocks, self.field, self.edge = blocks, field, edge
        self.group = 4 * warpgroups
        """Warps of a layer."""
        volume = description.sequence.dimensions == 3
        self.bringers = min(_MOST_BRINGERS, -(-field[0] // _BROUGHT)) if volume else _BRINGERS
        self.warps = self.group * len(description.sequence.layers) + self.bringers
        super().__init__(description, registers_for(self.warps, blocks), self.warps)
        self.rings, self.shared = self._place_rings(*rings)

    @property
    def taps(self) -> int:
        """Of a slice."""
        return 9 if self.volume else 3

    def _plan_layers(self) -> list[LayerPlan]:
        """``weights`` is the place in shared memory, ``bias`` that in the packed weights."""
        sizes = [-(-len(_SLICES) * self.taps * self._matrix(n) // ALIGNMENT) * ALIGNMENT for n in range(self.depth)]
        self.weight_bytes = sum(sizes)
        out: list[LayerPlan] = []
        start, bias = ALIGNMENT, self.weight_bytes
        for layer, size in zip(self.layers, sizes, strict=True):
            cout = self.padded(layer.out_channels)
            steps = self.padded(layer.in_channels) // self.step
            out.append(LayerPlan(steps, cout // 8, 1, False, start, bias, bias + cout * 4))
            start, bias = start + size, bias + cout * 4
        return out

    def _matrix(self, number: int) -> int:
        """Bytes of one tap's weights of a layer."""
        layer = self.layers[number]
        return self.padded(layer.out_channels) * self.padded(layer.in_channels) * self.description.itemsize

    def _place_rings(self, ahead: int, between: int) -> tuple[list[Ring], int]:
        rings: list[Ring] = []
        at = ALIGNMENT + self.weight_bytes
        pixels = self.field[1] * (self.field[0] if self.volume else 1)
        for tensor in range(self.depth):
            slices = between if tensor else ahead
            pitch = pixels * self.chunks(tensor) * 16
            writers = self.group if tensor else 32 * self.bringers
            barriers = sum(ring.rows for ring in rings) * Ring.BARRIER_BYTES
            rings.append(Ring(slices, pitch, self.group, writers, at, barriers))
            at = -(-(at + slices * pitch) // ALIGNMENT) * ALIGNMENT
        return rings, at

    def check(self) -> None:
        """ValueError where threads, registers or shared memory do not suffice."""
        wanted = max(one.tiles for one in self.parameters) * 14 + _OTHER_REGISTERS[3 if self.volume else 2]
        if 32 * self.warps > MOST_THREADS or self.registers < wanted:
            raise ValueError(
                f"{self.warps} warps and {self.blocks} blocks leave a thread {self.registers} registers, "
                f"{wanted} are needed"
            )
        check_room(self.shared, self.blocks)

    def counts(self, size: Shape, batch: int, device: Device) -> Counts:
        """What the busiest multiprocessor does, in the terms of ``stream``: products of 16 × 8 × 16."""
        out = self.description.sequence.sizes(size)[-1]
        length = min(self.edge[0], out[0])
        bricks = batch * prod(-(-n // e) for n, e in zip(out, self.edge, strict=True))
        rounds = -(-bricks // (device.multiprocessors * self.blocks))
        each = rounds * min(self.blocks, -(-bricks // device.multiprocessors))
        # Pixels of the input and the output of a brick.
        taken = (length + 2 * self.depth) * prod(n + 2 * self.depth for n in self.edge[1:])
        left = length * prod(self.edge[1:])
        products = stores = chained = 0.0
        for number, one in enumerate(self.parameters):
            slices = length + 2 * (self.depth - number - 1)
            alone = (slices + 2) * self.taps * 3.0 * one.steps * one.tiles
            products += alone * self.group
            stores += slices * self.group * one.tiles
            chained = max(chained, alone)
        return {
            "product": each * products, "store": each * stores,
            "step": rounds * (length + 2.0 * self.depth), "chained_product": rounds * chained,
            "chunk": each * (taken * self.chunks(0) + left * self.chunks_out), "round": rounds, "launch": 1, "start": 1,
            DRAM: dram_bytes(self.description, size, batch),
        }  # fmt: skip

    def pack(self, given: List[Parameters]) -> Tensor:
        """Per layer [tap of a slice][5 slices][out][in] as in shared memory, then a bias per channel."""
        weights, biases = [], []
        for layer, plan, one in zip(self.layers, self.parameters, given, strict=True):
            cin, cout = self.padded(layer.in_channels), self.padded(layer.out_channels)
            weight = pad_channels(one.weight.detach().float().cpu(), cout, cin).to(STORED[self.description.format])
            # [out, in, slice, *taps] → [taps, slice, out, in]
            split = weight[column_channels(plan.tiles).flatten()].flatten(3).permute(3, 2, 0, 1)
            packed = swizzled(split[:, list(_SLICES)].reshape(-1, cin)).flatten().view(torch.uint8)
            weights += [packed, packed.new_zeros(-packed.numel() % ALIGNMENT)]
            bias = torch.zeros(cout)
            if one.bias is not None:
                bias[: layer.out_channels] = one.bias.detach().float().cpu()
            biases.append(bias.view(torch.uint8))
        return torch.cat(weights + biases).to(given[0].weight.device)

    def kernel(self, name: str) -> Kernel:
        """The kernel, for compute capability 9.0 alone."""
        return Kernel(
            name,
            self.description,
            self.source(name),
            32 * self.warps,
            self.shared,
            self.edge,
            self.pack,
            self.blocks,
            least=90,
            only=90,
            counts=self.counts,
        )

    def source(self, name: str) -> str:
        """The kernel's text."""
        height, width = self.field
        field: dict[str, object] = {
            "DEPTH": 1, "HEIGHT": height, "WIDTH": width, "GUARD": 0, "WARPS": self.warps, "LEVELS": self.depth,
            "TILE_DEPTH": self.edge[0] if self.volume else 1, "TILE_HEIGHT": self.edge[-2], "TILE_WIDTH": self.edge[-1],
            "ACROSS": (width - 8) // 8 if self.volume else self.group, "STEP": 8 if self.volume else ROWS,
            "EIGHTS": width if self.volume else 8, **brick_constants(None),
        }  # fmt: skip
        layers, calls = [], ""
        for number, layer in enumerate(self.layers):
            read, written = self.rings[number], self.rings[min(number + 1, self.depth - 1)]
            places: dict[str, object] = {
                "SOURCE": read.slots, "SOURCE_BARRIERS": read.barriers, "TARGET": written.slots,
                "TARGET_BARRIERS": written.barriers, "ADDED": 0, "ADDED_BARRIERS": 0, "ADDED_LEVEL": 0,
                "TAKEN": layer.in_channels, "LAG": 0, "BRINGERS": self.bringers,
            }  # fmt: skip
            types = f" using InRing = {read.type}; using OutRing = {written.type}; using AddedRing = InRing;"
            layers.append(self.layer_text(number, places, types, kept="GLOBAL"))
            before = number * self.group
            calls += (
                f"    if (warp < {before + self.group}) "
                f"return thirds_layer<Layer{number}, Field>(a, shared, warp - {before});\n"
            )
        starts = "".join(f"        {ring.type}::start(shared + {ring.barriers});\n" for ring in self.rings)
        parts = [
            "rows",
            "chain",
            "planes",
            "stream",
            "stream_warpgroup",
            *(["planes_warpgroup"] if self.volume else []),
        ]
        bring = "bring_planes" if self.volume else "bring_input"
        threads = 32 * self.warps
        return (
            vocabulary(self.description.format, shared=[3 * 8 * one.tiles for one in self.parameters])
            + "".join(device_text(f"{part}.cuh") for part in parts)
            + struct("Field", field, {"VOLUME": self.volume})
            + "".join(layers)
            + f"KERNEL({name}, {threads}, {self.blocks}) {{\n"
            f"    const u32 shared = shared_base();\n"
            f"    if (threadIdx.x == 0) {{\n{starts}    }}\n"
            f"    bring_weights<{self.weight_bytes}, {threads}>(a, shared + {ALIGNMENT});\n"
            f"    block_sync();\n"
            f"    const int warp = own_warp();\n{calls}"
            f"    {bring}<Layer0, Field>(a, shared, warp - {self.depth * self.group});\n}}\n"
        )


def swizzled(rows: Tensor) -> Tensor:
    """Rows of 32 or 64 bytes, as ``matrix_descriptor`` of ``device/hopper.cuh`` takes them.

    Args:
        rows: [rows, channels] of 16 bits.
    """
    count, channels = rows.shape
    chunks = channels // 8
    number = torch.arange(count)[:, None]
    place = torch.arange(chunks) ^ (number * chunks * 16 >> 7 & (chunks - 1))
    return rows.view(count, chunks, 8)[number, place].contiguous()  # an exclusive or is its own inverse


def candidates(description: Description, size: Shape, batch: int, device: Device, limit: int = 12) -> list[Plan]:
    """Plans worth a trial for inputs of ``size``, the most promising first.

    Raises:
        ValueError: there is no such kernel for this sequence.
    """
    refuse(unsuited(description), "kernel of rows by warpgroups")
    plans = _all_plans(description, description.sequence.sizes(size)[-1], batch, device)
    ranked = best_plans(
        "stream_warpgroup", plans, lambda plan: _fitting(description, plan), (size, batch, device), limit, _kind
    )
    return varied(ranked, _kind)


def _kind(plan: Plan) -> tuple[int, int]:
    return plan.tiles, plan.blocks


def _all_plans(description: Description, out: Shape, batch: int, device: Device) -> Iterator[Plan]:
    """Bands of all widths, bricks of such heights that all blocks get equally many, and the deepest ring that fits."""
    for tiles, blocks in product((1, 2, 3, 4), (1, 2, 3)):
        ahead = next((n for n in _AHEAD if fits(_fitting, description, Plan(tiles, 1, blocks, n))), None)
        if ahead is None:
            continue
        width = ROWS * tiles + 2 - 2 * len(description.sequence.layers)
        bands, slots = batch * -(-out[1] // width), device.multiprocessors * blocks
        pieces = {max(1, rounds * slots // bands) for rounds in (1, 2, 3, 4)}
        heights = {-(-out[0] // n) for n in pieces} | {out[0], *(one for one in (32, 64, 128) if one < out[0])}
        yield from (Plan(tiles, rows, blocks, ahead) for rows in sorted(heights) if rows >= min(8, out[0]))


def fits(make: Callable[[D, P], object], described: D, plan: P) -> bool:
    """Whether there is a kernel of this plan: ``make`` refuses others."""
    try:
        make(described, plan)
    except ValueError:
        return False
    return True


def stream_warpgroup(description: Description, plan: Plan) -> Kernel:
    """The kernel of a chain in rows streamed by warpgroups.

    Raises:
        ValueError: there is none for this sequence or plan.
    """
    made = _fitting(description, plan)
    name = f"stream_{description}_{made.edge[0]}x{made.edge[1]}_g{plan.tiles}b{plan.blocks}r{plan.ahead}_{plan.between}"
    return made.kernel(name)


def _fitting(description: Description, plan: Plan) -> Thirds:
    refuse(unsuited(description), "kernel of rows by warpgroups")
    if min(plan.tiles, plan.rows, plan.blocks) < 1 or min(plan.ahead, plan.between) < 2:
        raise ValueError(f"{plan}: give a tile, a row and a block at least, and rings of two rows")
    halo, columns = 2 * len(description.sequence.layers), ROWS * plan.tiles
    field, edge = (plan.rows + halo, columns + 8), (plan.rows, columns + 2 - halo)
    made = Thirds(description, plan.blocks, plan.tiles, field, edge, (plan.ahead, plan.between))
    made.check()
    return made
