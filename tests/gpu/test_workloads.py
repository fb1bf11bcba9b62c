"""The zoo on a GPU: graph capture, copies from the host, TF32. Needs a CUDA device."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from joulemark.errors import Unsupported  # noqa: E402
from joulemark.records import Case  # noqa: E402
from joulemark.workloads import precision, zoo  # noqa: E402
from joulemark.workloads.inputs import INPUTS  # noqa: E402

# Importing the compiler warns of torch's own deprecated calls (torch 2.11).
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

DEVICE = "cuda:0"
PHASES = [(name, phase) for name in zoo.names() for phase in zoo.phases(name)]


def build(name, phase, **axes):
    return zoo.find(name).build(Case(name, phase=phase, **({"batch_size": 4} | axes)), DEVICE)


@pytest.mark.parametrize(("name", "phase"), PHASES)
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16", "fp16"])
def test_every_phase_runs_eagerly(name, phase, dtype):
    step = build(name, phase, dtype=dtype)
    outputs = [step.run() for _ in range(3)]
    assert all(one.isfinite().all() for one in outputs)
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize(("name", "phase"), PHASES)
def test_every_phase_runs_as_a_graph(name, phase):
    step = build(name, phase, mode="graph", dtype="bf16")
    for _ in range(3):
        step.run()
    torch.cuda.synchronize()
    assert not step.capturable


@pytest.mark.parametrize(("name", "phase"), PHASES)
def test_a_capturable_step_can_be_captured_from_outside(name, phase):
    step = build(name, phase, dtype="bf16")
    assert step.capturable
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        step.run()
        step.run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = step.run()
    graph.replay()
    torch.cuda.synchronize()
    assert output.isfinite().all()


def test_a_graph_of_a_training_step_trains():
    spec = replace(zoo.find("lenet5").spec, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    seen = {}

    def loss(logits, labels):
        seen["loss"] = zoo._cross_entropy(logits, labels)
        return seen["loss"]

    step = type(zoo.find("lenet5"))(replace(spec, loss=loss)).build(
        Case("lenet5", phase="train", mode="graph", batch_size=8), DEVICE
    )
    step.run()
    before = float(seen["loss"].detach())
    for _ in range(200):
        step.run()
    assert float(seen["loss"].detach()) < before - 0.1


def test_a_graph_cannot_hold_a_grad_scaler():
    with pytest.raises(Unsupported, match="GradScaler"):
        build("lenet5", "train", mode="graph", dtype="fp16")


@pytest.mark.parametrize("source", INPUTS)
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("phase", ["inference", "train"])
def test_every_input_feeds_every_mode(source, mode, layout, phase):
    step = build("resnet18", phase, input=source, mode=mode, dtype="bf16", layout=layout)
    for _ in range(3):
        step.run()
    torch.cuda.synchronize()
    assert step.items == 4
    step.close()


def test_tf32_rounds_products_and_fp32_does_not():
    left, right = torch.randn(2, 1024, 1024, device=DEVICE, dtype=torch.float64)
    exact = left @ right
    errors = {}
    for tf32 in (True, False):
        precision.set_fp32(tf32=tf32)
        errors[tf32] = float((left.float() @ right.float() - exact).abs().max() / exact.abs().max())
    assert errors[False] < 1e-5 < errors[True] < 1e-2


@pytest.mark.parametrize(("phase", "dtype"), [("inference", "tf32"), ("train", "fp32")])
def test_a_compiled_step_runs_under_both_fp32_settings(phase, dtype):
    step = build("lenet5", phase, mode="compile", dtype=dtype)
    assert step.run().isfinite().all()
