"""Energy of the CPU packages from Intel's and AMD's RAPL counters, by Linux' powercap files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from joulemark.errors import DeviceError, NotPermitted, NotSupported

POWERCAP = Path("/sys/class/powercap")


@dataclass
class _Package:
    """One package's counter and what it has told so far, in µJ."""

    path: Path
    range_uj: int
    last_uj: int
    total_uj: int = 0


class RaplSource:
    """Power source of all CPU packages together (cores, caches and memory controllers, not the DIMMs).

    The counter moves about every millisecond and wraps around at ``max_energy_range_uj`` (Linux kernel
    documentation, ``power/powercap``); it must be read at least once per wrap (a minute at 1 kW, typically
    more than that), which a sampler does.

    Args:
        root: folder of the powercap class, by default :data:`POWERCAP`.
    """

    energy_tier = "rapl"
    power_tier = "rapl"
    update_s = 1e-3
    power_is_instant = False

    def __init__(self, root: Path | None = None) -> None:
        self.name = "CPU packages"
        self._root = root or POWERCAP
        self._packages: list[_Package] = []

    def open(self) -> None:
        """Find the packages and take their first readings.

        Raises:
            NotSupported: there are no packages (a virtual machine, another kernel, another CPU).
            NotPermitted: the counters may not be read.
        """
        if self._packages:
            return
        found: list[_Package] = []
        for folder in sorted(self._root.glob("intel-rapl:*")):
            if folder.name.count(":") == 1 and _text(folder / "name").startswith("package"):
                energy = folder / "energy_uj"
                found.append(_Package(energy, int(_text(folder / "max_energy_range_uj")), int(_text(energy))))
        if not found:
            raise NotSupported(
                f"CPU energy: no RAPL package under {self._root}",
                "a bare-metal Linux with the intel_rapl_common module has one",
            )
        self._packages = found

    def close(self) -> None:
        """Forget the packages."""
        self._packages = []

    def read_energy_j(self) -> float:
        """Energy since :meth:`open`, in J, wraps undone.

        Raises:
            DeviceError: not open, or a counter cannot be read.
        """
        if not self._packages:
            raise DeviceError("CPU energy: the source is not open")
        for package in self._packages:
            now = int(_text(package.path))
            step = now - package.last_uj
            package.total_uj += step if step >= 0 else step + package.range_uj
            package.last_uj = now
        return sum(package.total_uj for package in self._packages) * 1e-6

    def read_power_w(self) -> float:
        """RAPL counts energy only.

        Raises:
            NotSupported: always.
        """
        raise NotSupported("CPU power: RAPL has an energy counter and no power sensor")

    def read_conditions(self) -> None:
        """RAPL knows neither clocks nor temperatures."""
        return


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except PermissionError as error:
        raise NotPermitted(
            f"CPU energy: {path} may not be read ({error.strerror})",
            f"sudo chmod a+r {path}, or run as root (Linux restricts it since CVE-2020-8694)",
        ) from error
    except OSError as error:
        raise NotSupported(f"CPU energy: {path} cannot be read ({error.strerror})") from error
