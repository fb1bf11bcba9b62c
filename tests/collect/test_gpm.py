"""GPM through NVML: shares and bytes of a run, and what it does not give."""

import time

import pytest

from joulemark.collect.gpm import GpmSource
from joulemark.device.nvml import Nvml
from joulemark.errors import CountersUnreadable, DeviceError, GpuLost, NotPermitted, NotSupported
from joulemark.testing import FakeGpu, FakeNvml

H200 = {
    2: 95.4, 3: 18.0, 4: 12.0, 5: 92.6, 6: 0.0, 7: 92.6, 9: 0.0, 10: 17.3, 11: 0.0, 12: 5.0, 13: 0.1,
    20: 10.0, 21: 20.0,
}  # fmt: skip


def source(gpu: FakeGpu, **options) -> tuple[GpmSource, FakeNvml]:
    backend = FakeNvml([gpu])
    options = {"settle_s": 0.0} | options
    return GpmSource(gpu.uuid, Nvml(backend), **options), backend


def test_shares_and_bytes_of_a_run():
    gpm, backend = source(FakeGpu(gpm=H200))
    series = gpm.record("gpm", lambda: time.sleep(0.28))
    assert series.mean("pipe_tensor") == pytest.approx(0.926)
    assert series.mean("dram_throughput") == pytest.approx(0.173)
    assert series.total("pcie_rx_bytes") == pytest.approx(20 * 2**20 * series.duration_s.sum())
    assert len(series) == 3
    assert 0.27 < series.duration_s.sum() < 0.45
    assert series.units["pcie_rx_bytes"] == "B"
    assert backend.gpm_samples == 0


def test_what_lags_behind_the_begin_of_the_work_is_not_taken_for_it():
    """Levels of the idle time before the work are seen for 0.2 s into it."""
    gpu = FakeGpu(gpm_lag_s=0.2)
    begin = gpu.age_s + 0.1
    gpu.gpm = dict(H200) | {5: lambda t: 92.6 if t > begin else 0.0}
    gpm, _ = source(gpu, settle_s=0.25)
    time.sleep(max(0.0, begin - gpu.age_s))
    began = time.perf_counter()
    series = gpm.record("gpm", lambda: time.sleep(0.5))
    assert list(series.values["pipe_tensor"]) == pytest.approx([0.926] * len(series))
    assert series.start_s[0] - began > 0.25
    assert 0.2 < series.duration_s.sum() < 0.35


def test_a_run_that_ends_within_the_lag_says_how_long_it_must_be():
    gpm, backend = source(FakeGpu(gpm=H200), settle_s=0.25)
    with pytest.raises(CountersUnreadable, match=r"lags 0\.25 s behind") as caught:
        gpm.record("gpm", lambda: time.sleep(0.1))
    assert "0.35 s at least" in caught.value.remedy
    assert backend.gpm_samples == 0


def test_an_id_that_the_driver_does_not_know_is_left_out_with_its_reason():
    gpm, _ = source(FakeGpu(gpm=H200))
    series = gpm.record("gpm", lambda: time.sleep(0.12))
    assert "nvlink_rx_bytes" not in series.values
    assert set(gpm.counters("gpm")) == set(series.values)
    assert "Invalid Argument" in series.missing["nvlink_rx_bytes"]
    assert series.mean("pipe_tensor_imma") == 0.0


def test_zeros_while_the_gpu_works_are_no_answer():
    gpm, _ = source(FakeGpu(gpm=dict.fromkeys(H200, 0.0)))
    with pytest.raises(CountersUnreadable, match="read 0 for everything"):
        gpm.record("gpm", lambda: time.sleep(0.12))


def test_samples_too_close_are_not_taken():
    gpm, backend = source(FakeGpu(gpm=H200))
    with pytest.raises(CountersUnreadable, match="too short"):
        gpm.record("gpm", lambda: time.sleep(0.01))
    with pytest.raises(ValueError, match=r"0\.02 s apart"):
        source(FakeGpu(gpm=H200), interval_s=0.02)
    assert backend.gpm_samples == 0


def test_a_gpu_without_gpm_says_so():
    with pytest.raises(NotSupported, match="has no GPM"):
        source(FakeGpu())


def test_a_gpu_whose_driver_refuses_says_so():
    with pytest.raises(NotPermitted):
        source(FakeGpu(gpm=H200, errors={"gpm": 4}))


def test_a_driver_without_any_metric_is_refused():
    with pytest.raises(NotSupported, match="none of the GPM metrics"):
        source(FakeGpu(gpm={}))


def test_a_gpu_lost_in_the_run_is_told():
    gpu = FakeGpu(gpm=H200)
    gpm, backend = source(gpu)
    gpu.lost_after_s = gpu.age_s + 0.12
    with pytest.raises(GpuLost):
        gpm.record("gpm", lambda: time.sleep(0.28))
    assert backend.gpm_samples == 0


def test_what_the_work_raises_passes_through_and_frees_the_samples():
    gpm, backend = source(FakeGpu(gpm=H200))

    def broken():
        raise RuntimeError("CUDA error")

    with pytest.raises(RuntimeError, match="CUDA error"):
        gpm.record("gpm", broken)
    assert backend.gpm_samples == 0


def test_a_session_of_its_own_is_closed(monkeypatch):
    backend = FakeNvml([FakeGpu(gpm=H200)])
    monkeypatch.setattr("joulemark.device.nvml.load_backend", lambda: backend)
    gpm = GpmSource(FakeGpu().uuid)
    assert backend.sessions == 1
    gpm.close()
    assert backend.sessions == 0
    with pytest.raises(DeviceError):
        GpmSource("GPU-unknown")
    assert backend.sessions == 0
