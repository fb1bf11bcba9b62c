"""Weights in the order in which the lanes of a warp hold them: the B operands of ``mma.m16n8k16``.

PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": lane 4 n + t holds in register r the rows
2 t + 8 r and 2 t + 8 r + 1 of column n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor."""
    return tensor.contiguous().view(torch.uint8).flatten()


def bias_bytes(layer: Parameters, channels: int) -> Tensor:
    """A layer's bias in fp32, zeros behind it up to ``channels``."""
    whole = torch.zeros(channels, dtype=torch.float32, device=layer.weight.device)
    if layer.bias is not None:
        whole[: layer.bias.numel()] = layer.bias
    return as_bytes(whole)


def sum_bytes(layer: Parameters, channels: int) -> Tensor:
    """A layer's bias as the sums of products begin: each pair of channels twice, for the two pixels of a lane."""
    pairs = bias_bytes(layer, channels).view(torch.float32).view(-1, 1, 2)
    return as_bytes(pairs.expand(-1, 2, 2))


def product_fragments(weight: Tensor, inputs: int, outputs: int) -> Tensor:
    """A matrix for products of depth 16, two octets of outputs to each 16-byte load of a lane.

    Args:
        weight: [outputs', inputs'] in a 16-bit dtype; zeros are added.
        inputs: multiple of 16, at least inputs'.
        outputs: multiple of 16 that the number of outputs is rounded up to.

    Returns:
        Bytes of [inputs / 16][outputs' / 16][32 lanes][2 octets][2 registers][2 rows].
    """
    rounded = -(-weight.shape[0] // outputs) * outputs
    whole = weight.new_zeros(rounded, inputs)
    whole[: weight.shape[0], : weight.shape[1]] = weight
    # [pair, octet, column n, step, register, t, row] → [step, pair, n, t, octet, register, row]
    split = whole.view(rounded // 16, 2, 8, inputs // 16, 2, 4, 2)
    return as_bytes(split.permute(3, 0, 2, 5, 1, 4, 6))


def diagonal_taps(weight: Tensor, channels: int) -> Tensor:
    """Taps of a depthwise convolution as the diagonals of B operands.

    The lane that holds the diagonal of channel c (of an octet) holds it in row c % 2 of its pair; the other is zero.

    Args:
        weight: [channels', k, k] in a 16-bit dtype; zeros are added.
        channels: multiple of 8, at least channels'.

    Returns:
        Bytes of [channels / 8][⌈k²/4⌉][8 channels][4 words]: word k row + column, the last three are zeros.
    """
    taps = weight[0].numel()
    whole = weight.new_zeros(channels, -(-taps // 4) * 4, 2)
    index = torch.arange(weight.shape[0], device=weight.device)
    whole[index, :taps, index % 2] = weight.flatten(1)
    return as_bytes(whole.view(-1, 8, whole.shape[1] // 4, 4, 2).transpose(1, 2))


def neighbours(channels: int) -> Tensor:
    """The channel at each place of a product whose lanes hold 8 neighbouring channels of 32.

    Lane t holds in each octet's pair of columns (or register of rows) the next two of its channels 8 t … 8 t + 7: place
    16 k + 8 r + 2 t + e is channel 8 t + 4 k + 2 r + e.
    """
    order = torch.arange(32).view(4, 2, 2, 2).permute(1, 2, 0, 3).flatten()
    return (torch.arange(0, channels, 32)[:, None] + order).flatten()


def neighbours_of_16(channels: int) -> Tensor:
    """The channel at each place of products whose lanes hold 4 neighbouring channels of each 16.

    Lane t holds in each of two octets' pair of columns the next two of its channels 4 t … 4 t + 3: place
    8 r + 2 t + e of 16 is channel 4 t + 2 r + e.
    """
    order = torch.arange(16).view(4, 2, 2).permute(1, 0, 2).flatten()
    return (torch.arange(0, channels, 16)[:, None] + order).flatten()


def half_taps(layer: Parameters, channels: int) -> Tensor:
    """Taps and bias of a depthwise 3×3 in fp16, by fours of channels.

    Args:
        layer: weight [channels', 1, 3, 3].
        channels: multiple of 16, at least channels'; zeros are added.

    Returns:
        Bytes of [channels / 4][10][4 channels]: nine taps by rows, then the bias.
    """
    whole = layer.weight.new_zeros(channels, 10, dtype=torch.float16)
    whole[: layer.weight.shape[0], :9] = layer.weight.flatten(1).half()
    whole[:, 9] = bias_bytes(layer, channels).view(torch.float32).half()
    return as_bytes(whole.view(-1, 4, 10).transpose(1, 2))
