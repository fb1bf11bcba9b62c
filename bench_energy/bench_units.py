"""Power of two plain kernels, one bound by arithmetic and one by memory, on random data."""

import pytest

pytestmark = pytest.mark.bench(needs_gpu="which load the units of a GPU")


@pytest.fixture
def torch():
    """torch, or a skip."""
    return pytest.importorskip("torch", exc_type=ImportError)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("size", [4096])
def bench_matmul(bench, power, thermal, torch, dtype, size):
    """A square matrix product; one item is one FLOP."""
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    left, right = (torch.randn(size, size, device=bench.device).to(kind) for _ in range(2))
    assert thermal() is not None
    bench.step(lambda: left @ right, items=2 * size**3, unit="FLOP")


@pytest.mark.parametrize("mib", [1024])
def bench_copy(bench, power, torch, mib):
    """A copy within the device's memory; one item is one byte read or written."""
    source = torch.randn(mib * 2**18, device=bench.device)
    target = torch.empty_like(source)
    bench.step(lambda: target.copy_(source), items=2 * mib * 2**20, unit="B")
