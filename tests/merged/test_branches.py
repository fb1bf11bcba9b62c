"""Branches on several streams: orders and memory on a device that is simulated, and what is found in known networks."""

from __future__ import annotations

import copy
import operator
import pickle
import random
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F
from torchvision import models

from joulemark.merged.branches import START, WORTH, dependencies, schedule
from joulemark.merged.forks import Forked
from joulemark.merged.graph import trace
from joulemark.merged.in_place import Tracer
from joulemark.merged.replay import for_capture
from joulemark.workloads import networks
from tests.merged.fakes import RATES, AtOnce, merged_there, pair_and_input

RARE = 7
"""Of a simulated operation's number: what it multiplies by, so that the order of its operands counts."""


@dataclass
class Operation:
    """What a stream was given: arithmetic over blocks; ``behind``: a bit for each operation known to come before."""

    reads: tuple[int, ...]
    writes: int
    behind: int
    number: int


@dataclass
class Device:
    """Streams, events and an allocator as torch has them; a value is a tensor of one number, the address of its block.

    A block goes back to its stream when the last tensor on it dies, and is the next one that this stream gets. Torch
    deals out streams in turns: ``real`` says which of them are one.
    """

    real: tuple[int, ...] = (0, 1, 2, 3)
    current: int = 0
    operations: list[Operation] = field(default_factory=list)
    free: dict[int, list[int]] = field(default_factory=dict)
    blocks: int = 0
    seen: dict[int, int] = field(default_factory=dict)

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, self.real[stream]
        yield
        self.current = before

    def record(self, stream):
        return self.seen.get(self.real[stream], 0)

    def wait(self, stream, event):
        stream = self.real[stream]
        self.seen[stream] = self.seen.get(stream, 0) | event

    def allocate(self, count=1):
        home = self.current
        mine = self.free.setdefault(home, [])
        while len(mine) < count:
            mine.append(self.blocks)
            self.blocks += 1
        addresses = [mine.pop() for _ in range(count)]
        memory = np.array(addresses, dtype=np.int64)
        weakref.finalize(memory, lambda: self.free[home].extend(addresses))
        return torch.from_numpy(memory)

    def launch(self, reads, out, number):
        behind = self.seen.get(self.current, 0)
        self.seen[self.current] = behind | 1 << len(self.operations)
        self.operations.append(Operation(tuple(int(one) for one in reads), int(out), behind, number))
        return out

    def races(self):
        """Pairs of operations on one block, one of which writes it, of which neither is known to come first."""
        found, writers, readers = [], {}, {}
        for number, one in enumerate(self.operations):
            before = writers.get(one.writes, 0) | readers.get(one.writes, 0)
            for address in one.reads:
                before |= writers.get(address, 0)
                readers[address] = readers.get(address, 0) | 1 << number
            writers[one.writes] = writers.get(one.writes, 0) | 1 << number
            if missing := before & ~one.behind:
                found.append((missing.bit_length() - 1, number))
        return found

    def run(self, chance):
        """Contents of all blocks after the operations, in any order that streams and events allow."""
        memory, done, left = [0] * self.blocks, 0, list(range(len(self.operations)))
        while left:
            number = chance.choice([one for one in left if not self.operations[one].behind & ~done])
            left.remove(number)
            done |= 1 << number
            one = self.operations[number]
            memory[one.writes] = (sum(RARE * memory[read] + 1 for read in one.reads) * RARE + one.number) % 1_000_003
        return memory


class Work(nn.Module):
    """One node of a random graph on a simulated device."""

    def __init__(self, device, number, kind):
        super().__init__()
        self.device, self.number, self.kind = device, number, kind
        self.inplace = kind == "in place"

    def forward(self, *inputs):
        device = self.device
        if self.kind == "view":
            return inputs[0].view(1)
        if self.kind == "in place":
            return device.launch(inputs, inputs[0], self.number)
        if self.kind == "workspace":
            scratch = device.allocate()
            device.launch(inputs, scratch, self.number)
            return device.launch((scratch, *inputs), device.allocate(), self.number)
        out = device.launch(inputs, device.allocate(), self.number)
        return (out, device.launch(inputs, device.allocate(), -self.number)) if self.kind == "pair" else out


@st.composite
def graphs(draw):
    """Kinds of nodes, what each reads, and which values are returned.

    What changes in place is read by nothing before: :func:`joulemark.merged.in_place.keep_apart` sees to that.
    """
    kinds, reads = [], []
    for number in range(draw(st.integers(1, 24))):
        kind = draw(st.sampled_from(["plain"] * 4 + ["view", "in place", "workspace", "pair"]))
        values = [-1, *range(max(0, number - 6), number)]
        taken = draw(st.lists(st.sampled_from(values), min_size=1, max_size=1 if kind == "view" else 3, unique=True))
        if kind == "in place":
            read = {one for before in reads for one in before}
            alone = [one for one in range(number) if kinds[one] in ("plain", "workspace") and one not in read]
            kind, taken = ("in place", [*alone[-1:], *taken[1:]]) if alone else ("plain", taken)
        kinds.append(kind)
        reads.append(taken)
    returned = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=3, unique=True))
    return kinds, reads, returned


def built(device, kinds, reads, returned):
    made, root = fx.Graph(), nn.Module()
    nodes = {-1: made.placeholder("x")}
    for number, kind in enumerate(kinds):
        setattr(root, f"work_{number}", Work(device, number + 1, kind))
        nodes[number] = made.call_module(f"work_{number}", tuple(nodes[one] for one in reads[number]))
        if kind == "pair":
            nodes[number] = made.call_function(operator.getitem, (nodes[number], number % 2))
    made.output([nodes[one] for one in returned])
    return fx.GraphModule(root, made)


def after_calls(graph, device, streams=None, calls=2):
    """The module, and what a user makes of what each call returns, the next one's input."""
    module = Forked(graph, None, None, lambda count: streams)
    values = [device.launch((), device.allocate(), 1000)]
    for _ in range(calls):
        values.append(device.launch(module(values[-1]), device.allocate(), 2000))
    return module, values[1:]


@settings(max_examples=100, deadline=None)
@given(graphs(), st.sampled_from([(0, 1, 2, 3), (0, 1, 0, 1)]), st.integers(0, 2**32))
def test_no_block_is_met_too_soon_and_every_order_gives_what_one_by_one_does(described, real, seed):
    alone, device, chance = Device(), Device(real), random.Random(seed)
    _, expected = after_calls(built(alone, *described), alone)
    _, found = after_calls(built(device, *described), device, device)
    assert device.races() == []
    memory, beside = alone.run(chance), device.run(chance)
    assert [beside[int(one)] for one in found] == [memory[int(one)] for one in expected]
    everything = (1 << len(device.operations) - 1) - 1
    assert device.operations[-1].behind == everything, "the captured stream has joined all others"


class Step(nn.Module):
    """A node that does something with a device and what it reads."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, *inputs):
        return self.run(*inputs)


def with_rooms(device, parts=3, joins=3):
    """Branches of several lengths that write parts of what they are joined to, one of which is copied; several times.

    As :mod:`joulemark.merged.joining` has it: a part of a room is a block, a room is all of them.
    """
    made, root, number = fx.Graph(), nn.Module(), 0

    def step(run, *inputs):
        nonlocal number
        number += 1
        setattr(root, f"step_{number}", Step(run))
        return made.call_module(f"step_{number}", inputs)

    def work(mark):
        return lambda *read: device.launch(read, device.allocate(), mark)

    def join(room, *written):
        device.launch(written[-1:], room[-1:], 7)
        return room

    x = made.placeholder("x")
    for _ in range(joins):
        room = step(lambda _: device.allocate(parts), x)
        written = []
        for part in range(parts - 1):
            y, place = x, made.call_function(torch.narrow, (room, 0, part, 1))
            for _ in range(parts - part):
                y = step(work(part + 2), y)
            written.append(step(lambda y, out, mark=part: device.launch((y,), out, 11 + mark), y, place))
        copied = step(work(5), x)
        joined = step(join, room, *written, step(work(6), copied))
        x = step(lambda room: device.launch(room.split(1), device.allocate(), 13), joined)
    made.output([x])
    return fx.GraphModule(root, made)


@pytest.mark.parametrize("real", [(0, 1, 2, 3), (0, 1, 0, 1)])
def test_parts_of_a_room_are_written_on_several_streams(real):
    alone, device = Device(), Device(real)
    _, expected = after_calls(with_rooms(alone), alone)
    module, found = after_calls(with_rooms(device), device, device)
    assert module.schedule.streams > 2
    assert device.races() == []
    for seed in range(20):
        memory, beside = alone.run(random.Random(seed)), device.run(random.Random(seed))
        assert [beside[int(one)] for one in found] == [memory[int(one)] for one in expected]


FORKS = ["plain"] * 9, [[-1], [0], [0], [1], [2], [4], [3], [6], [7, 5]], [8]
UNREAD = ["plain"] * 5, [[-1], [0], [0], [1], [3]], [4]
"""With a branch that nothing reads."""


@pytest.mark.parametrize("fault", [None, "held", "waits", "join"])
def test_the_simulation_finds_what_is_left_out(monkeypatch, fault):
    """Without references that are held, without events between steps, or without the join at the end."""
    from joulemark.merged import forks

    if fault == "held":
        monkeypatch.setattr(forks._Call, "_hold", lambda self, step, value: None)
    if fault == "join":
        monkeypatch.setattr(forks._Call, "_join", lambda self: None)
    device = Device()
    module = Forked(built(device, *(UNREAD if fault == "join" else FORKS)), None, None, lambda count: device)
    if fault == "waits":
        steps = [replace(one, waits=one.waits if START in one.waits else ()) for one in module.schedule.steps]
        module._schedule = replace(module.schedule, steps=tuple(steps))
    x = device.launch((), device.allocate(), 1000)
    for _ in range(3):
        x = device.launch(module(x), device.allocate(), 2000)
    everything = (1 << len(device.operations) - 1) - 1
    assert bool(device.races() or device.operations[-1].behind != everything) is bool(fault)


def test_blocks_behind_each_other_take_the_memory_of_one():
    kinds, reads = ["plain"], [[-1]]
    used = []
    for _ in range(12):
        end = len(kinds)
        kinds += ["plain"] * 7
        reads += [[end - 1], [end], [end + 1], [end - 1], [end + 3], [end - 1], [end + 2, end + 4, end + 5]]
        device = Device()
        module, _ = after_calls(built(device, kinds, reads, [len(kinds) - 1]), device, device, calls=1)
        assert (module.schedule.streams, module.schedule.regions) == (3, len(used) + 1)
        used.append(device.blocks)
    assert len(set(used[2:])) == 1


def traced(build):
    """A network as a graph without shapes; nothing of it is computed."""
    with torch.device("meta"):
        model = build().eval()
    return fx.GraphModule(model, Tracer().trace(model))


NETWORKS = {
    "inception_v4": (networks.InceptionV4, 19, 4),
    "resnet50": (lambda: models.resnet50(weights=None), 4, 2),
    "deepcam": (lambda: networks.DeepCam(models.resnet50(weights=None)), 5, 4),
    "mobilenet_v2": (lambda: models.mobilenet_v2(weights=None), 0, 1),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_branches_of_known_networks(name):
    build, regions, streams = NETWORKS[name]
    graph = traced(build)
    found = schedule(graph, None, None)
    assert (found.regions, found.streams) == (regions, streams)
    assert (found.gain > WORTH) is bool(regions)
    nodes, before = list(graph.graph.nodes), dependencies(graph)
    assert sorted(nodes[step.node].name for step in found.steps) == sorted(node.name for node in before)
    clocks = {nodes[step.node]: step for step in found.steps}
    for node, step in clocks.items():
        assert all(step.clock[clocks[one].stream] >= clocks[one].clock[clocks[one].stream] for one in before[node])
    seen = [(0,) * streams] * streams
    for step in found.steps:
        events = [found.steps[one] for one in step.waits]
        for one in events:
            known = [seen[step.stream], *(other.clock for other in events if other is not one)]
            assert all(clock[one.stream] < one.clock[one.stream] for clock in known), "what is implied is no event"
        seen[step.stream] = step.clock


def test_the_longest_way_stays_on_the_stream_that_is_captured():
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.relu, (x,))
    short = graph.call_function(torch.neg, (first,))
    long = [graph.call_function(torch.exp, (first,))]
    for _ in range(3):
        long.append(graph.call_function(torch.exp, (long[-1],)))
    viewed = graph.call_method("view", (short, -1))
    graph.output(graph.call_function(torch.add, (long[-1], viewed)))
    module = fx.GraphModule(nn.Module(), graph)
    found, nodes = schedule(module, None, None), list(module.graph.nodes)
    assert {nodes[one.node].name: one.stream for one in found.steps if one.stream} == {"neg": 1, "view": 1}
    assert found.gain == pytest.approx(1 / 7)
    assert str(found) == "1 parallel region on 2 streams"
    assert [one.recorded for one in found.steps if nodes[one.node].name in ("relu", "neg", "view", "add")] == [
        True, False, True, False
    ]  # fmt: skip
    nodes[2].meta["seconds"] = 1e-9  # known times count only beside rates
    assert schedule(module, None, None) == found


class Changing(nn.Module):
    """Reads what it has changed in place, and a tensor that another branch changes."""

    def forward(self, x):
        y, z = x + 1, x * 2
        y.add_(5)
        z.mul_(3)
        w = z.view(-1) * 2
        return torch.cat([y.flatten(), z.flatten() + 1, w, torch.zeros(2)])


def test_what_a_model_changes_in_place_is_read_behind_that():
    model, x = Changing(), torch.randn(3, 4)
    graph = trace(model, (x,))
    nodes, before = {one.name: one for one in graph.graph.nodes}, dependencies(graph)
    change = nodes["add_"]
    [late] = [one for one in before if change in before[one]]
    assert change not in late.all_input_nodes
    assert torch.equal(Forked(graph, RATES, "fp32", lambda count: AtOnce())(x), model(x))


def test_what_comes_back_is_the_callers_own():
    class Named(nn.Module):
        def forward(self, x):
            return {"both": [x + 1, (x * 2, None)], "maximum": torch.max(x, 0)}

    x = torch.randn(3, 2)
    out = Forked(trace(Named(), (x,)), None, None, lambda count: AtOnce())(x)
    assert (type(out), type(out["both"]), type(out["both"][1])) == (dict, list, tuple)
    assert torch.equal(out["maximum"].values, x.max(0).values)
    out["both"].append(out.pop("maximum"))
    assert len(out["both"]) == 3


def test_a_copy_makes_its_own_schedule():
    graph = built(Device(), *FORKS)
    module = Forked(graph, None, None)
    first = module.schedule
    for one in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert one._schedule is None
        assert one.schedule == first


class Tail(nn.Module):
    """What only holds a tensor: an output that no tree of torch's knows."""

    def __init__(self, value):
        super().__init__()
        self.value = value


def test_what_holds_tensors_unseen_is_kept_until_the_call_ends():
    device = Device()
    graph = built(device, ["plain"] * 7, [[-1], [0], [0], [1], [3], [4], [5, 2]], [6])
    graph.get_submodule("work_0").forward = lambda x: Tail(device.launch((x,), device.allocate(), 8))
    for name in ("work_1", "work_2"):
        graph.get_submodule(name).forward = lambda one: device.launch((one.value,), device.allocate(), 9)
    after_calls(graph, device, device)
    assert device.races() == []


class Stream:
    """What of a CUDA stream is used; keeps what it was asked for."""

    device = torch.device("cuda", 0)

    def __init__(self, *_):
        self.cuda_stream, self.asked = id(self), []

    def record_event(self):
        return self

    def wait_event(self, event):
        self.asked.append(event)


def test_a_capture_forks_from_its_stream_into_the_same_others_each_time(simulated_gpu, monkeypatch):
    from joulemark.merged import forks
    from joulemark.merged.kernels import launch

    first, on = Stream(), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: first)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: on.append(one) or torch.no_grad())
    monkeypatch.setattr(launch, "_behind_others", set())
    forks._others.cache_clear()
    assert forks.streams_of_capture(3) is None
    with forks.rehearsed():
        again = forks.streams_of_capture(2)
    assert forks.streams_of_capture(3) is None
    simulated_gpu.capturing = True
    streams = forks.streams_of_capture(3)
    streams.wait(2, streams.record(0))
    for one, number in ((streams, 0), (streams, 1), (again, 1), (streams, 2)):
        with one.on(number):
            pass
    assert on[0] is on[1] is not on[2], "the captured stream is the current one"
    assert (on[2].asked, on[0].asked, first.asked) == ([first], [], [])
    assert launch._behind_others == {on[2].cuda_stream}
    forks._others.cache_clear()


def test_a_step_that_fails_leaves_all_streams_joined():
    """Else the capture that failed could not be ended."""
    device = Device()
    graph = built(device, *FORKS)

    def fail(*_):
        raise ValueError("no memory")

    graph.get_submodule("work_7").forward = fail
    with pytest.raises(ValueError, match="no memory"):
        after_calls(graph, device, device)
    device.launch((), device.allocate(), 1)
    assert {one.stream for one in Forked(graph, None, None).schedule.steps} == {0, 1}
    assert device.operations[-1].behind == (1 << len(device.operations) - 1) - 1


class Beside(nn.Module):
    """Branches of two lengths, joined."""

    def __init__(self):
        super().__init__()
        self.first, self.short = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 4, 1)
        self.long = nn.Sequential(*(part for _ in range(4) for part in (nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU())))

    def forward(self, x):
        x = torch.relu(self.first(x))
        return torch.cat([self.long(x), torch.relu(self.short(x))], 1)


def test_who_captures_gets_branches_where_they_are_fastest_on_the_device(simulated_gpu):
    simulated_gpu.on_device |= {"branches graph": 0.9, "graph": 0.95}
    simulated_gpu.times["launches"] = 0.5
    torch.manual_seed(0)
    model, x = Beside().eval(), torch.randn(2, 3, 17, 19)
    for cached in (False, True):
        merged = merged_there(model, x)
        assert simulated_gpu.replayed[:4] == ["graph", "folded graph", "branches graph", "folded branches graph"]
        assert (merged.variant, merged.captured, merged.cached) == ("launches", "branches graph", cached)
        assert "the whole model, captured: branches (1 parallel region on 2 streams)" in merged.explain()
        forked = for_capture(merged.inner)
        assert isinstance(forked, Forked)
        assert forked.inner is merged.inner.calls, "one set of weights"
        expected = model(x)
        torch.testing.assert_close(merged(x), expected, rtol=1e-4, atol=1e-5)
        forked._streams = lambda count: AtOnce() if count == 2 else None
        simulated_gpu.capturing = True
        torch.testing.assert_close(merged(x), expected, rtol=1e-4, atol=1e-5)
        simulated_gpu.capturing = False


def test_the_rival_by_fused_kernels_has_its_branches_too(simulated_gpu, monkeypatch):
    """CuDNN's own do not run here: torch's operators stand in."""
    from joulemark.merged import paths

    def fused(layer, x, residual, weight, bias):
        y = F.conv2d(x, weight, bias, layer.stride, layer.padding)
        return torch.relu(y if residual is None else y + residual)

    monkeypatch.setattr(paths, "_fused", fused)
    simulated_gpu.on_device["fused branches graph"] = simulated_gpu.times["fused branches graph"] = 0.9
    model, x = Beside().eval(), torch.randn(2, 3, 17, 19)
    for cached in (False, True):
        merged = merged_there(model, x)
        assert [name for name in simulated_gpu.replayed if "branches" in name] == [
            "branches graph", "fused branches graph"
        ]  # fmt: skip
        assert (merged.variant, merged.captured, merged.cached) == (*["fused branches graph"] * 2, cached)
        assert "whole model: plain (measured faster as 'fused branches graph'" in merged.explain()
        assert "the whole model: branches (1 parallel region on 2 streams)" in merged.explain()
        torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)


def test_branches_that_are_hardly_faster_are_not_taken(simulated_gpu):
    simulated_gpu.on_device |= {"branches graph": 0.895, "graph": 0.9}
    merged = merged_there(Beside().eval(), torch.randn(2, 3, 17, 19))
    assert merged.captured == "graph"
    assert "branches graph 895 ms" in merged.explain()
    assert "parallel region" not in merged.explain()


def test_a_model_without_branches_has_no_such_variant(simulated_gpu):
    merged = merged_there(*pair_and_input())
    assert "graph" in merged.device_times
    assert not any("branches" in name for name in (*merged.device_times, *merged.problems))
