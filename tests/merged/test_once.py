"""What merging does once: no trace is run, no kernel tried, no weight drawn where that is known or thrown away."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from joulemark.merged import layer_norms, merge, pooling, seams, squeeze
from joulemark.merged.graph import trace
from joulemark.merged.layer_norms import as_channel_norms
from joulemark.merged.linears import as_convolutions
from joulemark.merged.norms import ChannelNorm
from joulemark.merged.squeeze import Excitation, replace_excitations
from joulemark.merged.trying import compile_at_once
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


@pytest.fixture
def streams(monkeypatch):
    """Contexts of CUDA that say what a thread is in; the caller's stream."""

    class Stream:
        inside, waited = threading.local(), 0

        def synchronize(self):
            self.waited += 1

    @contextmanager
    def on(what):
        before = getattr(Stream.inside, "on", ())
        Stream.inside.on = (*before, what)
        yield
        Stream.inside.on = before

    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return stream


def test_kernels_are_compiled_at_once_on_the_callers_stream(streams):
    met, seen = threading.Barrier(2, timeout=30), []

    def trial():
        met.wait()  # for the other one
        seen.append((torch.is_grad_enabled(), streams.inside.on))
        raise RuntimeError("no trial here counts")

    device = torch.device("cuda", 0)
    compile_at_once([("one", trial), ("other", trial), ("one", trial)], device)
    assert seen == 2 * [(False, (device, streams))]
    assert streams.waited == 2
    compile_at_once([("alone", trial)], device)  # as soon where it counts
    compile_at_once([("one", trial), ("other", trial)], torch.device("cpu"))
    assert len(seen) == 2


class Gated(nn.Module):
    def __init__(self, channels, squeezed):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, squeezed, 1), nn.ReLU()),
            *(nn.Conv2d(squeezed, channels, 1), nn.Sigmoid()),
        )

    def forward(self, x):
        return x * self.layers(x)


class Normed(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_an_excitation_is_compiled_without_torchs_products(monkeypatch):
    """CuBLAS keeps memory for each thread that calls it."""
    made = Excitation(nn.Conv2d(6, 4, 1), "relu", nn.Conv2d(4, 6, 1), False)
    monkeypatch.setattr(Excitation, "_by_kernels", lambda self, x: x.shape)
    monkeypatch.setattr(squeeze, "in_operators", lambda *_: pytest.fail("called"))
    assert made.run_small() == (2, 6, 3, 3)


@pytest.mark.parametrize("of", ["norms", "excitations", "poolings"])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_kernel_that_fails_beside_others_is_tried_by_itself(of, wrong, streams, monkeypatch):
    """A thread may meet a kernel that another one is loading; what counts is found by the caller, alone."""
    pytest.importorskip("triton")
    kinds = {"norms": ChannelNorm, "excitations": Excitation, "poolings": pooling.Pooling}
    threads = []

    def prove(self, *_):
        threads.append(threading.current_thread() is threading.main_thread())
        self.own = self.own and threads[-1] and not wrong
        return None if self.own else "it fails"

    monkeypatch.setattr(kinds[of], "prove", prove)
    ran = lambda self, x: threads.append(threading.current_thread() is threading.main_thread())  # noqa: E731
    monkeypatch.setattr(Excitation, "_by_kernels", ran)
    for module in (layer_norms, squeeze, pooling):
        monkeypatch.setattr(module, "compile_at_once", lambda one, _: compile_at_once(one, torch.device("cuda", 0)))
    widths = (8, 64, 128, 8)  # the last two are compiled for what others are, but for norms
    parts = {
        "norms": [Normed(one) for one in widths],
        "excitations": [Gated(one, 4 if one < 64 else 20) for one in widths],
        "poolings": [nn.MaxPool2d(3, 1, 1) for _ in widths],
    }[of]
    between = [nn.Conv2d(one, other, 3) for one, other in zip((3, 8, 64, 128), widths, strict=True)]
    layers = [one for pair in zip(between, parts, strict=True) for one in (*pair, nn.ReLU())]
    x = torch.randn(1, 3, 12, 12)
    if of == "norms":  # a norm behind a convolution is a part of that
        layers = [one for pair in zip(between, parts, strict=True) for one in (pair[0], nn.Tanh(), pair[1])]
    graph = trace(nn.Sequential(*layers).eval(), (x,))
    if of == "poolings":
        found = pooling.replace_poolings(graph, x.device, x.dtype)
    else:
        found = as_channel_norms(graph).taken if of == "norms" else replace_excitations(graph)
    made = [one for one in graph.modules() if isinstance(one, kinds[of])]
    assert len(found) == len(made) == 4
    assert all(("it fails" in one) == wrong for one in found.values())
    assert [one.own for one in made] == 4 * [not wrong]
    assert threads == (3 if of == "norms" else 2) * [False] + (3 if of == "poolings" else 4) * [True]


@pytest.mark.parametrize("of", ["excitations", "poolings"])
def test_what_kernels_are_compiled_for_is_what_they_are_given_as_constants(of, monkeypatch):
    """Of two that agree in it one is compiled; where two differ no more is compiled alike than must be."""
    pytest.importorskip("triton")
    from joulemark.merged import excitation, windows

    given = []

    class Recorded:
        def __init__(self, kernel):
            self.constants = [one for one in kernel.params if one.is_constexpr]

        def __getitem__(self, grid):
            return lambda *all_, **more: given.append(tuple(all_[one.num] for one in self.constants))

    for module, name in ((windows, "_windows"), (excitation, "_pool"), (excitation, "_excite")):
        monkeypatch.setattr(module, name, Recorded(getattr(module, name)))
    told, constants = [], []
    sizes = [(channels, squeezed) for channels in (3, 8, 12, 32, 64, 96, 100, 128) for squeezed in (4, 16, 20, 70, 200)]
    for channels, squeezed in sizes:
        given.clear()
        x = torch.randn(2, channels, 5, 5)
        if of == "poolings":
            told.append(windows.compiled_for(channels))
            windows.pooled(x, True, (3, 3), (1, 1), (1, 1), True)
        else:
            told.append(excitation.compiled_for(channels, squeezed))
            weights = [torch.randn(squeezed, channels), torch.randn(squeezed)], [torch.randn(1), torch.randn(channels)]
            excitation.squeeze_and_excite(x, *weights, "relu", False)
        constants.append(tuple(given))
    assert all(constants)
    assert len(set(told)) == len(set(constants)) == len({*zip(told, constants, strict=True)}) > 3


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
