"""What was chosen in a graph: a kernel that cannot hold a segment's weights leaves that segment alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from joulemark.merged import merge
from joulemark.merged.families import Family
from joulemark.merged.graph import trace, twin
from joulemark.merged.kernels import KernelError
from joulemark.merged.paths import Executed
from joulemark.merged.rewrite import fused_by_cudnn, rewrite
from joulemark.merged.setting import Setting
from tests.merged.fakes import RATES, fake_family, packed


def only_small(parameters):
    if max(float(one.weight.abs().max()) for one in parameters) > 1:
        raise KernelError("too large")
    return packed(parameters)


def test_a_twin_is_rewritten_by_itself():
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval(), torch.randn(2, 4, 9, 7)
    with torch.no_grad():
        graph = trace(model, (x,))
        before = graph.code
        other = twin(graph)
        rewrite(other, fused_by_cudnn(other), Setting(torch.device("cpu"), "fp32", None, (), False))
        assert sum(isinstance(one, Executed) for one in other.modules()) == 2
        assert (graph.code, dict(graph.named_children()).keys()) == (before, {"0", "1", "2"})
        assert torch.equal(graph(x), model(x))


def test_weights_that_a_kernel_cannot_hold_leave_their_segment_alone():
    pairs = fake_family(most=2)
    family = Family("fake", "padded", lambda problem: (replace(one, pack=only_small) for one in pairs.kernels(problem)))
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))).eval()
    torch.nn.init.constant_(model[0].weight, 2.0)
    x = torch.randn(2, 4, 9, 7)
    with pytest.warns(UserWarning, match="0 … 1 runs in torch's operators: too large"):
        merged = merge(model, x, rates=RATES, families=(family,))
    (part,) = (one for one in merged.modules() if isinstance(one, Executed))
    assert part.kernel is not None
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-4)
