"""What torch's compiler made of a module, kept as data, and run in a new process that imports no compiler.

The inductor makes a Python text, whose ``call`` allocates memory, calls operators of torch's and launches kernels, and
the kernels, which Triton compiled to cubins. A :class:`Program` is that text without all that is of the compiler, the
cubins, and how each was launched for the inputs it was recorded for. Its kernels are launched by the launcher in C++
that torch's compiler launches them by. Our own operators are called past torch's dispatcher, whose way to an operator
that is written in Python imports the compiler.

A program holds for the formats it was recorded for, on the kind of GPU and the versions of torch and CUDA that it was
recorded with; keys of what is kept on disk name those.
"""

from __future__ import annotations

import base64
import builtins
import importlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes to which kernels may count on addresses that they are given (``torch._inductor.utils.ALIGNMENT``)."""
SELECTION = "torch._inductor.select_algorithm"
EXTERN = "extern_kernels"
ALLOWED = ("torch", "math", "cmath", "ctypes", "torch._C", "torch._C._dynamo.guards")
"""What the text may import for itself."""
_BUILTINS = ("__build_class__", "abs", "bool", "float", "int", "len", "list", "max", "min", "range", "tuple", "zip")
OWN = "joulemark"
"""The namespace of our operators; in a program's text the name of what calls them."""
Number = bool | int | float


class NoProgram(Exception):
    """Why there is no program, or why one does not fit."""


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched for the numbers that it is given.

    Args:
        numbers: of its arguments, all that are no tensors.
        grid: blocks.
    """

    numbers: tuple[Number, ...]
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel.

    Args:
        name: in the text.
        symbol: in the cubin.
        code: the cubin, base64.
        types: of what is passed to it, a letter each; see :data:`_TYPES`.
        warps: of a block.
        shared: bytes of dynamic shared memory.
        numbers: which of the arguments in the text are numbers.
        passed: which of the arguments in the text are passed to it, in order.
        scratch: pointers behind them that it does not use.
        launches: all that were seen.
    """

    name: str
    symbol: str
    code: str
    types: str
    warps: int
    shared: int
    numbers: tuple[int, ...]
    passed: tuple[int, ...]
    scratch: int
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class Program:
    """A module's call for inputs of some formats.

    Args:
        text: in Python; its ``call`` takes a list of weights and inputs, which it empties, and gives the outputs.
        kernels: that it launches.
        recipes: numbers of those of ours that its operators name.
        weights: their names and formats, in the order of ``call``.
        inputs: their formats.
        structure: of the output, as torch's pytree writes it.
        deterministic: whether torch's deterministic algorithms were on.
        device: the GPU's index; None where it launches no kernels.
    """

    text: str
    kernels: tuple[Cubin, ...]
    recipes: tuple[int, ...]
    weights: tuple[str, ...]
    inputs: tuple[str, ...]
    structure: str
    deterministic: bool
    device: int | None


def format_told(x: Tensor) -> str:
    """A tensor's format in words: what code is compiled for."""
    return f"{x.dtype} {tuple(x.shape)} {x.stride()} {x.device}"


def check_fits(program: Program, names: List[str], given: List[Tensor], recipes: Iterable[int]) -> None:
    """That a program is one for some weights and inputs.

    Args:
        names, given: as for :func:`record`.
        recipes: numbers of those that are there.

    Raises:
        NoProgram: it is not.
    """
    if program.deterministic != torch.are_deterministic_algorithms_enabled():
        raise NoProgram("torch's deterministic algorithms are not as they were")
    formats = [format_told(one) for one in given]
    weights = tuple(f"{name} {one}" for name, one in zip(names, formats, strict=False))
    if weights != program.weights:
        raise NoProgram("it was made for other weights")
    if tuple(formats[len(names) :]) != program.inputs:
        raise NoProgram("it was made for other inputs")
    if not set(program.recipes) <= set(recipes):
        raise NoProgram("it was made for other segments")


def _bias_addmm(
    inp: Tensor, mat1: Tensor, mat2: Tensor, *, out: Tensor | None = None, alpha: Number = 1, beta: Number = 1
) -> Tensor:
    """``torch._inductor.kernel.mm.bias_addmm``: of one row as a vector, for which cuBLAS has a faster kernel."""
    if (inp.stride(0) == 0 and inp.size(0) != 0) or inp.size(0) == 1:
        inp = inp[0]
    made: Tensor = torch.addmm(inp, mat1, mat2, out=out, alpha=alpha, beta=beta)
    return made


def _conv1x1_via_mm(x: Tensor, w: Tensor, *, out: Tensor) -> Tensor:
    """``torch._inductor.kernel.conv.conv1x1_via_mm``."""
    w = w.squeeze(-1).squeeze(-1)
    made: Tensor = torch.matmul(x.permute(0, 2, 3, 1), w.permute(1, 0), out=out.permute(0, 2, 3, 1))
    return made


def _assert_tensor_metadata(x: Tensor | None, size: Any, stride: Any, dtype: torch.dtype, name: str = "") -> None:
    """``torch._inductor.runtime.runtime_utils.assert_tensor_metadata``: that an operator gives what it said."""
    if x is not None and x.dtype != dtype:
        raise RuntimeError(f"{name} gives {x.dtype}, not {dtype}")
    if x is not None:
        torch._C._dynamo.guards.assert_size_stride(x, size, stride, name)


SAME = {
    name: getattr(torch, name) for name in ("convolution", "mm", "bmm", "addmm", "baddbmm", "_int_mm", "_scaled_mm")
}
"""Operators that the inductor takes as torch has them."""
EXTERN_KERNELS = SimpleNamespace(**SAME, bias_addmm=_bias_addmm, conv1x1_via_mm=_conv1x1_via_mm)
STAND_INS: dict[str | None, SimpleNamespace] = {
    SELECTION: SimpleNamespace(**{EXTERN: EXTERN_KERNELS}),
    "torch._inductor.runtime.runtime_utils": SimpleNamespace(assert_tensor_metadata=_assert_tensor_metadata),
}
"""Modules of the inductor's → what a program has in the place of their parts."""


Call = Callable[[list[Tensor]], Any]


def load(program: Program) -> Call:
    """A program's ``call``, its kernels loaded on their GPU.

    Raises:
        NoProgram: torch lacks what it needs, or CUDA refuses.
    """
    launchers: dict[str, _Launcher] = {}
    if program.kernels:
        if program.device is None:
            raise NoProgram("its kernels are for no GPU")
        with _on(program.device), tempfile.TemporaryDirectory() as folder:
            for number, one in enumerate(program.kernels):
                launchers[one.name] = _Launcher(one, Path(folder) / f"{number}.cubin", program.device)
    return executed(program.text, launchers)


@contextmanager
def _on(device: int) -> Iterator[None]:
    """With torch's context of a GPU current in this thread."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        yield


def executed(text: str, kernels: dict[str, Any]) -> Call:
    """The ``call`` of a text.

    Raises:
        NoProgram: it needs what it is not given.
    """
    given = {name: getattr(builtins, name) for name in _BUILTINS}
    namespace: dict[str, Any] = {
        "__builtins__": {**given, "__import__": _import},
        "__name__": "program",
        OWN: _Operators(),
        **kernels,
    }
    try:
        exec(compile(text, "<program>", "exec"), namespace)
        call: Call = namespace["call"]
    except Exception as error:
        raise NoProgram(f"its text does not run: {type(error).__name__}: {error}") from error
    return call


def _import(name: str, _globals: Any = None, _locals: Any = None, parts: Any = (), level: int = 0) -> Any:
    """In place of Python's: what a program may import."""
    if name in STAND_INS and parts:
        return STAND_INS[name]
    if level or name not in ALLOWED:
        raise ImportError(f"a program imports no {name}")
    made = importlib.import_module(name)
    return made if parts else importlib.import_module(name.partition(".")[0])


class _Operators:
    """Our operators, past torch's dispatcher where they are written in Python."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        from torch._library.custom_ops import OPDEFS

        made = OPDEFS.get(f"{OWN}::{name}")
        operator: Callable[..., Any] = made._init_fn if made is not None else getattr(torch.ops.joulemark, name).default
        setattr(self, name, operator)
        return operator


class _Launcher:
    """A program's kernel on a GPU."""

    def __init__(self, cubin: Cubin, path: Path, device: int) -> None:
        launcher = _torchs_launcher()
        path.write_bytes(base64.b64decode(cubin.code))
        try:
            loaded = launcher._load_kernel(str(path), cubin.symbol, cubin.shared, device)
        except Exception as error:
            raise NoProgram(f"{cubin.symbol} cannot be loaded: {type(error).__name__}: {error}") from error
        self._launch = launcher._launch_kernel
        self._ahead = {one.numbers: (loaded[-3], *one.grid, cubin.warps, cubin.shared) for one in cubin.launches}
        self._types, self._scratch = cubin.types + "O" * cubin.scratch, (None,) * cubin.scratch
        self._numbers, self._passed = picked(cubin.numbers), picked(cubin.passed)

    def run(self, *args: Any, stream: int) -> None:
        """One launch."""
        ahead = self._ahead[self._numbers(args)]
        self._launch(*ahead, self._types, self._passed(args) + self._scratch, stream)


def _torchs_launcher() -> Any:
    """That by which torch launches what Triton compiled: in C++."""
    made = getattr(torch._C, "_StaticCudaLauncher", None)
    if made is None:
        raise NoProgram("this torch has no launcher of compiled kernels")
    return made


def picked(places: tuple[int, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What takes the elements at some places of a tuple."""
    if not places:
        return lambda _: ()
    first, *others = places
    return itemgetter(first, *others) if others else lambda given: (given[first],)


def called(call: Call, given: List[Tensor]) -> Any:
    """A program's outputs.

    Raises:
        NoProgram: it fails.
    """
    try:
        return call(list(given))
    except NoProgram:
        raise
    except Exception as error:
        raise NoProgram(f"it does not run: {type(error).__name__}: {error}") from error


def aligned(given: List[Tensor]) -> list[Tensor]:
    """Tensors, copied where they do not lie at an address that kernels count on, as torch's compiler does."""
    return [_copied(one) if one.data_ptr() % ALIGNMENT else one for one in given]


def _copied(x: Tensor) -> Tensor:
    """A copy of the same strides."""
    size = 0 if 0 in x.shape else sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    return x.as_strided((size,), (1,)).clone().as_strided(x.shape, x.stride())
