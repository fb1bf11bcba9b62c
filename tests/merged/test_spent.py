"""What merging's seconds went to: the parts are the whole."""

from __future__ import annotations

import time

import pytest
import torch
from torchvision import models

from joulemark.merged import automatic, merge, replay
from joulemark.merged.automatic import _Automatic
from joulemark.merged.graph import trace
from joulemark.merged.setting import Setting
from joulemark.merged.spent import Spent
from tests.merged.fakes import RATES, Wrapped, fake_capture

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
    named = {"tracing", "rewriting", "layouts", "expected output", "disk", "launches", "first call of launches"}
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


class Slow(Wrapped):
    """A module that a clock counts 5 s for compiling and 7 s for each call."""

    def __init__(self, inner, how, clock):
        super().__init__(inner, how)
        self.clock = clock

    def ready_for(self, *inputs):
        self.clock[0] += 5.0

    def forward(self, *inputs):
        self.clock[0] += 7.0
        return super().forward(*inputs)


def test_the_compilers_start_compiling_and_the_first_call_are_told_apart_from_the_disk_too(simulated_gpu, monkeypatch):
    clock = [0.0]

    def start():
        clock[0] += 3.0

    def capture(inner, inputs, pool):
        clock[0] += 0.25
        return fake_capture(inner.inner if isinstance(inner, Slow) else inner, inputs, pool)

    monkeypatch.setattr(automatic, "start_compiler", start)
    monkeypatch.setattr(automatic, "Compiled", lambda inner, mode: Slow(inner, mode, clock))
    monkeypatch.setattr(replay, "capture", capture)
    simulated_gpu.times["compiled graph"] = simulated_gpu.on_device["compiled graph"] = 0.5
    model, x = network()
    setting = Setting(torch.device("cuda"), "fp32", RATES, (), True)

    def merged():
        clock[0] = 0.0
        with torch.no_grad():
            spent = Spent(lambda: clock[0])
            made = _Automatic(model, trace(model, (x,)), (x,), setting, time.monotonic(), 1000.0, spent=spent).merged()
        assert sum(made.spent_s.values()) == clock[0]
        return made.cached, {part: seconds for part, seconds in made.spent_s.items() if seconds}

    parts = {"compiled": 5.0, "first call of compiled": 7.0, "compiled graph": 0.25}
    cached, first = merged()
    assert not cached
    assert parts.items() <= first.items()
    assert first["compiler's start"] == 3.0 * sum(part.startswith("first call of") for part in first)
    assert merged() == (True, {"compiler's start": 3.0, **parts})
