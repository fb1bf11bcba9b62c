"""Needs a CUDA GPU. Host returns long before the device is done, so a host clock alone reads ~20-100 us."""
import pytest
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

N = 8192
FLOP = 2 * N ** 3


@pytest.fixture(scope="module")
def ab():
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.randn(N, N, device="cuda"), torch.randn(N, N, device="cuda")


def test_matmul_default_stream(bench, ab):
    out = bench.pedantic(lambda: ab[0] @ ab[1], rounds=5, warmup_rounds=1)
    assert out is not None


def test_matmul_side_stream(bench, ab):
    s = torch.cuda.Stream()

    def run():
        with torch.cuda.stream(s):
            return ab[0] @ ab[1]
    bench.pedantic(run, rounds=5, warmup_rounds=1)


def test_tiny_after_big(bench, ab):
    """The big product queued before the window must not be charged to the tiny add."""
    x = torch.ones(16, device="cuda")

    def setup():
        ab[0] @ ab[1]
    bench.pedantic(lambda: x + 1, setup=setup, rounds=5)
