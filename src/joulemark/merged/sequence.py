"""The description of a sequence of convolutions: all that partition, cost model and kernels need to know of it."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from math import prod
from typing import Literal

Shape = tuple[int, ...]
Activation = Literal["none", "relu", "relu6", "silu", "gelu", "leaky", "hardswish"]
LEAKY_SLOPE = 0.1
"""Of ``leaky``: DarkNet's."""


@dataclass(frozen=True)
class Conv:
    """One convolution of d spatial dimensions with what follows it: ``activation(norm(conv(x) + bias) + residual)``.

    With ``adds_behind`` it is ``activation(norm(conv(x) + bias)) + residual``.

    Args:
        in_channels: of its input.
        out_channels: of its output.
        kernel: taps per dimension, length d.
        stride: per dimension.
        padding: zeros on each side, per dimension.
        dilation: distance of the taps, per dimension.
        groups: blocks of channels; ``in_channels`` of them make it depthwise.
        activation: after bias and norm, and after what is added where that is not behind it.
        residual: number of the tensor that is added (0: the sequence's input, i: output of layer i − 1); None adds
            nothing.
        joined: number of the tensor whose channels stand behind those of the layer before in its input; None joins
            nothing. For pointwise layers: ``W · [y, x]`` is the sum of two convolutions, of y and of x.
        norm: what is added to the variance in the layer norm over channels at each position; None without a norm.
        adds_behind: whether what is added, ``residual`` or a tensor from outside of the sequence, is added behind the
            activation and not before it. Where there is no activation both are one, and this is False.

    Raises:
        ValueError: it adds behind an activation that it has not.
    """

    in_channels: int
    out_channels: int
    kernel: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int = 1
    activation: Activation = "none"
    residual: int | None = None
    joined: int | None = None
    norm: float | None = None
    adds_behind: bool = False

    def __post_init__(self) -> None:
        if self.adds_behind and self.activation == "none":
            raise ValueError("a layer without an activation adds behind nothing: leave adds_behind False")

    @property
    def also_reads(self) -> tuple[int, ...]:
        """Tensors that it reads where its output is, beside the one before it."""
        return tuple(one for one in (self.residual, self.joined) if one is not None)

    @property
    def extent(self) -> Shape:
        """Input positions that one output position spans, per dimension."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def is_pointwise(self) -> bool:
        """Whether it is a product of channels at each position of a plane."""
        return (self.kernel, self.stride, self.padding, self.groups) == ((1, 1), (1, 1), (0, 0), 1)

    @property
    def weights(self) -> int:
        """Number of weights, without the bias."""
        return self.out_channels * (self.in_channels // self.groups) * prod(self.kernel)

    @property
    def flops_per_position(self) -> int:
        """FLOPs of one output position: a multiply and an add for each weight."""
        return 2 * self.weights

    def output_size(self, size: Shape) -> Shape:
        """Spatial size of the output for an input of spatial ``size``."""
        return tuple(
            (n + 2 * p - e) // s + 1 for n, p, e, s in zip(size, self.padding, self.extent, self.stride, strict=True)
        )


@dataclass(frozen=True)
class Sequence:
    """Convolutions one after another. Tensor 0 is the input, tensor i the output of layer i − 1.

    Raises:
        ValueError: the layers do not fit together.
    """

    layers: tuple[Conv, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a sequence needs at least one layer")
        if len({len(one.kernel) for one in self.layers}) != 1:
            raise ValueError("the layers of a sequence have different numbers of dimensions")
        for number, (before, after) in enumerate(zip(self.layers, self.layers[1:], strict=False)):
            joined = after.joined
            if joined is not None and not (after.is_pointwise and after.residual is None and 0 <= joined <= number):
                raise ValueError(
                    f"layer {number + 1} joins tensor {joined}: pointwise ones that add nothing join earlier ones"
                )
            given = before.out_channels + (0 if joined is None else self.channels(joined))
            if given != after.in_channels:
                raise ValueError(f"layer {number} gives {given} channels, layer {number + 1} takes {after.in_channels}")
        if self.layers[0].joined is not None:
            raise ValueError("the first layer has nothing to join")
        for number, layer in enumerate(self.layers):
            if layer.residual is not None and not 0 <= layer.residual <= number:
                raise ValueError(f"layer {number} adds tensor {layer.residual}, which is not there yet")
            if layer.adds_behind and layer.residual is None and number + 1 < len(self.layers):
                raise ValueError(f"layer {number} adds nothing behind its activation: leave adds_behind False")

    @property
    def dimensions(self) -> int:
        """Spatial dimensions: 2 or 3, say."""
        return len(self.layers[0].kernel)

    def channels(self, tensor: int) -> int:
        """Channels of a tensor."""
        return self.layers[0].in_channels if tensor == 0 else self.layers[tensor - 1].out_channels

    def sizes(self, size: Shape) -> List[Shape]:
        """Spatial size of every tensor for an input of spatial ``size``.

        Raises:
            ValueError: another number of dimensions, an intermediate would be empty, or a residual does not fit.
        """
        if len(size) != self.dimensions:
            raise ValueError(f"a sequence of {self.dimensions} spatial dimensions got an input of {tuple(size)}")
        out = [tuple(size)]
        for number, layer in enumerate(self.layers):
            out.append(layer.output_size(out[-1]))
            if min(out[-1]) < 1:
                raise ValueError(f"an input of {tuple(size)} leaves nothing behind layer {number}")
            other = layer.residual
            if other is not None and (out[other], self.channels(other)) != (out[-1], layer.out_channels):
                raise ValueError(f"layer {number} adds a tensor of another shape: {out[other]} to {out[-1]}")
            if layer.joined is not None and out[layer.joined] != out[-1]:
                raise ValueError(f"layer {number} joins a tensor of another size: {out[layer.joined]} to {out[-1]}")
        return out

    def flops(self, size: Shape) -> int:
        """FLOPs for one image of spatial ``size``, nothing computed twice."""
        return sum(
            layer.flops_per_position * prod(out) for layer, out in zip(self.layers, self.sizes(size)[1:], strict=True)
        )


def of_three(sizes: Shape, missing: int) -> tuple[int, int, int]:
    """Sizes of three dimensions, the first of which an image does not have."""
    first, second, third = (missing,) * (3 - len(sizes)) + tuple(sizes)
    return first, second, third
