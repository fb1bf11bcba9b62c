"""The microbenchmarks of the energy model: time and energy per operation or byte, with all that a launch spends.

Static power is inside: `joulemark calibrate` tells it apart.
"""

import pytest

from joulemark.energy.calibrate import sized
from joulemark.energy.microbench.suite import SUITE, tiles_for
from joulemark.energy.units import UNITS

WORKING = [name for name, one in SUITE.items() if one.role != "static" and one.variants[0].work]


def engine_on(device):
    """The engine of a CUDA device; a skip without one."""
    if not device.startswith("cuda"):
        pytest.skip("microbenchmarks run on CUDA GPUs")
    pytest.importorskip("cuda.core", exc_type=ImportError)
    from joulemark.energy.cuda_engine import CudaEngine

    return CudaEngine(int(device.partition(":")[2] or 0))


@pytest.mark.bench(needs_gpu="which launch CUDA kernels", campaign="which load one unit of the chip each")
@pytest.mark.parametrize("operands", ["zero", "random"])
@pytest.mark.parametrize("name", WORKING)
def bench_microbenchmark(bench, power, name, operands):
    """One launch of some 4 ms on all SMs; an item is an operation, a FLOP or a byte of the benchmark's unit."""
    benchmark = SUITE[name]
    with engine_on(bench.device) as engine:
        facts = engine.facts
        if not benchmark.runs_on(facts.architecture):
            pytest.skip(f"{name} does not run on {facts.architecture}")
        engine.load(benchmark, operands, tiles_for(benchmark, facts.l2_bytes // 2, facts.sms, facts.memory_bytes))
        launch = sized(engine, facts.sms, paused=False)
        counts = benchmark.counts_per_launch(
            facts.architecture, launch.blocks, launch.iterations, engine.instructions(benchmark, paused=False)
        )
        step = waited_for(engine, launch, bench.device)
        bench.step(step, items=round(counts[benchmark.unit]), unit=UNITS[benchmark.unit].counted)


def waited_for(engine, launch, device):
    """A launch in the order of torch's current stream, whose events time it."""
    import torch

    own = torch.cuda.ExternalStream(engine.stream_handle, device=device)

    def step():
        current = torch.cuda.current_stream(device)
        own.wait_stream(current)
        engine.launch(launch)
        current.wait_stream(own)

    return step
