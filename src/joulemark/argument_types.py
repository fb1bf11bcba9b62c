"""Numbers that command lines are given, each for ``type=`` of an argument."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> int:
    """A whole number above 0."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 10**6):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number; give a whole one, such as 3")
    return int(text)


def seconds(text: str) -> float:
    """Seconds, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds")
    return value


def fraction(text: str) -> float:
    """A share given as ``0.02`` or ``2%``."""
    number = text.strip()
    try:
        return float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction; give 0.02 or 2%") from None
