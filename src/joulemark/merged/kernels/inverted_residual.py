"""Inverted residuals: 1×1 expansion, depthwise 3×3 of stride 1 or 2, 1×1 projection, in one kernel.

Where the expansion is missing (the first block of MobileNetV2) the depthwise reads the input itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels.compile import device_text
from joulemark.merged.kernels.description import Description
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.lane_weights import as_bytes, bias_bytes, diagonal_taps, product_fragments
from joulemark.merged.kernels.kernel import Kernel
from joulemark.merged.sequence import Conv, Shape

CHUNK = 32  # hidden channels at a time
_ACTIVATIONS = ("none", "relu", "relu6", "silu")
_ALIGNMENT = 16


@dataclass(frozen=True)
class Sizes:
    """How an inverted residual is cut.

    Args:
        height: of a brick of the output.
        width: of a brick of the output.
        tiles: of 16 positions, one above the other, that a warp computes.
        groups: of warps, which take the chunks of hidden channels in turns.
        buffers: 2 lets a warp expand the next chunk while others still read the last one; 1 takes less shared memory.
        resident: blocks of a multiprocessor that registers must suffice for.
        narrow: a tile is 8 positions in each of two rows, not 16 in one.
        together: tiles of pixels that share each load of the expansion's weights.
        parts: blocks that share a brick: each makes a part of the output's channels.
    """

    height: int
    width: int
    tiles: int
    groups: int = 1
    buffers: int = 2
    resident: int = 1
    narrow: bool = False
    together: int = 1
    parts: int = 1

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


@dataclass(frozen=True)
class _Geometry:
    """What follows from the layers and the sizes; the kernel's text derives the same from the same constants."""

    channels_in: int
    hidden: int
    channels_out: int
    stride: int
    expands: bool
    residual: bool
    sizes: Sizes

    @property
    def chunks(self) -> int:
        return -(-self.hidden // CHUNK)

    @property
    def steps_in(self) -> int:
        return -(-self.channels_in // 16) if self.expands else 2 * self.chunks

    @property
    def pitch(self) -> int:
        return self.stride * (self.sizes.width + 2 // self.stride)

    @property
    def pixel_tiles(self) -> int:
        return -(-(self.stride * (self.sizes.height - 1) + 3) * self.pitch // 16)

    @property
    def turns(self) -> int:
        """Tiles of pixels that a warp expands."""
        return -(-self.pixel_tiles // self.sizes.warps)

    @property
    def plane_pixels(self) -> int:
        # Copies of the neighbouring octets of a pixel fall on different banks.
        return self.pixel_tiles * 16 + (8 // min(8, 2 * self.steps_in) if self.steps_in < 4 else 1)

    @property
    def out_pixels(self) -> int:
        return self.sizes.strips * self.sizes.tile[1] * self.sizes.height + 1

    @property
    def slack(self) -> int:
        """Pixels behind the last octet that tiles with columns to spare read (and do not use)."""
        sizes, step = self.sizes, self.stride * self.sizes.tile[0]
        rows = step * (sizes.tiles - 1) + 3
        second = self.stride * self.pitch if sizes.narrow else 8
        third = 1 if self.stride == 2 else 2
        corner = (sizes.height - sizes.tiles * sizes.tile[0]) * self.stride * self.pitch
        last = corner + (sizes.strips - 1) * sizes.tile[1] + 7 + second + third + ((rows - 1) // 2 * 2 + 1) * self.pitch
        return max(0, last + 1 - self.plane_pixels)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        plane, sizes = self.plane_pixels * 16, self.sizes
        octets_out = self.channels_out // 8 // sizes.parts
        given = 2 * self.steps_in * plane
        hidden = sizes.groups * sizes.buffers * 4 * plane if self.expands else 0
        sums = sizes.warps * sizes.tiles * octets_out * 512 if sizes.groups > 1 else 0
        staged = 0 if self.residual else octets_out * self.out_pixels * 16  # a residual's lies in the input's place
        return max(given + max(hidden, sums) + self.slack * 16, staged)

    def resident(self, device: Device) -> int:
        """Blocks of a multiprocessor that shared memory and registers suffice for; 0 where none fits."""
        sizes = self.sizes
        wanted = 72 + 12 * sizes.tiles + sizes.tiles * self.channels_out // 2 // sizes.parts  # registers, about
        threads = sizes.warps * sizes.groups * 32
        if wanted > 255 or threads * wanted > device.registers or self.shared > device.block_shared:
            return 0
        by_registers = device.registers // (threads * (-(-wanted // 8) * 8))
        return max(1, min(by_registers, device.shared // (self.shared + 1024), 8))

    def cycles(self, out: Shape, batch: int, device: Device) -> float:
        """Roughly the cycles of the multiprocessor with most blocks: for ranking, not for prediction."""
        sizes, octets = self.sizes, self.channels_out // 8 // self.sizes.parts
        product = 1.6  # cycles of a multiprocessor for one product of a warp on the tensor cores by mma.sync
        steps = self.steps_in if self.expands else 0
        taps = self.stride * sizes.tile[0] * (sizes.tiles - 1) + 3
        expand = max(4 * steps * product, (5 * steps + 45) / 4, 4 * steps + 16) if self.expands else 0
        loads = 24 * taps / sizes.tiles
        project = max((24 + 2 * octets) * product, (80 + 2 * octets) / 4, loads + (64 + 8 * octets) / sizes.tiles)
        tiles = sizes.strips * sizes.height // sizes.tile[0]
        block = self.chunks * (self.turns * sizes.warps * expand + tiles * project) + 1500
        blocks = batch * sizes.parts * -(-out[0] // sizes.height) * -(-out[1] // sizes.width)
        warps = sizes.warps * sizes.groups * min(sizes.resident, -(-blocks // device.multiprocessors))
        return -(-blocks // device.multiprocessors) * block / min(1.0, math.sqrt(warps / 14))


def unsupported(description: Description) -> str | None:
    """Why a sequence is no inverted residual that this kernel computes; None if it is one."""
    layers = description.sequence.layers
    if description.format not in ("bf16", "fp16"):
        return f"no inverted residual in {description.format}"
    if description.sequence.dimensions != 2 or len(layers) not in (2, 3) or description.adds:
        return "an inverted residual has two or three layers in two dimensions"
    *expansion, depthwise, projection = layers
    if any(one.activation not in _ACTIVATIONS for one in layers):
        return f"activations are {', '.join(_ACTIVATIONS)}"
    if not _is_depthwise(depthwise) or not all(_is_pointwise(one) for one in (*expansion, projection)):
        return "an inverted residual is 1×1, depthwise 3×3 (stride 1 or 2, padding 1), 1×1"
    if any(one.residual is not None for one in layers[:-1]) or projection.residual not in (None, 0):
        return "only the projection adds, and only the sequence's input"
    if any(description.sequence.channels(n) % 8 for n in (0, len(layers))):
        return "channels of input and output must be multiples of 8"
    return None


def _is_pointwise(layer: Conv) -> bool:
    return (layer.kernel, layer.stride, layer.padding, layer.groups) == ((1, 1), (1, 1), (0, 0), 1)


def _is_depthwise(layer: Conv) -> bool:
    shape = layer.kernel, layer.padding, layer.dilation
    return (
        shape == ((3, 3), (1, 1), (1, 1))
        and layer.stride in ((1, 1), (2, 2))
        and layer.groups == layer.in_channels == layer.out_channels
    )


def inverted_residual(description: Description, sizes: Sizes) -> Kernel:
    """The kernel of an inverted residual.

    Raises:
        ValueError: the sequence is none, or the sizes do not fit together.
    """
    why = unsupported(description)
    if why:
        raise ValueError(f"{description} cannot be merged as an inverted residual: {why}")
    geometry = _geometry(description, sizes)
    *expansion, depthwise, projection = description.sequence.layers
    if sizes.strips * sizes.height % (sizes.tiles * sizes.tile[0]) or sizes.height % (sizes.tiles * sizes.tile[0]):
        raise ValueError(f"a brick of {sizes.height} rows is no whole number of {sizes.tiles} tiles of {sizes.tile[0]}")
    if sizes.parts > 1 and geometry.channels_out % (16 * sizes.parts):
        raise ValueError(f"{geometry.channels_out} channels do not split into {sizes.parts} parts of a multiple of 16")
    if sizes.warps * sizes.groups > 32:
        raise ValueError(f"{sizes.warps * sizes.groups} warps: a block has at most 32")
    offsets, _ = _layout(geometry)
    name = f"inverted_residual_{description}_{_name(geometry)}"
    constants = {
        "CHANNELS_IN": geometry.channels_in,
        "CHUNKS": geometry.chunks,
        "CHANNELS_OUT": geometry.channels_out,
        "STRIDE": geometry.stride,
        "BRICK_HEIGHT": sizes.height,
        "BRICK_WIDTH": sizes.width,
        "TILES": sizes.tiles,
        "GROUPS": sizes.groups,
        "BUFFERS": sizes.buffers,
        "TOGETHER": sizes.together,
        "PARTS": sizes.parts,
        "KEPT_STEPS": 4,
        "THREADS": sizes.warps * sizes.groups * 32,
        "PLANE_PIXELS": geometry.plane_pixels,
        "OUT_PLANE_PIXELS": geometry.out_pixels,
        **{f"{part.upper()}_AT": offset for part, offset in offsets.items()},
    }
    activations = {
        "EXPAND_ACTIVATION": expansion[0].activation if expansion else "none",
        "DEPTHWISE_ACTIVATION": depthwise.activation,
        "PROJECT_ACTIVATION": projection.activation,
    }
    flags = {"EXPANDS": geometry.expands, "RESIDUAL": geometry.residual, "NARROW": sizes.narrow}
    source = "\n".join(
        [
            f"using Element = {description.format};",
            *(f"constexpr int {key} = {value};" for key, value in constants.items()),
            *(f"constexpr bool {key} = {str(value).lower()};" for key, value in flags.items()),
            device_text("octets.cuh"),
            *(f"constexpr Activation {key} = {value.upper()};" for key, value in activations.items()),
            device_text("inverted_residual.cuh"),
            f"KERNEL({name}, THREADS, {sizes.resident}) {{ inverted_residual(a); }}",
            "",
        ]
    )

    def pack(parameters: List[Parameters]) -> Tensor:
        return _pack(geometry, description.dtype, parameters)

    return Kernel(
        name,
        description,
        source,
        constants["THREADS"],
        geometry.shared,
        (sizes.height, sizes.width),
        pack,
        parts=sizes.parts,
    )


def candidates(description: Description, size: Shape, batch: int, device: Device, limit: int = 12) -> list[Sizes]:
    """Sizes worth a trial for inputs of ``size``, the most promising first.

    They are ranked by a rough count of tensor, issue and shared-memory cycles of the slowest multiprocessor.

    Raises:
        ValueError: the sequence is no inverted residual.
    """
    why = unsupported(description)
    if why:
        raise ValueError(f"{description} cannot be merged as an inverted residual: {why}")
    out = description.sequence.sizes(size)[-1]
    ranked = []
    for sizes in _all_sizes(description, out):
        geometry = _geometry(description, sizes)
        resident = geometry.resident(device)
        if resident:
            fitted = _geometry(description, replace(sizes, resident=resident))
            ranked.append((fitted.cycles(out, batch, device), fitted.sizes))
    ranked.sort(key=lambda one: one[0])
    return [sizes for _, sizes in ranked[:limit]]


def _all_sizes(description: Description, out: Shape) -> Iterator[Sizes]:
    """Every way to cut that the kernel can be generated for."""
    channels = description.sequence.channels(len(description.sequence.layers))
    expands = len(description.sequence.layers) == 3
    widths = sorted({-(-out[1] // n) for n in range(1, 9)} & set(range(4, 65)))
    splits = [n for n in (1, 2, 4) if n == 1 or channels % (16 * n) == 0]
    ways = product(widths, (False, True), (1, 2, 4, 7), (1, 2, 3, 4, 7), (1, 2, 3, 4), (2, 1), splits)
    for width, narrow, tiles, blocks, groups, buffers, parts in ways:
        height = tiles * blocks * (2 if narrow else 1)
        sizes = Sizes(height, width, tiles, groups, buffers, 1, narrow, 1 if tiles > 1 else 2, parts)
        geometry = _geometry(description, sizes)
        useful = height <= out[0] + (1 if narrow else 3) and (expands or (groups == 1 and buffers == 2))
        if useful and 2 <= sizes.warps * groups <= 16 and groups <= geometry.chunks and geometry.turns <= 16:
            yield sizes


def _geometry(description: Description, sizes: Sizes) -> _Geometry:
    *expansion, depthwise, projection = description.sequence.layers
    return _Geometry(
        description.sequence.channels(0),
        depthwise.out_channels,
        projection.out_channels,
        depthwise.stride[0],
        bool(expansion),
        projection.residual is not None,
        sizes,
    )


def _name(geometry: _Geometry) -> str:
    sizes = geometry.sizes
    form = "n" if sizes.narrow else "w"
    return (
        f"s{geometry.stride}_{sizes.height}x{sizes.width}{form}_t{sizes.tiles}_g{sizes.groups}"
        f"_b{sizes.buffers}_r{sizes.resident}_m{sizes.together}_p{sizes.parts}"
    )


def _layout(geometry: _Geometry) -> tuple[dict[str, int], int]:
    """Offsets of the parts of the packed weights, bytes, and their total."""
    chunks, pairs = geometry.chunks, -(-geometry.channels_out // 16)
    parts = {
        "expand": chunks * geometry.steps_in * 1024 if geometry.expands else 0,
        "depthwise": chunks * 4 * 8 * 48,
        "project": chunks * 2 * pairs * 512,
        "expand_bias": chunks * CHUNK * 4,
        "depthwise_bias": chunks * CHUNK * 4,
        "project_bias": pairs * 64,
    }
    offsets, total = {}, 0
    for part, size in parts.items():
        offsets[part] = total
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, total


def _pack(geometry: _Geometry, dtype: torch.dtype, parameters: List[Parameters]) -> Tensor:
    """The layers' weights in the order in which the kernel's lanes read them."""
    *expansion, depthwise, projection = parameters
    hidden = geometry.chunks * CHUNK
    offsets, total = _layout(geometry)
    parts = {
        "depthwise": diagonal_taps(depthwise.weight[:, 0].to(dtype), hidden),
        "project": product_fragments(projection.weight[:, :, 0, 0].to(dtype), hidden, 16),
        "depthwise_bias": bias_bytes(depthwise, hidden),
        "project_bias": bias_bytes(projection, geometry.channels_out),
    }
    if expansion:
        # [chunks, 32 channels, …]: the steps over the input channels of one chunk follow each other.
        weight = expansion[0].weight[:, :, 0, 0].to(dtype)
        whole = weight.new_zeros(hidden, weight.shape[1])
        whole[: weight.shape[0]] = weight
        chunks = [product_fragments(one, 16 * geometry.steps_in, CHUNK) for one in whole.split(CHUNK)]
        parts["expand"] = torch.cat(chunks)
        parts["expand_bias"] = bias_bytes(expansion[0], hidden)
    packed = torch.zeros(total, dtype=torch.uint8, device=depthwise.weight.device)
    for name, part in parts.items():
        packed[offsets[name] : offsets[name] + part.numel()] = as_bytes(part)
    return packed
