"""Peak memory of one case: allocated bytes on a CUDA device, resident set of the process on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class MemoryPeak(Protocol):
    """A peak that can be reset between cases."""

    tier: str

    def reset(self) -> str | None:
        """Forget earlier peaks; the reason when that is impossible."""
        ...

    def read_bytes(self) -> int | None:
        """Peak since the last reset, in bytes."""
        ...


class CudaMemoryPeak:
    """Peak of bytes that torch's allocator handed out (fragmentation and the CUDA context are not in it)."""

    tier = "torch_allocator"

    def __init__(self, device: str) -> None:
        self._device = device

    def reset(self) -> str | None:
        """Release cached blocks and restart the peak."""
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return None

    def read_bytes(self) -> int | None:
        """Peak of allocated bytes."""
        import torch

        return int(torch.cuda.max_memory_allocated(self._device))


class ProcessMemoryPeak:
    """Peak resident set of this process, by Linux' ``VmHWM``.

    ``ru_maxrss`` never falls again, so a small case after a large one would inherit its peak. Writing 5 to
    ``clear_refs`` resets ``VmHWM`` (proc(5)).
    """

    tier = "vm_hwm"

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc
        self._stale = False

    def reset(self) -> str | None:
        """Restart the peak at the current resident set."""
        try:
            (self._proc / "clear_refs").write_text("5")
            self._stale = False
        except OSError as error:
            self._stale = True
            return f"the peak of the resident set cannot be reset here ({error.strerror or error})"
        return None

    def read_bytes(self) -> int | None:
        """``VmHWM``, None where the kernel does not show it, or would show the peak of an earlier case."""
        if self._stale:
            return None
        try:
            status = (self._proc / "status").read_text()
        except OSError:
            return None
        line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
        return None if line is None else int(line.split()[1]) * 1024


def memory_peak(device: str) -> MemoryPeak:
    """The memory instrument of a torch device name."""
    return CudaMemoryPeak(device) if device.startswith("cuda") else ProcessMemoryPeak()
