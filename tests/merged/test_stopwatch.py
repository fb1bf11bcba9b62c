"""Races on a simulated host and device: what decides is the candidate, not the noise of the host."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
import torch

from joulemark.merged import stopwatch

TURN_S = stopwatch._TURN_S


class Machine:
    """A host that enqueues and a device that works, each with a clock of its own; stands for ``torch.cuda``.

    Args:
        enqueue_s: of the host per replay.
        cycles_per_s: of the device that spins.
    """

    def __init__(self, enqueue_s=5e-6, cycles_per_s=2e9):
        self.enqueue_s, self.cycles_per_s = enqueue_s, cycles_per_s
        self.host_s = self.device_s = self.worked_s = 0.0

    def work(self, seconds):
        self.device_s = max(self.device_s, self.host_s) + seconds
        self.worked_s += seconds

    def replay(self, seconds):
        self.host_s += self.enqueue_s
        self.work(seconds)

    def spin(self, cycles):
        self.host_s += self.enqueue_s
        self.work(cycles / self.cycles_per_s)

    def event(self, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, machine):
        self.machine = machine

    def record(self):
        self.at_s = max(self.machine.device_s, self.machine.host_s)

    def query(self):
        return self.at_s <= self.machine.host_s

    def synchronize(self):
        self.machine.host_s = max(self.machine.host_s, self.at_s)

    def elapsed_time(self, end):
        return (end.at_s - self.at_s) * 1e3


@pytest.fixture
def machine(monkeypatch):
    from contextlib import nullcontext

    made = Machine()
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "_sleep", made.spin)
    return made


@pytest.mark.parametrize("enqueue_s", [1e-6, 5e-6, 40e-6])
@pytest.mark.parametrize("times", [(10e-6, 10.3e-6), (1e-3, 1.1e-3), (10e-3, 9e-3), (1.0, 0.5)])
def test_replays_are_timed_on_the_device_whatever_the_host_takes(machine, enqueue_s, times):
    machine.enqueue_s = enqueue_s
    replays = {str(number): partial(machine.replay, seconds) for number, seconds in enumerate(times)}
    found = stopwatch.race_replays(replays, torch.device("cuda"))
    assert tuple(found.values()) == pytest.approx(times, rel=1e-6)
    assert machine.worked_s < 6 * sum(times) + 1.0


def test_a_host_too_slow_to_run_ahead_ends_all_the_same(machine):
    machine.enqueue_s = 1e-3
    found = stopwatch.race_replays({"graph": partial(machine.replay, 10e-6)}, torch.device("cuda"))
    assert 10e-6 <= found["graph"] <= 1.1e-3


def on_a_noisy_host(seconds, random):
    """Calls of so many seconds on a host that is away for up to 3 ms, fifty times a second."""

    def timed(count):
        left = count * seconds
        away = 0.0
        while (left := left - random.expovariate(50.0)) > 0:
            away += random.uniform(0, 3e-3)
        return count * seconds + away

    return timed


@pytest.mark.parametrize("seconds", [30e-6, 300e-6, 30e-3])
def test_the_fastest_wins_on_a_noisy_host(seconds):
    named = {"best": seconds, "close": 1.2 * seconds, "slow": 2 * seconds, "slower": 5 * seconds}
    for seed in range(200):
        random = Random(seed)
        found = stopwatch.in_turns({name: on_a_noisy_host(one, random) for name, one in named.items()}, TURN_S)
        assert min(found, key=found.__getitem__) == "best"
        assert found["best"] == pytest.approx(seconds, rel=0.2)


def test_who_leaves_after_the_first_turn_was_slower_in_all_of_its_looks():
    calls: dict[str, list[int]] = {"best": [], "close": [], "slow": [], "long": []}
    times = {"best": 100e-6, "close": 120e-6, "slow": 140e-6, "long": 0.2}

    def timed(name, count):
        calls[name].append(count)
        return count * times[name]

    found = stopwatch.in_turns({name: partial(timed, name) for name in times}, TURN_S)
    assert found == pytest.approx(times)
    assert [len(one) for one in calls.values()] == [20, 20, 5, 2]
    assert set(calls["best"][2:]) == {30}
    assert calls["long"] == [1, 1]


def test_who_has_left_comes_back_where_the_fastest_was_not_so_again():
    """A clock falls after the first turn: only what was measured after it too may win."""
    calls: dict[str, int] = {"first": 0, "second": 0}
    times = {"first": (100e-6, 150e-6), "second": (140e-6, 210e-6)}

    def timed(name, count):
        calls[name] += 1
        return count * times[name][calls[name] > 5]

    found = stopwatch.in_turns({name: partial(timed, name) for name in times}, TURN_S)
    assert found == pytest.approx({"first": 150e-6, "second": 210e-6})


def test_what_is_long_takes_few_calls():
    calls: list[int] = []

    def timed(count):
        calls.append(count)
        return 2.0 * count

    assert stopwatch.in_turns({"long": timed}, TURN_S) == {"long": 2.0}
    assert calls == [1] * 5
    assert stopwatch.in_turns({}, TURN_S) == {}


def test_calls_on_this_host_are_told_apart():
    few, many = (torch.randn(n, n) for n in (8, 256))
    found = stopwatch.race_calls({"few": lambda: few @ few, "many": lambda: many @ many}, torch.device("cpu"))
    assert found["many"] > 3 * found["few"] > 0
