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


SIZES = "positive numbers (1,8,64) or a range of doublings (1:128)"


def sizes(text: str) -> tuple[int, ...]:
    """Batch sizes, rising: numbers and ranges of doublings, comma-separated."""
    found: set[int] = set()
    for one in text.split(","):
        first, colon, last = one.strip().partition(":")
        if not _is_whole(first) or int(first) < 1 or (colon and (not _is_whole(last) or int(last) < int(first))):
            raise argparse.ArgumentTypeError(f"{one!r} is no batch size; give {SIZES}")
        size, end = int(first), int(last) if colon else int(first)
        while size <= end:
            found.add(size)
            size *= 2
    return tuple(sorted(found))


def _is_whole(text: str) -> bool:
    """Digits that int() takes: "²" is a digit too, and a batch size has no thousands of them."""
    return text.isascii() and text.isdigit() and len(text) < 20
