"""torch's compiler with tuned convolutions, without a template that never wins and takes most of its time.

With max-autotune, torch.compile times Triton's convolution template for grouped convolutions too. It multiplies each
group's channels as if they were all: measured on an H200 with torch 2.11 in bf16, depthwise layers of 96, 192 and 384
channels took its best size 26.5, 17.7 and 68.7 ms, cuDNN 0.133, 0.075 and 0.135 ms, and tuning 13, 6 and 33 s a layer.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

_TEMPLATE = "triton_convolution"
_GROUPS = re.compile(r"\bGROUPS=(\d+)")
"""In the description that a template's choice has of its constants."""


def without_grouped_templates(choices: list[Any]) -> list[Any]:
    """The choices of a tuned operator without that template over groups; all of them where nothing else is left.

    Args:
        choices: of torch's inductor, each with a ``name`` and a ``description``; cuDNN's has an empty one.
    """
    return [one for one in choices if not _is_grouped_template(one)] or choices


def _is_grouped_template(choice: Any) -> bool:
    groups = _GROUPS.search(str(getattr(choice, "description", "")))
    return str(choice.name).startswith(_TEMPLATE) and groups is not None and int(groups[1]) > 1


def leave_out_grouped_templates() -> bool:
    """Have torch's compiler tune without them from now on in this process.

    Returns:
        Whether it does: not every version of torch can be asked to.
    """
    try:
        from torch._inductor.select_algorithm import get_algorithm_selector_cache

        functions = get_algorithm_selector_cache().preprocessing_fns
    except (ImportError, AttributeError):
        return False
    if without_grouped_templates not in functions:
        functions.append(without_grouped_templates)
    return True


def start_workers() -> bool:
    """Have torch's compiler start its processes now, beside what is done until it has work for them.

    It does so by itself when it is first called, and until they are there it compiles one kernel after another.

    Returns:
        Whether it does: not every version of torch can be asked to.
    """
    try:
        from torch._inductor.async_compile import maybe_warm_pool
    except ImportError:
        return False
    maybe_warm_pool()
    return True


def compiled(module: nn.Module, mode: str = "default") -> nn.Module:
    """A module under torch's compiler for the shapes of its inputs, without graphs of the compiler's own."""
    if mode.startswith("max-autotune"):
        leave_out_grouped_templates()
    made: nn.Module = torch.compile(module, dynamic=False, mode=mode)
    return made
