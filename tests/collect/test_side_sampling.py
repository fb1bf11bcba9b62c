"""A sampler in a process of its own, simulated by a scenario."""

from __future__ import annotations

import json
import time

import pytest

from joulemark.collect.side_sampling import SideSource
from joulemark.errors import CountersUnavailable, NotPermitted


@pytest.fixture
def scenario(tmp_path, monkeypatch):
    def make(counters) -> str:
        path = tmp_path / "gpus.json"
        path.write_text(json.dumps({"gpus": [{"uuid": "GPU-1", "counters": counters}]}))
        monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(path))
        return "GPU-1"

    return make


def test_work_here_is_counted_there(scenario):
    source = SideSource(scenario({"pm_sampling": {"rates": {"pipe_tensor": 0.5}}}))
    try:
        assert source.groups == ("pass1",)
        assert source.counters("pass1") == ("pipe_tensor",)
        ran = []
        for _ in range(2):
            series = source.record("pass1", lambda: ran.append(time.sleep(0.02))).at_work()
            assert series.mean("pipe_tensor") == pytest.approx(0.5)
            assert series.duration_s.sum() == pytest.approx(0.02, abs=0.015)
        assert len(ran) == 2
    finally:
        source.close()


def test_a_refusal_comes_back_with_its_type_and_remedy(scenario):
    with pytest.raises(NotPermitted, match="INSUFFICIENT_PRIVILEGES") as caught:
        SideSource(scenario({"pm_sampling": "permission", "gpm": {}}))
    assert "NVreg_RestrictProfilingToAdminUsers" in caught.value.remedy


def test_a_process_that_dies_is_said(scenario):
    source = SideSource(scenario({"pm_sampling": {}}))
    source._process.kill()
    source._process.join()
    with pytest.raises(CountersUnavailable, match="has ended"):
        source.record("pass1", lambda: None)
    source.close()
