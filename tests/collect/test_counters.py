"""The ladder of counters goes down with a typed reason and a remedy for each step."""

import json

import pytest

from joulemark.collect import counters
from joulemark.collect.counters import open_counters
from joulemark.errors import (
    ConfigurationError,
    CountersBusy,
    CountersUnavailable,
    DeviceError,
    NotPermitted,
    NotSupported,
    NvmlUnavailable,
)
from joulemark.testing import FakeCounters, FakeNvml, fake_ladder
from joulemark.testing.counters import REFUSALS


def test_the_best_instrument_is_taken_and_no_other_opened():
    ladder = fake_ladder({"pm_sampling": FakeCounters(), "gpm": AssertionError("opened")})
    assert (ladder.tier, ladder.refused) == ("pm_sampling", {})


@pytest.mark.parametrize("reason", REFUSALS)
def test_every_refusal_leads_to_the_next_rung_with_its_type(reason):
    ladder = fake_ladder({"pm_sampling": reason, "gpm": FakeCounters(tier="gpm")})
    assert ladder.tier == "gpm"
    assert type(ladder.refused["pm_sampling"]) is type(REFUSALS[reason])


def test_at_the_bottom_every_step_has_its_reason():
    ladder = fake_ladder({"pm_sampling": "permission", "gpm": "unsupported"})
    assert ladder.source is None
    assert ladder.tier is None
    assert [type(one) for one in ladder.refused.values()] == [NotPermitted, NotSupported]
    assert "NVreg_RestrictProfilingToAdminUsers=0" in ladder.refused["pm_sampling"].remedy


def test_a_defect_is_no_refusal():
    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        counters.descend({"pm_sampling": broken})


def test_closing_reaches_the_instrument():
    source = FakeCounters()
    fake_ladder({"pm_sampling": source}).close()
    assert source.closed


@pytest.mark.parametrize("device", ["cpu", "0", "cuda:x"])
def test_another_device_is_refused_by_name(device):
    with pytest.raises(ConfigurationError, match=device):
        open_counters("GPU-1", device)


@pytest.fixture
def no_libraries(monkeypatch):
    """Neither libcupti nor NVML nor its stand-in."""
    monkeypatch.delenv("JOULEMARK_FAKE_GPUS", raising=False)
    monkeypatch.setattr("joulemark.collect.cupti.loaded_libraries", lambda: ())
    monkeypatch.setattr("joulemark.collect.cupti._installed", lambda: None)
    monkeypatch.setattr("joulemark.device.nvml.load_backend", lambda: FakeNvml(init_error=12))


@pytest.mark.usefixtures("no_libraries")
def test_a_machine_without_a_gpu_says_why_for_each_tier():
    ladder = open_counters("GPU-1")
    assert ladder.source is None
    assert isinstance(ladder.refused["pm_sampling"], CountersUnavailable)
    assert isinstance(ladder.refused["gpm"], NvmlUnavailable)
    assert all(error.remedy for error in ladder.refused.values())


def test_torch_without_cuda_cannot_prove_the_counters(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CountersUnavailable, match="has no CUDA here") as caught:
        counters._busy_work(0)
    assert caught.value.remedy


def test_a_full_gpu_is_a_reason_and_no_crash(monkeypatch):
    import torch

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "randn", full)
    with pytest.raises(DeviceError, match="no memory left"):
        counters._busy_work(0)


def scenario(tmp_path, monkeypatch, entry):
    path = tmp_path / "gpus.json"
    gpu = {"name": "Fake", "uuid": "GPU-1", "pci": "00000000:01:00.0"} | entry
    path.write_text(json.dumps({"gpus": [gpu]}))
    monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(path))


def test_a_scenario_brings_its_own_counters(tmp_path, monkeypatch):
    tiers = {"pm_sampling": "busy", "gpm": {"rates": {"sm_active": 0.7}, "missing": {"issue_active": "not in GPM"}}}
    scenario(tmp_path, monkeypatch, {"counters": tiers})
    ladder = open_counters("GPU-1")
    assert ladder.tier == "gpm"
    assert isinstance(ladder.refused["pm_sampling"], CountersBusy)
    assert ladder.source.missing == {"issue_active": "not in GPM"}


def test_a_scenario_without_counters_has_none(tmp_path, monkeypatch):
    scenario(tmp_path, monkeypatch, {})
    assert open_counters("GPU-1").source is None


def test_a_scenario_with_a_wrong_name_says_so(tmp_path, monkeypatch):
    scenario(tmp_path, monkeypatch, {"counters": {"pm_sampling": "tired"}})
    with pytest.raises(ConfigurationError, match="tired"):
        open_counters("GPU-1")
