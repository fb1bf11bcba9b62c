"""A graph whose branches run on several streams where it is captured into a CUDA graph, in order everywhere else.

**Order.** A step comes behind all that it depends on: on its own stream by the stream's order, on others because its
stream has waited, directly or over further streams, for an event recorded behind it. At the end the captured stream
waits for every other one, as a capture demands (CUDA Programming Guide, "Cross-stream Dependencies and Events").

**Memory.** torch's allocator gives a block back to the stream that it was allocated on as soon as the host drops the
last reference to it, and whatever the host asks for on that stream afterwards may get it. That is right for a block
that its own stream alone uses: stream order is host order. So the rule: *a block that a step on another stream reads or
writes is referred to until the host has made the block's own stream wait for that step.* Who gets the block then is
given to its stream later, hence runs behind that wait, hence behind all steps on other streams; steps on its own stream
were given to it before. Whether a stream has waited for a step is told by its vector clock
(:class:`~joulemark.merged.branches.Step`); blocks are told apart by storages, so a view keeps what it is a view of.

- Where a stream does not wait again, the block is kept until the call ends and all has joined. What other streams own
  is free then, and the captured one may still read it, an output say. The first step that another stream gets in a
  later call waits for an event that the captured stream records in that call, hence behind all such reads.
- Inputs count as the captured stream's.
- What a step allocates and drops inside, workspaces of cuDNN say, its own stream alone uses. torch keeps a workspace of
  cuBLAS for each stream. Scratch that outlives a call belongs to one segment (:class:`joulemark.merged.paths.Recipe`),
  which a graph calls once.
- A thread has the other streams to itself and captures one graph at a time, or rehearses it. That one of them is the
  captured one, as torch deals out 32 in turns, costs only what they would have overlapped.
- ``record_stream`` would hold each block until the capture ends: in it no event can be asked whether it is reached.

**Launches.** A kernel that is launched early waits itself for the one in front of it on its stream; which of several
predecessors that is where its stream has just waited for another is nowhere written. The first one of ours behind such
a wait is launched in order (:func:`joulemark.merged.kernels.launch.in_order_behind`).
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from joulemark.merged.branches import START, STREAMS, Schedule, Step, schedule
from joulemark.merged.cost import Rates
from joulemark.merged.kernels.description import Format

_PLAIN = (type(None), bool, int, float, complex, str, slice, range, torch.dtype, torch.device, torch.layout)


class Streams(Protocol):
    """The streams of a call, the captured one first."""

    def on(self, stream: int) -> AbstractContextManager[Any]:
        """Make one the current stream."""

    def record(self, stream: int) -> Any:
        """An event behind all that a stream was given so far."""

    def wait(self, stream: int, event: Any) -> None:
        """Have a stream wait for an event before what it is given from now on."""


_rehearsed: ContextVar[bool] = ContextVar("rehearsed", default=False)


@contextmanager
def rehearsed() -> Iterator[None]:
    """Fork outside of a capture too: what libraries keep for each stream is made then, in no graph's memory."""
    before = _rehearsed.set(True)
    try:
        yield
    finally:
        _rehearsed.reset(before)


def streams_of_capture(count: int) -> Streams | None:
    """Streams to fork into where the current one is being captured, or that is rehearsed; None elsewhere."""
    return _Cuda(count) if _rehearsed.get() or torch.cuda.is_current_stream_capturing() else None


class _Cuda:
    def __init__(self, count: int) -> None:
        first: Any = torch.cuda.current_stream()
        self._streams = (first, *_others(first.device, get_ident())[: count - 1])

    def on(self, stream: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[stream]) if stream else nullcontext()

    def record(self, stream: int) -> Any:
        return self._streams[stream].record_event()

    def wait(self, stream: int, event: Any) -> None:
        from joulemark.merged.kernels.launch import in_order_behind

        self._streams[stream].wait_event(event)
        in_order_behind(self._streams[stream].cuda_stream)


@lru_cache(maxsize=64)
def _others(device: torch.device, thread: int) -> tuple[Any, ...]:
    """The same for all captures of a thread: what is made for a stream, blocks of a pool say, serves it alone."""
    del thread
    return tuple(torch.cuda.Stream(device) for _ in range(STREAMS - 1))


class Forked(nn.Module):
    """A graph that runs its branches on several streams where it is captured; elsewhere as it is.

    Args:
        inner: a traced graph.
        rates, form: see :func:`joulemark.merged.branches.schedule`.
        streams: those to fork into for a number of them; None from it where the graph runs as it is.
    """

    def __init__(
        self,
        inner: fx.GraphModule,
        rates: Rates | None,
        form: Format | None,
        streams: Callable[[int], Streams | None] = streams_of_capture,
    ) -> None:
        super().__init__()
        self.inner, self.rates, self.form, self._streams = inner, rates, form, streams
        self._schedule: Schedule | None = None

    @property
    def schedule(self) -> Schedule:
        """What runs where; of a copy, whose nodes are others, made anew."""
        if self._schedule is None:
            self._schedule = schedule(self.inner, self.rates, self.form)
        return self._schedule

    def forward(self, *inputs: Any) -> Any:
        """The graph's output."""
        streams = self._streams(self.schedule.streams)
        if streams is None:
            return self.inner(*inputs)
        return _Call(self.inner, self.schedule, streams, inputs).output()

    def __getstate__(self) -> dict[str, Any]:
        """What is copied: all but numbers of nodes."""
        return {**self.__dict__, "_schedule": None}


@dataclass(frozen=True)
class _Held:
    """A storage that a step on another stream than its own uses: the ``count``-th one there."""

    storage: object
    home: int
    stream: int
    count: int


class _Call:
    """One call on several streams; see the module."""

    def __init__(self, graph: fx.GraphModule, schedule: Schedule, streams: Streams, inputs: tuple[Any, ...]) -> None:
        self.schedule, self.streams = schedule, streams
        self.nodes = list(graph.graph.nodes)
        self.interpreter = fx.Interpreter(graph, garbage_collect_values=False)
        self.interpreter.args_iter = iter(inputs)
        self.values: dict[fx.Node, Any] = self.interpreter.env
        self.homes: dict[int, int] = {}
        self.held: list[_Held] = []
        self.unknown: list[Any] = []
        self.events: dict[int, Any] = {}
        self.given = [0] * schedule.streams
        self.waited = (0,) * schedule.streams

    def output(self) -> Any:
        """What the graph returns, behind all streams."""
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.values[node] = value = self.interpreter.run_node(node)
                self._settle(value, (), 0)
        if any(START in step.waits for step in self.schedule.steps):
            self.events[START] = self.streams.record(0)
        try:
            for number, step in enumerate(self.schedule.steps):
                self._run(number, step)
        except BaseException:
            with suppress(RuntimeError):  # else the capture could not even be ended
                self._join()
            raise
        self._join()
        return _as_the_model(self.interpreter.run_node(self.nodes[-1]))

    def _run(self, number: int, step: Step) -> None:
        for other in step.waits:
            self.streams.wait(step.stream, self.events[other])
        self.given[step.stream] = step.clock[step.stream]
        self.waited = self.waited if step.stream else step.clock
        self.held = [one for one in self.held if one.home != step.stream or step.clock[one.stream] < one.count]
        node = self.nodes[step.node]
        with self.streams.on(step.stream):
            self.values[node] = value = self.interpreter.run_node(node)
        if step.recorded:
            self.events[number] = self.streams.record(step.stream)
        self._hold(step, value)
        for one in step.last_read:
            self.values.pop(self.nodes[one], None)

    def _hold(self, step: Step, value: Any) -> None:
        """Refer to what is used here and lies on other streams."""
        read = [self.values[one] for one in self.nodes[step.node].all_input_nodes]
        self._settle(value, read, step.stream)
        for number, storage in _storages((read, value)):
            if self.homes[number] != step.stream:
                self.held.append(_Held(storage, self.homes[number], step.stream, step.clock[step.stream]))

    def _settle(self, value: Any, read: Any, stream: int) -> None:
        """Note where new storages lie; what may hold tensors that nobody sees is kept until the call ends."""
        known = {number for number, _ in _storages(read)}
        self.homes.update({number: stream for number, _ in _storages(value) if number not in known})
        if not all(isinstance(one, (Tensor, *_PLAIN)) for one in pytree.tree_leaves(value)):
            self.unknown.append(value)

    def _join(self) -> None:
        """Have the captured stream wait for all others that it has not waited for."""
        for stream in range(1, len(self.given)):
            if self.given[stream] > self.waited[stream]:
                self.streams.wait(0, self.streams.record(stream))


def _as_the_model(value: Any) -> Any:
    """An output in lists and dictionaries of Python's, which a graph keeps as its own that nobody may change."""
    if isinstance(value, immutable_dict):
        return {key: _as_the_model(one) for key, one in value.items()}
    if isinstance(value, immutable_list):
        return [_as_the_model(one) for one in value]
    if type(value) is tuple:
        return tuple(_as_the_model(one) for one in value)
    return type(value)(*map(_as_the_model, value)) if hasattr(value, "_fields") else value


def _storages(values: Any) -> Iterator[tuple[int, object]]:
    """Storages of all tensors, each with what tells it apart while it lives."""
    for one in pytree.tree_leaves(values):
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            yield storage._cdata, storage
