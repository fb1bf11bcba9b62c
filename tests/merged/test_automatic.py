"""``merge(strategy="auto")`` with kernels and rates that need no GPU."""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from joulemark.merged import cache, merge
from joulemark.merged.automatic import _Automatic
from joulemark.merged.families import Family
from joulemark.merged.graph import trace
from joulemark.merged.paths import Executed, library_paths
from joulemark.merged.sequence import Conv
from joulemark.merged.setting import Setting
from joulemark.merged.squeeze import Excitation
from tests.merged.fakes import (
    RATES,
    FakeKernel,
    Wrapped,
    executed,
    fake_family,
    merged_there,
    model_and_input,
    packed,
)

pytestmark = pytest.mark.usefixtures("own_cache")


def test_what_the_model_predicts_to_win_is_merged():
    model, x = model_and_input()
    merged = merge(model, x, rates=RATES, families=(fake_family(),))
    lengths = [len(one.sequence.layers) for one in executed(merged)]
    assert sum(lengths) == 6
    assert max(lengths) > 1
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(merged(x[:1]), model(x[:1]), rtol=1e-4, atol=1e-5)
    said = merged.explain()
    assert "… b: padded, bricks of" in said
    assert "predicted" in said
    assert "gain" in said


def test_a_residual_from_outside_is_the_kernels_own_addition():
    model, x = model_and_input()
    merged = merge(model, x, rates=RATES, families=(fake_family(),))
    adding = [one for one in executed(merged) if one.adds]
    assert len(adding) == 1
    assert merged.decisions


def test_without_kernels_that_do_it_layers_stay_apart():
    model, x = model_and_input()
    nothing = Family("none", "padded", lambda problem: ())
    merged = merge(model, x, rates=RATES, families=(nothing,))
    assert [len(one.sequence.layers) for one in executed(merged)] == [1] * 6
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("given_times")
def test_a_kernel_with_a_wrong_output_is_left_out_however_fast():
    model, x = model_and_input()
    merged = merge(model, x, rates=RATES, families=(fake_family(wrong=True),), measure=True)
    assert all(len(one.sequence.layers) == 1 for one in executed(merged))
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)


def test_the_referee_keeps_the_folded_model_where_merging_is_slower():
    """Bricks in torch's own operators are: the model comes back folded, and says so."""
    model, x = model_and_input()
    merged = merge(model, x, rates=RATES, families=(fake_family(),), measure=True)
    assert set(merged.times) == {"launches", "folded"}
    assert merged.times[merged.variant] <= 1.01 * min(merged.times.values())
    assert "the whole:" in merged.explain()
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)


class Cancelling(nn.Sequential):
    """Takes a large mean from small differences: 16 bits cannot tell it well; folded, it is not there."""

    def __init__(self):
        super().__init__(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, momentum=1.0))
        nn.init.constant_(self[2].bias, 20.0)
        self(torch.randn(4, 8, 17, 19))


class Wide(nn.Module):
    """A model in fp32, and something behind it."""

    def __init__(self, model, then):
        super().__init__()
        self.model, self.then = copy.deepcopy(model).float(), then

    def forward(self, x):
        return self.then(self.model(x.float()))


def test_a_variant_may_be_as_far_off_as_the_model_itself_is_and_not_much_further():
    """Else of a model that amplifies what is rounded no variant would be right, and nothing merged."""
    from joulemark.merged.questions import relative_error
    from joulemark.merged.setting import Setting
    from joulemark.merged.whole import Referee

    torch.manual_seed(0)
    model, x = Cancelling().eval().bfloat16(), torch.randn(2, 8, 17, 19).bfloat16()
    exact, other = Wide(model, nn.Identity()), Wide(model, nn.ReLU())
    setting = Setting(torch.device("cpu"), "bf16", None, (), False)
    with torch.no_grad():
        own = relative_error(model(x), exact(x))
        referee = Referee(setting, (x,), model(x), lambda: exact(x))
        assert referee.allowed == 2 * own > 0.1
        assert referee.try_("as good", lambda: exact) is exact
        assert referee.try_("wrong", lambda: other) is None
        assert "is allowed" in referee.problems["wrong"]
        for widened in (None, lambda: 1 / 0):  # a model that runs in no other format
            assert Referee(setting, (x,), model(x), widened).try_("as good", lambda: exact) is None


@pytest.mark.parametrize(("narrowest", "right"), [("fp32", True), (None, False)])
def test_a_wide_input_asks_no_more_of_a_model_than_its_narrowest_numbers_give(narrowest, right):
    from joulemark.merged.whole import Referee

    x = torch.ones(3).double()
    referee = Referee(Setting(torch.device("cpu"), None, None, (), False), (x,), x, None, narrowest)
    assert (referee.try_("rounded", lambda: nn.Hardtanh(0.0, 1 - 1e-7)) is not None) is right
    assert referee.try_("wrong", lambda: nn.Hardtanh(0.0, 0.999)) is None


def test_the_narrowest_numbers_of_a_model_are_those_of_its_weights(simulated_gpu):
    model = Wide(nn.Conv2d(3, 3, 1), nn.Identity()).eval()
    model.register_buffer("scale", torch.ones(3).double())
    graph = trace(model, (torch.randn(1, 3, 4, 4).double(),))
    setting = Setting(torch.device("cpu"), None, RATES, (), False)
    automatic = _Automatic(model, graph, (torch.randn(1, 3, 4, 4).double(),), setting, 0.0, 1.0)
    assert automatic._referee().narrowest == "fp32"
    automatic.model = nn.Identity().eval()
    assert automatic._referee().narrowest is None


def test_a_model_that_amplifies_rounding_errors_is_merged_all_the_same():
    torch.manual_seed(0)
    model, x = Cancelling().eval().bfloat16(), torch.randn(2, 8, 17, 19).bfloat16()
    merged = merge(model, x, rates=RATES, families=(fake_family(),))
    assert merged.failed is None
    assert executed(merged)


def test_an_output_of_zeros_is_compared_too():
    from joulemark.merged.whole import _worst_error

    zeros, ones = torch.zeros(4), torch.ones(4)
    assert _worst_error((zeros, ones), (zeros, ones)) == 0
    assert _worst_error((ones, ones), (zeros, ones)) > 1e6
    assert _worst_error(torch.full((4,), torch.nan), ones) == torch.inf


def test_where_merging_fails_the_model_comes_back_and_says_so():
    def broken(problem):
        raise OSError("no compiler\non this disk")

    model, x = model_and_input()
    with pytest.warns(UserWarning, match="Residual is not merged: merging it failed: OSError: no compiler"):
        merged = merge(model, x, rates=RATES, families=(Family("broken", "padded", broken),))
    assert torch.equal(merged(x), model(x))
    assert merged.explain() == "Residual: plain (merging it failed: OSError: no compiler)"


SLOW_KERNELS = replace(RATES, dram_bytes_per_s=1e15, reached={"fake": (1e-9, 1e-9)})
"""Of a GPU on which everything but our kernels is fast."""


def test_by_kernels_whatever_can_be_merged_is_whatever_it_takes():
    model, x = model_and_input()
    alone, forced = (
        merge(model, x, strategy, rates=SLOW_KERNELS, families=(fake_family(),)) for strategy in ("auto", "kernels")
    )
    assert max(len(one.sequence.layers) for one in executed(alone)) == 1
    assert max(len(one.sequence.layers) for one in executed(forced)) > 1
    assert (forced.variant, forced.times, forced.failed, forced.cached) == ("launches", {}, None, False)
    assert (alone.tuned, forced.tuned) == (True, False)
    torch.testing.assert_close(forced(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(forced(x[:1]), model(x[:1]), rtol=1e-4, atol=1e-5)
    assert not list(cache.folder().glob("plan-*")), "a plan that nobody asked for by itself is not kept"


def test_by_kernels_what_is_wrong_or_fails_is_refused_and_told_and_the_next_one_has_its_turn():
    model, x = model_and_input()
    families = (fake_family(wrong=True, edges=(8,)), fake_family(name="right", edges=(8,)))
    merged = merge(model, x, "kernels", rates=replace(RATES, reached={"right": (0.01, 0.01)}), families=families)
    refused = [one for one in merged.decisions if one.how == "refused"]
    assert {one.path.partition("/")[0] for one in refused} == {"fake"}
    assert all("its output is wrong" in one.why for one in refused)
    assert {one.path.partition("/")[0] for one in executed(merged)} == {"right", "library"}
    assert "refused, bricks of 8×8 by fake/" in merged.explain()
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)


def test_by_kernels_alone_a_single_layer_is_our_own_kernels_too():
    def single(problem):
        if len(problem.description.sequence.layers) == 1 and problem.description.sequence.channels(0) == 8:
            label = f"single_{problem.description}"
            yield FakeKernel(label, problem.description, label, 128, 1024, (8, 8), packed)

    model, x = model_and_input()
    family = Family("fake", "padded", single)
    merged = merge(model, x, "kernels", rates=SLOW_KERNELS, families=(family,))
    assert sum(one.kernel is not None for one in executed(merged)) == 4
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("given_times")
def test_a_plan_that_time_cut_short_is_made_anew_where_there_is_more():
    model, x = model_and_input()
    given = {"rates": RATES, "families": (fake_family(),), "measure": True}
    first = merge(model, x, budget_s=1e-6, **given)
    assert not first.cached
    assert merge(model, x, budget_s=1e-6, **given).cached
    assert "the whole: not every range (no time for some layers or ranges" in first.explain()
    again = merge(model, x, budget_s=100.0, **given)
    assert not again.cached
    assert merge(model, x, budget_s=200.0, **given).cached
    assert merge(model, x, budget_s=1e-6, **given).cached


@pytest.mark.usefixtures("given_times")
def test_a_prediction_never_beats_a_measurement():
    """Of many bricks a few are measured; the others have their predictions alone, which are far too good."""
    from joulemark.merged.graph import trace
    from joulemark.merged.plan import Planner
    from joulemark.merged.setting import Setting

    model, x = model_and_input()
    families = (fake_family(edges=range(2, 22)),)
    planner = Planner(Setting(torch.device("cpu"), "fp32", RATES, families, True), forced=True)
    choices, _ = planner.plan(trace(model, (x,)))
    assert any(one.merged for one in choices)
    assert all(one.measured_s is not None for one in choices)
    tried = [one for trials in planner.ranges.found.values() for one in trials]
    assert any(one.measured_s is None and one.predicted_s is not None for one in tried)


@pytest.mark.usefixtures("given_times")
def test_a_range_that_adds_a_tensor_is_told_from_the_same_layers_without():
    from joulemark.merged.graph import trace
    from joulemark.merged.plan import Planner
    from joulemark.merged.setting import Setting
    from joulemark.merged_bench.judge import timed_of

    model, x = model_and_input()  # of its pair the second adds what the first reads
    planner = Planner(Setting(torch.device("cpu"), "fp32", RATES, (fake_family(),), True), forced=True)
    planner.plan(trace(model, (x,)))
    table = planner.ranges.table()
    pair = [one["adds"] for one in table if [layer["in_channels"] for layer in one["layers"]] == [8]]
    assert set(pair) == {True, False}
    measured = [one for one in table if one["measured_s"] is not None]
    assert timed_of({"rivals": {"padded": {"candidates": table}}}) == measured


def test_a_second_merge_takes_its_plan_from_the_disk(monkeypatch):
    model, x = model_and_input()
    first = merge(model, x, rates=RATES, families=(fake_family(),), measure=True)
    monkeypatch.setattr("joulemark.merged.measuring.race", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr("joulemark.merged.whole.race_calls", lambda *_: pytest.fail("measured again"))
    second = merge(model, x, rates=RATES, families=(fake_family(),), measure=True)
    assert (first.cached, second.cached) == (False, True)
    assert second.variant == first.variant
    assert second.decisions == first.decisions
    torch.testing.assert_close(second(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_plan_from_the_disk_copies_weights_for_its_graph_and_for_the_referee_of_new_ones_alone(
    simulated_gpu, monkeypatch
):
    model, x = model_and_input()
    merged_there(model, x)
    copies, own = [], nn.Parameter.__deepcopy__
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", lambda self, memo: copies.append(self) or own(self, memo))
    assert merged_there(model, x).cached
    assert len(copies) == len(list(model.parameters()))
    with torch.no_grad():
        model.d.bias[0] += 1
    assert merged_there(model, x).cached
    assert len(copies) == 3 * len(list(model.parameters()))


def test_other_shapes_and_other_weights_shapes_are_other_plans():
    model, x = model_and_input()
    keys = set()
    for inputs, given in ((x, model), (x[:1], model), (x, nn.Sequential(model))):
        graph = torch.fx.symbolic_trace(nn.Identity())
        from joulemark.merged.setting import Setting

        setting = Setting(torch.device("cpu"), "fp32", RATES, (), False)
        keys.add(_Automatic(given, graph, (inputs,), setting, 0.0, 1.0).key)
    assert len(keys) == 3


@pytest.mark.parametrize("measure", [False, True])
def test_by_a_depth_of_one_every_layer_stays_alone_and_that_is_a_plan_of_its_own(measure):
    model, x = model_and_input()
    given = {"rates": RATES, "families": (fake_family(),), "measure": measure, "budget_s": 1e4}
    depths = (6, 1, 2, 6, 1)
    merged = [merge(model, x, depth=depth, **given) for depth in depths]
    assert [one.cached for one in merged] == [False, False, False, measure, measure]
    for depth, one in zip(depths, merged, strict=True):
        assert max((len(part.sequence.layers) for part in executed(one)), default=1) <= depth
        torch.testing.assert_close(one(x), model(x), rtol=1e-4, atol=1e-5)
    forced = merge(model, x, "kernels", rates=RATES, families=(fake_family(),), depth=1)
    assert [len(one.sequence.layers) for one in executed(forced)] == [1] * 6


@pytest.mark.usefixtures("given_times")
def test_a_broken_entry_is_measured_again(tmp_path):
    model, x = model_and_input()
    merge(model, x, rates=RATES, families=(fake_family(),), measure=True)
    for path in cache.folder().glob("*.json"):
        path.write_text("{")
    assert not merge(model, x, rates=RATES, families=(fake_family(),), measure=True).cached


@pytest.mark.usefixtures("given_times")
def test_a_cache_that_cannot_be_written_costs_the_cache_alone(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "below"))
    model, x = model_and_input()
    merged = merge(model, x, rates=RATES, families=(fake_family(),), measure=True)
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)


def test_paths_of_a_layer_on_a_cpu_are_torchs_own():
    layer = Conv(8, 8, (3, 3), (1, 1), (1, 1), (1, 1), activation="relu")
    assert library_paths(layer, False, torch.device("cpu"), "fp32") == ("library",)
    assert library_paths(layer, False, torch.device("cuda"), None) == ("library",)
    on_gpu = library_paths(layer, False, torch.device("cuda"), "bf16")
    assert on_gpu[0] == "fused"
    assert "library" in on_gpu


def planner_there(model, x, deadline=float("inf")):
    """A planner as on a GPU, and the model's graph."""
    from joulemark.merged.merged_model import traced_or_reason
    from joulemark.merged.plan import Planner
    from joulemark.merged.setting import Setting

    setting = Setting(torch.device("cuda"), "fp32", RATES, (fake_family(),), True, deadline)
    return Planner(setting), traced_or_reason(model, (x,))


def test_what_is_measured_was_compiled_before_each_kernel_once_and_layers_alone_come_first(simulated_gpu, monkeypatch):
    from joulemark.merged import builds, measuring

    built: list[str] = []
    measured: list[set[str]] = []

    def race(calls, _):
        names = {path.partition("/")[2] for path in calls if "/" in path}
        assert names <= set(built)
        measured.append(names)
        return dict.fromkeys(calls, 1e-3)

    monkeypatch.setattr(builds, "compiler_for", lambda _: lambda kernel: built.append(kernel.name))
    monkeypatch.setattr(measuring, "race", race)
    planner, graph = planner_there(*model_and_input())
    planner.plan(graph)
    ranges = [names for names in measured if names]
    assert len(ranges) > 1
    assert not any(measured[: -len(ranges)])
    assert set().union(*ranges) <= set(built)
    assert len(built) == len(set(built))
    assert not planner.ranges.cut


class Alike(nn.Module):
    """Two layers of the same channels, of which one adds."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return torch.relu(self.b(torch.relu(self.a(x))) + x)


def test_kernels_of_one_name_are_each_compiled_before_they_are_measured(simulated_gpu, monkeypatch):
    from joulemark.merged import builds, ranges
    from joulemark.merged.families import known_families

    built: list[tuple[str, str]] = []
    asked: list[tuple[str, str]] = []

    def measure(_, trials, __):
        texts = [one.kernel.text for one in trials if one.kernel]
        assert {*texts} <= {*built}
        asked.extend(texts)
        return True

    monkeypatch.setattr(builds, "compiler_for", lambda _: lambda kernel: built.append(kernel.text))
    monkeypatch.setattr(ranges, "measure", measure)
    monkeypatch.setattr(Setting, "capability", 90)
    planner, graph = planner_there(Alike().eval().bfloat16(), torch.randn(2, 16, 33, 29).bfloat16())
    planner.setting = replace(planner.setting, form="bf16", families=known_families())
    planner.ranges.setting = planner.setting
    planner.plan(graph)
    assert len({name for name, _ in asked}) < len({*asked})
    assert len(built) == len({*built})


def test_the_range_that_saves_most_is_measured_first(simulated_gpu, monkeypatch):
    from joulemark.merged.builds import Builds
    from joulemark.merged.graph import find_chains
    from joulemark.merged.ranges import Ranges

    order: list[float] = []
    trials = Ranges.trials

    def recorded(self, segment, apart):
        found = trials(self, segment, apart)
        kernels = [one.predicted_s for one in found if one.kernel]
        if kernels and apart < float("inf"):
            order.append(apart - min(kernels))
        return found

    planner, graph = planner_there(*model_and_input())
    chains, _ = find_chains(graph)
    builds = Builds(None)
    planner._rank(chains, builds)
    singles = [[planner._single(unit) for unit in chain] for chain in chains]
    monkeypatch.setattr(Ranges, "trials", recorded)
    planner._measure_ranges(chains, singles, builds)
    assert order == sorted(order, reverse=True)
    assert len(order) > 1


def test_kernels_that_are_not_compiled_in_time_lose_their_range_and_no_more(simulated_gpu, monkeypatch):
    """Of two kernels one takes its compiler for ever: the others are merged, and the plan knows that it was cut."""
    import time
    from threading import Event

    from joulemark.merged import builds

    ever = Event()
    slow: list[str] = []

    def compile_(kernel):
        if not slow:
            slow.append(kernel.name)
        if kernel.name == slow[0]:
            ever.wait(10.0)

    monkeypatch.setattr(builds, "compiler_for", lambda _: compile_)
    planner, graph = planner_there(*model_and_input(), deadline=time.monotonic() + 4.0)
    choices, _ = planner.plan(graph)
    ever.set()
    tried = {one.path.partition("/")[2] for trials in planner.ranges.found.values() for one in trials if one.measured_s}
    assert slow[0] not in tried
    assert planner.ranges.cut
    assert any(one.merged for one in choices)


@pytest.mark.parametrize(
    ("counted_s", "whole_s", "places", "beaten"),
    [
        (10e-6, 9e-6, [(0, 0, 2)], True),
        (10e-6, 9.5e-6, [(0, 0, 2)], False),  # within what predictions cannot tell apart
        (None, 9e-6, [(0, 0, 2)], False),  # predicted by a roofline alone
        (10e-6, None, [(0, 0, 2)], False),  # the longer one was not measured
        (10e-6, 9e-6, [(0, 0, 2), (1, 0, 2)], False),  # it stands elsewhere too, by itself
    ],
)
def test_a_range_that_a_longer_one_beats_is_not_measured(simulated_gpu, counted_s, whole_s, places, beaten):
    from joulemark.merged.trials import Trial

    planner, _ = planner_there(*model_and_input())
    kernel = object()
    planner.ranges.candidates["front"] = [Trial("f/1", "padded", None, kernel, None, counted_s=counted_s)]
    planner.ranges.found["whole"] = [Trial("f/2", "padded", None, kernel, None, measured_s=whole_s, counted_s=1e-6)]
    assert planner._beaten("front", {(0, 0, 3): "whole", **dict.fromkeys(places, "front")}) is beaten


def test_ranges_that_there_is_no_time_to_rank_are_not_merged(simulated_gpu):
    planner, graph = planner_there(*model_and_input(), deadline=0.0)
    choices, _ = planner.plan(graph)
    assert {one.path for one in choices} == {"library"}
    assert planner.ranges.cut


@pytest.mark.parametrize("right", [True, False])
def test_layers_that_there_is_no_time_to_measure_are_cudnns_where_that_works(simulated_gpu, monkeypatch, right):
    from joulemark.merged import paths
    from joulemark.merged.bricks import CONVOLUTIONS, finished

    called: list[object] = []

    def fused(layer, x, residual, weight, bias):
        called.append((layer, residual is None))
        y = CONVOLUTIONS[2](x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
        return finished(layer, y, residual) + (0 if right else 1)

    monkeypatch.setattr(paths, "_fused", fused)
    model = nn.Sequential(*(one for _ in range(3) for one in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())))
    model.append(nn.Conv2d(4, 4, 1, 2))
    planner, graph = planner_there(model.eval(), torch.randn(2, 4, 9, 11), deadline=0.0)
    choices, _ = planner.plan(graph)
    assert [one.path for one in choices] == [*["fused" if right else "library"] * 3, "library"]
    assert [one.measured_s for one in choices] == [None] * 4
    assert len(set(called)) == 1
    assert len(called) == (1 if right else 2), "once for a shape; once more with other weights where that was wrong"


def test_layers_that_a_kernel_of_ours_may_convolve_are_measured_first(simulated_gpu, monkeypatch):
    """A light first convolution before heavy ones that only a library has: time may be up before the last of these."""
    from joulemark.merged import paths

    order: list[int] = []
    monkeypatch.setattr(paths, "has_triton", lambda: True)
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)]
    model = nn.Sequential(*(one for layer in layers for one in (layer, nn.ReLU()))).eval()
    planner, graph = planner_there(model.to(torch.bfloat16), torch.randn(2, 3, 17, 19).to(torch.bfloat16))
    planner.setting = replace(planner.setting, form="bf16", families=())
    planner.ranges.setting = planner.setting
    monkeypatch.setattr(planner, "_measure_alone", lambda some, _: order.extend(_inputs(one) for one in some))
    planner.plan(graph)
    assert order == [3, 16, 8]


def _inputs(segment):
    return segment.sequence.layers[0].in_channels


@pytest.mark.parametrize("right", [True, False])
def test_layers_without_a_turn_end_in_an_epilogue_where_that_works(simulated_gpu, monkeypatch, right):
    from joulemark.merged import paths
    from joulemark.merged.bricks import CONVOLUTIONS, finished

    def epilogue(recipe, layer, x, residual, weight, bias):
        y = CONVOLUTIONS[2](x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
        return finished(layer, y, residual) + (0 if right else 1)

    monkeypatch.setattr(paths, "has_triton", lambda: True)
    monkeypatch.setattr(paths.Recipe, "_epilogue", epilogue)
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()).eval()
    planner, graph = planner_there(model, torch.randn(2, 8, 9, 11), deadline=0.0)
    [choice] = planner.plan(graph)[0]
    assert choice.path == ("epilogue" if right else "library")


@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_pointwise_convolution_as_a_matrix_product(activation, bias, dimensions):
    from joulemark.merged.bricks import Parameters, run_plain
    from joulemark.merged.sequence import Sequence

    torch.manual_seed(3)
    ones, zeros = (1,) * dimensions, (0,) * dimensions
    sequence = Sequence((Conv(6, 10, ones, ones, zeros, ones, activation=activation),))
    parameters = [Parameters(torch.randn(10, 6, *ones), torch.randn(10) if bias else None)]
    x = torch.randn(2, 6, *(5, 4, 3)[:dimensions])
    module = Executed(sequence, parameters, "product", False)
    torch.testing.assert_close(module(x), run_plain(sequence, parameters, x), rtol=1e-5, atol=1e-5)


class Projected(nn.Module):
    """A bottleneck that changes its channels, and what follows it."""

    def __init__(self, stride=1, bias=True):
        super().__init__()
        self.reduce, self.inside = nn.Conv2d(6, 4, 1), nn.Conv2d(4, 4, 3, stride, 1)
        self.expand, self.project = nn.Conv2d(4, 8, 1, bias=bias), nn.Conv2d(6, 8, 1, stride)
        self.next = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        y = self.expand(torch.relu(self.inside(torch.relu(self.reduce(x)))))
        y = torch.relu(y + self.project(x))
        return y + self.next(y)


@pytest.mark.parametrize(("stride", "bias"), [(1, True), (1, False), (2, True)])
def test_a_projection_around_a_bottleneck_is_a_part_of_its_last_layer(stride, bias):
    torch.manual_seed(5)
    model, x = Projected(stride, bias).eval().requires_grad_(False), torch.randn(2, 6, 9, 11)
    merged = merge(model, x, "kernels", rates=RATES, families=(fake_family(),))
    assert merged.failed is None
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)
    joined = [
        one
        for one in merged.modules()
        if isinstance(one, Executed) and [layer.joined for layer in one.sequence.layers] == [None, None, 0]
    ]
    assert len(joined) == (stride == 1)
    told = "project … expand" in merged.explain()
    assert told is (stride == 1)


def test_a_compiler_sees_a_segment_as_one_operator():
    model, x = model_and_input()
    merged = merge(model, x, rates=RATES, families=(fake_family(),))
    with torch.no_grad():
        exported = torch.compile(merged.inner, backend="eager", dynamic=False)(x)
    torch.testing.assert_close(exported, model(x), rtol=1e-4, atol=1e-5)


def test_a_layer_alone_takes_our_own_kernel_where_there_is_one():
    from joulemark.merged.graph import find_chains, trace
    from joulemark.merged.plan import Planner
    from joulemark.merged.setting import Setting

    def single(problem):
        if problem.description.sequence.channels(0) == 8:
            label = f"single_{problem.description}"
            yield FakeKernel(label, problem.description, label, 128, 1024, (8, 8), packed)

    model, x = model_and_input()
    graph = trace(model, (x,))
    setting = Setting(torch.device("cpu"), "fp32", RATES, (Family("single", "padded", single),), False)
    planner = Planner(setting)
    paths = {unit.convolution.name: planner.own_choice(unit).path for chain in find_chains(graph)[0] for unit in chain}
    assert paths["stem"] == "library"
    assert paths["a"].startswith("single/single_")


def test_what_names_a_segment_in_a_compiled_graph_does_not_depend_on_weights_or_process():
    """So a compiler's cache on disk knows the graph again, and two models of one shape keep their own weights."""
    from joulemark.merged.bricks import Parameters
    from joulemark.merged.sequence import Sequence

    layer = Conv(4, 6, (1, 1), (1, 1), (0, 0), (1, 1), activation="silu")
    made = [Parameters(torch.randn(6, 4, 1, 1), torch.randn(6)) for _ in range(2)]
    first, second = (Executed(Sequence((layer,)), [one], "product", False) for one in made)
    assert first.number == second.number == 44129151803640490
    assert Executed(Sequence((layer,)), made[:1], "library", False).number != first.number
    x = torch.randn(1, 4, 3, 3)
    outs = [torch.ops.joulemark.executed(x, None, None, one.weight, one.bias, one.number) for one in (first, second)]
    assert torch.equal(outs[0], first.run(x, None))
    assert not torch.equal(*outs)


GRAPHS = [
    "graph", "folded graph", "folded branches graph", "compiled graph", "folded compiled graph",
    "compiled tuned graph", "folded compiled tuned graph",
]  # fmt: skip
NO_GRAPHS = ["launches", "folded", "compiled", "folded compiled", "compiled tuned", "folded compiled tuned"]


@pytest.mark.parametrize(
    "best", ["launches", "graph", "folded branches graph", "compiled graph", "folded compiled tuned graph"]
)
def test_whatever_is_fastest_of_all_rivals_comes_back_and_again_from_the_disk(simulated_gpu, best):
    simulated_gpu.times[best] = simulated_gpu.on_device[best] = 0.9
    fastest = best if best in GRAPHS else "graph"
    model, x = model_and_input()
    first = merged_there(model, x)
    assert (first.variant, first.captured) == (best, fastest)
    assert simulated_gpu.replayed == GRAPHS
    assert sorted(simulated_gpu.called) == sorted([*NO_GRAPHS, fastest])
    # CuDNN's fused kernels do not run on this CPU: they are out, with the reason, and cost nothing else.
    assert set(first.problems) == {"fused graph"}
    rival = best.startswith("folded")
    assert ("the whole model: plain" in first.explain()) == rival
    assert bool(executed(first)) != rival
    second = merged_there(model, x)
    assert second.cached
    assert (second.variant, second.captured) == (best, fastest)
    assert (second.times, second.device_times) == (first.times, first.device_times)
    assert len(simulated_gpu.replayed) == len(GRAPHS), "what comes from the disk is not measured again"
    for one in (first, second):
        torch.testing.assert_close(one(x), model(x), rtol=1e-4, atol=1e-5)


def test_as_good_without_a_compiler_is_better(simulated_gpu):
    simulated_gpu.on_device |= {"folded compiled graph": 0.500, "graph": 0.504, "compiled graph": 0.495}
    simulated_gpu.times |= {"compiled graph": 0.5, "launches": 0.504}
    first = merged_there(*model_and_input())
    assert (first.variant, first.captured) == ("launches", "compiled graph")
    simulated_gpu.on_device["graph"] = 0.499
    second = merged_there(*model_and_input(3))
    assert (second.variant, second.captured) == ("launches", "graph")
    simulated_gpu.times |= {"graph": 0.504, "launches": 0.506, "compiled": 0.5}
    assert merged_there(*model_and_input(4)).variant == "graph"


def test_no_compiler_begins_late_and_none_tunes_in_a_short_budget(simulated_gpu):
    merged = merged_there(*model_and_input(), budget_s=50.0, spent_s=46.0)
    assert simulated_gpu.called == ["launches", "folded", "graph"]
    assert simulated_gpu.replayed == ["graph", "folded graph", "folded branches graph"]
    assert merged.problems["compiled"].startswith("no time: compiling is expected to take")
    assert re.search(r"of budget_s=50 [01] s are left", merged.problems["folded compiled graph"])
    assert merged.problems["compiled"] in merged.explain()
    merged_there(*model_and_input(3), budget_s=50.0)
    assert "compiled graph" in simulated_gpu.replayed
    assert not any("tuned" in name for name in simulated_gpu.replayed + simulated_gpu.called)


def automatic_of(calls, budget_s=50.0, spent_s=0.0):
    """One that has nothing but graphs of so many calls each, as merged and as folded."""
    import time

    from joulemark.merged import automatic

    def graph(count):
        made = torch.fx.Graph()
        node = made.placeholder("x")
        for _ in range(count):
            node = made.call_function(torch.relu, (node,))
        made.output(node)
        return torch.fx.GraphModule(nn.Module(), made)

    one = object.__new__(_Automatic)
    one.begin, one.budget_s = time.monotonic() - spent_s, budget_s
    one.compiling_s, one.graph = dict(automatic._COMPILING_S), graph(calls[1])
    return one, graph(calls[0])


@pytest.mark.parametrize(
    ("calls", "spent_s", "may", "may_then"),
    [
        ((20, 120), 20.0, True, True),  # 6 s, 18 s of the 27.5 s that are left
        ((20, 120), 35.0, True, False),
        ((120, 120), 32.0, False, False),
        ((20, 20), 46.0, False, False),
    ],
)
def test_a_compiler_begins_only_if_it_is_expected_to_end_in_time(calls, spent_s, may, may_then):
    automatic, rewritten = automatic_of(calls, spent_s=spent_s)
    assert (automatic._why_not_compile("compiled", rewritten) is None) is may
    assert (automatic._why_not_compile("folded compiled", rewritten) is None) is may_then


def test_what_a_compiler_took_says_what_the_next_one_takes():
    automatic, rewritten = automatic_of((20, 120), spent_s=20.0)
    assert automatic._why_not_compile("folded compiled", rewritten) is None
    automatic._learn_compiling("compiled", rewritten, 10.0)  # 0.2 s for each of 50: 30 s for 150
    assert "expected to take 30 s" in automatic._why_not_compile("folded compiled", rewritten)
    assert automatic._why_not_compile("compiled", rewritten) is None
    automatic, rewritten = automatic_of((20, 120), spent_s=20.0, budget_s=180.0)
    automatic._learn_compiling("compiled", rewritten, 50.0)
    assert automatic._why_not_compile("compiled tuned", rewritten) is None, "each mode has its own"


def test_what_merging_spent_is_told_by_its_parts_of_a_plan_from_the_disk_too(simulated_gpu):
    merged = merged_there(*model_and_input())
    measuring = {"ranking", "own kernels", "layers", "ranges", "compiled", "judging"}
    assert measuring | {"launches", "graph"} <= set(merged.spent_s)
    assert all(seconds >= 0 for seconds in merged.spent_s.values())
    again = merged_there(*model_and_input())
    assert again.cached
    assert {"rewriting", "graph"} <= set(again.spent_s)
    assert not measuring & set(again.spent_s)


def test_a_compiler_that_warns_is_not_lost_where_warnings_are_errors(simulated_gpu, monkeypatch):
    import warnings

    from joulemark.merged import automatic

    def warn(inner, mode):
        warnings.warn("torch.jit is deprecated", FutureWarning, stacklevel=1)
        return Wrapped(inner, mode)

    monkeypatch.setattr(automatic, "Compiled", warn)
    assert set(merged_there(*model_and_input()).problems) == {"fused graph"}


def test_a_compiler_that_fails_leaves_the_others(simulated_gpu, monkeypatch):
    from joulemark.merged import automatic

    def fail(inner, mode):
        raise TypeError("unhashable\nsomething")

    monkeypatch.setattr(automatic, "Compiled", fail)
    model, x = model_and_input()
    merged = merged_there(model, x)
    assert merged.problems["compiled"] == merged.problems["compiled graph"] == "TypeError: unhashable"
    assert "the whole: not compiled (TypeError: unhashable)" in merged.explain()
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("loading fake: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_what_had_no_memory_is_measured_again_next_time(simulated_gpu, monkeypatch, error):
    from joulemark.merged import measuring
    from joulemark.merged.merged_model import traced_or_reason
    from joulemark.merged.plan import Planner
    from joulemark.merged.setting import Setting

    checked = measuring._checked

    def scarce(segment, one, *more):
        if one.kernel is not None:
            raise error
        return checked(segment, one, *more)

    def merged_segments():
        graph = traced_or_reason(model, (x,))
        setting = Setting(torch.device("cuda"), "fp32", RATES, (fake_family(),), True)
        return [one for one in Planner(setting).plan(graph)[0] if one.merged]

    model, x = model_and_input()
    monkeypatch.setattr(measuring, "_checked", scarce)
    assert not merged_segments()
    monkeypatch.setattr(measuring, "_checked", checked)
    assert merged_segments()


def test_a_race_for_which_a_library_had_no_memory_costs_no_merging(simulated_gpu, monkeypatch):
    from joulemark.merged import measuring

    def scarce(*_):
        raise RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")

    monkeypatch.setattr(measuring, "race", scarce)
    merged = merged_there(*model_and_input())
    assert not any(one.measured_s for one in merged.decisions)


def test_a_layer_whose_every_path_failed_stays_with_torchs_operators(simulated_gpu, monkeypatch):
    from joulemark.merged import measuring
    from joulemark.merged.merged_model import traced_or_reason
    from joulemark.merged.plan import Planner
    from joulemark.merged.setting import Setting

    def scarce(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measuring, "_checked", scarce)
    setting = Setting(torch.device("cuda"), "fp32", RATES, (fake_family(),), True)
    model, x = model_and_input()
    choices, _ = Planner(setting).plan(traced_or_reason(model, (x,)))
    assert {one.path for one in choices} == {"library"}


def test_a_measured_time_is_of_one_text_of_its_kernel():
    pytest.importorskip("triton")
    from joulemark.merged import measuring
    from joulemark.merged.trials import Trial

    own, library = (Trial(path, "unmerged", None, None, None) for path in ("tiles 64x64", "library"))
    assert "def _product" in measuring._text_of(own)
    assert measuring._text_of(library) is None


def test_kernels_of_our_own_are_compiled_once_for_all_layers_that_share_them(monkeypatch):
    pytest.importorskip("triton")
    from joulemark.merged import builds
    from joulemark.merged.graph import find_chains, range_segment, trace
    from joulemark.merged.setting import Setting
    from joulemark.merged.trials import candidates_of

    compiled: list[tuple[str, str]] = []
    monkeypatch.setattr(builds, "_run_small", lambda segment, path, _: compiled.append((segment.name, path)))
    with torch.device("meta"):
        channels, activations = (256, 128, 64, 64), (nn.SiLU(), nn.SiLU(), nn.ReLU6())
        convolutions = (nn.Conv2d(one, other, 1) for one, other in itertools.pairwise(channels))
        layers = itertools.chain(*zip(convolutions, activations, strict=True))
        graph = trace(nn.Sequential(*layers).eval().bfloat16(), (torch.empty(2, 256, 9, 9, dtype=torch.bfloat16),))
    segments = [range_segment([unit]) for chain in find_chains(graph)[0] for unit in chain]
    setting = Setting(torch.device("cuda"), "bf16", None, (), True)
    trials = ((one, trial) for one in segments for trial in candidates_of(one, setting))
    with builds.compiling_own(trials, setting):
        pass
    paths = {"0": ("epilogue", "tiles 64x128", "tiles 64x64"), "4": ("epilogue", "tiles 64x64")}  # "2" has those of "0"
    assert sorted(compiled) == [(name, path) for name, those in paths.items() for path in those]


@pytest.mark.parametrize(("capability", "only"), [(90, {None, 90}), (80, {None}), (120, {None})])
def test_no_kernel_is_compiled_for_a_gpu_that_lacks_its_instructions(monkeypatch, capability, only):
    from joulemark.merged.families import known_families
    from joulemark.merged.graph import trace
    from joulemark.merged.plan import Planner
    from joulemark.merged.setting import Setting

    monkeypatch.setattr(Setting, "capability", capability)
    with torch.device("meta"):
        layers = [part for _ in range(2) for part in (nn.Conv3d(16, 16, 3, padding=1), nn.ReLU())]
        graph = trace(nn.Sequential(*layers).eval().bfloat16(), (torch.empty(1, 16, 9, 9, 9, dtype=torch.bfloat16),))
    wanted = Planner(Setting(torch.device("meta"), "bf16", None, known_families(), True)).wanted(graph)
    assert {one.only for one in wanted} == only


def test_what_is_joined_by_name_or_as_one_list_is_left_as_it_is():
    from joulemark.merged.seams import keep_channels_last

    class Joined(nn.Module):
        def forward(self, x):
            return torch.cat(torch.cat(tensors=(x, x), dim=1).chunk(2, 1), 1)

    graph = torch.fx.symbolic_trace(Joined())
    assert keep_channels_last(graph, (torch.randn(1, 2, 3, 3),)) == 0


class PositionWise(nn.Module):
    """A block of ConvNeXt as people write it by methods, a scale for each channel behind it."""

    def __init__(self, scaled):
        super().__init__()
        self.wide, self.thin = nn.Linear(6, 24), nn.Linear(24, 6)
        self.scale = nn.Parameter(torch.rand(*scaled))

    def forward(self, x):
        y = self.thin(nn.functional.silu(self.wide(x.permute(0, 2, 3, 1))))
        return self.scale * y.permute(0, 3, 1, 2) + x


@pytest.mark.parametrize(("scaled", "products"), [((6, 1, 1), 0), ((1, 5, 4), 1), ((1, 6, 1, 1), 1)])
def test_linear_layers_over_positions_are_convolutions_with_all_that_follows(scaled, products):
    torch.manual_seed(8)
    model, x = PositionWise(scaled).eval(), torch.randn(2, 6, 5, 4).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        merged = merge(model, x, rates=RATES, families=(Family("none", "padded", lambda problem: ()),))
        torch.testing.assert_close(merged(x), model(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(merged(x[:1]), model(x[:1]), rtol=1e-5, atol=1e-6)
    assert [len(one.sequence.layers) for one in executed(merged)] == [1, 1]
    targets = [str(node.target) for node in merged.inner.graph.nodes]
    assert sum("mul" in one for one in targets) == products
    assert not any("permute" in one for one in targets)


class Gated(nn.Module):
    """Squeeze-and-excitation in front of a projection; ``read_twice``: what is pooled is part of the output too."""

    def __init__(self, gate, read_twice=False, activation=torch.relu):
        super().__init__()
        self.first, self.second, self.project = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1), nn.Conv2d(8, 4, 1)
        self.gate, self.read_twice, self.activation = gate, read_twice, activation

    def forward(self, x):
        pooled = nn.functional.adaptive_avg_pool2d(x, 1)
        y = self.project(self.gate(self.second(self.activation(self.first(pooled)))) * x)
        return y + pooled[:, :4] if self.read_twice else y


def test_an_excitation_whose_kernels_do_not_work_is_left_to_torch():
    excitation = Excitation(nn.Conv2d(8, 2, 1), "silu", nn.Conv2d(2, 8, 1), hard=False)
    excitation.own = True  # whatever this machine has

    def right(x):
        assert x.shape == (2, 8, 3, 3)
        return excitation.cpu()(x)

    def refused(x):
        raise RuntimeError("no such register\nand more")

    with torch.no_grad():
        assert excitation.prove() is None  # there is no GPU to try them on
        assert excitation.prove(right) is None
        assert excitation.own
        assert excitation.prove(refused) == "RuntimeError: no such register"
        assert not excitation.own
        for wrong in (lambda x: right(x) * 1.1, lambda x: right(x) * torch.nan):
            excitation.own = True
            assert "off" in excitation.prove(wrong)
            assert not excitation.own


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (Gated(torch.sigmoid), 1),
        (Gated(lambda x: x.sigmoid(), activation=nn.functional.silu), 1),
        (Gated(nn.functional.hardsigmoid), 1),
        (Gated(torch.tanh), 0),
        (Gated(torch.sigmoid, read_twice=True), 0),
        (Gated(torch.sigmoid, activation=torch.exp), 0),
    ],
)
def test_what_is_and_what_is_not_a_squeeze_and_excitation(model, found):
    torch.manual_seed(9)
    model, x = model.eval(), torch.randn(3, 8, 6, 5)
    with torch.no_grad():
        merged = merge(model, x, rates=RATES, families=(Family("none", "padded", lambda problem: ()),))
        torch.testing.assert_close(merged(x), model(x), rtol=1e-5, atol=1e-6)
    assert merged.explain().count("squeeze-and-excitation") == found
    # The product with a gate is in the projection, whatever the gate comes from.
    assert sum("gate" in node.kwargs for node in merged.inner.graph.nodes) == 1


class Pooled(nn.Module):
    """Poolings that a kernel has, and some that none has."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.largest = nn.MaxPool2d(3, 2, 1)
        self.mean = nn.AvgPool2d((2, 3), 1, (1, 0), count_include_pad=False)
        self.upwards, self.spread = nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, 1, dilation=2)

    def forward(self, x):
        y = self.upwards(self.spread(self.mean(self.largest(torch.relu(self.first(x))))))
        return torch.relu(self.second(y))


@pytest.mark.parametrize("works", [True, False])
def test_poolings_are_kernels_where_these_are_right(simulated_gpu, monkeypatch, works):
    from joulemark.merged.pooling import Pooling

    if not works:
        monkeypatch.setattr(Pooling, "forward", lambda self, x: self.in_operators(x) + (x.shape[0] == 2 and self.own))
    model, x = Pooled().eval(), torch.randn(3, 3, 33, 29)
    merged = merged_there(model, x)
    found = [one for one in merged.modules() if isinstance(one, Pooling)]
    assert [(one.largest, one.kernel) for one in found] == [(True, (3, 3)), (False, (2, 3))]
    assert all(one.own for one in found) is works
    assert [one.name for one in merged.decisions if one.how == "pooling"] == ["largest", "mean"]
    assert ("largest: pooling (by one kernel)" in merged.explain()) is works
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)
