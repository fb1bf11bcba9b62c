"""What a step waits for at its input: a loader that takes a known time, and a copy of known size."""

import time

import pytest

_SIZE = 1024
"""Edge of the square matrix product that stands for the model."""
_COPIES = "which copy from the host's memory to a GPU's"


@pytest.fixture
def torch():
    """torch, or a skip."""
    return pytest.importorskip("torch", exc_type=ImportError)


def _product(torch, device):
    """A short step that reads its input on the device."""
    weights = torch.randn(_SIZE, _SIZE, device=device)
    return lambda rows: rows.view(-1, _SIZE)[:_SIZE] @ weights


class SlowSamples:
    """Batches that take ``seconds`` each to make, whatever their size."""

    def __init__(self, batch, seconds):
        self.batch, self.seconds = batch, seconds

    def __len__(self):
        return 2**40

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.batch


@pytest.mark.parametrize("sleep_ms", [20])
def bench_slow_loader(bench, profiler, torch, sleep_ms):
    """A DataLoader in the step's own process that sleeps for every batch; the batch is page-locked already."""
    rows = torch.randn(_SIZE, _SIZE)
    rows = rows.pin_memory() if bench.device != "cpu" else rows
    loader = torch.utils.data.DataLoader(SlowSamples(rows, sleep_ms * 1e-3), batch_size=None)
    batches = iter(loader)
    compute = _product(torch, bench.device)
    bench.step(lambda: compute(next(batches).to(bench.device, non_blocking=True)))


@pytest.mark.bench(needs_gpu=_COPIES)
@pytest.mark.parametrize("mib", [256])
@pytest.mark.parametrize("memory", ["pageable", "pinned"])
def bench_host_input(bench, profiler, torch, memory, mib):
    """A step whose input is copied from host memory before it."""
    rows = _host_rows(torch, bench.device, memory, mib)
    compute = _product(torch, bench.device)
    bench.step(lambda: compute(rows.to(bench.device, non_blocking=True)))


@pytest.mark.bench(needs_gpu=_COPIES)
@pytest.mark.parametrize("mib", [256])
@pytest.mark.parametrize("memory", ["pageable", "pinned"])
def bench_host_copy(bench, torch, memory, mib):
    """The same copy alone, without the profiler: what the input above should cost. One item is one byte."""
    rows = _host_rows(torch, bench.device, memory, mib)
    bench.step(lambda: rows.to(bench.device, non_blocking=True), items=mib * 2**20, unit="B")


def _host_rows(torch, device, memory, mib):
    """Random FP32 numbers of ``mib`` MiB in host memory."""
    if device == "cpu":
        pytest.skip("a CPU computes on host memory, so there is no copy from it to measure")
    rows = torch.randn(mib * 2**20 // 4)
    return rows.pin_memory() if memory == "pinned" else rows
