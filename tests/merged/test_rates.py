"""Rates of a GPU: what is learnt from measured executions is there for the next prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from joulemark.merged import cache, rates
from joulemark.merged.cost import Candidate, Point, predict
from joulemark.merged.sequence import Conv, Sequence
from tests.merged.fakes import RATES

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


def test_a_cpu_has_no_rates():
    with pytest.raises(RuntimeError, match="not on cpu: pass Rates of your own"):
        rates.measure_rates(CPU)


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
