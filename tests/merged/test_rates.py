"""Rates of a GPU: what is learnt from measured executions is there for the next prediction."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from joulemark.merged import automatic, cache, rates
from joulemark.merged.cost import Candidate, Point, predict
from joulemark.merged.kernels.compile import build_text
from joulemark.merged.sequence import Conv, Sequence
from tests.merged.fakes import RATES, fake_family

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def known_device(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(rates, "_measured", lambda device: RATES)


def points(family, count, shares):
    true = replace(RATES, reached={family: shares})
    found = []
    for n in range(count):
        layer = Conv(16 << n % 3, 16 << n % 3, (3, 3), (1, 1), (1, 1), (1, 1))
        given = (Sequence((layer,)), (32 + 8 * n, 32), 4, "bf16", Candidate("unmerged", family))
        found.append(Point(*given, predict(*given, true).time_s))
    return found


class Clock:
    """A GPU whose host takes 10.6 µs per launch: seconds of copies at known rates, disturbed in its first tries.

    Args:
        dram, l2: bytes per second.
        disturbed: tries in which the L2 seems to stand still.
    """

    LAUNCH_S = 10.6e-6

    def __init__(self, dram, l2, disturbed=0):
        self.speeds, self.disturbed, self.tries = {"dram": dram, "dram, our own": dram * 1.2, "l2": l2}, disturbed, 0

    def __call__(self, calls):
        self.tries += 1
        found = {name: self.LAUNCH_S + call() / self.speeds[name] for name, call in calls.items()}
        if self.tries <= self.disturbed:
            found["l2"] = 1.0
        return found


def loads(l2_bytes=62_914_560):
    amounts = {"dram": 2**30, "dram, our own": 2**30, "l2": 2 * (l2_bytes // 8) * rates._L2_PASSES}
    return {name: rates.Load(lambda amount=amount: amount, amount) for name, amount in amounts.items()}


def test_rates_are_positive_however_slow_the_host_launches():
    """Of an H200: with 16 launches of 10.6 µs taken off copies that took 57 µs in all, its L2 moved -2.2 TB/s."""
    dram, l2 = rates.byte_rates(loads(), Clock(2.7e12, 4.4e12))
    assert dram == pytest.approx(1.2 * 2.7e12, rel=0.04)
    assert l2 == pytest.approx(4.4e12, rel=0.05)
    assert 2 * (62_914_560 // 8) < 62_914_560 / 2  # well inside


@pytest.mark.parametrize("disturbed", [1, 2])
def test_an_l2_that_seems_slower_than_memory_is_timed_again(disturbed):
    clock = Clock(2.7e12, 4.4e12, disturbed)
    assert rates.byte_rates(loads(), clock)[1] > 4e12
    assert clock.tries == disturbed + 1


@pytest.mark.parametrize(
    "clock", [Clock(2.7e12, 4.4e12, 3), Clock(4.4e12, 2.7e12), lambda calls: dict.fromkeys(calls, 0.0)]
)
def test_an_l2_that_stays_slower_than_memory_is_refused(clock):
    with pytest.raises(rates.RatesError, match=r"in the last of 3 tries: measure on a GPU that nothing else uses"):
        rates.byte_rates(loads(), clock)


@pytest.mark.parametrize("name", ["dram_bytes_per_s", "l2_bytes_per_s"])
@pytest.mark.parametrize("value", [-2.2e12, 0.0, float("inf"), float("nan")])
def test_rates_that_no_gpu_has_are_refused_wherever_they_come_from(name, value):
    with pytest.raises(ValueError, match=f"rates of a GPU of round numbers that no GPU has: {{'{name}'"):
        replace(RATES, **{name: value})
    with pytest.raises(ValueError, match="measure them again"):
        rates.Rates.from_json({**RATES.to_json(), name: value})


def test_times_that_no_gpu_has_are_refused():
    with pytest.raises(ValueError, match="launch_s"):
        replace(RATES, launch_s=-1e-6)


def test_the_kernels_that_measure_rates_compile():
    pytest.importorskip("cuda.core")
    for name, source in (("copies", rates._COPY_SOURCE), ("handshake", rates._FLAG_SOURCE)):
        assert build_text(name, source, "sm_90a").spilled == 0


def test_a_cpu_has_no_rates():
    with pytest.raises(RuntimeError, match="not on cpu: pass Rates of your own"):
        rates.measure_rates(CPU)


def test_without_rates_merging_says_so_and_goes_on(monkeypatch):
    def refuse(device):
        raise rates.RatesError("something else uses this GPU")

    monkeypatch.setattr(automatic, "rates_of", refuse)
    x = Mock(torch.Tensor, device=torch.device("cuda", 0), dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="without a performance model: something else uses this GPU"):
        setting = automatic._setting(x, None, (fake_family(),), True, 1.0, 6)
    assert setting.rates is None


def test_shares_are_learnt_and_found_again():
    assert rates.rates_of(CPU).reached == {}
    rates.learn([*points("often", 6, (0.5, 0.6)), *points("seldom", 2, (0.1, 0.1))], RATES, CPU)
    found = rates.rates_of(CPU)
    assert found == replace(RATES, reached=found.reached)
    assert set(found.reached) == {"often"}
    assert found.reached["often"][1] == pytest.approx(0.6, rel=0.07)
    rates.learn(points("another", 4, (0.9, 0.3)), found, CPU)
    assert set(rates.rates_of(CPU).reached) == {"often", "another"}


def test_a_broken_entry_leaves_the_bare_rates():
    rates.learn(points("often", 6, (0.5, 0.6)), RATES, CPU)
    for path in cache.folder().glob("reached-*.json"):
        path.write_text('{"often": 3}')
    assert rates.rates_of(CPU) == RATES


def test_the_cache_lies_below_the_users_home_where_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(cache.VARIABLE, "~/kept")
    cache.write("rates", "key", [1])
    assert (tmp_path / "kept" / "rates-key.json").read_text() == "[1]"


def test_an_entry_without_end_counts_as_none():
    cache.write("rates", "key", [1])
    (cache.folder() / "rates-key.json").write_text("[" * 100_000)
    assert cache.read("rates", "key") is None
