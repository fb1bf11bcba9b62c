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

import ast
import base64
import builtins
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from operator import itemgetter
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes to which kernels may count on addresses that they are given (``torch._inductor.utils.ALIGNMENT``)."""
_SELECTION = "torch._inductor.select_algorithm"
_EXTERN = "extern_kernels"
_ALLOWED = ("torch", "math", "cmath", "ctypes", "torch._C", "torch._C._dynamo.guards")
"""What the text may import for itself."""
_BUILTINS = ("__build_class__", "abs", "bool", "float", "int", "len", "list", "max", "min", "range", "tuple", "zip")
_COMPILERS = ("_dynamo", "_functorch", "_inductor", "_prims", "compile", "compiler", "fx")
"""Parts of torch that a program does without."""
_OWN = "joulemark"
"""The namespace of our operators; in a program's text the name of what calls them."""
_TYPES = frozenset("OilfdbhBHIK")
"""Of a kernel's arguments, as torch's launcher names them: a pointer and numbers."""

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


def record(made: Callable[..., Any], names: List[str], given: List[Tensor], structure: str) -> Program:
    """What a function runs that torch's compiler made, proven: loaded, it gives bit for bit what that gives.

    Args:
        made: takes tensors, gives tensors.
        names: of the weights.
        given: what it was compiled for: weights, then inputs.
        structure: of the output.

    Raises:
        NoProgram: it holds what no program can, or what is not known here; or outputs differ.
    """
    device = _gpu_of(given)
    wrapper, expected = _watched(made, given)
    text, kernels = reduced(wrapper.text)
    recipes = _recipes_in(text)
    recorders = {name: _Recorder(name, wrapper.namespace[name], device) for name in kernels}
    _check_same(_called(_executed(text, recorders), given), expected, "while it was recorded")
    formats = [format_told(one) for one in given]
    program = Program(
        text,
        tuple(one.cubin() for one in recorders.values()),
        recipes,
        tuple(f"{name} {one}" for name, one in zip(names, formats, strict=False)),
        tuple(formats[len(names) :]),
        structure,
        torch.are_deterministic_algorithms_enabled(),
        device,
    )
    _check_same(_called(load(program), given), expected, "loaded")
    return program


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


def _gpu_of(given: List[Tensor]) -> int:
    devices = {one.device for one in given}
    if len(devices) != 1 or not given[0].is_cuda or torch.version.hip:
        raise NoProgram(f"weights and inputs are on {sorted(map(str, devices))}, not on one GPU")
    if any(one.data_ptr() % _ALIGNMENT for one in given):
        raise NoProgram(f"a weight or input does not lie at a multiple of {_ALIGNMENT} bytes")
    index: int = given[0].device.index
    return index


@dataclass
class _Wrapper:
    """A module of the inductor's that was called."""

    path: str
    namespace: dict[str, Any]
    args: list[Any]
    out: Any = None

    @property
    def text(self) -> str:
        try:
            return Path(self.path).read_text(encoding="utf-8")
        except OSError as error:
            raise NoProgram(f"the compiler's text cannot be read: {error}") from error


def _watched(made: Callable[..., Any], given: List[Tensor]) -> tuple[_Wrapper, list[Tensor]]:
    """The one wrapper that a call runs, and the call's outputs: what lies between changes nothing."""
    seen: list[_Wrapper] = []

    def watch(frame: Any, event: str, out: Any) -> None:
        if frame.f_code.co_name == "call" and "extern_kernels" in frame.f_globals:
            if event == "call":
                args = [*frame.f_locals.get("args", ())]
                seen.append(_Wrapper(frame.f_code.co_filename, frame.f_globals, args))
            elif event == "return" and seen:
                seen[-1].out = out

    if sys.getprofile() is not None:  # one in C, as cProfile of Python 3.11, cannot be put back
        raise NoProgram("a profiler watches this thread")
    sys.setprofile(watch)
    try:
        outputs = made(*given)
    finally:
        sys.setprofile(None)
    if len(seen) != 1:
        raise NoProgram(f"the compiler made {len(seen)} modules of it")
    _check_passed(seen[0].args, given, "given")
    _check_passed(seen[0].out, outputs, "put out")
    memory = {one.untyped_storage().data_ptr() for one in given if one.numel()}
    if any(one.numel() and one.untyped_storage().data_ptr() in memory for one in outputs):
        raise NoProgram("an output shares memory with a weight or an input")
    return seen[0], list(outputs)


def _check_passed(inner: Any, outer: Any, what: str) -> None:
    """That the wrapper has the very tensors that the whole has.

    Raises:
        NoProgram: it has others.
    """
    if not isinstance(inner, list | tuple) or not isinstance(outer, list | tuple) or len(inner) != len(outer):
        raise NoProgram(f"what the compiler's module is {what} is not what the whole is")
    for one, other in zip(inner, outer, strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            raise NoProgram(f"what is {what} holds what is no tensor")
        if one.data_ptr() != other.data_ptr() or format_told(one) != format_told(other):
            raise NoProgram(f"what the compiler's module is {what} is not what the whole is")


def _check_same(out: Any, expected: list[Tensor], when: str) -> None:
    """That outputs are equal bit for bit.

    Raises:
        NoProgram: they are not.
    """
    if len(out) != len(expected):
        raise NoProgram(f"{when} it gives {len(out)} outputs, not {len(expected)}")
    for one, other in zip(out, expected, strict=True):
        if format_told(one) != format_told(other) or not _equal(one, other):
            raise NoProgram(f"{when} it gives other outputs")


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one format hold the same bits."""
    bits = [each.contiguous().flatten().view(torch.uint8) for each in (one, other)]
    return bool(torch.equal(bits[0], bits[1]))


def reduced(text: str) -> tuple[str, tuple[str, ...]]:
    """What ``call`` needs of the inductor's text, and the names of the kernels in it.

    Raises:
        NoProgram: it holds what is not known here.
    """
    tree = ast.parse(text)
    bound: dict[str, ast.stmt] = {}
    again = set()
    for node in tree.body:
        for name in _bound_by(node):
            if name in bound and ast.dump(bound[name]) != ast.dump(node):
                again.add(name)
            bound.setdefault(name, node)
    needed = _needed(bound)
    if again & set(needed):
        raise NoProgram(f"the compiler's text binds {sorted(again)} more than once")
    if "async_compile" in needed:
        raise NoProgram("it has kernels that Triton did not compile")
    kernels = tuple(name for name in needed if _is_kernel(bound[name]))
    kept = [
        _narrowed(node, needed)
        for node in tree.body
        if any(bound.get(one) is node for one in needed) and not _is_kernel(node)
    ]
    for node in kept:
        _check_kept(node)
    kept = [_Own().visit(node) for node in kept]
    return ast.unparse(ast.fix_missing_locations(ast.Module(kept, []))), kernels


def _bound_by(node: ast.stmt) -> list[str]:
    """Names that a statement at the top binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [one.asname or one.name.partition(".")[0] for one in node.names]
    if isinstance(node, ast.Assign) and all(isinstance(one, ast.Name) for one in node.targets):
        return [one.id for one in node.targets if isinstance(one, ast.Name)]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    told = ast.unparse(node)
    if told in ("async_compile.wait(globals())", "del async_compile") or told.startswith("if __name__ == '__main__'"):
        return []
    raise NoProgram(f"the compiler's text holds {told[:60]!r}")


def _needed(bound: dict[str, ast.stmt]) -> list[str]:
    """Names that ``call`` needs, in the text's order."""
    if "call" not in bound:
        raise NoProgram("the compiler's text holds no call")
    found, left = {"call"}, ["call"]
    while left:
        node = bound[left.pop()]
        if _is_kernel(node):
            continue
        names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} & set(bound) - found
        found |= names
        left += names
    return [name for name in bound if name in found]


def _is_kernel(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("async_compile.triton(")


def _check_kept(node: ast.stmt) -> None:
    """That all of a statement is known.

    Raises:
        NoProgram: it is not.
    """
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
        raise NoProgram(f"a constant is attached to the compiler's module: {ast.unparse(node)}")
    if isinstance(node, ast.ImportFrom) and all(hasattr(_STAND_INS.get(node.module), one.name) for one in node.names):
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        for name in [node.module] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]:
            if name not in _ALLOWED:
                raise NoProgram(f"the compiler's text needs {ast.unparse(node)!r}")
    for chain in _chains(node):
        parts = chain.split(".")
        if parts[0] == "torch" and parts[1:2] and parts[1] in _COMPILERS:
            raise NoProgram(f"the compiler's text needs {chain}")
        if parts[:2] == ["torch", "ops"] and (len(parts) < 3 or parts[2] not in ("aten", _OWN)):
            raise NoProgram(f"the compiler's text needs {chain}")
        if parts[0] == _EXTERN and (len(parts) != 2 or not _is_known(parts[1])):
            raise NoProgram(f"the compiler's text needs {chain}")


def _dotted(node: ast.AST) -> str | None:
    """A dotted name; None of anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _chains(node: ast.AST) -> Iterator[str]:
    """Dotted names in a statement, longest ones."""
    told = _dotted(node)
    if told is not None:
        yield told
        return
    for child in ast.iter_child_nodes(node):
        yield from _chains(child)


def _narrowed(node: ast.stmt, needed: List[str]) -> ast.stmt:
    """An import of what is needed alone."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        node.names = [one for one in node.names if (one.asname or one.name.partition(".")[0]) in needed]
    return node


class _Own(ast.NodeTransformer):
    """Has a text call our operators past the dispatcher: ``torch.ops.joulemark.x.default`` becomes ``joulemark.x``."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """One dotted name."""
        parts = (_dotted(node) or "").split(".")
        if parts[:3] == ["torch", "ops", _OWN] and len(parts) == 5 and parts[4] == "default":
            return ast.copy_location(ast.Attribute(ast.Name(_OWN, ast.Load()), parts[3], ast.Load()), node)
        return self.generic_visit(node)


def _recipes_in(text: str) -> tuple[int, ...]:
    """Numbers of the recipes that a text names: an operator's last argument, where that is a number."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and _dotted(node.func) == f"{_OWN}.executed":
            last = node.args[-1] if node.args else None
            if node.keywords or not isinstance(last, ast.Constant) or not isinstance(last.value, int):
                raise NoProgram(f"the compiler's text calls {ast.unparse(node)[:60]!r}")
            found.append(last.value)
    return tuple(dict.fromkeys(found))


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


_SAME = {
    name: getattr(torch, name) for name in ("convolution", "mm", "bmm", "addmm", "baddbmm", "_int_mm", "_scaled_mm")
}
"""Operators that the inductor takes as torch has them."""
_EXTERN_KERNELS = SimpleNamespace(**_SAME, bias_addmm=_bias_addmm, conv1x1_via_mm=_conv1x1_via_mm)
_STAND_INS: dict[str | None, SimpleNamespace] = {
    _SELECTION: SimpleNamespace(**{_EXTERN: _EXTERN_KERNELS}),
    "torch._inductor.runtime.runtime_utils": SimpleNamespace(assert_tensor_metadata=_assert_tensor_metadata),
}
"""Modules of the inductor's → what a program has in the place of their parts."""


def _is_known(name: str) -> bool:
    """Whether the inductor's operator of a name is what stands in for it."""
    theirs = getattr(importlib.import_module(_SELECTION).extern_kernels, name, None)
    ours = getattr(_EXTERN_KERNELS, name, None)
    return ours is not None and (theirs is ours or name not in _SAME)


class _Recorder:
    """In place of a kernel of the inductor's: runs it and keeps how it is launched."""

    def __init__(self, name: str, kernel: Any, device: int) -> None:
        self.name, self._kernel, self._device = name, kernel, device
        self.launches: dict[tuple[Number, ...], tuple[int, int, int]] = {}
        launchers: Any = getattr(kernel, "launchers", ())
        if len(launchers) != 1 or not getattr(launchers[0], "_is_static", False):
            raise NoProgram(f"{name} is not launched by torch's own launcher")
        self._launcher = launchers[0]
        self._loaded = self._launcher.__globals__["runner"].__self__
        if not set(self._loaded.arg_tys) <= _TYPES or getattr(self._loaded, "_has_tensordesc", False):
            raise NoProgram(f"{name} takes {self._loaded.arg_tys}, and more than pointers and numbers")
        if getattr(self._loaded, "device_agnostic", False):
            raise NoProgram(f"{name} is not compiled for one GPU")
        self.numbers, self.passed = self._arguments()

    def _arguments(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        names = [one for one in signature(self._launcher).parameters if one != "stream"]
        inner = [one for n, one in enumerate(self._loaded.arg_names) if n not in self._loaded.full_constexprs]
        if not set(inner) <= set(names) or len(inner) != len(self._loaded.arg_tys):
            raise NoProgram(f"{self.name} takes {inner} of {names}")
        passed = tuple(map(names.index, inner))
        pointers = {place for place, kind in zip(passed, self._loaded.arg_tys, strict=True) if kind == "O"}
        return tuple(n for n in range(len(names)) if n not in pointers), passed

    def run(self, *args: Any, stream: int) -> None:
        """One launch."""
        given: list[tuple[Any, ...]] = []
        globals_ = {**self._launcher.__globals__, "runner": lambda *inner: given.append(inner)}
        made = self._launcher
        FunctionType(made.__code__, globals_, made.__name__, made.__defaults__, made.__closure__)(*args, stream=stream)
        x, y, z, _, *inner = given[0]
        self._check(args, (x, y, z), inner)
        self.launches[_picked(self.numbers)(args)] = (x, y, z)
        self._kernel.run(*args, stream=stream)

    def _check(self, args: tuple[Any, ...], grid: tuple[Any, ...], inner: list[Any]) -> None:
        passed = [args[n] for n in self.passed]
        if len(inner) != len(passed) or any(one is not other for one, other in zip(inner, passed, strict=True)):
            raise NoProgram(f"{self.name} is passed other arguments than it is given")
        for n, one in enumerate(args):
            if not isinstance(one, bool | int | float if n in self.numbers else Tensor):
                raise NoProgram(f"argument {n} of {self.name} is a {type(one).__name__}")
        if not all(isinstance(one, int) for one in grid):
            raise NoProgram(f"{self.name} has the grid {grid}")

    def cubin(self) -> Cubin:
        """What is kept of it."""
        kernel = self._loaded
        return Cubin(
            self.name,
            kernel.name,
            base64.b64encode(_code_of(self._launcher, kernel, self._device)).decode(),
            kernel.arg_tys,
            int(kernel.num_warps),
            int(kernel.shared),
            self.numbers,
            self.passed,
            int(bool(kernel.has_global_scratch)) + int(bool(kernel.has_profile_scratch)),
            tuple(Launch(numbers, grid) for numbers, grid in self.launches.items()),
        )


def _code_of(launcher: Any, kernel: Any, device: int) -> bytes:
    """A kernel's cubin, which lies in Triton's cache."""
    kept = getattr(kernel, "cubin_raw", None)
    if isinstance(kept, bytes):
        return kept
    folder = importlib.import_module("torch._inductor.runtime.cache_dir_utils").triton_cache_dir(device)
    try:
        return Path(folder, launcher.cache_hash, f"{kernel.name}.cubin").read_bytes()
    except OSError as error:
        raise NoProgram(f"the code of {kernel.name} cannot be read: {error}") from error


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
    return _executed(program.text, launchers)


@contextmanager
def _on(device: int) -> Iterator[None]:
    """With torch's context of a GPU current in this thread."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        yield


def _executed(text: str, kernels: dict[str, Any]) -> Call:
    """The ``call`` of a text.

    Raises:
        NoProgram: it needs what it is not given.
    """
    given = {name: getattr(builtins, name) for name in _BUILTINS}
    namespace: dict[str, Any] = {
        "__builtins__": {**given, "__import__": _import},
        "__name__": "program",
        _OWN: _Operators(),
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
    if name in _STAND_INS and parts:
        return _STAND_INS[name]
    if level or name not in _ALLOWED:
        raise ImportError(f"a program imports no {name}")
    made = importlib.import_module(name)
    return made if parts else importlib.import_module(name.partition(".")[0])


class _Operators:
    """Our operators, past torch's dispatcher where they are written in Python."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        from torch._library.custom_ops import OPDEFS

        made = OPDEFS.get(f"{_OWN}::{name}")
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
        self._numbers, self._passed = _picked(cubin.numbers), _picked(cubin.passed)

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


def _picked(places: tuple[int, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What takes the elements at some places of a tuple."""
    if not places:
        return lambda _: ()
    first, *others = places
    return itemgetter(first, *others) if others else lambda given: (given[first],)


def _called(call: Call, given: List[Tensor]) -> Any:
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
    return [_copied(one) if one.data_ptr() % _ALIGNMENT else one for one in given]


def _copied(x: Tensor) -> Tensor:
    """A copy of the same strides."""
    size = 0 if 0 in x.shape else sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    return x.as_strided((size,), (1,)).clone().as_strided(x.shape, x.stride())
