"""What a device offers to the blocks of a kernel: passed in, so that sizes can be chosen without a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Limits of a device (CUDA C++ Programming Guide, "Compute Capabilities"); the defaults are an H200's.

    Args:
        multiprocessors: of the device.
        shared: bytes of shared memory of a multiprocessor.
        block_shared: bytes of shared memory that one block may take.
        registers: 32-bit registers of a multiprocessor.
    """

    multiprocessors: int = 132
    shared: int = 228 * 1024
    block_shared: int = 227 * 1024
    registers: int = 64 * 1024
