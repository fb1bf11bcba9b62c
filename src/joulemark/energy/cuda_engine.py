"""Runs the microbenchmarks on a real GPU, by cuda-core."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from joulemark.energy.caches import LINE_BYTES, chase_ring
from joulemark.energy.engine import GpuFacts, Launch, Run
from joulemark.energy.microbench.compile import architecture_of, compile_family
from joulemark.energy.microbench.operands import BLOCK_BYTES, constant_block, operand_block
from joulemark.energy.microbench.sass import instructions_per_iteration
from joulemark.energy.microbench.suite import L1_BLOCK_BYTES, TILE_BYTES, Benchmark
from joulemark.errors import DeviceError, OutOfMemory, Unsupported

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from joulemark.energy.microbench.suite import Operands

_SINK_BYTES = 1 << 22
_AHEAD = 4
"""Launches that wait in the stream: the GPU never idles, and the last counted one ends soon after the window."""
_CHASE_STEPS = 16384
_FILL_BLOCKS = 1024
_NAP_S = 1e-6
"""Of an iteration of the kernel ``sleep``, at least."""


def _modules() -> tuple[Any, Any]:
    try:
        from cuda import core
        from cuda.bindings import driver
    except ImportError as error:
        raise Unsupported(f"no microbenchmark can run: {error}", "pip install 'joulemark[torch]'") from error
    return core, driver


class CudaEngine:
    """Microbenchmarks on one GPU; a context manager.

    Args:
        ordinal: of the device among those that CUDA shows this process.
        uuid: NVML's; by default made of CUDA's.
        cuda: a stand-in for the modules ``cuda.core`` and ``cuda.bindings.driver``.

    Raises:
        Unsupported: cuda-core is not installed.
        DeviceError: CUDA does not answer.
    """

    def __init__(self, ordinal: int = 0, uuid: str | None = None, cuda: tuple[Any, Any] | None = None) -> None:
        self._core, self._driver = cuda or _modules()
        try:
            self._device = self._core.Device(ordinal)
            self._device.set_current()
            self._stream = self._device.create_stream()
        except Exception as error:  # cuda-core's errors have no common type over releases
            raise DeviceError(f"CUDA does not answer: {error}", "see joulemark env") from error
        self.facts = self._facts(uuid)
        self._kernels: dict[tuple[str, str], Any] = {}
        self._buffers: dict[str, tuple[int, int]] = {}
        self._loaded: tuple[Any, Benchmark, int] | None = None
        self._content: tuple[object, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        try:
            self.close()
        except Exception:  # a device that failed gives nothing back; the failure itself says more
            if failure is None:
                raise

    def _facts(self, uuid: str | None) -> GpuFacts:
        major, minor = self._device.compute_capability
        properties = self._device.properties
        return GpuFacts(
            str(self._device.name),
            uuid or f"GPU-{self._device.uuid}",
            architecture_of(int(major), int(minor)),
            int(properties.multiprocessor_count),
            int(properties.l2_cache_size),
            int(self._check(self._driver.cuMemGetInfo(), "free memory")),
        )

    def _check(self, answer: tuple[Any, ...], what: str) -> Any:
        code, *rest = answer
        if int(code) == int(self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
            raise OutOfMemory(f"{what}: out of memory", "calibrate on a GPU that nobody else uses")
        if int(code):
            raise DeviceError(f"{what}: {code}")
        return rest[0] if rest else None

    def _buffer(self, name: str, size: int) -> int:
        """Device address of a named buffer of at least ``size`` bytes; plain memory, kept until it is too small."""
        address, there = self._buffers.get(name, (0, 0))
        if there < size:
            if address:
                self._check(self._driver.cuMemFree(address), f"freeing {name}")
                del self._buffers[name]
            address = int(self._check(self._driver.cuMemAlloc(size), f"{size} B for {name}"))
            self._buffers[name] = address, size
        return address

    def _upload(self, name: str, values: NDArray[np.uint32]) -> int:
        address = self._buffer(name, values.nbytes)
        self._check(self._driver.cuMemcpyHtoD(address, values.ctypes.data, values.nbytes), f"copying {name}")
        self._device.sync()  # a copy from pageable memory may return early, and our stream does not wait for it
        return address

    def _kernel(self, family: str, name: str) -> Any:
        if (family, name) not in self._kernels:
            cubin = compile_family(family, self.facts.architecture)
            module = self._core.ObjectCode.from_cubin(cubin.code)
            self._kernels[family, name] = module.get_kernel(name)
        return self._kernels[family, name]

    def _start(self, kernel: Any, threads: int, launch: Launch, operands: int, tiles: int, sink: int) -> None:
        config = self._core.LaunchConfig(grid=launch.blocks, block=threads)
        constants = self._buffers.get("constants", (0, 0))[0]
        self._core.launch(
            self._stream, config, kernel, sink, operands, constants,
            np.uint32(tiles), np.int32(launch.iterations), np.int32(launch.sleep_ns),
        )  # fmt: skip

    def chase(self, size: int) -> float:
        """Cycles per dependent load, after one round to warm the caches."""
        operands = self._upload("operands", chase_ring(size))
        self._content = ()
        sink = self._buffer("sink", _SINK_BYTES)
        launch = Launch(1, _CHASE_STEPS // 16)
        self._start(self._kernel("control", "chase"), 1, launch, operands, size // LINE_BYTES, sink)
        self._stream.sync()
        seen = np.zeros(2, dtype=np.uint32)
        self._check(self._driver.cuMemcpyDtoH(seen.ctypes.data, sink, seen.nbytes), "reading the chase")
        return float(int(seen[0]) | int(seen[1]) << 32) / _CHASE_STEPS

    def load(self, benchmark: Benchmark, operands: Operands, tiles: int) -> None:
        """Compile a kernel and fill its buffers natively; buffers that already hold the same are kept."""
        self._loaded = (self._kernel(benchmark.family, benchmark.kernel), benchmark, tiles)
        size = self._operand_bytes(benchmark, tiles)
        content = (benchmark.format, operands, size)
        if content != self._content:
            self._upload("constants", constant_block(benchmark.format, operands))
            block = self._upload("block", operand_block(benchmark.format, operands))
            target = self._buffer("operands", size)
            self._start(self._kernel("control", "fill"), 256, Launch(_FILL_BLOCKS, 0), block, size // 16, target)
            self._content = content
        self._buffer("sink", max(_SINK_BYTES, tiles * TILE_BYTES if "write" in benchmark.kernel else 0))
        self._stream.sync()

    @staticmethod
    def _operand_bytes(benchmark: Benchmark, tiles: int) -> int:
        if benchmark.level == "l1":
            return tiles * L1_BLOCK_BYTES
        if benchmark.kernel.startswith("global_read"):
            return tiles * TILE_BYTES * benchmark.lane_bytes // 16
        return BLOCK_BYTES

    def instructions(self, benchmark: Benchmark, paused: bool) -> int:
        """From the machine code that runs; the declared number where no disassembler is installed."""
        try:
            return instructions_per_iteration(
                benchmark, compile_family(benchmark.family, self.facts.architecture), paused
            )
        except Unsupported as lack:
            if "cannot be read" not in str(lack):
                raise
        return benchmark.overhead + sum(part.count for part in benchmark.work(self.facts.architecture))

    @property
    def stream_handle(self) -> int:
        """CUDA's handle of the stream of all launches."""
        return int(self._stream.handle)

    def launch(self, launch: Launch) -> None:
        """One launch of the loaded kernel, without waiting for it."""
        if self._loaded is None:
            raise DeviceError("no kernel is loaded")
        kernel, benchmark, tiles = self._loaded
        operands, sink = self._buffers["operands"][0], self._buffers["sink"][0]
        self._start(kernel, benchmark.threads, launch, operands, tiles, sink)
        if launch.rest_s:  # one warp that sleeps: the stream goes on after it without the host
            rest = Launch(1, max(1, round(launch.rest_s / _NAP_S)))
            self._start(self._kernel("control", "sleep"), 32, rest, operands, 1, sink)

    def time_launch(self, launch: Launch) -> float:
        """By events, the second of two launches."""
        options = self._core.EventOptions(timing_enabled=True)
        self.launch(launch)
        begin = self._stream.record(options=options)
        self.launch(launch)
        end = self._stream.record(options=options)
        end.sync()
        return float(end - begin) * 1e-3

    def run(self, launch: Launch | None, settle_s: float, seconds: float) -> Run:
        """Launch back to back with a few launches ahead; the counted ones lie between two events."""
        if launch is None:
            self._stream.sync()
            time.sleep(settle_s)
            idle_from = time.perf_counter()
            time.sleep(seconds)
            return Run(0, idle_from, time.perf_counter())
        options = self._core.EventOptions(blocking_sync=True)
        waiting: deque[Any] = deque()
        begin = time.perf_counter()
        launches = 0
        start: float | None = None
        while start is None or time.perf_counter() - start < seconds:
            self.launch(launch)
            waiting.append(self._stream.record(options=options))
            if len(waiting) > _AHEAD:
                waiting.popleft().sync()
                now = time.perf_counter()
                launches += start is not None
                if start is None and now - begin >= settle_s:
                    start = now
        # The launch after which `end` is read is the last one counted; those behind it keep the GPU busy meanwhile.
        waiting.popleft().sync()
        end = time.perf_counter()
        self._stream.sync()
        return Run(launches + 1, start, end)

    def repeat(self, launch: Launch, times: int) -> None:
        """Exactly that many launches, from an idle device to an idle device."""
        self._stream.sync()
        for _ in range(times):
            self.launch(launch)
        self._stream.sync()

    def close(self) -> None:
        """Give device memory back."""
        self._stream.sync()
        for name, (address, _) in list(self._buffers.items()):
            self._check(self._driver.cuMemFree(address), f"freeing {name}")
            del self._buffers[name]
