"""Modules around a CUDA graph: one that is replayed from its own, one that others capture into theirs."""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from joulemark.merged.forks import Forked, rehearsed

_FIXED = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
"""What a graph holds as it was when it was captured: for another value the module is launched."""


class Replayed(nn.Module):
    """A module replayed from a CUDA graph for inputs like its example; launched as it is for all others.

    Inputs are copied to the graph's own and outputs are copies: no call sees what another one left. A copy of this
    module launches: a graph knows where the weights of one lie.

    Args:
        inner: what is captured.
        example: inputs, tensors on the device; numbers and None have to be the same for the graph to be replayed.
        pool: of memory that graphs share which never run at the same time; None for one of its own.

    Raises:
        TypeError: an input that a graph cannot be given anew.
        RuntimeError: CUDA cannot capture it.
    """

    def __init__(self, inner: nn.Module, example: tuple[Any, ...], pool: Any = None) -> None:
        super().__init__()
        for one in example:
            if not isinstance(one, (Tensor, *_FIXED)):
                raise TypeError(f"a graph is replayed for tensors, numbers and None, not for a {type(one).__name__}")
        self.inner = inner
        self._signature = signature(example)
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._inputs = pytree.tree_map_only(Tensor, torch.clone, example)
            self._graph, self._outputs = capture(inner, self._inputs, pool)

    def forward(self, *inputs: Any) -> Any:
        """The module's output."""
        foreign = self._graph is None or signature(inputs) != self._signature
        if _is_exported() or foreign or torch.cuda.is_current_stream_capturing():
            return self.inner(*inputs)
        for mine, given in zip(self._inputs, inputs, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)
        self.replay()
        return pytree.tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, self._outputs)

    def replay(self) -> None:
        """Run the graph alone, on what its inputs hold, without any copy."""
        self._graph.replay()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Replayed:
        """Weights move: the graph, which knows their old places, is dropped."""
        self._graph, self._inputs, self._outputs = None, (), None
        moved: Replayed = super()._apply(fn, recurse)
        return moved

    def __getstate__(self) -> dict[str, Any]:
        """What is copied: all but the graph."""
        return {**self.__dict__, "_graph": None, "_inputs": (), "_outputs": None}


class Chosen(nn.Module):
    """One module for calls, and another one's launches for a stream that is being captured into a CUDA graph.

    A call pays the host's time too, which a graph of its own spares; what a user or a serving engine captures pays the
    device's alone.

    Args:
        calls: what is called; inputs unlike the example go to it in any case.
        captured: whose launches are captured.
        example: inputs.
    """

    def __init__(self, calls: nn.Module, captured: nn.Module, example: tuple[Any, ...]) -> None:
        super().__init__()
        self.calls, self.captured = calls, captured
        self._signature = signature(example)

    def forward(self, *inputs: Any) -> Any:
        """The module's output."""
        if torch.cuda.is_current_stream_capturing() and signature(inputs) == self._signature:
            return self.captured(*inputs)
        return self.calls(*inputs)


def for_both(calls: nn.Module, captured: nn.Module, example: tuple[Any, ...]) -> nn.Module:
    """A module that runs one for calls and another where it is captured; ``calls`` alone where that does so itself."""
    return calls if for_capture(calls) is captured else Chosen(calls, captured, example)


def for_capture(module: nn.Module) -> nn.Module:
    """What a module runs for inputs like its example where it is captured."""
    if isinstance(module, Chosen):
        return module.captured
    return module.inner if isinstance(module, Replayed) else module


def capture(inner: nn.Module, inputs: tuple[Any, ...], pool: Any) -> tuple[Any, Any]:
    """A CUDA graph of a call, warmed up before, and the outputs that its replays write.

    Raises:
        TypeError: an input on the CPU, whose values the graph would keep.
        RuntimeError: CUDA cannot capture it.
    """
    tensors = [one for one in inputs if isinstance(one, Tensor)]
    if not tensors or not all(one.is_cuda for one in tensors):
        raise TypeError("a graph is replayed for tensors on a GPU: of one on the CPU it would keep the values")
    device = tensors[0].device
    with torch.cuda.device(device):
        side = _capturing_stream(device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            inner(*inputs)  # alone, since cuDNN may time its algorithms here
            if any(isinstance(one, Forked) for one in inner.modules()):
                with rehearsed():
                    inner(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
            outputs = inner(*inputs)
    return graph, outputs


@cache
def _capturing_stream(device: torch.device) -> Any:
    """One for all graphs of a device: what a pool has free is given to the stream alone that it was made for."""
    return torch.cuda.Stream(device)


def _is_exported() -> bool:
    """Whether :func:`torch.export.export` runs this, which would take what a graph holds for constants.

    Not while torch's compiler traces: that of torch 2.11 says ``is_exporting`` of all it does.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def signature(inputs: tuple[Any, ...]) -> tuple[object, ...]:
    """What inputs have to share: tensors their shape, format and device, all else its type and value."""
    return tuple((one.shape, one.dtype, one.device) if isinstance(one, Tensor) else (type(one), one) for one in inputs)
