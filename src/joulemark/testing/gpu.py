"""A simulated GPU that is a power source by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from joulemark.collect.power import ConditionReading, NvmlPowerSource
from joulemark.testing.device import FakeDevice
from joulemark.testing.nvml import FakeNvml


@dataclass
class FakeGpu(FakeDevice):
    """A simulated GPU: a power source by itself, and a device of :class:`joulemark.testing.FakeNvml`.

    Its arguments are those of :class:`joulemark.testing.FakeDevice`. It is read by way of the real power source over a
    simulated NVML of its own.
    """

    energy_tier: str = field(default=NvmlPowerSource.energy_tier, init=False)
    power_tier: str = field(default=NvmlPowerSource.power_tier, init=False)
    update_s: float = field(default=0.11, init=False)
    _source: NvmlPowerSource | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.update_s = 1.1 * (self.energy_period_s or 0.1)

    @property
    def power_is_instant(self) -> bool:
        """Whether power is read from an instant sensor; known once open."""
        return self._source is not None and self._source.power_is_instant

    def open(self) -> None:
        """Get ready to be read.

        Raises:
            DeviceError: as the GPU was told to fail.
        """
        if self._source is None:
            source = NvmlPowerSource(self.uuid, FakeNvml([self]))
            source.open()
            self._source = source

    def close(self) -> None:
        """Stop being read."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _opened(self) -> NvmlPowerSource:
        self.open()
        assert self._source is not None
        return self._source

    def read_energy_j(self) -> float:
        """The counter, in J; raises as :class:`joulemark.collect.power.PowerSource` says."""
        return self._opened().read_energy_j()

    def read_power_w(self) -> float:
        """The power, in W."""
        return self._opened().read_power_w()

    def read_conditions(self) -> ConditionReading:
        """Clocks, temperature and reasons."""
        return self._opened().read_conditions()
