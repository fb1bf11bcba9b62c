"""Square matrix products: what hardware counters show where the answer is known."""

import pytest

SIZES = {"cuda": 8192, "cpu": 256}


@pytest.mark.bench(needs_gpu="whose pipes the counters of a GPU watch")
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "fp32"])
def bench_product(bench, counters, dtype):
    """One product of random matrices: the pipe of its number format is active nearly all the time."""
    torch = pytest.importorskip("torch")
    n = SIZES[bench.device.split(":")[0]]
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    a, b = (torch.randn(n, n, device=bench.device).to(kind) for _ in range(2))
    out = torch.empty_like(a)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        bench.step(lambda: torch.mm(a, b, out=out), items=2 * n**3, unit="FLOP")
    finally:
        torch.set_float32_matmul_precision(before)
