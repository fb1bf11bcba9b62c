"""FLOP by torch's counter against arithmetic, and the product that stands for the peak."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from joulemark.collect.flops import calls_per_window, count_flops, product_of  # noqa: E402
from joulemark.errors import Unsupported  # noqa: E402


def test_forward_and_backward_of_a_linear_layer():
    layer, x = torch.nn.Linear(32, 16), torch.randn(8, 32, requires_grad=True)
    forward = 2 * 8 * 32 * 16
    assert count_flops(lambda: layer(x)) == forward
    assert count_flops(lambda: layer(x).sum().backward()) == 3 * forward


def test_a_step_without_products_has_no_ideal():
    with pytest.raises(Unsupported, match="saw no product"):
        count_flops(lambda: torch.ones(3) + 1)


def test_the_product_is_on_random_data_and_knows_its_flop():
    product = product_of("bf16", "cpu")
    product.run()
    assert product.flops == 2 * 512**3
    assert calls_per_window(product.run, lambda: None, 0.01) >= 1
