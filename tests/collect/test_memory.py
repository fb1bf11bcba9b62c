"""Peak memory of one case, not of those before it."""

from __future__ import annotations

import pytest

from joulemark.collect.memory import CudaMemoryPeak, ProcessMemoryPeak, memory_peak


def test_the_peak_of_a_big_case_is_not_that_of_the_next():
    peak = ProcessMemoryPeak()
    if peak.reset() is not None:
        pytest.skip("this kernel does not let the peak be reset")
    before = peak.read_bytes()
    ballast = bytearray(200 << 20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    big = peak.read_bytes()
    del ballast
    assert peak.reset() is None
    after = peak.read_bytes()
    assert big - before > 150 << 20
    assert after < big - (100 << 20)


def test_a_peak_that_cannot_be_reset_is_not_given(tmp_path):
    (tmp_path / "status").write_text("Name:\tx\nVmHWM:\t  1234 kB\n")
    peak = ProcessMemoryPeak(tmp_path)
    assert peak.read_bytes() == 1234 * 1024
    assert peak.reset() is None
    assert peak.read_bytes() == 1234 * 1024
    (tmp_path / "clear_refs").unlink()
    (tmp_path / "clear_refs").mkdir()
    assert "cannot be reset here" in peak.reset()
    assert peak.read_bytes() is None


def test_a_kernel_that_shows_no_peak(tmp_path):
    assert ProcessMemoryPeak(tmp_path / "nothing").read_bytes() is None
    (tmp_path / "status").write_text("Name:\tx\n")
    assert ProcessMemoryPeak(tmp_path).read_bytes() is None


def test_by_device():
    assert isinstance(memory_peak("cpu"), ProcessMemoryPeak)
    assert isinstance(memory_peak("cuda:0"), CudaMemoryPeak)
    assert (memory_peak("cpu").tier, memory_peak("cuda:0").tier) == ("vm_hwm", "torch_allocator")
