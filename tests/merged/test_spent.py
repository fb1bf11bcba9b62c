"""What merging's seconds went to: the parts are the whole."""

from __future__ import annotations

import time

import pytest
import torch
from torchvision import models

from joulemark.merged import merge
from joulemark.merged.automatic import _Automatic
from joulemark.merged.graph import trace
from joulemark.merged.setting import Setting
from joulemark.merged.spent import Spent
from tests.merged.fakes import RATES

LEAST = 0.9
"""Share of the whole that its parts have together."""


def test_a_part_within_another_one_interrupts_it():
    now = iter([1.0, 3.0, 8.0, 20.0, 50.0, 53.0, 53.5, 54.0])
    spent = Spent(lambda: next(now))
    with spent.on("a"), spent.on("b"):
        pass
    with spent.on("b"), pytest.raises(ValueError), spent.on("c"):  # noqa: PT011
        raise ValueError
    assert spent.seconds == {"a": 2.0 + 12.0, "b": 5.0 + 3.0 + 0.5, "c": 0.5}


def network():
    torch.manual_seed(0)
    return models.resnet18(weights=None).eval(), torch.randn(1, 3, 33, 41)


@pytest.mark.usefixtures("own_cache", "given_times")
def test_parts_of_merging_a_network_are_the_whole():
    model, x = network()
    first, again = (merge(model, x, rates=RATES, families=(), measure=True) for _ in range(2))
    assert (first.cached, again.cached) == (False, True)
    named = {"tracing", "rewriting", "layouts", "expected output", "disk", "launches"}
    assert named | {"ranking", "layers", "ranges", "folded", "judging"} <= set(first.spent_s)
    assert named <= set(again.spent_s)
    assert not {"ranking", "layers", "judging"} & set(again.spent_s)
    for merged in (first, again):
        assert LEAST * merged.took_s <= sum(merged.spent_s.values()) <= merged.took_s


def test_parts_are_the_whole_on_a_gpu_too(simulated_gpu):
    model, x = network()
    graph = trace(model, (x,))
    setting = Setting(torch.device("cuda"), "fp32", RATES, (), True)
    begin = time.monotonic()
    with torch.no_grad():
        merged = _Automatic(model, graph, (x,), setting, begin, 1000.0).merged()
    took_s = time.monotonic() - begin
    assert {"excitations", "poolings", "norms", "upsampling", "joining", "learning", "compiled"} <= set(merged.spent_s)
    assert LEAST * took_s <= sum(merged.spent_s.values()) <= took_s
