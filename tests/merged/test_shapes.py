"""Shapes of a graph's values, run for once and kept: the same as those of a run, never those of another graph."""

from __future__ import annotations

import json
import subprocess
import sys
from textwrap import dedent

import pytest
import torch
from torch import nn
from torch.fx.passes.shape_prop import ShapeProp

from joulemark.merged import cache, shapes
from joulemark.merged.graph import trace
from joulemark.merged.in_place import NotMergeable
from joulemark.merged.merged_model import MergedModel
from joulemark.merged.seams import keep_channels_last
from tests.merged.fakes import model_and_input

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def runs(monkeypatch):
    """How many runs found shapes."""
    found, own = [], shapes.find

    def find(*given):
        found.append(own(*given))
        return found[-1]

    monkeypatch.setattr(shapes, "find", find)
    return found


def metas(graph):
    return {node.name: node.meta.get("tensor_meta") for node in graph.graph.nodes}


def entries():
    return list(cache.folder().glob("shapes-*.json"))


class Splitting(nn.Module):
    """A tensor in several, a sum that is changed in place, and views."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        y = self.a(x)
        parts = torch.chunk(y, 2, 1)
        first = parts[0] + 1
        first.add_(parts[1])
        return torch.cat([first.flatten(2), y.flatten(2)], 1)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("make", [model_and_input, lambda: (Splitting().eval(), torch.randn(2, 3, 9, 8))])
def test_what_the_disk_knows_is_what_a_run_finds(make, memory, runs):
    model, x = make()
    x = x.contiguous(memory_format=memory)
    without = trace(model, (x,))
    first, second = (trace(model, (x,), on_disk=True) for _ in range(2))
    assert runs == [True, True, False]
    assert metas(without) == metas(first) == metas(second)
    assert any(one is not None for one in metas(second).values())
    assert str(first.graph) == str(second.graph), "what is changed in place was kept apart in both"
    torch.testing.assert_close(second(x), model(x))


def test_values_of_several_tensors_are_known_too(runs):
    model, x = Splitting().eval(), torch.randn(2, 3, 9, 8)
    graphs = [torch.fx.symbolic_trace(model.requires_grad_(False)) for _ in range(2)]
    for graph in graphs:
        shapes.find(graph, (x,), lambda graph=graph: ShapeProp(graph).propagate(x), True)
    assert runs == [True, False]
    several = [meta for meta in metas(graphs[1]).values() if type(meta) is tuple]
    assert [len(one) for one in several] == [2]
    assert metas(graphs[0]) == metas(graphs[1])


def test_layouts_are_found_once(runs):
    class Joined(nn.Module):
        def forward(self, x):
            return torch.cat([x, x.mean((2, 3), keepdim=True).expand_as(x)], 1)

    x = torch.randn(2, 6, 5, 4).contiguous(memory_format=torch.channels_last)
    graphs = [trace(Joined(), (x,)) for _ in range(2)]
    runs.clear()
    assert [keep_channels_last(graph, (x,), on_disk=True) for graph in graphs] == [1, 1]
    assert runs == [True, True, False, False]
    assert metas(graphs[0]) == metas(graphs[1])


class Shaped(nn.Module):
    def __init__(self, channels=4, kernel=3, slope=0.1):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, channels, kernel), nn.LeakyReLU(slope)

    def forward(self, x):
        return self.b(self.a(x)).sum(self.dim)

    dim = 1


class OtherWay(Shaped):
    dim = (1, 2)


def test_another_model_layout_or_format_is_run(runs):
    x = torch.randn(2, 3, 9, 8)
    models = (Shaped(), Shaped(5), Shaped(kernel=1), Shaped(slope=0.2), OtherWay())
    others = [(one, x) for one in models]
    others += [(Shaped(), x[:1]), (Shaped(), x.contiguous(memory_format=torch.channels_last))]
    others += [(Shaped().double(), x.double()), (Shaped().to(memory_format=torch.channels_last), x)]
    for model, given in others:
        trace(model.eval(), (given,), on_disk=True)
    assert runs == [True] * len(others)
    for model, given in others:
        trace(model.eval(), (given,), on_disk=True)
    assert runs[len(others) :] == [False] * len(others)


def test_under_autocast_nothing_is_kept(runs):
    model, x = model_and_input()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            graph = trace(model, (x,), on_disk=True)
    assert runs == [True, True]
    assert not entries()
    assert metas(graph)["stem"].dtype == torch.bfloat16


class ByValue(nn.Module):
    """Its output has as many rows as its input has positive ones."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x):
        return self.a(x)[x[:, 0] > 0]


def test_shapes_that_depend_on_values_are_kept_nowhere(runs):
    x = torch.ones(4, 3)
    first = trace(ByValue(), (x,), on_disk=True)
    x[0] = -1
    second = trace(ByValue(), (x,), on_disk=True)
    assert runs == [True, True]
    assert [metas(one)["getitem_1"].shape[0] for one in (first, second)] == [4, 3]
    assert not entries()


class Counting(nn.Module):
    """Where it counts its calls it is no graph."""

    def __init__(self, counts):
        super().__init__()
        self.a, self.calls, self.counts = nn.Conv2d(3, 3, 1), 0, counts

    def forward(self, x):
        self.calls += self.counts
        return self.a(x)


def test_a_model_with_a_state_is_none_either_where_the_disk_knows_its_shapes(runs):
    x = torch.randn(1, 3, 4, 4)
    trace(Counting(0), (x,), on_disk=True)
    assert entries()
    with pytest.raises(NotMergeable, match="each call changes its 'calls'"):
        trace(Counting(1), (x,), on_disk=True)
    assert runs[0] is True


@pytest.mark.parametrize("counts", [0, 1])
def test_a_model_that_fails_or_changes_leaves_nothing(counts):
    class Failing(Counting):
        def forward(self, x):
            return super().forward(x).view(7) if not counts else super().forward(x)

    for _ in range(2):
        with pytest.raises(NotMergeable):
            trace(Failing(counts), (torch.randn(1, 3, 4, 4),), on_disk=True)
    assert not entries()


def test_a_broken_entry_is_found_anew(runs):
    model, x = model_and_input()
    whole = trace(model, (x,), on_disk=True)
    (path,) = entries()
    good = json.loads(path.read_text())
    first = good[0]
    tensor = first["tensors"][0]
    broken = [[], {}, 3, good[1:], [{**first, "base": 99}, *good[1:]], [{**first, "base": -1}, *good[1:]]]
    broken += [
        [{**first, "many": None}, *good[1:]],
        [{**first, "tensors": [{**tensor, "dtype": "torch.f8"}]}, *good[1:]],
    ]
    broken += [[{**first, "tensors": [{**tensor, "shape": ["2"]}]}, *good[1:]]]
    for one in broken:
        path.write_text(json.dumps(one))
        assert metas(trace(model, (x,), on_disk=True)) == metas(whole), one
    assert runs == [True] * (1 + len(broken))
    assert json.loads(path.read_text()) == good


def cut(x):
    return x[:, :2]


def doubled(x):
    """By torch's compiler, which refuses to work under what watches operators."""
    return torch.compile(lambda y: y * 2, fullgraph=True, backend="eager")(x)


torch.fx.wrap("cut")
torch.fx.wrap("doubled")


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 8, 1)

    def forward(self, x):
        return cut(self.a(x))


def test_shapes_by_functions_of_the_users_are_kept_nowhere(runs, monkeypatch):
    x = torch.randn(1, 3, 4, 4)
    trace(Wrapped(), (x,), on_disk=True)
    monkeypatch.setattr(cut, "__code__", (lambda x: x[:, :3]).__code__)
    assert metas(trace(Wrapped(), (x,), on_disk=True))["cut"].shape[1] == 3
    assert runs == [True, True]
    assert not entries()


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_function_of_the_users_may_compile(on_disk):
    class Doubled(Wrapped):
        def forward(self, x):
            return doubled(self.a(x))

    torch._dynamo.reset()
    assert trace(Doubled(), (torch.randn(1, 3, 4, 4),), on_disk=on_disk) is not None


def hooked(model):
    model.a.register_forward_hook(lambda module, given, out: out[:, :3])


def patched(model):
    model.a.forward = lambda x: x


@pytest.mark.parametrize("change", [hooked, patched])
def test_a_module_that_does_more_than_its_class_has_shapes_of_its_own(runs, change):
    model, other, x = Shaped().eval(), Shaped().eval(), torch.randn(2, 3, 9, 8)
    change(other)
    for one in (model, other):
        assert metas(trace(one, (x,), on_disk=True)) == metas(trace(one, (x,)))
    assert len(entries()) == 1
    assert all(runs)


@pytest.mark.parametrize(
    "split", [lambda x, n: torch.split(x, n.tolist())[0], lambda x, n: torch.tensor_split(x, n)[0]]
)
def test_values_that_are_read_without_an_operator_are_seen(runs, split):
    class Splitted(nn.Module):
        def forward(self, x, n):
            return split(x, n) * 2

    x = torch.randn(7, 3)
    for first in (4, 5):
        made = trace(Splitted(), (x, torch.tensor([first, 7 - first])), on_disk=True)
        assert metas(made)["mul"].shape[0] == first
    assert runs == [True, True]
    assert not entries()


def test_tracing_imports_no_compiler():
    """Of torch's modes the first one that is asked imports it, unless it is told not to."""
    text = """
        import sys, torch
        from torch import nn
        from joulemark.merged.graph import trace
        before = {one for one in ("torch._dynamo", "torch._inductor") if one in sys.modules}
        for _ in range(2):
            graph = trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (torch.ones(1, 3, 5, 5),), on_disk=True)
        assert graph.graph.find_nodes(op="call_module", target="0")[0].meta["tensor_meta"].shape[1] == 4
        print(sorted({one for one in ("torch._dynamo", "torch._inductor") if one in sys.modules} - before))
    """
    made = subprocess.run([sys.executable, "-c", dedent(text)], capture_output=True, text=True, check=True)
    assert made.stdout == "[]\n"
    assert entries()


def test_a_merged_part_is_known_again_and_told_from_another(runs):
    class Pooled(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.a, self.size = nn.Conv2d(3, 8, 1), size

        def forward(self, x):
            return torch.nn.functional.avg_pool2d(self.a(x), self.size)

    x = torch.randn(1, 3, 12, 12)
    for size, took_s, ran in ((2, 1.0, True), (2, 2.0, False), (3, 1.0, True)):
        part = MergedModel(trace(Pooled(size).eval(), (x,)), [], took_s=took_s)
        model = nn.Sequential(part, nn.Conv2d(8, 4, 1)).eval()
        runs.clear()
        assert metas(trace(model, (x,), on_disk=True))["_0"].shape[2] == 12 // size
        assert runs == [ran]
