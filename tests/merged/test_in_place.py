"""Models that change tensors in place, have hooks or a state: merged they give what they give, or stay as they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from joulemark.merged import merge
from tests.merged.fakes import RATES, fake_family

OURS = {"families": (fake_family(),), "rates": RATES}


class Model(nn.Module):
    """Three convolutions and what a function does with them."""

    def __init__(self, run):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.act = nn.ReLU(inplace=True)
        self.register_buffer("calls", torch.zeros(()))
        self.run, self.times = run, 0
        self.double().eval()

    def forward(self, x):
        return self.run(self, x)


def read_before(m, x):
    y = m.a(x)
    z = m.c(m.b(y))
    return m.act(y) + z


def read_after(m, x):
    y = m.a(x)
    z = m.c(m.b(m.act(y)))
    return z + y


def changed_between(m, x):
    y = m.a(x)
    z = m.b(y)
    y.mul_(2)
    return m.c(z) + y


def result_unused(m, x):
    y = m.a(x)
    y.add_(1)
    return m.c(m.b(y))


def operator_in_place(m, x):
    y = m.a(x)
    z = y
    z += x
    return m.c(m.b(z)) + y


def operator_of_two_formats(m, x):
    y = m.a(x)
    z = y
    z *= x.float()
    return m.b(z) - y


def into_the_input(m, x):
    y = x
    y += m.b(m.a(x))
    return m.c(y) * x


def through_a_view(m, x):
    y = m.a(x)
    flat = y.view(y.shape[0], -1)
    F.relu(y, True)
    return m.c(m.b(y)).flatten(1) + flat


def counted(m, x):
    m.calls.add_(1)
    return m.b(m.a(x)) * m.calls


def counted_by_a_number(m, x):
    m.times += 1
    return m.b(m.a(x)) * m.times


def replaced(m, x):
    m.calls = m.calls + 1
    return m.b(m.a(x)) * m.calls


@pytest.mark.parametrize(
    "run",
    [read_before, read_after, changed_between, result_unused, operator_in_place, operator_of_two_formats,
     into_the_input, through_a_view, counted, counted_by_a_number, replaced],
)  # fmt: skip
@pytest.mark.parametrize("given", [{"strategy": "padded", "edge": 4}, {}], ids=["padded", "auto"])
def test_what_is_changed_in_place_is_read_as_the_model_reads_it(run, given):
    model = Model(run)
    x = torch.randn(2, 4, 9, 7, dtype=torch.float64)
    kept, expected = x.clone(), copy.deepcopy(model)
    merged = merge(model, x, **given)
    assert torch.equal(x, kept)
    for _ in range(2):
        torch.testing.assert_close(merged(x.clone()), expected(x.clone()), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("run", [read_before, changed_between, operator_in_place])
def test_kernels_are_not_refused_for_it(run):
    model, x = Model(run), torch.randn(2, 4, 9, 7, dtype=torch.float64)
    merged = merge(model, x, **OURS)
    assert merged.failed is None
    torch.testing.assert_close(merged(x), model(x), rtol=1e-10, atol=1e-10)


def test_a_model_that_reads_what_it_changes_through_a_view_stays_as_it_is():
    merged = merge(Model(through_a_view), torch.randn(2, 4, 9, 7, dtype=torch.float64))
    assert merged.explain() == "Model: plain (its relu changes in place what is also read through a view)"


@pytest.mark.parametrize(("run", "name"), [(counted, "calls"), (counted_by_a_number, "times"), (replaced, "calls")])
def test_a_model_with_a_state_stays_as_it_is(run, name):
    merged = merge(Model(run), torch.randn(1, 4, 5, 5, dtype=torch.float64), "padded")
    assert merged.explain() == f"Model: plain (each call changes its {name!r})"


HOOKED = nn.Sequential(
    nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(),
    nn.Sequential(nn.Conv2d(4, 4, 3)), nn.Conv2d(4, 4, 1),
)  # fmt: skip


@pytest.mark.parametrize("name", ["", "0", "1", "2", "3", "4", "4.0"])
@pytest.mark.parametrize("given", [{"strategy": "padded"}, OURS, {}], ids=["padded", "ours", "auto"])
def test_hooks_have_their_effect(name, given):
    model = copy.deepcopy(HOOKED).double().eval()
    model.get_submodule(name).register_forward_hook(lambda module, inputs, output: 3 * output)
    x = torch.randn(2, 4, 9, 7, dtype=torch.float64)
    merged = merge(model, x, **given)
    torch.testing.assert_close(merged(x), model(x), rtol=1e-10, atol=1e-10)
    assert (merged.failed is None) == bool(name)
