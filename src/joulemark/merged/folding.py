"""Folds a batch norm into the convolution before it, so that a format of 16 bits loses little by it.

Errors of activations are random and average out over positions. Those of folded weights and biases are the same
everywhere: a ReLU passes on what is positive, so they move each output's mean, and every later layer moves further. The
batch norm knows the mean that the convolution had; weights are rounded so that the folded one keeps it. Correcting
means without data is known from integers (Nagel et al., *Data-Free Quantization through Weight Equalization and Bias
Correction*, ICCV 2019), where the bias takes the correction; a bias of 16 bits is itself too coarse for that.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

_RIDGE = 0.1
"""Of means from statistics, in parts of the mean square of their factors."""
_MOST_TURNED = 64
"""Weights of an output, or an eighth of them, that may be rounded the other way: about √n are."""
_LEAST = 1e-20
"""Stands for zero where something is divided by."""


def folded(convolution: nn.Module, norm: nn.Module) -> nn.Module:
    """One convolution for both in evaluation mode, computed in fp32 at least and rounded once."""
    dtype = cast(Tensor, convolution.weight).dtype
    wide = torch.promote_types(dtype, torch.float32)
    made: Any = copy.deepcopy(convolution)
    names = ("running_mean", "running_var", "weight", "bias")
    given = (made.weight, made.bias, *(getattr(norm, name) for name in names))
    before, shift, means, variances, scale, offset = (None if one is None else one.detach().to(wide) for one in given)
    fused = fuse_conv_bn_weights(before, shift, means, variances, cast(Any, norm).eps, scale, offset)
    weight, bias = (one.detach() for one in fused)
    if made.bias is None:
        made.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    else:
        made.bias.data = bias.to(dtype)
    if dtype.itemsize == 2:
        level = _mean_inputs(before, shift, made.groups, means)
        made.weight.data = rounded(weight, dtype, level, made.bias.detach().to(wide) - bias)
    else:
        made.weight.data = weight.to(dtype)
    module: nn.Module = made
    return module


def _mean_inputs(weight: Tensor, bias: Tensor | None, groups: int, means: Tensor) -> Tensor:
    """What each weight [outputs, …] was multiplied by in the mean, as the means of the outputs tell.

    The mean of an output is the sum of its weights' times the mean of their channel: a least-squares problem for the
    channels of each group, drawn to one mean for all where outputs are too few to tell them.
    """
    sums = weight.flatten(2).sum(2).unflatten(0, (groups, -1))  # [groups, outputs, channels]
    told = (means if bias is None else means - bias).view(*sums.shape[:2], 1)
    whole = sums.sum(2, keepdim=True)
    common = (whole * told).sum() / (whole * whole).sum().clamp_min(_LEAST)
    left, across = told - common * whole, sums.mT
    few = sums.shape[1] < sums.shape[2]
    square = sums @ across if few else across @ sums
    ridge = (_RIDGE * square.diagonal(dim1=1, dim2=2).mean()).clamp_min(_LEAST)
    square = square + ridge * torch.eye(square.shape[-1], dtype=square.dtype, device=square.device)
    own = across @ torch.linalg.solve(square, left) if few else torch.linalg.solve(square, across @ left)
    level = (common + own).mT.expand_as(sums).flatten(0, 1)
    return level.view(*level.shape, *(1,) * (weight.dim() - 2)).expand_as(weight)


def rounded(weight: Tensor, dtype: torch.dtype, level: Tensor, offset: Tensor) -> Tensor:
    """Weights in a format of 16 bits, rounded so that outputs keep their means.

    Each weight is rounded to nearest; then as many as it takes are rounded the other way, those first that cost least:
    that lie nearest to the middle between two numbers and move the mean most.

    Args:
        weight: [outputs, …], in a wider format.
        dtype: of 16 bits.
        level: what each weight is multiplied by in the mean, of the weights' shape.
        offset: [outputs]; what else moves the means.
    """
    wide, level = weight.flatten(1), level.flatten(1)
    near = wide.to(dtype)
    error = near.to(wide.dtype) - wide
    # Neighbours of a 16-bit number are those of its bits; one more leads away from zero, whatever the sign.
    bits = near.view(torch.int16)
    other = torch.where(wide.abs() > near.to(wide.dtype).abs(), bits + 1, bits - 1).view(dtype)
    step = other.to(wide.dtype) - near.to(wide.dtype)
    drift, moves = (error * level).sum(1, keepdim=True) + offset[:, None], step * level
    usable = (error != 0) & (moves * drift < 0) & other.isfinite()
    price = (step**2 - 2 * step.abs() * error.abs()) / moves.abs().clamp_min(_LEAST)
    most = min(wide.shape[1], max(_MOST_TURNED, wide.shape[1] // 8))
    order = price.masked_fill(~usable, torch.inf).topk(most, dim=1, largest=False).indices
    moved = moves.masked_fill(~usable, 0.0).gather(1, order).cumsum(1)
    turned = (drift + moved).abs().argmin(1, keepdim=True)
    none = drift.abs() <= (drift + moved).abs().amin(1, keepdim=True)
    count = torch.where(none, 0, turned + 1)
    chosen = torch.arange(most, device=wide.device) < count
    return torch.where(torch.zeros_like(usable).scatter(1, order, chosen) & usable, other, near).view_as(weight)
