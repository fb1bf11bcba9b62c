"""The NVML session: typed errors, units, strings, and who may be shut down."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest

from joulemark.device.nvml import FAKE_GPUS, MemoryFaults, Nvml, load_backend, read_or_none, translate
from joulemark.errors import DeviceError, GpuLost, NotPermitted, NotSupported, NvmlUnavailable
from joulemark.testing import FakeGpu, FakeNvml, FakeNvmlError

INIT_CAUSES = {
    9: ("driver_not_loaded", "Driver Not Loaded"),
    12: ("library_not_found", "NVML Shared Library Not Found"),
    17: ("blocked_by_os", "GPU access blocked by the operating system"),
    18: ("driver_library_mismatch", "RM has detected an NVML/RM version mismatch"),
    999: ("unknown", "Unknown Error"),
}


@pytest.mark.parametrize("code", INIT_CAUSES)
def test_a_failed_init_names_its_cause_and_is_never_shut_down(code: int) -> None:
    backend = FakeNvml(init_error=code)
    cause, text = INIT_CAUSES[code]
    with pytest.raises(NvmlUnavailable) as caught, Nvml(backend):
        pytest.fail("the session must not open")
    assert caught.value.cause == cause
    assert text in str(caught.value)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    assert backend.log == [("nvmlInit", "")]


def test_the_cause_survives_the_way_to_another_process() -> None:
    error = NvmlUnavailable("NVML did not start", "do", cause="blocked_by_os")
    assert pickle.loads(pickle.dumps(error)).cause == "blocked_by_os"


def test_every_open_is_closed_once() -> None:
    backend = FakeNvml([FakeGpu()])
    with Nvml(backend) as one, Nvml(backend) as other:
        one.open()
        assert backend.sessions == 2
        assert one.count() == other.count() == 1
        other.close()
    assert backend.sessions == 0
    assert backend.log.count(("nvmlShutdown", "")) == 2


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *((code, NotSupported) for code in (2, 3, 13, 25, 26)),
        *((code, NotPermitted) for code in (4, 17)),
        *((code, GpuLost) for code in (15, 16)),
        *((code, NvmlUnavailable) for code in (1, 9)),
    ],
)
def test_sensor_errors_have_the_type_of_their_cause(code: int, kind: type[DeviceError]) -> None:
    error = translate(FakeNvmlError(code), "power of GPU-1")
    assert type(error) is kind
    assert str(FakeNvmlError(code)).rstrip(".") in str(error)
    assert f"NVML error {code}" in str(error)


def test_an_unknown_error_keeps_the_base_type() -> None:
    assert type(translate(FakeNvmlError(999), "power of GPU-1")) is DeviceError


@pytest.mark.parametrize("as_bytes", [False, True])
def test_facts_come_in_si_units_and_as_text(as_bytes: bool) -> None:
    gpu = FakeGpu(power_w=123.456, reasons=frozenset({"power_cap", "thermal"}), processes=(41, 42))
    with Nvml(FakeNvml([gpu], bytes_strings=as_bytes)) as nvml:
        device = nvml.device(gpu.uuid)
        assert (device.name(), device.pci_bus_id()) == ("NVIDIA H200", "00000000:1B:00.0")
        assert (nvml.driver_version(), nvml.cuda_driver_version()) == ("580.159.03", "13.0")
        assert nvml.uuid_at(0) == gpu.uuid
        assert device.instant_power_w() == device.average_power_w() == pytest.approx(123.456)
        assert device.energy_j() == pytest.approx(1e6, rel=1e-3)
        assert device.power_limit_w() == device.default_power_limit_w() == 700
        assert (device.sm_clock_hz(), device.memory_clock_hz()) == (1.98e9, 3.201e9)
        assert device.max_sm_clock_hz() == 1.98e9
        assert device.temperature_c() == 45
        assert device.clock_reasons() == {"power_cap", "thermal"}
        assert device.utilization() == 0.5
        assert [one.pid for one in device.processes()] == [41, 42]
        assert (device.ecc(), device.persistence(), device.mig()) == (True, True, False)
        assert device.memory_bytes() > device.memory_used_bytes() > 0


def test_throttle_reasons_are_read_by_their_older_name_too() -> None:
    class Old(FakeNvml):
        nvmlDeviceGetCurrentClocksEventReasons = None
        nvmlDeviceGetCurrentClocksThrottleReasons = FakeNvml.nvmlDeviceGetCurrentClocksEventReasons

    gpu = FakeGpu(reasons=frozenset({"hw_slowdown"}))
    with Nvml(Old([gpu])) as nvml:
        assert nvml.device(gpu.uuid).clock_reasons() == {"hw_slowdown"}


@pytest.mark.parametrize(("value_type", "name"), [(0, "dVal"), (1, "uiVal"), (3, "ullVal"), (5, "siVal")])
def test_the_instant_power_is_read_by_the_type_that_the_driver_says(value_type: int, name: str) -> None:
    class Typed(FakeNvml):
        def nvmlDeviceGetFieldValues(self, device, fields):
            value = SimpleNamespace(**{name: 250_500})
            return [SimpleNamespace(nvmlReturn=0, valueType=value_type, value=value) for _ in fields]

    gpu = FakeGpu()
    with Nvml(Typed([gpu])) as nvml:
        assert nvml.device(gpu.uuid).instant_power_w() == pytest.approx(250.5)


def test_a_lacking_sensor_is_no_zero() -> None:
    gpu = FakeGpu(has_instant_power=False, errors={"energy": 3, "power": 4})
    with Nvml(FakeNvml([gpu])) as nvml:
        device = nvml.device(gpu.uuid)
        with pytest.raises(NotSupported, match=r"instant power of GPU-.*Not Supported"):
            device.instant_power_w()
        with pytest.raises(NotSupported):
            device.energy_j()
        with pytest.raises(NotPermitted):
            device.average_power_w()
        assert read_or_none(device.average_power_w) is None


def test_a_lost_gpu_is_never_read_as_a_lacking_sensor() -> None:
    gpu = FakeGpu(lost_after_calls=0)
    with Nvml(FakeNvml([gpu])) as nvml, pytest.raises(GpuLost):
        read_or_none(nvml.device(gpu.uuid).temperature_c)


def test_an_unknown_uuid_is_one_clear_error() -> None:
    with Nvml(FakeNvml([FakeGpu()])) as nvml, pytest.raises(DeviceError, match="NVML knows no GPU GPU-0000"):
        nvml.device("GPU-0000")


def test_a_function_that_the_module_lacks_is_not_supported() -> None:
    with Nvml(FakeNvml()) as nvml, pytest.raises(NotSupported, match="no nvmlDeviceOfTomorrow"):
        nvml.call("nvmlDeviceOfTomorrow", what="tomorrow")


def test_a_session_that_is_not_open_says_so() -> None:
    with pytest.raises(NvmlUnavailable, match="not open"):
        Nvml(FakeNvml()).count()


def test_without_the_python_module_nvml_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAKE_GPUS, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlUnavailable, match="pynvml") as caught:
        load_backend()
    assert caught.value.cause == "library_not_found"
    assert "nvidia-ml-py" in caught.value.remedy


def test_the_installed_module_has_every_function_that_is_called() -> None:
    pynvml: ModuleType = pytest.importorskip("pynvml")
    wanted = {name for name in vars(FakeNvml) if name.startswith("nvml")}
    assert {name for name in wanted if not callable(getattr(pynvml, name, None))} == set()
    assert pynvml.NVML_FI_DEV_POWER_INSTANT == 186
    assert (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM, pynvml.NVML_TEMPERATURE_GPU) == (1, 2, 0)


@pytest.mark.parametrize(
    ("errors", "margin"),
    [({}, 45.0), ({"slowdown_margin": 3}, 45.0), ({"slowdown_margin": 3, "slowdown_temperature": 3}, None)],
)
def test_the_thermal_margin_is_told_or_is_what_the_threshold_leaves(
    errors: dict[str, int], margin: float | None
) -> None:
    gpu = FakeGpu(temperature_c=45.0, slowdown_temperature_c=90.0, errors=errors)
    with Nvml(FakeNvml([gpu])) as nvml:
        assert read_or_none(nvml.device(gpu.uuid).slowdown_margin_k) == margin


def test_memory_faults_are_told_where_the_gpu_tells_them() -> None:
    sound, faulty = FakeGpu(), FakeGpu(uuid="GPU-1", uncorrected_errors=2, remap_pending=True, remap_failed=True)
    silent = FakeGpu(uuid="GPU-2", errors={"memory_faults": 3})
    with Nvml(FakeNvml([sound, faulty, silent])) as nvml:
        assert nvml.device(sound.uuid).memory_faults() == MemoryFaults(0, False, False)
        assert nvml.device("GPU-1").memory_faults() == MemoryFaults(2, True, True)
        assert nvml.device("GPU-2").memory_faults() == MemoryFaults(None, None, None)
