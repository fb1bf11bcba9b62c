"""``merge`` on models: what it finds, what it leaves, and that outputs stay."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torchvision import models

from joulemark.merged import MergedSequence, merge
from joulemark.merged.families import Family
from joulemark.merged.graph import find_chains, find_segments, range_segment, trace
from tests.merged.fakes import RATES


class Block(nn.Module):
    """A residual block with everything that tracing must see through."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        y = self.drop(self.act(self.norm(self.first(x))))
        y = self.second(y)
        y += x
        return torch.relu(y)


def settled(model, *shape):
    """With batch norms that do something."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.track_running_stats:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.double().eval(), torch.randn(*shape, dtype=torch.float64)


def merged_parts(merged):
    return [one for one in merged.modules() if isinstance(one, MergedSequence)]


@pytest.mark.parametrize("strategy", ["padded", "memoized"])
def test_a_residual_block_becomes_one_sequence(strategy):
    model, x = settled(Block(4), 3, 4, 11, 9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    merged = merge(model, x, strategy, edge=4)
    (part,) = merged_parts(merged)
    assert [one.activation for one in part.sequence.layers] == ["relu", "relu"]
    assert part.sequence.layers[1].residual == 0
    torch.testing.assert_close(merged(x), model(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(merged(x[:1]), model(x[:1]), rtol=1e-10, atol=1e-10)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert merged.explain() == f"first … second: {strategy}, bricks of 4×4 (asked for)"


@pytest.mark.parametrize(
    ("name", "sequences", "layers"), [("resnet50", 8, 48), ("mobilenet_v2", 1, 52), ("vgg16", 5, 13)]
)
def test_the_sequences_of_a_network(name, sequences, layers):
    """Their outputs are in ``test_networks``; here no weight is made."""
    with torch.device("meta"):
        model, x = models.get_model(name, weights=None).eval(), torch.empty(1, 3, 64, 64)
    found, _ = find_segments(trace(model, (x,)))
    assert (len(found), sum(len(one.sequence.layers) for one in found)) == (sequences, layers)


def test_an_intermediate_that_is_read_elsewhere_ends_the_sequence():
    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))

        def forward(self, x):
            y = self.b(self.a(x))
            return self.c(y) * y

    model, x = settled(Forked(), 1, 2, 8, 8)
    merged = merge(model, x, "memoized", edge=4)
    (part,) = merged_parts(merged)
    assert len(part.sequence.layers) == 2
    torch.testing.assert_close(merged(x), model(x))
    assert "c: plain (what reads its output is not one other convolution alone)" in merged.explain()


class Behind(nn.Module):
    """DarkNet's block, a projection added behind an activation, and what no activation stands before."""

    def __init__(self):
        super().__init__()
        self.around, self.linear = nn.Conv2d(4, 6, 1), nn.Conv2d(6, 6, 1)
        self.block = nn.ModuleList(nn.Conv2d(*of) for of in ((4, 2, 1), (2, 4, 3, 1, 1)))
        self.widened = nn.ModuleList(nn.Conv2d(*of) for of in ((4, 4, 1), (4, 4, 3, 1, 1), (4, 6, 1)))
        self.leaky = nn.LeakyReLU(0.1)

    def forward(self, x):
        y = x
        for one in self.block:
            y = self.leaky(one(y))
        x = z = x + y
        for one in self.widened:
            z = torch.relu(one(z))
        z += self.around(x)
        return z + self.linear(z)


def test_what_is_added_behind_an_activation_is_a_part_of_its_layer():
    model, x = settled(Behind(), 2, 4, 7, 9)
    graph = trace(model, (x,))
    chains, _ = find_chains(graph)
    units = {str(one.convolution.target): one for chain in chains for one in chain}
    adding = {name: one.adds_behind for name, one in units.items() if one.added is not None}
    assert adding == {"block.1": True, "widened.2": True, "linear": False}
    parts = [range_segment([units[f"{of}.{n}"] for n in range(count)]) for of, count in (("block", 2), ("widened", 3))]
    for part, residual in zip(parts, (0, None), strict=True):
        assert (part.sequence.layers[-1].residual, part.adds is None) == (residual, residual is not None)
        assert part.sequence.layers[-1].adds_behind
    # A projection goes into the last layer's product only where it is added before the activation.
    assert [len(chain) for chain in chains if units["around"] in chain] == [1]
    for strategy in ("padded", "memoized"):
        merged = merge(model, x, strategy, edge=4)
        assert [one.adds_behind for one in merged_parts(merged)[0].sequence.layers] == [False, True]
        torch.testing.assert_close(merged(x), model(x), rtol=1e-10, atol=1e-10)


class Sorted(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1


def test_weights_that_are_used_twice_are_changed_for_neither():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
            self.linear, self.scale = nn.Linear(3, 3), nn.Parameter(torch.rand(3, 1, 1))

        def forward(self, x):
            x = self.b(self.conv(torch.relu(self.a(self.conv(x)))))
            y = self.linear(self.linear(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
            return self.scale * y + x

    model, x = settled(Twice(), 2, 3, 8, 8)
    for strategy in ("padded", "auto"):
        merged = merge(model, x, strategy, families=(Family("none", "padded", lambda problem: ()),), rates=RATES)
        torch.testing.assert_close(merged(x), model(x), rtol=1e-10, atol=1e-10)


class Read(nn.Module):
    """A folded convolution's weights are read elsewhere, or are another layer's too; layers get their input by name."""

    def __init__(self):
        super().__init__()
        self.linear, self.thin = nn.Linear(3, 3), nn.Linear(3, 3)
        self.read, self.one, self.other = (nn.Conv2d(3, 3, 1) for _ in range(3))
        self.other.weight = self.one.weight
        self.norm, self.untracked = nn.BatchNorm2d(3), nn.BatchNorm2d(3, track_running_stats=False)
        self.scale = nn.Parameter(torch.rand(3, 1, 1))
        self.register_buffer("whole", torch.arange(1, 4).view(3, 1, 1))
        self.nothing = nn.Identity()

    def forward(self, x):
        y = nn.functional.conv2d(self.norm(input=self.read(input=x)), self.read.weight)
        y = self.untracked(self.other(self.one(self.nothing(input=y)) * self.scale) * self.whole)
        y = self.thin(self.linear(y.permute(0, 2, 3, 1)))
        return nn.functional.linear(y, self.thin.weight).permute(0, 3, 1, 2)


class Wider(nn.Module):
    """A scale in a wider format than the layer whose output it scales."""

    def __init__(self):
        super().__init__()
        self.linear, self.conv = nn.Linear(3, 3).float(), nn.Conv2d(3, 3, 1)
        self.scale = nn.Parameter(torch.rand(3, 1, 1).double())

    def forward(self, x):
        return self.conv(self.linear(x.float().permute(0, 2, 3, 1)).permute(0, 3, 1, 2)) * self.scale


@pytest.mark.parametrize("strategy", ["padded", "kernels"])
@pytest.mark.parametrize(("build", "error"), [(Read, 1e-10), (Wider, 1e-5)])
def test_weights_that_something_else_has_too_are_changed_for_the_layer_alone(build, error, strategy):
    x = torch.randn(2, 3, 4, 4).double()
    model = settled(build(), 2, 3, 4, 4)[0] if build is Read else build().eval()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    merged = merge(model, x, strategy, families=(Family("none", "padded", lambda problem: ()),), rates=RATES)
    assert merged.failed is None
    torch.testing.assert_close(merged(x), model(x), rtol=error, atol=error)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_an_excitation_of_an_image_without_a_batch_stays_as_it_is():
    class Gated(nn.Sequential):
        def forward(self, x):
            return x[0] * super().forward(x[0])

    layers = (nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 1), nn.Sigmoid())
    model, x = settled(Gated(*layers), 1, 4, 5, 3)
    merged = merge(model, x, "kernels", families=(Family("none", "padded", lambda problem: ()),), rates=RATES)
    assert merged.failed is None
    torch.testing.assert_close(merged(x), model(x), rtol=1e-10, atol=1e-10)


def test_a_model_that_cannot_be_traced_comes_back_working_with_the_reason():
    merged = merge(Sorted(), torch.ones(2))
    assert torch.equal(merged(torch.ones(2)), torch.full((2,), 2.0))
    assert not any(one.training for one in merged.modules())
    assert merged.explain().startswith("Sorted: plain (torch.fx cannot trace it: TraceError")
    assert re.search(r"\(test_merge\.py:\d+, in forward\)", merged.explain())


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_what_bricks_cannot_do_is_left_with_its_reason():
    circular = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")
    model, x = settled(nn.Sequential(circular, nn.Conv2d(2, 2, 4, padding="same"), nn.Conv2d(2, 2, 3)), 1, 2, 9, 9)
    merged = merge(model, x, "padded")
    assert not merged_parts(merged)
    assert "padding_mode='circular'" in merged.explain()
    assert "even kernel" in merged.explain()
    torch.testing.assert_close(merged(x), model(x))


def test_auto_merges_nothing_where_no_kernel_is_and_says_so():
    model, x = settled(Block(2), 1, 2, 8, 8)
    merged = merge(model, x)
    assert not merged_parts(merged)
    (line,) = merged.explain().splitlines()
    names = [one.name for one in merged.decisions]
    assert line.startswith(f"{names[0]} and {len(names) - 1} more, to {names[-1]}: plain (no kernel for this device")
    torch.testing.assert_close(merged(x), model(x))


def test_without_convolutions_it_says_so():
    nothing = "plain (none of its layers is torch's own Conv1d, Conv2d or Conv3d without hooks)"
    assert merge(nn.Linear(2, 2), torch.ones(1, 2)).explain() == f"Linear: {nothing}"
    # torch.fx sees the function that it calls.
    assert merge(nn.Conv2d(1, 1, 1), torch.ones(1, 1, 2, 2)).explain() == f"Conv2d: {nothing}"


@pytest.mark.parametrize(
    ("more", "said"),
    [({"strategy": "fast"}, "strategy='fast'"), ({"edge": 0}, "edge=0"), ({"depth": 0}, "depth=0")],
)
def test_wrong_arguments_are_refused(more, said):
    with pytest.raises(ValueError, match=said):
        merge(nn.Conv2d(1, 1, 1), torch.ones(1, 1, 2, 2), **more)


@pytest.mark.parametrize("depth", [1.5, 2.0, float("nan"), True, "2", None])
def test_a_depth_that_is_no_whole_number_is_refused_and_no_model_left_as_it_is_for_it(depth):
    with pytest.raises(TypeError, match=f"depth={depth!r}: give a whole number"):
        merge(nn.Conv2d(1, 1, 1), torch.ones(1, 1, 2, 2), depth=depth)


@pytest.mark.parametrize("given", [{"strategy": "padded"}, {}], ids=["padded", "auto"])
def test_images_without_a_batch_are_left_with_the_reason(given):
    model, x = settled(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)), 2, 9, 9)
    merged = merge(model, x, **given)
    torch.testing.assert_close(merged(x), model(x))
    assert "its input of (2, 9, 9) is an image without a batch" in merged.explain()
    assert merged.failed is None


def test_an_image_without_a_batch_behind_others_is_refused():
    model, x = settled(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)), 1, 2, 9, 9)
    with pytest.raises(ValueError, match=r"2 spatial dimensions got an input of \(9,\)"):
        merge(model, x, "padded")(x[0])


def test_an_example_that_the_model_does_not_take_is_said_to_be(capfd):
    merged = merge(nn.Conv2d(2, 2, 3), torch.ones(1, 5, 9, 9))
    assert merged.explain().startswith("Conv2d: plain (it fails on the example inputs: RuntimeError: Given groups=1")
    assert merged(torch.ones(1, 2, 9, 9)).shape == (1, 2, 7, 7)
    assert capfd.readouterr() == ("", "")


def test_inputs_by_name_and_of_other_kinds():
    class Scaled(Block):
        def forward(self, x, scale=None, shift=0):
            y = super().forward(x)
            return (y if scale is None else y * scale) + shift

    model, x = settled(Scaled(4), 2, 4, 9, 9)
    for strategy in ("padded", "auto"):
        merged = merge(model, x, strategy)
        torch.testing.assert_close(merged(x=x), model(x))
        torch.testing.assert_close(merge(model, (x, None, 2), strategy)(x, shift=2), model(x, shift=2))
        with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
            merged(x, size=2)


class Trained(Sorted):
    """What a trained model does, and what no trace can hold."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(2), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(super().forward(x)))


def test_a_model_in_training_comes_back_for_inference_and_goes_on_training():
    model, x = Trained().train(), torch.ones(4, 2)
    merged = merge(model, x)
    assert merged.failed is not None
    torch.testing.assert_close(merged(x), copy.deepcopy(model).eval()(x))
    assert model.training
    assert int(model.norm.num_batches_tracked) == 0


def test_a_merged_model_stays_in_evaluation_mode_as_does_one_that_could_not_be_traced():
    model, x = settled(Block(4), 2, 4, 9, 9)
    merged = merge(model, x, "padded")
    untraced = merge(Trained(), torch.ones(4, 2))
    assert (merged.failed is None, untraced.failed is None) == (True, False)
    for one in (merged, untraced):
        before = [part.training for part in one.modules()]
        around = nn.Sequential(one, nn.Dropout())
        around.train()
        assert around.training
        assert one.train() is one
        assert not one.training
        assert [part.training for part in one.modules()] == before
    assert not any(before)


def test_what_could_not_be_copied_goes_on_training_until_it_is_told_not_to():
    class Uncopied(Trained):
        def __deepcopy__(self, _):
            raise TypeError("there is one of it")

    model = Uncopied()
    merged = merge(model, torch.ones(4, 2))
    merged.train()
    assert model.training
    merged.eval()
    assert not any(one.training for one in merged.modules())


@pytest.mark.parametrize("strict", [False, True])
def test_a_merged_model_is_exported_and_compiled_as_one_graph(strict):
    """Whose convolutions run as whoever runs them has set cuDNN."""
    model, x = settled(Block(4), 2, 4, 9, 9)
    merged = merge(model, x, "padded")
    assert merged.tuned
    expected = model(x)
    torch.testing.assert_close(torch.export.export(merged, (x,), strict=strict).module()(x), expected)
    compiled = torch.compile(nn.Sequential(merged), backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(x), expected)


def test_merged_parts_stay_as_they_are():
    model, x = settled(Block(4), 2, 4, 9, 9)
    merged = merge(model, x, "padded")
    again = merge(merged, x)
    assert again.explain() == "MergedModel: plain (it is merged already)"
    assert again.inner is merged, "a copy would have lost its graph"
    around = nn.Sequential(merged, nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)).double().eval()
    torch.testing.assert_close(again(x), model(x))
    whole = merge(around, x, "padded")
    assert whole.explain() == "1 … 2: padded, bricks of 16×16 (asked for)"
    torch.testing.assert_close(whole(x), around(x))


def test_what_was_merged_in_inference_mode_runs_outside_of_it():
    model, x = settled(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)), 1, 2, 9, 9)
    with torch.inference_mode():
        merged = merge(model, x)
    torch.testing.assert_close(merged(x), model(x))


@pytest.mark.parametrize(
    ("model", "example", "said"),
    [(torch.relu, torch.ones(1), "merge got a builtin"), (nn.ReLU(), {"x": torch.ones(1)}, "example_inputs of dict")],
)
def test_what_is_no_model_or_no_example_is_refused(model, example, said):
    with pytest.raises(TypeError, match=said):
        merge(model, example)


def test_names_cannot_command_a_terminal():
    model = nn.Sequential()
    for name in ("\x1b[31m<b>", "\u202eéß"):
        model.add_module(name, nn.Conv2d(1, 1, 1))
    merged = merge(model, torch.ones(1, 1, 2, 2), "padded")
    assert merged.explain() == "\\x1b[31m<b> … \\u202eéß: padded, bricks of 16×16 (asked for)"
