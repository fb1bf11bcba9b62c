"""What merged execution is measured on: blocks of layers, and whole networks of the zoo."""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod, sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from joulemark.workloads import zoo
from joulemark.workloads.models import settle_batch_norms
from joulemark.workloads.spec import ModelSpec, as_tensors
from joulemark.workloads.steps import TorchWorkload

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Subject:
    """A model to execute and the input that it gets.

    Args:
        name: unique.
        group: rows whose gains are averaged.
        build: the model in fp32 on the CPU, in evaluation mode.
        shape: of the input, the batch first.
        tiny: the same of a size for tests.
    """

    name: str
    group: str
    build: Callable[[], nn.Module]
    shape: Shape
    tiny: Shape


class Chain(nn.Sequential):
    """3^d convolutions with ReLU, all of the same channels; weights of unit gain (He et al., 2015)."""

    def __init__(self, channels: int, layers: int, dimensions: int = 2) -> None:
        made: list[nn.Module] = []
        for _ in range(layers):
            made += [_convolution(channels, channels, 3, dimensions=dimensions), nn.ReLU()]
        super().__init__(*made)


class ResidualPair(nn.Module):
    """Two 3×3 convolutions, the input added before the last ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (_convolution(channels, channels, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + x)


class Bottleneck(nn.Module):
    """1×1 down, 3×3, 1×1 up, the input added before the last ReLU."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.down = _convolution(channels, inner, 1)
        self.middle = _convolution(inner, inner, 3)
        self.up = _convolution(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.up(F.relu(self.middle(F.relu(self.down(x))))) + x)


class InvertedResidual(nn.Module):
    """1×1 up, depthwise 3×3, 1×1 down, ReLU6 between (MobileNetV2); the input is added where the shape stays.

    With as many hidden channels as the input has there is nothing up: MobileNetV2's first block.
    """

    def __init__(self, channels: int, hidden: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.expand = _convolution(channels, hidden, 1) if hidden != channels else None
        self.depthwise = _convolution(hidden, hidden, 3, stride, groups=hidden)
        self.project = _convolution(hidden, outputs, 1)
        self.adds = stride == 1 and channels == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x))
        y = self.project(F.relu6(self.depthwise(y)))
        return y + x if self.adds else y


def _convolution(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, dimensions: int = 2
) -> nn.Module:
    kinds = {2: nn.Conv2d, 3: nn.Conv3d}
    made = kinds[dimensions](inputs, outputs, kernel, stride, kernel // 2, groups=groups)
    nn.init.normal_(made.weight, 0, sqrt(2 * groups / (inputs * prod(made.kernel_size))))
    nn.init.normal_(made.bias, 0, 0.1)
    return made


def _chain(channels: int, layers: int, edge: int, batch: int, dimensions: int = 2) -> Subject:
    kind = "chain" if dimensions == 2 else "chain3d"
    name = f"{kind}-{layers}x{channels}-{edge}-b{batch}"
    size, tiny = (edge,) * dimensions, (2, channels, *(9, 20, 7)[:dimensions])
    build = partial(Chain, channels, layers, dimensions)
    return Subject(name, f"{kind}-{channels}" + _one(batch), build, (batch, channels, *size), tiny)


def _one(batch: int) -> str:
    """Single images are a group of their own: with few bricks merging loses, and the fallback is judged."""
    return "-b1" if batch == 1 else ""


def _residual(channels: int, edge: int, batch: int) -> Subject:
    build = partial(ResidualPair, channels)
    shape = (batch, channels, edge, edge)
    return Subject(f"residual-{channels}-{edge}-b{batch}", "residual" + _one(batch), build, shape, (2, channels, 9, 20))


def _bottleneck(channels: int, inner: int, edge: int, batch: int) -> Subject:
    name = f"bottleneck-{channels}-{inner}-{edge}-b{batch}"
    build, shape = partial(Bottleneck, channels, inner), (batch, channels, edge, edge)
    return Subject(name, "bottleneck" + _one(batch), build, shape, (2, channels, 9, 20))


def _inverted(channels: int, hidden: int, outputs: int, stride: int, edge: int, batch: int) -> Subject:
    name = f"inverted-{channels}-{hidden}-{outputs}-s{stride}-{edge}-b{batch}"
    build = partial(InvertedResidual, channels, hidden, outputs, stride)
    group = "inverted" + ("" if stride == 1 else "-s2") + _one(batch)
    return Subject(name, group, build, (batch, channels, edge, edge), (2, channels, 9, 20))


BLOCKS: tuple[Subject, ...] = (
    # One of each kind first: where time is short, these rows are there.
    _inverted(32, 192, 32, 1, 56, 64),
    _chain(16, 4, 1024, 8),
    _bottleneck(256, 64, 56, 64),
    _chain(32, 2, 512, 16),
    _chain(16, 2, 128, 1, 3),
    _inverted(64, 384, 64, 1, 56, 64),
    _chain(16, 3, 224, 64),
    _chain(64, 2, 56, 64),
    _inverted(16, 96, 16, 1, 112, 64),
    _chain(32, 3, 224, 64),
    _inverted(160, 960, 160, 1, 7, 64),
    _bottleneck(256, 64, 56, 1),
    _chain(16, 2, 1024, 8),
    # More of each kind.
    *(_inverted(*one, 64) for one in ((24, 144, 24, 1, 56), (32, 192, 32, 1, 28), (64, 384, 64, 1, 14))),
    *(_inverted(*one, 64) for one in ((96, 576, 96, 1, 14), (160, 960, 320, 1, 7))),
    *(_inverted(*one, 64) for one in ((16, 96, 24, 2, 112), (24, 144, 32, 2, 56), (32, 192, 64, 2, 28))),
    *(_inverted(*one, 64) for one in ((64, 384, 96, 1, 14), (96, 576, 160, 2, 14), (32, 32, 16, 1, 112))),
    _chain(32, 4, 512, 16),
    _chain(16, 3, 128, 1, 3),
    _chain(16, 4, 512, 1),
    _inverted(32, 192, 32, 1, 56, 1),
    _chain(64, 2, 224, 64),
    _chain(64, 2, 56, 1),
    *(_chain(16, layers, 1024, 8) for layers in (3, 6)),
    _chain(32, 3, 512, 16),
    _chain(32, 3, 224, 1),
    _chain(24, 3, 224, 64),
    _chain(16, 2, 64, 8, 3),
    _chain(32, 2, 64, 8, 3),
    _residual(16, 512, 16),
    _residual(32, 224, 64),
    _residual(64, 56, 64),
    _bottleneck(256, 64, 56, 32),
    _bottleneck(512, 128, 28, 64),
)
"""The blocks of the study and more of their kind, in the order in which they are measured."""

NETWORKS: tuple[str, ...] = (
    "resnet50", "drn_26", "resnet3d_34", "darknet_53", "vgg16", "deepcam", "inception_v4",
    "mobilenet_v2", "efficientnet_b0", "convnext_tiny", "unet",
)  # fmt: skip
"""The seven of BrickDL in the order of its table, and four that people deploy."""
_TINY = {"resnet3d_34": (3, 3, 33, 35), "inception_v4": (3, 99, 81), "deepcam": (16, 49, 65)}
_SMALL = (3, 65, 57)
_SETTLING_IMAGES = 4
_SETTLING = {"deepcam": (16, 192, 288), "unet": (3, 128, 128)}
"""Where the usual shape would take a CPU too long: these have as many positions without padding near them."""
_SHIFT, _SPREAD = 1.25, 0.5
_BATCH_NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)
_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.SiLU, nn.LeakyReLU)
_LAYER_SCALE = 0.1


def network(name: str, batch: int) -> Subject:
    """A network of the zoo at a batch size.

    Raises:
        ConfigurationError: the zoo has none of this name.
    """
    spec = _spec(name)
    build = partial(_built, spec.name)
    return Subject(
        f"{spec.name}-b{batch}", spec.name, build, (batch, *_shape(spec)), (2, *_TINY.get(spec.name, _SMALL))
    )


def _shape(spec: ModelSpec) -> Shape:
    """Of one input."""
    return tuple(as_tensors(spec.inputs(1, torch.Generator(), "cpu"))[0].shape[1:])


def _spec(name: str) -> ModelSpec:
    workload = zoo.find(name)
    assert isinstance(workload, TorchWorkload)
    return workload.spec


@lru_cache(maxsize=1)
def _built(name: str) -> nn.Module:
    """The network, once for all batch sizes: settling its batch norms takes seconds. It is copied, never changed."""
    spec = _spec(name)
    return condition(spec.model(), images(_SETTLING_IMAGES, _SETTLING.get(spec.name) or _shape(spec)))


def images(batch: int, shape: Shape, device: str = "cpu") -> Tensor:
    """Random images [batch, *shape] of mean 0 and variance 1 that differ in contrast and in the level of each channel.

    Networks tell them apart; of noise alone, which every position averages, all have about the same output.
    """
    each = (batch, *(1,) * len(shape))
    contrast = torch.empty(each, device=device).uniform_(0.5, 1.1)
    level = 0.57 * torch.randn(batch, shape[0], *each[2:], device=device)
    return torch.randn(batch, *shape, device=device) * contrast + level


def condition(model: nn.Module, images: Tensor) -> nn.Module:
    """Let a network of random weights pass rounding errors on as a trained one does; it is changed and given back.

    A batch norm without a bias centres what a ReLU clips: of an error's variance E[φ'(z)²] = 1/2 passes, of the
    signal's Var[φ(z)] = 1/2 - 1/(2π), z ~ N(0, 1), so each layer amplifies errors 1.21-fold (signal propagation: Poole
    et al., NeurIPS 2016; with batch norms Yang et al., ICLR 2019), MobileNetV2 67-fold, and no format of 16 bits could
    compute it. With z ~ N(b, 1) the factor is 1.04 for b = 1.25, where one element in nine is clipped: b of a batch
    norm before an activation. The others, at the ends of branches, have biases around 0, so that activations behind an
    addition clip too. Scales and biases differ by channel, statistics are settled anew. ConvNeXt's scales of layers,
    1e-6 at first, would hide every error of a block; trained they are not that small.

    Args:
        model: with or without batch norms; its activations are modules.
        images: like those that it will get.
    """
    activated = _before_activations(model.eval(), images[:1])
    for module in model.modules():
        if isinstance(module, _BATCH_NORMS):
            shift = _SHIFT if module in activated else 0.0
            nn.init.uniform_(module.weight, 1 - _SPREAD, 1 + _SPREAD)
            nn.init.uniform_(module.bias, shift - _SPREAD, shift + _SPREAD)
            with torch.no_grad():
                module.bias.mul_(module.weight)
    for name, parameter in model.named_parameters():
        if name.endswith("layer_scale"):
            nn.init.constant_(parameter, _LAYER_SCALE)
    settle_batch_norms(model, images)
    return model.eval()


def _before_activations(model: nn.Module, x: Tensor) -> set[nn.Module]:
    """The batch norms whose output an activation takes as it is."""
    given: dict[int, tuple[nn.Module, Tensor]] = {}
    found: set[nn.Module] = set()

    def keep(norm: nn.Module, _: object, out: Tensor) -> None:
        given[id(out)] = (norm, out)  # held, so that no other tensor has its id

    def find(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if id(inputs[0]) in given:
            found.add(given.pop(id(inputs[0]))[0])

    hooks = [one.register_forward_hook(keep) for one in model.modules() if isinstance(one, _BATCH_NORMS)]
    if not hooks:
        return found
    hooks += [one.register_forward_pre_hook(find) for one in model.modules() if isinstance(one, _ACTIVATIONS)]
    with torch.no_grad():
        model(x)
    for one in hooks:
        one.remove()
    return found
