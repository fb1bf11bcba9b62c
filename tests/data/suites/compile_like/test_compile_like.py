"""A stand-in for torch.compile: slow first call per new shape, and after 8 shapes it gives up.
Real variant: set REAL=1 on a GPU machine to use torch.compile(dynamic=False) itself."""
import os
import time
import pytest

LIMIT = 8


class CompiledLike:
    def __init__(self):
        self.seen = set()

    def __call__(self, batch):
        if batch not in self.seen and len(self.seen) < LIMIT:
            self.seen.add(batch)
            time.sleep(.30)                       # compile
        time.sleep(.002 if batch in self.seen else .008)   # compiled / fell back to eager


MODEL = CompiledLike()
if os.environ.get("REAL"):
    import torch
    torch._dynamo.reset()
    net = torch.compile(torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).cuda(), dynamic=False)

    def MODEL(batch):
        with torch.no_grad():
            net(torch.ones(batch, 512, device="cuda"))
        torch.cuda.synchronize()


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
def test_batch(bench, batch):
    bench(MODEL, batch)
