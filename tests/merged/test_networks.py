"""Eleven whole networks through ``merge`` in float64: batch 1 and odd ones, odd resolutions, every strategy."""

from __future__ import annotations

from functools import cache as remember

import pytest
import torch
from torch import nn
from torchvision import models

from joulemark.merged import MergedSequence, cache, merge
from joulemark.merged.paths import Executed
from joulemark.workloads import networks
from tests.merged.fakes import RATES, fake_family


def deepcam():
    return networks.DeepCam(models.resnet50(weights=None, replace_stride_with_dilation=[False, False, True]))


def torchvision(name):
    return lambda: models.get_model(name, weights=None)


NETWORKS = {
    "resnet50": (torchvision("resnet50"), (3, 3, 65, 57)),
    "drn_26": (networks.Drn26, (1, 3, 41, 37)),
    "resnet3d_34": (networks.ResNet3d34, (1, 3, 5, 33, 35)),
    "darknet_53": (networks.DarkNet53, (1, 3, 65, 49)),
    "vgg16": (torchvision("vgg16"), (1, 3, 33, 47)),
    "deepcam": (deepcam, (1, 16, 49, 65)),
    "inception_v4": (networks.InceptionV4, (1, 3, 99, 81)),
    "mobilenet_v2": (torchvision("mobilenet_v2"), (3, 3, 65, 57)),
    "efficientnet_b0": (torchvision("efficientnet_b0"), (3, 3, 65, 57)),
    "convnext_tiny": (torchvision("convnext_tiny"), (1, 3, 65, 57)),
    "unet": (lambda: networks.UNet(width=8), (1, 3, 37, 53)),
}


@remember
def settled(name):
    """A network with batch norms that do something, its input and its output."""
    build, shape = NETWORKS[name]
    torch.manual_seed(len(name))
    model = build()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d)):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)
    if name == "convnext_tiny":
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("layer_scale"):
                nn.init.constant_(parameter, 0.5)  # 1e-6, as built, would hide every error of a block
    model = model.double().eval()
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        return model, x, model(x)


def check(merged, name, tolerance=1e-9):
    model, x, expected = settled(name)
    with torch.no_grad():
        out = merged(x)
        assert (out - expected).abs().max() <= tolerance * expected.abs().max()
        if len(x) == 1:
            return
        torch.testing.assert_close(merged(x[:1]), model(x[:1]), rtol=1e-6, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("strategy", ["padded", "memoized"])
@pytest.mark.parametrize("name", NETWORKS)
def test_bricks_keep_the_output(name, strategy):
    model, x, _ = settled(name)
    with torch.no_grad():
        merged = merge(model, x, strategy, edge=16)
    # A residual behind the activation ends a DarkNet block; only MBConv's and the stem's chains reach two elsewhere.
    if name not in ("darknet_53", "convnext_tiny"):
        assert any(isinstance(one, MergedSequence) for one in merged.modules())
    check(merged, name)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_convolution_on_its_own_path_keeps_the_output(name):
    """No kernel has float64: what is rewritten are all convolutions with what follows them."""
    model, x, _ = settled(name)
    with torch.no_grad():
        merged = merge(model, x, families=(fake_family(),), rates=RATES)
    convolutions = [one for one in merged.modules() if isinstance(one, (nn.Conv2d, nn.Conv3d))]
    assert not convolutions
    assert any(isinstance(one, Executed) for one in merged.modules())
    check(merged, name)


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "drn_26", "unet", "deepcam", "inception_v4"])
def test_segments_by_kernels_keep_the_output(name, tmp_path, monkeypatch):
    """In fp32, by stand-ins of kernels for up to three layers, wherever the performance model wants them."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    model, x, expected = settled(name)
    single = nn.Sequential(model).float()
    try:
        with torch.no_grad():
            merged = merge(single, x.float(), families=(fake_family(),), rates=RATES)
            out = merged(x.float()).double()
    finally:
        model.double()
    kernels = [one for one in merged.modules() if isinstance(one, Executed) and len(one.sequence.layers) > 1]
    assert kernels
    assert (out - expected).norm() <= 1e-4 * expected.norm()
