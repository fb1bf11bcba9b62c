"""Networks translated to JAX give what torch gives."""

from __future__ import annotations

import importlib.util

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX is not installed", allow_module_level=True)

from joulemark.errors import Unsupported  # noqa: E402
from joulemark.merged_bench import xla  # noqa: E402
from joulemark.merged_bench.subjects import BLOCKS, network  # noqa: E402


def check(model, x, tolerance):
    with torch.no_grad():
        expected = model(x)
        call, wait = xla.compiled(model, x)
        out = torch.from_dlpack(wait(call(x)))
    if out.dim() > 2:
        out = out.permute(0, -1, *range(1, out.dim() - 1))
    assert (out - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("name", ["chain-2x16", "chain3d-2x16", "residual-16", "bottleneck-256", "inverted-24-144-32"])
def test_blocks(name):
    subject = next(one for one in BLOCKS if one.name.startswith(name))
    torch.manual_seed(2)
    check(subject.build().eval(), torch.randn(subject.tiny), 1e-4)


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "mobilenet_v2"])
def test_networks(name):
    torch.manual_seed(2)
    size = 224 if name == "vgg16" else 65  # adaptive pooling to 7 × 7 is known where nothing is pooled
    check(network(name, 1).build().eval(), torch.randn(1, 3, size, size), 1e-3)


def test_what_it_does_not_know_it_names():
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 2, 1), torch.nn.PixelShuffle(1))
    call, _ = xla.compiled(model, torch.zeros(1, 2, 3, 3))
    with pytest.raises(Unsupported, match="PixelShuffle"):
        call(torch.zeros(1, 2, 3, 3))
