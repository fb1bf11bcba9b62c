from __future__ import annotations

from collections.abc import Callable

import pytest

from joulemark.synthetic_run import SyntheticKernel, SyntheticRun

GEMM = SyntheticKernel(
    "sm90_xmma_gemm_bf16bf16", 110e-6, {"pipe_tensor": 0.6, "dram_read_bytes": 1e12, "dram_write_bytes": 2e11},
    operator="aten::mm",
)  # fmt: skip
ADD = SyntheticKernel(
    "vectorized_elementwise_kernel<4, add>", 47e-6,
    {"pipe_tensor": 0.0, "dram_read_bytes": 2.5e12, "dram_write_bytes": 1e12}, operator="aten::add",
)  # fmt: skip
SUM = SyntheticKernel(
    "at::native::reduce_kernel<512, 1>", 9e-6,
    {"pipe_tensor": 0.0, "dram_read_bytes": 1.5e12, "dram_write_bytes": 1e10}, operator="aten::sum",
)  # fmt: skip
TINY = SyntheticKernel(
    "Memset (Device)", 1.5e-6, {"pipe_tensor": 0.0, "dram_read_bytes": 0.0, "dram_write_bytes": 1e12},
    operator="aten::zero_",
)  # fmt: skip
STEP = (GEMM, ADD, SUM, GEMM, SUM, ADD, TINY, SUM, GEMM)


@pytest.fixture
def run() -> Callable[..., SyntheticRun]:
    """A known run of one step's kernels; keywords change it."""

    def make(kernels=STEP, **options) -> SyntheticRun:
        return SyntheticRun(kernels, **{"steps": 15, "seed": 1} | options)

    return make


LAUNCH_S = 0.3e-6
"""By which the simulator's profiler records a kernel longer than it works."""
QUIET = dict.fromkeys(
    ("sample_noise", "rate_noise", "length_noise", "stamp_noise_s", "tick_s", "late_first_s", "head_s"), 0.0
)
