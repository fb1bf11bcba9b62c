"""Executes one segment: by a generated kernel, by the best call of the library for a single layer, or brick by brick.

A path is a string. Those of a library execute one layer:

- ``library``: convolution with bias, norm, addition and activation as torch has them;
- ``fused``: ``torch.cudnn_convolution_relu`` / ``_add_relu``, one kernel of cuDNN for all of it, which adds before the
  ReLU;
- ``product``: a pointwise convolution as a matrix product whose epilogue adds the bias;
- ``epilogue``: the convolution alone, then bias, norm, addition and activation in one kernel of our own;
- ``slide LxP``: a depthwise convolution, bias, norm, addition and activation in one kernel of our own, L lines and P
  positions of each at a time (:mod:`joulemark.merged.sliding`);
- ``taps LxP``: one with distances between its taps, or a single row of them, without a norm, so too;
- ``gather RxC``: a convolution of few channels and taps, bias, norm, addition and activation in one kernel of our own,
  R positions and C channels at a time;
- ``rows RxC``: a convolution of three channels, say, and more taps, bias and activation in two kernels of our own
  (:mod:`joulemark.merged.stem`), R positions and C channels at a time;
- ``tiles RxC``: a pointwise convolution with gate, bias, addition and activation in one kernel of our own, R pixels and
  C channels at a time.

Any other path names a generated kernel (:mod:`joulemark.merged.families`).
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from joulemark.merged.bricks import CONVOLUTIONS, Parameters, channel_norm, finished
from joulemark.merged.compiling import seen_by_compiler
from joulemark.merged.kernels import Kernel, emulate
from joulemark.merged.kernels.description import Format
from joulemark.merged.kernels.kernel import aligned, layout
from joulemark.merged.kernels.launch import loaded, scratch_of
from joulemark.merged.sequence import Conv, Sequence, Shape
from joulemark.merged.trying import has_triton
from joulemark.merged.writers import its_device

LIBRARY = ("library", "fused", "product", "epilogue", "taps", "slide", "tiles", "gather", "rows")
OWN = ("epilogue", "taps", "slide", "tiles", "gather", "rows")
"""Those that hold a kernel of our own."""
CONVOLVING = tuple(one for one in OWN if one != "epilogue")
"""Of these, those that convolve by it."""
_VISIBLE = ("library", "epilogue")
"""Left to a compiler as torch's operators, so that it fuses what follows into their epilogue."""
_OCTET = 8
_FEW_PLANS = 3
"""Of cuDNN's for a layer that are tried where time is up."""
_recipes: dict[int, Recipe] = {}


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


def products_round() -> bool:
    """Whether cuBLAS rounds fp32 to TF32 in products, as what torch's compiler makes for them then does too."""
    products: Any = torch.backends.cuda.matmul
    if hasattr(products, "fp32_precision"):
        return bool(products.fp32_precision == "tf32")
    return bool(products.allow_tf32)


@contextmanager
def cudnn_tuning(on: bool) -> Iterator[None]:
    """Whether cuDNN picks its algorithms by trial; the user's setting comes back.

    Where times count it does, when paths are measured as well as when they run. Where only an output counts it need
    not: each shape costs it a fraction of a second. torch keeps one plan for a shape, whether that was picked by trial
    or not (``Conv_v8.cpp``: ``benchmark`` is no part of its key, ``deterministic`` is). So that a plan that was not
    picked by trial is never taken where times count, what runs without trials is as deterministic as the user does not
    want it; where torch's deterministic algorithms are on, every plan is (``Convolution.cpp``), and all are picked by
    trial. Plans of :func:`_fused` are told apart by nothing (``ConvShared.cpp``: never deterministic): it picks all of
    its own by trial.
    """
    wish = _tuning.begin(on)
    try:
        yield
    finally:
        _tuning.end(wish)


@dataclass(eq=False)
class _Wish:
    """Of one who is inside: whether by trial."""

    on: bool


class _Tuning:
    """cuDNN's settings belong to the process: the latest wish of all threads holds, after the last the user's."""

    def __init__(self) -> None:
        self.lock, self.users = Lock(), (False, False)
        self.wishes: list[_Wish] = []

    def begin(self, on: bool) -> _Wish:
        """Set them; what ends it.

        Raises:
            RuntimeError: torch's settings are frozen.
        """
        with self.lock:
            if not self.wishes:
                self.users = bool(torch.backends.cudnn.benchmark), bool(torch.backends.cudnn.deterministic)
            wish = _Wish(on)
            self._grant(wish)
            self.wishes.append(wish)
            return wish

    def end(self, wish: _Wish) -> None:
        """Set them as the latest wish that is left wants them, or back."""
        with self.lock:
            self.wishes.remove(wish)
            if self.wishes:
                self._grant(self.wishes[-1])
            else:
                self._set(*self.users)

    def _grant(self, wish: _Wish) -> None:
        by_trial = wish.on or torch.are_deterministic_algorithms_enabled()
        self._set(by_trial, self.users[1] == wish.on)

    @staticmethod
    def _set(by_trial: bool, deterministic: bool) -> None:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = by_trial, deterministic


_tuning = _Tuning()


class _Trials:
    """Until when cuDNN may try all plans for a layer that is executed here, for all threads that say so."""

    def __init__(self) -> None:
        self.lock, self.users = Lock(), 0
        self.deadlines: list[float] = []

    def begin(self, deadline: float) -> None:
        """Set an end, on ``time.monotonic``."""
        with self.lock:
            if not self.deadlines:
                self.users = torch.backends.cudnn.benchmark_limit
            self.deadlines.append(deadline)

    def end(self, deadline: float) -> None:
        """Take it back; after the last the user's limit holds."""
        with self.lock:
            self.deadlines.remove(deadline)
            if not self.deadlines:
                torch.backends.cudnn.benchmark_limit = self.users

    def limit(self) -> None:
        """Have cuDNN try few from now on, where all time is up."""
        if not self.deadlines:
            return
        with self.lock:
            if self.deadlines and time.monotonic() > max(self.deadlines):
                torch.backends.cudnn.benchmark_limit = _FEW_PLANS


_trials = _Trials()


@contextmanager
def trials_until(deadline: float) -> Iterator[None]:
    """From a time on ``time.monotonic`` on cuDNN tries but the plans that it guesses best for each further layer.

    Trying all ten of torch's limit takes a large layer longer than all else of merging by a plan from the disk; the
    user's limit comes back. It holds for all threads, as torch's setting does.
    """
    _trials.begin(deadline)
    try:
        yield
    finally:
        _trials.end(deadline)


def kind_of_path(path: str) -> str:
    """A path without its sizes."""
    return path.partition(" ")[0]


def library_paths(
    layer: Conv,
    adds: bool,
    device: torch.device,
    form: Format | None,
    gated: bool = False,
    batch: int = 1,
    size: Shape = (1, 1),
    biased: bool = False,
) -> tuple[str, ...]:
    """The paths that may execute a single layer on a device, the one to take unseen first, torch's operators last.

    Args:
        adds: whether a tensor from outside is added.
        gated: whether its input is multiplied by a gate for each image and channel.
        batch, size: of its output.
        biased: whether it has a bias.
    """
    if device.type != "cuda" or form is None:
        return ("library",)
    residual, normed = adds or layer.residual is not None, layer.norm is not None
    own = has_triton() and len(layer.kernel) > 1  # our kernels count on channels innermost
    square = set(layer.stride) == {1} and not any(layer.padding)
    pointwise = prod(layer.kernel) == 1 and layer.groups == 1 and square and not normed
    depthwise = layer.groups == layer.in_channels == layer.out_channels and len(layer.kernel) == 2
    sized: list[str] = []
    odd = biased and layer.out_channels % _OCTET > 0  # a library's kernels for tensor cores want octets of channels
    if own and pointwise and form != "fp32" and (gated or residual or layer.activation != "none" or odd):
        from joulemark.merged.pointwise import tiles_for

        sized += [f"tiles {rows}x{columns}" for rows, columns in tiles_for(batch * prod(size), layer.out_channels)]
    if own and depthwise:
        from joulemark.merged import sliding
        from joulemark.merged.pointwise import strips_for

        if sliding.slides(layer):
            sized += [f"slide {lines}x{pixels}" for lines, pixels in sliding.strips_for(layer, batch, size)]
        elif not normed:
            sized += [f"taps {lines}x{columns}" for lines, columns in strips_for(layer, size[-1])]
    if own and form != "fp32" and not gated:
        from joulemark.merged import gather

        sized += [f"gather {rows}x{columns}" for rows, columns in gather.tiles_of(layer) if gather.gathers(layer)]
    if own and form != "fp32" and not gated and not residual and not normed:
        from joulemark.merged.stem import has_rows, tiles_of

        sized += [f"rows {rows}x{columns}" for rows, columns in tiles_of(layer) if has_rows(layer)]
    possible = {
        "fused": fuses(layer),
        **dict.fromkeys(sized, True),
        "epilogue": own and _has_epilogue(layer, residual, biased),
        "product": pointwise and not residual and layer.activation in ("none", "relu"),
        "library": True,
    }
    return tuple(path for path, there in possible.items() if there)


def fuses(layer: Conv) -> bool:
    """Whether cuDNN's fused kernels do all of a layer."""
    return layer.activation == "relu" and layer.norm is None and not layer.adds_behind


def _has_epilogue(layer: Conv, residual: bool, biased: bool) -> bool:
    """Whether there is something behind a convolution that a kernel of our own does in one pass.

    A bias alone is: cuDNN's convolutions leave it to another pass. Torch's own depthwise ones add it themselves.
    """
    if layer.norm is None:
        own_depthwise = 1 < layer.groups == layer.in_channels
        return layer.activation != "none" or residual or (biased and not own_depthwise)
    from joulemark.merged.normalize import MOST_CHANNELS

    return layer.out_channels <= MOST_CHANNELS


@dataclass(frozen=True)
class Recipe:
    """How a segment is executed, whatever its weights are.

    Two segments of one recipe share it, and a compiler that has seen it in another process knows it again.

    Args:
        sequence: the layers.
        path: see the module.
        adds: whether another tensor is added in the last layer.
        kernel: that the path names; None for a library's.
    """

    sequence: Sequence
    path: str
    adds: bool
    kernel: Kernel | None = None
    _ready: dict[tuple[Any, ...], tuple[Any, Tensor | None]] = field(default_factory=dict, compare=False, repr=False)
    _sized_before: dict[Shape, Shape] = field(default_factory=dict, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """What is copied or stored: not what is loaded on a device; in another process too its number is known."""
        return _numbered, (self.sequence, self.path, self.adds, self.kernel)

    @property
    def format(self) -> torch.memory_format:
        """Of input and output."""
        return layout(self.sequence.dimensions) if self.sequence.dimensions > 1 else torch.contiguous_format

    @cached_property
    def number(self) -> int:
        """What names the recipe in a compiled graph, the same in every process."""
        text = repr((self.sequence, self.path, self.adds, self.kernel and (self.kernel.name, self.kernel.source)))
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        _recipes.setdefault(number, self)
        return number

    def run(
        self,
        x: Tensor,
        added: Tensor | None,
        gate: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The segment's output, launch by launch; weights as :meth:`Executed` holds them, ``out`` as it takes that."""
        _trials.limit()
        x, added, gate = _of_one_batch(x, added, gate)
        x = x.contiguous(memory_format=self.format)
        if added is not None:  # a kernel reads as much of it as it writes
            added = added.expand(self.shape_of(x)).contiguous(memory_format=self.format)
        if not x.shape[0]:  # nothing to launch, which CUDA refuses
            return self.like(x)
        layer = self.sequence.layers[0]
        kind = kind_of_path(self.path)
        if kind == "tiles":
            out = self.like(x) if out is None or out.shape != self.shape_of(x) else out
            return self._tiles(layer, x, added if layer.residual is None else x, gate, weight, bias, out)
        if gate is not None:
            x = x * gate
        if self.kernel is not None:
            return self._generated(self.kernel, x, added, weight)
        residual = added if layer.residual is None else x
        if kind == "fused":
            return _fused(layer, x, residual, weight, bias)
        if kind == "product":
            return _product(layer, x, weight, bias)
        if kind == "rows":
            return self._rows(layer, x, weight, bias)
        if kind in ("taps", "slide", "gather"):
            return self._sized(layer, x, residual, weight, bias)
        if kind == "epilogue":
            return self._epilogue(layer, x, residual, weight, bias)
        return self.in_operators(x, added, None, weight, bias)

    def like(self, x: Tensor) -> Tensor:
        """An uninitialized output for x."""
        out: Tensor = torch.empty(self.shape_of(x), dtype=x.dtype, device=x.device, memory_format=self.format)
        return out

    def shape_of(self, x: Tensor) -> Shape:
        """Of the output for x."""
        size = tuple(x.shape[2:])
        if size not in self._sized_before:
            self._sized_before[size] = self.sequence.sizes(size)[-1]
        return (x.shape[0], self.sequence.channels(len(self.sequence.layers)), *self._sized_before[size])

    def in_operators(
        self, x: Tensor, added: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """A single layer in torch's operators."""
        layer = self.sequence.layers[0]
        x = x if gate is None else x * gate
        convolve = CONVOLUTIONS[self.sequence.dimensions]
        if layer.norm is None:
            y = convolve(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
        else:
            assert bias is not None
            y = convolve(x, weight, bias[0], layer.stride, layer.padding, layer.dilation, layer.groups)
            y = channel_norm(y, bias[1:], layer.norm)
        return finished(layer, y, added if layer.residual is None else x)

    @property
    def _sizes(self) -> tuple[int, int]:
        """The two sizes that its path names."""
        first, _, second = self.path.partition(" ")[2].partition("x")
        return int(first), int(second)

    def _tiles(
        self,
        layer: Conv,
        x: Tensor,
        residual: Tensor | None,
        gate: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
    ) -> Tensor:
        from joulemark.merged import pointwise

        tile = self._sizes
        with its_device(x):
            gate = None if gate is None else gate.contiguous()
            return pointwise.product(layer, x, weight, bias, residual, gate, out, tile)

    def _sized(self, layer: Conv, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
        from joulemark.merged import gather, pointwise, sliding

        kinds: dict[str, Any] = {"taps": pointwise.depthwise, "slide": sliding.depthwise, "gather": gather.gathered}
        with torch.cuda.device(x.device):
            run = kinds[kind_of_path(self.path)]
            out: Tensor = run(layer, x, weight, bias, residual, self.like(x), self._sizes)
            return out

    def _rows(self, layer: Conv, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from joulemark.merged import stem

        with torch.cuda.device(x.device):
            return stem.stem(layer, x, weight, bias, self.like(x), self._sizes)

    def _epilogue(self, layer: Conv, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
        from joulemark.merged import normalize, pointwise

        with torch.cuda.device(x.device):
            convolve = CONVOLUTIONS[self.sequence.dimensions]
            y = convolve(x, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
            # The kernel goes through memory in order, so the layout must be the one it counts on.
            y = y.contiguous(memory_format=self.format)
            if layer.norm is None:
                return pointwise.epilogue(layer, y, bias, residual)
            assert bias is not None
            return normalize.normalized(y, bias[0], bias[1:], layer.norm, y, layer, residual)

    def _generated(self, kernel: Kernel, x: Tensor, added: Tensor | None, packed: Tensor) -> Tensor:
        x, added = aligned(x), None if added is None else aligned(added)
        if not x.is_cuda:
            return emulate.run(kernel, x, packed, added)
        kernel.check(x, added)
        # Scratch is each segment's own: segments of one recipe may run on several streams at once.
        out, key = self.like(x), (*x.shape, x.device, packed.data_ptr())
        with torch.cuda.device(x.device):
            if key not in self._ready:
                self._ready[key] = (loaded(kernel, x.device), scratch_of(kernel, x))
            on_device, scratch = self._ready[key]
            on_device.prepare(x, packed, added, out, scratch)()
        return out


def _numbered(*given: Any) -> Recipe:
    """A recipe that its number names."""
    recipe = Recipe(*given)
    _recipes.setdefault(recipe.number, recipe)
    return recipe


class Executed(nn.Module):
    """A segment of a model and the path by which it is executed.

    Takes x [batch, channels, *size], where the segment adds a tensor from outside that tensor, and where its input is
    gated the gate [batch, channels, 1, …]; gives a tensor in channels-last layout.

    Args:
        sequence: the layers.
        parameters: of them.
        path: see the module.
        adds: whether another tensor is added in the last layer.
        kernel: that the path names; None for a library's.
    """

    def __init__(
        self, sequence: Sequence, parameters: List[Parameters], path: str, adds: bool, kernel: Kernel | None = None
    ) -> None:
        super().__init__()
        if kernel is None and len(sequence.layers) != 1:
            raise ValueError(f"{path!r} executes one layer, this segment has {len(sequence.layers)}")
        self.recipe = Recipe(sequence, path, adds, kernel)
        self.sequence, self.path, self.adds, self.kernel = sequence, path, adds, kernel
        self.visible = kernel is None and kind_of_path(path) in _VISIBLE
        self.number = self.recipe.number
        weight, bias = parameters[0].weight, _bias_of(parameters[0])
        if kernel is not None:
            weight, bias = kernel.pack(list(parameters)).to(weight.device), None
        elif kind_of_path(path) in ("taps", "slide"):
            from joulemark.merged import pointwise

            weight = pointwise.taps_of(weight)
        elif kind_of_path(path) == "rows":
            from joulemark.merged import stem

            weight = stem.rows_of(weight)
        elif sequence.dimensions > 1:
            weight = weight.contiguous(memory_format=self.recipe.format)
        self.register_buffer("weight", weight, persistent=kernel is None)
        self.register_buffer("bias", bias)

    @property
    def writes(self) -> bool:
        """Whether it can write into some channels of another tensor."""
        return kind_of_path(self.path) == "tiles" and self.sequence.dimensions > 1

    def shape_of(self, x: Tensor) -> Shape:
        """Of the output for x."""
        return self.recipe.shape_of(x)

    def forward(
        self, x: Tensor, added: Tensor | None = None, gate: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The segment's output.

        Args:
            x, added, gate: see the class.
            out: where to, some channels of a channels-last tensor, where it :attr:`writes` and that has its shape.
        """
        if seen_by_compiler():
            if self.visible:
                return self.recipe.in_operators(x, added, gate, self.weight, self.bias)
            made: Tensor = torch.ops.joulemark.executed(x, added, gate, self.weight, self.bias, self.number)
            return made
        return self.run(x, added, gate, out)

    def run(self, x: Tensor, added: Tensor | None, gate: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """The segment's output, launch by launch."""
        return self.recipe.run(x, added, gate, self.weight, self.bias, out)


def _of_one_batch(x: Tensor, added: Tensor | None, gate: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What is there once for all images, an embedding of positions say, for each: an example of one tells no such."""
    given = (x, added, gate)
    batches = {one.shape[0] for one in given if one is not None}
    if len(batches) == 1:
        return given
    batch = max(batches - {1})
    x, added, gate = (None if one is None else one.expand(batch, *one.shape[1:]) for one in given)
    assert x is not None
    return x, added, gate


def _bias_of(given: Parameters) -> Tensor | None:
    """What a layer adds to channels: its bias [outputs]; with a norm [3, outputs], bias, scale and shift."""
    if given.affine is None:
        return given.bias
    bias = torch.zeros_like(given.affine[0]) if given.bias is None else given.bias
    return torch.cat([bias[None], given.affine])


def _fused(layer: Conv, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    """By a plan of cuDNN's that was picked by trial, whoever asks: torch would go on running a guessed one."""
    shape = (list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups)
    with nullcontext() if torch.backends.cudnn.benchmark else cudnn_tuning(True):
        if residual is None:
            y: Tensor = torch.cudnn_convolution_relu(x, weight, bias, *shape)
            return y
        z: Tensor = torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *shape)
        return z


def _product(layer: Conv, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    order = (0, *range(2, x.dim()), 1)
    rows = x.permute(order).reshape(-1, layer.in_channels)
    weight = weight.reshape(layer.out_channels, layer.in_channels).t()
    if bias is None:
        y = rows @ weight
        y = y.relu_() if layer.activation == "relu" else y
    elif layer.activation == "relu":
        y = torch._addmm_activation(bias, rows, weight)
    else:
        y = torch.addmm(bias, rows, weight)
    back: Tensor = y.view(x.shape[0], *x.shape[2:], layer.out_channels).permute(0, -1, *range(1, x.dim() - 1))
    return back


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "joulemark::executed",
    mutates_args=(),
    schema="(Tensor x, Tensor? added, Tensor? gate, Tensor weight, Tensor? bias, int number) -> Tensor",
)
def _run(
    x: Tensor, added: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor | None, number: int
) -> Tensor:
    """A segment as one operator, for compilers that need not look inside."""
    return _recipes[number].run(x, added, gate, weight, bias)


@_run.register_fake  # type: ignore[untyped-decorator]
def _shape(
    x: Tensor, added: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor | None, number: int
) -> Tensor:
    del weight, bias
    return _recipes[number].like(_of_one_batch(x, added, gate)[0])
