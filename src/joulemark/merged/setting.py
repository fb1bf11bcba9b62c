"""For what a graph is planned, and how exact a path has to be there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf

import torch

from joulemark.merged.cost import Rates
from joulemark.merged.families import Family, Problem, limits_of
from joulemark.merged.graph import Segment
from joulemark.merged.kernels import Description
from joulemark.merged.kernels.description import Format

DEPTH = 6
"""Most layers that are executed as one; BrickDL's best depth was 3, and six at once lost there."""
TOLERANCE: Mapping[Format, float] = {"bf16": 2e-2, "fp16": 1e-2, "tf32": 4e-3, "fp32": 2e-5}
"""Relative error (Frobenius) against the layers one by one above which a path counts as wrong."""


@dataclass
class Setting:
    """For what is planned.

    Args:
        device: of the model.
        form: number format of its convolutions; None for one that no kernel has.
        rates: of the device; None where they are not known, then nothing is predicted.
        families: of kernels.
        measured: whether candidates are timed on the device.
        deadline: on ``time.monotonic``; later nothing further is measured.
        depth: most layers as one.
        gpu: its name where its rates are not known.
    """

    device: torch.device
    form: Format | None
    rates: Rates | None
    families: tuple[Family, ...]
    measured: bool
    deadline: float = inf
    depth: int = DEPTH
    gpu: str | None = None

    @cached_property
    def capability(self) -> int | None:
        """Compute capability of the device, as 90; None where there is no GPU to ask: then all kernels are planned."""
        if self.device.type != "cuda" or not torch.cuda.is_available():
            return None
        major, minor = torch.cuda.get_device_capability(self.device)
        return int(10 * major + minor)

    @property
    def in_time(self) -> bool:
        """Whether there is time to measure."""
        return self.measured and time.monotonic() < self.deadline


def problem_of(segment: Segment, setting: Setting, form: Format) -> Problem:
    """What families are asked for a segment."""
    description = Description(segment.sequence, form, segment.adds is not None)
    gpu = setting.gpu if setting.rates is None else setting.rates.gpu
    return Problem(description, segment.size, segment.batch, limits_of(setting.rates), gpu)
