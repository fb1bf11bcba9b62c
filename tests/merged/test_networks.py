"""Eleven whole networks through ``merge`` in float64: batch 1 and odd ones, odd resolutions, every strategy."""

from __future__ import annotations

import copy
import gc
import operator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import models

from joulemark.merged import MergedSequence, cache, merge
from joulemark.merged.families import Family, known_families
from joulemark.merged.forks import Forked
from joulemark.merged.kernels.seconds import fitted
from joulemark.merged.norms import ChannelNorm
from joulemark.merged.paths import Executed
from joulemark.merged.questions import relative_error
from joulemark.merged_bench.subjects import condition, images
from joulemark.workloads import networks
from tests.merged.every_kernel import rare
from tests.merged.fakes import RATES, AtOnce, fake_family


def deepcam():
    return networks.DeepCam(models.resnet50(weights=None, replace_stride_with_dilation=[False, False, True]))


def torchvision(name):
    return lambda: models.get_model(name, weights=None)


def vgg16():
    """With a single small linear layer: its own take a gigabyte in float64."""
    with torch.device("meta"):
        model = models.vgg16(weights=None)
    model.features.to_empty(device="cpu")
    for module in model.features:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.normal_(module.bias, std=0.1)
    model.classifier = nn.Linear(512 * 7 * 7, 10)
    return model


NETWORKS = {
    "resnet50": (torchvision("resnet50"), (3, 3, 65, 57)),
    "drn_26": (networks.Drn26, (1, 3, 41, 37)),
    "resnet3d_34": (networks.ResNet3d34, (1, 3, 5, 33, 35)),
    "darknet_53": (networks.DarkNet53, (1, 3, 65, 49)),
    "vgg16": (vgg16, (1, 3, 33, 47)),
    "deepcam": (deepcam, (1, 16, 49, 65)),
    "inception_v4": (networks.InceptionV4, (1, 3, 99, 81)),
    "mobilenet_v2": (torchvision("mobilenet_v2"), (3, 3, 65, 57)),
    "efficientnet_b0": (torchvision("efficientnet_b0"), (3, 3, 65, 57)),
    "convnext_tiny": (torchvision("convnext_tiny"), (1, 3, 65, 57)),
    "unet": (lambda: networks.UNet(width=8), (1, 3, 37, 53)),
}


BRANCHING = ("resnet50", "drn_26", "resnet3d_34", "deepcam", "inception_v4")
"""Those with layers that need not wait for each other: projections, a pyramid of dilations, inception."""


class Settled(NamedTuple):
    """A network whose batch norms do something, its input and its output, in float64."""

    name: str
    model: nn.Module
    x: torch.Tensor
    expected: torch.Tensor


@pytest.fixture(scope="module", params=NETWORKS)
def settled(request):
    """One network at a time; graphs refer to themselves, so what tests made of it is collected when it goes."""
    yield settle(request.param)
    gc.collect()


def settle(name):
    build, shape = NETWORKS[name]
    torch.manual_seed(len(name))
    model = condition(build(), images(4, shape[1:])).double()
    x = images(shape[0], shape[1:]).double()
    with torch.no_grad():
        return Settled(name, model, x, model(x))


def check(merged, settled, tolerance=1e-9):
    _, model, x, expected = settled
    with torch.no_grad():
        out = merged(x)
        assert (out - expected).abs().max() <= tolerance * expected.abs().max()
        if len(x) == 1:
            return
        torch.testing.assert_close(merged(x[:1]), model(x[:1]), rtol=1e-6, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("strategy", ["padded", "memoized"])
def test_bricks_keep_the_output(settled, strategy):
    name, model, x, _ = settled
    with torch.no_grad():
        merged = merge(model, x, strategy, edge=16)
    if name != "convnext_tiny":  # norms and linear layers stand between its convolutions
        assert any(isinstance(one, MergedSequence) for one in merged.modules())
    check(merged, settled)


class Turned(TorchDispatchMode):
    """Collects copies that turn a tensor from one layout to the other: what a wrong one costs at a seam."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            source = args[-1]
            turned = (source.stride(1) == 1) != (out.stride(1) == 1) if source.dim() in (4, 5) else False
            if turned and source[0, 0].numel() > 1:
                self.shapes.append(tuple(source.shape))
        return out


def test_every_convolution_on_its_own_path_keeps_the_output_and_turns_no_tensor(settled, tmp_path, monkeypatch):
    """In fp32, every convolution with what follows it executed alone; linear layers over positions are among them."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    name, model, x, expected = settled
    memory = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    single, given = copy.deepcopy(model).float(), x.float().contiguous(memory_format=memory)
    with torch.no_grad():
        merged = merge(single, given, families=(Family("none", "padded", lambda problem: ()),), rates=RATES)
        with Turned() as turned:
            out = merged(given)
        assert (out - expected).norm() <= 1e-5 * expected.norm()
        assert (merged(given[:1]) - expected[:1]).norm() <= 1e-5 * expected[:1].norm()
        forked = Forked(merged.inner, RATES, "fp32", lambda count: AtOnce())
        assert (forked.schedule.regions > 0) is (name in BRANCHING)
        assert name not in BRANCHING or torch.equal(forked(given), out)
    assert not [one for one in merged.modules() if isinstance(one, (nn.Conv2d, nn.Conv3d))]
    nodes = list(merged.inner.graph.nodes)
    # What multiplies by a gate or a scale, and what adds a residual, does so in its layer.
    gates = {"efficientnet_b0": 16}.get(name, 0)
    assert merged.explain().count("squeeze-and-excitation") == sum("gate" in one.kwargs for one in nodes) == gates
    assert not [one for one in nodes if one.target is operator.mul]
    assert not [one for one in nodes if one.target in (operator.add, operator.iadd)]
    if name == "convnext_tiny":  # behind the stem and in each block; before each step down and the classifier
        layers = [one.sequence.layers[0] for one in merged.modules() if isinstance(one, Executed)]
        assert sum(one.norm == 1e-6 for one in layers) == 1 + 18
        assert sum(isinstance(one, ChannelNorm) for one in merged.modules()) == 4
        assert not [one for one in nodes if one.target in (nn.functional.layer_norm, torch.permute)]
    if name == "vgg16":  # its linear layers read the last activation in the order of the other layout: the exit
        assert turned.shapes == [(1, 512, 7, 7)]
    elif name != "resnet3d_34":  # on a CPU volumes are pooled and convolved in the other layout alone
        assert turned.shapes == []


@pytest.mark.parametrize(
    "settled", ["resnet50", "mobilenet_v2", "drn_26", "unet", "deepcam", "inception_v4"], indirect=True, scope="module"
)
def test_segments_by_kernels_keep_the_output(settled, tmp_path, monkeypatch):
    """In fp32, by stand-ins of kernels for up to three layers, wherever the performance model wants them."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    _, model, x, expected = settled
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


@rare
@pytest.mark.parametrize(
    ("name", "single_warps"),
    [
        ("mobilenet_v2", False),
        ("mobilenet_v2", True),
        ("efficientnet_b0", False),
        ("resnet50", False),
        ("drn_26", False),
        ("unet", False),
    ],
)
def test_kernels_themselves_keep_the_output_in_bf16(name, single_warps, tmp_path, monkeypatch):
    """The text that a GPU compiles, emulated: whole networks, wherever a kernel can."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    build, shape = NETWORKS[name]
    torch.manual_seed(len(name))
    model, x = condition(build(), images(4, shape[1:])).bfloat16(), images(shape[0], shape[1:]).bfloat16()
    families = [one for one in known_families() if not (single_warps and "warpgroup" in one.name)]
    with torch.no_grad():
        expected = copy.deepcopy(model).float()(x.float())
        merged = merge(model, x, "kernels", families=tuple(families), rates=replace(RATES, gpu=fitted().gpu))
        errors = [relative_error(one(x), expected) for one in (merged, model)]
    assert not [one for one in merged.decisions if one.how == "refused"]
    lengths = [len(one.sequence.layers) for one in merged.modules() if isinstance(one, Executed)]
    assert max(lengths) > 1
    if name == "efficientnet_b0":  # the front of each MBConv that expands: excitations end the ranges
        assert [one for one in lengths if one > 1] == 15 * [2]
    assert errors[0] <= min(2e-2, 1.5 * errors[1])
