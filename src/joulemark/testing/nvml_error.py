"""Errors of the simulated NVML, by their numbers in nvml.h."""

from __future__ import annotations

from collections.abc import Mapping

INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, LOST = 2, 3, 6, 15


class FakeNvmlError(Exception):
    """An error of the simulated NVML, by its number in nvml.h."""

    _texts: Mapping[int, str] = {
        1: "Uninitialized",
        2: "Invalid Argument",
        3: "Not Supported",
        4: "Insufficient Permissions",
        6: "Not Found",
        9: "Driver Not Loaded",
        12: "NVML Shared Library Not Found",
        15: "GPU is lost",
        17: "GPU access blocked by the operating system",
        18: "RM has detected an NVML/RM version mismatch.",
    }

    def __init__(self, value: int) -> None:
        super().__init__(self._texts.get(value, "Unknown Error"))
        self.value = value
