"""The models that joulemark brings, found by name without importing torch.

Weights are random: time and energy of these models do not depend on what they have learnt.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from joulemark.errors import ConfigurationError, Unsupported
from joulemark.workloads.base import Workload
from joulemark.workloads.spec import ModelSpec, PhaseView
from joulemark.workloads.steps import TorchWorkload, sgd

if TYPE_CHECKING:
    import torch
    from torch import nn

BERT_TOKENS = 128
"""Length of the encoder's sequences."""
GPT2_CONTEXT = 512
"""Length of the decoder's prompts and training sequences, and of the context at which it decodes."""
_IMAGENET_SHAPE = (3, 224, 224)
_CLIP_SHAPE = (3, 16, 112, 112)
_DEEPCAM_SHAPE = (16, 768, 1152)
_DEEPCAM_SETTLING_SHAPE = (16, 192, 288)
_UNET_SHAPE = (3, 512, 512)
_SETTLING_IMAGES = 4
_BERT_VOCABULARY, _GPT2_VOCABULARY = 30522, 50257


def _images(
    shape: tuple[int, ...], batch_size: int, generator: torch.Generator, device: str
) -> tuple[torch.Tensor, ...]:
    """Normalized images as they are after preprocessing: standard normal."""
    import torch

    return (torch.randn(batch_size, *shape, generator=generator, device=device),)


def _tokens(
    vocabulary: int, length: int, batch_size: int, generator: torch.Generator, device: str
) -> tuple[torch.Tensor, ...]:
    import torch

    return (torch.randint(1, vocabulary, (batch_size, length), generator=generator, device=device),)


def _labels(classes: int, batch_size: int, generator: torch.Generator, device: str) -> tuple[torch.Tensor, ...]:
    import torch

    return (torch.randint(0, classes, (batch_size,), generator=generator, device=device),)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, for one label per sample or per token."""
    from torch.nn import functional

    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _torchvision(name: str, **more: object) -> nn.Module:
    """A torchvision model with random weights and the batch statistics of random images.

    Args:
        name: as torchvision's registry has it.
        more: arguments of its builder.

    Raises:
        Unsupported: torchvision does not import (it must fit torch's version), with its own reason.
    """
    import torch

    try:
        from torchvision import models
    except Exception as error:
        raise Unsupported(
            f"{name} comes from torchvision, which does not import ({type(error).__name__}: {error})",
            "install the torchvision that fits this torch: pip install 'joulemark[torch]'",
        ) from error
    from joulemark.workloads.models import settle_batch_norms

    module: nn.Module = models.get_model(name, weights=None, **more)
    settle_batch_norms(module, torch.randn(_SETTLING_IMAGES, *_IMAGENET_SHAPE))
    return module


def _settled(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> nn.Module:
    """A network of random weights with the batch statistics of random inputs."""
    import torch

    from joulemark.workloads.models import settle_batch_norms

    module = build()
    settle_batch_norms(module, torch.randn(_SETTLING_IMAGES, *shape))
    return module


def _network(name: str, shape: tuple[int, ...]) -> nn.Module:
    """A network of :mod:`joulemark.workloads.networks` by its class."""
    from joulemark.workloads import networks

    return _settled(getattr(networks, name), shape)


def _deepcam() -> nn.Module:
    from joulemark.workloads.networks import DeepCam

    def build() -> nn.Module:
        return DeepCam(_torchvision("resnet50", replace_stride_with_dilation=[False, False, True]))

    return _settled(build, _DEEPCAM_SETTLING_SHAPE)


def _vit() -> nn.Module:
    """ViT-B/16 with a head of random weights: torchvision starts it from zeros, so no gradient would get past it."""
    from torch import nn

    module = _torchvision("vit_b_16")
    nn.init.normal_(module.heads.head.weight, std=0.02)
    return module


def _lenet5() -> nn.Module:
    from joulemark.workloads.models import LeNet5

    return LeNet5()


def _bert() -> nn.Module:
    from joulemark.workloads.models import BertClassifier

    return BertClassifier()


def _gpt2() -> nn.Module:
    from joulemark.workloads.models import Gpt2

    return Gpt2()


def _prefill(model: nn.Module, batch_size: int) -> nn.Module:
    from joulemark.workloads.models import Gpt2, Prefill

    assert isinstance(model, Gpt2)
    return Prefill(model, batch_size, GPT2_CONTEXT)


def _decode(model: nn.Module, batch_size: int) -> nn.Module:
    from joulemark.workloads.models import Decode, Gpt2

    assert isinstance(model, Gpt2)
    return Decode(model, batch_size, GPT2_CONTEXT)


def _classifier(name: str, model: Callable[[], nn.Module], shape: tuple[int, ...], classes: int) -> ModelSpec:
    return ModelSpec(
        name,
        model,
        inputs=partial(_images, shape),
        targets=partial(_labels, classes),
        loss=_cross_entropy,
        optimizer=sgd,
        unit="images",
    )


def _imagenet(name: str, model: Callable[[], nn.Module] | None = None) -> ModelSpec:
    return _classifier(name, model or partial(_torchvision, name), _IMAGENET_SHAPE, 1000)


def _pixel_labels(
    classes: int, size: tuple[int, ...], batch_size: int, generator: torch.Generator, device: str
) -> tuple[torch.Tensor, ...]:
    import torch

    return (torch.randint(0, classes, (batch_size, *size), generator=generator, device=device),)


def _pixel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Over the channels, for one label per pixel."""
    from torch.nn import functional

    return functional.cross_entropy(logits, labels)


def _segmentation(name: str, model: Callable[[], nn.Module], shape: tuple[int, ...], classes: int) -> ModelSpec:
    return ModelSpec(
        name,
        model,
        inputs=partial(_images, shape),
        targets=partial(_pixel_labels, classes, shape[1:]),
        loss=_pixel_cross_entropy,
        optimizer=sgd,
        unit="images",
    )


_RESNET3D = ModelSpec(
    "resnet3d_34",
    partial(_network, "ResNet3d34", _CLIP_SHAPE),
    inputs=partial(_images, _CLIP_SHAPE),
    targets=partial(_labels, 400),
    loss=_cross_entropy,
    optimizer=sgd,
    unit="clips",
)
_BERT = ModelSpec(
    "bert_base",
    _bert,
    inputs=partial(_tokens, _BERT_VOCABULARY, BERT_TOKENS),
    targets=partial(_labels, 2),
    loss=_cross_entropy,
    items_per_sample=BERT_TOKENS,
    unit="tokens",
)
_gpt2_tokens = partial(_tokens, _GPT2_VOCABULARY, GPT2_CONTEXT)
_GPT2 = ModelSpec(
    "gpt2_small",
    _gpt2,
    inputs=_gpt2_tokens,
    targets=_gpt2_tokens,
    loss=_cross_entropy,
    phases=("prefill", "decode", "train"),
    views={
        "prefill": PhaseView(_prefill, _gpt2_tokens, GPT2_CONTEXT),
        "decode": PhaseView(_decode, partial(_tokens, _GPT2_VOCABULARY, 1)),
    },
    items_per_sample=GPT2_CONTEXT,
    unit="tokens",
)
_SPECS = {
    spec.name: spec
    for spec in (
        _classifier("lenet5", _lenet5, (1, 32, 32), 10),
        *map(_imagenet, ("resnet18", "resnet50", "vgg16", "mobilenet_v2")),
        *map(_imagenet, ("efficientnet_b0", "convnext_tiny")),
        _imagenet("drn_26", partial(_network, "Drn26", _IMAGENET_SHAPE)),
        _classifier("darknet_53", partial(_network, "DarkNet53", (3, 256, 256)), (3, 256, 256), 1000),
        _classifier("inception_v4", partial(_network, "InceptionV4", (3, 299, 299)), (3, 299, 299), 1000),
        _RESNET3D,
        _segmentation("unet", partial(_network, "UNet", (3, 128, 128)), _UNET_SHAPE, 2),
        _segmentation("deepcam", _deepcam, _DEEPCAM_SHAPE, 3),
        _imagenet("vit_b_16", _vit),
        _BERT,
        _GPT2,
    )
}
_ALIASES = {
    "lenet": "lenet5",
    "mobilenet": "mobilenet_v2",
    "convnextt": "convnext_tiny",
    "3dresnet34": "resnet3d_34",
    "vit": "vit_b_16",
    "vitbase": "vit_b_16",
    "vitbasepatch16224": "vit_b_16",
    "bert": "bert_base",
    "bertbaseuncased": "bert_base",
    "gpt2": "gpt2_small",
}


def _plain(name: str) -> str:
    """A name without case and punctuation: ``ResNet-50`` and ``resnet_50`` are ``resnet50``."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_PLAIN_NAME = {_plain(name): name for name in _SPECS} | _ALIASES


def names() -> tuple[str, ...]:
    """Canonical names, in the order of tables."""
    return tuple(_SPECS)


def canonical(name: str) -> str:
    """The zoo's own spelling of a name or alias (``resnet-50`` → ``resnet50``, ``gpt2`` → ``gpt2_small``).

    Raises:
        ConfigurationError: no such model; close matches and the whole zoo are in the remedy.
    """
    found = _BY_PLAIN_NAME.get(_plain(name))
    if found is not None:
        return found
    close = difflib.get_close_matches(_plain(name), _BY_PLAIN_NAME, n=3, cutoff=0.6)
    guesses = list(dict.fromkeys(_BY_PLAIN_NAME[one] for one in close))
    hint = f"did you mean {' or '.join(guesses)}? " if guesses else ""
    raise ConfigurationError(
        f"no model is called {name!r}",
        f"{hint}the zoo has {', '.join(names())}; bring your own as pkg.mod:factory",
    )


def find(name: str) -> Workload:
    """The workload of a name or alias; torch is imported when it is built.

    Raises:
        ConfigurationError: no such model.
    """
    return TorchWorkload(_SPECS[canonical(name)])


def phases(name: str) -> tuple[str, ...]:
    """The phases that a model has.

    Raises:
        ConfigurationError: no such model.
    """
    return _SPECS[canonical(name)].phases


def takes_images(name: str) -> bool:
    """Whether a model's input are images, so that channels_last is a layout for it.

    Raises:
        ConfigurationError: no such model.
    """
    return _SPECS[canonical(name)].unit == "images"
