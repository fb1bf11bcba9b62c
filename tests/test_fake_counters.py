"""The simulated counters show exactly what they were given."""

import pytest

from joulemark.errors import ConfigurationError, CountersUnreadable
from joulemark.testing import FakeClock, FakeCounters


def recorded(source, seconds=0.01):
    return source.record(source.groups[0], lambda: source.clock.sleep(seconds))


def test_rates_are_seen_at_work_and_zero_around_it():
    source = FakeCounters({"sm_active": 0.9, "dram_read_bytes": 1e12}, clock=FakeClock())
    series = recorded(source)
    assert series.values["sm_active"][0] == series.values["sm_active"][-1] == 0
    assert len(series) == 14
    assert series.at_work().mean("sm_active") == pytest.approx(0.9)
    assert series.total("dram_read_bytes") == pytest.approx(1e10)


def test_a_rate_may_change_over_the_run():
    source = FakeCounters({"pipe_tensor": lambda t: 1.0 if t < 0.004 else 0.25, "sm_active": 1.0}, clock=FakeClock())
    assert recorded(source).at_work().mean("pipe_tensor") == pytest.approx(0.4 * 1 + 0.6 * 0.25)


def test_a_pass_gives_its_own_counters_alone():
    source = FakeCounters(
        {"sm_active": 0.9, "l1_sectors": 5.0}, {"a": ["sm_active"], "b": ["sm_active", "l1_sectors"]}, clock=FakeClock()
    )
    assert source.groups == ("a", "b")
    assert set(recorded(source).values) == {"sm_active"}
    assert source.recorded == ["a"]


def test_a_pass_fails_as_told():
    source = FakeCounters(fails={"pass1": CountersUnreadable("nothing decoded")})
    with pytest.raises(CountersUnreadable):
        source.record("pass1", lambda: None)


def test_an_unknown_counter_is_refused():
    with pytest.raises(ConfigurationError, match="sm_aktive"):
        FakeCounters({"sm_aktive": 1.0})
