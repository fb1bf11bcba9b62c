"""Steps of a small model over phases, modes, dtypes and layouts, on the CPU."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from joulemark.errors import ConfigurationError, Unsupported  # noqa: E402
from joulemark.records import Case  # noqa: E402
from joulemark.workloads import modes, precision, steps, zoo  # noqa: E402
from joulemark.workloads.models import Decode, Gpt2, TransformerSize  # noqa: E402
from joulemark.workloads.spec import ModelSpec, PhaseView, as_tensors  # noqa: E402
from joulemark.workloads.steps import TorchWorkload, seed_of  # noqa: E402

LENET = zoo.find("lenet5")
TINY = TransformerSize(vocabulary=97, positions=24, width=32, layers=2, heads=4, dropout=0.0)


def case(**axes) -> Case:
    return Case(**({"workload": "lenet5", "phase": "inference", "batch_size": 2} | axes))


def draw_tokens(length):
    def draw(batch_size, generator, device):
        return torch.randint(1, TINY.vocabulary, (batch_size, length), generator=generator, device=device)

    return draw


TINY_GPT2 = TorchWorkload(
    ModelSpec(
        "tiny-gpt2",
        lambda: Gpt2(TINY),
        inputs=draw_tokens(12),
        targets=draw_tokens(12),
        loss=zoo._cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        phases=("decode", "train"),
        views={"decode": PhaseView(lambda model, batch: Decode(model, batch, 12), draw_tokens(1))},
        items_per_sample=12,
        unit="tokens",
    )
)


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_seed_depends_on_the_text_alone():
    assert seed_of("resnet50-train") == 5714762075908712964
    assert 0 <= seed_of("") < 2**63


def test_a_case_gives_the_same_step_again_and_another_case_another():
    first, again = (LENET.build(case(), "cpu").run() for _ in range(2))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first, LENET.build(case(layout="channels_last"), "cpu").run())


def test_what_a_case_leaves_open_has_defaults():
    step = LENET.build(Case("lenet5"), "cpu")
    assert step.run().shape == (1, 10)
    assert step.items == 1
    assert not step.run().requires_grad


def test_consecutive_steps_see_other_data():
    step = LENET.build(case(), "cpu")
    assert not torch.equal(step.run(), step.run())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_training_lowers_the_loss_on_a_repeated_batch(dtype):
    spec = replace(
        LENET.spec,
        inputs=lambda batch, generator, device: torch.randn(
            batch, 1, 32, 32, generator=torch.Generator().manual_seed(1)
        ),
        targets=lambda batch, generator, device: torch.arange(batch) % 10,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    )
    step = TorchWorkload(spec).build(case(phase="train", dtype=dtype, batch_size=4), "cpu")
    losses = [step.run() for _ in range(12)]
    assert losses[-1] < losses[0] - 0.05
    assert not losses[0].requires_grad


@pytest.mark.parametrize("workload", [LENET, TINY_GPT2], ids=lambda one: one.name)
def test_the_zoos_optimizers_train(workload):
    step = workload.build(case(workload=workload.name, phase="train"), "cpu")
    assert len({float(step.run()) for _ in range(4)}) == 4
    assert step.items == 2 * workload.spec.items_per_sample


def test_training_keeps_fp32_weights_and_fp16_is_scaled():
    assert precision.weights_dtype("bf16", training=True) is None
    assert precision.weights_dtype("bf16", training=False) is torch.bfloat16
    assert precision.weights_dtype("tf32", training=False) is None
    assert precision.scaler("bf16", "cpu") is None
    assert LENET.build(case(phase="train", dtype="bf16"), "cpu").capturable
    assert not LENET.build(case(phase="train", dtype="fp16"), "cpu").capturable


def test_what_a_graph_can_hold():
    assert LENET.build(case(), "cpu").capturable
    step = LENET.build(case(input="loader"), "cpu")
    assert not step.capturable
    step.close()
    plain = replace(LENET.spec, optimizer=lambda parameters: torch.optim.AdamW(parameters))
    assert not TorchWorkload(plain).build(case(phase="train"), "cpu").capturable


def test_capturable_adamw_says_nothing_of_it(monkeypatch):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.param_groups[0]["capturable"] = True
    called = []

    def step():
        called.append(1)
        warnings.warn("This instance was constructed with capturable=True", stacklevel=2)

    monkeypatch.setattr(optimizer, "step", step)
    steps._start(optimizer)
    assert called
    torch.testing.assert_close(parameter.detach(), torch.ones(3))


@pytest.mark.parametrize("workload", [LENET, TINY_GPT2], ids=lambda one: one.name)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_a_traced_model_equals_the_eager_one(workload):
    phase = workload.phases[0]
    model, batch = _model_and_batch(workload, phase)
    with torch.no_grad():
        trace = modes.traced(model, batch)
        for _ in range(3):
            torch.testing.assert_close(trace(*batch), model(*batch))
    step = workload.build(case(workload=workload.name, phase=phase, mode="jit"), "cpu")
    assert step.run().isfinite().all()
    assert not step.capturable


def test_a_compiled_model_equals_the_eager_one():
    modes.check("compile", "inference", "cpu")
    model, batch = _model_and_batch(TINY_GPT2, "decode")
    with torch.no_grad():
        torch.testing.assert_close(modes.compiled(model)(*batch), model(*batch))


def test_each_compiled_case_starts_with_an_empty_compiler(monkeypatch):
    events = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: events.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: events.append("compile") or function)
    for batch_size in (1, 2):
        LENET.build(case(mode="compile", batch_size=batch_size), "cpu")
    LENET.build(case(mode="compile", phase="train"), "cpu").run()
    assert events == ["reset", "compile"] * 3


def _model_and_batch(workload, phase):
    torch.manual_seed(0)
    spec, view = workload.spec, workload.spec.views.get(phase)
    model = spec.model()
    module = model if view is None else view.module(model, 2)
    draw = spec.inputs if view is None else view.inputs
    batch = as_tensors(draw(2, torch.Generator().manual_seed(0), "cpu"))
    return module.eval().requires_grad_(False), batch


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"phase": "decode"}, "lenet5 has no phase 'decode': it has inference, train"),
        ({"dtype": "tf32"}, "tf32 is a format of NVIDIA's tensor cores, not of a CPU"),
        ({"mode": "graph"}, "a CUDA graph needs a CUDA device"),
        ({"mode": "jit", "phase": "train"}, "inference code only"),
        ({"input": "pinned"}, "no copy from it to measure"),
        ({"input": "pageable"}, "no copy from it to measure"),
        ({"world_size": 2}, "lenet5 on 2 devices: only training can be data-parallel"),
    ],
)
def test_what_a_cpu_cannot_do_is_a_skip_with_its_reason(axes, reason):
    with pytest.raises(Unsupported, match=reason):
        LENET.build(case(**axes), "cpu")


def test_channels_last_is_for_images():
    with pytest.raises(Unsupported, match="channels_last is a layout of images"):
        TINY_GPT2.build(case(workload="tiny-gpt2", phase="train", layout="channels_last"), "cpu")
    seen = []
    spec = replace(LENET.spec, model=lambda: Spy(seen))
    TorchWorkload(spec).build(case(layout="channels_last"), "cpu").run()
    assert seen[-1].is_contiguous(memory_format=torch.channels_last)


class Spy(torch.nn.Module):
    """Keeps what it was called with."""

    def __init__(self, seen):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3, 4, 4))
        self.seen = seen

    def forward(self, *batch):
        self.seen.extend([*batch, self.weight])
        return batch[0] * self.weight.mean()


@pytest.mark.parametrize("axes", [{"dtype": "int8"}, {"mode": "xla"}, {"input": "disk"}, {"layout": "tiled"}])
def test_an_unknown_value_is_the_users_mistake(axes):
    with pytest.raises(ConfigurationError, match=repr(next(iter(axes.values())))):
        LENET.build(case(**axes), "cpu")


def test_compiling_without_a_compiler_is_a_skip(monkeypatch):
    monkeypatch.setattr(modes.shutil, "which", lambda name: None)
    with pytest.raises(Unsupported, match=r"needs a C\+\+ compiler"):
        LENET.build(case(mode="compile"), "cpu")
    with pytest.raises(Unsupported, match="needs a C compiler"):
        modes.check("compile", "train", "cuda:0")


def test_a_model_without_a_loss_is_trained_on_its_output_and_says_so():
    workload = TorchWorkload(replace(LENET.spec, loss=None, targets=None))
    with pytest.warns(UserWarning, match="lenet5 brings no loss"):
        step = workload.build(case(phase="train"), "cpu")
    assert step.run() > 0


def test_a_loss_without_targets_sees_the_output_alone():
    workload = TorchWorkload(replace(LENET.spec, loss=lambda output: output.square().sum(), targets=None))
    assert workload.build(case(phase="train"), "cpu").run() > 0


@pytest.mark.parametrize(
    "wrap", [lambda t: (1, t), lambda t: {"ids": torch.arange(3), "out": [t]}, lambda t: Output(t)]
)
def test_the_first_floating_point_output_counts(wrap):
    assert float(steps.mean_square(wrap(torch.full((2, 2), 3.0)))) == 9.0


class Output:
    def __init__(self, logits):
        self.logits = logits


def test_an_output_without_numbers_to_minimize():
    with pytest.raises(Unsupported, match="no floating-point tensor"):
        steps.mean_square({"ids": torch.arange(3)})


def test_a_model_without_parameters_cannot_train():
    workload = TorchWorkload(replace(LENET.spec, model=torch.nn.Flatten))
    with pytest.raises(Unsupported, match="no parameter to train"):
        workload.build(case(phase="train"), "cpu")


def test_zeros_are_pointed_out():
    zeros = replace(LENET.spec, inputs=lambda batch, generator, device: torch.zeros(batch, 1, 32, 32))
    with pytest.warns(UserWarning, match="an input is all zeros"):
        TorchWorkload(zeros).build(case(), "cpu")


@pytest.mark.parametrize(("tf32", "name", "legacy"), [(True, "tf32", "high"), (False, "ieee", "highest")])
@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_fp32_means_the_same_through_both_of_torchs_interfaces(tf32, name, legacy, before):
    torch.set_float32_matmul_precision(before)
    try:
        precision.set_fp32(tf32=tf32)
        backends = torch.backends
        assert torch.get_float32_matmul_precision() == legacy
        assert backends.cuda.matmul.allow_tf32 is tf32
        assert backends.cudnn.allow_tf32 is tf32
        for one in (backends, backends.cuda.matmul, backends.cudnn, backends.cudnn.conv, backends.cudnn.rnn):
            assert one.fp32_precision == name
    finally:
        precision.set_fp32(tf32=False)


def test_a_training_step_says_its_phases_to_who_listens_and_inference_has_none():
    step = LENET.build(case(phase="train"), "cpu")
    heard = []
    step.phases.listener = heard.append
    step.run()
    step.phases.listener = None
    step.run()
    assert heard == ["input", "forward", "backward", "optimizer"]
    assert LENET.build(case(), "cpu").phases is None


def test_a_merged_step_computes_what_an_eager_one_does_and_a_note_says_where_nothing_was_merged():
    with pytest.warns(UserWarning, match=r"nothing was merged: \S+ and \d+ more, .* \(no kernel for this device"):
        merged, eager = (
            zoo.find("resnet18").build(Case("resnet18", "inference", mode, "fp32", 1), "cpu")
            for mode in ("merged", "eager")
        )
    assert merged.run().shape == eager.run().shape == (1, 1000)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.ReLU(), torch.nn.Conv2d(3, 2, 1)).eval()
    x = torch.randn(1, 2, 6, 6)
    with torch.no_grad(), pytest.warns(UserWarning, match="nothing was merged: 0"):
        torch.testing.assert_close(modes.merged(model, (x,))(x), model(x))


def test_merging_is_for_inference():
    with pytest.raises(Unsupported, match="inference code only"):
        modes.check("merged", "train", "cpu")
