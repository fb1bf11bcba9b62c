"""Launches, with a stand-in for CUDA's driver: what it is asked for, and what is refused before."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from joulemark.merged.kernels import Description, KernelError, launch
from joulemark.merged.kernels.chain import Plan, chain
from joulemark.merged.kernels.kernel import Arguments, Kernel
from joulemark.merged.kernels.stream import Plan as StreamPlan
from joulemark.merged.kernels.stream import stream
from joulemark.merged.kernels.wide import Plan as WidePlan
from joulemark.merged.kernels.wide import wide
from tests.merged.kernels.chain_cases import chain_of, input_of, parameters_of

MULTIPROCESSORS = 3


class Code(int):
    """A CUresult."""

    @property
    def name(self) -> str:
        return "CUDA_ERROR_INVALID_VALUE"


class Driver:
    """What of ``cuda.bindings.driver`` is used; keeps the launches."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(self, resident: int = 2, launch_code: int = 0) -> None:
        self.resident, self.launch_code = resident, Code(launch_code)
        self.launches: list[tuple[tuple[int, ...], Arguments]] = []
        self.attributes: list[tuple[object, ...]] = []

    def cuModuleLoadData(self, code: bytes) -> tuple[int, str]:
        assert code[:4] == b"\x7fELF"
        return 0, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[int, str]:
        return 0, name.decode()

    def cuFuncSetAttribute(self, *asked: object) -> tuple[int]:
        self.attributes.append(asked)
        return (0,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, *_: object) -> tuple[int, int]:
        return 0, self.resident

    def cuLaunchKernel(self, function: str, *numbers: int) -> tuple[Code]:
        pointers = ctypes.cast(numbers[8], ctypes.POINTER(ctypes.c_void_p))
        self.launches.append((numbers[:7], Arguments.from_address(pointers[0])))
        return (self.launch_code,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(launch, "_driver", lambda: made)
    stream_ = SimpleNamespace(cuda_stream=77, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream_)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: torch.no_grad())
    facts = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: facts)
    return made


def start(kernel: Kernel, shape: tuple[int, ...]) -> None:
    x = input_of(kernel.description, shape)
    weights = kernel.pack(parameters_of(kernel.description))
    launch.Loaded(kernel, torch.device("cuda")).prepare(x, weights, None, kernel.empty_output(x), None)()


def test_one_block_for_each_brick(driver: Driver) -> None:
    kernel = chain(Description(chain_of([16] * 3), "bf16"), Plan((8, 12), 4, 2))
    start(kernel, (2, 17, 13))
    [(numbers, arguments)] = driver.launches
    assert numbers == (2 * 3 * 2, 1, 1, 128, 1, 1, kernel.shared)
    assert driver.attributes == [(kernel.name, 8, kernel.shared)]
    assert (arguments.batch, arguments.count, arguments.blocks) == (2, 12, 12)
    assert tuple(arguments.size) == tuple(arguments.out) == (1, 17, 13)
    assert tuple(arguments.bricks) == (1, 3, 2)
    assert all((arguments.input, arguments.output, arguments.weights))
    assert arguments.residual is None


def test_persistent_blocks_fill_the_device(driver: Driver) -> None:
    kernel = stream(Description(chain_of([16] * 3), "bf16"), StreamPlan(16, 4, 2))
    start(kernel, (5, 20, 20))
    [(numbers, arguments)] = driver.launches
    assert numbers[0] == arguments.blocks == 2 * MULTIPROCESSORS
    assert arguments.count == 5 * 5 * 2


def test_too_few_blocks_at_a_time_are_refused(driver: Driver) -> None:
    driver.resident = 1
    with pytest.raises(KernelError, match="counts on 2 blocks per multiprocessor, 1 fit"):
        start(stream(Description(chain_of([16] * 3), "bf16"), StreamPlan(16, 4, 2)), (1, 8, 8))


def test_a_device_without_the_instructions_is_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(KernelError, match="needs compute capability exactly 90, this device has 80"):
        start(wide(Description(chain_of([64] * 3), "bf16"), WidePlan(32, 3)), (1, 8, 8))


def test_a_failed_launch_says_its_code(driver: Driver) -> None:
    driver.launch_code = Code(1)
    with pytest.raises(KernelError, match="with 1 blocks: CUDA_ERROR_INVALID_VALUE"):
        start(chain(Description(chain_of([16] * 2), "bf16"), Plan((8, 14), 4, 2)), (1, 8, 8))
