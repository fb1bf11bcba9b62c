"""Biases of shortcuts: moved into what these are added to, left where anything else would see it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from joulemark.merged import merge
from joulemark.merged.biases import move_biases
from joulemark.merged.graph import copied, trace
from joulemark.merged.norms import ChannelNorm
from tests.merged.fakes import RATES, executed, fake_family


class Block(nn.Module):
    """The end of a residual block that changes its shape; ``join`` tells how both ways meet."""

    def __init__(self, join=lambda one, other: one + other, dimensions=2, groups=1, bias=(True, True), first="last"):
        super().__init__()
        convolution = (nn.Conv2d, nn.Conv3d)[dimensions - 2]
        self.last = convolution(4, 8, 3, 2, 1, groups=groups, bias=bias[0])
        self.around = convolution(4, 8, 1, 2, groups=groups, bias=bias[1])
        self.join, self.first = join, first

    def forward(self, x):
        y = getattr(self, self.first)(x)
        z = (self.around if self.first == "last" else self.last)(x)
        return torch.relu(self.join(y, z))


def moved(model, dimensions=2, dtype=torch.float32):
    """The graph of a model, its input, and how many biases moved."""
    torch.manual_seed(2)
    x = torch.randn(2, 4, *(7, 6, 5)[:dimensions]).to(dtype)
    graph = trace(model.eval().requires_grad_(False), (x,))
    return graph, x, move_biases(graph)


def biases(graph):
    return {name for name, one in graph.named_modules() if getattr(one, "bias", None) is not None}


@pytest.mark.parametrize(
    "shape",
    [{}, {"dimensions": 3}, {"groups": 4}, {"dimensions": 3, "groups": 2}, {"bias": (False, True)}],
)
@pytest.mark.parametrize("join", [lambda one, other: one + other, torch.add, lambda one, other: other + one])
def test_the_bias_of_a_shortcut_moves(shape, join):
    model = Block(join, **shape)
    graph, x, count = moved(model, shape.get("dimensions", 2))
    assert (count, biases(graph)) == (1, {"last"})
    torch.testing.assert_close(graph(x), model(x))
    assert biases(model) == {"last", "around"} - ({"last"} if "bias" in shape else set())
    assert move_biases(graph) == 0


def test_what_shares_its_weights_keeps_its_own_biases():
    model = Block()
    torch.manual_seed(2)
    x = torch.randn(2, 4, 7, 6)
    graph = trace(model.eval().requires_grad_(False), (x,))
    other = copied(graph)
    assert move_biases(other) == 1
    assert (biases(other), biases(graph)) == ({"last"}, {"last", "around"})
    assert other.last.weight is graph.last.weight
    torch.testing.assert_close(graph(x), model(x))
    torch.testing.assert_close(other(x), model(x))


def test_it_moves_to_the_convolution_that_the_addition_belongs_to():
    graph, *_ = moved(Block(first="around"))
    assert biases(graph) == {"around"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_rounded_once(dtype):
    model = Block().to(dtype)
    graph, *_ = moved(model, dtype=dtype)
    both = (model.last.bias.double() + model.around.bias.double()).to(dtype)
    assert torch.equal(graph.last.bias, both)


def test_it_stays_where_the_sum_is_no_number_of_the_format():
    model = Block().half()
    with torch.no_grad():
        model.last.bias[3], model.around.bias[3] = 5e4, 4e4
        model.around.weight.fill_(-1e4)
    graph, x, count = moved(model, dtype=torch.float16)
    assert (count, biases(graph)) == (0, {"last", "around"})
    torch.testing.assert_close(graph(x), model(x))


class Shared(Block):
    """The shortcut, or what it is added to, is called a second time."""

    def __init__(self, twice):
        super().__init__()
        self.twice = twice

    def forward(self, x):
        return super().forward(x) + getattr(self, self.twice)(2 * x)


class Read(Block):
    """What the shortcut gives, or its bias, is read elsewhere too."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        y = self.around(x)
        z = torch.relu(self.last(x) + y)
        return z * (y if self.what == "output" else self.around.bias[:, None, None])


class Normed(Block):
    """A norm that is not folded stands behind one of both ways."""

    def __init__(self, behind, norm):
        super().__init__()
        self.norm, self.behind = norm, behind

    def forward(self, x):
        y, z = self.last(x), self.around(x)
        return torch.relu(self.norm(y) + z if self.behind == "last" else y + self.norm(z))


@pytest.mark.parametrize(
    "model",
    [
        Block(bias=(True, False)),
        Block(lambda one, other: torch.add(one, other, alpha=2)),
        Block(lambda one, other: one - other),
        Block(lambda one, other: one * other),
        Block(lambda one, other: one + other.mean((2, 3), keepdim=True)),
        Block(lambda one, other: one + torch.relu(other)),
        Block(lambda one, other: torch.relu(one) + other),  # to which nothing adds before it
        Block(lambda one, other: one + other + other),
        Shared("last"),
        Shared("around"),
        Read("output"),
        Read("bias"),
        Normed("last", ChannelNorm(torch.rand(2, 8), 1e-5)),
        Normed("around", ChannelNorm(torch.rand(2, 8), 1e-5)),
        Normed("last", nn.BatchNorm2d(8, track_running_stats=False)),
        Normed("around", nn.BatchNorm2d(8, track_running_stats=False)),
    ],
)
def test_it_stays_where_anything_else_would_see_it(model):
    before = biases(copy.deepcopy(model))
    graph, x, count = moved(model)
    assert count == 0
    assert biases(graph) == before
    torch.testing.assert_close(graph(x), model(x))


class Broadcast(Block):
    """A shortcut of one position is added to all."""

    def __init__(self):
        super().__init__()
        self.around = nn.Conv2d(4, 8, (7, 6))


def test_it_stays_where_shapes_differ():
    graph, _, count = moved(Broadcast())
    assert (count, biases(graph)) == (0, {"last", "around"})


def test_a_parameter_that_another_layer_has_too_keeps_its_value():
    class Tied(Block):
        def __init__(self):
            super().__init__()
            self.other = nn.Conv2d(8, 8, 1)
            self.last.bias = self.around.bias = self.other.bias

        def forward(self, x):
            return self.other(super().forward(x))

    model = Tied()
    graph, x, count = moved(model)
    assert (count, biases(graph)) == (1, {"last", "other"})
    torch.testing.assert_close(graph(x), model(x))


def test_what_a_model_changes_in_place_is_added_right():
    class InPlace(Block):
        def forward(self, x):
            y = self.last(x)
            z = self.around(x)
            y += z
            return torch.relu_(y)

    model = InPlace()
    graph, x, count = moved(model)
    assert (count, biases(graph)) == (1, {"last"})
    torch.testing.assert_close(graph(x), model(x))


def test_a_merged_model_adds_no_bias_behind_its_shortcut():
    torch.manual_seed(4)
    norms = [nn.BatchNorm2d(8) for _ in range(2)]
    for one in norms:
        nn.init.uniform_(one.bias)
        nn.init.uniform_(one.running_mean)

    class Network(Block):
        def __init__(self):
            super().__init__(bias=(False, False))
            self.norms = nn.ModuleList(norms)

        def forward(self, x):
            y = self.norms[0](self.last(x))
            y += self.norms[1](self.around(x))
            return torch.relu(y)

    model, x = Network().eval().requires_grad_(False), torch.randn(2, 4, 7, 9)
    merged = merge(model, x, rates=RATES, families=(fake_family(),), measure=False)
    assert merged.failed is None
    assert {one.sequence.layers[0].kernel: one.bias is not None for one in executed(merged)} == {
        (3, 3): True,
        (1, 1): False,
    }
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)
