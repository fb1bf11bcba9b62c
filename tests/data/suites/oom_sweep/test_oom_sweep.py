"""A batch sweep in which two middle sizes do not fit. Real OOM on a GPU, a simulated one without."""
import pytest

try:
    import torch
    HAVE = torch.cuda.is_available()
    OOM = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
except Exception:
    torch, HAVE = None, False

    class OutOfMemoryError(RuntimeError):
        pass
    OOM = OutOfMemoryError

HELD = []                       # what a traceback would keep alive


def forward(batch):
    if HAVE:
        total = torch.cuda.get_device_properties(0).total_memory
        frac = {1: .01, 8: .05, 64: 1.4, 128: 2.0, 16: .10, 4: .02}[batch]
        x = torch.empty(int(total * .45), dtype=torch.uint8, device="cuda") if frac > 1 else None
        y = torch.empty(int(total * min(frac, 1.2)), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        return x, y
    if batch in (64, 128):
        raise OOM("CUDA out of memory (simulated)")
    return sum(range(1000 * batch))


@pytest.mark.parametrize("batch", [1, 8, 64, 128, 16, 4])
def test_sweep(bench, batch):
    bench.pedantic(forward, args=(batch,), rounds=3)
