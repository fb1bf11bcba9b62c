"""Paths of single layers: what they set, and that it comes back."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import replace
from math import inf

import pytest
import torch
from torch import nn

from joulemark.merged import measuring, merge, paths, squeeze
from joulemark.merged.bricks import Parameters
from joulemark.merged.graph import find_chains, range_segment, trace
from joulemark.merged.paths import Executed, Recipe, cudnn_tuning, library_paths
from joulemark.merged.ranges import Ranges
from joulemark.merged.sequence import Conv, Sequence
from joulemark.merged.setting import Setting
from joulemark.merged.trials import Trial
from tests.merged.fakes import RATES, fake_family

POINTWISE = ((1, 1), (1, 1), (0, 0), (1, 1))


def test_the_users_setting_of_cudnn_comes_back_behind_several_threads(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    first, second = cudnn_tuning(True), cudnn_tuning(True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert torch.backends.cudnn.benchmark is False


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_plan_of_a_run_without_trials_is_taken_where_times_count(monkeypatch, deterministic):
    def setting():
        return torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", deterministic)
    with cudnn_tuning(True):
        assert setting() == (True, deterministic)
        with cudnn_tuning(False):  # torch keeps plans by this setting, not by the other one
            assert setting() == (False, not deterministic)
            with cudnn_tuning(True):
                assert setting() == (True, deterministic)
        assert setting() == (True, deterministic)
    assert setting() == (False, deterministic)


def test_the_wish_of_who_is_left_holds_when_another_thread_ends(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    outputs, times = cudnn_tuning(False), cudnn_tuning(True)
    outputs.__enter__()
    times.__enter__()
    outputs.__exit__(None, None, None)
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == (True, False)
    times.__exit__(None, None, None)
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == (False, False)


def test_all_plans_are_picked_by_trial_where_deterministic_algorithms_give_them_one_key(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with cudnn_tuning(True), cudnn_tuning(False):
        assert torch.backends.cudnn.benchmark is True


def test_settings_that_are_frozen_leave_nobody_inside(monkeypatch):
    def refuse(*_):
        raise RuntimeError("frozen")

    with monkeypatch.context() as frozen:
        frozen.setattr(paths._Tuning, "_set", staticmethod(refuse))
        with pytest.raises(RuntimeError, match="frozen"), cudnn_tuning(True):
            pass
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with cudnn_tuning(False):
        assert torch.backends.cudnn.benchmark is False
    assert torch.backends.cudnn.benchmark is True


@pytest.mark.parametrize("adds", [False, True])
def test_cudnns_fused_kernels_are_picked_by_trial_whoever_runs_them(monkeypatch, adds):
    """Also where an output alone counts, or the user wants none: torch would keep a guessed plan for who measures."""
    seen = []

    def fused(x, *_):
        seen.append((torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic))
        return x

    for name in ("cudnn_convolution_relu", "cudnn_convolution_add_relu"):
        monkeypatch.setattr(torch, name, fused)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    layer, x = Conv(3, 3, (1, 1), (1, 1), (0, 0), (1, 1), activation="relu"), torch.randn(2, 3, 5, 4)
    module = Executed(Sequence((layer,)), [Parameters(torch.randn(3, 3, 1, 1), None)], "fused", adds)
    module(x, x if adds else None)
    with cudnn_tuning(False):
        module(x, x if adds else None)
        assert torch.backends.cudnn.benchmark is False
    assert seen == [(True, False)] * 2
    assert torch.backends.cudnn.benchmark is False


@pytest.mark.parametrize(
    ("taps", "guesses", "tried"),
    [
        (7, {"library": 5.0, "epilogue": 2.0}, {"fused", "epilogue"}),
        (7, {"library": 5.0, "epilogue": 4.0}, set()),
        (7, {"library": 5.0, "epilogue": None}, {"fused", "epilogue"}),
        (7, {"epilogue": 4.0}, set()),
        (7, {}, {"fused"}),
        (3, {}, {"fused", "epilogue"}),
    ],
)
def test_cudnn_tries_no_plans_for_many_taps_where_it_is_far_behind(monkeypatch, taps, guesses, tried):
    """Nor are its fused kernels ever run as guessed; a guess that is wrong is no reason not to try."""
    ran = []

    def right_once(segment, one, *_):
        by_trial = torch.backends.cudnn.benchmark
        ran.append((one.path, by_trial))
        one.problem = None if by_trial else "of the guess alone"
        if not by_trial and guesses[one.path] is None:
            return None
        return lambda: 1.0 if by_trial else guesses[one.path]

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(measuring, "question", lambda *_: (None, torch.ones(1)))
    monkeypatch.setattr(measuring, "right_once", right_once)
    monkeypatch.setattr(measuring, "race", lambda calls, _: {path: call() for path, call in calls.items()})
    model = nn.Sequential(nn.Conv2d(3, 8, taps), nn.ReLU()).eval()
    segment = range_segment(find_chains(trace(model, (torch.randn(1, 3, 9, 9),)))[0][0])
    trials = [Trial(path, "unmerged", None, None, None) for path in {"rows 128x16": 1, "fused": 1, **guesses}]
    trials += [Trial(path, "unmerged", None, None, None) for path in sorted(tried - {one.path for one in trials})]
    measuring._race(segment, trials, Setting(torch.device("cuda"), "bf16", None, (), True))
    assert {path for path, by_trial in ran if not by_trial} == set(guesses)
    assert {path for path, by_trial in ran if by_trial} == {"rows 128x16", *tried}
    given = {one.path: 1.0 if one.path in tried else guesses.get(one.path) for one in trials}
    assert {one.path: one.measured_s for one in trials} == {**given, "rows 128x16": 1.0}
    assert not any(one.problem for one in trials)


@pytest.mark.parametrize(("working", "more"), [({"library"}, [["library"]]), ({"fused", "library"}, [])])
def test_torchs_operators_are_measured_where_nothing_in_their_place_works(monkeypatch, working, more):
    asked = []

    def measure(segment, trials, setting):
        asked.append([one.path for one in trials])
        for one in trials:
            one.measured_s, one.problem = (1.0, None) if one.path in working else (None, "no compiler")
        return True

    monkeypatch.setattr("joulemark.merged.ranges.measure", measure)
    monkeypatch.setattr(paths, "has_triton", lambda: True)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()).eval()
    segment = range_segment(find_chains(trace(model, (torch.randn(1, 4, 9, 9),)))[0][0])
    found = Ranges(Setting(torch.device("cuda"), "fp32", None, (), True))
    best = found.best(found.trials(segment, inf))
    assert asked == [["fused", "epilogue"], *more]
    assert best is not None
    assert best.path == ("library" if more else "fused")


def test_cudnn_fuses_what_is_added_before_a_relu_alone():
    pytest.importorskip("triton")

    def possible(**more):
        layer = Conv(8, 8, (3, 3), (1, 1), (1, 1), (1, 1), **more)
        return library_paths(layer, True, torch.device("cuda"), "bf16")

    assert possible(activation="relu") == ("fused", "epilogue", "library")
    assert possible(activation="relu", adds_behind=True) == ("epilogue", "library")
    assert possible(activation="leaky", adds_behind=True) == ("epilogue", "library")


@pytest.mark.parametrize(
    ("layer", "more", "paths"),
    [
        (Conv(64, 64, (2, 2), (2, 2), (0, 0), (1, 1)), {"biased": True}, ("epilogue", "library")),
        (Conv(64, 64, (2, 2), (2, 2), (0, 0), (1, 1)), {}, ("library",)),
        (Conv(64, 64, (2, 2), (2, 2), (0, 0), (1, 1), groups=4), {"biased": True}, ("epilogue", "library")),
        (Conv(8, 8, (1,) * 3, (2,) * 3, (0,) * 3, (1,) * 3), {"biased": True}, ("epilogue", "library")),
        (Conv(8, 8, (3,) * 3, (1,) * 3, (0,) * 3, (1,) * 3, groups=8), {"biased": True}, ("library",)),
        (Conv(64, 2, *POINTWISE), {"biased": True}, ("tiles 64x16", "epilogue", "product", "library")),
        (Conv(64, 2, *POINTWISE), {}, ("product", "library")),
        (Conv(64, 16, *POINTWISE), {"biased": True}, ("epilogue", "product", "library")),
    ],
)
def test_a_bias_alone_is_added_by_an_epilogue(layer, more, paths):
    pytest.importorskip("triton")
    assert library_paths(layer, False, torch.device("cuda"), "bf16", **more) == paths


def test_no_kernel_that_counts_on_channels_innermost_is_offered_in_one_dimension():
    for kernel in (1, 3):
        layer = Conv(8, 8, (kernel,), (1,), (0,), (1,), activation="relu")
        paths = library_paths(layer, False, torch.device("cuda"), "bf16", biased=True)
        assert set(paths) <= {"fused", "product", "library"}


def test_layers_with_and_without_a_bias_are_tried_apart():
    pytest.importorskip("triton")
    model = nn.Sequential(nn.Conv2d(5, 5, 2, 2), nn.Conv2d(5, 5, 2, 2, bias=False)).eval()
    graph = trace(model, (torch.randn(1, 5, 8, 8),))
    ranges = Ranges(Setting(torch.device("cuda"), "fp32", None, (), False))
    (first, second), *_ = find_chains(graph)[0]
    segments = [replace(range_segment([unit]), size=(8, 8)) for unit in (first, second)]
    assert [[one.path for one in ranges.trials(segment, inf)] for segment in segments] == [
        ["epilogue", "library"],
        ["library"],
    ]


def test_a_part_of_a_batch_that_begins_anywhere_is_taken():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))

        def forward(self, x, y):
            return torch.relu(self.b(torch.relu(self.a(x))) + y)

    def part():
        whole = torch.randn(3, 3, 5, 5).contiguous(memory_format=torch.channels_last)
        return whole[1:]

    model, x, y = Added().eval(), part(), part()
    assert x.data_ptr() % 16
    assert x.is_contiguous(memory_format=torch.channels_last)
    merged = merge(model, (x, y), rates=RATES, families=(fake_family(),))
    assert [one.adds for one in merged.modules() if isinstance(one, Executed) and one.kernel is not None] == [True]
    torch.testing.assert_close(merged(x, y), model(x, y), rtol=1e-4, atol=1e-5)


class Placed(nn.Module):
    """What is added, and a gate, are there once for all images; or what is convolved is."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(3, 3, kernel, padding=kernel // 2) for kernel in (3, 3, 1, 3))
        self.place, self.gate = nn.Parameter(torch.randn(1, 3, 5, 4)), nn.Parameter(torch.randn(1, 3, 1, 1))

    def forward(self, x):
        y = torch.relu(self.b(torch.relu(self.a(x))) + self.place)
        y = torch.relu(self.c(y * self.gate)) + self.place
        return torch.relu(self.d(self.place)) + y


def test_what_is_there_once_for_all_images_is_there_for_each():
    torch.manual_seed(3)
    model, x, ones = Placed().eval(), torch.randn(1, 3, 5, 4), torch.ones(2, 3, 5, 4)
    merged = merge(model, x, "kernels", rates=RATES, families=(fake_family(),))
    assert len([one for one in merged.modules() if isinstance(one, Executed)]) > 1
    seen = torch.compile(merged.inner, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        for batch in (1, 3, 0):
            x = torch.randn(batch, 3, 5, 4)
            torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(seen(ones), model(ones), rtol=1e-4, atol=1e-5)


def test_no_kernel_is_given_less_to_add_than_it_writes(monkeypatch):
    """Nor less of a gate; nor fewer images than are added."""
    weight, images, one = torch.randn(4, 3, 1, 1), torch.randn(2, 3, 5, 4), torch.randn(1, 3, 5, 4)
    gate, place, places = torch.randn(1, 3, 1, 1), torch.randn(1, 4, 5, 4), torch.randn(2, 4, 5, 4)
    sequence = Sequence((Conv(3, 4, (1, 1), (1, 1), (0, 0), (1, 1), activation="relu"),))
    monkeypatch.setattr(Recipe, "_epilogue", lambda self, layer, *given: given[:2])
    monkeypatch.setattr(Recipe, "_tiles", lambda self, layer, *given: (given[0], given[1], given[2]))
    for path, given in (
        ("epilogue", (images, place)),
        ("epilogue", (one, places)),
        ("tiles 16x16", (images, place, gate)),
    ):
        read = Executed(sequence, [Parameters(weight, None)], path, True).run(*given)
        assert [tuple(part.shape) for part in read] == [(2, 3, 5, 4), (2, 4, 5, 4), (2, 3, 1, 1)][: len(given)]
        assert all(torch.equal(part, whole.expand_as(part)) for part, whole in zip(read, given, strict=True))


@pytest.mark.parametrize("path", ["library", "tiles 64x16", "fused", "product", "epilogue"])
def test_no_image_launches_nothing(path):
    x, added = torch.empty(0, 4, 5, 6), torch.empty(0, 8, 3, 3)
    layer = Conv(4, 8, (3, 3), (2, 2), (1, 1), (1, 1), activation="relu")
    module = Executed(Sequence((layer,)), [Parameters(torch.randn(8, 4, 3, 3), torch.randn(8))], path, True)
    assert module(x, added, torch.empty(0, 4, 1, 1)).shape == (0, 8, 3, 3)


def executed_by_torch():
    conv = Conv(3, 4, (3, 3), (1, 1), (1, 1), (1, 1), activation="relu")
    return Executed(Sequence((conv,)), [Parameters(torch.randn(4, 3, 3, 3), None)], "library", False)


@pytest.mark.parametrize("stored", [False, True])
def test_a_copy_leaves_what_is_loaded_on_a_device_and_works_where_nothing_was_made_before(stored, monkeypatch):
    class Loaded:
        """As CUDA's handles, which nothing can copy."""

        def __reduce__(self):
            raise TypeError("no way to copy it")

    module, x = executed_by_torch(), torch.randn(1, 3, 5, 5)
    module.recipe._ready[("some shape",)] = (Loaded(), None)
    if stored:
        written = pickle.dumps(module)
        monkeypatch.setattr(paths, "_recipes", {})  # as in another process
        other = pickle.loads(written)
    else:
        other = copy.deepcopy(module)
    assert not other.recipe._ready
    assert other.recipe == module.recipe
    assert paths._recipes[other.number] == other.recipe
    assert torch.equal(other(x), module(x))


def test_no_image_has_no_gate():
    given = [torch.randn(size) for size in ((2, 4), (2,), (2, 4), (4,))]
    for x in (torch.empty(0, 4, 5, 6), torch.empty(0, 4, 3, 5, 6)):
        expected = squeeze.in_operators(x, *given, "relu", False)
        assert torch.ops.joulemark.excitation(x, *given, "relu", False).shape == expected.shape


def test_late_layers_are_tried_with_few_plans_and_the_users_limit_comes_back(monkeypatch):
    from joulemark.merged import paths

    clock, seen = [0.0], []
    monkeypatch.setattr(paths.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(torch.backends.cudnn, "benchmark_limit", 7)
    only = Conv(3, 3, (1, 1), (1, 1), (0, 0), (1, 1))
    layer = Executed(Sequence((only,)), [Parameters(torch.randn(3, 3, 1, 1), None)], "library", False)
    layer.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.benchmark_limit))
    x = torch.randn(1, 3, 5, 5)
    with paths.trials_until(2.0):
        for clock[0] in (1.0, 2.0, 2.5):
            layer(x)
    for clock[0] in (3.0, 4.0):
        layer(x)
    assert seen == [7, 7, paths._FEW_PLANS, 7, 7]
    assert torch.backends.cudnn.benchmark_limit == 7


def test_a_call_of_our_operators_imports_no_compiler():
    """As torch does for one that is written in Python."""
    code = """
import sys
import torch
from torch import nn
from joulemark.merged.squeeze import Excitation
made, x = Excitation(nn.Conv2d(4, 2, 1), "relu", nn.Conv2d(2, 4, 1), False), torch.empty(0, 4, 5, 6)
assert made._by_kernels(x).shape == (0, 4, 1, 1)
assert not {"torch._dynamo", "torch._inductor", "triton"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_gradient_of_an_excitation_by_kernels_is_refused_and_not_left_out():
    """A gate that is taken for a constant would make the gradient of what it gates wrong."""
    made = squeeze.Excitation(nn.Conv2d(4, 2, 1), "relu", nn.Conv2d(2, 4, 1), False)
    x = torch.empty(0, 4, 5, 6)
    assert not made._by_kernels(x).requires_grad
    gate = made._by_kernels(x.requires_grad_())
    with pytest.raises(RuntimeError, match="no autograd formula"):
        (x * gate).sum().backward()
    with torch.no_grad():
        assert not made._by_kernels(x).requires_grad


def test_trials_of_two_threads_end_in_any_order_and_leave_the_users_limit(monkeypatch):
    from joulemark.merged import paths

    monkeypatch.setattr(torch.backends.cudnn, "benchmark_limit", 7)
    first, second = paths.trials_until(0.0), paths.trials_until(0.0)
    first.__enter__()
    paths._trials.limit()
    assert torch.backends.cudnn.benchmark_limit == paths._FEW_PLANS
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    paths._trials.limit()
    assert torch.backends.cudnn.benchmark_limit == 7
