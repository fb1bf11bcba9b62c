"""What ``merge`` is given: models and inputs that it leaves as they are, inputs that are no tensors, inference mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from joulemark.merged import merge
from tests.merged.fakes import RATES, Pair, executed, fake_family, image, merged_there

pytestmark = pytest.mark.usefixtures("own_cache", "given_times")


def merged_here(model, *inputs, measure=True):
    merged = merge(model, inputs, rates=RATES, families=(fake_family(),), measure=measure)
    assert merged.failed is None, merged.explain()
    return merged


class Remembering(Pair):
    """Keeps what it has seen where no trace can see it, and changes its input in place."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.register_buffer("unused", torch.zeros(3))

    def forward(self, x):
        self.seen.append(1)
        x += 1
        return super().forward(x)


@pytest.mark.parametrize("measure", [True, False])
def test_neither_the_model_nor_the_example_is_changed(measure):
    model, x = Remembering().eval(), image()
    kept = x.clone()
    merged = merged_here(model, x, measure=measure)
    assert model.seen == []
    assert torch.equal(x, kept)
    torch.testing.assert_close(merged(x), model(kept.clone()), rtol=1e-4, atol=1e-5)


class Scaled(Pair):
    """A number and what may be None beside an image."""

    def forward(self, x, factor, mask=None):
        return super().forward(x * factor), mask


@pytest.mark.parametrize("given", [(0.5,), (2, None), (0.5, torch.ones(2)), (0.5, "as it is")])
def test_numbers_and_none_beside_tensors_are_merged(given):
    torch.manual_seed(1)
    model, x = Scaled().eval(), image()
    merged = merged_here(model, x, *given)
    assert executed(merged) or merged.variant == "folded"
    with torch.no_grad():
        for factor in (given[0], 3.0):
            out, mask = merged(x, factor, *given[1:])
            torch.testing.assert_close(out, model(x, factor)[0], rtol=1e-4, atol=1e-5)
            assert mask is (given[1] if len(given) > 1 else None)
    assert merged_here(model, x, *given).cached
    assert not merged_here(model, x, 0.25, *given[1:]).cached


def test_with_numbers_and_none_a_graph_is_replayed_for_these_alone(simulated_gpu):
    simulated_gpu.times["graph"] = simulated_gpu.on_device["graph"] = 0.5
    torch.manual_seed(1)
    model, x = Scaled().eval(), image()
    merged = merged_there(model, x, 0.5, None)
    assert (merged.variant, merged.captured) == ("graph", "graph")
    before = merged.inner._graph.replays
    for factor in (0.5, 0.75):
        torch.testing.assert_close(merged(x, factor, None)[0], model(x, factor)[0], rtol=1e-4, atol=1e-5)
    assert merged.inner._graph.replays == before + 1


class Masked(Pair):
    def forward(self, x, mask=None):
        return super().forward(x if mask is None else x * mask)


@pytest.mark.parametrize("given", [(), (None,)])
def test_a_way_of_its_own_for_none_that_no_trace_takes_is_told(given):
    model, x = Masked().eval(), image()
    merged = merge(model, (x, *given), rates=RATES, families=(fake_family(),))
    assert "fails on the example inputs (torch.fx takes 'mask' for given, which is None): TypeError" in merged.failed
    assert torch.equal(merged(x, *given), model(x))
    mask = torch.ones(2, 1, 1, 1)
    assert executed(merge(model, (x, mask), rates=RATES, families=(fake_family(),)))


class Listed(Pair):
    def forward(self, images):
        return super().forward(images[0] + images[1])


def test_a_list_of_tensors_is_merged_and_graphs_say_why_not(simulated_gpu):
    model, images = Listed().eval(), [image(), image()]
    merged = merged_there(model, images)
    assert merged.problems["graph"] == "TypeError: a graph is replayed for tensors, numbers and None, not for a list"
    assert merged.captured is None
    torch.testing.assert_close(merged(images), model(images), rtol=1e-4, atol=1e-5)


def test_what_is_merged_in_inference_mode_works_outside_of_it():
    torch.manual_seed(2)
    model = Pair().eval()
    with torch.inference_mode():
        x = image()
        merged = merged_here(model, x)
        inside = merged(x)
    tensors = [*merged.parameters(), *merged.buffers()]
    assert tensors
    assert not any(one.is_inference() for one in tensors)
    with torch.no_grad():
        torch.testing.assert_close(merged(image()), inside, rtol=1e-4, atol=1e-5)
        for one in tensors:
            one.copy_(one.clone())
    given = image().requires_grad_()
    merged(given).sum().backward()
    assert given.grad is not None


@pytest.mark.parametrize("strategy", ["auto", "padded"])
def test_what_cannot_be_traced_in_inference_mode_works_outside_of_it(strategy):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else x

    model = Branching()
    with torch.inference_mode():
        merged = merge(model, image(), strategy, rates=RATES, families=(fake_family(),))
    assert "control flow" in merged.failed
    assert not merged.inner.training
    assert not merged.inner.layer.weight.is_inference()


def test_a_graph_that_was_captured_in_inference_mode_is_replayed_outside_of_it(simulated_gpu):
    from joulemark.merged.replay import Replayed

    with torch.inference_mode():
        model = Pair().eval()
        replayed = Replayed(model, (image(),))
    with torch.no_grad():
        torch.testing.assert_close(replayed(image()), model(image()))
    assert replayed._graph.replays == 1
