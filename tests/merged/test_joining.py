"""Decoders and concatenations through ``merge`` on a simulated GPU, kernels in Triton by stand-ins in torch."""

from __future__ import annotations

import copy
import importlib.util
import time

import pytest
import torch
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet

from joulemark.merged import alternatives, merge, writers
from joulemark.merged.automatic import _Automatic
from joulemark.merged.fitting import fitted, without_needless_paddings
from joulemark.merged.forks import Forked
from joulemark.merged.graph import trace
from joulemark.merged.joining import Joined, Room, flatten_concatenations
from joulemark.merged.merged_model import traced_or_reason
from joulemark.merged.questions import relative_error
from joulemark.merged.setting import Setting
from joulemark.merged.upsampling import _OPERATORS, Upsampling, replace_upsamplings
from joulemark.workloads.networks import Branches, ConvNorm, DeepCam, UNet
from tests.merged.fakes import RATES, AtOnce, fake_family

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins for the kernels that write; what was scattered, copied by a pooling and copied, by channels."""
    from joulemark.merged import copies, spread, windows

    done = {"spread": [], "kept": [], "copied": []}

    def spread_(x, rows, bias, window, out, activation, tile):
        weight = rows.permute(2, 1, 0).unflatten(2, window)
        y = _OPERATORS[len(window)](x, weight, bias, window)
        done["spread"].append(out.shape[1])
        return out.copy_(torch.relu(y) if activation == "relu" else y)

    def pooled(x, largest, kernel, stride, padding, counted, out=None, beside=None):
        made = (nn.functional.max_pool2d if largest else nn.functional.avg_pool2d)(x, kernel, stride, padding)
        if beside is not None:
            done["kept"].append(beside.copy_(x).shape[1])
        return made if out is None else out.copy_(made)

    def copied(pairs):
        done["copied"].append([part.shape[1] for part, _ in pairs])
        for part, place in pairs:
            place.copy_(part)

    monkeypatch.setattr(spread, "spread", spread_)
    monkeypatch.setattr(windows, "pooled", pooled)
    monkeypatch.setattr(copies, "copied", copied)
    monkeypatch.setattr(writers, "on_gpu", lambda x: True)
    return done


@pytest.fixture
def raced(monkeypatch, simulated_gpu):
    """Seconds by way, 1 ms where none are given."""
    times = {}
    monkeypatch.setattr(
        alternatives, "race", lambda calls, _: {name: times.get(name.split(" ")[0], 1e-3) for name in calls}
    )
    return times


def merged_there(model, x, measured=True):
    """What ``merge`` does on a GPU in TF32."""
    setting = Setting(torch.device("cuda"), "tf32", RATES, (fake_family(),), measured)
    with torch.no_grad():
        return _Automatic(model, traced_or_reason(model, (x,)), (x,), setting, time.monotonic(), 1000.0).merged()


def deepcam():
    with torch.device("meta"):
        encoder = ResNet(Bottleneck, [1, 1, 1, 1], replace_stride_with_dilation=[False, False, True])
    encoder.to_empty(device="cpu")
    for one in encoder.modules():
        if isinstance(one, (nn.Conv2d, nn.BatchNorm2d)):
            one.reset_parameters()
    return DeepCam(encoder)


SKIPS = {
    "unet": (lambda: UNet(width=4), (2, 3, 32, 48), [(1, 3, 32, 48), (1, 3, 37, 21)], [32, 16, 8, 4], [32, 16, 8, 4]),
    "deepcam": (deepcam, (1, 16, 32, 64), [(2, 16, 32, 64), (1, 16, 33, 61)], [128, 64], [64]),
}
"""Network and input, inputs unlike it; channels that are scattered, and those of what they are joined to."""


@pytest.mark.parametrize(("name", "pooling"), [("unet", False), ("unet", True), ("deepcam", True)])
def test_decoders_are_kernels_that_write_beside_what_they_are_joined_to(raced, kernels, name, pooling):
    """``pooling``: what they are joined to is copied where it is pooled."""
    build, shape, others, spread, skips = SKIPS[name]
    torch.manual_seed(0)
    model, images = build().eval(), [torch.randn(one) for one in (shape, *others)]
    raced |= {"spread": 1e-4, "writing": 1e-4 if not pooling else 5e-4, "copying": 1e-4 if pooling else 1e-2}
    merged = merged_there(model, images[0])
    said = merged.explain()
    assert said.count("upsampling by spread 128x") + said.count("upsampling by spread 64x") == len(spread)
    why = "2 of 2 parts written in place; writing" if pooling else "1 of 2 parts written in place; torch.cat"
    assert said.count(f"concatenation ({why}") == len(skips)
    for one in kernels.values():
        one.clear()
    with torch.no_grad():
        assert relative_error(merged.inner(images[0]), model(images[0])) < 1e-5
        assert kernels["spread"] == spread
        mine = [one for one in kernels["copied"] if one[0] in skips and len(one) == 1]
        assert mine == ([] if pooling else [[one] for one in skips])
        assert [one for one in kernels["kept"] if one in skips] == (skips[::-1] if pooling else [])
        for x in images[1:]:
            assert relative_error(merged(x), model(x)) < 1e-5
        graph = next(one for one in merged.modules() if isinstance(one, torch.fx.GraphModule))
        forked = Forked(graph, RATES, "tf32", lambda count: AtOnce())
        assert torch.equal(forked(images[0]), graph(images[0]))
        unseen = torch.compile(copy.deepcopy(graph), backend="eager", dynamic=False)
        count = len(kernels["copied"])
        assert relative_error(unseen(images[0]), model(images[0])) < 1e-5
        assert len(kernels["copied"]) == count
    kept = merged_there(model, images[0])
    assert kept.cached
    assert [one for one in kept.decisions if one.how == "concatenation"] == [
        one for one in merged.decisions if one.how == "concatenation"
    ]


@pytest.mark.parametrize("slower", ["spread", "writing"])
def test_what_is_slower_stays_torchs(raced, kernels, slower):
    torch.manual_seed(1)
    model, x = UNet(width=2).eval(), torch.randn(1, 3, 16, 16)
    raced |= {"spread": 1e-4, "writing": 1e-4, "copying": 3e-3, slower: 2e-3}
    merged = merged_there(model, x)
    kernels["spread"].clear()
    with torch.no_grad():
        torch.testing.assert_close(merged.inner(x), model(x), rtol=1e-4, atol=1e-5)
    said = merged.explain()
    assert ("upsampling (spread 64x" in said) is (slower == "spread")
    assert ("concatenation (by torch's operator; writing in place takes 2 ms" in said) is (slower == "writing")
    assert len(kernels["spread"]) == 4  # a kernel that is slower alone may still be faster where it writes in place


def test_a_wrong_kernel_has_no_part_in_it(raced, kernels, monkeypatch):
    from joulemark.merged import spread

    right = spread.spread
    monkeypatch.setattr(spread, "spread", lambda *given: right(*given).add_(1))
    model, x = UNet(width=2).eval(), torch.randn(1, 3, 16, 16)
    raced |= {"spread": 1e-4, "writing": 1e-4}
    merged = merged_there(model, x)
    with torch.no_grad():
        torch.testing.assert_close(merged.inner(x), model(x), rtol=1e-4, atol=1e-5)
    assert merged.explain().count("upsampling (its output is wrong: relative error") == 4
    assert not [one for one in merged.modules() if isinstance(one, Joined)]


class Late(nn.Module):
    """What is joined is pooled, for another concatenation too, before and behind it; or with that, or with nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = ConvNorm(3, 4, 3), ConvNorm(3, 4, 1), ConvNorm(3, 4, 1)
        self.pool, self.same = nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 1, 1)
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        early = self.pool(a)
        one = torch.cat([a, b], 1)
        late = self.pool(b)
        other, c = torch.cat([b, a], 1), self.c(x)
        beside = self.same(c)
        return torch.relu(one), other, torch.cat([c, beside], 1), beside, torch.cat([self.nothing, early], 1), late


def test_a_pooling_behind_a_concatenation_copies_nothing_for_it(raced, kernels):
    torch.manual_seed(2)
    model, x = Late().eval(), torch.randn(2, 3, 8, 8)
    raced |= {"writing": 5e-4, "copying": 1e-4}
    merged = merged_there(model, x)
    assert merged.explain().count("concatenation (1 of 2 parts written in place") == 2
    kernels["kept"].clear()
    with torch.no_grad():
        for one, other in zip(merged(x), model(x), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert kernels["kept"] == [4, 4]


class Transposed(nn.Module):
    """Transposed convolutions of all kinds one after another."""

    def __init__(self):
        super().__init__()
        self.first, self.relu = nn.ConvTranspose2d(4, 6, 2, 2), nn.ReLU(inplace=True)
        self.overlapping, self.padded = nn.ConvTranspose2d(6, 4, 3, 2), nn.ConvTranspose2d(4, 4, 2, 2, 1)
        self.grouped, self.tall = nn.ConvTranspose2d(4, 4, 2, 2, groups=2), nn.ConvTranspose2d(4, 3, (3, 1), (3, 1))

    def forward(self, x):
        return self.tall(self.grouped(self.padded(self.overlapping(self.relu(self.first(x))))))


@pytest.mark.parametrize("form", ["bf16", "fp32"])
def test_transposed_convolutions_without_overlap_take_their_activation_along(kernels, form):
    model, x = Transposed().eval(), torch.randn(2, 4, 3, 5)
    graph = trace(model, (x,))
    setting = Setting(torch.device("cpu"), form, None, (), False)
    found = replace_upsamplings(graph, setting)
    assert [one.name for one in found] == ([] if form == "fp32" else ["first", "tall"])
    made = [one for one in graph.modules() if isinstance(one, Upsampling)]
    assert [one.activation for one in made] == ([] if form == "fp32" else ["relu", "none"])
    with torch.no_grad():
        torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-5)


def test_concatenations_of_concatenations_are_one_and_others_stay():
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Branches(ConvNorm(3, 4, 1), Branches(ConvNorm(3, 2, 1), ConvNorm(3, 5, 3)))

        def forward(self, x):
            both = torch.cat([x, x + 1], dim=1)
            high = torch.cat((torch.cat([both, both], 2), both), 2)
            return torch.cat([self.inner(x), both], -3), torch.cat([both, x], 1), high

    model, x = Read().eval(), torch.randn(2, 3, 5, 7)
    graph = trace(model, (x,))
    assert flatten_concatenations(graph) == 2
    assert [len(one.args[0]) for one in graph.graph.nodes if one.target is torch.cat] == [2, 2, 2, 4, 2]
    for one, other in zip(graph(x), model(x), strict=True):
        torch.testing.assert_close(one, other)


def test_paddings_of_nothing_go_where_nobody_changes_them():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x, wide):
            pad = nn.functional.pad(x, [0, wide.shape[3] - x.shape[3], 0, wide.shape[2] - x.shape[2]])
            kept = nn.functional.pad(x, (0, 0))
            kept += 1
            return self.conv(nn.functional.pad(x, [1, 1])), torch.cat([pad, wide], 1), kept

    model, x = Padded().eval(), torch.randn(1, 3, 4, 6)
    graph = trace(model, (x, x))
    assert without_needless_paddings(graph) == 1
    assert [one.name for one in graph.graph.nodes if one.target is fitted] == ["pad"]
    for wide in (x, torch.randn(1, 3, 5, 7)):
        for one, other in zip(graph(x, wide), model(x, wide), strict=True):
            torch.testing.assert_close(one, other)


def test_a_room_is_channels_last_whatever_its_size():
    made = Room(Upsampling(torch.randn(2, 3, 1, 1), None), 21)(torch.randn(2, 2, 1, 1))
    assert made.stride() == (21, 1, 21, 21)
    assert Joined((3, 18))(made, torch.ones(2, 3, 1, 1), torch.zeros(2, 18, 1, 1)).sum() == 6


def test_without_a_gpu_a_decoder_stays_as_it_is(own_cache):
    model, x = UNet(width=2).eval(), torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        merged = merge(model, x, "kernels", rates=RATES, families=(fake_family(),))
        torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)
    assert not [one for one in merged.modules() if isinstance(one, (Upsampling, Joined))]
