"""Measures the rates of a GPU that the performance model takes; none is a data sheet's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache as remember
from typing import Any

import torch
from torch import Tensor

from joulemark.merged import cache
from joulemark.merged.cost import Point, Rates, fit_reached
from joulemark.merged.kernels.compile import architecture_of
from joulemark.merged.stopwatch import Call, device_seconds, race

_DRAM_BYTES = 1 << 30
_PRODUCT = {"bf16": 8192, "fp16": 8192, "tf32": 4096, "fp32": 4096}
_LAUNCHES = 200
_HANDSHAKES = 2000
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


def measure_rates(device: torch.device) -> Rates:
    """The rates of a GPU.

    Raises:
        RuntimeError: the device is no GPU, or CUDA refuses.
    """
    if device.type != "cuda":
        raise RuntimeError(f"rates are measured on a GPU, not on {device}: pass Rates of your own")
    with torch.cuda.device(device), torch.no_grad():
        properties = torch.cuda.get_device_properties(device)
        l2 = int(properties.L2_cache_size)
        times = race(
            {
                "dram": _copy(_DRAM_BYTES // 2, device),
                "l2": _copies(l2 // 8, 16, device),
                "launch": _launches(device),
            },
            device,
        )
        return Rates(
            gpu=properties.name,
            multiprocessors=properties.multi_processor_count,
            dram_bytes_per_s=_DRAM_BYTES / times["dram"],
            l2_bytes_per_s=2 * (l2 // 8) * 16 / (times["l2"] - 16 * times["launch"] / _LAUNCHES),
            l2_bytes=l2,
            shared_bytes=int(properties.shared_memory_per_multiprocessor),
            flop_per_s={form: _product_rate(form, n, device) for form, n in _PRODUCT.items()},
            launch_s=times["launch"] / _LAUNCHES,
            flag_s=_flag_s(device),
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
    return cache.key_of("rates", cache.device_key(device))


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


def _copies(size: int, count: int, device: torch.device) -> Call:
    copy = _copy(size, device)
    return lambda: [copy() for _ in range(count)]


def _launches(device: torch.device) -> Call:
    one = torch.zeros(1, device=device)
    return lambda: [one.add_(1) for _ in range(_LAUNCHES)]


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
    from cuda import core
    from cuda.bindings import driver

    def check(answer: tuple[Any, ...]) -> Any:
        if int(answer[0]):
            raise RuntimeError(f"the handshake of two blocks: {answer[0].name}")
        return answer[1] if len(answer) > 1 else None

    options = core.ProgramOptions(std="c++17", arch=architecture_of(*torch.cuda.get_device_capability(device)))
    code = bytes(core.Program(_FLAG_SOURCE, "c++", options).compile("cubin").code)
    function = check(driver.cuModuleGetFunction(check(driver.cuModuleLoadData(code)), b"handshake"))
    flags = torch.zeros(64, dtype=torch.int32, device=device)
    arguments = (ctypes.c_void_p(flags.data_ptr()), ctypes.c_uint32(_HANDSHAKES))
    pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(one) for one in arguments))

    def start(stream: int, _kept: object = arguments) -> None:
        check(driver.cuLaunchKernel(function, 2, 1, 1, 1, 1, 1, 0, stream, ctypes.addressof(pointers), 0))

    return start, flags
