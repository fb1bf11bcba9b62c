"""How cases are called in notes and comparisons: short, and never two by one name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from joulemark.records import Case


def namer(cases: Iterable[Case]) -> Callable[[Case], str]:
    """What gives a case its name: its label, with the function that swept it where several swept the same.

    Args:
        cases: all that have to be told apart. Whether a function is named does not depend on the GPU.
    """
    functions: dict[str, set[str | None]] = defaultdict(set)
    for case in cases:
        functions[_label_without_gpu(case)].add(case.benchmark)
    several = {label for label, names in functions.items() if len(names) > 1}

    def name(case: Case) -> str:
        return f"{case.benchmark or '-'}:{case.label}" if _label_without_gpu(case) in several else case.label

    return name


def _label_without_gpu(case: Case) -> str:
    return replace(case, gpu_model="").label


def first_of(names: Sequence[str]) -> str:
    """``resnet50-…`` or ``resnet50-… and 4 more``."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
