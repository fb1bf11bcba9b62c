"""Inverted residuals by ``wgmma``, the matrix products of warpgroups: for compute capability 9.0.

The hidden channels of a brick may be split over a cluster of blocks, and a block may take the same brick of several
images: so small maps with many channels read their weights seldom and still fill the device. Groups of warps may split
them further within a block, and the depthwise may leave the tensor cores for packed fp16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels import inverted_residual
from joulemark.merged.kernels.columns import Columns, combined, crossed, kept, larger, smaller, where
from joulemark.merged.kernels.compile import KernelError, device_text
from joulemark.merged.kernels.description import Description, Format
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.kernel import Kernel
from joulemark.merged.kernels.lane_weights import as_bytes, diagonal_taps, half_taps, neighbours_of_16, sum_bytes
from joulemark.merged.kernels.seconds import Counts, cheapest_of, counts_by_output
from joulemark.merged.kernels.tiling import Tiled, for_residents
from joulemark.merged.kernels.warpgroup import vocabulary
from joulemark.merged.sequence import Shape

_LARGEST = torch.finfo(torch.float16).max
_ROUNDING = 2.0**-9
"""Of a number in bf16, at most."""
_LEAST = 1e-30
"""Stands for zero where something is divided by."""
_HEAD = 512
"""Bytes of a block's shared memory for barriers and zeros."""
_MOST_OCTETS = 32
"""Of columns in one product."""
_MOST_GROUPS = 4
"""Of a block: their barriers are in front of the zeros."""
_MOST_SPLIT = 8
"""Blocks of a cluster on any device (CUDA C++ Programming Guide, "Thread Block Clusters")."""
_SPARED = 16
"""Registers fewer than counted, with which many kernels are compiled without spills."""
_OWN_SUMS = 1 / 6
"""What bytes of sums from a block's own shared memory cost of others': 128 a cycle of 1.98 GHz, not 25 ps each."""
_OVERLAPPED_BYTES = 100
"""Of weights, which come from the L2 while a product or a depthwise tile is made: its share of 5.5 TB/s in 2.7 ns."""


@dataclass(frozen=True)
class Plan(Tiled):
    """How an inverted residual is cut.

    Args:
        height: of a brick of the output.
        width: of a brick of the output.
        tiles: of 16 positions, one above the other, that a warp computes.
        chunk: hidden channels at a time.
        images: that a block takes at the same place.
        split: blocks, a cluster, that share the hidden channels of a brick.
        resident: blocks of a multiprocessor that registers must suffice for.
        narrow: a tile is 8 positions in each of two rows, not 16 in one.
        ahead: a block takes brick after brick and brings the next one's input while it computes.
        groups: of warps, each as many as the brick's tiles take, that share the hidden channels of a block further.
        halves: hidden channels in fp16, and a depthwise of two channels at a time without the tensor cores.
        early: blocks are launched while the kernel before this one ends.
    """

    height: int
    width: int
    tiles: int
    chunk: int = 64
    images: int = 1
    split: int = 1
    resident: int = 1
    narrow: bool = False
    ahead: bool = False
    groups: int = 1
    halves: bool = False
    early: bool = False

    @cached_property
    def warps(self) -> int:
        """Of a group, in whole warpgroups; the last may have no positions."""
        each = self.strips * -(-self.height // (self.tiles * self.tile[0]))
        return -(-each * self.images // 4) * 4

    def bricks(self, out: Shape, batch: int) -> int:
        """Of an output of spatial size ``out``."""
        return -(-batch // self.images) * -(-out[0] // self.height) * -(-out[1] // self.width)


@dataclass(frozen=True)
class _Geometry:
    """What follows from the layers and the plan; the kernel's text derives the same from the same constants."""

    channels_in: int
    hidden: int
    channels_out: int
    stride: int
    residual: bool
    plan: Plan

    @cached_property
    def own_chunks(self) -> int:
        """Of each group of each block of a cluster; zeros behind the last hidden channels make them equal."""
        return -(-self.hidden // (self.plan.chunk * self.shares))

    @property
    def chunks(self) -> int:
        return self.own_chunks * self.shares

    @property
    def shares(self) -> int:
        """Of a brick's hidden channels."""
        return self.plan.split * self.plan.groups

    @cached_property
    def steps_in(self) -> int:
        return -(-self.channels_in // 16)

    @property
    def octets_out(self) -> int:
        return self.channels_out // 8

    @cached_property
    def pitch(self) -> int:
        return self.stride * (self.plan.width + 2 // self.stride)

    @cached_property
    def rows(self) -> int:
        return self.stride * (self.plan.height - 1) + 3

    @cached_property
    def turns(self) -> int:
        """Tiles of 64 pixels that a warpgroup expands at most."""
        tiles = self.plan.images * -(-self.rows * self.pitch // 64)
        return -(-tiles // (self.plan.warps // 4))

    @cached_property
    def plane_pixels(self) -> int:
        """Of an octet of the input in shared memory."""
        # Copies of the neighbouring octets of a pixel fall on different banks.
        return self._padded(1 if self.steps_in > 2 else 8 // (2 * self.steps_in))

    @cached_property
    def hidden_pixels(self) -> int:
        """Of an octet of hidden channels."""
        # Lanes read two octets of 4 pixels at once, neighbours or every second one.
        return where(self.plan.halves, self._padded(where(self.plan.narrow, 4, 1)), self.plane_pixels)

    def _padded(self, rest: int) -> int:
        """Pixels of all images, what tiles read behind them, and a last one where what nobody reads is put.

        Args:
            rest: that is left of eights.
        """
        plan = self.plan
        band = plan.tiles * plan.tile[0]
        first = (-(-plan.height // band) - 1) * band * self.stride * self.pitch + (plan.strips - 1) * plan.tile[1]
        taps = self.stride * plan.tile[0] * (plan.tiles - 1) + 3
        second = where(plan.narrow, self.stride * self.pitch, 8)
        last = first + 7 + second + (1 if self.stride == 2 else 2) + ((taps - 1) // 2 * 2 + 1) * self.pitch
        pixels = (plan.images - 1) * self.rows * self.pitch + larger(self.rows * self.pitch, last + 1) + 1
        return -(-(pixels - rest) // 8) * 8 + rest

    @cached_property
    def out_pixels(self) -> int:
        return self.plan.images * self.plan.height * self.plan.strips * self.plan.tile[1] + 1

    @cached_property
    def expand_bytes(self) -> int:
        """Of a chunk's weights of the expansion."""
        return self.plan.chunk * (self.steps_in * 32 + 8)

    @cached_property
    def project_bytes(self) -> int:
        """Of a chunk's weights of projection and depthwise."""
        return self.plan.chunk * (self.channels_out * 2 + where(self.plan.halves, 20, 48 + 8))

    @cached_property
    def hidden_at(self) -> int:
        """Where the hidden channels begin in shared memory, behind the input and what is put together in its place."""
        given = 2 * self.steps_in * self.plane_pixels * 16
        shared = where(self.shares > 1, larger(given, self.staged), given)
        return _HEAD + where(self.plan.ahead, 2 * given, shared)

    @cached_property
    def staged(self) -> int:
        """Bytes of the output that a block puts together, from the input's beginning on; with a residual 0: in it."""
        own = -(-self.octets_out // self.plan.split)
        return 0 if self.residual else own * self.out_pixels * 16

    @cached_property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        plan = self.plan
        hidden = 2 * plan.chunk * self.hidden_pixels * 2
        whole = self.hidden_at + plan.groups * (hidden + 2 * (self.expand_bytes + self.project_bytes))
        sums = self.hidden_at + plan.groups * plan.tiles * self.octets_out * plan.warps * 512
        return larger(whole, where(self.shares > 1, sums, _HEAD + self.staged))

    @cached_property
    def half_loads(self) -> int:
        """Wavefronts of shared memory (128 bytes) of a warp's depthwise in halves, of an octet: taps, then rows."""
        plan = self.plan
        rows = self.stride * (plan.tiles * plan.tile[0] - 1) + 3
        columns = self.stride * where(plan.narrow, 0, 1) + 3
        return 10 + rows * columns

    @property
    def kind(self) -> tuple[object, ...]:
        """Of its plan: few of a kind are worth a trial."""
        plan = self.plan
        cut = plan.width * plan.height, plan.tiles, plan.images, plan.split
        return *cut, plan.ahead, plan.groups, plan.halves

    def resident(self, device: Device, spared: int = 0) -> int:
        """Blocks of a multiprocessor that shared memory and registers suffice for; 0 where none fits.

        Args:
            spared: registers that the compiler is asked to do without.
        """
        plan = self.plan
        wanted = (
            where(plan.halves, 56, 66)
            + 8 * plan.ahead
            + 10 * plan.tiles
            + plan.tiles * self.channels_out // 2
            + plan.chunk // 2
            + 2 * self.turns
        )
        fits = (wanted <= 256) & (self.shared <= device.block_shared)
        of_scheduler = device.registers // 4 // 32 // (-(-(wanted - spared) // 8) * 8)
        by_registers = 4 * of_scheduler // (plan.warps * plan.groups)
        return fits * smaller(by_registers, device.shared // (self.shared + 1024), 8)

    def rows_inside(self, out: Shape) -> list[tuple[int, int]]:
        """Bricks of a column and rows of the input of each that lie in the image: the first, inner ones, the last.

        With stride 2 of an image of even size.
        """
        bricks = -(-out[0] // self.plan.height)
        last = smaller(self.stride * (out[0] - (bricks - 1) * self.plan.height) + 1, self.rows)
        several = where(bricks > 1, 1, 0)
        return [(1, where(several, self.rows, last) - 1), (bricks - 1 - several, self.rows), (several, last)]

    def counts(self, out: Shape, batch: int, device: Device) -> Counts:
        """What the busiest multiprocessor does: throughput of all its blocks, waits of one after another."""
        plan = self.plan
        each = -(-plan.bricks(out, batch) // device.clusters(plan.split))
        beside = smaller(plan.resident, each)  # blocks, which hide a part of each other's beginning and end
        rounds, whole = each / beside, -(-each // beside)
        octets, own = plan.chunk // 8, -(-self.octets_out // plan.split)
        inside = self.rows_inside(out)
        bricks = sum(many for many, _ in inside)
        expanded = plan.images * sum(many * -(-rows * self.pitch // 64) for many, rows in inside) / bricks
        columns = smaller(self.pitch, self.stride * out[1])
        taken = plan.images * sum(many * rows for many, rows in inside) / bricks * columns * self.channels_in / 8
        moved = taken + plan.images * plan.height * plan.width * own * (1 + self.residual)
        others = (plan.split - 1) / plan.split + where(plan.groups > 1, _OWN_SUMS, 0)
        sums = plan.tiles * self.octets_out * plan.warps * plan.groups * 512 * others
        waits = larger(plan.chunk // 16, -(-expanded // (plan.warps // 4)))  # for products, of a chunk
        products = expanded * self.steps_in * octets + plan.tiles * plan.warps / 4 * self.octets_out * plan.chunk / 16
        depthwise = octets * plan.tiles * plan.warps
        weights = self.expand_bytes + self.project_bytes - _OVERLAPPED_BYTES * (products + depthwise)
        chunks = each * self.own_chunks * plan.groups
        return {
            "product": chunks * products,
            "depthwise_tile": where(plan.halves, 0, chunks * depthwise),
            "depthwise_octet": where(plan.halves, 0, chunks * octets * plan.warps),
            "half_load": where(plan.halves, chunks * octets * plan.warps * self.half_loads, 0),
            "weights": chunks * larger(0.0, weights),
            "sums": each * sums,
            "chunk": each * moved,
            "chunk_bare": rounds * moved,
            "step_in_turn": whole * self.own_chunks * waits,
            "hidden_in_turn": whole * self.own_chunks,
            "sums_in_turn": whole * plan.tiles * self.octets_out,
            "load_in_turn": whole * taken / (plan.warps * plan.groups),
            "round": where(plan.ahead, 1, rounds),
            "round_ahead": where(plan.ahead, rounds - 1, 0),
            "round_bare": rounds / beside,
            "launch": 1,
            "launch_in_order": where(plan.early, 0, 1),
        }


def unsuited(description: Description) -> str | None:
    """Why a sequence is no inverted residual that this kernel computes; None if it is one."""
    why = inverted_residual.unsuited(description)
    if why:
        return why
    if len(description.sequence.layers) != 3:
        return "without an expansion there is little to multiply"
    octets = description.sequence.channels(3) // 8
    if octets % -(-octets // _MOST_OCTETS):
        return f"{8 * octets} channels do not split into products of one size"
    return None


def halves_unsuited(description: Description) -> str | None:
    """Why hidden channels cannot be held and summed in fp16, which ends at 65504; None where they can.

    In a model of fp16 too: others keep the sum of nine taps in fp32, which comes back from beyond.
    """
    if any(one.activation != "relu6" for one in description.sequence.layers[:2]):
        return "halves hold and sum hidden channels in fp16: both activations must be relu6"
    return None


def lost_in_halves(parameters: List[Parameters]) -> str | None:
    """What fp16 loses of an inverted residual's weights, as they are, that bf16 would hold; None where it holds them.

    What stands behind ReLU6 is at most 6, so the largest sum of a depthwise is known; that of a matrix product is fp32.
    """
    _, depthwise, projection = parameters
    for what, weight in (("depthwise", depthwise.weight), ("projection", projection.weight)):
        lost = float((weight.half().float() - weight.float()).norm() / weight.float().norm().clamp_min(_LEAST))
        if not lost <= _ROUNDING:
            return f"its {what}'s are {lost:.2g} off in fp16"
    sums = 6 * depthwise.weight.float().abs().flatten(1).sum(1)
    largest = float((sums if depthwise.bias is None else sums + depthwise.bias.float().abs()).max())
    return None if largest <= _LARGEST else f"its depthwise may sum up to {largest:.3g}, and fp16 ends at {_LARGEST:g}"


def inverted_residual_warpgroup(description: Description, plan: Plan) -> Kernel:
    """The kernel of an inverted residual; with ``halves`` it packs no weights that fp16 loses (``KernelError``).

    Raises:
        ValueError: the sequence is none, or the plan does not fit together.
    """
    why = unsuited(description)
    if why:
        raise ValueError(f"{description} cannot be merged as an inverted residual: {why}")
    geometry = _geometry(description, plan)
    if plan.chunk % 16 or not 16 <= plan.chunk <= 8 * _MOST_OCTETS:
        raise ValueError(f"chunks of {plan.chunk} hidden channels: give a multiple of 16, at most {8 * _MOST_OCTETS}")
    if not 1 <= plan.split <= _MOST_SPLIT or plan.chunk * (plan.split - 1) >= geometry.hidden:
        raise ValueError(
            f"{geometry.hidden} hidden channels over {plan.split} blocks: there are 1 to {_MOST_SPLIT}, each a chunk"
        )
    if not 1 <= plan.groups <= _MOST_GROUPS or plan.chunk * (geometry.shares - 1) >= geometry.hidden:
        raise ValueError(
            f"{geometry.hidden} hidden channels for {plan.groups} groups: a block has 1 to {_MOST_GROUPS}, each a chunk"
        )
    if plan.warps * plan.groups > 32 or geometry.turns > 16:
        raise ValueError(f"{plan.warps * plan.groups} warps, {geometry.turns} tiles to expand in turn: at most 32, 16")
    unbounded = None if not plan.halves else halves_unsuited(description)
    if unbounded:
        raise ValueError(unbounded)
    if plan.ahead and (geometry.shares > 1 or geometry.staged > 2 * geometry.steps_in * geometry.plane_pixels * 16):
        raise ValueError("inputs are brought ahead where one block makes a brick and the output has room in its place")
    name = f"inverted_residual_{description}_{_name(geometry)}"

    return Kernel(
        name,
        description,
        _source(name, description, geometry),
        plan.warps * plan.groups * 32,
        geometry.shared,
        (plan.height, plan.width),
        partial(_pack, name, geometry, description.dtype),
        persistent=plan.resident if plan.ahead else None,
        least=90,
        only=90,
        parts=plan.split,
        cluster=plan.split,
        images=plan.images,
        early=plan.early,
        counts=partial(counts_by_output, geometry, description),
    )


def candidates(description: Description, size: Shape, batch: int, device: Device, limit: int = 12) -> list[Plan]:
    """Plans worth a trial for inputs of ``size``, the most promising first.

    Raises:
        ValueError: the sequence is no inverted residual that this kernel computes.
    """
    why = unsuited(description)
    if why:
        raise ValueError(f"{description} cannot be merged as an inverted residual: {why}")
    out = description.sequence.sizes(size)[-1]

    def made(sizes: Mapping[str, Any]) -> _Geometry:
        return _geometry(description, Plan(**sizes))

    ranked = cheapest_of(
        "inverted_residual_warpgroup",
        for_residents(_shared_cuts(description, out, batch, device), made, (out, batch, device), _SPARED),
        made,
        lambda geometry: geometry.counts(out, batch, device),
        limit,
        lambda geometry: geometry.kind,
    )
    # Of 16 plans that were measured both ways, all were faster launched early, by 0.45 to 0.87 µs.
    return [replace(one.plan, early=_few_blocks(one.plan, out, batch, device)) for one in ranked]


def _all_plans(description: Description, out: Shape, batch: int) -> Iterator[Columns]:
    """Every way to cut whose blocks have few warps enough."""
    hidden = description.sequence.layers[1].out_channels

    def suits(rows: Columns) -> Any:
        images, split = rows["images"], rows["split"]
        # Several images are whole ones; clusters of any size may come out even with the multiprocessors.
        several = (images <= batch) & (rows["height"] == out[0]) & (rows["width"] == out[1])
        divides = where(images == 1, _MOST_SPLIT % split == 0, several) & (rows["chunk"] * (split - 1) < hidden)
        geometry = _geometry(description, Plan(**rows))
        return divides & (geometry.plan.warps >= 4) & (geometry.plan.warps <= 16) & (geometry.turns <= 8)

    more = {"chunk": (32, 48, 64, 96), "images": (1, 2, 3, 4), "split": range(1, _MOST_SPLIT + 1)}
    return kept(crossed(_all_bricks(out), **more), suits)


def _all_bricks(out: Shape) -> Iterator[Columns]:
    """Those of which half the positions of their tiles are wanted, narrow ones where they have fewer."""
    widths = sorted({-(-out[1] // n) for n in range(1, 9)} & set(range(4, 65)))
    heights = sorted({-(-out[0] // n) for n in range(1, 15)} & set(range(2, 33)))

    def suits(rows: Columns) -> Any:
        brick = Plan(**rows)
        made = _positions(brick)
        better = ~rows["narrow"] | (made < _positions(replace(brick, narrow=False)))
        return better & (2 * brick.height * brick.width > made)

    return kept(combined(width=widths, height=heights, narrow=(False, True), tiles=(1, 2, 4)), suits)


def _shared_cuts(description: Description, out: Shape, batch: int, device: Device) -> Iterator[Columns]:
    """The same with inputs that are brought ahead, the depthwise of both kinds, and in groups where blocks are few."""
    hidden = description.sequence.layers[1].out_channels
    ways = (False,) if halves_unsuited(description) else (False, True)

    def suits(rows: Columns) -> Any:
        geometry = _geometry(description, Plan(**rows))
        plan = geometry.plan
        room = geometry.staged <= 2 * geometry.steps_in * geometry.plane_pixels * 16
        may_bring = (plan.split == 1) & room
        most = where(_few_blocks(plan, out, batch, device) & ~plan.ahead, smaller(_MOST_GROUPS, 16 // plan.warps), 1)
        return (~plan.ahead | may_bring) & (plan.groups <= most) & (plan.chunk * (geometry.shares - 1) < hidden)

    groups = range(1, _MOST_GROUPS + 1)
    cuts = crossed(_all_plans(description, out, batch), ahead=(False, True), groups=groups, halves=ways)
    return kept(cuts, suits)


def _few_blocks(plan: Plan, out: Shape, batch: int, device: Device) -> bool:
    """Whether beginning and end of the blocks are a large part of the time."""
    return plan.bricks(out, batch) * plan.split <= 2 * device.multiprocessors


def _positions(plan: Plan) -> int:
    """Of a brick that tiles make, whether they are wanted or not."""
    band = plan.tiles * plan.tile[0]
    return plan.strips * plan.tile[1] * -(-plan.height // band) * band


def _geometry(description: Description, plan: Plan) -> _Geometry:
    _, depthwise, projection = description.sequence.layers
    return _Geometry(
        description.sequence.channels(0),
        depthwise.out_channels,
        projection.out_channels,
        depthwise.stride[0],
        projection.residual is not None,
        plan,
    )


def _name(geometry: _Geometry) -> str:
    plan = geometry.plan
    form = "n" if plan.narrow else "w"
    return (
        f"wg_s{geometry.stride}_{plan.height}x{plan.width}{form}_t{plan.tiles}_c{plan.chunk}"
        f"_i{plan.images}_p{plan.split}_r{plan.resident}{'_a' if plan.ahead else ''}"
        f"{f'_g{plan.groups}' if plan.groups > 1 else ''}{'_h' if plan.halves else ''}{'_e' if plan.early else ''}"
    )


def _source(name: str, description: Description, geometry: _Geometry) -> str:
    plan, octets = geometry.plan, geometry.octets_out
    chunks = geometry.chunks
    constants = {
        "CHANNELS_IN": geometry.channels_in,
        "CHUNK": plan.chunk,
        "OWN_CHUNKS": geometry.own_chunks,
        "CHANNELS_OUT": geometry.channels_out,
        "STRIDE": geometry.stride,
        "BRICK_HEIGHT": plan.height,
        "BRICK_WIDTH": plan.width,
        "TILES": plan.tiles,
        "IMAGES": plan.images,
        "SPLIT": plan.split,
        "GROUPS": plan.groups,
        "THREADS": plan.warps * plan.groups * 32,
        "PLANE_PIXELS": geometry.plane_pixels,
        "HIDDEN_PIXELS": geometry.hidden_pixels,
        "OUT_PLANE_PIXELS": geometry.out_pixels,
        "INPUT_AT": _HEAD,
        "HIDDEN_AT": geometry.hidden_at,
        "EXPAND_AT": 0,
        "PROJECT_AT": chunks * geometry.expand_bytes,
        "PROJECT_BIAS_AT": chunks * (geometry.expand_bytes + geometry.project_bytes),
    }
    flags = {
        "RESIDUAL": geometry.residual,
        "NARROW": plan.narrow,
        "AHEAD": plan.ahead,
        "HALVES": plan.halves,
        "EARLY": plan.early,
    }
    hidden: Format = "fp16" if plan.halves else description.format
    products = [8 * (octets // -(-octets // _MOST_OCTETS))]
    stages = zip(("EXPAND", "DEPTHWISE", "PROJECT"), description.sequence.layers, strict=True)
    launch = f"{name}, THREADS, {plan.resident}"
    head = f"KERNEL({launch}" if plan.split == 1 else f"KERNEL_CLUSTER({launch}, SPLIT"
    return "\n".join(
        [
            f"using Element = {description.format};\nusing Hidden = {hidden};",
            *(f"constexpr int {key} = {value};" for key, value in constants.items()),
            *(f"constexpr bool {key} = {str(value).lower()};" for key, value in flags.items()),
            vocabulary(description.format, products, [plan.chunk], registers_format=hidden),
            f"#ifdef EMULATED\nconstexpr int CLUSTER = SPLIT;\n{device_text('cluster_emulation.hpp')}#else",
            f"{device_text('cluster.cuh')}#endif",
            device_text("octets.cuh"),
            device_text("halves.cuh"),
            *(f"constexpr Activation {stage}_ACTIVATION = {one.activation.upper()};" for stage, one in stages),
            device_text("inverted_residual_warpgroup.cuh"),
            f"{head}) {{ inverted_residual(a); }}",
            "",
        ]
    )


def _pack(name: str, geometry: _Geometry, dtype: torch.dtype, parameters: List[Parameters]) -> Tensor:
    """The layers' weights for a kernel of this name.

    Raises:
        KernelError: fp16, in which it adds up its depthwise, loses them.
    """
    lost = lost_in_halves(parameters) if geometry.plan.halves else None
    if lost:
        raise KernelError(f"{name} does not suit these weights: {lost}")
    return _arranged(geometry, dtype, parameters)


def _arranged(geometry: _Geometry, dtype: torch.dtype, parameters: List[Parameters]) -> Tensor:
    """Chunk after chunk what each copy brings: matrices as [octet of inputs][output][8 inputs]."""
    expansion, depthwise, projection = parameters
    chunk = geometry.plan.chunk
    hidden = geometry.chunks * chunk

    def matrix(weight: Tensor, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        whole = weight.new_zeros(outputs, inputs, dtype=dtype)
        whole[: weight.shape[0], : weight.shape[1]] = weight[:, :, 0, 0].to(dtype)
        return whole

    expand = matrix(expansion.weight, hidden, 16 * geometry.steps_in, dtype).unflatten(1, (-1, 8))
    expand = expand.unflatten(0, (-1, chunk)).transpose(1, 2)
    if geometry.plan.halves:
        given = matrix(projection.weight, geometry.channels_out, hidden, torch.float16)[:, neighbours_of_16(hidden)]
        behind = [half_taps(depthwise, hidden)]
    else:
        given = matrix(projection.weight, geometry.channels_out, hidden, dtype)
        behind = [diagonal_taps(depthwise.weight[:, 0].to(dtype), hidden), sum_bytes(depthwise, hidden)]
    project = given.unflatten(1, (-1, 8)).unflatten(1, (-1, chunk // 8))  # [outputs, chunks, octets, 8]

    def rows(part: Tensor) -> Tensor:
        """A row of bytes for each chunk."""
        return as_bytes(part).view(geometry.chunks, -1)

    return torch.cat(
        [
            torch.cat([rows(expand), rows(sum_bytes(expansion, hidden))], 1).flatten(),
            torch.cat([rows(project.permute(1, 2, 0, 3)), *map(rows, behind)], 1).flatten(),
            sum_bytes(projection, -(-geometry.channels_out // 2) * 2),
        ]
    )
