"""What torch's compiler is spared: Triton's convolution template over groups, where anything else is left."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
algorithms = pytest.importorskip("torch._inductor.select_algorithm")

from joulemark.merged import compiling  # noqa: E402


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
