"""What the disk keeps of segments and plans: nothing that the values of one model's weights decided, nothing broken."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from joulemark.merged import cache, merge
from joulemark.merged.alternatives import settle
from joulemark.merged.graph import trace
from joulemark.merged.merged_model import MergedModel
from joulemark.merged.plan import Planner
from joulemark.merged.programs import Program
from joulemark.merged.setting import Setting
from tests.merged.fakes import (
    RATES,
    Wrapped,
    executed,
    fake_family,
    image,
    merged_there,
    model_and_input,
    pair_and_input,
)

pytestmark = pytest.mark.usefixtures("own_cache", "given_times")


def merged_here(model, x, wrong=False, **more):
    return merge(model, x, rates=RATES, families=(fake_family(wrong=wrong),), measure=True, **more)


def entries(kind):
    return list(cache.folder().glob(f"{kind}-*.json"))


def planned(model, x, family):
    with torch.no_grad():
        planner = Planner(Setting(torch.device("cpu"), "fp32", RATES, (family,), True))
        planner.plan(trace(model, (x,)))
    return planner.ranges


def test_weights_that_are_not_finite_leave_nothing_that_a_good_model_would_read():
    """Keys ignore values, which decide no times; what they decide is kept nowhere."""
    model, x = pair_and_input()
    broken, _ = pair_and_input()
    with torch.no_grad():
        broken.a.weight[0, 0, 0, 0] = torch.nan
    first = merged_here(broken, x)
    told = [problem for path in entries("segment") for _, problem in json.loads(path.read_text()).values()]
    assert told
    assert not any(told)
    assert not entries("plan")
    assert first(x).isnan().any()
    good = merged_here(model, x)
    assert not good.cached
    assert all(one.measured_s is not None for one in good.decisions if one.how != "plain")
    assert merged_here(model, x).cached


def test_a_problem_that_comes_from_values_is_told_from_one_of_the_kernel():
    """A kernel that packs no small weights works with others; one that is wrong always is wrong with any."""
    from tests.merged import fakes

    def refuses_small(parameters):
        if any(one.weight.abs().max() < 1e-4 for one in parameters):
            raise ValueError("it loses these weights")
        return fakes.packed(parameters)

    model, x = pair_and_input()
    always = planned(model, x, fake_family(wrong=True))
    assert not always.of_values
    assert any("its output is wrong" in path.read_text() for path in entries("segment"))
    with torch.no_grad():
        for one in model.parameters():
            one *= 1e-6
    small = planned(model, x, fake_family(name="choosy", pack=refuses_small))
    assert small.of_values
    assert any(one.problem == "ValueError: it loses these weights" for trials in small.found.values() for one in trials)
    assert not any("loses" in path.read_text() for path in entries("segment"))


def test_the_disk_is_not_asked_for_a_plan_of_a_model_whose_output_is_not_finite():
    model, x = pair_and_input()
    first = merged_here(model, x.clone().fill_(torch.inf))
    assert not first.cached
    assert not entries("plan")


BROKEN_SEGMENTS = ["[]", "3", '"fast"', "{}", '{"library": 3}', '{"library": ["fast", null]}', '{"library": [1.0]}']


@pytest.mark.parametrize("text", BROKEN_SEGMENTS)
def test_a_segments_entry_of_another_type_is_measured_again(text):
    model, x = pair_and_input()
    planned(model, x, fake_family())
    before = {path: set(json.loads(path.read_text())) for path in entries("segment")}
    for path in before:
        path.write_text(text)
    ranges = planned(model, x, fake_family())
    assert not any(one.problem for trials in ranges.found.values() for one in trials)
    assert {path: set(json.loads(path.read_text())) for path in entries("segment")} == before


def test_a_plans_entry_of_another_type_is_made_anew():
    model, x = pair_and_input()
    merged_here(model, x)
    (path,) = entries("plan")
    whole = json.loads(path.read_text())
    first = whole["choices"][0]
    fields = (
        {"cut_s": "long"}, {"left": 3}, {"left": {"a": 1}}, {"times": []}, {"variant": None}, {"variant": "another"},
        {"device_times": {"graph": "fast"}}, {"captured": 3}, {"choices": {}},
    )  # fmt: skip
    choices = (
        {"units": 3}, {"units": ["a", "b"], "path": "library"}, {"units": ["b", "a"]}, {"path": "fake/none"},
        {"measured_s": "fast"},
    )  # fmt: skip
    wrong = [[], 3, {}, *({**whole, **one} for one in fields)]
    wrong += [{**whole, "choices": [{**first, **one}]} for one in choices]
    for one in wrong:
        path.write_text(json.dumps(one))
        merged = merged_here(model, x)
        assert (merged.failed, merged.cached) == (None, False), one
    assert merged_here(model, x).cached
    assert executed(merged) or merged.variant == "folded"


@pytest.mark.parametrize("said", ["Triton Error [CUDA]: out of memory", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"])
def test_a_way_for_which_memory_ran_out_is_tried_again_next_time(said):
    def scarce():
        raise RuntimeError(said)

    ways = {"torch": image, "ours": scarce}
    setting = Setting(torch.device("cpu"), "fp32", RATES, (), True)
    assert "ours" in settle(("a pass",), ways, setting).problems
    assert not entries("alternatives")
    assert not settle(("a pass",), {**ways, "ours": image}, setting).problems
    assert entries("alternatives")


@pytest.fixture
def memory(simulated_gpu, monkeypatch):
    """A GPU that captures no graph while it has less than 100 bytes free; ``given_back`` is what that brings."""
    from joulemark.merged import automatic, replay

    gpu = SimpleNamespace(free=100, given_back=0, refusal="CUDA out of memory. Tried to allocate 2.00 GiB")
    capture = replay.capture

    def scarce(*given):
        if gpu.free < 100:
            raise RuntimeError(gpu.refusal)
        return capture(*given)

    def give_back(_):
        gpu.free += gpu.given_back

    monkeypatch.setattr(replay, "capture", scarce)
    monkeypatch.setattr(automatic, "give_back", give_back)
    monkeypatch.setattr(automatic, "free_bytes", lambda _: gpu.free)
    simulated_gpu.times["graph"] = simulated_gpu.on_device["graph"] = 0.5
    return gpu


def variant_there():
    merged = merged_there(*model_and_input())
    return merged.variant, merged.cached


def test_a_plan_that_lacks_nothing_but_memory_today_stays_on_the_disk(memory):
    assert variant_there() == ("graph", False)
    (path,) = entries("plan")
    before = path.read_bytes()
    memory.free = 40
    variant, cached = variant_there()
    assert (variant == "graph", cached) == (False, False)
    assert path.read_bytes() == before
    memory.free = 100
    assert variant_there() == ("graph", True)


def test_a_plan_made_for_want_of_memory_stands_beside_the_one_that_wants_more(memory):
    assert variant_there() == ("graph", False)
    memory.free = 40
    variant, cached = variant_there()
    assert (variant == "graph", cached) == (False, False)
    assert variant_there() == (variant, True), "no new process plans anew"
    memory.free = 60
    assert variant_there() == (variant, False), "more memory might do"
    assert variant_there() == (variant, True)
    memory.free = 100
    assert variant_there() == ("graph", True)


def test_a_plan_for_which_memory_ran_out_is_tried_again_with_what_was_given_back(memory):
    assert variant_there() == ("graph", False)
    memory.free, memory.given_back = 40, 60
    assert variant_there() == ("graph", True)


def test_a_plan_that_cuda_refuses_for_another_reason_is_replaced(memory):
    assert variant_there() == ("graph", False)
    memory.free, memory.refusal = 40, "operation not permitted when stream is capturing"
    variant, cached = variant_there()
    assert (variant == "graph", cached) == (False, False)
    assert variant_there() == (variant, True)
    memory.free = 100
    assert variant_there() == (variant, True), "it was made in want of nothing"


def test_a_plan_made_with_too_little_memory_serves_until_there_is_more(memory):
    memory.free = 90
    variant, cached = variant_there()
    assert (variant == "graph", cached) == (False, False)
    for memory.free in (90, 40, 98):
        assert variant_there() == (variant, True)
    memory.free = 100
    assert variant_there() == ("graph", False)
    assert variant_there() == ("graph", True)
    memory.free = 1000
    assert variant_there() == ("graph", True)


def test_memory_that_was_short_when_segments_were_measured_marks_the_plan_too(memory, monkeypatch):
    from joulemark.merged import measuring

    def scarce(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as short:
        short.setattr(measuring, "_checked", scarce)
        first = merged_there(*model_and_input())
    again = merged_there(*model_and_input())
    memory.free = 1000
    anew = merged_there(*model_and_input())
    assert [one.cached for one in (first, again, anew)] == [False, True, False]
    assert [any(one.how == "padded" for one in made.decisions) for made in (first, again, anew)] == [False, False, True]


def checks_there(monkeypatch, model, x):
    """What merging says of whether its plan was kept, and how often an output was compared with the model's own."""
    from joulemark.merged import whole

    compared, own = [], whole._worst_error
    with monkeypatch.context() as counted:
        counted.setattr(whole, "_worst_error", lambda *given: compared.append(1) or own(*given))
        return merged_there(model, x).cached, bool(compared)


def test_an_output_is_checked_once_for_the_weights_that_a_model_has(simulated_gpu, monkeypatch):
    model, x = model_and_input()
    assert checks_there(monkeypatch, model, x) == (False, True)
    assert checks_there(monkeypatch, model, x) == (True, False)
    assert checks_there(monkeypatch, model, torch.randn_like(x)) == (True, False)
    with torch.no_grad():
        model.b.weight[3, 2, 1, 0] = -model.b.weight[3, 2, 1, 0]
    assert checks_there(monkeypatch, model, x) == (True, True)
    assert checks_there(monkeypatch, model, x) == (True, False)
    first, x = model_and_input()
    assert checks_there(monkeypatch, first, x) == (True, False), "the weights before are still known"
    assert first(x).shape == merged_there(first, x)(x).shape


def test_a_plan_knows_the_latest_of_many_weights(simulated_gpu, monkeypatch):
    from joulemark.merged.automatic import _MOST_WEIGHTS

    model, x = model_and_input()
    merged_there(model, x)
    known = []
    for _ in range(_MOST_WEIGHTS + 2):
        with torch.no_grad():
            model.stem.bias += 1e-3
        merged_there(model, x)
        known.append(cache.values_key(model))
    (path,) = entries("plan")
    assert json.loads(path.read_text())["right_for"] == known[-_MOST_WEIGHTS:]


def test_weights_that_a_plan_is_wrong_for_are_not_known_as_right(simulated_gpu, monkeypatch):
    from joulemark.merged import whole

    model, x = model_and_input()
    merged_there(model, x)
    (path,) = entries("plan")
    before = path.read_bytes()
    with torch.no_grad():
        model.a.bias += 1
    with monkeypatch.context() as wrong:
        wrong.setattr(whole, "_worst_error", lambda *_: math.inf)
        with pytest.raises(RuntimeError, match="no variant of the model works"):
            merged_there(model, x)
    assert path.read_bytes() == before
    assert checks_there(monkeypatch, model, x) == (True, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8])
def test_a_hash_of_values_tells_bits_and_places(dtype):
    def made(change=None):
        model = torch.nn.Module()
        torch.manual_seed(0)
        for name in ("a", "b"):
            values = (50 * torch.randn(3, 4, 5, 6)).to(dtype)
            model.register_buffer(name, values.contiguous(memory_format=torch.channels_last))
        model.register_buffer("flag", torch.tensor(True))
        if change is not None:
            change(model)
        return cache.values_key(model)

    def exchanged(model):
        model.a[0, 0, 0, 0], model.a[2, 3, 4, 5] = model.a[2, 3, 4, 5].clone(), model.a[0, 0, 0, 0].clone()

    def renamed(model):
        model.a, model.b = model.b, model.a

    def another_layout(model):
        model.a = model.a.contiguous()

    def turned(model):
        model.flag = torch.tensor(False)

    def signed(model):
        model.b[0, 0, 0, :1] = -model.b[0, 0, 0, :1]

    assert made() == made() == made(another_layout)
    keys = [made(), *(made(one) for one in (exchanged, renamed, turned, signed))]
    assert len(set(keys)) == len(keys)


def test_a_hash_of_many_values_is_of_all_of_them(monkeypatch):
    model = torch.nn.Linear(40, 30)
    whole = cache.values_key(model)
    monkeypatch.setattr(cache, "_AT_ONCE", 7)
    keys = {cache.values_key(model)}
    for place in range(0, 1200, 97):
        with torch.no_grad():
            model.weight.view(-1)[place] += 1
        keys.add(cache.values_key(model))
    assert len(keys) == 14
    assert whole not in keys


class ByProgram(Wrapped):
    """A compiled module that its program, named by its mode, can stand for; ``made`` and ``run`` count both."""

    fits = works = True
    made, run = 0, 0

    def ready_for(self, *inputs):
        ByProgram.made += 1

    def program(self, *inputs):
        return Program(self.how, (), (), (), (), "", False, None)

    def runs(self, program, *inputs):
        assert program.text == self.how
        self.by_program = True
        return ByProgram.fits

    def forward(self, *inputs):
        if getattr(self, "by_program", False):
            ByProgram.run += 1
            if not ByProgram.works:
                raise RuntimeError("the driver refuses it")
        return super().forward(*inputs)


@pytest.fixture
def programs(simulated_gpu, monkeypatch):
    from joulemark.merged import automatic

    monkeypatch.setattr(automatic, "Compiled", ByProgram)
    for name in ("fits", "works"):
        monkeypatch.setattr(ByProgram, name, True)
    simulated_gpu.times["compiled graph"] = simulated_gpu.on_device["compiled graph"] = 0.5
    ByProgram.made = ByProgram.run = 0
    assert variant_there() == ("compiled graph", False)
    ByProgram.made = ByProgram.run = 0
    return ByProgram


def test_a_compiled_plan_from_the_disk_runs_what_is_kept_of_it(programs, monkeypatch):
    from joulemark.merged import automatic

    def never():
        raise AssertionError("it starts a compiler")

    monkeypatch.setattr(automatic, "start_compiler", never)
    assert len(entries("program")) == 1
    assert variant_there() == ("compiled graph", True)
    assert programs.made == 0
    assert programs.run > 0


@pytest.mark.parametrize("how", ["fits", "works", "entry", "none"])
def test_where_what_is_kept_does_not_run_it_is_compiled(programs, monkeypatch, how):
    (path,) = entries("program")
    if how in ("fits", "works"):
        monkeypatch.setattr(programs, how, False)
    elif how == "entry":
        path.write_text('{"text": 3}')
    else:
        path.unlink()
    assert variant_there() == ("compiled graph", True)
    assert programs.made == 1
    assert programs.run == (how == "works")
    if how in ("entry", "none"):  # what was compiled instead is kept
        assert variant_there() == ("compiled graph", True)
        assert programs.made == 1


def test_other_choices_have_another_program(programs):
    (path,) = entries("plan")
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "choices": [{**one, "why": "another"} for one in whole["choices"]]}))
    assert variant_there()[1]
    assert (programs.made, programs.run) == (1, 0)


@pytest.mark.parametrize(
    ("how", "least", "most"),
    [
        (torch.set_float32_matmul_precision, "highest", "high"),
        (torch.use_deterministic_algorithms, False, True),
        (torch.set_default_dtype, torch.float32, torch.float64),
    ],
)
def test_settings_that_a_compiler_reads_have_programs_of_their_own(programs, how, least, most):
    """It writes them into its kernels, whether products round to TF32, say."""
    x = torch.randn(2, 3, 17, 19)
    merged_there(with_(torch.nn.Tanh()), x)
    programs.made = 0
    model = with_(torch.nn.Tanh())
    try:
        for setting, made in ((most, 1), (least, 1)):
            how(setting)
            assert merged_there(model, x).cached
            assert programs.made == made
    finally:
        how(least)


class Activated(torch.nn.Module):
    """A layer and an activation, a module or a function, which no structure tells."""

    def __init__(self, activation):
        super().__init__()
        self.a, self.activation = torch.nn.Conv2d(8, 16, 1), activation

    def forward(self, x):
        return self.activation(self.a(x)).mean((2, 3))


class With(torch.nn.Module):
    """A layer, and a module behind it."""

    def __init__(self, module):
        super().__init__()
        self.a, self.b = torch.nn.Conv2d(3, 8, 3, padding=1), module

    def forward(self, x):
        return self.b(self.a(x))


def with_(module):
    torch.manual_seed(4)
    return With(module).eval()


def averaged(counted):
    return torch.nn.AvgPool2d(3, 1, 1, count_include_pad=counted)


def upsampled(aligned):
    return torch.nn.Upsample(scale_factor=2, mode="bilinear", align_corners=aligned)


def merged_part(function):
    return MergedModel(trace(Activated(function).eval(), (torch.randn(2, 8, 17, 19),)), [])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (averaged(True), averaged(False)),
        (upsampled(True), upsampled(False)),
        (merged_part(torch.tanh), merged_part(torch.sigmoid)),
    ],
    ids=["average", "upsample", "part"],
)
def test_a_module_that_does_not_tell_what_it_does_has_a_program_of_its_own(programs, first, second):
    """Weights are the same, outputs are not checked again, and a program holds all but the weights."""
    x = torch.randn(2, 3, 17, 19)
    assert not merged_there(with_(first), x).cached
    programs.made = programs.run = 0
    assert merged_there(with_(first), x).cached
    assert programs.made == 0
    model = with_(second)
    merged = merged_there(model, x)
    assert (merged.variant, merged.cached) == ("compiled graph", True)
    assert programs.made == 1
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-4)


@torch.fx.wrap
def of_a_user(x):
    return x.tanh()


class Using(torch.nn.Module):
    """A user's own function, which torch.fx does not look into."""

    def forward(self, x):
        return of_a_user(x)


def hooked():
    module = torch.nn.Tanh()
    module.register_forward_hook(lambda *given: given[-1] * 2)
    return module


def replaced():
    module = torch.nn.Tanh()
    module.forward = torch.relu
    return module


def function_held():
    return torch.nn.Sequential(
        torch.nn.Flatten(2),
        torch.nn.TransformerEncoderLayer(17 * 19, 1, 8, activation=lambda x: x.tanh(), batch_first=True),
    )


@pytest.mark.parametrize("part", [Using, hooked, replaced, function_held])
def test_there_is_no_program_of_what_is_a_users_own_text(programs, part):
    """It may be another tomorrow, and no key tells."""
    before = len(entries("program"))
    for cached in (False, True):
        merged = merged_there(with_(part()), torch.randn(2, 3, 17, 19))
        assert (merged.variant, merged.cached) == ("compiled graph", cached)
    assert len(entries("program")) == before


def test_a_merged_part_is_the_same_however_it_was_merged():
    from joulemark.merged.meaning import words_of

    words = []
    for took_s, cached in ((1.0, False), (2.0, True)):
        part = merged_part(torch.tanh)
        part.took_s, part.cached = took_s, cached
        words.append(words_of(trace(with_(part), (torch.randn(2, 3, 17, 19),))))
    assert words[0] == words[1]


def test_what_another_plan_had_to_compile_is_kept_too(programs, monkeypatch):
    """A plan from the disk whose program ran, but that fails, is made anew."""
    from joulemark.merged.automatic import _Automatic

    def fails(self, *given, cached=False):
        if cached:
            raise RuntimeError("it does not hold today")
        return merged_as(self, *given)

    (path,) = entries("program")
    kept, merged_as = path.read_text(), _Automatic._merged_as
    monkeypatch.setattr(_Automatic, "_merged_as", fails)
    monkeypatch.setattr(programs, "runs", lambda self, *given: path.exists() and not path.unlink())
    assert variant_there() == ("compiled graph", False)
    assert path.read_text() == kept


def test_a_librarys_own_functions_are_told_by_its_version(monkeypatch):
    from joulemark.merged.meaning import says_all, words_of

    def graph():
        return trace(with_(Using()), (torch.randn(2, 3, 17, 19),))

    assert not says_all(graph())
    monkeypatch.setattr(of_a_user, "__module__", "timm.layers")
    words = []
    for version in ("1", "2"):
        monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(__version__=version))
        assert says_all(graph())
        assert words_of(graph()) == words_of(graph())
        words.append(words_of(graph()))
    assert words[0] != words[1]


def test_a_graph_is_replayed_before_it_is_given_only_to_be_checked(memory):
    replays = []
    for _ in range(2):
        merged = merged_there(*model_and_input())
        replays.append(merged.inner._graph.replays)
    with torch.no_grad():
        model, x = model_and_input()
        model.c.bias += 1
    replays.append(merged_there(model, x).inner._graph.replays)
    assert [merged.variant, replays] == ["graph", [1, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_weights_of_a_pattern_have_each_a_hash_of_their_own(dtype):
    """Sums that are linear in bits are the same for all permutations of channels, and for two signs in fp64."""

    def key(values):
        model = torch.nn.Module()
        model.register_buffer("values", values.to(dtype))
        return cache.values_key(model)

    ones, signs = torch.eye(8), torch.ones(8, 8)
    patterns = [ones, ones.flip(0), ones.roll(1, 0), ones[[1, 0, *range(2, 8)]], signs, -signs]
    patterns += [torch.tensor([0.0, 0, 0, 0]), torch.tensor([1.0, -2, 1, 0]), torch.tensor([0.0, 1, -2, 1])]
    keys = {key(one) for one in patterns}
    assert len(keys) == len(patterns)


class Wrapping(torch.Tensor):
    """Numbers that lie elsewhere, as quantized ones do; it answers nothing."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


@pytest.mark.filterwarnings("ignore")
def test_weights_without_bits_of_their_own_are_hashed_by_nobody():
    from joulemark.merged.automatic import _hash_of

    model = torch.nn.Linear(3, 3)
    assert _hash_of(model) is not None
    quantized = torch.quantize_per_tensor(torch.randn(3, 3), 0.1, 0, torch.qint8)  # of which torch makes no words
    for one in (quantized, torch.eye(3).to_sparse(), Wrapping(torch.eye(3))):
        model.register_buffer("other", one)
        assert _hash_of(model) is None


@pytest.mark.parametrize(
    ("activation", "other"),
    [(torch.relu, torch.nn.functional.silu), (torch.nn.functional.hardtanh, torch.nn.functional.silu)],
)
def test_a_model_of_another_text_has_a_plan_of_its_own(simulated_gpu, activation, other):
    """A path that does one activation is wrong with another, and outputs are not checked again for the same weights."""
    first, second = Activated(activation).eval(), Activated(other).eval()
    second.load_state_dict(first.state_dict())
    x = torch.randn(2, 8, 9, 9)
    assert [one.path for one in merged_there(first, x).decisions if one.name == "a"] == ["product"]
    for cached in (False, True):
        merged = merged_there(second, x)
        assert merged.cached is cached
        torch.testing.assert_close(merged(x), second(x), rtol=1e-4, atol=1e-4)
    assert merged_there(first, x).cached


def test_a_model_whose_hooks_are_gone_has_a_plan_of_its_own(simulated_gpu):
    model, x = Activated(torch.nn.SiLU()).eval(), torch.randn(2, 8, 9, 9)
    hook = model.activation.register_forward_hook(lambda *_: None)
    assert [one.path for one in merged_there(model, x).decisions if one.name == "a"] == ["product"]
    hook.remove()
    merged = merged_there(model, x)
    assert not merged.cached
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-4)


def test_weights_are_not_known_as_right_by_an_output_that_is_not_finite(simulated_gpu, monkeypatch):
    model, x = model_and_input()
    merged_there(model, x)
    with torch.no_grad():
        model.a.bias += 1
    assert checks_there(monkeypatch, model, x * math.nan) == (True, True)
    assert checks_there(monkeypatch, model, x) == (True, True)
    assert checks_there(monkeypatch, model, x) == (True, False)


def test_a_plan_under_autocast_is_another(monkeypatch):
    """Paths of ours know no autocast, and the model's own output is in another format there."""
    model, x = pair_and_input()
    for format_ in (None, torch.bfloat16, torch.float16):
        for cached in (False, True):
            with torch.autocast("cpu", format_, enabled=format_ is not None):
                assert merged_here(model, x).cached is cached, format_


def test_what_other_processes_keep_meanwhile_stays(simulated_gpu, monkeypatch):
    """A better plan, and other weights that this one is right for."""
    from joulemark.merged.automatic import _Automatic

    model, x = model_and_input()
    merged_there(model, x)
    (path,) = entries("plan")
    plan, own = json.loads(path.read_text()), _Automatic._know

    def merged_while(change):
        def meanwhile(*given):
            path.write_text(json.dumps({**plan, **change}))
            own(*given)

        monkeypatch.setattr(_Automatic, "_know", meanwhile)
        path.write_text(json.dumps(plan))
        with torch.no_grad():
            model.a.bias += 1
        merged_there(model, x)
        return json.loads(path.read_text())

    assert merged_while({"cut_s": 1e6}) == {**plan, "cut_s": 1e6}
    assert merged_while({"right_for": ["others"]}) == {**plan, "right_for": ["others", cache.values_key(model)]}


def test_two_who_write_an_entry_at_once_leave_one_of_them_whole(own_cache, monkeypatch):
    write, others = Path.write_text, [2]

    def slowly(path, text, **more):
        write(path, text[: len(text) // 2], **more)
        if others:
            cache.write("plan", "key", [others.pop()] * 100)
        with path.open("a") as file:
            file.write(text[len(text) // 2 :])

    monkeypatch.setattr(Path, "write_text", slowly)
    cache.write("plan", "key", [1] * 100)
    assert not others
    assert cache.read("plan", "key") == [1] * 100
    assert [path.name for path in cache.folder().iterdir()] == ["plan-key.json"]
