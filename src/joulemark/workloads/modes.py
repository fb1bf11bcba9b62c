"""How a step is executed: eager, traced (jit), compiled, replayed from a CUDA graph, or merged."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from joulemark.errors import ConfigurationError, Unsupported

if TYPE_CHECKING:
    import torch
    from torch import nn

MODES = ("eager", "jit", "compile", "graph", "merged")
_WARM_UP_STEPS = 3


def check(mode: str, phase: str, device: str) -> None:
    """Whether a phase can run in a mode on ``device``.

    Raises:
        ConfigurationError: no such mode.
        Unsupported: training under jit or merged, a CUDA graph on a CPU, compiling without a compiler.
    """
    if mode not in MODES:
        raise ConfigurationError(f"the mode {mode!r} is not known", f"it takes {', '.join(MODES)}")
    if mode == "jit" and phase == "train":
        raise Unsupported("torch.jit.trace and freeze make inference code only", "train in eager, compile or graph")
    if mode == "merged" and phase == "train":
        raise Unsupported("merging makes inference code only", "train in eager, compile or graph")
    if mode == "graph" and not device.startswith("cuda"):
        raise Unsupported("a CUDA graph needs a CUDA device", "choose another mode on a CPU")
    if mode == "compile" and not _has_compiler(device):
        language = "C" if device.startswith("cuda") else "C++"
        raise Unsupported(f"torch.compile needs a {language} compiler and none was found", "install gcc and g++")


def _has_compiler(device: str) -> bool:
    """Triton's launchers are built by a C compiler, torch's CPU kernels by a C++ compiler."""
    names = ("CC", "cc", "gcc", "clang") if device.startswith("cuda") else ("CXX", "g++", "c++", "clang++")
    return any(shutil.which(name) for name in (os.environ.get(names[0], ""), *names[1:]) if name)


def traced(module: nn.Module, example: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
    """The module traced on example inputs and frozen: weights become constants."""
    import torch

    trace = torch.jit.trace(module, example, check_trace=False, strict=False)
    frozen: Callable[..., Any] = torch.jit.freeze(trace)
    return frozen


def merged(module: nn.Module, example: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
    """The module with its sequences of convolutions merged: :func:`joulemark.merged.merge`.

    Where none was, a warning says why: it becomes a note of the record.
    """
    from joulemark.merged import merge

    made = merge(module, example)
    if all(one.how in ("plain", "refused") for one in made.decisions):
        warnings.warn(f"nothing was merged: {made.explain().splitlines()[0]}", stacklevel=2)
    return made


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function under ``torch.compile`` for the shapes of one case.

    The compiler forgets what other cases left: past its recompile limit it silently runs eagerly.
    """
    import torch

    torch._dynamo.reset()
    with warnings.catch_warnings():
        # The compiler is imported here and, in some versions of torch, warns of its own use of torch.jit.
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
        compiled_function: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled_function


def captured(run: Callable[[], object], device: str) -> Callable[[], object]:
    """The replay of a step captured into a CUDA graph, after warm-up steps on the capturing stream.

    Raises:
        Unsupported: the step cannot be captured; the reason is CUDA's own.
    """
    import torch

    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_STEPS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (a loader's, which page-locks memory) may call CUDA meanwhile.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise Unsupported(f"the step cannot be captured into a CUDA graph ({reason})") from error
    replay: Callable[[], object] = graph.replay
    return replay
