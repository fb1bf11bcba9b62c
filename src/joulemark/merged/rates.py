"""Measures the rates of a GPU that the performance model takes; none is a data sheet's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache as remember
from statistics import median
from typing import Any

import torch
from torch import Tensor

from joulemark.merged import cache
from joulemark.merged.cost import Point, Rates, fit_reached
from joulemark.merged.kernels.compile import architecture_of, build_text
from joulemark.merged.stopwatch import Call, captured, device_seconds, race

_DRAM_BYTES = 1 << 30
_L2_PASSES = 64
"""Of a copy inside the L2 by one launch: about 1 GB on an H200, so that a launch is little of it."""
_PRODUCT = {"bf16": 8192, "fp16": 8192, "tf32": 4096, "fp32": 4096}
_LAUNCHES = 64
_REPEATS = 7
_TRIES = 3
_HANDSHAKES = 2000
_HOW = 2
"""Version of how rates are measured: what the disk keeps of another one is not read."""
_FEWEST, _MOST = 4, 60
"""Points of a family that its shares are fitted to."""
_FLAG_SOURCE = """
extern "C" __global__ void handshake(volatile unsigned* flags, unsigned rounds) {
    const unsigned me = blockIdx.x;
    for (unsigned n = 1; n <= rounds; ++n) {
        if (me == 0) { flags[0] = n; while (flags[32] < n) {} }
        else { while (flags[0] < n) {} flags[32] = n; }
        __threadfence();
    }
}
"""
_COPY_SOURCE = """
extern "C" __global__ void copies(const uint4* from, uint4* to, unsigned count, unsigned passes) {
    for (unsigned pass = 0; pass < passes; ++pass)
        for (unsigned n = blockIdx.x * blockDim.x + threadIdx.x; n < count; n += gridDim.x * blockDim.x) {
            uint4 v;
            asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from + n) : "memory");
            asm volatile("st.global.cg.v4.u32 [%0], {%1, %2, %3, %4};"
                         :: "l"(to + n), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
        }
}
"""
"""Past the L1 in both directions, and never left out: the same bytes pass after pass."""
_COPY_THREADS, _COPY_BLOCKS = 1024, 2
"""Of a block, and blocks per multiprocessor: all threads that one of 8.0 and 9.0 holds."""


class RatesError(RuntimeError):
    """The rates of a GPU could not be measured."""


@dataclass(frozen=True)
class Load:
    """Work of a known amount.

    Args:
        call: does it on the current stream.
        amount: bytes moved or FLOPs of a call.
    """

    call: Call
    amount: float


Clock = Callable[[Mapping[str, Call]], Mapping[str, float]]
"""Seconds per call of each."""


def measure_rates(device: torch.device) -> Rates:
    """The rates of a GPU: each a known amount over a median time, none a difference of times.

    Raises:
        RatesError: the device is no GPU, or what was measured cannot be its rates.
        KernelError: the kernels that measure cannot be compiled.
    """
    if device.type != "cuda":
        raise RatesError(f"rates are measured on a GPU, not on {device}: pass Rates of your own")
    with torch.cuda.device(device), torch.no_grad():
        properties = torch.cuda.get_device_properties(device)
        l2 = int(properties.L2_cache_size)
        copy_ = _copier(device, properties.multi_processor_count)
        loads = {
            "dram": Load(_copy(_DRAM_BYTES // 2, device), _DRAM_BYTES),
            "dram, our own": Load(copy_(_DRAM_BYTES // 2, 1), _DRAM_BYTES),
            "l2": Load(copy_(l2 // 8, _L2_PASSES), 2 * (l2 // 8) * _L2_PASSES),
        }
        dram_bytes_per_s, l2_bytes_per_s = byte_rates(loads, lambda calls: race(calls, device))
        del loads
        return Rates(
            gpu=properties.name,
            multiprocessors=properties.multi_processor_count,
            dram_bytes_per_s=dram_bytes_per_s,
            l2_bytes_per_s=l2_bytes_per_s,
            l2_bytes=l2,
            shared_bytes=int(properties.shared_memory_per_multiprocessor),
            flop_per_s={form: _product_rate(form, n, device) for form, n in _PRODUCT.items()},
            launch_s=_launch_s(device),
            flag_s=_flag_s(device),
        )


def byte_rates(loads: Mapping[str, Load], clock: Clock) -> tuple[float, float]:
    """Bytes per second through DRAM, the best of its copies, and inside the L2, timed again where that is not faster.

    Args:
        loads: the copy called ``l2``, all others go through DRAM.
        clock: times them.

    Raises:
        RatesError: the L2 is not the faster one in any try: something else uses the GPU.
    """
    for _ in range(_TRIES):
        times = clock({name: one.call for name, one in loads.items()})
        rates = {name: one.amount / times[name] if times[name] > 0 else 0.0 for name, one in loads.items()}
        l2 = rates.pop("l2")
        dram = max(rates.values())
        if 0 < dram < l2:
            return dram, l2
    raise RatesError(
        f"copies inside the L2 ran at {l2:.3g} B/s, through DRAM at {dram:.3g} B/s in the last of {_TRIES} tries: "
        "measure on a GPU that nothing else uses, or pass rates=Rates(…)"
    )


def rates_of(device: torch.device) -> Rates:
    """The rates of a GPU, measured once and kept on disk, with the shares of them that :func:`learn` has found."""
    rates = _measured(device)
    reached = cache.read("reached", _key(device)) or {}
    try:
        return Rates.from_json({**rates.to_json(), "reached": reached})
    except (TypeError, ValueError):
        return rates


@remember
def _measured(device: torch.device) -> Rates:
    found = cache.read("rates", _key(device))
    if found is not None:
        try:
            return Rates.from_json(found)
        except (TypeError, ValueError):
            found = None
    rates = measure_rates(device)
    cache.write("rates", _key(device), rates.to_json())
    return rates


def _key(device: torch.device) -> str:
    return cache.key_of("rates", _HOW, cache.device_key(device))


def learn(points: Iterable[Point], rates: Rates, device: torch.device) -> None:
    """Fit the shares of the rates to executions that were measured, and keep them for the next prediction.

    A family that is too seldom measured to tell keeps what is known of it.
    """
    families: dict[str, list[Point]] = {}
    for one in points:
        families.setdefault(one.candidate.family, []).append(one)
    told = [one for members in families.values() if len(members) >= _FEWEST for one in members[:_MOST]]
    if told:
        cache.write("reached", _key(device), {**rates.reached, **fit_reached(told, rates)})


def _copy(size: int, device: torch.device) -> Call:
    """A copy of random bytes: zeros are faster than data."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _copier(device: torch.device, multiprocessors: int) -> Callable[[int, int], Call]:
    """(bytes, passes) → one launch that copies random bytes so many times."""
    launch = _function(_COPY_SOURCE, "copies", device)
    blocks = _COPY_BLOCKS * multiprocessors

    def copies(size: int, passes: int) -> Call:
        source = torch.randint(0, 256, (size // 16 * 16,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        arguments = [ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(target.data_ptr())]
        start = launch((*arguments, ctypes.c_uint32(size // 16), ctypes.c_uint32(passes)), blocks, _COPY_THREADS)
        kept = (source, target)

        def call() -> None:
            start(torch.cuda.current_stream(kept[0].device).cuda_stream)

        return call

    return copies


def _launch_s(device: torch.device) -> float:
    """From kernel to kernel in a CUDA graph; the host, which launches ten times slower, has no part in it."""
    one = torch.zeros(1, device=device)

    def several() -> None:
        for _ in range(_LAUNCHES):
            one.add_(1)

    several()
    replay = captured(several)
    return median(device_seconds(replay) for _ in range(_REPEATS)) / _LAUNCHES


def _product_rate(form: str, n: int, device: torch.device) -> float:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(form, torch.float32)
    left, right = (torch.randn(n, n, device=device, dtype=kind) for _ in range(2))
    with _products_in(form):
        seconds = race({"product": lambda: torch.mm(left, right)}, device)["product"]
    return 2 * n**3 / seconds


@contextmanager
def _products_in(form: str) -> Iterator[None]:
    """Products of fp32 in TF32 or not, by the newer of torch's interfaces: the older getter raises beside it."""
    products = torch.backends.cuda.matmul
    name: str = "fp32_precision"
    values: tuple[object, object] = ("ieee", "tf32")
    if not hasattr(products, name):
        name, values = "allow_tf32", (False, True)
    before = getattr(products, name)
    setattr(products, name, values[form == "tf32"])
    try:
        yield
    finally:
        setattr(products, name, before)


def _flag_s(device: torch.device) -> float:
    """Time from a flag set by one block to the block that waits for it, from handshakes of two blocks."""
    start, flags = _handshake(device)

    def run() -> None:
        flags.zero_()
        start(torch.cuda.current_stream(device).cuda_stream)

    return min(device_seconds(run) for _ in range(4)) / (2 * _HANDSHAKES)


def _handshake(device: torch.device) -> tuple[Callable[[int], None], Tensor]:
    """A launch of two blocks of one thread on a stream, and the flags that they set; two such blocks run at once."""
    flags = torch.zeros(64, dtype=torch.int32, device=device)
    arguments = (ctypes.c_void_p(flags.data_ptr()), ctypes.c_uint32(_HANDSHAKES))
    return _function(_FLAG_SOURCE, "handshake", device)(arguments, 2, 1), flags


Launch = Callable[[tuple[Any, ...], int, int], Callable[[int], None]]
"""(arguments, blocks, threads) → what launches a kernel with them on a stream."""


def _function(source: str, name: str, device: torch.device) -> Launch:
    """A kernel, compiled and loaded.

    Raises:
        KernelError: it cannot be compiled here.
        RatesError: CUDA refuses it.
    """
    code = build_text(name, source, architecture_of(*torch.cuda.get_device_capability(device))).code
    from cuda.bindings import driver

    def check(answer: tuple[Any, ...]) -> Any:
        if int(answer[0]):
            raise RatesError(f"the kernel {name!r}, which measures rates: {answer[0].name}")
        return answer[1] if len(answer) > 1 else None

    torch.cuda.current_stream(device).synchronize()  # makes torch's context current in this thread
    function = check(driver.cuModuleGetFunction(check(driver.cuModuleLoadData(code)), name.encode()))

    def launch(arguments: tuple[Any, ...], blocks: int, threads: int) -> Callable[[int], None]:
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))

        def start(stream: int, _kept: object = arguments) -> None:
            check(
                driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
            )

        return start

    return launch
