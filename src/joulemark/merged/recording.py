"""Records what torch's compiler made of a module as a program (:mod:`joulemark.merged.programs`), and proves it.

A call of what was made is watched: it is to run one module of the inductor, with the very tensors that it is given. Of
that module's text what is of the compiler is left out; what is not known here is refused. The text that is left is run
with recorders in the place of the kernels, which note how each is launched, and at last as a new process would run it:
only what gives the same bits is a program.
"""

from __future__ import annotations

import ast
import base64
import importlib
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from joulemark.merged.programs import (
    ALIGNMENT,
    ALLOWED,
    EXTERN,
    EXTERN_KERNELS,
    OWN,
    SAME,
    SELECTION,
    STAND_INS,
    Cubin,
    Launch,
    NoProgram,
    Number,
    Program,
    called,
    executed,
    format_told,
    load,
    picked,
)

_COMPILERS = ("_dynamo", "_functorch", "_inductor", "_prims", "compile", "compiler", "fx")
"""Parts of torch that a program does without."""
_TYPES = frozenset("OilfdbhBHIK")
"""Of a kernel's arguments, as torch's launcher names them: a pointer and numbers."""


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
    _check_same(called(executed(text, recorders), given), expected, "while it was recorded")
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
    _check_same(called(load(program), given), expected, "loaded")
    return program


def _gpu_of(given: List[Tensor]) -> int:
    devices = {one.device for one in given}
    if len(devices) != 1 or not given[0].is_cuda or torch.version.hip:
        raise NoProgram(f"weights and inputs are on {sorted(map(str, devices))}, not on one GPU")
    if any(one.data_ptr() % ALIGNMENT for one in given):
        raise NoProgram(f"a weight or input does not lie at a multiple of {ALIGNMENT} bytes")
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
    if isinstance(node, ast.ImportFrom) and all(hasattr(STAND_INS.get(node.module), one.name) for one in node.names):
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        for name in [node.module] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]:
            if name not in ALLOWED:
                raise NoProgram(f"the compiler's text needs {ast.unparse(node)!r}")
    for chain in _chains(node):
        parts = chain.split(".")
        if parts[0] == "torch" and parts[1:2] and parts[1] in _COMPILERS:
            raise NoProgram(f"the compiler's text needs {chain}")
        if parts[:2] == ["torch", "ops"] and (len(parts) < 3 or parts[2] not in ("aten", OWN)):
            raise NoProgram(f"the compiler's text needs {chain}")
        if parts[0] == EXTERN and (len(parts) != 2 or not _is_known(parts[1])):
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
        if parts[:3] == ["torch", "ops", OWN] and len(parts) == 5 and parts[4] == "default":
            return ast.copy_location(ast.Attribute(ast.Name(OWN, ast.Load()), parts[3], ast.Load()), node)
        return self.generic_visit(node)


def _recipes_in(text: str) -> tuple[int, ...]:
    """Numbers of the recipes that a text names: an operator's last argument, where that is a number."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and _dotted(node.func) == f"{OWN}.executed":
            last = node.args[-1] if node.args else None
            if node.keywords or not isinstance(last, ast.Constant) or not isinstance(last.value, int):
                raise NoProgram(f"the compiler's text calls {ast.unparse(node)[:60]!r}")
            found.append(last.value)
    return tuple(dict.fromkeys(found))


def _is_known(name: str) -> bool:
    """Whether the inductor's operator of a name is what stands in for it."""
    theirs = getattr(importlib.import_module(SELECTION).extern_kernels, name, None)
    ours = getattr(EXTERN_KERNELS, name, None)
    return ours is not None and (theirs is ours or name not in SAME)


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
        self.launches[picked(self.numbers)(args)] = (x, y, z)
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
