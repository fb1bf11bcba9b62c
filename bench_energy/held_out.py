"""Workloads held out of the calibration: the model is judged by them, so none of them may ever enter its fit.

Networks of the zoo in training and inference, matrix products of several shapes and formats, kernels bound by memory,
and what supercomputers run. :data:`FIRST` was written before the first calibration. Only a quarter of it drew less than
70 % of the power limit, so :data:`ADDED`, for less power, was written after that campaign and before the next; none of
either enters a fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Step = Callable[[], object]


@dataclass(frozen=True)
class HeldOut:
    """A workload and how to build its step.

    Args:
        name: unique.
        kind: ``network``, ``gemm``, ``memory`` or ``hpc``.
        dtype: number format of its arithmetic: decides which tensor unit its tensor cycles are.
        build: (device, tiny) → step; ``tiny`` is for a test on the CPU.
        needs_cuda: why it cannot run on the CPU; empty when it can.
        batch_size: of a network.
    """

    name: str
    kind: str
    dtype: str
    build: Callable[[str, bool], Step]
    needs_cuda: str = ""
    batch_size: int | None = None


def _normal(device: str, dtype: str, *shape: int) -> torch.Tensor:
    import torch

    generator = torch.Generator(device=device).manual_seed(7)
    kind = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    wide = torch.float64 if dtype == "fp64" else torch.float32
    return torch.randn(*shape, generator=generator, device=device, dtype=wide).to(kind)


def _gemm(m: int, n: int, k: int, dtype: str, device: str, tiny: bool) -> Step:
    from joulemark.workloads.precision import set_fp32

    if tiny:
        m, n, k = 32, 32, 32
    set_fp32(tf32=dtype == "tf32")
    left, right = _normal(device, dtype, m, k), _normal(device, dtype, k, n)
    return lambda: left @ right


def _gemm_int8(size: int, device: str, tiny: bool) -> Step:
    import torch

    n = 32 if tiny else size
    left, right = (torch.randint(-127, 127, (n, n), device=device, dtype=torch.int8) for _ in range(2))
    return lambda: torch._int_mm(left, right.t())


def _batched(batch: int, size: int, dtype: str, device: str, tiny: bool) -> Step:
    import torch

    if tiny:
        batch, size = 4, 16
    left, right = _normal(device, dtype, batch, size, size), _normal(device, dtype, batch, size, size)
    return lambda: torch.bmm(left, right)


def _attention(device: str, tiny: bool) -> Step:
    from torch.nn import functional

    shape = (1, 2, 16, 8) if tiny else (8, 16, 4096, 128)
    query, key, value = (_normal(device, "bf16", *shape) for _ in range(3))
    return lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _convolution(device: str, tiny: bool) -> Step:
    import torch
    from torch.nn import functional

    shape, channels = ((1, 8, 8, 8), 8) if tiny else ((64, 256, 56, 56), 256)
    image = _normal(device, "bf16", *shape).to(memory_format=torch.channels_last)
    weight = _normal(device, "bf16", channels, channels, 3, 3).to(memory_format=torch.channels_last)
    return lambda: functional.conv2d(image, weight, padding=1)


def _copy(device: str, tiny: bool) -> Step:
    source = _normal(device, "fp32", 1 << (10 if tiny else 28))
    target = source.clone()
    return lambda: target.copy_(source)


def _triad(device: str, tiny: bool) -> Step:
    """A = b + s c of STREAM (McCalpin, 1995), in FP64."""
    import torch

    n = 1 << (10 if tiny else 27)
    b, c = _normal(device, "fp64", n), _normal(device, "fp64", n)
    a = torch.empty_like(b)
    return lambda: torch.add(b, c, alpha=3.0, out=a)


def _gelu(device: str, tiny: bool) -> Step:
    from torch.nn import functional

    values = _normal(device, "bf16", 1 << (10 if tiny else 28))
    return lambda: functional.gelu(values)


def _reduction(device: str, tiny: bool) -> Step:
    values = _normal(device, "fp32", 1 << (10 if tiny else 28))
    return lambda: values.sum()


def _softmax(device: str, tiny: bool) -> Step:
    import torch

    values = _normal(device, "bf16", *((8, 16) if tiny else (32768, 4096)))
    return lambda: torch.softmax(values, dim=-1)


def _layer_norm(device: str, tiny: bool) -> Step:
    from torch.nn import functional

    width = 16 if tiny else 4096
    values = _normal(device, "bf16", 8 if tiny else 32768, width)
    return lambda: functional.layer_norm(values, (width,))


def _gather(device: str, tiny: bool) -> Step:
    """Rows of an embedding table in random order."""
    import torch

    rows, width = (64, 8) if tiny else (1 << 21, 64)
    table = _normal(device, "fp32", rows, width)
    index = torch.randperm(rows, device=device)
    return lambda: table.index_select(0, index)


def _scatter(device: str, tiny: bool) -> Step:
    """Random additions, as a histogram or a gradient of an embedding."""
    import torch

    n = 1 << (10 if tiny else 25)
    target = torch.zeros(n // 4, device=device)
    index = torch.randint(0, n // 4, (n,), device=device)
    values = _normal(device, "fp32", n)
    return lambda: target.index_add_(0, index, values)


def _transpose(device: str, tiny: bool) -> Step:
    n = 16 if tiny else 16384
    values = _normal(device, "fp32", n, n)
    return lambda: values.t().contiguous()


def _sort(device: str, tiny: bool) -> Step:
    import torch

    values = torch.randint(0, 1 << 30, (1 << (10 if tiny else 26),), device=device, dtype=torch.int32)
    return lambda: torch.sort(values)


def _fft(batch: int, n: int, device: str, tiny: bool) -> Step:
    import torch

    if tiny:
        batch, n = 4, 16
    signal = torch.complex(_normal(device, "fp32", batch, n), _normal(device, "fp32", batch, n))
    return lambda: torch.fft.fft(signal)


def _fft_3d(device: str, tiny: bool) -> Step:
    import torch

    n = 8 if tiny else 384
    field = torch.complex(_normal(device, "fp64", n, n, n), _normal(device, "fp64", n, n, n))
    return lambda: torch.fft.fftn(field)


def _poisson(device: str, n: int) -> torch.Tensor:
    """The five-point Laplacian on an n × n grid, as a CSR matrix in FP64."""
    import torch

    cells = torch.arange(n * n, device=device)
    x, y = cells % n, cells // n
    rows, columns, values = [cells], [cells], [torch.full((n * n,), 4.0, dtype=torch.float64, device=device)]
    for inside, offset in ((x > 0, -1), (x < n - 1, 1), (y > 0, -n), (y < n - 1, n)):
        rows.append(cells[inside])
        columns.append(cells[inside] + offset)
        values.append(torch.full((int(inside.sum()),), -1.0, dtype=torch.float64, device=device))
    index = torch.stack([torch.cat(rows), torch.cat(columns)])
    return torch.sparse_coo_tensor(index, torch.cat(values), (n * n, n * n)).coalesce().to_sparse_csr()


def _spmv(device: str, tiny: bool) -> Step:
    n = 8 if tiny else 3000
    matrix = _quietly(_poisson, device, n)
    vector = _normal(device, "fp64", n * n)
    return lambda: matrix @ vector


def _conjugate_gradient(device: str, tiny: bool) -> Step:
    """One iteration per step (Hestenes and Stiefel, 1952) on the Poisson problem; starts anew when it has converged."""
    n = 8 if tiny else 2000
    return _CgStep(_quietly(_poisson, device, n), _normal(device, "fp64", n * n))


class _CgStep:
    """Its state between iterations; no host read, so the device is never waited for."""

    restart_after = 500

    def __init__(self, matrix: Any, right: torch.Tensor) -> None:
        self.matrix, self.right = matrix, right
        self.reset()

    def reset(self) -> None:
        self.x = self.right * 0
        self.residual = self.right.clone()
        self.direction = self.residual.clone()
        self.square = self.residual @ self.residual
        self.iteration = 0

    def __call__(self) -> object:
        if self.iteration == self.restart_after:
            self.reset()
        product = self.matrix @ self.direction
        alpha = self.square / (self.direction @ product)
        self.x += alpha * self.direction
        self.residual -= alpha * product
        square = self.residual @ self.residual
        self.direction = self.residual + (square / self.square) * self.direction
        self.square = square
        self.iteration += 1
        return self.x


def _stencil(device: str, tiny: bool) -> Step:
    """Seven-point stencil of a 3-D heat equation in FP64."""
    n = 8 if tiny else 512
    field = _normal(device, "fp64", n, n, n)
    target = field.clone()

    def step() -> object:
        inner = field[1:-1, 1:-1, 1:-1] * 0.4
        inner += 0.1 * field[2:, 1:-1, 1:-1]
        inner += 0.1 * field[:-2, 1:-1, 1:-1]
        inner += 0.1 * field[1:-1, 2:, 1:-1]
        inner += 0.1 * field[1:-1, :-2, 1:-1]
        inner += 0.1 * field[1:-1, 1:-1, 2:]
        inner += 0.1 * field[1:-1, 1:-1, :-2]
        target[1:-1, 1:-1, 1:-1] = inner
        return target

    return step


def _n_body(dtype: str, device: str, tiny: bool) -> Step:
    """Accelerations of all bodies by all others, with softening."""
    n = 16 if tiny else (8192 if dtype == "fp32" else 4096)
    place = _normal(device, dtype, n, 3)
    mass = _normal(device, dtype, n).abs()

    def step() -> object:
        between = place[None, :, :] - place[:, None, :]
        inverse = ((between * between).sum(-1) + 1e-3).rsqrt()
        weight = mass[None, :] * inverse * inverse * inverse
        return (between * weight[..., None]).sum(1)

    return step


def _lattice(device: str, tiny: bool) -> Step:
    """Jacobi iterations on a periodic grid in FP32, small enough for the L2."""
    import torch

    n = 16 if tiny else 1536
    field = _normal(device, "fp32", n, n)
    moves = ((1, 0), (-1, 0), (1, 1), (-1, 1))
    return lambda: 0.25 * sum(torch.roll(field, shift, axis) for shift, axis in moves)


def _monte_carlo(device: str, tiny: bool) -> Step:
    """Random numbers and transcendental functions: option prices (Black and Scholes) by simulation."""
    import torch

    n = 1 << (10 if tiny else 26)
    draws = torch.empty(n, device=device)
    return lambda: (torch.exp(draws.normal_() * 0.2 - 0.02) * 100 - 105).clamp_min(0).mean()


def _quietly(build: Callable[..., Any], *args: Any) -> Any:
    """Torch warns once that sparse CSR is in beta."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return build(*args)


def _network(model: str, phase: str, dtype: str, batch: int, mode: str, device: str, tiny: bool) -> Step:
    if tiny:
        model, phase, dtype, batch, mode = "lenet5", "train" if phase == "train" else "inference", "fp32", 2, "eager"
    return _model(model, phase, dtype, batch, mode, device, tiny)


def _model(model: str, phase: str, dtype: str, batch: int, mode: str, device: str, tiny: bool) -> Step:
    from joulemark.plugin.sweep import describe, workload_of
    from joulemark.records import Case

    model, _, images = describe(model, {})
    case = Case(model, phase, mode, dtype, batch, "channels_last" if images else "contiguous", "device")
    return workload_of(case, {}, Path.cwd()).build(case, device).run


def _small_gemm(size: int, dtype: str, device: str, tiny: bool) -> Step:
    """Chained, so that one waits for the other: a GPU that is never full."""
    from joulemark.workloads.precision import set_fp32

    n = 16 if tiny else size
    set_fp32(tf32=dtype == "tf32")
    left, right = _normal(device, dtype, n, n), _normal(device, dtype, n, n)
    return lambda: (left @ right) @ right


def _small_attention(device: str, tiny: bool) -> Step:
    from torch.nn import functional

    shape = (1, 2, 16, 8) if tiny else (1, 12, 1024, 64)
    query, key, value = (_normal(device, "bf16", *shape) for _ in range(3))
    return lambda: functional.scaled_dot_product_attention(query, key, value)


def _small_copy(device: str, tiny: bool) -> Step:
    """Stays in the L2."""
    source = _normal(device, "fp32", 1 << (10 if tiny else 20))
    target = source.clone()
    return lambda: target.copy_(source)


def _prefix_sum(device: str, tiny: bool) -> Step:
    import torch

    values = _normal(device, "fp32", *((8, 16) if tiny else (64, 1 << 16)))
    return lambda: torch.cumsum(values, dim=-1)


def _top_k(device: str, tiny: bool) -> Step:
    import torch

    values = _normal(device, "fp32", *((4, 32) if tiny else (256, 32768)))
    return lambda: torch.topk(values, 8, dim=-1)


def _small_embedding(device: str, tiny: bool) -> Step:
    """A table that the L2 holds, in random order."""
    import torch

    rows = 64 if tiny else 1 << 15
    table = _normal(device, "bf16", rows, 128)
    index = torch.randint(0, rows, (64 if tiny else 1 << 14,), device=device)
    return lambda: table.index_select(0, index)


def _normalise(device: str, tiny: bool) -> Step:
    from torch.nn import functional

    width = 16 if tiny else 1024
    values = _normal(device, "bf16", 8 if tiny else 2048, width)
    return lambda: functional.layer_norm(values, (width,))


def _small_transpose(device: str, tiny: bool) -> Step:
    n = 16 if tiny else 1024
    values = _normal(device, "fp32", n, n)
    return lambda: values.t().contiguous()


def _cholesky(device: str, tiny: bool) -> Step:
    import torch

    n = 16 if tiny else 1024
    root = _normal(device, "fp64", n, n)
    matrix = root @ root.t() + n * torch.eye(n, dtype=torch.float64, device=device)
    return lambda: torch.linalg.cholesky_ex(matrix)


def _triangular(device: str, tiny: bool) -> Step:
    import torch

    n = 16 if tiny else 1024
    matrix = _normal(device, "fp64", n, n).tril() + n * torch.eye(n, dtype=torch.float64, device=device)
    right = _normal(device, "fp64", n, 64)
    return lambda: torch.linalg.solve_triangular(matrix, right, upper=False)


def _fft_2d(device: str, tiny: bool) -> Step:
    import torch

    n = 16 if tiny else 512
    image = torch.complex(_normal(device, "fp32", n, n), _normal(device, "fp32", n, n))
    return lambda: torch.fft.fft2(image)


def _small_spmv(device: str, tiny: bool) -> Step:
    n = 8 if tiny else 400
    matrix = _quietly(_poisson, device, n)
    vector = _normal(device, "fp64", n * n)
    return lambda: matrix @ vector


def _wave(device: str, tiny: bool) -> Step:
    """The wave equation on a periodic plane in FP64, in the L2."""
    import torch

    n = 16 if tiny else 768
    now = _normal(device, "fp64", n, n)
    before = now.clone()

    def step() -> object:
        nonlocal now, before
        around = sum(torch.roll(now, shift, axis) for shift in (1, -1) for axis in (0, 1))
        now, before = 2 * now - before + 0.2 * (around - 4 * now), now
        return now

    return step


def _fractal(device: str, tiny: bool) -> Step:
    """Mandelbrot's iteration on a small plane; those that leave are held."""
    import torch

    n = 8 if tiny else 512
    axis = torch.linspace(-1.5, 1.5, n, device=device)
    x0, y0 = axis[None, :] - 0.5, axis[:, None]

    def step() -> object:
        x, y = torch.zeros(n, n, device=device), torch.zeros(n, n, device=device)
        for _ in range(10):
            x, y = (x * x - y * y + x0).clamp(-2, 2), (2 * x * y + y0).clamp(-2, 2)
        return x

    return step


def _partly_loaded(build: Callable[[str, bool], Step], busy: int, pause_s: float, device: str, tiny: bool) -> Step:
    """A service that waits for requests: a burst of work, then a pause of the host that outlasts it."""
    inner = build(device, tiny)

    def step() -> object:
        for _ in range(1 if tiny else busy):
            last = inner()
        time.sleep(1e-4 if tiny else pause_s)
        return last

    return step


def _networks() -> list[HeldOut]:
    cells = (
        ("resnet50", "train", "bf16", 64), ("resnet50", "train", "fp32", 32), ("resnet50", "train", "bf16", 8),
        ("resnet50", "inference", "bf16", 128), ("resnet50", "inference", "bf16", 4), ("vgg16", "train", "bf16", 32),
        ("vit_b_16", "train", "bf16", 64), ("vit_b_16", "inference", "bf16", 32), ("bert_base", "train", "bf16", 32),
        ("bert_base", "inference", "bf16", 64), ("mobilenet_v2", "inference", "bf16", 64),
        ("gpt2_small", "train", "bf16", 8), ("gpt2_small", "prefill", "bf16", 8), ("gpt2_small", "decode", "bf16", 32),
    )  # fmt: skip
    return [network(*cell) for cell in cells]


def network(model: str, phase: str, dtype: str, batch: int, mode: str = "eager") -> HeldOut:
    """A cell of the zoo; its mode stands in its name unless it is eager."""
    return _cell(_network, model, phase, dtype, batch, mode)


def own(model: str, phase: str, dtype: str, batch: int, mode: str = "eager") -> HeldOut:
    """A cell of any model, the zoo's or ``pkg.mod:factory``, for its own sake: in no list, and the same on a CPU.

    Raises:
        ConfigurationError: there is no such model, or it has no such phase.
    """
    from joulemark.errors import ConfigurationError
    from joulemark.plugin.sweep import describe

    name, phases, _ = describe(model, {})
    if phase not in phases:
        raise ConfigurationError(f"{name} has no phase {phase!r}", f"it has {', '.join(phases)}")
    return _cell(_model, name, phase, dtype, batch, mode)


def _cell(build: Callable[..., Step], model: str, phase: str, dtype: str, batch: int, mode: str) -> HeldOut:
    made = partial(build, model, phase, dtype, batch, mode)
    kind = "" if mode == "eager" else f"-{mode}"
    return HeldOut(f"{model}-{phase}-{dtype}{kind}-b{batch}", "network", dtype, made, batch_size=batch)


FIRST: tuple[HeldOut, ...] = (
    *_networks(),
    HeldOut("gemm-bf16-8192", "gemm", "bf16", partial(_gemm, 8192, 8192, 8192, "bf16")),
    HeldOut("gemm-bf16-2048", "gemm", "bf16", partial(_gemm, 2048, 2048, 2048, "bf16")),
    HeldOut("gemm-bf16-skinny", "gemm", "bf16", partial(_gemm, 16, 16384, 16384, "bf16")),
    HeldOut("gemm-fp16-4096", "gemm", "fp16", partial(_gemm, 4096, 4096, 4096, "fp16")),
    HeldOut("gemm-tf32-4096", "gemm", "tf32", partial(_gemm, 4096, 4096, 4096, "tf32")),
    HeldOut("gemm-fp32-4096", "gemm", "fp32", partial(_gemm, 4096, 4096, 4096, "fp32")),
    HeldOut("gemm-fp64-4096", "gemm", "fp64", partial(_gemm, 4096, 4096, 4096, "fp64")),
    HeldOut("gemm-int8-4096", "gemm", "int8", partial(_gemm_int8, 4096), needs_cuda="torch has int8 products for GPUs"),
    HeldOut("gemm-bf16-batched", "gemm", "bf16", partial(_batched, 512, 256, "bf16")),
    HeldOut("attention-bf16", "gemm", "bf16", _attention),
    HeldOut("convolution-bf16", "gemm", "bf16", _convolution),
    HeldOut("copy", "memory", "fp32", _copy),
    HeldOut("triad-fp64", "memory", "fp64", _triad),
    HeldOut("gelu-bf16", "memory", "bf16", _gelu),
    HeldOut("reduction", "memory", "fp32", _reduction),
    HeldOut("softmax-bf16", "memory", "bf16", _softmax),
    HeldOut("layer-norm-bf16", "memory", "bf16", _layer_norm),
    HeldOut("gather", "memory", "fp32", _gather),
    HeldOut("scatter-add", "memory", "fp32", _scatter),
    HeldOut("transpose", "memory", "fp32", _transpose),
    HeldOut("sort", "memory", "fp32", _sort),
    HeldOut("fft-1d", "hpc", "fp32", partial(_fft, 4096, 16384)),
    HeldOut("fft-3d-fp64", "hpc", "fp64", _fft_3d),
    HeldOut("spmv-fp64", "hpc", "fp64", _spmv),
    HeldOut("conjugate-gradient-fp64", "hpc", "fp64", _conjugate_gradient),
    HeldOut("stencil-fp64", "hpc", "fp64", _stencil),
    HeldOut("n-body-fp32", "hpc", "fp32", partial(_n_body, "fp32")),
    HeldOut("n-body-fp64", "hpc", "fp64", partial(_n_body, "fp64")),
    HeldOut("jacobi-l2-fp32", "hpc", "fp32", _lattice),
    HeldOut("monte-carlo", "hpc", "fp32", _monte_carlo),
)
"""Written before the first calibration."""

_SMALL_CELLS = (
    ("resnet50", "inference", "bf16", 16), ("resnet18", "inference", "bf16", 8), ("resnet18", "train", "bf16", 16),
    ("mobilenet_v2", "inference", "bf16", 8), ("mobilenet_v2", "train", "bf16", 16),
    ("vit_b_16", "inference", "bf16", 4),
    ("bert_base", "inference", "bf16", 4), ("vgg16", "inference", "bf16", 2), ("gpt2_small", "prefill", "bf16", 1),
    ("gpt2_small", "decode", "bf16", 4),
)  # fmt: skip

ADDED: tuple[HeldOut, ...] = (
    *(network(*cell) for cell in _SMALL_CELLS),
    HeldOut("gemm-bf16-768", "gemm", "bf16", partial(_small_gemm, 768, "bf16")),
    HeldOut("gemm-tf32-768", "gemm", "tf32", partial(_small_gemm, 768, "tf32")),
    HeldOut("gemm-fp32-512", "gemm", "fp32", partial(_small_gemm, 512, "fp32")),
    HeldOut("gemm-fp64-512", "gemm", "fp64", partial(_small_gemm, 512, "fp64")),
    HeldOut("gemm-fp32-batched", "gemm", "fp32", partial(_batched, 64, 64, "fp32")),
    HeldOut("attention-bf16-small", "gemm", "bf16", _small_attention),
    HeldOut("copy-l2", "memory", "fp32", _small_copy),
    HeldOut("prefix-sum", "memory", "fp32", _prefix_sum),
    HeldOut("top-k", "memory", "fp32", _top_k),
    HeldOut("embedding-l2", "memory", "bf16", _small_embedding),
    HeldOut("layer-norm-l2", "memory", "bf16", _normalise),
    HeldOut("transpose-l2", "memory", "fp32", _small_transpose),
    HeldOut("cholesky-fp64", "hpc", "fp64", _cholesky),
    HeldOut("triangular-fp64", "hpc", "fp64", _triangular),
    HeldOut("fft-2d", "hpc", "fp32", _fft_2d),
    HeldOut("spmv-l2-fp64", "hpc", "fp64", _small_spmv),
    HeldOut("wave-l2-fp64", "hpc", "fp64", _wave),
    HeldOut("fractal-fp32", "hpc", "fp32", _fractal),
    HeldOut(
        "gemm-bf16-partly", "gemm", "bf16", partial(_partly_loaded, partial(_gemm, 8192, 8192, 8192, "bf16"), 4, 0.02)
    ),
    HeldOut("copy-partly", "memory", "fp32", partial(_partly_loaded, _copy, 6, 0.02)),
    HeldOut("stencil-fp64-partly", "hpc", "fp64", partial(_partly_loaded, _stencil, 1, 0.03)),
)
"""For less power, written between the first campaign and the second."""

HELD_OUT: tuple[HeldOut, ...] = (*FIRST, *ADDED)
"""The list."""
