"""What networks of random weights are like: rounding errors, activations, images."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torchvision import models

from joulemark.merged.graph import trace
from joulemark.merged.questions import relative_error
from joulemark.merged_bench.subjects import condition, images
from joulemark.workloads.models import settle_batch_norms
from joulemark.workloads.networks import BasicBlock


def rounding_errors(model, x):
    """Relative errors in bf16 against fp32: of a model, and of the same with its batch norms folded."""
    narrow = deepcopy(model).bfloat16()
    with torch.no_grad():
        expected = deepcopy(narrow).float()(x.bfloat16().float())
        return [relative_error(one(x.bfloat16()), expected) for one in (narrow, trace(narrow, (x.bfloat16(),)))]


def test_networks_pass_rounding_errors_on_as_trained_ones_do():
    """With batch norms as they are at first, each ReLU amplifies what the layers before it have rounded."""
    torch.manual_seed(2)
    model, shape = models.mobilenet_v2(weights=None), (3, 65, 57)
    settle_batch_norms(model, images(4, shape))
    assert min(rounding_errors(model.eval(), images(2, shape))) > 5e-2
    assert not condition(model, images(4, shape)).training
    assert max(rounding_errors(model, images(2, shape))) < 2e-2
    clipped = []
    hooks = [
        one.register_forward_hook(lambda _, given, out: clipped.append(float((out <= 0).float().mean())))
        for one in model.modules()
        if isinstance(one, torch.nn.ReLU6)
    ]
    model(images(2, shape))
    assert len(hooks) == len(clipped) == 35
    assert all(0.03 < one < 0.3 for one in clipped)  # each activation has something to do


def test_biases_are_before_activations_alone():
    """Behind an addition a mean that every block adds to would leave an activation nothing to clip."""
    torch.manual_seed(2)
    blocks = torch.nn.Sequential(*(BasicBlock(8, 8) for _ in range(3)))
    condition(blocks, images(2, (8, 9, 9)))
    for block in blocks:
        first, second = block.first[1], block.second[1]
        ratios = [one.bias / one.weight for one in (first, second)]
        assert ratios[0].min() > 0.7
        assert ratios[1].abs().max() < 0.55
        assert not torch.equal(second.running_var, torch.ones(8))


def test_scales_of_layers_do_not_hide_what_they_scale():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1))
    model[0].register_parameter("layer_scale", torch.nn.Parameter(torch.full((3, 1, 1), 1e-6)))
    condition(model, images(1, (3, 4, 4)))
    assert model[0].layer_scale.unique().tolist() == pytest.approx([0.1])


def test_images_are_of_unit_variance_and_differ_in_level_and_contrast():
    torch.manual_seed(3)
    x = images(600, (3, 8, 9))
    assert float(x.mean()) == pytest.approx(0, abs=0.05)
    assert float(x.var()) == pytest.approx(1, abs=0.08)
    assert x.mean((2, 3)).std() > 0.5
    assert x.std((2, 3)).amax() > 1.5 * x.std((2, 3)).amin()
    assert images(2, (3, 4, 5, 6)).shape == (2, 3, 4, 5, 6)
