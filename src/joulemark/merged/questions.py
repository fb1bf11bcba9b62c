"""What a segment is tried on, and what it must give: random input, and its layers one by one in torch's operators."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters, run_plain
from joulemark.merged.graph import Segment
from joulemark.merged.paths import cudnn_tuning

Given = tuple[Tensor, Tensor | None, Tensor | None]
"""Input, what is added, gate."""


def question(segment: Segment, device: torch.device) -> tuple[Given, Tensor]:
    """What a segment is tried on, and what its first and last image must give."""
    x = example(segment, device, segment.parameters[0].weight.dtype)
    added, gate = added_to(segment, x), gate_of(segment, x)
    opened = ends(x) if gate is None else ends(x) * ends(gate)
    return (x, added, gate), run_reference(segment, opened, None if added is None else ends(added))


def ends(tensor: Tensor) -> Tensor:
    """The first and the last image, which lie in the first and last bricks; both of two, the one of one."""
    ends: Tensor = tensor if len(tensor) <= 2 else torch.cat([tensor[:1], tensor[-1:]])
    return ends


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of ``expected``; NaN counts as wrong, it compares false."""
    wanted = expected.to(torch.float64 if expected.dtype == torch.float64 else torch.float32)
    return float((out.to(wanted.dtype) - wanted).norm() / wanted.norm().clamp_min(1e-30))


def run_reference(segment: Segment, x: Tensor, added: Tensor | None) -> Tensor:
    """The segment layer by layer in torch's operators, in float32 where the model's format is narrower."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32

    def widen(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(wide)

    parameters = [Parameters(one.weight.to(wide), widen(one.bias), widen(one.affine)) for one in segment.parameters]
    with torch.no_grad(), cudnn_tuning(False):
        return run_plain(segment.sequence, parameters, x.to(wide), widen(added))


def example(segment: Segment, device: torch.device, dtype: torch.dtype, batch: int | None = None) -> Tensor:
    """Random input of a segment's shape, channels-last, of another batch where one is given."""
    dimensions = segment.sequence.dimensions
    shape = (batch or segment.batch, segment.sequence.channels(0), *segment.size)
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    x = torch.randn(shape, device=device).to(dtype)
    return x.contiguous(memory_format=formats.get(dimensions, torch.contiguous_format))


def added_to(segment: Segment, x: Tensor) -> Tensor | None:
    """What a segment adds at its end for an input, random and channels-last; None where it adds nothing."""
    if segment.adds is None:
        return None
    size = segment.sequence.sizes(segment.size)[-1]
    shape = (x.shape[0], segment.sequence.channels(len(segment.sequence.layers)), *size)
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    memory = formats.get(segment.sequence.dimensions, torch.contiguous_format)
    return torch.randn(shape, device=x.device).to(x.dtype).contiguous(memory_format=memory)


def gate_of(segment: Segment, x: Tensor) -> Tensor | None:
    """The gate of an input, random in [0, 1); None where there is none."""
    if segment.gate is None:
        return None
    return torch.rand((*x.shape[:2], *(1,) * (x.dim() - 2)), device=x.device).to(x.dtype)


def with_ordinary_weights(segment: Segment) -> Segment:
    """The same segment with random weights, which keep an activation's size, random biases and affine parameters."""

    def ordinary(given: Parameters) -> Parameters:
        weight = torch.randn(given.weight.shape, device=given.weight.device) / given.weight[0].numel() ** 0.5
        weight = weight.to(given.weight.dtype)
        like = torch.empty_like(given.weight, requires_grad=False).copy_(weight)  # in its layout
        bias, affine = (None if one is None else torch.randn_like(one) for one in (given.bias, given.affine))
        return Parameters(like, bias, affine)

    return replace(segment, parameters=tuple(ordinary(one) for one in segment.parameters))
