"""Batch norms folded in 16 bits: nothing drifts, and no weight is further off than one number."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from joulemark.merged.folding import folded, rounded

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def pair(inputs=48, outputs=32, groups=1, bias=False, dimensions=2):
    """A convolution and a batch norm with the statistics that positive inputs of different means give it."""
    convolution = (nn.Conv2d, nn.Conv3d)[dimensions - 2](inputs, outputs, 3, padding=1, groups=groups, bias=bias)
    norm = (nn.BatchNorm2d, nn.BatchNorm3d)[dimensions - 2](outputs, momentum=1.0)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, 0.5, 1.5)
    x = torch.relu(torch.randn(8, inputs, *(11,) * dimensions) + 2 * torch.rand(inputs, *(1,) * dimensions))
    norm(convolution(x))
    return convolution.eval().requires_grad_(False), norm.eval().requires_grad_(False), x


def drift(made, convolution, norm, x):
    """How far the means of the outputs move, in parts of their deviations (root mean square)."""
    exact = norm(convolution(x.float()))
    given = made.float()(x.float())
    inner = (slice(None), slice(None), *(slice(1, -1),) * (x.dim() - 2))  # no zeros of padding among the inputs
    dims = [0, *range(2, x.dim())]
    moved = (given - exact)[inner].mean(dims) / exact[inner].std(dims)
    return float(moved.square().mean().sqrt())


@HALVES
@pytest.mark.parametrize(
    "shape", [{}, {"inputs": 8, "outputs": 64}, {"groups": 4}, {"bias": True}, {"inputs": 12, "dimensions": 3}]
)
def test_means_stay_where_they_were(shape, dtype):
    torch.manual_seed(4)
    convolution, norm, x = pair(**shape)
    narrow = [copy.deepcopy(one).to(dtype) for one in (convolution, norm)]
    wide = [copy.deepcopy(one).float() for one in narrow]
    made = folded(*narrow)
    assert made.weight.dtype == made.bias.dtype == dtype
    nearest = copy.deepcopy(made)
    exact = folded(*wide)
    nearest.weight.data = exact.weight.to(dtype)
    assert drift(made, *wide, x) < 0.5 * drift(nearest, *wide, x)


@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_is_copied_once_and_stays_what_it_was(bias, monkeypatch):
    torch.manual_seed(6)
    convolution, norm, x = pair(bias=bias)
    before, copies, own = copy.deepcopy(convolution), [], nn.Parameter.__deepcopy__
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", lambda self, memo: copies.append(self) or own(self, memo))
    made = folded(convolution, norm)
    assert len(copies) == 1 + bias
    torch.testing.assert_close(made(x), norm(convolution(x)), rtol=1e-4, atol=1e-4)
    assert torch.equal(convolution(x), before(x))
    assert (convolution.bias is None) is not bias


def test_depthwise_means_stay_too():
    torch.manual_seed(5)
    convolution, norm, x = pair(64, 64, groups=64)
    narrow = [copy.deepcopy(one).bfloat16() for one in (convolution, norm)]
    wide = [one.float() for one in copy.deepcopy(narrow)]
    nearest = folded(*wide)
    nearest.weight.data, nearest.bias.data = nearest.weight.bfloat16().float(), nearest.bias.bfloat16().float()
    assert drift(folded(*narrow), *wide, x) < 0.7 * drift(nearest, *wide, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_formats_are_folded_as_ever(dtype):
    torch.manual_seed(6)
    convolution, norm, x = (one.to(dtype) for one in pair())
    torch.testing.assert_close(folded(convolution, norm)(x), norm(convolution(x)))


@HALVES
def test_a_weight_is_at_most_one_number_off_and_few_are_turned(dtype):
    torch.manual_seed(7)
    weight = torch.randn(16, 20, 3, 3) * torch.logspace(-3, 0, 16).view(-1, 1, 1, 1)
    weight[0, 0] = 0.0
    weight[1] = weight[1].to(dtype).float()  # there is nothing to round in this row
    near = weight.to(dtype)
    turned = rounded(weight, dtype, torch.ones_like(weight), torch.zeros(16))
    assert turned.dtype == dtype
    up, down = (near.view(torch.int16) + sign for sign in (1, -1))
    bits = turned.view(torch.int16)
    assert bool(((bits == near.view(torch.int16)) | (bits == up) | (bits == down)).all())
    assert torch.equal(turned[0, 0], near[0, 0])
    assert torch.equal(turned[1], near[1])
    drifts = [(one.float() - weight).flatten(1).sum(1).abs()[2:] for one in (turned, near)]
    assert bool((drifts[0] <= drifts[1]).all())
    assert (drifts[0] / drifts[1]).mean() < 0.2
    squares = [(one.float() - weight).square().sum() for one in (turned, near)]
    assert squares[0] <= 1.1 * squares[1]


def test_a_batch_norm_without_statistics_of_use_is_folded_to_nearest():
    convolution, norm = (one.bfloat16().eval() for one in (nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)))
    made = folded(convolution, norm)
    expected = (convolution.weight.float() * (1 + norm.eps) ** -0.5).bfloat16()
    torch.testing.assert_close(made.weight, expected, rtol=0, atol=0)


def test_shapes_alone_are_folded_too():
    with torch.device("meta"):
        made = folded(*(one.bfloat16().eval() for one in (nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6))))
    assert made.weight.device.type == "meta"
    assert made.weight.shape == (6, 2, 3, 3)
