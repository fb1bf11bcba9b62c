"""Compiles kernels beside what else is done: those of our families by their text, Triton's by running them once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as List
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from math import inf

import torch

from joulemark.merged.graph import Segment
from joulemark.merged.kernels import Kernel, build
from joulemark.merged.kernels.compile import architecture_of
from joulemark.merged.paths import OWN, Executed, cudnn_tuning, kind_of_path
from joulemark.merged.questions import added_to, example, gate_of
from joulemark.merged.setting import Setting
from joulemark.merged.trials import Trial
from joulemark.merged.trying import COMPILERS


class Builds:
    """Kernels that are compiled beside what else is done, several at a time, in the order in which they are asked for.

    What does not compile says so when it is loaded. At the end of the context what has not begun is given up.

    Args:
        compile_: compiles one; None where there is nothing to compile for: then every kernel counts as ready.
    """

    def __init__(self, compile_: Callable[[Kernel], object] | None) -> None:
        self._compile = compile_
        self._pool = ThreadPoolExecutor(COMPILERS)
        self._begun: dict[tuple[str, str], Future[object]] = {}

    def __enter__(self) -> Builds:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def add(self, kernels: Iterable[Kernel]) -> None:
        """Have kernels compiled, each once."""
        for kernel in kernels:
            if self._compile is not None and kernel.text not in self._begun:
                self._begun[kernel.text] = self._pool.submit(self._compile, kernel)

    def wait(self, kernels: List[Kernel], deadline: float = inf) -> bool:
        """Whether all of these are there by a deadline on ``time.monotonic``."""
        self.add(kernels)
        asked = [self._begun[one.text] for one in kernels if one.text in self._begun]
        return not wait(asked, None if deadline == inf else max(deadline - time.monotonic(), 0.0)).not_done


def builds_for(setting: Setting) -> Builds:
    """For kernels that are measured on a GPU; where nothing is, there is nothing to compile."""
    on_gpu = setting.device.type == "cuda" and setting.measured
    return Builds(compiler_for(setting.device) if on_gpu else None)


def compiler_for(device: torch.device) -> Callable[[Kernel], object]:
    """What compiles a kernel for a GPU."""
    architecture = architecture_of(*torch.cuda.get_device_capability(device))
    return lambda kernel: build(kernel, architecture)


def build_all(kernels: Iterable[Kernel], device: torch.device) -> None:
    """Compile kernels for a device, several at a time; what does not compile says so when it is loaded."""
    with Builds(compiler_for(device)) as builds:
        builds.wait(list(kernels))


@contextmanager
def compiling_own(trials: Iterable[tuple[Segment, Trial]], setting: Setting) -> Iterator[None]:
    """Compile the kernels of paths of our own beside what is done in the context; they are there at its end.

    All together: one after another they take longer than measuring.
    """
    if setting.device.type != "cuda":
        yield
        return
    tasks: dict[tuple[object, ...], tuple[Segment, str]] = {}
    for segment, one in trials:
        if one.kernel is None and kind_of_path(one.path) in OWN:
            tasks.setdefault(compiled_as(segment, one.path), (segment, one.path))
    with cudnn_tuning(False), ThreadPoolExecutor(COMPILERS) as pool:
        started = [pool.submit(_run_small, *task, setting.device) for task in tasks.values()]
        yield
        wait(started, None if setting.deadline == inf else max(setting.deadline - time.monotonic(), 0.0))
        pool.shutdown(wait=True, cancel_futures=True)


def compiled_as(segment: Segment, path: str) -> tuple[object, ...]:
    """What the kernel of a path of our own is compiled for, for a layer alone."""
    from joulemark.merged.pointwise import compiled_for

    parameters = segment.parameters[0]
    shape = (segment.adds is not None, segment.gate is not None, parameters.weight.dtype.itemsize)
    biased = parameters.bias is not None
    return (biased, parameters.weight.dtype, *compiled_for(path, segment.sequence.layers[0], *shape))


def _run_small(segment: Segment, path: str, device: torch.device) -> None:
    """Run a path once for one image, so that its kernel is compiled; that it cannot be is told when it is measured."""
    with suppress(Exception), torch.no_grad(), torch.cuda.device(device):
        x = example(segment, device, segment.parameters[0].weight.dtype, batch=1)
        module = Executed(segment.sequence, segment.parameters, path, segment.adds is not None)
        module.run(x, added_to(segment, x), gate_of(segment, x))
