"""What a device offers to the blocks of a kernel: passed in, so that sizes can be chosen without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from joulemark.merged.kernels.columns import larger


@dataclass(frozen=True)
class Device:
    """Limits of a device (CUDA C++ Programming Guide, "Compute Capabilities"); the defaults are an H200's.

    Args:
        multiprocessors: of the device.
        shared: bytes of shared memory of a multiprocessor.
        block_shared: bytes of shared memory that one block may take.
        registers: 32-bit registers of a multiprocessor.
        groups: multiprocessors of each group (GPC) that a cluster of blocks does not leave; taken where they add up to
            the device's. NVIDIA does not say how many there are of a product's; these follow from kernels that took
            turns: 32 clusters of 4 blocks, one block per multiprocessor, took two on an H200, 32 of 8 took three.
    """

    multiprocessors: int = 132
    shared: int = 228 * 1024
    block_shared: int = 227 * 1024
    registers: int = 64 * 1024
    groups: tuple[int, ...] = (18, 18, 18, 16, 16, 16, 16, 14)

    def clusters(self, size: int) -> int:
        """Clusters of ``size`` blocks that run at once where a multiprocessor holds one block."""
        groups = self.groups if sum(self.groups) == self.multiprocessors else (self.multiprocessors,)
        return larger(1, sum(one // size for one in groups))
