"""Data parallelism over ranks of one host: the process group, the replicated model, and what ranks agree on.

Each rank is a process with a device of its own; it sees the variables that ``torchrun`` sets (``RANK``, ``LOCAL_RANK``,
``WORLD_SIZE``). Gradients are averaged by ``torch.nn.parallel.DistributedDataParallel``: NCCL on GPUs, gloo on CPUs.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from joulemark.errors import ConfigurationError, Unsupported
from joulemark.records import Json

if TYPE_CHECKING:
    from torch import nn

RENDEZVOUS_VARIABLE = "JOULEMARK_RENDEZVOUS"
"""A file in which the ranks of one group find each other."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks, and the store that they share.

    Args:
        rank: of this process, from 0.
        world_size: number of ranks.
        store: torch's key-value store.
    """

    rank: int
    world_size: int
    store: Any

    def sharer(self, topic: str) -> Callable[[Json], Json]:
        """Publishes rank 0's values under a topic: the n-th call on any rank returns the n-th value of rank 0."""
        numbers = itertools.count()

        def share(value: Json) -> Json:
            key = f"{topic}/{next(numbers)}"
            if self.rank == 0:
                self.store.set(key, json.dumps(value))
                return value
            return json.loads(self.store.get(key))

        return share


def rank_of_process() -> int | None:
    """This process's rank; None where it is not one of several."""
    return int(os.environ["RANK"]) if RENDEZVOUS_VARIABLE in os.environ else None


_JOINED: list[Ranks] = []


def join(device: str) -> Ranks:
    """This process's ranks; the first call joins the process group and waits for the others.

    Args:
        device: torch's name of this rank's device.

    Raises:
        ConfigurationError: this process was not started as a rank.
        Unsupported: torch has no communication library for the device.
    """
    if _JOINED:
        return _JOINED[0]
    path = os.environ.get(RENDEZVOUS_VARIABLE)
    if path is None:
        raise ConfigurationError(
            "a case of several ranks was asked of a process that is none of them", "leave out --bench-inprocess"
        )
    import torch
    from torch import distributed

    backend = "nccl" if device.startswith("cuda") else "gloo"
    if not distributed.is_available() or not getattr(distributed, f"is_{backend}_available")():
        raise Unsupported(f"this torch comes without {backend}, so its processes cannot train together")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = distributed.FileStore(path, world_size)
    bound = {"device_id": torch.device(device)} if backend == "nccl" else {}
    distributed.init_process_group(
        backend, store=distributed.PrefixStore("group", store), rank=rank, world_size=world_size, **bound
    )
    _JOINED.append(Ranks(rank, world_size, distributed.PrefixStore("joulemark", store)))
    return _JOINED[0]


def leave() -> None:
    """End the process group, if this process has joined one."""
    if _JOINED:
        _JOINED.clear()
        sys.modules["torch"].distributed.destroy_process_group()


def replicated(model: nn.Module, device: str) -> nn.Module:
    """The model as one replica of a data-parallel group, with DistributedDataParallel's own defaults."""
    from torch.nn.parallel import DistributedDataParallel

    ids = [int(device.partition(":")[2] or 0)] if device.startswith("cuda") else None
    wrapped: nn.Module = DistributedDataParallel(model, device_ids=ids)
    return wrapped
