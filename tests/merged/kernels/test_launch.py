"""Launches, with a stand-in for CUDA's driver: what it is asked for, and what is refused before."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver as bindings

from joulemark.merged.kernels import Description, KernelError, launch
from joulemark.merged.kernels.chain import Plan, chain
from joulemark.merged.kernels.inverted_residual_warpgroup import Plan as InvertedPlan
from joulemark.merged.kernels.inverted_residual_warpgroup import inverted_residual_warpgroup
from joulemark.merged.kernels.kernel import Arguments, Kernel
from joulemark.merged.kernels.stream import Plan as StreamPlan
from joulemark.merged.kernels.stream import stream
from joulemark.merged.kernels.wide import Plan as WidePlan
from joulemark.merged.kernels.wide import wide
from tests.merged.kernels.chain_cases import chain_of, input_of, parameters_of
from tests.merged.kernels.machine_code import instructions_of
from tests.merged.test_kernels_inverted_residual import sequence_of

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
        self.streams: list[int] = []

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

    CUlaunchAttribute, CUlaunchAttributeID = bindings.CUlaunchAttribute, bindings.CUlaunchAttributeID
    CUlaunchConfig = bindings.CUlaunchConfig

    def cuLaunchKernel(self, function: str, *numbers: int) -> tuple[Code]:
        return self._keep(numbers[:7], numbers[8])

    def cuLaunchKernelEx(self, config: bindings.CUlaunchConfig, function: str, address: int, _: int) -> tuple[Code]:
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        self.streams.append(int(config.hStream))
        [attribute] = config.attrs
        assert config.numAttrs == 1
        assert attribute.id == bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert attribute.value.programmaticStreamSerializationAllowed == 1
        return self._keep((*grid, *block, config.sharedMemBytes), address)

    def _keep(self, numbers: tuple[int, ...], address: int) -> tuple[Code]:
        pointers = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))
        held = ctypes.string_at(pointers[0], ctypes.sizeof(Arguments))  # a copy: they live as long as the launch
        self.launches.append((numbers, Arguments.from_buffer_copy(held)))
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


def test_an_early_launch_allows_what_its_kernel_waits_for_itself(driver: Driver) -> None:
    description = Description(sequence_of(16, 32, 16), "bf16")
    kernel = inverted_residual_warpgroup(description, InvertedPlan(4, 8, 1, 32, early=True))
    opcodes = [one.opcode for one in instructions_of(kernel)]
    assert (
        opcodes.index("PREEXIT")
        < opcodes.index("ACQBULK")
        < min(n for n, one in enumerate(opcodes) if one.startswith(("LDG", "STG", "UBLKCP")))
    )
    start(kernel, (2, 9, 8))
    [(numbers, arguments)] = driver.launches
    assert numbers == (2 * 3, 1, 1, 128, 1, 1, kernel.shared)
    assert (arguments.batch, arguments.count, driver.streams) == (2, 6, [77])


def test_the_first_launch_behind_another_stream_is_not_early(driver: Driver) -> None:
    description = Description(sequence_of(16, 32, 16), "bf16")
    early = inverted_residual_warpgroup(description, InvertedPlan(4, 8, 1, 32, early=True))
    in_order = chain(Description(chain_of([16] * 3), "bf16"), Plan((8, 12), 4, 2))
    launch.in_order_behind(78)
    start(early, (2, 9, 8))
    assert driver.streams == [77], "that is another stream"
    launch.in_order_behind(77)
    start(in_order, (2, 17, 13))
    start(early, (2, 9, 8))
    assert (driver.streams, len(driver.launches)) == ([77], 3), "whatever is launched in between: it may launch nothing"
    start(early, (2, 9, 8))
    assert (driver.streams, len(driver.launches)) == ([77, 77], 4)


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
