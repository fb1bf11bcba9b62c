"""Where a step's tensors come from: kept on the device, copied from the host, or made by a data loader."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from joulemark.errors import ConfigurationError, Unsupported

if TYPE_CHECKING:
    import torch

INPUTS = ("device", "pinned", "pageable", "loader")
LOADER_WORKERS = 2

Batch: TypeAlias = "tuple[torch.Tensor, ...]"
Make: TypeAlias = "Callable[[int, torch.Generator, str], Batch]"
"""``make(batch_size, generator, device)``: inputs, then targets."""

_ROTATED_BYTES = 256 * 2**20
_HOST_SETS = 4


@dataclass(frozen=True)
class Arrange:
    """The last touch on the device: the number format and layout that the model takes.

    Args:
        dtype: of floating-point tensors; None to leave it.
        channels_last: for tensors of four dimensions.
    """

    dtype: torch.dtype | None = None
    channels_last: bool = False

    def __call__(self, batch: Batch) -> Batch:
        return tuple(self._one(tensor) for tensor in batch)

    def _one(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        if not tensor.is_floating_point():
            return tensor
        layout = torch.channels_last if self.channels_last and tensor.dim() == 4 else torch.preserve_format
        return tensor.to(dtype=self.dtype or tensor.dtype, memory_format=layout)


class Feed(Protocol):
    """Gives each step its batch on the device."""

    def __call__(self) -> Batch:
        """The next batch, arranged; work on the device may still be pending."""
        ...

    def fill(self, static: Batch) -> None:
        """Write the next batch into tensors of fixed addresses (those that a CUDA graph reads)."""
        ...

    def close(self) -> None:
        """End what runs beside the step."""
        ...


class DeviceFeed:
    """Batches that already are on the device, taken in turn so that caches do not keep one of them warm.

    There are two to eight, at most 256 MiB where two are no more than that.

    Args:
        rotate: False for a single batch at a fixed address, as a CUDA graph reads it.
    """

    def __init__(
        self,
        make: Make,
        batch_size: int,
        generator: torch.Generator,
        device: str,
        arrange: Arrange,
        rotate: bool = True,
    ) -> None:
        first = arrange(make(batch_size, generator, device))
        size = sum(tensor.nbytes for tensor in first)
        count = max(2, min(8, _ROTATED_BYTES // max(size, 1))) if rotate else 1
        self.sets = [first, *(arrange(make(batch_size, generator, device)) for _ in range(count - 1))]
        self._next = itertools.cycle(self.sets)

    def __call__(self) -> Batch:
        return next(self._next)

    def fill(self, static: Batch) -> None:
        """Nothing moves: what is resident stays where the graph reads it."""

    def close(self) -> None:
        """Nothing runs beside the step."""


class HostFeed:
    """Batches in host memory, one copied to the device per step; FP32 travels, the device converts.

    Args:
        pinned: page-locked memory and a copy that the host does not wait for.
    """

    def __init__(
        self, make: Make, batch_size: int, generator: torch.Generator, device: str, arrange: Arrange, pinned: bool
    ) -> None:
        if not device.startswith("cuda"):
            raise Unsupported(
                "a CPU computes on host memory, so there is no copy from it to measure", "use device or loader as input"
            )
        self._device, self._arrange, self._pinned = device, arrange, pinned
        sets = [make(batch_size, generator, "cpu") for _ in range(_HOST_SETS)]
        self.sets = [tuple(tensor.pin_memory() for tensor in one) for one in sets] if pinned else sets
        self._next = itertools.cycle(self.sets)

    def __call__(self) -> Batch:
        return self._arrange(to_device(next(self._next), self._device))

    def fill(self, static: Batch) -> None:
        copy_into(static, next(self._next))

    def close(self) -> None:
        """Nothing runs beside the step."""


class LoaderFeed:
    """Batches from a torch ``DataLoader`` whose workers draw each sample at random, then collate.

    Args:
        seed: of the samples: sample i of a seed is always the same.
        workers: processes.
    """

    def __init__(
        self, make: Make, batch_size: int, seed: int, device: str, arrange: Arrange, workers: int = LOADER_WORKERS
    ) -> None:
        from torch.utils.data import DataLoader

        self._device, self._arrange = device, arrange
        self._loader: Any = DataLoader(
            _RandomSamples(make, seed),
            batch_size=batch_size,
            num_workers=workers,
            pin_memory=device.startswith("cuda"),
            # The samples' functions need not be picklable, and workers touch no CUDA, which a fork would break.
            multiprocessing_context="fork" if workers else None,
        )
        self._batches: Iterator[Any] | None = None

    def _host_batch(self) -> Batch:
        if self._batches is None:
            with _forking():
                self._batches = iter(self._loader)
        return tuple(next(self._batches))

    def __call__(self) -> Batch:
        return self._arrange(to_device(self._host_batch(), self._device))

    def fill(self, static: Batch) -> None:
        copy_into(static, self._host_batch())

    def close(self) -> None:
        """End the workers: they end when the loader's iterator goes."""
        self._batches = None


class _RandomSamples:
    """A map-style dataset of practically endless length; sample i is drawn from a generator of its own."""

    def __init__(self, make: Make, seed: int) -> None:
        self._make, self._seed = make, seed

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, index: int) -> Batch:
        import torch

        generator = torch.Generator().manual_seed((self._seed + index) % 2**63)
        return tuple(tensor[0] for tensor in self._make(1, generator, "cpu"))


@contextmanager
def _forking() -> Iterator[None]:
    """Fork workers without Python's warning about threads: the children run torch's CPU generators and no more."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
        yield


def to_device(batch: Batch, device: str) -> Batch:
    """Copy a host batch; the host waits only for what is not page-locked."""
    return tuple(tensor.to(device, non_blocking=True) for tensor in batch)


def copy_into(static: Batch, host: Batch) -> None:
    """Copy a host batch into device tensors: bytes travel as they are, the device converts format and layout."""
    for target, tensor in zip(static, host, strict=True):
        same = target.dtype == tensor.dtype and target.stride() == tensor.stride()
        target.copy_(tensor if same else tensor.to(target.device, non_blocking=True), non_blocking=True)


def feed_for(
    source: str, make: Make, batch_size: int, seed: int, device: str, arrange: Arrange, rotate: bool = True
) -> Feed:
    """The feed of a case.

    Raises:
        ConfigurationError: no such source.
        Unsupported: a copy from host memory on a CPU.
    """
    import torch

    if source == "loader":
        return LoaderFeed(make, batch_size, seed, device, arrange)
    if source == "device":
        return DeviceFeed(make, batch_size, torch.Generator(device).manual_seed(seed), device, arrange, rotate)
    if source in ("pinned", "pageable"):
        generator = torch.Generator().manual_seed(seed)
        return HostFeed(make, batch_size, generator, device, arrange, source == "pinned")
    raise ConfigurationError(f"the input {source!r} is not known", f"it takes {', '.join(INPUTS)}")


def warn_of_zeros(name: str, batch: Batch) -> None:
    """Warn when floating-point inputs are all zeros: they switch few transistors, so time and energy flatter."""
    if any(t.is_floating_point() and t.numel() and not t.count_nonzero().item() for t in batch):
        warnings.warn(
            f"{name}: an input is all zeros; zeros are faster and take less energy than real data", stacklevel=2
        )
