"""Clock-event reasons by name."""

from __future__ import annotations

import pytest

from joulemark.device.clocks import HINDERING, reason_mask, reason_names


def test_both_thermal_bits_share_a_name() -> None:
    assert reason_names(0x20) == reason_names(0x40) == reason_names(0x60) == {"thermal"}


def test_names_and_mask_agree() -> None:
    names = reason_names(0x1FF)
    assert names >= HINDERING | {"idle", "application_clocks"}
    assert reason_names(reason_mask(names)) == names


def test_a_bit_of_a_newer_driver_is_kept() -> None:
    assert reason_names(0x404) == {"power_cap", "unknown_0x400"}


def test_no_reason_is_no_name() -> None:
    assert reason_names(0) == frozenset()


def test_an_unknown_name_has_no_mask() -> None:
    with pytest.raises(ValueError, match="sunshine"):
        reason_mask(frozenset({"sunshine"}))


def test_the_bits_are_those_of_the_installed_module() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert reason_names(pynvml.nvmlClocksEventReasonSwPowerCap) == {"power_cap"}
    assert reason_names(pynvml.nvmlClocksEventReasonHwThermalSlowdown) == {"thermal"}
    assert reason_names(pynvml.nvmlClocksEventReasonSwThermalSlowdown) == {"thermal"}
    assert reason_names(pynvml.nvmlClocksEventReasonHwSlowdown) == {"hw_slowdown"}
    assert reason_names(pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown) == {"power_brake"}
    assert reason_names(pynvml.nvmlClocksEventReasonSyncBoost) == {"sync_boost"}
    assert reason_names(pynvml.nvmlClocksEventReasonGpuIdle) == {"idle"}
