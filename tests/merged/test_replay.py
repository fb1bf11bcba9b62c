"""Modules around a CUDA graph, with a graph that is a stand-in on a CPU."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from joulemark.merged import replay
from joulemark.merged.replay import Chosen, Replayed, for_both, for_capture
from tests.merged.fakes import FakeGraph, merged_there, model_and_input


class Scaled(nn.Module):
    """Counts how often it runs; takes a tensor, perhaps another one, and a number."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.calls = 0

    def forward(self, x, added=None, power=1):
        self.calls += 1
        y = self.factor * x**power
        return {"out": y if added is None else y + added, "power": power}


@pytest.fixture
def graphs(simulated_gpu):
    return simulated_gpu


def test_inputs_like_the_example_are_replayed_and_others_launched(graphs):
    inner, x = Scaled(), torch.arange(6.0).view(2, 3)
    replayed = Replayed(inner, (x, None, 2))
    assert inner.calls == 1
    first = replayed(x, None, 2)
    kept = first["out"].clone()
    second = replayed(x + 1, None, 2)
    assert replayed._graph.replays == 2
    assert torch.equal(first["out"], kept), "no call sees what another one left"
    assert torch.equal(second["out"], 2 * (x + 1) ** 2)
    for others in ((x[:1], None, 2), (x.double(), None, 2), (x, x, 2), (x, None, 3), (x, None, 2.0), (x, None, True)):
        torch.testing.assert_close(replayed(*others)["out"], inner(*others)["out"])
    assert replayed._graph.replays == 2


def test_what_a_graph_cannot_be_given_anew_is_refused_with_its_reason(graphs, monkeypatch):
    with pytest.raises(TypeError, match="replayed for tensors, numbers and None, not for a list"):
        Replayed(Scaled(), ([torch.ones(2)],))
    monkeypatch.undo()
    for inputs in ((torch.ones(2),), (3.0,)):
        with pytest.raises(TypeError, match="of one on the CPU it would keep the values"):
            replay.capture(Scaled(), inputs, None)


def test_a_copy_of_what_is_replayed_launches_and_has_weights_of_its_own(graphs):
    x = torch.ones(2)
    replayed = Replayed(Scaled(), (x,))
    for copied in (copy.deepcopy(replayed), pickle.loads(pickle.dumps(replayed))):
        with torch.no_grad():
            copied.inner.factor.fill_(5.0)
        assert torch.equal(copied(x)["out"], 5 * x)
        assert torch.equal(replayed(x)["out"], 2 * x)
    assert copied._graph is None
    held = io.BytesIO()
    torch.save(replayed.state_dict(), held)
    held.seek(0)
    replayed.load_state_dict(torch.load(held))


def test_what_moves_launches(graphs):
    x = torch.ones(2)
    for made in (Replayed(Scaled(), (x,)), Chosen(Replayed(Scaled(), (x,)), Scaled(), (x,))):
        moved = made.double()
        assert moved(x.double())["out"].dtype == torch.float64
        graphs.capturing = True
        assert moved(x.double())["out"].dtype == torch.float64
        graphs.capturing = False


def test_one_module_is_called_and_another_captured(graphs):
    x = torch.ones(2)
    calls, captured = Replayed(Scaled(2.0), (x,)), Scaled(3.0)
    chosen = for_both(calls, captured, (x,))
    assert for_capture(chosen) is captured
    assert torch.equal(chosen(x)["out"], 2 * x)
    graphs.capturing = True
    assert torch.equal(chosen(x)["out"], 3 * x)
    before = calls._graph.replays
    assert torch.equal(chosen(x[:1])["out"], 2 * x[:1]), "of other shapes: what is called, launched"
    assert calls._graph.replays == before
    assert captured.calls == 1


def test_what_is_exported_holds_the_module_and_not_what_a_graph_gave(graphs):
    x = torch.ones(2)
    replayed = Replayed(nn.Linear(2, 2), (x,))
    for one in (replayed, Chosen(replayed, nn.Linear(2, 2), (x,))):
        exported = torch.export.export(one, (x,), strict=False).module()
        assert replayed._graph.replays == 0
        torch.testing.assert_close(exported(3 * x), replayed.inner(3 * x))


def test_where_one_module_does_both_there_is_no_other(graphs):
    x = torch.ones(2)
    inner = Scaled()
    replayed = Replayed(inner, (x,))
    assert for_both(replayed, inner, (x,)) is replayed
    assert for_both(inner, inner, (x,)) is inner
    assert for_capture(replayed) is for_capture(inner) is inner


def test_a_merged_model_that_is_captured_runs_what_is_fastest_on_the_device(simulated_gpu):
    """Whatever is called: on the way to a choice the host's noise decides between graphs that cost it the same."""
    simulated_gpu.times |= {"launches": 9.0, "folded": 0.5, "graph": 1.0}
    simulated_gpu.on_device |= {"graph": 10.3e-6, "folded graph": 20e-6, "compiled graph": 12e-6}
    model, x = model_and_input()
    for merged in (merged_there(model, x), merged_there(model, x)):
        assert (merged.variant, merged.captured) == ("folded", "graph")
        assert not merged.training
        assert "whole model, called: plain (measured faster as 'folded'" in merged.explain()
        assert (
            "the whole: folded (measured per call: launches 9000 ms, folded 500 ms, graph 1000 ms" in merged.explain()
        )
        captured_as = (
            "captured into a CUDA graph of yours: as graph launches it (measured on the device: graph 0.0103 ms"
        )
        assert captured_as in merged.explain()
        ran: list[str] = []
        merged.inner.calls.register_forward_hook(lambda *_, ran=ran: ran.append("called"))
        merged.inner.captured.register_forward_hook(lambda *_, ran=ran: ran.append("captured"))
        expected = model(x)
        torch.testing.assert_close(merged(x), expected, rtol=1e-4, atol=1e-5)
        simulated_gpu.capturing = True
        torch.testing.assert_close(merged(x), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(merged(x[:1]), expected[:1], rtol=1e-4, atol=1e-5)
        simulated_gpu.capturing = False
        assert ran == ["called", "captured", "called"]
    assert merged.cached


def test_what_neither_choice_uses_is_freed(simulated_gpu, monkeypatch):
    simulated_gpu.times["folded"] = 0.5
    simulated_gpu.on_device["folded compiled graph"] = 0.5
    made: list[weakref.ref[FakeGraph]] = []
    capture = replay.capture

    def counted(*given):
        graph, outputs = capture(*given)
        made.append(weakref.ref(graph))
        return graph, outputs

    monkeypatch.setattr(replay, "capture", counted)
    merged = merged_there(*model_and_input())
    gc.collect()
    assert (merged.variant, merged.captured) == ("folded", "folded compiled graph")
    assert len(made) == 7
    assert not any(one() for one in made), "neither choice replays a graph of its own"
    assert not any(isinstance(one, Replayed) for one in merged.modules())


class OnGpu(torch.Tensor):
    """Says that it is on one."""

    is_cuda = property(lambda _: True)
    device = property(lambda _: torch.device("cuda", 0))


@pytest.mark.parametrize(("forks", "called"), [(False, [False, False]), (True, [False, True, False])])
def test_a_capture_calls_once_before_and_once_more_where_branches_are_rehearsed(monkeypatch, forks, called):
    """Each call of a large model takes a new process a fifth of a second."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    from joulemark.merged import forks as forks_

    class Inner(nn.Module):
        def forward(self, x):
            seen.append(forks_._rehearsed.get())
            return x

    class Branching(forks_.Forked):
        def __init__(self):
            nn.Module.__init__(self)

    seen, stream = [], SimpleNamespace(wait_stream=lambda _: None)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    for name in ("current_stream", "synchronize", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    monkeypatch.setattr(replay, "_capturing_stream", lambda _: stream)
    inner = Inner()
    if forks:
        inner.branches = Branching()
    replay.capture(inner, (torch.ones(2).as_subclass(OnGpu),), None)
    assert seen == called
