"""Launches kernels on torch's current stream; a launch can be captured in a CUDA graph."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from joulemark.merged.kernels.compile import KernelError, architecture_of, build
from joulemark.merged.kernels.kernel import Kernel

_behind_others: set[int] = set()
"""Streams, as CUDA knows them, that have waited for another one since the last launch of ours that may be early."""


def in_order_behind(stream: int) -> None:
    """Say that a stream has just waited for an event of another: the next kernel of ours there is not launched early.

    In a capture an early launch is an edge of the graph behind *the* kernel in front of it (CUDA Programming Guide,
    "Programmatic Dependent Launch and Synchronization", use in CUDA graphs); what becomes of several is not said.
    """
    _behind_others.add(stream)


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise KernelError(f"kernels need cuda-bindings ({error}): pip install cuda-core") from error
    return driver


def _check(answer: tuple[Any, ...], what: str) -> Any:
    code, *rest = answer
    if int(code):
        raise KernelError(f"{what}: {code.name}")
    return rest[0] if rest else None


class Loaded:
    """A kernel on a device.

    Args:
        kernel: what to load.
        device: a CUDA device.

    Raises:
        KernelError: the device lacks what the kernel needs, or CUDA refuses.
    """

    def __init__(self, kernel: Kernel, device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
        if not kernel.runs_on(capability):
            needed = f"{kernel.least} or later" if kernel.only is None else f"exactly {kernel.only}"
            raise KernelError(f"{kernel.name} needs compute capability {needed}, this device has {capability}")
        self.kernel = kernel
        self.build = build(kernel, architecture_of(major, minor))
        driver = _driver()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes torch's context current in this thread
            module = _check(driver.cuModuleLoadData(self.build.code), f"loading {kernel.name}")
            self._function = _check(driver.cuModuleGetFunction(module, kernel.name.encode()), kernel.name)
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(
                driver.cuFuncSetAttribute(self._function, attribute, kernel.shared),
                f"{kernel.shared} bytes of shared memory for {kernel.name}",
            )
            self.blocks_per_multiprocessor = int(
                _check(
                    driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, kernel.block, kernel.shared),
                    f"occupancy of {kernel.name}",
                )
            )
        if self.blocks_per_multiprocessor < (kernel.persistent or 1):
            raise KernelError(
                f"{kernel.name} counts on {kernel.persistent or 1} blocks per multiprocessor, "
                f"{self.blocks_per_multiprocessor} fit"
            )
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def prepare(
        self, x: Tensor, weights: Tensor, residual: Tensor | None, out: Tensor, scratch: Tensor | None
    ) -> Callable[[], None]:
        """A launch bound to its tensors: calling it only enqueues, at the least cost on the host."""
        blocks = self.kernel.blocks(x.shape[0], self.kernel.size_of(x), self.multiprocessors)
        arguments = self.kernel.arguments(x, weights, out, residual, scratch, blocks)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        address = ctypes.addressof(pointers)
        enqueue = self._early(blocks) if self.kernel.early else self._in_order(blocks)
        kept = (x, weights, residual, out, scratch, arguments, pointers)

        def start() -> None:
            stream = torch.cuda.current_stream(kept[0].device).cuda_stream
            launch = enqueue
            if self.kernel.early and stream in _behind_others:
                _behind_others.discard(stream)
                launch = self._in_order(blocks)
            code = launch(stream, address)
            if int(code):
                raise KernelError(f"launching {self.kernel.name} with {blocks} blocks: {code.name}")

        return start

    def _in_order(self, blocks: int) -> Callable[[int, int], Any]:
        """A launch behind all before: of a stream and the address of the pointers to its arguments, gives a code."""
        enqueue, function, threads, shared = (
            _driver().cuLaunchKernel,
            self._function,
            self.kernel.block,
            self.kernel.shared,
        )
        return lambda stream, address: enqueue(function, blocks, 1, 1, threads, 1, 1, shared, stream, address, 0)[0]

    def _early(self, blocks: int) -> Callable[[int, int], Any]:
        """The same; it may begin while the kernel before it still runs (CUDA, "Programmatic Dependent Launch")."""
        driver, function = _driver(), self._function
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.kernel.block, 1, 1
        config.sharedMemBytes = self.kernel.shared
        config.attrs, config.numAttrs = [attribute], 1

        def enqueue(stream: int, address: int) -> Any:
            config.hStream = stream
            return driver.cuLaunchKernelEx(config, function, address, 0)[0]

        return enqueue


@cache
def loaded(kernel: Kernel, device: torch.device) -> Loaded:
    """A kernel on a device, loaded once."""
    return Loaded(kernel, device)


def scratch_of(kernel: Kernel, x: Tensor) -> Tensor | None:
    """Zeroed scratch for x, where the kernel needs one; launches that run at the same time need one each."""
    if kernel.scratch is None:
        return None
    return torch.zeros(kernel.scratch(x.shape[0], kernel.size_of(x)), dtype=torch.uint8, device=x.device)


def run(
    kernel: Kernel, x: Tensor, weights: Tensor, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """One launch on the current stream: :func:`joulemark.merged.kernels.run`."""
    kernel.check(x, residual)
    out = kernel.empty_output(x) if out is None else out
    with torch.cuda.device(x.device):
        loaded(kernel, x.device).prepare(x, weights, residual, out, scratch_of(kernel, x))()
    return out
