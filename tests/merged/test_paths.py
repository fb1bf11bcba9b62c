"""Paths of single layers: what they set, and that it comes back."""

from __future__ import annotations

import torch

from joulemark.merged.paths import cudnn_tuning


def test_the_users_setting_of_cudnn_comes_back_behind_several_threads(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    first, second = cudnn_tuning(True), cudnn_tuning(True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert torch.backends.cudnn.benchmark is False
