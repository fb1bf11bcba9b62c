"""Energy of the cells whose joules are split into units and memory levels, over batch sizes, formats and modes."""

import pytest

from bench_energy.splits import SPLITS


@pytest.mark.bench(
    needs_gpu="whose joules are split by the calibration of a GPU",
    campaign="whose joules a calibration splits",
)
@pytest.mark.parametrize("cell", SPLITS, ids=lambda one: one.name)
def bench_split(bench, power, cell):
    """One step of each; an item is a sample of the batch. On the CPU a tiny one."""
    pytest.importorskip("torch", exc_type=ImportError)
    on_cpu = bench.device == "cpu"
    bench.step(cell.build(bench.device, on_cpu), items=1 if on_cpu else cell.batch_size)
