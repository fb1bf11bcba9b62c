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
from torchvision import models

from joulemark.merged.branches import START, dependencies, schedule
from joulemark.merged.forks import Forked, streams_of_capture
from joulemark.merged.in_place import Tracer
from joulemark.workloads import networks
from tests.merged.fakes import RATES

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

    A block goes back to its stream when the last tensor on it dies, and is the next one that this stream gets.
    """

    current: int = 0
    operations: list[Operation] = field(default_factory=list)
    free: dict[int, list[int]] = field(default_factory=dict)
    blocks: int = 0
    seen: dict[int, int] = field(default_factory=dict)

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def record(self, stream):
        return self.seen.get(stream, 0)

    def wait(self, stream, event):
        self.seen[stream] = self.seen.get(stream, 0) | event

    def allocate(self):
        home = self.current
        mine = self.free.setdefault(home, [])
        if not mine:
            mine.append(self.blocks)
            self.blocks += 1
        memory = np.array([mine.pop()], dtype=np.int64)
        address = int(memory[0])
        weakref.finalize(memory, lambda: self.free[home].append(address))
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
    """Kinds of nodes, what each reads, and which values are returned; what changes in place is read by it alone."""
    kinds, reads, unread = [], [], {}
    for number in range(draw(st.integers(1, 24))):
        kind = draw(st.sampled_from(["plain"] * 4 + ["view", "in place", "workspace", "pair"]))
        alone = [one for one, readers in unread.items() if not readers and kinds[one] in ("plain", "workspace")]
        values = [-1, *(one for one in unread if not any(kinds[reader] == "in place" for reader in unread[one]))]
        if kind == "in place":
            if not alone:
                continue
            first, more = draw(st.sampled_from(alone)), draw(st.lists(st.sampled_from(values), max_size=1))
            taken = [first, *(one for one in more if one != first)]
        else:
            most = 1 if kind == "view" else 3
            taken = draw(st.lists(st.sampled_from(values[-6:] + values[:1]), min_size=1, max_size=most, unique=True))
        for one in taken:
            if one >= 0:
                unread[one].append(len(kinds))
        unread[len(kinds)] = []
        kinds.append(kind)
        reads.append(taken)
    changed = {reads[number][0] for number, kind in enumerate(kinds) if kind == "in place"}
    returned = [number for number in range(len(kinds)) if number not in changed and draw(st.booleans())]
    return kinds, reads, returned or [len(kinds) - 1] * bool(kinds)


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
@given(graphs(), st.integers(0, 2**32))
def test_no_block_is_met_too_soon_and_every_order_gives_what_one_by_one_does(described, seed):
    alone, device, chance = Device(), Device(), random.Random(seed)
    _, expected = after_calls(built(alone, *described), alone)
    _, found = after_calls(built(device, *described), device, device)
    assert device.races() == []
    memory, beside = alone.run(chance), device.run(chance)
    assert [beside[int(one)] for one in found] == [memory[int(one)] for one in expected]
    everything = (1 << len(device.operations) - 1) - 1
    assert device.operations[-1].behind == everything, "the captured stream has joined all others"


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
