"""What torch's compiler is given, and what it is spared: Triton's template over groups, where anything else is left."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict, replace

import msgspec
import pytest

torch = pytest.importorskip("torch")
algorithms = pytest.importorskip("torch._inductor.select_algorithm")

from torch import nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from joulemark.merged import cache, compiling, programs, recording  # noqa: E402
from joulemark.merged.bricks import Parameters  # noqa: E402
from joulemark.merged.paths import Executed  # noqa: E402
from joulemark.merged.pooling import Pooling  # noqa: E402
from joulemark.merged.programs import NoProgram, Program  # noqa: E402
from joulemark.merged.sequence import Conv, Sequence  # noqa: E402


def template(number, groups, name="convolution2d"):
    """A choice as torch makes it: the template's name, numbered, and its constants as words."""
    choice = object.__new__(algorithms.TritonTemplateCaller)
    choice.name = f"triton_{name}_{number}"
    choice.description = f"ALLOW_TF32=False, BLOCK_K=16, BLOCK_M=64, GROUPS={groups}, KERNEL_H=3, num_warps=4"
    return choice


def extern():
    choice = object.__new__(algorithms.ExternKernelCaller)
    choice.name, choice.description = "convolution", ""
    return choice


def test_templates_over_groups_are_left_out_where_anything_else_is_left():
    cudnn, dense, other = extern(), template(1, 1), template(2, 192, "depthwise_conv1d")
    slow = [template(3, 192), template(4, 2, "convolution3d")]
    assert compiling.without_grouped_templates([cudnn, *slow]) == [cudnn]
    assert compiling.without_grouped_templates([slow[0], cudnn, dense, other]) == [cudnn, dense, other]
    assert compiling.without_grouped_templates(slow) == slow
    assert compiling.without_grouped_templates([]) == []


def test_torch_names_that_template_so():
    from torch._inductor.kernel import conv

    for made in (conv.conv2d_template, conv.conv3d_template):
        assert f"triton_{made.name}".startswith(compiling._TEMPLATE)


def test_torch_is_asked_once():
    assert compiling.leave_out_grouped_templates()
    assert compiling.leave_out_grouped_templates()
    functions = algorithms.get_algorithm_selector_cache().preprocessing_fns
    assert functions.count(compiling.without_grouped_templates) == 1


def test_a_torch_that_cannot_be_asked_is_left_as_it_is(monkeypatch):
    monkeypatch.delattr(algorithms, "get_algorithm_selector_cache")
    assert not compiling.leave_out_grouped_templates()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch 2.11 for its own calls
@pytest.mark.parametrize(("mode", "asked"), [("max-autotune-no-cudagraphs", True), ("default", False)])
def test_only_a_compiler_that_tunes_is_asked(mode, asked, monkeypatch):
    calls = []
    monkeypatch.setattr(compiling, "leave_out_grouped_templates", lambda: calls.append(1))
    module = torch.nn.ReLU()
    assert torch.equal(compiling.compiled(module, mode)._orig_mod(torch.ones(2)), torch.ones(2))
    assert bool(calls) == asked


def test_its_processes_are_started_where_torch_can_be_asked_to(monkeypatch):
    from torch._inductor import async_compile

    started = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: started.append(1))
    assert compiling.start_workers()
    assert started == [1]
    monkeypatch.delattr(async_compile, "maybe_warm_pool")
    assert not compiling.start_workers()


def test_the_compiler_is_imported_when_it_is_started_and_where_torch_lacks_it_nothing_is_said(monkeypatch):
    code = """
import sys
from joulemark.merged import compiling
of_compiler = {"torch._dynamo.convert_frame", "torch._inductor.compile_fx"}
assert not of_compiler & set(sys.modules)
compiling.start_compiler()
assert of_compiler <= set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", None)
    compiling.start_compiler()


class Stand:
    """In place of torch's compiler: what it is given from a trace, and how often which way was called."""

    def __init__(self, monkeypatch):
        self.graphs, self.wrapped, self.traced, self.by_torch = [], 0, 0, 0
        monkeypatch.setattr(torch._inductor, "standalone_compile", self._compile)
        monkeypatch.setattr(torch, "compile", self._wrap)

    def _compile(self, graph, given, **_):
        self.graphs.append(graph)

        def run(*inputs):
            self.traced += 1
            return [*graph(*inputs)]  # torch's gives a list, whatever the graph gives

        return run

    def _wrap(self, module, **_):
        stand = self
        self.wrapped += 1

        class Wrapped(nn.Module):
            def __init__(self):
                super().__init__()
                self._orig_mod = module

            def forward(self, *inputs):
                stand.by_torch += 1
                return self._orig_mod(*inputs)

        return Wrapped()

    def ways(self):
        """Calls from the trace and by torch.compile since the last question."""
        told, self.traced, self.by_torch = (self.traced, self.by_torch), 0, 0
        return told


class Scaled(nn.Module):
    """A convolution, and whatever else is given added to it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.register_buffer("shift", torch.ones(1))

    def forward(self, x, more=None):
        y = torch.relu(self.layer(x)) + self.shift
        return {"y": y if more is None else y + more}


@pytest.fixture
def stand(monkeypatch):
    return Stand(monkeypatch)


def compiled_and_input():
    torch.manual_seed(3)
    return compiling.Compiled(Scaled().eval()), torch.randn(2, 3, 9, 8)


def test_calls_like_the_first_are_compiled_from_a_trace_and_all_others_by_torch(stand):
    made, x = compiled_and_input()
    assert not made.training
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(made(x)["y"], made.by_torch._orig_mod(x)["y"])
        assert stand.ways() == (2, 0)
        for other in ((x[:1],), (x.contiguous(memory_format=torch.channels_last),), (x, 2.0), (x, x.new_ones(1))):
            made(*other)
            assert stand.ways() == (0, 1)
        with torch.autocast("cpu"):
            made(x)
    assert stand.ways() == (0, 1)
    assert made(x)["y"].requires_grad
    assert stand.ways() == (0, 1)
    with torch.inference_mode():
        made(x)
    assert stand.ways() == (1, 0)
    assert len(stand.graphs) == 1


def test_what_is_made_ready_is_compiled_before_its_first_call(stand):
    made, x = compiled_and_input()
    with torch.no_grad():
        made.ready_for(x)
        assert (len(stand.graphs), stand.ways()) == (1, (0, 0))
        made(x)
        assert (len(stand.graphs), stand.ways()) == (1, (1, 0))
        made.ready_for(x, 2.0)
    other, _ = compiled_and_input()
    other.ready_for(x)  # with gradients: torch.compile's
    assert (len(stand.graphs), stand.ways()) == (1, (0, 0))


def test_weights_are_read_in_each_call_and_where_they_move_it_is_compiled_again(stand):
    made, x = compiled_and_input()
    inner = made.by_torch._orig_mod
    with torch.no_grad():
        first = made(x)["y"]
        inner.layer.weight = nn.Parameter(torch.zeros_like(inner.layer.weight))
        assert not torch.equal(made(x)["y"], first)
        assert torch.equal(made(x)["y"], inner(x)["y"])
        assert len(stand.graphs) == 1
        other = copy.deepcopy(made)
        other.by_torch._orig_mod.shift += 1
        torch.testing.assert_close(other(x)["y"], inner(x)["y"] + 1)
        assert len(stand.graphs) == 2
        x = x.double()
        assert made.double()(x)["y"].dtype == torch.float64
        assert len(stand.graphs) == 3
    assert stand.by_torch == 0


def test_a_part_of_two_names_and_a_weight_of_two_parts_are_what_they_were(stand):
    """A room for what is joined holds the module that writes there first, which the graph calls too."""
    torch.manual_seed(4)
    first, other = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
    other.weight = first.weight
    inner, x = nn.Sequential(first, nn.Sequential(other, first)).eval(), torch.randn(2, 3, 5, 6)
    before = [(one, one.clone()) for one in inner.parameters()]
    made = compiling.Compiled(inner)
    with torch.no_grad():
        torch.testing.assert_close(made(x), inner(x))
    assert stand.ways() == (1, 0)
    assert [id(one) for one in inner.parameters()] == [id(one) for one, _ in before]
    assert all(torch.equal(one, value) for one, value in before)


def test_weights_of_another_format_are_compiled_for_anew(stand):
    """As ``load_state_dict(assign=True)`` brings them: compiled code would read them as what they were."""
    made, x = compiled_and_input()
    inner = made.by_torch._orig_mod
    with torch.no_grad():
        made(x)
        given = {name: one.clone() for name, one in inner.state_dict().items()}
        inner.load_state_dict(given, assign=True)
        made(x)
        assert len(stand.graphs) == 1
        given["layer.weight"] = given["layer.weight"].contiguous(memory_format=torch.channels_last)
        inner.load_state_dict(given, assign=True)
        assert torch.equal(made(x)["y"], inner(x)["y"])
        assert len(stand.graphs) == 2
        inner.load_state_dict({**given, "shift": torch.ones(1, dtype=torch.float64)}, assign=True)
        assert made(x)["y"].dtype == torch.float64
        assert len(stand.graphs) == 3
        del inner.layer._parameters["bias"]
        inner.layer.bias = None
        assert torch.equal(made(x)["y"], inner(x)["y"])
    assert stand.ways() == (5, 0)


class Calling(nn.Module):
    """What a function does."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1, x),
        lambda x: [x + 1],
        lambda x: OrderedDict(y=x + 1, rest=(None, 3)),
        lambda x: torch.return_types.max((x, x.long())),
    ],
)
def test_outputs_have_the_types_that_the_model_gives(stand, function):
    made, x = compiling.Compiled(Calling(function)), torch.randn(2, 3)
    with torch.no_grad():
        out, expected = made(x), function(x)
    assert stand.ways() == (1, 0)
    assert type(out) is type(expected)
    assert str(out) == str(expected)


def test_one_tensor_given_twice_is_two_inputs(stand):
    made, x = compiling.Compiled(Calling(lambda x, y: x - 2 * y)), torch.ones(2)
    with torch.no_grad():
        assert torch.equal(made(x, x), -x)
        assert torch.equal(made(x, 5 * x), -9 * x)
    assert stand.ways() == (2, 0)


def test_who_changes_an_input_is_left_to_torch_which_asks_what_shares_memory(stand):
    made, x = compiling.Compiled(Calling(lambda x, y: x[:1].add_(1) + y)), torch.ones(2)
    with torch.no_grad():
        assert torch.equal(made(x, torch.zeros(2)), torch.tensor([2.0, 2.0]))
        assert torch.equal(x, torch.tensor([2.0, 1.0]))
        assert torch.equal(made(x, x), torch.tensor([6.0, 4.0]))
    assert stand.ways() == (0, 2)


def test_a_first_call_in_inference_mode_is_compiled_from_a_trace_too(stand):
    made, x = compiled_and_input()
    with torch.inference_mode():
        out = made(x.clone())["y"]
    with torch.no_grad():
        assert torch.equal(made(x)["y"], out)
    assert stand.ways() == (2, 0)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch 2.11 for its own calls
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
def test_what_traces_or_watches_operators_is_shown_the_module(stand):
    """Of compiled code a tracer would see nothing: what it makes would give one output for all inputs."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    made, x = compiling.Compiled(nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval()), torch.randn(2, 3)

    def sees_module():
        traced, by_torch = stand.ways()
        return by_torch > 0 and not traced

    with torch.no_grad():
        made(x)
        assert stand.ways() == (1, 0)
        for see in (
            lambda: torch.jit.trace(made, (x,), check_trace=False),
            lambda: make_fx(made)(x),
            lambda: torch.vmap(made)(x[None]),
        ):
            see()
            assert sees_module()
        with forward_ad.dual_level():
            out = made(forward_ad.make_dual(x, torch.ones_like(x)))
            assert forward_ad.unpack_dual(out).tangent is not None
        assert sees_module()
        with FlopCounterMode(display=False) as counting:
            made(x)
        assert sees_module()
        assert counting.get_total_flops() == 2 * 2 * 3 * 3
        for other in (x.to_sparse(), torch.nested.nested_tensor([x[0], x[1]]), x.to("meta")):
            with suppress(RuntimeError):  # what operators say of it
                made(other)
            assert sees_module()


def test_another_thread_meanwhile_calls_the_module_as_it_is_and_waits_for_what_is_compiled(stand):
    tracing, done = threading.Event(), threading.Event()

    class Slow(Scaled):
        def forward(self, x):
            if threading.current_thread() is first and compiling.seen_by_compiler():
                tracing.set()
                assert done.wait(20)
            return super().forward(x)

    inner, x = Slow().eval(), torch.randn(2, 3, 9, 8)
    made, outputs = compiling.Compiled(inner), {}

    def call(name):
        with torch.no_grad():
            outputs[name] = made(x)["y"]

    first, second = (threading.Thread(target=call, args=(name,)) for name in ("first", "second"))
    first.start()
    assert tracing.wait(20)
    expected = inner(x)["y"]
    second.start()
    done.set()
    first.join(), second.join()
    assert stand.ways() == (2, 0)
    assert len(stand.graphs) == 1
    assert all(torch.equal(one, expected) for one in outputs.values())


def test_where_it_cannot_be_traced_or_not_be_compiled_so_torch_compiles_it(stand, monkeypatch):
    class Asking(nn.Module):
        def forward(self, x):
            return x + 1 if bool(x.sum() > 0) else x - 1

    made, x = compiling.Compiled(Asking()), torch.ones(2)
    with torch.no_grad():
        assert torch.equal(made(x), x + 1)
        assert torch.equal(made(-x), -x - 1)
        assert stand.ways() == (0, 2)
        monkeypatch.delattr(torch._inductor, "standalone_compile")
        made, x = compiled_and_input()
        made(x), made(x)
    assert stand.ways() == (0, 2)
    assert not stand.graphs


def test_a_torch_whose_compiler_is_switched_off_runs_the_module(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda *_, **__: pytest.fail("compiled"))
    made, x = compiled_and_input()
    with torch.no_grad():
        assert torch.equal(made(x)["y"], made.by_torch(x)["y"])


def test_a_compiler_that_is_switched_off_is_given_no_trace(stand):
    made, x = compiled_and_input()
    with torch._dynamo.config.patch(disable=True), torch.no_grad():  # TORCH_COMPILE_DISABLE=1
        made(x)
    assert stand.ways() == (0, 1)
    assert not stand.graphs


def test_a_trace_shows_the_compiler_segments_as_one_operator_and_torchs_where_it_may_fuse(stand):
    def layer(path):
        weight = torch.randn(8, 8, 3, 3)
        conv = Conv(8, 8, (3, 3), (1, 1), (1, 1), (1, 1), activation="relu")
        return Executed(Sequence((conv,)), [Parameters(weight, None)], path, False)

    pooling = Pooling(True, (2, 2), (2, 2), (0, 0))
    model = nn.Sequential(layer("fused"), layer("epilogue"), pooling)
    x = torch.randn(1, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        compiling._from_trace(model, (x,), "default")
    names = [str(node.target) for node in stand.graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("joulemark.executed" in one for one in names) == 1
    assert sum("convolution" in one for one in names) == 1
    assert sum("max_pool2d" in one for one in names) == 1
    assert not compiling.seen_by_compiler()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of compilers, for their own calls
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one for C++ on a CPU")
def test_torchs_own_compiler_takes_the_trace_and_reads_no_bytecode(monkeypatch):
    made, x = compiled_and_input()
    monkeypatch.setattr(made.by_torch, "forward", lambda *_: pytest.fail("by torch.compile"))
    with torch.no_grad():
        expected = made.by_torch._orig_mod(x)["y"]
        torch.testing.assert_close(made(x)["y"], expected)
        torch.testing.assert_close(made(x + 0)["y"], expected)


def test_torch_is_asked_for_its_compiler_when_something_is_left_to_it(stand):
    made, x = compiled_and_input()
    assert list(made.state_dict()) == ["inner.shift", "inner.layer.weight", "inner.layer.bias"]
    assert stand.wrapped == 0
    made(x)  # with gradients
    made(x)
    assert made.by_torch is made.by_torch
    assert (stand.wrapped, stand.ways()) == (1, (0, 2))
    other = copy.deepcopy(made)
    other.inner.shift += 1
    torch.testing.assert_close(other(x)["y"], made(x)["y"] + 1)
    assert stand.wrapped == 2
    assert len(list(made.parameters())) == 2


def test_a_batch_of_weights_is_left_to_torch(stand):
    """In ``vmap`` a weight has the format of one, and lies where no kernel looks for it."""
    made, x = compiled_and_input()
    program = program_of(made, x)
    weights = {name: torch.stack([one.detach(), 2 * one.detach()]) for name, one in made.inner.state_dict().items()}

    def of(module, prefix=""):
        return torch.func.vmap(
            lambda given: torch.func.functional_call(module, {prefix + key: one for key, one in given.items()}, (x,))
        )(weights)["y"]

    with torch.no_grad():
        assert made.runs(program, x)
        torch.testing.assert_close(of(made, "inner."), of(made.inner))
        assert stand.ways() == (0, 1)
        assert torch.equal(made(x)["y"], made.inner(x)["y"])
        assert (stand.graphs, stand.ways()) == ([], (0, 0))  # by the program again


def test_a_negative_that_torch_has_not_computed_yet_is_left_to_torch(stand):
    """It has the format of what it is the negative of, and kernels would read that."""
    made, pairs = compiling.Compiled(nn.ReLU()), torch.randn(3, 4, dtype=torch.complex64)
    with torch.no_grad():
        made(pairs.imag)
        given = pairs.conj().imag
        assert given.stride() == pairs.imag.stride()
        assert torch.equal(made(given), given.relu())
        assert stand.ways() == (1, 1)


TEXT = """
import torch
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten

def call(args):
    shift, weight, bias, x = args
    args.clear()
    y = extern_kernels.convolution(x, weight, stride=(1, 1), padding=(0, 0), dilation=(1, 1), transposed=False,
                                   output_padding=(0, 0), groups=1, bias=bias)
    return (aten.add.Tensor(aten.relu.default(y), shift),)
"""


def program_of(made, x):
    """By hand, of torch's operators alone."""
    names, places = compiling._names(made.inner), compiling._places(made.inner)
    given = [held[key] for held, key in places]
    weights = [f"{name} {programs.format_told(one)}" for name, one in zip(names, given, strict=True)]
    structure = pytree.treespec_dumps(pytree.tree_flatten({"y": 0})[1])
    return Program(TEXT, (), (), tuple(weights), (programs.format_told(x),), structure, False, None)


def test_a_program_runs_in_the_place_of_what_is_compiled(stand):
    made, x = compiled_and_input()
    inner, program = made.inner, program_of(made, x)
    with torch.no_grad():
        assert made.runs(program, x)
        for given in (x, x + 1):
            assert torch.equal(made(given)["y"], inner(given)["y"])
        assert made.program(x) == program
        with torch.inference_mode():
            assert torch.equal(made(x)["y"], inner(x)["y"])
        values = {name: 2 * one for name, one in inner.state_dict().items()}
        inner.load_state_dict(values, assign=True)
        assert torch.equal(made(x)["y"], inner(x)["y"])
        made.ready_for(x)
        assert (stand.graphs, stand.wrapped) == ([], 0)
        made(x[:1])
        assert stand.ways() == (0, 1)
    assert made(x)["y"].requires_grad
    with torch.autocast("cpu"), torch.no_grad():
        made(x)
    assert stand.ways() == (0, 2)
    assert not stand.graphs


def test_who_is_copied_or_moved_is_compiled_and_runs_no_program(stand):
    made, x = compiled_and_input()
    program = program_of(made, x)
    assert made.runs(program, x)  # with gradients on, as who loads may have them
    with torch.no_grad():
        for other in (copy.deepcopy(made), copy.copy(made)):
            assert torch.equal(other(x)["y"], made.inner(x)["y"])
        assert (len(stand.graphs), stand.ways()) == (2, (2, 0))
        assert made.double()(x.double())["y"].dtype == torch.float64
        assert (len(stand.graphs), stand.ways()) == (3, (1, 0))
        assert not made.runs(program, x)
        made(x.double())
        assert stand.ways() == (1, 0)


def test_a_program_that_does_not_fit_is_not_taken(stand, monkeypatch):
    made, x = compiled_and_input()
    program = program_of(made, x)
    assert not made.runs(program)
    assert not made.runs(program, x, 2.0)
    assert not made.runs(program, x.double())
    assert not made.runs(replace(program, recipes=(1,)), x)
    assert not made.runs(replace(program, structure="other"), x)
    assert not made.runs(replace(program, text="import triton"), x)
    assert not made.runs(None, x)
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            with pytest.raises(NoProgram, match="left to"):
                made.take(program, x)
    with torch.no_grad():
        made(x)
    assert stand.ways() == (1, 0)
    assert made.runs(program, x)


def test_a_program_that_fails_when_it_is_called_says_so(stand):
    made, x = compiled_and_input()
    assert made.runs(replace(program_of(made, x), text="def call(args):\n    return args[99]"), x)
    with torch.no_grad(), pytest.raises(IndexError):
        made(x)


def test_there_is_no_program_of_what_is_not_compiled_or_not_on_a_gpu(stand):
    made, x = compiled_and_input()
    assert made.program(x) is None
    with pytest.raises(NoProgram, match="nothing was compiled"):
        made.record(x)
    with torch.no_grad():
        made(x)
    assert made.program(x) is None
    with pytest.raises(NoProgram, match="cpu"):
        made.record(x)
    with pytest.raises(NoProgram, match="nothing was compiled"):
        made.record(x[:1])
    assert stand.ways() == (1, 0)


def test_an_output_of_the_users_own_type_is_no_programs(stand):
    class Own(tuple):
        __slots__ = ()

    pytree._private_register_pytree_node(Own, lambda one: (list(one), None), lambda parts, _: Own(parts))
    made, x = compiling.Compiled(Calling(lambda x: Own((x + 1,)))), torch.ones(2)
    with torch.no_grad():
        assert type(made(x)) is Own
        with pytest.raises(NoProgram, match="structure"):
            made.record(x)


RESTARTED = """
import sys
import torch
from joulemark.merged import cache
from joulemark.merged.compiling import Compiled
from joulemark.merged.programs import Program
kept = torch.load(sys.argv[1], weights_only=False)
made = Compiled(kept["module"])
with torch.no_grad():
    assert made.runs(cache.read("program", "key", Program), kept["x"])
    y = made(kept["x"])
assert torch.equal(y, kept["y"])
compilers = ("torch._dynamo", "torch._inductor", "triton")
found = [one for one in sys.modules if one.startswith(compilers)]
assert not found, found
"""


def with_a_segment():
    """A linear layer, and a segment that is an operator of ours in a graph."""
    torch.manual_seed(6)
    conv = Conv(8, 8, (1, 1), (1, 1), (0, 0), (1, 1), activation="relu")
    weights = [Parameters(torch.randn(8, 8, 1, 1), torch.randn(8))]
    segment = Executed(Sequence((conv,)), weights, "product", False)
    return nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (8, 1, 1)), segment).eval()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of compilers, for their own calls
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one for C++ on a CPU")
def test_what_torchs_own_compiler_made_runs_in_a_process_without_it(monkeypatch, tmp_path, own_cache):
    """On a CPU too, where it makes no kernels: of products, and operators of ours."""
    monkeypatch.setattr(recording, "_gpu_of", lambda given: 0)
    module, x = with_a_segment(), torch.randn(3, 8)
    made = compiling.Compiled(module)
    with torch.no_grad():
        y = made(x)
        program = made.record(x)
        assert program.recipes == (module[2].number,)
        assert torch.equal(made(x), y)
    assert "joulemark.executed(" in program.text
    assert msgspec.convert(json.loads(json.dumps(asdict(program))), Program) == program
    cache.write("program", "key", asdict(program))
    torch.save({"module": module, "x": x, "y": y}, tmp_path / "kept.pt")
    subprocess.run([sys.executable, "-c", RESTARTED, tmp_path / "kept.pt"], check=True, timeout=120)
