"""Paths of single layers: what they set, and that it comes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from joulemark.merged import merge
from joulemark.merged.paths import Executed, cudnn_tuning, library_paths
from joulemark.merged.sequence import Conv
from tests.merged.fakes import RATES, fake_family


def test_the_users_setting_of_cudnn_comes_back_behind_several_threads(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    first, second = cudnn_tuning(True), cudnn_tuning(True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert torch.backends.cudnn.benchmark is False


def test_cudnn_fuses_what_is_added_before_a_relu_alone():
    pytest.importorskip("triton")

    def paths(**more):
        layer = Conv(8, 8, (3, 3), (1, 1), (1, 1), (1, 1), **more)
        return library_paths(layer, True, torch.device("cuda"), "bf16")

    assert paths(activation="relu") == ("fused", "epilogue", "library")
    assert paths(activation="relu", adds_behind=True) == ("epilogue", "library")
    assert paths(activation="leaky", adds_behind=True) == ("epilogue", "library")


def test_a_part_of_a_batch_that_begins_anywhere_is_taken():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))

        def forward(self, x, y):
            return torch.relu(self.b(torch.relu(self.a(x))) + y)

    def part():
        whole = torch.randn(3, 3, 5, 5).contiguous(memory_format=torch.channels_last)
        return whole[1:]

    model, x, y = Added().eval(), part(), part()
    assert x.data_ptr() % 16
    assert x.is_contiguous(memory_format=torch.channels_last)
    merged = merge(model, (x, y), rates=RATES, families=(fake_family(),))
    assert [one.adds for one in merged.modules() if isinstance(one, Executed) and one.kernel is not None] == [True]
    torch.testing.assert_close(merged(x, y), model(x, y), rtol=1e-4, atol=1e-5)
