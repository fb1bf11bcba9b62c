"""Convolutional networks written from their papers: sizes, odd resolutions, and counts by hand."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
torchvision = pytest.importorskip("torchvision")

from joulemark.workloads import networks  # noqa: E402
from joulemark.workloads.models import settle_batch_norms  # noqa: E402


def deepcam():
    encoder = torchvision.models.resnet50(weights=None, replace_stride_with_dilation=[False, False, True])
    return networks.DeepCam(encoder)


SHAPES = {
    "drn_26": (networks.Drn26, (2, 3, 65, 71), (2, 1000)),
    "darknet_53": (networks.DarkNet53, (2, 3, 65, 71), (2, 1000)),
    "inception_v4": (networks.InceptionV4, (2, 3, 111, 99), (2, 1000)),
    "resnet3d_34": (networks.ResNet3d34, (2, 3, 5, 33, 35), (2, 400)),
    "unet": (networks.UNet, (2, 3, 37, 53), (2, 2, 37, 53)),
    "deepcam": (deepcam, (2, 16, 65, 87), (2, 3, 65, 87)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_odd_resolutions_go_through(name):
    build, given, expected = SHAPES[name]
    model = build().eval()
    with torch.no_grad():
        out = model(torch.randn(given))
    assert tuple(out.shape) == expected
    assert out.isfinite().all()


def convolution(inputs, outputs, taps):
    """Weights of a convolution without bias and of the batch norm behind it."""
    return inputs * outputs * taps + 2 * outputs


def test_the_3d_resnet_has_the_weights_that_its_table_tells():
    blocks, inputs, total = (3, 4, 6, 3), 64, convolution(3, 64, 343)
    for number, count in enumerate(blocks):
        outputs = 64 * 2**number
        total += convolution(inputs, outputs, 27) + (2 * count - 1) * convolution(outputs, outputs, 27)
        total += convolution(inputs, outputs, 1) if inputs != outputs else 0
        inputs = outputs
    assert sum(one.numel() for one in networks.ResNet3d34().parameters()) == total + 512 * 400 + 400


def test_the_unet_has_the_weights_that_its_figure_tells():
    widths = (64, 128, 256, 512, 1024)
    total = sum(convolution(a, b, 9) + convolution(b, b, 9) for a, b in zip((3, *widths), widths, strict=False))
    for one in widths[:-1]:
        total += 2 * one * one * 4 + one + convolution(2 * one, one, 9) + convolution(one, one, 9)
    assert sum(one.numel() for one in networks.UNet().parameters()) == total + 64 * 2 + 2


def test_the_strides_and_dilations_of_the_dilated_network():
    model = networks.Drn26().eval()
    found = [one.dilation[0] for one in model.modules() if isinstance(one, torch.nn.Conv2d) and one.dilation[0] > 1]
    assert found == [2] * 4 + [4] * 4 + [2] * 2
    with torch.no_grad():
        assert torch.nn.Sequential(*list(model)[:9])(torch.randn(1, 3, 64, 64)).shape == (1, 512, 8, 8)


def test_settling_reaches_the_batch_norms_of_three_dimensions():
    model = networks.ResNet3d34()
    settle_batch_norms(model, torch.randn(2, 3, 5, 33, 35))
    with torch.no_grad():
        inner = torch.nn.Sequential(*list(model)[:6])(torch.randn(2, 3, 5, 33, 35))
    assert 0.1 < inner.std() < 10
