"""The engine on a stand-in for CUDA: what it launches with which arguments, and that it counts what has completed."""

from __future__ import annotations

import ctypes
import enum
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.core", exc_type=ImportError)

from joulemark.energy.cuda_engine import CudaEngine
from joulemark.energy.engine import Launch
from joulemark.energy.microbench.operands import BLOCK_BYTES, constant_block, operand_block
from joulemark.energy.microbench.suite import L1_BLOCK_BYTES, SUITE, TILE_BYTES
from joulemark.errors import DeviceError, OutOfMemory

LAUNCH_S = 4e-3


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakeCuda:
    """Memory that remembers, and a stream on which each launch takes its time."""

    def __init__(self, memory_bytes: int = 1 << 40) -> None:
        self.free = memory_bytes
        self.memory: dict[int, bytes] = {}
        self.sizes: dict[int, int] = {}
        self.launches: list[tuple[str, int, int, tuple]] = []
        self.busy_until = 0.0
        self._next = 0x1000
        self.core = SimpleNamespace(
            Device=lambda ordinal: self,
            ObjectCode=SimpleNamespace(from_cubin=lambda code: SimpleNamespace(get_kernel=lambda name: name)),
            LaunchConfig=lambda grid, block: (grid, block),
            EventOptions=lambda **options: options,
            launch=self._launch,
        )
        self.driver = SimpleNamespace(
            CUresult=Result, cuMemAlloc=self._alloc, cuMemFree=self._release, cuMemcpyHtoD=self._upload,
            cuMemcpyDtoH=self._download, cuMemGetInfo=lambda: (Result.CUDA_SUCCESS, self.free, memory_bytes),
        )  # fmt: skip

    # the device and its stream
    name, uuid, compute_capability = "NVIDIA H200", "5a3c0000-0000-4000-8000-000000000000", (9, 0)
    properties = SimpleNamespace(multiprocessor_count=132, l2_cache_size=60 << 20)

    def set_current(self):
        pass

    def create_stream(self):
        return self

    def sync(self):
        self._wait(self.busy_until)

    def record(self, options):
        del options
        return Event(self, self.busy_until)

    def _wait(self, until: float) -> None:
        time.sleep(max(0.0, until - time.perf_counter()))

    def _launch(self, stream, config, kernel, *arguments):
        self.launches.append((kernel, *config, arguments))
        self.busy_until = max(time.perf_counter(), self.busy_until) + LAUNCH_S

    # the driver
    def _alloc(self, size):
        if size > self.free:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY, None)
        self.free -= size
        self._next += size
        self.sizes[self._next] = size
        return Result.CUDA_SUCCESS, self._next

    def _release(self, address):
        self.free += self.sizes.pop(address)
        return (Result.CUDA_SUCCESS,)

    def _upload(self, address, source, size):
        if size > self.sizes[address]:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        self.memory[address] = ctypes.string_at(source, size)
        return (Result.CUDA_SUCCESS,)

    def _download(self, target, address, size):
        ctypes.memmove(target, np.array([16384 * 35, 0], dtype=np.uint32).tobytes(), size)
        return (Result.CUDA_SUCCESS,)


class Event:
    def __init__(self, cuda: FakeCuda, at: float) -> None:
        self._cuda, self.at = cuda, at

    def sync(self):
        self._cuda._wait(self.at)

    def __sub__(self, other):
        return 1e3 * (self.at - other.at)


@pytest.fixture
def cuda():
    return FakeCuda()


@pytest.fixture
def engine(cuda):
    with CudaEngine(cuda=(cuda.core, cuda.driver)) as engine:
        yield engine
    assert cuda.sizes == {}  # all given back


def test_facts(engine):
    facts = engine.facts
    assert (facts.name, facts.architecture, facts.sms) == ("NVIDIA H200", "sm_90a", 132)
    assert facts.uuid == "GPU-5a3c0000-0000-4000-8000-000000000000"


def test_operands_are_uploaded_natively_and_spread_over_the_footprint(cuda, engine):
    engine.load(SUITE["hbm_read"], "random", 1000)
    kernel, grid, threads, (sink, operands, _, count, _, _) = cuda.launches[0]
    assert (kernel, grid, threads, count) == ("fill", 1024, 256, 1000 * TILE_BYTES // 16)
    assert cuda.memory[operands] == operand_block("word", "random").tobytes()
    assert cuda.sizes[sink] == 1000 * TILE_BYTES
    engine.time_launch(Launch(66, 10, 5))
    kernel, grid, threads, arguments = cuda.launches[-1]
    assert (kernel, grid, threads) == ("global_read", 66, 1024)
    assert arguments[1] == sink  # reads what was filled
    assert cuda.memory[arguments[2]] == constant_block("word", "random").tobytes()
    assert [int(one) for one in arguments[3:]] == [1000, 10, 5]
    assert [type(one) for one in arguments[3:]] == [np.uint32, np.int32, np.int32]


def test_buffers_are_as_large_as_kernels_reach(cuda, engine):
    def sizes():
        engine.launch(Launch(1, 1))
        sink, operands = cuda.launches[-1][3][:2]
        return cuda.sizes[sink], cuda.sizes[operands]

    engine.load(SUITE["fp64"], "random", 1)
    assert sizes()[1] == BLOCK_BYTES
    engine.load(SUITE["l1_read"], "random", 256)
    assert sizes()[1] == 256 * L1_BLOCK_BYTES
    engine.load(SUITE["hbm_read_strided"], "random", 50)
    assert sizes()[1] == max(50 * 2 * TILE_BYTES, 256 * L1_BLOCK_BYTES)
    engine.load(SUITE["hbm_write"], "random", 300)
    assert sizes()[0] == 300 * TILE_BYTES


def test_what_is_loaded_already_is_not_loaded_again(cuda, engine):
    engine.load(SUITE["l2_read"], "random", 132)
    engine.load(SUITE["l2_read"], "random", 132)
    assert [one[0] for one in cuda.launches].count("fill") == 1
    engine.load(SUITE["l2_read"], "zero", 132)
    engine.chase(65536)  # overwrites the operands
    engine.load(SUITE["l2_read"], "zero", 132)
    assert [one[0] for one in cuda.launches].count("fill") == 3


def test_completed_launches_are_counted_over_their_time(cuda, engine):
    engine.load(SUITE["fp32"], "random", 1)
    before = len(cuda.launches)
    run = engine.run(Launch(132, 100), 0.05, 0.3)
    assert run.end - run.start == pytest.approx(run.launches * LAUNCH_S, rel=0.05)
    assert 0.3 <= run.end - run.start < 0.35
    assert len(cuda.launches) - before > run.launches  # those before and after the window are not counted
    assert time.perf_counter() >= cuda.busy_until  # nothing runs on


def test_bursts_leave_the_device_idle_in_between(cuda, engine):
    engine.load(SUITE["fp64"], "random", 1)
    before = len(cuda.launches)
    engine.launch(Launch(132, 100, rest_s=4e-3))
    (_, grid, threads, _), (kernel, one, warp, arguments) = cuda.launches[before:]
    assert (grid, threads) == (132, 1024)
    assert (kernel, one, warp, int(arguments[4])) == ("sleep", 1, 32, 4000)
    engine.launch(Launch(132, 100))
    assert len(cuda.launches) - before == 3


def test_an_idle_window_launches_nothing(cuda, engine):
    run = engine.run(None, 0.01, 0.05)
    assert run.launches == 0
    assert run.end - run.start == pytest.approx(0.05, rel=0.3)
    assert cuda.launches == []


def test_exactly_as_many_launches_as_asked_for(cuda, engine):
    engine.load(SUITE["fp32"], "random", 1)
    before = len(cuda.launches)
    engine.repeat(Launch(66, 10), 7)
    assert len(cuda.launches) - before == 7
    assert time.perf_counter() >= cuda.busy_until


def test_the_chase_is_read_back(cuda, engine):
    assert engine.chase(65536) == 35.0
    kernel, grid, threads, arguments = cuda.launches[-1]
    assert (kernel, grid, threads, int(arguments[3])) == ("chase", 1, 1, 512)


def test_time_of_a_launch(engine):
    engine.load(SUITE["fp32"], "random", 1)
    assert engine.time_launch(Launch(1, 1)) == pytest.approx(LAUNCH_S)


def test_too_little_memory_is_told():
    cuda = FakeCuda(memory_bytes=1 << 20)
    with CudaEngine(cuda=(cuda.core, cuda.driver)) as engine, pytest.raises(OutOfMemory, match="out of memory"):
        engine.load(SUITE["fp32"], "random", 1)


def test_a_launch_without_a_kernel_is_refused(engine):
    with pytest.raises(DeviceError, match="no kernel is loaded"):
        engine.time_launch(Launch(1, 1))


def test_without_a_disassembler_the_declared_counts_are_taken(engine, monkeypatch):
    from joulemark.energy.microbench import sass

    exact = engine.instructions(SUITE["fp32"], paused=False)
    sass.disassemble.cache_clear()
    monkeypatch.setattr(sass, "nvdisasm", lambda: "/nowhere/nvdisasm")
    assert abs(engine.instructions(SUITE["fp32"], paused=False) - exact) <= 2
    sass.disassemble.cache_clear()
    monkeypatch.setattr(sass, "nvdisasm", lambda: "/bin/echo")
    assert abs(engine.instructions(SUITE["fp32"], paused=False) - exact) <= 2
    sass.disassemble.cache_clear()
