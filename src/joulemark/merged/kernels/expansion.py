"""What kernels share that expand a brick to hidden channels, chunk by chunk, and convolve these depthwise.

Their text is ``device/expansion.cuh``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels.columns import Columns, combined, crossed, kept, larger, where
from joulemark.merged.kernels.description import Description
from joulemark.merged.kernels.lane_weights import as_bytes, diagonal_taps, product_fragments, sum_bytes
from joulemark.merged.kernels.seconds import Counts
from joulemark.merged.kernels.tiling import Tiled
from joulemark.merged.sequence import Conv, Shape

CHUNK = 32  # hidden channels at a time
ACTIVATIONS = ("none", "relu", "relu6", "silu")
KEPT_STEPS = 4  # of the expansion's weights, in registers over a chunk; more would crowd out the sums
_ALIGNMENT = 16


@dataclass(frozen=True)
class Cut(Tiled):
    """How layers that begin with an expansion and a depthwise are cut; the plans of their families.

    Args:
        height: of a brick of the output.
        width: of a brick of the output.
        tiles: of 16 positions, one above the other, that a warp computes.
        groups: of warps, which take the chunks of hidden channels in turns.
        buffers: 2 lets a warp expand the next chunk while others still read the last one; 1 takes less shared memory.
        resident: blocks of a multiprocessor that registers must suffice for.
        narrow: a tile is 8 positions in each of two rows, not 16 in one.
        together: tiles of pixels that share each load of the expansion's weights.
        parts: blocks that share a brick; each family says what of it they share.
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

    def bricks(self, out: Shape, batch: int) -> int:
        """Of an output of spatial size ``out``."""
        return batch * -(-out[0] // self.height) * -(-out[1] // self.width)


def bricks_in(out: Shape, widths: Iterable[int]) -> Iterator[Columns]:
    """Sizes of bricks of whole tiles that hang over an output by a few rows at most.

    Args:
        out: spatial size of the output.
        widths: of bricks.
    """

    def bricks() -> Iterator[Columns]:
        for rows in combined(width=widths, narrow=(False, True), tiles=(1, 2, 4, 7), blocks=(1, 2, 3, 4, 7)):
            height = rows["tiles"] * rows.pop("blocks") * where(rows["narrow"], 2, 1)
            yield {"height": height, **rows}

    return kept(bricks(), lambda rows: rows["height"] <= out[0] + where(rows["narrow"], 1, 3))


def sharing(blocks: Iterable[Columns], many: bool) -> Iterator[Columns]:
    """Plans whose tiles of pixels share weights of the expansion.

    Args:
        blocks: plans without ``together``.
        many: weights that do not stay in registers; those that do are shared as far as registers admit.
    """
    if many:
        yield from crossed(blocks, together=(1, 2, 3))
        return
    for rows in blocks:
        yield {**rows, "together": where(rows["tiles"] > 1, 1, 2)}


class Expanding:
    """What follows from the layers and the plan; the kernels' text derives the same from the same constants.

    Geometries inherit it; ``window`` is taps per dimension of the depthwise, ``expands`` whether there is an expansion,
    ``silus`` which of the two end in a SiLU.
    """

    channels_in: int
    hidden: int
    stride: int
    window: int
    expands: bool
    silus: tuple[bool, bool]
    plan: Cut

    @cached_property
    def chunks(self) -> int:
        """Of hidden channels."""
        return -(-self.hidden // CHUNK)

    @cached_property
    def steps_in(self) -> int:
        """Of 16 input channels."""
        return -(-self.channels_in // 16) if self.expands else 2 * self.chunks

    @cached_property
    def pitch(self) -> int:
        """Pixels of a row of the brick's input."""
        return self.stride * (self.plan.width + (self.window - 1) // self.stride)

    @cached_property
    def pixel_tiles(self) -> int:
        """Tiles of 16 pixels of the brick's input."""
        return -(-(self.stride * (self.plan.height - 1) + self.window) * self.pitch // 16)

    @cached_property
    def turns(self) -> int:
        """Tiles of pixels that a warp expands."""
        return -(-self.pixel_tiles // self.plan.warps)

    @cached_property
    def plane_pixels(self) -> int:
        """Pixels that an octet has room for."""
        # Copies of the neighbouring octets of a pixel fall on different banks.
        return self.pixel_tiles * 16 + (8 // min(8, 2 * self.steps_in) if self.steps_in < 4 else 1)

    @cached_property
    def slack(self) -> int:
        """Pixels behind the last octet that tiles with columns to spare read (and do not use)."""
        plan, step = self.plan, self.stride * self.plan.tile[0]
        rows = step * (plan.tiles - 1) + self.window
        second = where(plan.narrow, self.stride * self.pitch, 8)
        last_tap = (self.window - 1) // self.stride
        corner = (plan.height - plan.tiles * plan.tile[0]) * self.stride * self.pitch
        last = corner + (plan.strips - 1) * plan.tile[1] + 7 + second + last_tap
        last += ((rows - 1) // 2 * 2 + 1) * self.pitch
        return larger(0, last + 1 - self.plane_pixels)

    @property
    def input_bytes(self) -> int:
        """Of shared memory, for a brick's input."""
        return 2 * self.steps_in * self.plane_pixels * 16

    @cached_property
    def hidden_bytes(self) -> int:
        """Of shared memory, for the chunks that all groups are at."""
        return self.plan.groups * self.plan.buffers * 4 * self.plane_pixels * 16 if self.expands else 0

    @cached_property
    def tap_products(self) -> int:
        """Matrix products of a tile and 8 hidden channels in the depthwise."""
        return self.window * (self.window // 2) + -(-self.window // 2)

    @cached_property
    def stage_weight_bytes(self) -> int:
        """Of a chunk's weights of both stages, as a block reads them."""
        return (self.steps_in * 1024 if self.expands else 0) + 4 * 8 * 16 * -(-(self.window**2) // 4)

    def stage_counts(self, each: int, rounds: int, chunks: int, share: float = 1.0) -> Counts:
        """What expansion and depthwise count (:mod:`~.seconds`); a product of 3×3 taps is the unit of the depthwise.

        Args:
            each: blocks of the busiest multiprocessor.
            rounds: of them, one after another, the last one whole.
            chunks: that a block takes.
            share: of the tiles of pixels that is expanded.
        """
        plan = self.plan
        tiles, taps = plan.strips * plan.height // plan.tile[0], self.tap_products / 5
        expanded = share * chunks * self.turns * plan.warps if self.expands else 0
        own = -(-chunks // plan.groups)  # chunks of a warp
        steps = share * own * -(-self.turns // plan.together) * (self.steps_in + 1) if self.expands else 0
        again = 1 if self.steps_in <= KEPT_STEPS else -(-self.turns // plan.together)
        loads = 2 * self.steps_in * again * plan.warps if self.expands else 0  # of a chunk's weights of the expansion
        turns = share * self.turns if self.expands else 0
        return {
            "expand_product": each * expanded * 4 * self.steps_in,
            "expand_tile": each * expanded,
            "depthwise_tile": each * chunks * 4 * tiles * taps,
            "depthwise_octet": each * chunks * 4 * plan.warps * taps,
            "weight_load": each * chunks * loads,
            "expand_step": rounds * steps,
            "octet_in_turn": rounds * own * 4 * taps,
            "silu_in_turn": rounds * own * (turns * self.silus[0] + plan.tiles * self.silus[1]),
            "load_in_turn": rounds * self.pixel_tiles * 2 * self.channels_in / (plan.warps * plan.groups),
        }

    @property
    def stage_constants(self) -> dict[str, int]:
        """In front of ``expansion.cuh``."""
        plan = self.plan
        return {
            "CHANNELS_IN": self.channels_in,
            "CHUNKS": self.chunks,
            "STRIDE": self.stride,
            "WINDOW": self.window,
            "BRICK_HEIGHT": plan.height,
            "BRICK_WIDTH": plan.width,
            "TILES": plan.tiles,
            "GROUPS": plan.groups,
            "BUFFERS": plan.buffers,
            "TOGETHER": plan.together,
            "PARTS": plan.parts,
            "KEPT_STEPS": KEPT_STEPS,
            "THREADS": plan.warps * plan.groups * 32,
            "PLANE_PIXELS": self.plane_pixels,
        }

    @property
    def stage_sizes(self) -> dict[str, int]:
        """Bytes of the parts of the packed weights."""
        return {
            "expand": self.chunks * self.steps_in * 1024 if self.expands else 0,
            "depthwise": self.chunks * 4 * 8 * 16 * -(-(self.window**2) // 4),
            "expand_bias": self.chunks * CHUNK * 8,
            "depthwise_bias": self.chunks * CHUNK * 8,
        }

    def stage_weights(
        self, dtype: torch.dtype, expansion: Parameters | None, depthwise: Parameters
    ) -> dict[str, Tensor]:
        """The parts of the packed weights in the order in which the kernel's lanes read them."""
        hidden = self.chunks * CHUNK
        parts = {
            "depthwise": diagonal_taps(depthwise.weight[:, 0].to(dtype), hidden),
            "depthwise_bias": sum_bytes(depthwise, hidden),
        }
        if expansion is not None:
            # [chunks, 32 channels, …]: the steps over the input channels of one chunk follow each other.
            weight = expansion.weight[:, :, 0, 0].to(dtype)
            whole = weight.new_zeros(hidden, weight.shape[1])
            whole[: weight.shape[0]] = weight
            chunks = [product_fragments(one, 16 * self.steps_in, CHUNK) for one in whole.split(CHUNK)]
            parts["expand"] = torch.cat(chunks)
            parts["expand_bias"] = sum_bytes(expansion, hidden)
        return parts


def offsets_of(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where each part of packed weights begins, bytes, and their total."""
    offsets, total = {}, 0
    for part, size in sizes.items():
        offsets[part] = total
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, total


def packed(sizes: Mapping[str, int], parts: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """The parts of weights, each at its offset."""
    offsets, total = offsets_of(sizes)
    whole = torch.zeros(total, dtype=torch.uint8, device=device)
    for name, part in parts.items():
        whole[offsets[name] : offsets[name] + part.numel()] = as_bytes(part)
    return whole


def constants_text(description: Description, constants: Mapping[str, int], flags: Mapping[str, bool]) -> str:
    """The constants in front of a kernel's text."""
    lines = [
        f"using Element = {description.format};",
        *(f"constexpr int {key} = {value};" for key, value in constants.items()),
        *(f"constexpr bool {key} = {str(value).lower()};" for key, value in flags.items()),
    ]
    return "\n".join(lines)


def is_depthwise(layer: Conv, windows: tuple[int, ...]) -> bool:
    """Whether a layer of two dimensions is a depthwise convolution of stride 1 or 2 that keeps its borders."""
    window = layer.kernel[0]
    shape = layer.kernel, layer.padding, layer.dilation
    return (
        window in windows
        and shape == ((window,) * 2, (window // 2,) * 2, (1, 1))
        and layer.stride in ((1, 1), (2, 2))
        and layer.groups == layer.in_channels == layer.out_channels
    )
