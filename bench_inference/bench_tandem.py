"""CPU-GPU tandem of inference: device time against the host's issue time over batch sizes and modes."""

import pytest

_MODELS = ("lenet5", "resnet50", "bert_base")
# A step of LeNet-5 has so little work per image that it takes thousands to hide its launches.
_BATCHES = {"lenet5": (1, 64, 512, 2048, 4096, 8192, 16384, 32768), "*": (1, 4, 8, 16, 32, 64, 128, 256)}


@pytest.mark.bench(
    models=_MODELS,
    phases=("inference",),
    batch_sizes=_BATCHES,
    dtypes=("bf16",),
    modes=("eager", "jit", "compile", "graph"),
    first_look={"models": ("resnet50", "bert_base"), "batch_sizes": (1, 4, 16, 64, 256), "modes": "eager"},
    cpu={"models": ("lenet5",), "batch_sizes": (1, 16), "dtypes": ("fp32",), "modes": ("eager",)},
)
def bench_tandem(bench, workload, profiler):
    """One forward pass, timed without the profiler and then profiled."""
    bench.step(workload)


_TURNED = []
"""Turns of this process: after a profiler session it may stay slower, so all models' rounds come before the first."""


@pytest.mark.parametrize("model", [*_MODELS, "profiled"])
@pytest.mark.bench(needs_gpu="whose work a host issues ahead", campaign="which time the host in turns")
def bench_issue_in_turns(bench, model):
    """The host's issue time of the eager cases above, all batch sizes in turns; a round of them is one call.

    Last, as ``profiled``, the busy time of the device in a step of each; a recording of one of them is one call.
    """
    pytest.importorskip("torch", exc_type=ImportError)
    from joulemark.errors import Unsupported

    if bench.device == "cpu":
        pytest.skip("a CPU does its work when it is called: nothing is issued ahead")
    try:
        (_busy_times if model == "profiled" else _rounds)(bench, model)
    except Unsupported as reason:
        pytest.skip(str(reason))


def _rounds(fixture, model):
    from joulemark.measure.issue_turns import QUICK_ROUNDS, ROUNDS, IssueTurns
    from joulemark.records import Case
    from joulemark.tandem.turns import TABLE
    from joulemark.workloads import zoo

    layout, gpu = "channels_last" if zoo.takes_images(model) else "contiguous", fixture.target.slug
    cases = [
        Case(model, "inference", "eager", "bf16", batch, layout, "device", gpu, benchmark=bench_tandem.__name__)
        for batch in _BATCHES.get(model, _BATCHES["*"])
    ]
    steps = [(case, zoo.find(model).build(case, fixture.device)) for case in cases]
    turns = IssueTurns(fixture.instruments.timer, steps, fixture.instruments.clock)
    fixture.pedantic(turns.round, rounds=QUICK_ROUNDS if fixture.quick else ROUNDS, iterations=1, warmup_rounds=1)
    fixture.keep(TABLE, [row for row in turns.rows if row["round"] > 0])  # the first warms up
    _TURNED.append(turns)


def _busy_times(fixture, _):
    from joulemark.measure.busy_turns import BusyTurns
    from joulemark.tandem.turns import BUSY_TABLE

    busy = BusyTurns(fixture.instruments.timer, _TURNED, clock=fixture.instruments.clock)
    fixture.pedantic(busy.next, rounds=busy.count, iterations=1, warmup_rounds=1)  # the first opens the profiler
    fixture.keep(BUSY_TABLE, busy.rows)
    _TURNED.clear()
