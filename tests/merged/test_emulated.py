"""Generated kernels inside merged models, emulated on the CPU: packing, layouts, batches, additions from outside."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from joulemark.merged import cache, merge
from joulemark.merged.families import known_families
from joulemark.merged.paths import Executed
from joulemark.merged.questions import relative_error
from tests.merged.fakes import RATES

SLOW_MEMORY = replace(RATES, multiprocessors=2, shared_bytes=228 * 1024)


class Pair(nn.Module):
    """Two 3×3 convolutions, to whose output another branch is added."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.side = nn.Conv2d(16, 16, 1)

    def forward(self, x):
        return torch.relu(self.second(torch.relu(self.first(x))) + self.side(x))


class Inverted(nn.Sequential):
    """An inverted residual without its addition, with batch norms."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6(),
            nn.Conv2d(32, 32, 3, 2, 1, groups=32, bias=False), nn.BatchNorm2d(32), nn.ReLU6(),
            nn.Conv2d(32, 16, 1, bias=False), nn.BatchNorm2d(16),
        )  # fmt: skip


class Excited(nn.Module):
    """An MBConv: expansion and depthwise, an excitation of what they give, and the gated projection."""

    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv2d(8, 40, 1, bias=False), nn.BatchNorm2d(40), nn.SiLU(),
            nn.Conv2d(40, 40, 5, 2, 2, groups=40, bias=False), nn.BatchNorm2d(40), nn.SiLU(),
        )  # fmt: skip
        self.squeeze, self.excite, self.project = nn.Conv2d(40, 2, 1), nn.Conv2d(2, 40, 1), nn.Conv2d(40, 16, 1)

    def forward(self, x):
        y = self.front(x)
        pooled = nn.functional.adaptive_avg_pool2d(y, 1)
        gate = torch.sigmoid(self.excite(nn.functional.silu(self.squeeze(pooled))))
        return self.project(gate * y)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="kernels are emulated by g++")
@pytest.mark.parametrize(
    ("build", "channels", "family"),
    [(Pair, 16, "chain"), (Inverted, 8, "inverted_residual"), (Excited, 8, "expand_depthwise")],
)
def test_a_merged_model_of_generated_kernels(build, channels, family):
    torch.manual_seed(5)
    model = build().eval().to(torch.bfloat16)
    x = torch.randn(3, channels, 9, 21).to(torch.bfloat16)
    families = tuple(one for one in known_families() if one.name == family)
    with torch.no_grad():
        merged = merge(model, x, rates=SLOW_MEMORY, families=families)
        wide = build().eval()
        wide.load_state_dict(model.float().state_dict())
        expected = wide(x.float())
        out = merged(x)
        one = merged(x[1:2])
        held = io.BytesIO()
        torch.save(merged, held)
        held.seek(0)
        copies = [copy.deepcopy(merged), pickle.loads(pickle.dumps(merged)), torch.load(held, weights_only=False)]
        assert all(torch.equal(other(x), out) for other in copies)
    kernels = [part for part in merged.modules() if isinstance(part, Executed) and part.kernel is not None]
    assert [len(part.sequence.layers) for part in kernels if part.path.startswith(family)]
    assert max(len(part.sequence.layers) for part in kernels) > 1
    assert relative_error(out, expected) < 1e-2
    assert relative_error(one, expected[1:2]) < 1e-2
