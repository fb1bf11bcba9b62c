"""Layer norms over channels: in the layer before them, alone, and where they stay as they are."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from joulemark.merged import merge
from joulemark.merged.bricks import Parameters, run_memoized, run_padded, run_plain
from joulemark.merged.families import Family, Problem, known_families, offers
from joulemark.merged.graph import trace
from joulemark.merged.kernels import Description
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.layer_norms import as_channel_norms
from joulemark.merged.norms import ChannelNorm
from joulemark.merged.paths import library_paths
from joulemark.merged.pooling import Pooling, replace_poolings
from joulemark.merged.sequence import Conv, Sequence
from joulemark.merged.squeeze import replace_excitations
from tests.merged.fakes import RATES, executed

NONE = (Family("none", "padded", lambda problem: ()),)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def depthwise(channels, kernel=7, dilation=1, norm=1e-6, activation="none"):
    shape = ((one,) * 2 for one in (kernel, 1, kernel // 2, dilation))
    return Conv(channels, channels, *shape, channels, activation, norm=norm)


def dense(inputs, outputs, kernel):
    """With a norm, and ending in a ReLU."""
    return Conv(inputs, outputs, (kernel,) * 2, (kernel,) * 2, (0, 0), (1, 1), activation="relu", norm=1e-6)


class First(nn.LayerNorm):
    """Over channels behind the batch, as torchvision has it."""

    def forward(self, x):
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """Its stem, a block and a step down, small."""

    def __init__(self, norm=nn.LayerNorm, width=8):
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, width, 4, 4), First(width, eps=1e-3)
        self.taps, self.norm = nn.Conv2d(width, width, 7, 1, 3, groups=width), norm(width)
        self.wide, self.thin = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.before, self.down = First(width), nn.Conv2d(width, 2 * width, 2, 2)
        for one in (self.first, self.before, self.norm):
            for parameter in one.parameters():
                nn.init.normal_(parameter)

    def forward(self, x):
        x = self.first(self.stem(x))
        y = self.thin(F.silu(self.wide(self.norm(self.taps(x).permute(0, 2, 3, 1)))))
        return self.down(self.before(y.permute(0, 3, 1, 2) + x))


def merged_and_checked(model, x):
    with torch.no_grad():
        merged = merge(model.eval(), x, rates=RATES, families=NONE)
        torch.testing.assert_close(merged(x), model(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(merged(x[:1]), model(x[:1]), rtol=1e-5, atol=1e-5)
    return merged


@pytest.mark.parametrize(
    "norm",
    [
        lambda width: nn.LayerNorm(width, eps=0.1),
        lambda width: nn.LayerNorm(width, elementwise_affine=False),
        lambda width: nn.LayerNorm([width], bias=False),
    ],
)
def test_a_norm_is_in_the_layer_before_it_and_stands_alone_elsewhere(norm):
    torch.manual_seed(3)
    model, x = ConvNext(norm), torch.randn(2, 3, 24, 20)
    merged = merged_and_checked(model, x)
    layers = [one.sequence.layers[0] for one in executed(merged)]
    assert [one.norm for one in layers] == [1e-3, model.norm.eps, None, None, None]
    calls = [node for node in merged.inner.graph.nodes if node.op.startswith("call")]
    assert [node.op for node in calls] == 6 * ["call_module"]  # nothing is permuted, no norm is an operator's
    assert [one.eps for one in merged.modules() if isinstance(one, ChannelNorm)] == [model.before.eps]
    said = merged.explain()
    for name in ("first", "norm"):
        assert f"{name}: norm (over channels, in the layer before it)" in said
    assert "before: norm (over channels, by itself)" in said


def test_what_follows_a_norm_is_in_its_layer_too():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(6, 6, 3, 1, 1, bias=False), First(6)

        def forward(self, x):
            return torch.relu(self.norm(self.conv(x)) + x)

    merged = merged_and_checked(Added(), torch.randn(2, 6, 5, 7))
    assert [str(node.target) for node in merged.inner.graph.nodes if node.op == "call_module"] == ["executed_0"]
    (layer,) = executed(merged)[0].sequence.layers
    assert (layer.norm, layer.activation, layer.residual) == (1e-5, "relu", 0)


def test_an_addition_of_two_layers_belongs_to_one_of_them_whatever_norm_the_other_has():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.conv, self.norm = nn.Conv2d(6, 6, 3, 1, 1), nn.Conv2d(6, 6, 1), First(6)

        def forward(self, x):
            return torch.relu(self.plain(x) + self.norm(self.conv(x)))

    merged = merged_and_checked(Both(), torch.randn(2, 6, 5, 7))
    layers = [(one.adds, one.sequence.layers[0].activation, one.sequence.layers[0].norm) for one in executed(merged)]
    assert sorted(layers) == [(False, "none", 1e-5), (True, "relu", None)]


class Around(nn.Module):
    """A norm somewhere."""

    def __init__(self, norm, shape=(6, 5, 7)):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 1), norm
        self.scale = nn.Parameter(torch.rand(shape[-1]))

    def forward(self, x):
        return self.norm(self.conv(x))


class Twice(Around):
    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) * y


class Computed(Around):
    def forward(self, x):
        return F.layer_norm(self.conv(x), (7,), self.scale + 1)


class Asked(Around):
    def forward(self, x):
        y = self.conv(x)
        return F.layer_norm(y, y.shape[-1:]) + F.layer_norm(y, (y.shape[-1],))


class Turned(Around):
    """By permutations of which torch and a tensor get the order by name."""

    def forward(self, x):
        return self.norm(torch.permute(self.conv(x), dims=(0, 2, 3, 1))).permute(dims=(0, 3, 1, 2))


class Tokens(Around):
    def forward(self, x):
        return self.norm(self.conv(x).flatten(2).transpose(1, 2))


def hooked():
    norm = nn.LayerNorm(7)
    norm.register_forward_hook(lambda module, inputs, output: output * 2)
    return norm


@pytest.mark.parametrize(
    ("model", "alone", "said"),
    [
        (Twice(First(6)), 1, "norm: norm (over channels, by itself)"),
        (Around(nn.LayerNorm(7)), 1, "norm: norm (over channels, by itself)"),  # of another dimension, and right too
        (Around(nn.LayerNorm((6, 5, 7))), 0, "norm: plain (it normalizes over (6, 5, 7) of (2, 6, 5, 7), not over"),
        (Around(hooked()), 0, "norm: plain (its hooks see it)"),
        (Computed(None), 0, "layer_norm: plain (its scale or shift is no parameter of 7 numbers in torch.float32)"),
        (Asked(None), 0, "layer_norm and 1 more, to layer_norm_1: plain (what it normalizes over is computed in each"),
        (Tokens(nn.LayerNorm(6)), 0, ""),
    ],
)
def test_what_is_not_behind_a_convolution_alone_stays_apart_and_what_is_no_norm_over_channels_as_it_is(
    model, alone, said
):
    torch.manual_seed(5)
    merged = merged_and_checked(model, torch.randn(2, 6, 5, 7))
    assert said in merged.explain()
    assert [one.sequence.layers[0].norm for one in executed(merged)] == [None]
    assert len([one for one in merged.modules() if isinstance(one, ChannelNorm)]) == alone


class Changed(Around):
    """What is normalized is changed by a statement; another norm is of no use."""

    def __init__(self):
        super().__init__(nn.LayerNorm(6))
        self.unread, self.activate = nn.LayerNorm(6), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.conv(x)
        self.activate(y)
        self.unread(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.norm(y.permute(0, 2, 3, 1)), y + 1


def test_what_is_changed_by_a_statement_stays_changed():
    torch.manual_seed(7)
    model, x = Changed().eval(), torch.randn(2, 6, 5, 7)
    merged = merge(model, x, "kernels", rates=RATES, families=NONE)
    for one, other in zip(merged(x), model(x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    said = merged.explain()
    assert "norm: norm (over channels, by itself)" in said
    assert "unread: plain (nothing reads what it gives)" in said


class Called(nn.Module):
    """Each of its parts twice, and then another one of its kind."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(6, eps=eps) for eps in (1e-5, 0.5))
        self.pools = nn.ModuleList((nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1)))
        self.gates = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 2, 1), nn.ReLU(), nn.Conv2d(2, 6, 1), nn.Sigmoid())
            for _ in range(2)
        )

    def forward(self, x):
        for number in (0, 0, 1):
            x = self.norms[number](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) + 1
            x = self.pools[number](x) * self.gates[number](x)
        return x


def test_parts_that_are_called_again_are_not_taken_for_others():
    torch.manual_seed(8)
    model, x = Called().eval(), torch.randn(2, 6, 5, 7)
    graph = trace(model, (x,))
    as_channel_norms(graph)
    replace_excitations(graph)
    replace_poolings(graph, torch.device("cpu"), x.dtype)
    assert [len([one for one in graph.modules() if isinstance(one, kind)]) for kind in (ChannelNorm, Pooling)] == [3, 3]
    with torch.no_grad():
        torch.testing.assert_close(graph(x), model(x), rtol=1e-4, atol=1e-5)


def test_permutations_whose_order_is_named_are_seen_through():
    torch.manual_seed(6)
    merged = merged_and_checked(Turned(nn.LayerNorm(6)), torch.randn(2, 6, 5, 7))
    assert "norm: norm (over channels, in the layer before it)" in merged.explain()


def test_parameters_in_another_format_stay_torchs():
    graph = trace(Around(nn.LayerNorm(7)), (torch.randn(2, 6, 5, 7),))
    graph.norm.double()
    norms = as_channel_norms(graph)
    assert norms.taken == {}
    assert norms.left == {"norm": "its scale or shift is no parameter of 7 numbers in torch.float32"}


def test_a_norm_whose_kernel_does_not_work_is_left_to_torch():
    norm = ChannelNorm(torch.randn(2, 5), 1e-6)
    norm.own = True  # whatever this machine has

    def refused(x):
        raise RuntimeError("no such register\nand more")

    assert norm.prove() is None  # there is no GPU to try it on
    assert norm.prove(norm) is None
    assert norm.own
    assert norm.prove(refused) == "RuntimeError: no such register"
    assert not norm.own
    assert "off" in norm.prove(lambda x: norm(x) * 1.1)


def test_bricks_know_norms():
    torch.manual_seed(2)
    pointwise = Conv(6, 6, (1, 1), (1, 1), (0, 0), (1, 1), activation="relu", residual=0)
    sequence = Sequence((depthwise(6, 3, activation="gelu"), replace(pointwise, norm=0.1)))
    given = [
        Parameters(torch.randn(6, 1, 3, 3).double(), None, torch.randn(2, 6).double()),
        Parameters(torch.randn(6, 6, 1, 1).double(), torch.randn(6).double(), torch.randn(2, 6).double()),
    ]
    x = torch.randn(2, 6, 7, 9).double()
    expected = run_plain(sequence, given, x)
    y = x
    for layer, one in zip(sequence.layers, given, strict=True):
        y = F.conv2d(y, one.weight, one.bias, 1, layer.padding, 1, layer.groups)
        mean, var = y.mean(1, keepdim=True), y.var(1, keepdim=True, correction=0)
        y = (y - mean) / (var + layer.norm).sqrt() * one.affine[0, :, None, None] + one.affine[1, :, None, None]
        y = F.gelu(y) if layer.residual is None else torch.relu(y + x)
    torch.testing.assert_close(expected, y)
    for run in (run_padded, run_memoized):
        torch.testing.assert_close(run(sequence, given, x, (4, 3)), expected)
    with pytest.raises(ValueError, match="give affine"):
        run_plain(sequence, [given[0], replace(given[1], affine=None)], x)


def test_no_family_of_kernels_takes_a_layer_with_a_norm():
    chain = Conv(16, 16, (3, 3), (1, 1), (1, 1), (1, 1), activation="relu")
    counts = []
    for norm in (None, 1e-6):
        layers = (chain, replace(chain, norm=norm))
        problem = Problem(Description(Sequence(layers), "bf16"), (32, 32), 1, Device())
        counts.append(len(offers([one for one in known_families() if one.name == "chain"], problem)))
    assert counts[0] > 0
    assert counts[1] == 0


@needs_triton
@pytest.mark.parametrize(
    ("layer", "paths"),
    [
        (depthwise(96), ("slide 7x8", "slide 4x8", "slide 2x8", "epilogue", "library")),
        (depthwise(96, dilation=2), ("epilogue", "library")),
        (depthwise(96, 3), ("slide 7x8", "slide 4x8", "slide 2x8", "epilogue", "library")),
        (depthwise(96, 13), ("epilogue", "library")),
        (depthwise(4096), ("library",)),
        (dense(3, 96, 4), ("gather 32x128", "gather 64x128", "epilogue", "library")),
        (dense(3, 384, 4), ("epilogue", "library")),
        (dense(96, 384, 1), ("epilogue", "library")),
    ],
)
def test_only_paths_that_know_norms_are_offered_for_one(layer, paths):
    assert library_paths(layer, False, torch.device("cuda"), "bf16", batch=32, size=(28, 28)) == paths
    assert library_paths(layer, False, torch.device("cpu"), "bf16", batch=32, size=(28, 28)) == ("library",)


@needs_triton
def test_a_depthwise_layer_slides_where_it_has_rows_to_share():
    def paths(kernel, **more):
        layer = depthwise(96, kernel, norm=None, **more)
        return library_paths(layer, False, torch.device("cuda"), "bf16", batch=1, size=(56, 56))

    assert paths(7) == ("slide 8x4", "slide 4x8", "slide 2x8", "library")
    assert paths(5) == ("slide 8x4", "slide 4x8", "library")
    assert paths(3, dilation=2) == ("taps 1x32", "taps 1x16", "library")


@needs_triton
def test_strips_fill_the_device_with_as_few_loads_as_that_admits():
    from joulemark.merged.sliding import strips_for

    assert strips_for(depthwise(192), 32, (28, 28)) == ((7, 8), (4, 8), (2, 8))
    assert strips_for(depthwise(768), 32, (7, 7)) == ((7, 2), (4, 4), (2, 4))  # of 768 channels no more fit
    assert strips_for(depthwise(768), 1, (7, 7)) == ((7, 1), (4, 1), (2, 1))
    assert strips_for(depthwise(96), 64, (3, 2)) == ((3, 1), (2, 2))
