"""The shipped fakes: they must behave as what they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from joulemark.collect.power import ConditionReading, PowerSampler
from joulemark.device.nvml import FAKE_GPUS, Nvml, load_backend
from joulemark.errors import ConfigurationError, DeviceError, GpuLost, NotSupported
from joulemark.testing import (
    FakeClock,
    FakeGpu,
    FakeNvml,
    ReplayCollector,
    backend_from_file,
    backend_of,
    simulate_window,
)


def test_the_counter_moves_in_steps() -> None:
    clock = FakeClock()
    gpu = FakeGpu(power_w=200.0, energy_start_j=5.0, clock=clock)
    seen = []
    for _ in range(5):
        seen.append(gpu.read_energy_j())
        clock.sleep(0.06)
    assert seen == pytest.approx([5, 5, 25, 25, 45])


def test_power_may_be_a_function_of_time() -> None:
    clock = FakeClock()
    gpu = FakeGpu(power_w=lambda age: 100 + 10 * age, clock=clock, temperature_c=lambda age: 40 + age)
    clock.sleep(3)
    assert gpu.read_power_w() == pytest.approx(130)
    assert gpu.read_conditions().temperature_c == 43
    assert gpu.read_energy_j() == pytest.approx(1e6 + 345, abs=0.1)


def test_errors_are_set_per_sensor() -> None:
    gpu = FakeGpu(errors={"energy": 3, "sm_clock": 3})
    with pytest.raises(NotSupported):
        gpu.read_energy_j()
    assert gpu.read_power_w() == 300
    assert gpu.read_conditions().sm_clock_hz is None
    assert gpu.read_conditions().memory_clock_hz == 3.201e9


def read_for(gpu: FakeGpu, clock: FakeClock, times: int) -> None:
    for _ in range(times):
        clock.sleep(0.1)
        gpu.read_power_w()


@pytest.mark.parametrize("after", [{"lost_after_s": 1.0}, {"lost_after_calls": 20}])
def test_a_gpu_can_be_lost(after: dict[str, float]) -> None:
    clock = FakeClock()
    gpu = FakeGpu(clock=clock, **after)
    gpu.read_power_w()
    with pytest.raises(GpuLost):
        read_for(gpu, clock, 30)


def test_reads_by_uuid_hit_that_gpu_alone() -> None:
    first, second = FakeGpu(uuid="GPU-1", power_w=100.0), FakeGpu(uuid="GPU-2", power_w=200.0)
    backend = FakeNvml([first, second])
    with Nvml(backend) as nvml:
        assert nvml.device("GPU-2").average_power_w() == 200
    assert {uuid for _, uuid in backend.log} == {"", "GPU-2"}


def test_a_recording_is_played_back() -> None:
    recording = [(10.0 + 0.1 * i, 50.0 * i, 500.0) for i in range(40)]
    window = simulate_window(ReplayCollector(recording, conditions=ConditionReading(temperature_c=50.0)), 3.0)
    assert window.power_w == pytest.approx(500, rel=0.01)
    assert window.tier == "nvml_energy_counter"
    assert window.conditions is not None
    assert window.conditions.temperature_c == 50


def test_a_recording_may_lack_a_sensor() -> None:
    window = simulate_window(ReplayCollector([(0.0, None, 120.0)]), 2.0)
    assert window.energy_j == pytest.approx(240)
    assert window.tier == "nvml_power_integral"
    assert simulate_window(ReplayCollector([(0.0, None, None)]), 2.0).energy_j is None
    with pytest.raises(ConfigurationError):
        ReplayCollector([])


def test_the_environment_puts_a_scenario_in_nvmls_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpus.json"
    scenario = {
        "driver": "1.2.3",
        "gpus": [
            {
                "name": "NVIDIA X",
                "uuid": "GPU-x",
                "pci": "00000000:01:00.0",
                "power_mw": {"series": [[0, 100000], [3600, 900000]]},
                "power_instant_mw": {"error": 4},
                "energy": {"error": 3},
                "sm_clock": 1500,
                "throttle": 4,
                "temp": 61,
                "util": 90,
                "mig": [{"name": "NVIDIA X MIG", "uuid": "MIG-x"}],
            }
        ],
    }
    path.write_text(json.dumps(scenario), encoding="utf-8")
    monkeypatch.setenv(FAKE_GPUS, str(path))
    assert load_backend() is load_backend()
    with Nvml() as nvml:
        assert nvml.simulated
        device = nvml.device("GPU-x")
        assert (device.average_power_w(), device.sm_clock_hz(), device.temperature_c()) == (100, 1.5e9, 61)
        assert (device.utilization(), device.clock_reasons()) == (0.9, {"power_cap"})
        assert device.mig_uuids() == ["MIG-x"]
        with pytest.raises(NotSupported):
            device.energy_j()
        with pytest.raises(DeviceError, match="Insufficient"):
            device.instant_power_w()


def test_a_series_is_a_step_function_of_time() -> None:
    clock = FakeClock()
    entry = {"name": "X", "uuid": "GPU-x", "pci": "0", "power_mw": {"series": [[0, 100000], [2, 300000]]}}
    gpu = backend_of({"gpus": [entry]}, clock).gpus[0]
    assert gpu.read_power_w() == 100
    clock.sleep(2.5)
    assert gpu.read_power_w() == 300


@pytest.mark.parametrize(
    "text", ["", "[]", '{"gpus": [{}]}', '{"gpus": [{"name": 1, "uuid": 2, "pci": 3, "temp": "x"}]}']
)
def test_a_file_that_is_no_scenario_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"bad\.json"):
        backend_from_file(str(path))
    with pytest.raises(ConfigurationError, match=r"missing\.json"):
        backend_from_file(str(tmp_path / "missing.json"))


def test_a_fake_gpu_serves_a_sampler_as_it_is() -> None:
    with PowerSampler(FakeGpu()).window() as window:
        pass
    assert window.problem is None
    assert window.readings[0].power_w == 300
