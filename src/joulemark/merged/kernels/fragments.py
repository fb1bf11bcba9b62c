"""Weights in the order in which the lanes of a warp hold them: PTX ISA, "Matrix Fragments for mma.m16n8k16"."""

from __future__ import annotations

import torch
from torch import Tensor

from joulemark.merged.kernels.description import STORED, Format

_LANE = torch.arange(32)
_G, _T = _LANE // 4, _LANE % 4
_TF32_CUT = 13
"""Bits of a float32 that tf32 has not."""


def round_tf32(x: Tensor) -> Tensor:
    """float32 → the nearest tf32 number, as float32; ties away from zero, as ``cvt.rna.tf32.f32``."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + (1 << (_TF32_CUT - 1))) & ~((1 << _TF32_CUT) - 1)).view(torch.float32)


def pad_channels(weight: Tensor, out: int, inner: int) -> Tensor:
    """[out_channels, in_channels, *kernel] with zeros up to [out, inner, *kernel]."""
    padded = weight.new_zeros((out, inner, *weight.shape[2:]))
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded


def step_channels(format_: Format) -> int:
    """Channels in one step of a matrix instruction: 32 bytes."""
    return int(32 // STORED[format_].itemsize)


def column_channels(tiles: int) -> Tensor:
    """Output channel, among a warp's 8 · tiles, of [tile, column]: a lane's columns of all tiles are neighbours."""
    column = torch.arange(8)
    return torch.stack([2 * tiles * (column // 2) + 2 * tile + column % 2 for tile in range(tiles)])


def b_fragments(matrix: Tensor, format_: Format) -> Tensor:
    """The words of B = matrixᵀ for one step.

    Args:
        matrix: float32 [..., 8 columns, channels of a step].

    Returns:
        int32 [..., words, 32 lanes]: 2 words, and for fp32 4: those of the upper parts, then of the rest.
    """
    if format_ == "fp32":
        high = round_tf32(matrix)
        parts = (high, round_tf32(matrix - high))
        return torch.cat([b_fragments(one, "tf32") for one in parts], -2)
    if format_ == "tf32":
        words = [round_tf32(matrix)[..., _G, _T + 4 * half] for half in range(2)]
        return torch.stack(words, -2).contiguous().view(torch.int32)
    halves = [
        torch.stack([matrix[..., _G, 2 * _T + 8 * half + e] for e in range(2)], -1).to(STORED[format_])
        for half in range(2)
    ]
    return torch.stack(halves, -3).contiguous().view(torch.int32)[..., 0]


def a_fragments(matrix: Tensor) -> Tensor:
    """The words of A for one step of 16-bit numbers.

    Args:
        matrix: bf16 or fp16 [..., 16 rows, 16 channels].

    Returns:
        int32 [..., 32 lanes, 4 words].
    """
    words = [
        torch.stack([matrix[..., _G + 8 * (i % 2), 2 * _T + 8 * (i // 2) + e] for e in range(2)], -1) for i in range(4)
    ]
    return torch.stack(words, -2).contiguous().view(torch.int32)[..., 0]


def quads(words: Tensor) -> Tensor:
    """Words [..., words, 32] → bytes in the order [...][word / 4][lane][word % 4], zeros behind the last."""
    padded = words.new_zeros((*words.shape[:-2], -(-words.shape[-2] // 4) * 4, 32))
    padded[..., : words.shape[-2], :] = words
    return padded.view(-1, 4, 32).permute(0, 2, 1).contiguous().flatten().view(torch.uint8)


def pack_rows(weight: Tensor, format_: Format, tiles: int) -> Tensor:
    """Weights of a 3×3 (×3) convolution for ``device/rows.cuh``, as bytes.

    Args:
        weight: float32 [out, in, 3, 3] or [out, in, 3, 3, 3], channels padded to whole steps and tiles.
        tiles: of 8 output channels that a warp makes.
    """
    volume = weight if weight.dim() == 5 else weight[:, :, None]
    step = step_channels(format_)
    out, inner = volume.shape[:2]
    # [split, tile, column, step, channel, plane, row, column of the kernel]
    split = volume.view(out // (8 * tiles), 8 * tiles, inner // step, step, *volume.shape[2:])
    split = split[:, column_channels(tiles)]
    # → [split, plane, step, kernel column (a group), kernel row, tile, column, channel]
    ordered = split.permute(0, 5, 3, 7, 6, 1, 2, 4)
    words = b_fragments(ordered.contiguous(), format_)
    return quads(words.flatten(4, 6))
