"""What torch's compiler made, kept and run: of a real text, with kernels, a launcher and a GPU that are stand-ins."""

from __future__ import annotations

import _lsprof
import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch._inductor.select_algorithm")

from joulemark.merged import programs, recording  # noqa: E402
from joulemark.merged.programs import NoProgram, Program  # noqa: E402

TEXT = Path(__file__).with_name("inductor_wrapper.txt").read_text(encoding="utf-8")
"""By torch 2.11 for an H200: of MobileNetV2's text the ends of the network, at other sizes and in fp32."""
CLAMP, MEAN = "triton_poi_fused_convolution_hardtanh_1", "triton_per_fused_add_convolution_hardtanh_mean_24"
STREAM = 7


def clamp(x, bias, _):
    x.add_(bias.view(1, -1, 1, 1)).clamp_(0, 6)


def mean(x, bias, out, *_):
    out.copy_((x + bias.view(1, -1, 1, 1)).clamp(0, 6).mean((2, 3), keepdim=True))


class Static:
    """A kernel as torch holds one that its own launcher launches: of 2.11, or with what 2.14 has besides."""

    def __init__(self, name, function, arg_names, types, newer):
        self.name, self.function, self.arg_names, self.arg_tys = name, function, arg_names, types
        self.full_constexprs, self.num_warps, self.shared = [len(arg_names) - 1], 4, 2048
        self.has_global_scratch = self.has_profile_scratch = True
        self.cubin_raw, self.cubin_path, self.hash = None, None, "0" * 64
        if newer:
            self.module, self.device_agnostic, self._has_tensordesc = 1, False, False

    def run(self, x, y, z, stream, *args):
        assert (stream, len(args)) == (STREAM, len(self.arg_tys))
        self.function(*args)


class Autotuner:
    """What the text calls: it has tuned, and keeps one launcher."""

    def __init__(self, static, block):
        self.static = static
        names = ", ".join(static.arg_names[:-1])
        text = f"""
def launcher({names}, stream):
    grid_0 = -(xnumel // -{block})
    grid_1 = 1
    grid_2 = 1
    runner(grid_0, grid_1, grid_2, stream, {names})
"""
        scope = {"runner": static.run}
        exec(text, scope)
        scope["launcher"]._is_static, scope["launcher"].cache_hash = True, f"KEY-{static.name}"
        self.launchers = [scope["launcher"]]

    def run(self, *args, stream):
        (launcher,) = self.launchers
        launcher(*args, stream=stream)


class Driver:
    """torch's launcher of kernels: loads what :func:`code_of` wrote."""

    def __init__(self, newer):
        self.newer, self.loaded, self.launched = newer, [], []
        self.functions = {CLAMP: clamp, MEAN: mean}

    def _load_kernel(self, path, name, shared, device):
        assert Path(path).read_bytes() == f"code of {name}".encode()
        self.loaded.append((name, shared, device))
        return (1, name, 20, 0) if self.newer else (name, 20, 0)

    def _launch_kernel(self, function, x, y, z, warps, shared, types, args, stream):
        assert len(types) == len(args)
        assert args[-2:] == (None, None)
        self.launched.append((function, (x, y, z), warps, shared, types, stream))
        self.functions[function](*args[:-2])


@pytest.fixture(params=[False, True], ids=["2.11", "2.14"])
def newer(request):
    return request.param


@pytest.fixture
def driver(newer, monkeypatch, tmp_path):
    """A CPU in the place of a GPU."""
    made = Driver(newer)
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", made, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    monkeypatch.setattr(torch.cuda, "_DeviceGuard", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    guards = torch._C._dynamo.guards
    monkeypatch.setattr(guards, "_empty_strided_cuda", guards._empty_strided_cpu)
    monkeypatch.setattr(recording, "_gpu_of", lambda given: 0)
    monkeypatch.setattr(programs, "_on", lambda device: nullcontext())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    for name in (CLAMP, MEAN):
        path = tmp_path / "triton" / f"KEY-{name}" / f"{name}.cubin"
        path.parent.mkdir(parents=True)
        path.write_text(f"code of {name}")
    return made


@pytest.fixture
def kernels(newer):
    names = ["in_out_ptr0", "in_ptr0", "xnumel", "XBLOCK"]
    others = ["in_ptr0", "in_ptr1", "out_ptr1", "xnumel", "r0_numel", "XBLOCK"]
    return {
        CLAMP: Autotuner(Static(CLAMP, clamp, names, "OOi", newer), 256),
        MEAN: Autotuner(Static(MEAN, mean, others, "OOOii", newer), 8),
    }


def given_tensors():
    torch.manual_seed(5)
    weights = [torch.randn(32, 3, 3, 3), torch.randn(32), torch.tensor(3), torch.randn(4, 32), torch.randn(4)]
    return [*weights, torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)]


NAMES = ["first.weight", "first.bias", "count", "last.weight", "last.bias"]


@pytest.fixture
def compiled_from(tmp_path, kernels):
    """What runs a text as torch's compiler does: from a file, in a module's namespace."""

    def make(text=TEXT):
        path = tmp_path / "wrapper.py"
        path.write_text(text, encoding="utf-8")
        namespace = {**kernels}
        exec(compile(recording.reduced(TEXT)[0], str(path), "exec"), namespace)
        return lambda *given: list(namespace["call"](list(given)))

    return make


def record(made, given=None):
    with torch.no_grad():
        return recording.record(made, NAMES, given_tensors() if given is None else given, "null")


def expected_of(given):
    with torch.no_grad():
        x = torch.convolution(given[5], given[0], None, (2, 2), (1, 1), (1, 1), False, (0, 0), 1)
        clamp(x, given[1], None)
        pooled = (x + given[1].view(1, -1, 1, 1)).clamp(0, 6).mean((2, 3))
        return torch.addmm(given[4], pooled, given[3].t())


def test_a_program_holds_what_is_run_and_nothing_of_the_compiler():
    text, kernels = recording.reduced(TEXT)
    assert kernels == (CLAMP, MEAN)
    assert len(text) < len(TEXT) / 3
    for word in ("tl.", "async_compile", "rand_strided", "AsyncCompile", "__main__", "#"):
        assert word in TEXT
        assert word not in text
    assert recording.reduced(text) == (text, ())  # what kernels are is told by the text that compiles them


def test_what_is_recorded_gives_the_same_and_is_kept_as_text(driver, compiled_from):
    given = given_tensors()
    program = record(compiled_from(), given)
    assert program.text == recording.reduced(TEXT)[0]
    first, second = program.kernels
    assert (first.name, first.types, first.numbers, first.passed, first.scratch) == (CLAMP, "OOi", (2,), (0, 1, 2), 2)
    assert first.launches == (programs.Launch((1024,), (4, 1, 1)),)
    assert (second.numbers, second.launches) == ((3, 4), (programs.Launch((64, 16), (8, 1, 1)),))
    assert program.weights[0] == f"first.weight torch.float32 (32, 3, 3, 3) (27, 9, 3, 1) {given[0].device}"
    assert len(program.inputs) == 1
    read = msgspec.convert(json.loads(json.dumps(asdict(program), allow_nan=False)), Program)
    assert read == program

    driver.loaded.clear(), driver.launched.clear()
    call = programs.load(read)
    assert driver.loaded == [(CLAMP, 2048, 0), (MEAN, 2048, 0)]
    given[5] = given[5] * 2
    with torch.no_grad():
        (out,) = call(list(given))
    assert torch.equal(out, expected_of(given))
    assert driver.launched == [
        (CLAMP, (4, 1, 1), 4, 2048, "OOiOO", STREAM),
        (MEAN, (8, 1, 1), 4, 2048, "OOOiiOO", STREAM),
    ]


def test_recording_leaves_what_was_compiled_as_it_was(driver, compiled_from, kernels):
    launchers = [(one.launchers[0], dict(one.launchers[0].__globals__)) for one in kernels.values()]
    made, before = compiled_from(), sys.getprofile()
    record(made)
    assert sys.getprofile() is before
    for one, (launcher, scope) in zip(kernels.values(), launchers, strict=True):
        assert one.launchers == [launcher]
        assert launcher.__globals__["runner"] == scope["runner"]
    driver.launched.clear()
    with torch.no_grad():
        assert torch.equal(made(*given_tensors())[0], expected_of(given_tensors()))
    assert not driver.launched


@pytest.mark.parametrize("in_c", [True, False])
def test_a_profiler_that_is_at_work_stays_and_no_program_is_made(driver, compiled_from, in_c):
    """One of the interpreter's, as cProfile is up to Python 3.11 and torch's with stacks: it cannot be put back."""
    seen, made = [], compiled_from()
    profiler = _lsprof.Profiler() if in_c else lambda frame, event, _: seen.append(frame.f_code.co_name)
    profiler.enable() if in_c else sys.setprofile(profiler)
    try:
        at_work = sys.getprofile()
        if at_work is None:
            pytest.skip("this Python's profiler disturbs no other")
        with pytest.raises(NoProgram, match="profiler"):
            record(made)
        assert sys.getprofile() is at_work
    finally:
        profiler.disable() if in_c else sys.setprofile(None)
    names = [getattr(one.code, "co_name", "") for one in profiler.getstats()] if in_c else seen
    assert "record" in names


IN_CALL = "        args.clear()\n"
AT_TOP = "async_compile = AsyncCompile()\n"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ((IN_CALL, IN_CALL + "        run_intermediate_hooks(1)\n"), "import run_intermediate_hooks"),
        ((IN_CALL, IN_CALL + "        inductor_ops.seeds()\n"), "torch.ops.inductor"),
        ((IN_CALL, IN_CALL + "        torch.ops.someone.op.default(arg0_1)\n"), "torch.ops.someone.op.default"),
        ((IN_CALL, IN_CALL + "        torch._inductor.thing(arg0_1)\n"), "torch._inductor.thing"),
        ((IN_CALL, IN_CALL + "        torch.ops.joulemark.executed.default(arg0_1, n)\n"), "calls"),
        ((IN_CALL, IN_CALL + "        extern_kernels.call_aten_dw()\n"), "extern_kernels.call_aten_dw"),
        ((IN_CALL, IN_CALL + "        open('file')\n"), "NameError"),
        ((IN_CALL, IN_CALL + "        raise ValueError('as it was made')\n"), "does not run"),
        (("return (buf106, )", "return (buf106, arg2_1)"), "2 outputs"),
        (("alpha=1, beta=1", "alpha=2, beta=1"), "other outputs"),
        ((AT_TOP, AT_TOP + "_constant0 = None  # 1234\n"), None),
        (("args.clear()", "args.clear(); _constant0"), "NameError"),
        ((AT_TOP, AT_TOP + "torch.manual_seed(0)\n"), "torch.manual_seed"),
        (("call = runner.call", "call = runner.call\ncall = runner.recursively_apply_fns"), "more than once"),
        ((f"{CLAMP} = async_compile.triton(", f"{CLAMP} = async_compile.cpp_pybinding("), "Triton did not compile"),
        (("call = runner.call", "called = runner.call"), "no call"),
    ],
)
def test_a_text_with_what_is_not_known_is_no_program(driver, compiled_from, change, why):
    assert TEXT.count(change[0]) == 1
    made = compiled_from(TEXT.replace(*change))
    if why is None:  # not used
        record(made)
        return
    with pytest.raises(NoProgram, match=why):
        record(made)


@pytest.mark.skipif(not hasattr(torch._C._dynamo.guards, "copy_if_misaligned"), reason="this torch copies elsewhere")
def test_a_text_that_copies_misaligned_inputs_itself_is_a_program(driver, compiled_from):
    """As torch 2.14 writes it for a GPU."""
    imported = "from torch._C._dynamo.guards import copy_if_misaligned\n"
    text = TEXT.replace(AT_TOP, imported + AT_TOP)
    text = text.replace(IN_CALL, IN_CALL + "        arg5_1 = copy_if_misaligned(arg5_1)\n")
    program = record(compiled_from(text))
    assert imported in program.text
    given = given_tensors()
    with torch.no_grad():
        assert torch.equal(programs.load(program)(list(given))[0], expected_of(given))


def test_a_constant_that_is_attached_to_the_module_is_no_part_of_a_program():
    text = TEXT.replace(AT_TOP, AT_TOP + "_constant0 = None\n").replace(IN_CALL, IN_CALL + "        x = _constant0\n")
    with pytest.raises(NoProgram, match="constant is attached"):
        recording.reduced(text)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda one: setattr(one.launchers[0], "_is_static", False), "own launcher"),
        (lambda one: one.launchers.append(one.launchers[0]), "own launcher"),
        (lambda one: setattr(one.static, "arg_tys", "OOM"), "pointers and numbers"),
        (lambda one: setattr(one.static, "_has_tensordesc", True), "pointers and numbers"),
        (lambda one: setattr(one.static, "device_agnostic", True), "one GPU"),
        (lambda one: setattr(one.static, "full_constexprs", []), "takes"),
        (lambda one: setattr(one.static, "name", "elsewhere"), "cannot be read"),
    ],
)
def test_a_kernel_that_is_launched_otherwise_is_no_part_of_a_program(driver, compiled_from, kernels, change, why):
    made = compiled_from()
    made(*given_tensors())
    change(kernels[CLAMP])
    kernels[CLAMP].run = lambda *args, stream: clamp(*args)  # it runs, whatever it is
    with pytest.raises(NoProgram, match=why):
        record(made)


def test_a_kernel_is_given_tensors_and_numbers_alone(driver, compiled_from):
    text = TEXT.replace(f"{CLAMP}.run(buf2, arg1_1, 1024,", f"{CLAMP}.run(buf2, None, 1024,")
    with pytest.raises(NoProgram, match="NoneType"):
        record(compiled_from(text))


def test_numbers_that_were_not_seen_are_not_launched(driver, compiled_from):
    program = record(compiled_from())
    driver.launched.clear()
    call = programs.load(replace(program, text=program.text.replace("arg1_1, 1024", "arg1_1, 1025")))
    with torch.no_grad(), pytest.raises(KeyError):
        call(given_tensors())
    assert not driver.launched


def test_a_kernel_that_does_something_else_when_it_is_loaded_makes_no_program(driver, compiled_from):
    driver.functions[CLAMP] = lambda x, bias, n: x.mul_(2)
    with pytest.raises(NoProgram, match="loaded it gives other outputs"):
        record(compiled_from())
    driver.functions[CLAMP] = lambda *args: 1 / 0
    with pytest.raises(NoProgram, match="ZeroDivisionError"):
        record(compiled_from())


def test_nothing_lies_between_what_is_called_and_the_text(driver, compiled_from):
    made, given = compiled_from(), given_tensors()
    for other, why in (
        (lambda *given: [*made(*given), *made(*given)], "2 modules"),
        (lambda *given: [given[0]], "0 modules"),
        (lambda *given: made(*(one.clone() for one in given)), "given is not"),
        (lambda *given: [one.clone() for one in made(*given)], "put out is not"),
        (lambda *given: [*made(*given), None], "put out is not"),
    ):
        with pytest.raises(NoProgram, match=why):
            record(other, given)


def test_an_output_in_the_memory_of_a_weight_is_no_programs(driver, compiled_from, tmp_path):
    path = tmp_path / "other.py"
    namespace = {"extern_kernels": None}
    exec(compile("def call(args):\n    return (args[0][:1],)", str(path), "exec"), namespace)
    with pytest.raises(NoProgram, match="shares memory"):
        record(lambda *given: list(namespace["call"](list(given))))


def test_nan_is_what_it_was(driver, compiled_from):
    given = given_tensors()
    given[4][0] = torch.nan
    record(compiled_from(), given)


def test_weights_and_inputs_lie_on_one_gpu():
    given = given_tensors()
    with pytest.raises(NoProgram, match="cpu"):
        recording.record(lambda *_: pytest.fail("called"), NAMES, given, "null")
    given[0] = given[0].to("meta")
    with pytest.raises(NoProgram, match="meta"):
        recording.record(lambda *_: pytest.fail("called"), NAMES, given, "null")


def test_what_lies_between_addresses_that_kernels_count_on_is_copied():
    for x in (torch.arange(33.0)[1:].view(4, 8).t(), torch.arange(9.0)[1:4].expand(2, 3), torch.ones(3)[1:1]):
        assert x.data_ptr() % 16 or not x.numel()
        (made,) = programs.aligned([x])
        assert made.data_ptr() % 16 == 0
        assert made.stride() == x.stride()
        assert torch.equal(made, x)
    whole = torch.ones(8)
    assert programs.aligned([whole])[0] is whole


def fitting():
    given = given_tensors()
    weights = tuple(f"{name} {programs.format_told(one)}" for name, one in zip(NAMES, given, strict=False))
    return Program("", (), (5,), weights, (programs.format_told(given[5]),), "null", False, None), given


def test_a_program_fits_the_formats_it_was_made_for(monkeypatch):
    program, given = fitting()
    programs.check_fits(program, NAMES, given, [4, 5])
    for index, why in ((0, "weights"), (5, "inputs")):
        for change in (torch.Tensor.double, lambda one: one[:1], lambda one: one.to("meta")):
            other = list(given)
            other[index] = change(given[index])
            with pytest.raises(NoProgram, match=why):
                programs.check_fits(program, NAMES, other, [5])
    with pytest.raises(NoProgram, match="weights"):
        programs.check_fits(program, ["other", *NAMES[1:]], given, [5])
    with pytest.raises(NoProgram, match="inputs"):
        programs.check_fits(program, NAMES, [*given, given[5]], [5])
    with pytest.raises(NoProgram, match="segments"):
        programs.check_fits(program, NAMES, given, [4])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(NoProgram, match="deterministic"):
        programs.check_fits(program, NAMES, given, [5])


@pytest.mark.parametrize(
    "text",
    [
        "import os",
        "import torch._inductor.utils",
        "from torch._inductor.select_algorithm import AlgorithmSelectorCache",
        "from torch._dynamo.utils import counters",
        "import triton",
        "from . import thing",
        "call = open",
        "nothing = 1",
        "call = (",
    ],
)
def test_a_text_from_elsewhere_runs_nothing_else(text):
    with pytest.raises(NoProgram, match="does not run"):
        programs.load(Program(text, (), (), (), (), "null", False, None))


def test_without_torchs_launcher_or_a_gpu_nothing_is_loaded(driver, compiled_from, monkeypatch):
    program = record(compiled_from())
    with pytest.raises(NoProgram, match="no GPU"):
        programs.load(replace(program, device=None))
    monkeypatch.delattr(driver.__class__, "_load_kernel")
    with pytest.raises(NoProgram, match="cannot be loaded"):
        programs.load(program)
    monkeypatch.delattr(torch._C, "_StaticCudaLauncher")
    with pytest.raises(NoProgram, match="no launcher"):
        programs.load(program)


def test_what_stands_in_for_operators_of_the_inductor_does_what_they_do():
    from torch._inductor.kernel.conv import conv1x1_via_mm
    from torch._inductor.kernel.mm import bias_addmm
    from torch._inductor.select_algorithm import extern_kernels

    for name in programs.SAME:
        assert getattr(extern_kernels, name) is getattr(programs.EXTERN_KERNELS, name), name
    a, b = torch.randn(5, 6), torch.randn(6, 7)
    for bias in (torch.randn(7).expand(5, 7), torch.randn(5, 7), torch.randn(1, 7)):
        outs = [torch.empty(5, 7), torch.empty(5, 7)]
        bias_addmm(bias, a, b, out=outs[0], alpha=2, beta=3)
        programs._bias_addmm(bias, a, b, out=outs[1], alpha=2, beta=3)
        assert torch.equal(*outs)
    x, w = torch.randn(2, 3, 4, 5), torch.randn(6, 3, 1, 1)
    made = [torch.empty(2, 4, 5, 6).permute(0, 3, 1, 2) for _ in range(2)]
    conv1x1_via_mm(x, w, out=made[0])
    programs._conv1x1_via_mm(x, w, out=made[1])
    assert torch.equal(*made)
    programs._assert_tensor_metadata(a, (5, 6), (6, 1), torch.float32, "op")
    programs._assert_tensor_metadata(None, (5, 6), (6, 1), torch.float32, "op")
    with pytest.raises(RuntimeError, match="float32"):
        programs._assert_tensor_metadata(a, (5, 6), (6, 1), torch.float64, "op")
    with pytest.raises(AssertionError):
        programs._assert_tensor_metadata(a, (5, 6), (1, 6), torch.float32, "op")


def test_launchers_are_read_as_torch_makes_them(monkeypatch):
    """Made by torch itself, of a kernel that is not there."""
    triton = pytest.importorskip("triton")
    from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel
    from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult

    kernel = object.__new__(StaticallyLaunchedCudaKernel)
    stand_in = Static(CLAMP, clamp, ["in_out_ptr0", "in_ptr0", "xnumel", "XBLOCK"], "OOi", True)
    vars(kernel).update(vars(stand_in), declared_constexprs=[3], cubin_path="somewhere", n_regs=20, n_spills=0)
    vars(kernel).update(function=None, module=None, functions={}, modules={}, cubin_raw=b"code")
    monkeypatch.setattr(StaticallyLaunchedCudaKernel, "load_kernel", lambda self, device: None)
    launched = []
    monkeypatch.setattr(StaticallyLaunchedCudaKernel, "run", lambda self, *args: launched.append(args))
    signature = {"in_out_ptr0": "*fp32", "in_ptr0": "*fp32", "xnumel": "i32", "XBLOCK": "constexpr"}
    meta = {"device": 0, "device_type": "cuda", "constants": {"XBLOCK": 256}, "signature": signature}
    config = triton.Config({"XBLOCK": 256})
    tuned = Autotuner(stand_in, 256)
    tuned.launchers = [StaticTritonCompileResult(kernel, config, meta, {"grid_type": "Grid1D"}).make_launcher()]
    recorder = recording._Recorder(CLAMP, tuned, 0)
    x, bias = torch.ones(4), torch.ones(1)
    recorder.run(x, bias, 1024, stream=STREAM)
    assert [one[:4] for one in launched] == [(4, 1, 1, STREAM)]
    cubin = recorder.cubin()
    assert (cubin.types, cubin.passed, cubin.numbers, cubin.warps) == ("OOi", (0, 1, 2), (2,), 4)
    assert cubin.launches == (programs.Launch((1024,), (4, 1, 1)),)
