"""CPU packages by RAPL, over a folder that looks like powercap's."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from joulemark.collect.power import NullPowerSource, PowerSampler, open_power
from joulemark.collect.rapl import RaplSource
from joulemark.errors import DeviceError, NotPermitted, NotSupported

RANGE_UJ = 262_143_328_850


def package(root: Path, zone: str, name: str, energy_uj: int) -> Path:
    folder = root / zone
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n", encoding="ascii")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n", encoding="ascii")
    (folder / "energy_uj").write_text(f"{energy_uj}\n", encoding="ascii")
    return folder / "energy_uj"


def test_packages_are_added_and_nothing_else(tmp_path: Path) -> None:
    first = package(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    second = package(tmp_path, "intel-rapl:1", "package-1", 9_000_000)
    for zone, name in [("intel-rapl:0:0", "core"), ("intel-rapl:0:1", "dram"), ("intel-rapl:2", "psys")]:
        package(tmp_path, zone, name, 0)
    package(tmp_path, "intel-rapl-mmio:0", "package-0", 0)
    source = RaplSource(tmp_path)
    source.open()
    assert source.read_energy_j() == 0
    first.write_text("6500000", encoding="ascii")
    second.write_text("9250000", encoding="ascii")
    assert source.read_energy_j() == pytest.approx(1.75)
    source.open()
    assert source.read_energy_j() == pytest.approx(1.75)


def test_a_wrapped_counter_goes_on(tmp_path: Path) -> None:
    counter = package(tmp_path, "intel-rapl:0", "package-0", RANGE_UJ - 1_000_000)
    source = RaplSource(tmp_path)
    source.open()
    counter.write_text("2000000", encoding="ascii")
    assert source.read_energy_j() == pytest.approx(3)
    counter.write_text("2500000", encoding="ascii")
    assert source.read_energy_j() == pytest.approx(3.5)
    counter.write_text("100000", encoding="ascii")
    assert source.read_energy_j() == pytest.approx(RANGE_UJ * 1e-6 + 1.1)


def test_without_packages_the_reason_is_typed(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="no RAPL package"):
        RaplSource(tmp_path / "nowhere").open()
    with pytest.raises(NotSupported, match="no power sensor"):
        RaplSource(tmp_path).read_power_w()
    with pytest.raises(DeviceError, match="not open"):
        RaplSource(tmp_path).read_energy_j()


def test_a_refused_counter_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "intel-rapl:0", "package-0", 1)
    read = Path.read_text

    def refuse(path: Path, *args: str, **kwargs: str) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, os.strerror(13), str(path))
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(NotPermitted, match="Permission denied") as caught:
        RaplSource(tmp_path).open()
    assert "chmod" in caught.value.remedy


def test_a_counter_that_vanishes_is_typed(tmp_path: Path) -> None:
    counter = package(tmp_path, "intel-rapl:0", "package-0", 1)
    source = RaplSource(tmp_path)
    source.open()
    counter.unlink()
    with pytest.raises(NotSupported, match="cannot be read"):
        source.read_energy_j()


def test_the_sampler_reads_packages_in_aligned_windows(tmp_path: Path) -> None:
    counter = package(tmp_path, "intel-rapl:0", "package-0", RANGE_UJ - 5_000_000)
    begin = time.perf_counter()

    class Driven(RaplSource):
        def read_energy_j(self) -> float:
            spent_uj = int((time.perf_counter() - begin) * 50e6)
            counter.write_text(str((RANGE_UJ - 5_000_000 + spent_uj) % RANGE_UJ), encoding="ascii")
            return super().read_energy_j()

    with PowerSampler(Driven(tmp_path)) as power, power.window() as window:
        time.sleep(0.5)
    assert window.power_w == pytest.approx(50, rel=0.05)
    assert (window.tier, window.reading.cross_check_ratio, window.conditions) == ("rapl", None, None)
    assert window.energy_j == pytest.approx(25, rel=0.1)


def test_a_cpu_without_counters_gets_a_null_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("joulemark.collect.rapl.POWERCAP", tmp_path)
    sampler = open_power(None)
    assert isinstance(sampler.source, NullPowerSource)
    with sampler.window() as window:
        pass
    assert isinstance(window.problem, NotSupported)
    assert window.energy_j is None
