"""Numbers of command lines: what they take, and what they refuse before anything is read."""

from __future__ import annotations

import argparse

import pytest

from joulemark.argument_types import fraction


@pytest.mark.parametrize(
    ("text", "value"), [("0.02", 0.02), ("2%", 0.02), (" 3 % ", 0.03), ("0", 0.0), ("99.9%", 0.999)]
)
def test_a_fraction_is_a_number_or_per_cent(text, value):
    assert fraction(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["nan", "inf", "-inf", "1e999", "-0.1", "-1%", "1", "100%", "200%", "nan%", "%", "", "two"]
)
def test_what_is_no_share_of_a_whole_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        fraction(text)
    assert str(refused.value).startswith(f"{text!r} is not a fraction; give 0.02 or 2%")
