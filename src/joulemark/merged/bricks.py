"""The schedules of merged execution with torch's own operators: slow, for any device, the reference of every kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from joulemark.merged.partition import Box, bricks_of, reach, regions, schedule
from joulemark.merged.sequence import LEAKY_SLOPE, Activation, Conv, Sequence, Shape

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "gelu": F.gelu,
    "leaky": lambda x: F.leaky_relu(x, LEAKY_SLOPE),
    "hardswish": F.hardswish,
}


@dataclass(frozen=True)
class Parameters:
    """Weights of one layer.

    Args:
        weight: [out_channels, in_channels / groups, *kernel].
        bias: [out_channels], or None.
        affine: [2, out_channels], scale and shift of its norm; None where it has none.
    """

    weight: Tensor
    bias: Tensor | None
    affine: Tensor | None = None


def run_plain(sequence: Sequence, parameters: list[Parameters], x: Tensor, added: Tensor | None = None) -> Tensor:
    """Layer by layer, no bricks: what every other schedule must equal.

    Args:
        x: [batch, channels, *size].
        added: in the last layer, of the output's shape; None adds nothing.
    """
    tensors = [x]
    for number, (layer, given) in enumerate(zip(sequence.layers, parameters, strict=True), 1):
        x = tensors[-1] if layer.joined is None else torch.cat([tensors[-1], tensors[layer.joined]], 1)
        y = CONVOLUTIONS[sequence.dimensions](
            x, given.weight, given.bias, layer.stride, layer.padding, layer.dilation, layer.groups
        )
        others = [] if layer.residual is None else [tensors[layer.residual]]
        if added is not None and number == len(sequence.layers):
            others.append(added)
        tensors.append(finished(layer, _normed(layer, given, y), *others))
    return tensors[-1]


def run_padded(sequence: Sequence, parameters: list[Parameters], x: Tensor, edge: Shape) -> Tensor:
    """Brick by brick through all layers; each brick carries its halo and recomputes what overlaps.

    Args:
        x: [batch, channels, *size].
        edge: of the output's bricks, per dimension.
    """
    sizes = list(sequence.sizes(tuple(x.shape[2:])))
    out = x.new_empty((x.shape[0], sequence.channels(len(sequence.layers)), *sizes[-1]))
    for brick in bricks_of(sizes[-1], edge):
        boxes = regions(sequence, sizes, brick)
        parts = [x[_slices(boxes[0])]]
        for number, layer in enumerate(sequence.layers):
            target = boxes[number + 1]
            added = None
            if layer.residual is not None:
                added = _within(parts[layer.residual], boxes[layer.residual], target)
            part, box = parts[number], boxes[number]
            if layer.joined is not None:
                other = _within(parts[layer.joined], boxes[layer.joined], target)
                part, box = torch.cat([_within(part, box, target), other], 1), target
            y = _convolve(sequence, layer, parameters[number], part, box, target)
            parts.append(finished(layer, y, added))
        out[_slices(brick)] = parts[-1]
    return out


def run_memoized(sequence: Sequence, parameters: list[Parameters], x: Tensor, edge: Shape) -> Tensor:
    """Every brick of every intermediate once, kept until its last consumer has read it.

    Args:
        x: [batch, channels, *size].
        edge: of the bricks of every tensor, per dimension.
    """
    plan = schedule(sequence, tuple(x.shape[2:]), edge)
    sizes = list(sequence.sizes(tuple(x.shape[2:])))
    out = x.new_empty((x.shape[0], sequence.channels(len(sequence.layers)), *sizes[-1]))
    kept: dict[int, Tensor] = {}
    ends: dict[int, list[int]] = {}
    for number, task in enumerate(plan.tasks):
        layer = sequence.layers[task.tensor - 1]
        sources = {0: [(Box((0,) * sequence.dimensions, sizes[0]), x)]}
        for need in task.needs:
            other = plan.tasks[need]
            sources.setdefault(other.tensor, []).append((other.box, kept[need]))
        box = reach(layer, task.box).clipped(sizes[task.tensor - 1])
        part = _gather(sources[task.tensor - 1], box)
        if layer.joined is not None:  # a pointwise layer, whose input's box is its output's
            part = torch.cat([part, _gather(sources[layer.joined], task.box)], 1)
        added = None if layer.residual is None else _gather(sources[layer.residual], task.box)
        y = _convolve(sequence, layer, parameters[task.tensor - 1], part, box, task.box)
        y = finished(layer, y, added)
        if task.tensor == len(sequence.layers):
            out[_slices(task.box)] = y
        else:
            kept[number] = y
            ends.setdefault(plan.last_use[number], []).append(number)
        for done in ends.pop(number, ()):
            del kept[done]
    return out


def _convolve(sequence: Sequence, layer: Conv, given: Parameters, part: Tensor, box: Box, target: Box) -> Tensor:
    """The box ``target`` of a layer's output from the part ``box`` of its input; zeros stand where the padding is.

    The padding of a brick is the tensor's: inside it a halo holds values, outside there are zeros, never a
    convolution of zeros.
    """
    wanted = reach(layer, target)
    pads: list[int] = []
    index: list[slice] = [slice(None), slice(None)]
    for low, high, first, last in zip(wanted.low, wanted.high, box.low, box.high, strict=True):
        begin, end = (min(max(one, first), last) for one in (low, high))
        before = min(max(first - low, 0), high - low)
        index.append(slice(begin - first, end - first))
        pads = [before, high - low - before - (end - begin), *pads]
    padded = F.pad(part[tuple(index)], pads)
    nothing = (0,) * sequence.dimensions
    convolve = CONVOLUTIONS[sequence.dimensions]
    y = convolve(padded, given.weight, given.bias, layer.stride, nothing, layer.dilation, layer.groups)
    return _normed(layer, given, y)


def _normed(layer: Conv, given: Parameters, y: Tensor) -> Tensor:
    if layer.norm is None:
        return y
    if given.affine is None:
        raise ValueError(f"a layer of {layer.out_channels} channels has a norm and no scale and shift: give affine")
    return channel_norm(y, given.affine, layer.norm)


def channel_norm(x: Tensor, affine: Tensor, eps: float) -> Tensor:
    """A layer norm (Ba et al., 2016) over channels at each position, in torch's operators.

    Args:
        x: [batch, channels, *size]; in channels-last nothing is turned.
        affine: [2, channels], scale and shift.
        eps: what is added to the variance.
    """
    return F.layer_norm(x.movedim(1, -1), affine.shape[1:], affine[0], affine[1], eps).movedim(-1, 1)


def finished(layer: Conv, y: Tensor, *added: Tensor | None) -> Tensor:
    """A layer's convolution with its activation and what is added, before or behind that."""
    activate = ACTIVATIONS[layer.activation]
    y = activate(y) if layer.adds_behind else y
    for one in added:
        y = y if one is None else y + one
    return y if layer.adds_behind else activate(y)


def _slices(box: Box) -> tuple[slice, ...]:
    return (slice(None), slice(None), *(slice(a, b) for a, b in zip(box.low, box.high, strict=True)))


def _within(part: Tensor, box: Box, target: Box) -> Tensor:
    """The positions ``target`` out of a part that holds ``box``."""
    shifted = [(a - o, b - o) for a, b, o in zip(target.low, target.high, box.low, strict=True)]
    return part[_slices(Box(tuple(a for a, _ in shifted), tuple(b for _, b in shifted)))]


def _gather(bricks: list[tuple[Box, Tensor]], box: Box) -> Tensor:
    """A box put together from the bricks that cover it."""
    out = bricks[0][1].new_empty((*bricks[0][1].shape[:2], *box.size))
    for held, tensor in bricks:
        common = Box(
            tuple(max(a, b) for a, b in zip(held.low, box.low, strict=True)),
            tuple(min(a, b) for a, b in zip(held.high, box.high, strict=True)),
        )
        if min(common.size) > 0:
            _within(out, box, common).copy_(_within(tensor, held, common))
    return out


__all__ = ["ACTIVATIONS", "Parameters", "channel_norm", "finished", "run_memoized", "run_padded", "run_plain"]
