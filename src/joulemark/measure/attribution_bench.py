"""What a recording of kernels and counters needs of a device: PM sampling, torch.profiler, spinning kernels, peaks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from joulemark.attribution.recording import Mode, Role
from joulemark.collect.counters import open_counters
from joulemark.collect.flops import product_of
from joulemark.collect.pm_sampling import Pace
from joulemark.collect.side_sampling import SideSource
from joulemark.collect.torch_profiler import prepare
from joulemark.counter_series import CounterSource
from joulemark.errors import NotSupported, Unsupported

_STREAM_BYTES = 2**29
_SPIN_CYCLES = 2_000_000
PACE = Pace(interval_s=10e-6, most_samples=8000, growth=2.0)
"""CUPTI 13.0 decoded 8,138 to 9,021 samples of a run whole, 20 to 5 µs apart (7 counters, H200)."""
COUNTED = ("sm_active", "sm_active_cycles", "sm_cycles", "issue_active", "instructions", "pipe_tensor",
           "pipe_tensor_cycles", "pipe_fma_instructions", "dram_throughput", "dram_read_bytes", "dram_write_bytes",
           "l2_bytes")  # fmt: skip
"""What a recording counts unless it is told otherwise: the fewer, the sooner CUPTI has decoded a sample."""
CAREFUL_PACE = Pace(interval_s=20e-6, most_samples=3900, growth=1.25)
"""Within one image of CUPTI's usual size."""


class Bench(Protocol):
    """What recording needs of a device and its profiler (:class:`TorchBench`, or a fake)."""

    facts: dict[str, Any]
    mode: Mode

    @property
    def source(self) -> CounterSource: ...
    def synchronize(self) -> None: ...
    def spin(self, seconds: float) -> None: ...
    def stamp(self) -> Any: ...
    def between(self, first: Any, last: Any) -> float: ...
    def mark(self, name: str) -> Any: ...
    def profiled(self, path: Path, warm: Callable[[], object], *, host: bool) -> Any: ...
    def references(self, dtype: str) -> dict[Role, tuple[Callable[[], object], float | None]]: ...


def _own_source(
    uuid: str, device: str, libcupti: str | None, pace: Pace, counters: Collection[str] | None
) -> CounterSource:
    """PM sampling in this process."""
    ladder = open_counters(uuid, device, libcupti, pace, wanted=counters)
    if ladder.source is None or ladder.tier != "pm_sampling":
        ladder.close()
        raise ladder.refused.get("pm_sampling") or NotSupported("this GPU has no PM sampling")
    return ladder.source


class TorchBench:
    """A CUDA device of torch, PM sampling of it, and torch.profiler.

    Args:
        device: as torch calls it.
        libcupti: see :func:`joulemark.collect.counters.open_counters`.
        pace: how finely to sample.
        counters: what to count; None for all that the device has, in several passes.
        beside: whether another process samples, where the sampler and torch.profiler do not bear each other.

    Raises:
        Unsupported: torch or a GPU is missing.
        DeviceError: PM sampling does not work here; its type says why.
    """

    def __init__(
        self,
        device: str = "cuda:0",
        libcupti: str | None = None,
        pace: Pace = PACE,
        counters: Collection[str] | None = COUNTED,
        *,
        beside: bool = False,
    ) -> None:
        try:
            import torch
        except ImportError as error:
            raise Unsupported("torch is not installed, so nothing can be recorded with its profiler") from error
        if not torch.cuda.is_available():
            raise Unsupported("torch sees no CUDA device: kernels and counters are recorded together on one")
        self._torch, self._device = torch, torch.device(device)
        properties = torch.cuda.get_device_properties(self._device)
        uuid = str(properties.uuid)
        uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        opened = SideSource if beside else _own_source
        self.source: CounterSource = opened(uuid, device, libcupti, pace, counters)
        self.mode: Mode = "side process" if beside else "one process"
        self.facts: dict[str, Any] = {"gpu": properties.name, "torch": torch.__version__}
        self._cycles_per_s = self._measured_clock()

    def synchronize(self) -> None:
        """Wait for the device."""
        self._torch.cuda.synchronize(self._device)

    def spin(self, seconds: float) -> None:
        """Keep one SM busy for about so long; returns before it is done."""
        self._torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def stamp(self) -> Any:
        """A point in time of the device, behind all that it was given."""
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    def between(self, first: Any, last: Any) -> float:
        """Seconds between two points in time that the device has passed."""
        return float(first.elapsed_time(last)) * 1e-3

    def _measured_clock(self) -> float:
        self._torch.cuda._sleep(_SPIN_CYCLES)
        began = self.stamp()
        self._torch.cuda._sleep(_SPIN_CYCLES)
        ended = self.stamp()
        self.synchronize()
        return _SPIN_CYCLES / self.between(began, ended)

    def mark(self, name: str) -> Any:
        """A range of the trace."""
        return self._torch.profiler.record_function(name)

    @contextmanager
    def profiled(self, path: Path, warm: Callable[[], object], *, host: bool) -> Iterator[None]:
        """A session of the profiler that warms up first, and writes its trace behind the block.

        Args:
            path: of the trace.
            warm: what runs while it warms up.
            host: whether it also records the host's operators, and Python's frames, among which are the modules'
                forward calls.
        """
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if host else [])]
        profiler = profile(activities=activities, with_stack=host)
        prepare(profiler)
        warm()
        self.synchronize()
        profiler.start_trace()
        try:
            yield
            self.synchronize()
        finally:
            profiler.stop_trace()
        profiler.export_chrome_trace(str(path))

    def references(self, dtype: str) -> dict[Role, tuple[Callable[[], object], float | None]]:
        """Work at the peaks: what runs, and its FLOP where they are known."""
        product = product_of(dtype, str(self._device))
        array = self._torch.ones(_STREAM_BYTES // 4, device=self._device)
        return {"product": (product.run, product.flops), "stream": (lambda: array.add_(1.0), None)}
