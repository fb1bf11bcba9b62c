"""Executes one segment: by a generated kernel, by the best call of the library for a single layer, or brick by brick.

A path is a string. Those of a library execute one layer:

- ``library``: convolution with bias, addition and activation as torch has them;
- ``fused``: ``torch.cudnn_convolution_relu`` / ``_add_relu``, one kernel of cuDNN for all of it;
- ``product``: a pointwise convolution as a matrix product whose epilogue adds the bias;
- ``epilogue``: the convolution alone, then bias, addition and activation in one kernel of our own;
- ``taps``: a depthwise convolution, bias, addition and activation in one kernel of our own.

Any other path names a generated kernel (:mod:`joulemark.merged.families`).
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence as List
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from joulemark.merged.bricks import ACTIVATIONS, CONVOLUTIONS, Parameters
from joulemark.merged.kernels import Kernel
from joulemark.merged.kernels.description import Format
from joulemark.merged.kernels.kernel import layout
from joulemark.merged.sequence import Conv, Sequence

LIBRARY = ("library", "fused", "product", "epilogue", "taps")
_VISIBLE = ("library", "epilogue")
"""Left to a compiler as torch's operators, so that it fuses what follows into their epilogue."""
_numbers = itertools.count()
_executed: WeakValueDictionary[int, Executed] = WeakValueDictionary()


def format_of(x: Tensor) -> Format | None:
    """The number format of a computation on x; None for one that no kernel has."""
    if x.dtype == torch.float32:
        return "tf32" if x.is_cuda and _convolutions_round() else "fp32"
    formats: dict[torch.dtype, Format] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return formats.get(x.dtype)


def _convolutions_round() -> bool:
    """Whether cuDNN rounds fp32 to TF32 in convolutions; torch's older getter raises where only the newer was set."""
    convolutions: Any = getattr(torch.backends.cudnn, "conv", None)
    if hasattr(convolutions, "fp32_precision"):
        return bool(convolutions.fp32_precision == "tf32")
    return bool(torch.backends.cudnn.allow_tf32)


def library_paths(layer: Conv, adds: bool, device: torch.device, form: Format | None) -> tuple[str, ...]:
    """The paths that may execute a single layer on a device, the one to take unseen first."""
    if device.type != "cuda" or form is None:
        return ("library",)
    residual = adds or layer.residual is not None
    own = importlib.util.find_spec("triton") is not None
    square = set(layer.stride) == {1} and not any(layer.padding)
    pointwise = prod(layer.kernel) == 1 and layer.groups == 1 and square
    depthwise = layer.groups == layer.in_channels == layer.out_channels and len(layer.kernel) == 2
    possible = {
        "fused": layer.activation == "relu",
        "taps": own and depthwise,
        "epilogue": own and (layer.activation != "none" or residual),
        "product": pointwise and not residual and layer.activation in ("none", "relu"),
        "library": True,
    }
    return tuple(path for path, there in possible.items() if there)


class Executed(nn.Module):
    """A segment of a model and the path by which it is executed.

    Takes x [batch, channels, *size] and, where the segment adds a tensor from outside, that tensor; gives a tensor in
    channels-last layout.

    Args:
        sequence: the layers.
        parameters: of them.
        path: see the module.
        adds: whether another tensor is added before the last activation.
        kernel: that the path names; None for a library's.
    """

    def __init__(
        self, sequence: Sequence, parameters: List[Parameters], path: str, adds: bool, kernel: Kernel | None = None
    ) -> None:
        super().__init__()
        if kernel is None and len(sequence.layers) != 1:
            raise ValueError(f"{path!r} executes one layer, this segment has {len(sequence.layers)}")
        self.sequence, self.path, self.adds, self.kernel = sequence, path, adds, kernel
        self.format = layout(sequence.dimensions) if sequence.dimensions > 1 else torch.contiguous_format
        self.number = next(_numbers)
        _executed[self.number] = self
        self._ready: dict[tuple[Any, ...], tuple[Any, Tensor | None]] = {}
        if kernel is not None:
            packed = kernel.pack(list(parameters)).to(parameters[0].weight.device)
            self.register_buffer("packed", packed, persistent=False)
            return
        weight, bias = parameters[0].weight, parameters[0].bias
        if sequence.dimensions > 1:
            weight = weight.contiguous(memory_format=self.format)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        if path == "taps":
            from joulemark.merged import pointwise

            self.register_buffer("taps", pointwise.taps_of(weight), persistent=False)

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """The segment's output."""
        if torch.compiler.is_compiling():
            if self.path in _VISIBLE:
                return self._layer(x, added)
            out: Tensor = torch.ops.joulemark.executed(x, added, self.number)
            return out
        return self.run(x, added)

    def run(self, x: Tensor, added: Tensor | None) -> Tensor:
        """The segment's output, launch by launch."""
        x = x.contiguous(memory_format=self.format)
        if added is not None:
            added = added.contiguous(memory_format=self.format)
        if self.kernel is not None:
            return self._generated(self.kernel, x, added)
        layer = self.sequence.layers[0]
        residual = added if layer.residual is None else x
        if self.path == "fused":
            return self._fused(layer, x, residual)
        if self.path == "product":
            return self._product(layer, x)
        if self.path in ("epilogue", "taps"):
            return self._own(layer, x, residual)
        return self._layer(x, added)

    def like(self, x: Tensor) -> Tensor:
        """An uninitialized output for x."""
        size = self.sequence.sizes(tuple(x.shape[2:]))[-1]
        channels = self.sequence.channels(len(self.sequence.layers))
        out: Tensor = torch.empty(
            (x.shape[0], channels, *size), dtype=x.dtype, device=x.device, memory_format=self.format
        )
        return out

    def _layer(self, x: Tensor, added: Tensor | None) -> Tensor:
        layer = self.sequence.layers[0]
        convolve = CONVOLUTIONS[self.sequence.dimensions]
        y = convolve(x, self.weight, self.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
        residual = added if layer.residual is None else x
        return ACTIVATIONS[layer.activation](y if residual is None else y + residual)

    def _fused(self, layer: Conv, x: Tensor, residual: Tensor | None) -> Tensor:
        shape = (list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups)
        if residual is None:
            y: Tensor = torch.cudnn_convolution_relu(x, self.weight, self.bias, *shape)
            return y
        z: Tensor = torch.cudnn_convolution_add_relu(x, self.weight, residual, 1.0, self.bias, *shape)
        return z

    def _product(self, layer: Conv, x: Tensor) -> Tensor:
        order = (0, *range(2, x.dim()), 1)
        rows = x.permute(order).reshape(-1, layer.in_channels)
        weight = self.weight.reshape(layer.out_channels, layer.in_channels).t()
        if self.bias is None:
            y = rows @ weight
            y = y.relu_() if layer.activation == "relu" else y
        elif layer.activation == "relu":
            y = torch._addmm_activation(self.bias, rows, weight)
        else:
            y = torch.addmm(self.bias, rows, weight)
        back: Tensor = y.view(x.shape[0], *x.shape[2:], layer.out_channels).permute(0, -1, *range(1, x.dim() - 1))
        return back

    def _own(self, layer: Conv, x: Tensor, residual: Tensor | None) -> Tensor:
        from joulemark.merged import pointwise

        with torch.cuda.device(x.device):
            if self.path == "taps":
                return pointwise.depthwise(layer, x, self.taps, self.bias, residual, self.like(x))
            convolve = CONVOLUTIONS[self.sequence.dimensions]
            y = convolve(x, self.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
            # The kernel goes through memory in order, so the layout must be the one it counts on.
            return pointwise.epilogue(y.contiguous(memory_format=self.format), self.bias, residual, layer.activation)

    def _generated(self, kernel: Kernel, x: Tensor, added: Tensor | None) -> Tensor:
        if not x.is_cuda:
            return kernel.run(x, self.packed, added)
        from joulemark.merged.kernels.launch import loaded, scratch_of

        kernel.check(x, added)
        out, shape = self.like(x), (*x.shape, x.device)
        with torch.cuda.device(x.device):
            if shape not in self._ready:
                self._ready[shape] = (loaded(kernel, x.device), scratch_of(kernel, x))
            on_device, scratch = self._ready[shape]
            on_device.prepare(x, self.packed, added, out, scratch)()
        return out


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "joulemark::executed", mutates_args=(), schema="(Tensor x, Tensor? added, int number) -> Tensor"
)
def _run(x: Tensor, added: Tensor | None, number: int) -> Tensor:
    """A segment as one operator, for compilers that need not look inside."""
    return _executed[number].run(x, added)


@_run.register_fake  # type: ignore[untyped-decorator]
def _shape(x: Tensor, added: Tensor | None, number: int) -> Tensor:
    del added
    return _executed[number].like(x)
