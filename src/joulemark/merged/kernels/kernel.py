"""A kernel: its text, its launch, and how it wants its weights."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels.description import Description
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.seconds import Counts
from joulemark.merged.sequence import Shape

_ALIGNMENT = 16
Pack = Callable[[List[Parameters]], Tensor]
Scratch = Callable[[int, Shape], int]
Counting = Callable[[Shape, int, Device], Counts]


class Arguments(ctypes.Structure):
    """What every kernel gets: ``device/arguments.cuh``. Triples are (depth, height, width), depth 1 in 2-D."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("batch", ctypes.c_int),
        ("size", ctypes.c_int * 3),
        ("out", ctypes.c_int * 3),
        ("bricks", ctypes.c_int * 3),
        ("count", ctypes.c_int),
        ("blocks", ctypes.c_int),
    )


@dataclass(frozen=True)
class Kernel:
    """A generated kernel.

    Tensors are channels-last: x is [batch, channels, *size] with strides of ``torch.channels_last`` (``_3d``).

    Args:
        name: of the ``KERNEL`` in ``source``.
        description: what it computes.
        source: CUDA C++ that follows ``device/prelude.cuh`` (or ``emulation.hpp``) and ``device/arguments.cuh``.
        block: threads of a block.
        shared: bytes of dynamic shared memory of a block.
        edge: positions of the output that a block computes at a time, per dimension.
        pack: parameters (of the sequence's layers, any float dtype, on any device) → bytes, in the order that the
            kernel reads.
        persistent: blocks per multiprocessor of a kernel whose blocks take brick after brick; None for one block per
            brick.
        scratch: bytes of scratch for (batch, size), zeroed once before the first launch; None without.
        least: smallest compute capability, as 80.
        only: the one compute capability that its instructions exist on (90 for ``wgmma``); None for any from ``least``.
        layout: edges of the bricks in which input and output lie in memory (:mod:`~.layouts`); None for channels-last.
        parts: blocks that share a brick.
        cluster: blocks, neighbours in the launch, that run together and read each other's shared memory.
        images: whose bricks at the same place a block computes together.
        early: a launch may begin before the kernel in front of it has ended; the text waits for that one's end itself.
        counts: (size of the input, batch, device) → what the busiest multiprocessor does (:mod:`~.seconds`).
        plan: its family's plan by names, for records; None where nobody has said.
    """

    name: str
    description: Description
    source: str = field(repr=False)
    block: int
    shared: int
    edge: Shape
    pack: Pack = field(repr=False)
    persistent: int | None = None
    scratch: Scratch | None = field(default=None, repr=False)
    least: int = 80
    only: int | None = None
    layout: Shape | None = None
    parts: int = 1
    cluster: int = 1
    images: int = 1
    early: bool = False
    counts: Counting | None = field(default=None, repr=False)
    plan: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernel:
        """Itself, which nothing changes: as another one it would be loaded again."""
        return self

    @property
    def text(self) -> tuple[str, str]:
        """What is compiled: of one name are kernels too that differ in activations and in what they add."""
        return self.name, self.source

    def runs_on(self, capability: int) -> bool:
        """Whether a GPU of this compute capability, as 90, has its instructions."""
        return capability >= self.least and self.only in (None, capability)

    def size_of(self, x: Tensor) -> Shape:
        """Spatial size of a tensor in the kernel's layout."""
        if self.layout is None:
            return tuple(x.shape[2:])
        return tuple(n * edge for n, edge in zip(x.shape[1:], self.layout, strict=False))

    def bricks(self, size: Shape) -> Shape:
        """Bricks per dimension of the output for an input of spatial ``size``."""
        out = self.description.sequence.sizes(size)[-1]
        return tuple(-(-n // e) for n, e in zip(out, self.edge, strict=True))

    def blocks(self, batch: int, size: Shape, multiprocessors: int) -> int:
        """Blocks of a launch."""
        count = -(-batch // self.images) * prod(self.bricks(size)) * self.parts
        return count if self.persistent is None else min(count, self.persistent * multiprocessors)

    def arguments(
        self, x: Tensor, weights: Tensor, out: Tensor, residual: Tensor | None, scratch: Tensor | None, blocks: int
    ) -> Arguments:
        """The arguments of a launch; the tensors must outlive it."""
        size, made = self.size_of(x), self.size_of(out)
        bricks = self.bricks(size)

        def triple(shape: Shape) -> ctypes.Array[ctypes.c_int]:
            return (ctypes.c_int * 3)(*((1,) * (3 - len(shape))), *shape)

        return Arguments(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            weights.data_ptr(),
            None if scratch is None else scratch.data_ptr(),
            x.shape[0],
            triple(size),
            triple(made),
            triple(bricks),
            -(-x.shape[0] // self.images) * prod(bricks),
            blocks,
        )

    def output_shape(self, x: Tensor) -> Shape:
        """Of the output for x, and of a residual, in the kernel's layout."""
        sequence = self.description.sequence
        size, channels = sequence.sizes(self.size_of(x))[-1], sequence.channels(len(sequence.layers))
        if self.layout is None:
            return (x.shape[0], channels, *size)
        counts = (n // edge for n, edge in zip(size, self.layout, strict=True))
        return (x.shape[0], *counts, *self.layout, channels)

    def empty_output(self, x: Tensor) -> Tensor:
        """An uninitialized output for x, in the kernel's layout."""
        shape = self.output_shape(x)
        if self.layout is not None:
            return torch.empty(shape, dtype=x.dtype, device=x.device)
        memory = layout(self.description.sequence.dimensions)
        return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory)

    def check(self, x: Tensor, residual: Tensor | None) -> None:
        """Refuse tensors that the kernel would misread.

        Raises:
            ValueError: a wrong dtype, shape, layout or alignment, or a residual missing or not wanted.
        """
        sequence = self.description.sequence
        if x.dtype != self.description.dtype:
            raise ValueError(f"{self.name} takes {self.description.dtype}, got {x.dtype}")
        if (residual is None) == self.description.adds:
            raise ValueError(f"{self.name} {'adds a residual: give one' if self.description.adds else 'adds none'}")
        for one in (x, residual):
            if one is not None and one.data_ptr() % _ALIGNMENT:
                raise ValueError(
                    f"{self.name} takes tensors that begin at a multiple of {_ALIGNMENT} bytes: clone this one"
                )
        channels, dimensions = sequence.channels(0), sequence.dimensions
        if self.layout is not None:
            if x.shape[1 + dimensions :] != (*self.layout, channels) or not x.is_contiguous():
                raise ValueError(
                    f"{self.name} takes bricks of {(*self.layout, channels)}, got a tensor of {tuple(x.shape)}"
                )
            self._check_residual(x, residual)
            return
        if x.dim() != 2 + dimensions or x.shape[1] != channels:
            raise ValueError(
                f"{self.name} takes {channels} channels in {dimensions} dimensions, got a tensor of {tuple(x.shape)}"
            )
        for one in (x, residual):
            if one is not None and not one.is_contiguous(memory_format=layout(dimensions)):
                raise ValueError(f"{self.name} takes channels-last tensors: got strides {one.stride()}")
        self._check_residual(x, residual)

    def _check_residual(self, x: Tensor, residual: Tensor | None) -> None:
        if residual is None:
            return
        wanted = self.output_shape(x)
        if tuple(residual.shape) != wanted or residual.dtype != x.dtype:
            raise ValueError(
                f"{self.name} adds a tensor of {wanted} in {x.dtype}, "
                f"got {tuple(residual.shape)} in {residual.dtype}: expand and convert it"
            )


def aligned(x: Tensor) -> Tensor:
    """A tensor that begins where kernels read from; a part of a batch need not."""
    return x.clone(memory_format=torch.preserve_format) if x.data_ptr() % _ALIGNMENT else x


def layout(dimensions: int) -> torch.memory_format:
    """The memory format that kernels read and write: channels innermost."""
    return torch.channels_last_3d if dimensions == 3 else torch.channels_last
