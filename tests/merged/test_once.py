"""What merging does once: no trace is run, no kernel tried, no weight drawn where that is known or thrown away."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from joulemark.merged import merge, pooling, seams
from joulemark.merged.graph import trace
from joulemark.merged.linears import as_convolutions
from joulemark.merged.trying import tried_at_once
from tests.merged.fakes import RATES, fake_family, model_and_input


def test_a_trace_runs_layers_as_the_models_own_output_is_made(simulated_gpu, monkeypatch):
    """So that cuDNN has plans for them by then."""
    seen = []

    class Settings(nn.Module):
        def forward(self, x):
            seen.append((torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic))
            return x.relu()

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    model, x = model_and_input()
    merge(nn.Sequential(model, Settings()).eval(), x, rates=RATES, families=(fake_family(),), measure=False)
    assert len(seen) == 2
    assert set(seen) == {(False, True)}


def test_a_graph_whose_shapes_are_known_is_not_run_for_them(monkeypatch):
    class Side(nn.Module):
        def __init__(self, joins):
            super().__init__()
            self.joins, self.one, self.other = joins, nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

        def forward(self, x):
            parts = self.one(x), self.other(x)
            return torch.cat(parts, 1) if self.joins else parts[0] + parts[1]

    runs, propagated = [], seams.ShapeProp.propagate
    monkeypatch.setattr(
        seams.ShapeProp, "propagate", lambda self, *given: runs.append(given) or propagated(self, *given)
    )
    x = torch.randn(1, 3, 5, 5)
    for joins, unknown in ((False, False), (True, False), (False, True)):
        graph = trace(Side(joins).eval(), (x,))
        if unknown:
            next(node for node in graph.graph.nodes if node.op == "call_module").meta.clear()
        assert seams.keep_channels_last(graph, (x,)) == 0
        assert len(runs) == (joins or unknown), (joins, unknown)
        assert all("tensor_meta" in node.meta for node in graph.graph.nodes)
        runs.clear()


@pytest.mark.parametrize("fails", [False, True])
def test_poolings_alike_are_proved_once_and_what_is_found_holds_for_all(fails, monkeypatch):
    proved = []

    def prove(self, like):
        proved.append((self.kernel, like.shape[1]))
        self.own = not (fails and like.shape[1] == 3)
        return None if self.own else "it fails"

    monkeypatch.setattr(pooling.Pooling, "prove", prove)
    layers = [nn.MaxPool2d(3, 1, 1), nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.Conv2d(3, 5, 1), nn.MaxPool2d(3)]
    layers += [nn.MaxPool2d(3, 1, 1), nn.MaxPool2d(3, 1, 1)]
    x = torch.randn(1, 3, 9, 9)
    graph = trace(nn.Sequential(*layers).eval(), (x,))
    became = pooling.replace_poolings(graph, x.device, x.dtype)
    assert proved == [((3, 3), 3), ((3, 3), 3), ((3, 3), 5), ((3, 3), 5)]
    instead = "by torch's operator (it fails)" if fails else "by one kernel"
    assert became == {**dict.fromkeys("012", instead), **dict.fromkeys("456", "by one kernel")}
    made = [graph.get_submodule(f"pooling_{number}") for number in range(6)]
    assert [one.own for one in made] == 3 * [not fails] + 3 * [True]
    assert torch.equal(graph(x), nn.Sequential(*layers)(x))


def test_kernels_are_tried_at_once_on_the_callers_stream(monkeypatch):
    class Stream:
        waited = 0

        def synchronize(self):
            Stream.waited += 1

    inside = threading.local()

    @contextmanager
    def on(what):
        inside.on = (*getattr(inside, "on", ()), what)
        yield

    stream, met = Stream(), threading.Barrier(2, timeout=30)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "stream", on)

    def trial(number):
        def tried():
            met.wait()  # for the other one
            return number, torch.is_grad_enabled(), inside.on[-2:]

        return tried

    device = torch.device("cuda", 0)
    found = tried_at_once([trial(0), trial(1)], device)
    assert found == [(number, False, (device, stream)) for number in range(2)]
    assert Stream.waited == 2
    assert tried_at_once([lambda: 1], torch.device("cpu")) == [1]


def test_a_linear_layer_becomes_a_convolution_without_weights_that_are_drawn_and_thrown_away():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4, bias=False)).eval().double()
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    graph = trace(model, (x,))
    before = torch.get_rng_state()
    assert as_convolutions(graph) == 2
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(one.requires_grad or one.is_meta for one in graph.parameters())
    torch.testing.assert_close(graph(x), model(x))


@pytest.mark.parametrize("axis", [1, -3])
def test_shapes_of_what_is_turned_are_known_without_a_run(axis):
    """Where no permutation is left, no node lacks a shape, and none is found anew."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(6, 4, 1)
            self.wide, self.between, self.narrow = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 6)

        def forward(self, x):
            x = self.between(self.wide(self.first(x).permute(0, 2, 3, axis)))
            return self.last(self.narrow(x).permute(0, axis + 2, 1, 2))

    model, x = Turned().eval(), torch.randn(2, 3, 9, 7)
    graph = trace(model, (x,))
    assert as_convolutions(graph) == 2
    known = {node: node.meta["tensor_meta"] for node in graph.graph.nodes if node.op != "output"}
    assert seams.keep_channels_last(seams.weights_channels_last(graph), (x,)) == 0
    seams.ShapeProp(graph).propagate(x)
    assert len(known) == 6
    assert [one.shape for one in known.values()] == [node.meta["tensor_meta"].shape for node in known]
    assert all(len(one.stride) == len(one.shape) for one in known.values())
