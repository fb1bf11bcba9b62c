"""The first convolution of a network by ``wgmma``: few channels, up to eight taps in a row, stride 2 or 1 in the row.

Libraries multiply channels in steps of eight and more and waste most of them on three. In lines of four channels a row
of taps is 32 neighbours in memory, of which 7 taps of 3 channels fill two thirds, and at stride 2 neighbouring outputs
begin 16 bytes apart: so a product reads it where the line lies (``device/stem_warpgroup.cuh``). Padding and the fourth
channel are added where lines are brought, from the image as it is. Of 16 channels a tap is a product's depth. At
stride 1 two neighbouring outputs of few channels are one of twice as many.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import prod

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels import chain
from joulemark.merged.kernels.chain import ALIGNMENT, brick_constants, check_room, refuse, registers_for, struct
from joulemark.merged.kernels.compile import device_text
from joulemark.merged.kernels.description import Description
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.kernel import Kernel
from joulemark.merged.kernels.seconds import Counts, cheapest, varied
from joulemark.merged.kernels.stream_warpgroup import fits
from joulemark.merged.kernels.warpgroup import FORMATS, ROWS, vocabulary
from joulemark.merged.sequence import Conv, Shape, of_three

_CHANNELS, _TAPS, _STRIDE = (4, 16), 8, 2
"""Of a pixel in shared memory; most of a row; pixels from where an output begins to the next: 16 bytes."""
_WIDTHS = (128, 64, 32)
"""Of tiles, beside the widest: narrow ones leave room for many channels."""
ACTIVATIONS = {**chain.ACTIVATIONS, "silu": "SILU", "hardswish": "HARDSWISH"}
_COLUMNS = 256
"""Most of a product."""
_SLOTS = (3, 2)
"""The deepest first: lines that are under way hide the latency of memory."""
_OTHER_REGISTERS = 36
"""Of a thread that multiplies beside its sums."""
_ADDRESSES, _PAIR, _MOST_AT_ONCE = 40, 4, 12
"""Registers of a thread that brings lines; of a pair of pixels that it has under way; most of these."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a kernel that are free to choose.

    Args:
        width: outputs of a tile, or pairs of them at stride 1; a multiple of 8.
        groups: warpgroups that multiply.
        together: lines of the output in a product.
        turns: products that a warpgroup makes of the lines in a slot; 1 where there are several planes of taps.
        slots: for lines that are brought ahead.
        bringers: warpgroups that bring lines.
    """

    width: int
    groups: int = 2
    together: int = 1
    turns: int = 1
    slots: int = 2
    bringers: int = 1


def unsuited(description: Description) -> str | None:
    """Why there is no such kernel for a sequence; None where there is one."""
    sequence = description.sequence
    if len(sequence.layers) != 1 or sequence.dimensions not in (2, 3):
        return f"{len(sequence.layers)} layers in {sequence.dimensions} dimensions, not 1 in 2 or 3"
    if description.format not in FORMATS:
        return f"{description.format}: there is one for bf16 and fp16"
    layer = sequence.layers[0]
    if any(pad >= taps for pad, taps in zip(layer.padding, layer.kernel, strict=True)):
        return f"padding {layer.padding}: less than the taps"
    if layer.activation not in ACTIVATIONS or layer.norm is not None:
        return f"activation {layer.activation}, norm {layer.norm}"
    if layer.residual is not None or description.adds:
        return "something is added"
    return _unsuited_sizes(layer)


def _unsuited_sizes(layer: Conv) -> str | None:
    if layer.stride[-1] not in (1, _STRIDE) or not 1 < _taps(layer)[2] <= _TAPS or set(layer.dilation) != {1}:
        return (
            f"kernel {layer.kernel}, stride {layer.stride}, dilation {layer.dilation}: "
            f"rows of 2 to {_TAPS} taps, stride {_STRIDE} in them, or to {_TAPS - 1}, stride 1; dilation 1"
        )
    few, many = _CHANNELS
    most = 2 * ROWS // _fold(layer)
    if not (layer.in_channels <= few or layer.in_channels == many) or layer.out_channels > most or layer.groups != 1:
        return (
            f"{layer.in_channels} → {layer.out_channels} channels in {layer.groups} groups: "
            f"up to {few}, or {many}, → {most} in one"
        )
    if _fold(layer) > 1 and (layer.in_channels > few or layer.out_channels % 8):
        return f"stride 1, {layer.in_channels} → {layer.out_channels} channels: up to {few}, whole eights of the output"
    return None


def _fold(layer: Conv) -> int:
    """Neighbouring outputs that are one."""
    return _STRIDE // layer.stride[-1]


def _halves(layer: Conv) -> int:
    """Products of 64 channels for those of the output."""
    return -(-layer.out_channels * _fold(layer) // ROWS)


def _taps(layer: Conv) -> tuple[int, int, int]:
    """Of neighbouring outputs that are one."""
    planes, rows, taps = of_three(layer.kernel, 1)
    return planes, rows, taps + _fold(layer) - 1


def channels_of(layer: Conv) -> int:
    """Channels of a pixel in shared memory."""
    return next(n for n in _CHANNELS if layer.in_channels <= n)


@dataclass(frozen=True)
class _Geometry:
    """What follows from the layer and the plan."""

    layer: Conv
    plan: Plan

    @cached_property
    def taps(self) -> tuple[int, int, int]:
        return _taps(self.layer)

    @property
    def fold(self) -> int:
        """Neighbouring outputs that are one."""
        return _fold(self.layer)

    @cached_property
    def stride(self) -> tuple[int, int, int]:
        return of_three(self.layer.stride, 1)

    @cached_property
    def padding(self) -> tuple[int, int, int]:
        return of_three(self.layer.padding, 0)

    @cached_property
    def halves(self) -> int:
        """Products of 64 channels for those of the output."""
        return _halves(self.layer)

    @cached_property
    def channels(self) -> int:
        """Of a pixel in shared memory."""
        return channels_of(self.layer)

    @property
    def octets(self) -> int:
        """Of channels, that lie apart; 0 where all of a pixel lie together."""
        return self.channels // 8

    @cached_property
    def steps(self) -> int:
        """Products of 16 numbers, four pixels or one, for a row of taps."""
        return -(-self.taps[2] * self.channels // 16)

    @property
    def pitch(self) -> int:
        """Of a line of the output, and of one of the input in 16 bytes; what products read behind a tile is in it."""
        return self.plan.width + 8

    @property
    def columns(self) -> int:
        """Of a product."""
        return (self.plan.together - 1) * self.pitch + self.plan.width

    @property
    def lines(self) -> int:
        """Of the output that a brick has."""
        return self.plan.groups * self.plan.together * self.plan.turns

    @property
    def rows(self) -> int:
        """Lines of the input that these need."""
        return self.stride[1] * (self.lines - 1) + self.taps[1]

    @property
    def rows_alike(self) -> int:
        """Places for those whose numbers have the same rest by the stride."""
        return -(-self.rows // self.stride[1])

    @property
    def weight_bytes(self) -> int:
        """Of a plane of taps."""
        return self.taps[1] * self.steps * self.halves * ROWS * 32

    @property
    def _plane(self) -> int:
        """Bytes of lines of which a pair of columns takes 16."""
        return self.stride[1] * self.rows_alike * self.pitch * 16

    @property
    def octet_bytes(self) -> int:
        """From an octet of channels to the next; the same of neighbouring pixels fall on different banks."""
        return self._plane + 32

    @property
    def line_bytes(self) -> int:
        """Of a slot's lines."""
        return 2 * self.octets * self.octet_bytes if self.octets else self._plane

    @property
    def staged_bytes(self) -> int:
        """Of a warpgroup's output on its way."""
        return -(-self.columns // 16) * 16 * self.halves * ROWS * 2

    @cached_property
    def resident(self) -> bool:
        """Whether all weights stay in shared memory; else a plane of them comes with its lines."""
        return self.taps[0] == 1 or self._shared(True) <= Device().block_shared

    def _shared(self, resident: bool) -> int:
        kept = (self.taps[0] if resident else 0) * self.weight_bytes
        slot = self.line_bytes + (0 if resident else self.weight_bytes)
        return ALIGNMENT + kept + self.plan.slots * slot + self.plan.groups * self.staged_bytes

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return self._shared(self.resident)

    @property
    def warpgroups(self) -> int:
        return self.plan.groups + self.plan.bringers

    @property
    def registers(self) -> int:
        """Of a thread."""
        return registers_for(4 * self.warpgroups, 1)

    @property
    def at_once(self) -> int:
        """Pairs of pixels that a thread has under way: equal turns of as many as registers hold."""
        threads, items = 128 * self.plan.bringers, self.rows * (self.pitch + self.padding[2] % 2)
        most = min(_MOST_AT_ONCE, (self.registers - _ADDRESSES) // _PAIR)
        return -(-items // (threads * -(-items // (threads * most))))

    def check(self) -> None:
        """ValueError where sizes do not fit together."""
        plan = self.plan
        if min(plan.groups, plan.together, plan.turns, plan.bringers) < 1 or plan.slots < 2:
            raise ValueError(f"{plan}: give one of each at least, and two slots")
        if plan.width < 8 or plan.width % 8 or self.columns > _COLUMNS:
            raise ValueError(f"{plan}: a product of {self.columns} columns, at most {_COLUMNS} in eights")
        if plan.turns > 1 and self.taps[0] > 1:
            raise ValueError(f"{plan}: sums of several turns at a time, for {self.taps[0]} planes of taps")
        if 128 * self.warpgroups > chain.MOST_THREADS:
            raise ValueError(f"{plan}: {self.warpgroups} warpgroups, {chain.MOST_THREADS // 128} are a block's most")
        wanted = max(self.halves * self.columns // 2 + _OTHER_REGISTERS, _ADDRESSES + _PAIR)
        if wanted > self.registers:
            raise ValueError(
                f"{plan}: {self.warpgroups} warpgroups leave a thread {self.registers} registers, {wanted} are needed"
            )
        check_room(self.shared)

    def edge(self, dimensions: int) -> Shape:
        """Of a brick."""
        return (1, self.lines, self.plan.width * self.fold)[-dimensions:]

    def counts(self, description: Description, size: Shape, batch: int, device: Device) -> Counts:
        """What the busiest multiprocessor does, in the terms of ``wide``: one block on it takes brick after brick.

        What comes before the first product counts as one brick's lines more. A product reads its 64 rows and its
        columns from shared memory, 128 bytes a cycle, and takes half a cycle a column: of few columns that is less.
        """
        out, plan = description.sequence.sizes(size)[-1], self.plan
        edge = self.edge(len(out))
        bricks = batch * prod(-(-n // e) for n, e in zip(out, edge, strict=True))
        rounds = -(-bricks // device.multiprocessors)
        planes, rows, _ = self.taps
        products = plan.groups * plan.turns * self.halves
        brought = planes * (
            self.rows * self.pitch * max(1, 2 * self.octets) + (0 if self.resident else self.weight_bytes // 16)
        )
        moved = self.lines * min(edge[-1], out[-1]) * self.layer.out_channels * description.itemsize / 16
        return {
            "product": rounds * products * planes * rows * self.steps * max(self.columns, ROWS // 2 + self.columns / 2),
            "store": rounds * products * self.columns, "chunk": (rounds + 1) * brought + rounds * moved,
            "step": rounds * (planes + plan.turns), "round": rounds, "launch": 1,
        }  # fmt: skip

    def constants(self) -> dict[str, object]:
        """The F of the kernel's text."""
        plan, layer = self.plan, self.layer
        kept = self.taps[0] * self.weight_bytes if self.resident else 0
        slot = self.line_bytes + (0 if self.resident else self.weight_bytes)
        return {
            "TAKEN": layer.in_channels, "MADE": layer.out_channels * self.fold, "FOLD": self.fold,
            "HALVES": self.halves, "ACTIVATION": ACTIVATIONS[layer.activation],
            "PLANES": self.taps[0], "TAPS_Y": self.taps[1], "STEPS": self.steps, "STRIDE_Z": self.stride[0],
            "STRIDE_Y": self.stride[1], "PAD_Z": self.padding[0], "PAD_Y": self.padding[1], "PAD_X": self.padding[2],
            "TILE_WIDTH": plan.width, "PITCH": self.pitch, "COLUMNS": self.columns, "LINES": self.lines,
            "ROWS": self.rows, "ROWS_ALIKE": self.rows_alike, "GROUPS": plan.groups, "TOGETHER": plan.together,
            "TURNS": plan.turns, "AT_ONCE": self.at_once, "SLOTS": plan.slots, "BRINGERS": 128 * plan.bringers,
            "OCTETS": self.octets, "OCTET_BYTES": self.octet_bytes,
            "WEIGHTS": ALIGNMENT, "SLOT": ALIGNMENT + kept, "SLOT_BYTES": slot,
            "LINE_BYTES": self.line_bytes, "STAGED": ALIGNMENT + kept + plan.slots * slot,
            "STAGED_BYTES": self.staged_bytes, **brick_constants(None),
        }  # fmt: skip


def pack(description: Description, given: List[Parameters]) -> Tensor:
    """[plane of taps][row of taps][8 numbers of it][64 or 128 channels][8], then a bias for each of these channels.

    A row's numbers are [tap][4 or 16 channels], zeros behind those that are there.
    """
    layer, one = description.sequence.layers[0], given[0]
    planes, rows, taps = _taps(layer)
    channels = channels_of(layer)
    pixels = -(-taps * channels // 16) * 16 // channels
    made = ROWS * _halves(layer)
    weight, bias = torch.zeros(made, planes, rows, pixels, channels), torch.zeros(made)
    own = one.weight.detach().float().cpu().view(layer.out_channels, layer.in_channels, planes, rows, -1).movedim(1, -1)
    for number in range(_fold(layer)):
        its = slice(number * layer.out_channels, (number + 1) * layer.out_channels)
        weight[its, :, :, number : number + layer.kernel[-1], : layer.in_channels] = own
        if one.bias is not None:
            bias[its] = one.bias.detach().float().cpu()
    packed = (
        weight.view(made, planes, rows, pixels * channels // 8, 8)
        .permute(1, 2, 3, 0, 4)
        .to(description.dtype)
        .contiguous()
    )
    return torch.cat([packed.flatten().view(torch.uint8), bias.view(torch.uint8)]).to(one.weight.device)


def candidates(description: Description, size: Shape, batch: int, device: Device, limit: int = 8) -> list[Plan]:
    """Plans worth a trial for inputs of ``size``, the most promising first.

    Raises:
        ValueError: there is no such kernel for this sequence.
    """
    refuse(unsuited(description), "kernel of a first layer by warpgroups")
    layer, out = description.sequence.layers[0], description.sequence.sizes(size)[-1]

    def counts(plan: Plan) -> Counts:
        made = _Geometry(layer, plan)
        made.check()
        check_room(made.shared, 1, device)
        return made.counts(description, size, batch, device)

    plans = _all_plans(layer, out[-2], -(-out[-1] // _fold(layer)))
    return varied(cheapest("stem_warpgroup", plans, counts, limit, _kind), _kind)


def _kind(plan: Plan) -> tuple[int, int]:
    return plan.groups, plan.together


def _all_plans(layer: Conv, height: int, length: int) -> Iterator[Plan]:
    """Whole lines, or equal parts of them, and bricks of all heights.

    Args:
        height, length: of the output, in lines and in tiles' outputs.
    """
    fewest = -(-length // _COLUMNS)
    cuts = sorted({fewest, fewest + 1, *(-(-length // width) for width in _WIDTHS if width < length)})
    for across, groups, together, bringers in product(cuts, (2, 3, 4), (1, 2, 3, 4), (2, 1)):
        width = -(-length // (8 * across)) * 8
        most = 1 if _taps(layer)[0] > 1 else max(1, min(8, -(-height // (groups * together))))
        for turns in range(1, most + 1):
            deepest = next(
                (n for n in _SLOTS if fits(_fitting, layer, Plan(width, groups, together, turns, n, bringers))), None
            )
            if deepest is not None:
                yield Plan(width, groups, together, turns, deepest, bringers)


def _fitting(layer: Conv, plan: Plan) -> _Geometry:
    """The sizes of a plan.

    Raises:
        ValueError: they do not fit together, or a block finds no room.
    """
    made = _Geometry(layer, plan)
    made.check()
    return made


def stem_warpgroup(description: Description, plan: Plan) -> Kernel:
    """The kernel of a first layer by products of warpgroups.

    Raises:
        ValueError: there is none for this layer or plan.
    """
    refuse(unsuited(description), "kernel of a first layer by warpgroups")
    layer = description.sequence.layers[0]
    made = _fitting(layer, plan)
    sizes = f"{plan.width}x{made.lines}_g{plan.groups}l{plan.together}s{plan.slots}b{plan.bringers}"
    name = f"stem_{description}_{_words(layer)}_{sizes}"
    source = (
        vocabulary(description.format, shared=[made.columns])
        + "".join(device_text(f"{part}.cuh") for part in ("rows", "chain", "stem_warpgroup"))
        + struct("Field", made.constants(), {"RESIDENT": made.resident}, f"using T = {description.format};")
        + f"KERNEL({name}, {128 * made.warpgroups}, 1) {{\n{_body(made)}}}\n"
    )
    return Kernel(
        name,
        description,
        source,
        128 * made.warpgroups,
        made.shared,
        made.edge(description.sequence.dimensions),
        partial(pack, description),
        persistent=1,
        least=90,
        only=90,
        counts=partial(made.counts, description),
    )


def _words(layer: Conv) -> str:
    """What tells layers of the same channels apart, for a name."""
    parts = (("k", layer.kernel), ("s", layer.stride), ("p", layer.padding))
    return "".join(key + "x".join(map(str, sizes)) for key, sizes in parts) + f"_{layer.activation}"


def _body(made: _Geometry) -> str:
    """The kernel's body: who does what."""
    groups = made.plan.groups
    return (
        f"    Stem<Field> run(a);\n"
        f"    if (threadIdx.x == 0) run.prepare();\n"
        f"    block_sync();\n"
        f"    const int warp = own_warp();\n"
        f"    if (warp < {4 * groups}) run.make(warp / 4, warp % 4);\n"
        f"    else run.bring(threadIdx.x - {128 * groups});\n"
    )
