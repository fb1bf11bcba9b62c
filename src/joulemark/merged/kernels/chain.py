"""Chains of 3×3 and 3×3×3 convolutions in padded bricks: one block computes a brick through all layers.

The input of a brick with its halo is copied into shared memory; each layer reads one field there and writes another,
all of one pitch, and the last writes the output. A layer's weights stay in a warp's registers while it makes row after
row of 16 columns; each fragment of pixels serves three output rows (``device/rows.cuh``). Halos are recomputed: see
:func:`joulemark.merged.partition.recompute_factor`. A chain of one layer is the same kernel unmerged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import prod
from typing import Literal, TypeVar

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels.compile import device_text
from joulemark.merged.kernels.description import Description
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.fragments import pack_rows, pad_channels, step_channels
from joulemark.merged.kernels.kernel import Kernel
from joulemark.merged.kernels.seconds import Counts, cheapest
from joulemark.merged.sequence import Conv, Shape

P = TypeVar("P")
GUARD = 8
ALIGNMENT = 1024
MOST_THREADS = 1024
_LARGEST = Device()
BLOCK_SHARED = 1024
"""Bytes of shared memory that a block takes beside its own (CUDA C++ Programming Guide, compute capability 8.0 on)."""
_REGISTERS = 65536
_MOST_REGISTERS = 255
_OTHER_REGISTERS = 34
"""Registers of a warp's loop beside weights, sums and pixels: addresses, masks, counters."""
_BESIDE_WEIGHTS = 54
"""Registers beside weights and sums that NVRTC 13 takes for sm_90a where it may."""
_MOST_LAYERS, _MOST_CHANNELS = 6, 64
ACTIVATIONS = {"none": "NONE", "relu": "RELU", "relu6": "RELU6", "leaky": "LEAKY"}


@dataclass(frozen=True)
class Plan:
    """Sizes of a kernel that are free to choose.

    Args:
        edge: output positions of a brick per dimension, before the width is rounded up so that with its halo it is a
            multiple of 16.
        warps: of a block.
        blocks: per multiprocessor that the registers shall allow.
        layout: edges, powers of two, of the bricks in which input and output lie in memory; None for channels-last.
    """

    edge: Shape
    warps: int = 8
    blocks: int = 2
    layout: Shape | None = None


def unsuited(description: Description) -> str | None:
    """Why there is no such kernel for a sequence; None where there is one."""
    layers = description.sequence.layers
    if len(layers) > _MOST_LAYERS:
        return f"{len(layers)} layers: at most {_MOST_LAYERS}"
    for number, layer in enumerate(layers):
        why = _unsuited_layer(layer)
        if why:
            return f"layer {number}: {why}"
    if description.adds and layers[-1].residual is not None:
        return "the last layer adds two tensors"
    return None


def _unsuited_layer(layer: Conv) -> str | None:
    wanted = {"kernel": 3, "stride": 1, "padding": 1, "dilation": 1}
    for name, value in wanted.items():
        given = getattr(layer, name)
        if len(given) not in (2, 3) or set(given) != {value}:
            return f"{name} {given}, not {value} in 2 or 3 dimensions"
    if layer.groups != 1:
        return f"{layer.groups} groups"
    if max(layer.in_channels, layer.out_channels) > _MOST_CHANNELS:
        return f"{layer.in_channels} → {layer.out_channels} channels: at most {_MOST_CHANNELS}"
    if layer.activation not in ACTIVATIONS:
        return f"activation {layer.activation}"
    return None


@dataclass(frozen=True)
class LayerPlan:
    """One layer as the kernel sees it; byte offsets are from the start of packed weights or of the fields."""

    steps: int
    tiles: int
    splits: int
    resident: bool
    weights: int
    bias: int
    end: int


def refuse(why: str | None, kernel: str) -> None:
    """ValueError with the reason why there is no such kernel, where there is one."""
    if why:
        raise ValueError(f"no {kernel} for this chain: {why}")


def check_room(shared: int, blocks: int = 1, device: Device = _LARGEST) -> None:
    """ValueError where a multiprocessor's shared memory does not hold so many blocks.

    Args:
        shared: bytes of a block.
    """
    if shared > device.block_shared:
        raise ValueError(f"a block takes {shared} bytes of shared memory, {device.block_shared} are there")
    if blocks * (shared + BLOCK_SHARED) > device.shared:
        raise ValueError(f"{blocks} blocks with {shared} bytes of shared memory do not fit side by side")


def brick_constants(layout: Shape | None) -> dict[str, object]:
    """What ``device/chain.cuh`` wants to know of the layout in memory; zeros for channels-last."""
    down, across = layout or (0, 0)
    return {"BRICK_HEIGHT": down, "BRICK_WIDTH": across}


class Lines:
    """What chains in padded bricks and in streamed rows have in common: a plan of each layer's weights.

    Args:
        registers: of a thread at most.
        most_splits: into how many warps the channels of a layer may be split.
    """

    shared: int
    """Bytes of shared memory of a block."""
    blocks = 1
    """That have to fit on a multiprocessor side by side."""

    def __init__(self, description: Description, registers: int, most_splits: int) -> None:
        self.description = description
        self.layers = description.sequence.layers
        self.depth = len(self.layers)
        self.volume = description.sequence.dimensions == 3
        self.step = step_channels(description.format)
        self.registers, self.most_splits = registers, most_splits
        self.parameters = self._plan_layers()

    def counts(self, size: Shape, batch: int, device: Device) -> Counts:
        """What the busiest multiprocessor does (:mod:`~.seconds`)."""
        raise NotImplementedError

    def padded(self, channels: int) -> int:
        """Channels of a field: whole steps."""
        return -(-channels // self.step) * self.step

    def chunks(self, tensor: int) -> int:
        """16-byte chunks of channels per pixel of a tensor's field."""
        return self.padded(self.description.sequence.channels(tensor)) * self.description.itemsize // 16

    @property
    def chunks_out(self) -> int:
        """16-byte chunks of channels per pixel of the output."""
        return -(-self.layers[-1].out_channels * self.description.itemsize // 16)

    def _plan_layers(self) -> list[LayerPlan]:
        out: list[LayerPlan] = []
        for layer in self.layers:
            steps, cout = self.padded(layer.in_channels) // self.step, self.padded(layer.out_channels)
            tiles, resident = self._tiles(steps, cout)
            splits = cout // (8 * tiles)
            start = out[-1].end if out else 0
            group = self._words(steps, tiles) // self._groups(steps)
            bias = start + splits * self._groups(steps) * -(-group // 4) * 16 * 32
            out.append(LayerPlan(steps, tiles, splits, resident, start, bias, bias + cout * 4))
        return out

    def _groups(self, steps: int) -> int:
        """Groups of weights: planes, steps and columns of the taps."""
        return (9 if self.volume else 3) * steps

    def _words(self, steps: int, tiles: int) -> int:
        """Words of weights that a lane holds."""
        return 3 * self._groups(steps) * tiles * (4 if self.description.format == "fp32" else 2)

    def _tiles(self, steps: int, cout: int) -> tuple[int, bool]:
        """Tiles of 8 channels per warp, and whether the weights for them fit into registers."""
        possible = [n for n in (2, 1) if cout % (8 * n) == 0 and cout // (8 * n) <= self.most_splits]
        if not possible:
            raise ValueError(f"the warps are too few for {cout} channels")
        exact = self.description.format == "fp32"  # two fragments of pixels, and sums of a step beside those of all
        others = _OTHER_REGISTERS + (40 if exact else 12)
        for tiles in possible:
            if self._words(steps, tiles) + (26 if exact else 14) * tiles + others <= self.registers:
                return tiles, True
        return possible[-1 if exact else 0], False

    def layer_text(
        self, number: int, more: dict[str, object], types: str = "", kept: Literal["SHARED", "GLOBAL"] = "SHARED"
    ) -> str:
        """The constants of one layer: the Y of ``device/rows.cuh``.

        Args:
            more: where its rows come from and go to.
            types: declarations beside the element type.
            kept: where a residual from inside of the chain lies.
        """
        layer, plan, last = self.layers[number], self.parameters[number], number == self.depth - 1
        outside = "GLOBAL" if last and self.description.adds else "NOTHING"
        residual = kept if layer.residual is not None else outside
        integers: dict[str, object] = {
            "IN": self.chunks(number), "OUT": self.chunks(number + 1), "CHANNELS": layer.out_channels,
            "STEPS": plan.steps, "SPLITS": plan.splits, "TILES": plan.tiles, "PLANES": 3 if self.volume else 1,
            "ACTIVATION": ACTIVATIONS[layer.activation], "RESIDUAL": residual, "LEVEL": number + 1,
            "WEIGHTS": plan.weights, "BIAS": plan.bias, **more,
        }  # fmt: skip
        flags = {
            "LAST": last, "RESIDENT": plan.resident, "ADDS_INPUT": layer.residual == 0,
            "ADDS_BEHIND": layer.adds_behind,
        }  # fmt: skip
        return struct(f"Layer{number}", integers, flags, f"using T = {self.description.format};{types}")

    def pack(self, given: List[Parameters]) -> Tensor:
        """Weights and biases of all layers as bytes, in the order of :class:`LayerPlan`."""
        parts = []
        for layer, plan, one in zip(self.layers, self.parameters, given, strict=True):
            cin, cout = self.padded(layer.in_channels), self.padded(layer.out_channels)
            weight = pad_channels(one.weight.detach().float().cpu(), cout, cin)
            bias = torch.zeros(cout)
            if one.bias is not None:
                bias[: layer.out_channels] = one.bias.detach().float().cpu()
            parts += [pack_rows(weight, self.description.format, plan.tiles), bias.view(torch.uint8)]
        return torch.cat(parts).to(given[0].weight.device)


def struct(name: str, integers: dict[str, object], flags: dict[str, bool], types: str = "") -> str:
    """CUDA C++ of a struct of constants."""
    numbers = ", ".join(f"{key} = {value}" for key, value in integers.items())
    truths = ", ".join(f"{key} = {str(value).lower()}" for key, value in flags.items())
    declared = f"    {types}\n" if types else ""
    constants = f"    static constexpr int {numbers};\n    static constexpr bool {truths};\n"
    return f"struct {name} {{\n{declared}{constants}}};\n"


def registers_for(warps: int, blocks: int) -> int:
    """Registers that a thread may have when so many warps and blocks share a multiprocessor."""
    quarters = -(-warps // 4) * blocks  # a block's warps are dealt out to four schedulers
    return min(_REGISTERS // 128 // quarters // 8 * 8, _MOST_REGISTERS)


@cache
def segments_for(rows: int, strips: int, workers: int) -> int:
    """Into how many parts rows are cut: as many as let the workers that share all strips' parts end together.

    A part costs one and a half rows more than it has: its first and last row are loaded for one output row each.
    """

    def time(segments: int) -> float:
        turns = -(-strips * segments // workers)
        return turns * (-(-rows // segments) + 1.5)

    return min(range(1, rows + 1), key=time)


class _Bricks(Lines):
    """Works out a kernel of padded bricks."""

    def __init__(self, description: Description, plan: Plan) -> None:
        super().__init__(description, registers_for(plan.warps, plan.blocks), plan.warps)
        self.plan = plan
        halo = 2 * self.depth
        self.width = -(-(plan.edge[-1] + halo) // 16) * 16
        self.height = plan.edge[-2] + halo
        self.planes = plan.edge[0] + halo if self.volume else 1
        self.edge = (*plan.edge[:-1], self.width - halo)
        self.fields, self.shared = self._place_fields()

    def _segments(self, number: int) -> int:
        level, splits = number + 1, self.parameters[number].splits
        planes = self.planes - 2 * level if self.volume else 1
        return segments_for(self.height - 2 * level, self.width // 16 * planes, self.plan.warps // splits)

    def _beside(self, each: int, device: Device) -> int:
        """Blocks that a multiprocessor holds at a time, of ``each`` that it takes.

        A plan's ``blocks`` is what the compiler must leave room for; where a block needs less there are more: 3 of 4
        warps with 72 words of weights, which NVRTC 13 gives 154 to 158 registers.
        """
        exact, weights = self.description.format == "fp32", [one for one in self.parameters if one.resident]
        sums = 26 if exact else 14
        held = max((self._words(one.steps, one.tiles) + sums * one.tiles for one in weights), default=0)
        others = _BESIDE_WEIGHTS + (28 if exact else 0) + (40 if self.volume else 0)
        used = min(-(-(held + others) // 8) * 8, self.registers)
        of_scheduler = device.registers // 4 // 32 // used
        room = max(self.plan.blocks, 4 * of_scheduler // self.plan.warps)
        return min(each, room, device.shared // (self.shared + BLOCK_SHARED))

    def _place_fields(self) -> tuple[list[int], int]:
        """Byte offset of each tensor's field and bytes of all: a field is reused when its tensor was read last.

        A residual that is read for the last time may be overwritten in place: a lane reads what it then writes.
        """
        last = list(range(self.depth))
        for number, layer in enumerate(self.layers):
            if layer.residual is not None:
                last[layer.residual] = max(last[layer.residual], number)
        holders, where = [0], [0]
        for number in range(self.depth - 1):
            residual = self.layers[number].residual
            for buffer, holder in enumerate(holders):
                in_place = holder == residual and holder != number and last[holder] == number
                if last[holder] < number or in_place:
                    holders[buffer] = number + 1
                    where.append(buffer)
                    break
            else:
                holders.append(number + 1)
                where.append(len(holders) - 1)
        sizes = [max(self._field_bytes(t) for t in range(self.depth) if where[t] == b) for b in range(len(holders))]
        starts = [sum(sizes[:b]) for b in range(len(sizes))]
        return [starts[b] for b in where], sum(sizes)

    def _field_bytes(self, tensor: int) -> int:
        pixels = self.planes * self.height * self.width + 2 * GUARD
        return -(-pixels * self.chunks(tensor) * 16 // ALIGNMENT) * ALIGNMENT

    def counts(self, size: Shape, batch: int, device: Device) -> Counts:
        """What the busiest multiprocessor does.

        ``step`` is a row of 16 columns that a warp makes after another, ``fragment`` one that it reads for all channels
        that it makes, ``chunk_bare`` what is brought and left while no block beside it multiplies.
        """
        out = self.description.sequence.sizes(size)[-1]
        blocks = batch * prod(-(-n // e) for n, e in zip(out, self.edge, strict=True))
        each = -(-blocks // device.multiprocessors)
        beside = self._beside(each, device)
        rounds = each / beside
        taps = 27 if self.volume else 9
        products = fragments = stores = steps = chained = weights = 0.0
        for number, one in enumerate(self.parameters):
            planes = self.planes - 2 * (number + 1) if self.volume else 1
            rows, strips = self.height - 2 * (number + 1), self.width // 16 * planes
            segments = self._segments(number)
            turns = -(-strips * segments // (self.plan.warps // one.splits))
            alone = turns * (-(-rows // segments) + 1.5)
            products += rows * strips * taps * one.steps * one.tiles * one.splits
            fragments += (rows + 2 * segments) * strips * taps // 3 * one.steps * one.splits
            stores += rows * strips * one.splits * one.tiles
            weights += taps * one.steps * one.tiles * self.plan.warps
            steps += alone
            chained += alone * one.steps * one.tiles * taps
        pixels = self.planes * self.height * self.width * self.chunks(0) + prod(self.edge) * self.chunks_out
        slower = 3 if self.description.format == "fp32" else 1
        return {
            "product": each * products * slower, "store": each * stores, "chunk": each * pixels, "step": rounds * steps,
            "chained_product": rounds * chained * slower, "round": rounds, "launch": 1,
            "chunk_bare": each * pixels / beside, "fragment": each * fragments, "weight_load": each * weights,
        }  # fmt: skip

    def source(self, name: str) -> str:
        """The kernel's text."""
        field: dict[str, object] = {
            "DEPTH": self.planes, "HEIGHT": self.height, "WIDTH": self.width, "GUARD": GUARD,
            "WARPS": self.plan.warps, "LEVELS": self.depth, "TILE_DEPTH": self.edge[0] if self.volume else 1,
            "TILE_HEIGHT": self.edge[-2], "TILE_WIDTH": self.edge[-1], **brick_constants(self.plan.layout),
        }  # fmt: skip
        layers = []
        for number, layer in enumerate(self.layers):
            places: dict[str, object] = {
                "SEGMENTS": self._segments(number), "SOURCE": self.fields[number],
                "TARGET": 0 if number == self.depth - 1 else self.fields[number + 1],
                "ADDED": 0 if layer.residual is None else self.fields[layer.residual],
            }  # fmt: skip
            layers.append(self.layer_text(number, places))
        calls = "".join(f"    layer<Layer{n}, Field>(a, origin, fields);\n" for n in range(self.depth))
        loaded = f"{self.description.format}, {self.layers[0].in_channels}, {self.chunks(0)}, Field"
        return (
            device_text("rows.cuh")
            + device_text("chain.cuh")
            + struct("Field", field, {"VOLUME": self.volume})
            + "".join(layers)
            + f"KERNEL({name}, {32 * self.plan.warps}, {self.plan.blocks}) {{\n"
            f"    const u32 fields = shared_base();\n"
            f"    const Origin origin = origin_of<Field>(a, blockIdx.x);\n"
            f"    load_field<{loaded}>(a, origin, fields + {self.fields[0]});\n{calls}}}\n"
        )


def candidates(description: Description, size: Shape, batch: int, device: Device, limit: int = 12) -> list[Plan]:
    """Plans worth a trial for inputs of ``size``, the most promising first.

    Raises:
        ValueError: there is no kernel for this sequence.
    """
    refuse(unsuited(description), "kernel")
    plans = _all_plans(description, description.sequence.sizes(size)[-1])
    fitting = cache(partial(_fitting, description))
    return best_plans("chain", keeping_weights(plans, fitting), fitting, (size, batch, device), limit)


def best_plans(
    family: str,
    plans: Iterable[P],
    fitting: Callable[[P], Lines],
    where: tuple[Shape, int, Device],
    limit: int,
    kind: Callable[[P], Hashable] = id,
) -> list[P]:
    """:func:`~.seconds.cheapest` of the plans whose blocks find room on a device.

    Args:
        fitting: the work of a plan; ValueError where its sizes do not fit together.
        where: size of the input, batch and device.
    """
    size, batch, device = where

    def counts(plan: P) -> Counts:
        made = fitting(plan)
        check_room(made.shared, made.blocks, device)
        return made.counts(size, batch, device)

    return cheapest(family, plans, counts, limit, kind)


def keeping_weights(plans: Iterable[P], fitting: Callable[[P], Lines]) -> list[P]:
    """Plans that fit and keep all weights in registers; where there is none, all.

    Weights that are loaded for each row again spill, and no such kernel was measured.

    Args:
        plans: to choose from.
        fitting: the work of a plan; ValueError where its sizes do not fit together.
    """

    def keeps(plan: P) -> bool:
        try:
            return all(one.resident for one in fitting(plan).parameters)
        except ValueError:
            return False

    plans = list(plans)
    return [one for one in plans if keeps(one)] or plans


def _all_plans(description: Description, out: Shape) -> Iterator[Plan]:
    """Bricks whose rows with their halo are whole groups of 16."""
    halo, volume = 2 * len(description.sequence.layers), description.sequence.dimensions == 3
    rows = (4, 6, 8, 12) if volume else (8, 12, 14, 16, 20, 24, 32, 40)
    widths = (16, 32, 48) if volume else (16, 32, 48, 64)
    seen = set()
    for depth, height, width in product(rows if volume else (1,), rows, widths):
        for warps, blocks in ((4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (8, 1), (8, 2), (12, 1), (16, 1)):
            plan = Plan((*((min(depth, out[0]),) if volume else ()), min(height, out[-2]), width - halo), warps, blocks)
            if width - halo > 1 and plan not in seen:
                seen.add(plan)
                yield plan


def chain(description: Description, plan: Plan) -> Kernel:
    """The kernel of a chain.

    Raises:
        ValueError: there is none for this sequence, or the brick does not fit into shared memory.
    """
    made = _fitting(description, plan)
    edge = "x".join(str(n) for n in made.edge)
    layout = "" if plan.layout is None else f"_bricks{plan.layout[0]}x{plan.layout[1]}"
    name = f"chain_{description}_{edge}_w{plan.warps}b{plan.blocks}{layout}"
    return Kernel(
        name,
        description,
        made.source(name),
        32 * plan.warps,
        made.shared,
        made.edge,
        made.pack,
        layout=plan.layout,
        counts=made.counts,
    )


def _fitting(description: Description, plan: Plan) -> _Bricks:
    refuse(unsuited(description), "kernel")
    if len(plan.edge) != description.sequence.dimensions or min(plan.edge) < 2:
        raise ValueError(f"edge {plan.edge}: give {description.sequence.dimensions} numbers from 2 on")
    if plan.layout is not None and (len(plan.layout) != 2 or any(n < 1 or n & (n - 1) for n in plan.layout)):
        raise ValueError(f"layout {plan.layout}: give two powers of two; volumes lie channels-last")
    if plan.layout is not None and description.sequence.dimensions != 2:
        raise ValueError(f"layout {plan.layout} for {description.sequence.dimensions} dimensions: give none")
    made = _Bricks(description, plan)
    check_room(made.shared)
    return made


__all__ = ["Plan", "candidates", "chain", "unsuited"]
