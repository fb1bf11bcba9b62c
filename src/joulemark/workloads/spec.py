"""What describes a model to be measured: how to build it, feed it and train it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import nn

Draw: TypeAlias = "Callable[[int, torch.Generator, str], torch.Tensor | tuple[torch.Tensor, ...]]"
"""``draw(batch_size, generator, device)``: fresh random tensors on ``device``, samples along their first dimension."""

Optimize: TypeAlias = "Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]"
"""Makes the optimizer of parameters that already are on their device."""


@dataclass(frozen=True)
class PhaseView:
    """A phase in which the model is called in another way than ``model(*inputs)``.

    Args:
        module: makes, from the model and the batch size, the module that the phase calls.
        inputs: draws what that module takes.
        items_per_sample: items that one sample is worth in this phase.
    """

    module: Callable[[nn.Module, int], nn.Module]
    inputs: Draw
    items_per_sample: int = 1


@dataclass(frozen=True)
class ModelSpec:
    """A model with all that its cases need. Everything is called in the measuring process only.

    Args:
        name: what tables and ids call it.
        model: builds it with fresh weights. It is called with torch's default device set to the case's device,
            so that large models are initialized there.
        inputs: draws the arguments of ``model(*inputs)``.
        targets: draws what ``loss`` compares the output with; None when ``loss`` needs the output alone.
        loss: ``loss(output, *targets)``, a scalar; None for the mean square of the output, which is no task
            but costs a forward and a backward pass.
        optimizer: of the training step; None for AdamW.
        phases: of ``inference``, ``train``, ``prefill``, ``decode``.
        views: phases that call the model differently.
        items_per_sample: items that one sample is worth (tokens of a text).
        unit: what an item is: ``images``, ``tokens``, ``samples``.
    """

    name: str
    model: Callable[[], nn.Module]
    inputs: Draw
    targets: Draw | None = None
    loss: Callable[..., torch.Tensor] | None = None
    optimizer: Optimize | None = None
    phases: tuple[str, ...] = ("inference", "train")
    views: Mapping[str, PhaseView] = field(default_factory=dict)
    items_per_sample: int = 1
    unit: str = "samples"


def as_tensors(drawn: Any) -> tuple[torch.Tensor, ...]:
    """What a ``Draw`` gave, as a tuple.

    Raises:
        TypeError: something else than a tensor or a tuple or list of tensors.
    """
    import torch

    tensors = (drawn,) if isinstance(drawn, torch.Tensor) else drawn
    if not isinstance(tensors, (tuple, list)) or not all(isinstance(one, torch.Tensor) for one in tensors):
        raise TypeError(f"inputs must be a tensor or a tuple of tensors, not {type(drawn).__name__}")
    return tuple(tensors)
