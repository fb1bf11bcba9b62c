"""torch's compiler: of a graph that is traced here, and with tuned convolutions without a template that never wins.

Of the seconds that torch.compile takes for a graph that its caches hold most go into reading the bytecode of each
module's ``forward`` and into guards for each weight. A merged graph is known already: its operators for an example are
traced by ``make_fx`` and given to the compiler behind: ``torch._inductor.standalone_compile``. Inception-v4 (bf16, 75²,
149 segments, 50 of them as one operator each) took 5.4 s of a CPU's core by torch.compile and 1.2 s so, with torch
2.14 and the compiler's caches warm; outputs were equal.

With max-autotune, torch.compile times Triton's convolution template for grouped convolutions too. It multiplies each
group's channels as if they were all: measured on an H200 with torch 2.11 in bf16, depthwise layers of 96, 192 and 384
channels took its best size 26.5, 17.7 and 68.7 ms, cuDNN 0.133, 0.075 and 0.135 ms, and tuning 13, 6 and 33 s a layer.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import copy
import importlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager, suppress
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from joulemark.merged import programs, recording
from joulemark.merged.programs import NoProgram, Program

_TEMPLATE = "triton_convolution"
_GROUPS = re.compile(r"\bGROUPS=(\d+)")
"""In the description that a template's choice has of its constants."""


def without_grouped_templates(choices: list[Any]) -> list[Any]:
    """The choices of a tuned operator without that template over groups; all of them where nothing else is left.

    Args:
        choices: of torch's inductor, each with a ``name`` and a ``description``; cuDNN's has an empty one.
    """
    return [one for one in choices if not _is_grouped_template(one)] or choices


def _is_grouped_template(choice: Any) -> bool:
    groups = _GROUPS.search(str(getattr(choice, "description", "")))
    return str(choice.name).startswith(_TEMPLATE) and groups is not None and int(groups[1]) > 1


def leave_out_grouped_templates() -> bool:
    """Have torch's compiler tune without them from now on in this process.

    Returns:
        Whether it does: not every version of torch can be asked to.
    """
    try:
        from torch._inductor.select_algorithm import get_algorithm_selector_cache

        functions = get_algorithm_selector_cache().preprocessing_fns
    except (ImportError, AttributeError):
        return False
    if without_grouped_templates not in functions:
        functions.append(without_grouped_templates)
    return True


def start_workers() -> bool:
    """Have torch's compiler start its processes now, beside what is done until it has work for them.

    It does so by itself when it is first called, and until they are there it compiles one kernel after another.

    Returns:
        Whether it does: not every version of torch can be asked to.
    """
    try:
        from torch._inductor.async_compile import maybe_warm_pool
    except ImportError:
        return False
    maybe_warm_pool()
    return True


def start_compiler() -> None:
    """Import torch's compiler, as it does itself when it is first asked for: seconds, once in a process."""
    with suppress(ImportError):  # not every version of torch has these; what compiles says what is missing
        importlib.import_module("torch._dynamo.convert_frame")
        importlib.import_module("torch._inductor.compile_fx")


def compiled(module: nn.Module, mode: str = "default") -> nn.Module:
    """A module under torch.compile for the shapes of its inputs, without graphs of the compiler's own."""
    if mode.startswith("max-autotune"):
        leave_out_grouped_templates()
    made: nn.Module = torch.compile(module, dynamic=False, mode=mode)
    return made


_OFF = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
"""Variables that switch torch's compiler off."""


class _Tracing(threading.local):
    """Whether a thread traces a module for the compiler."""

    on = False


_tracing = _Tracing()


def seen_by_compiler() -> bool:
    """Whether what runs now is read by torch's compiler, which is to see torch's operators rather than our kernels."""
    return torch.compiler.is_compiling() or _tracing.on


@contextmanager
def _traced_for_compiler() -> Iterator[None]:
    _tracing.on = True
    try:
        yield
    finally:
        _tracing.on = False


class Compiled(nn.Module):
    """A module under torch's compiler for the shapes of its inputs, without graphs of the compiler's own.

    What it is first called with is compiled from a graph that is traced here. Other inputs, calls with gradients or
    under autocast and whatever traces go to torch.compile, as all do where the model or this version of torch does not
    allow that, or the model changes its inputs. Weights are read anew in each call; where they are moved or replaced by
    some of another format, and in a copy, the next call compiles again.

    What was compiled from a trace can be kept as a :class:`~joulemark.merged.programs.Program`, which runs in its place
    in another process: torch's compiler is then not imported until something is left to it.

    Args:
        inner: what is compiled.
        mode: of torch.compile.
    """

    def __init__(self, inner: nn.Module, mode: str = "default") -> None:
        super().__init__()
        self.inner = inner
        self.mode, self.training = mode, inner.training
        self._of_torch: list[nn.Module] = []  # not registered: its weights are those of the module in it
        self._forget()

    @property
    def by_torch(self) -> nn.Module:
        """The module under torch.compile, made when it is first asked for."""
        if not self._of_torch:
            self._of_torch.append(compiled(self.inner, self.mode))
        return self._of_torch[0]

    def _forget(self) -> None:
        self._made: tuple[tuple[object, ...], _Traced | None] | None = None

    def forward(self, *inputs: Any) -> Any:
        """The module's output."""
        traced = self._traced_for(inputs) if _is_plain(inputs) else None
        return self.by_torch(*inputs) if traced is None else traced(*inputs)

    def ready_for(self, *inputs: Any) -> None:
        """Compile for a call ahead of it; what is left to torch.compile is compiled in the call."""
        if _is_plain(inputs):
            self._traced_for(inputs)

    def program(self, *inputs: Any) -> Program | None:
        """What was compiled for such inputs, as data; None where that cannot be: see :meth:`record`."""
        try:
            return self.record(*inputs)
        except Exception:  # of torch's compiler, whose parts are read, or for want of memory
            return None

    def record(self, *inputs: Any) -> Program:
        """What was compiled for such inputs, as data, proven by a call of it.

        Raises:
            NoProgram: nothing is compiled for them from a trace, or it is no program.
        """
        with torch.no_grad():
            made, plain = self._made, _is_plain(inputs)
            if not plain or made is None or made[1] is None or made[0] != _signature(inputs) or not made[1].fits():
                raise NoProgram("nothing was compiled from a trace for these inputs")
            return made[1].record(_names(self.inner), inputs)

    def runs(self, program: Program, *inputs: Any) -> bool:
        """Take a program for such inputs, in the place of compiling; whether it fits: see :meth:`take`."""
        try:
            self.take(program, *inputs)
        except Exception:  # of a program that is none
            return False
        return True

    def take(self, program: Program, *inputs: Any) -> None:
        """Take a program for such inputs, in the place of compiling.

        Raises:
            NoProgram: it was made for others, or cannot be loaded.
        """
        with torch.no_grad():
            plain = _is_plain(inputs)
        if not plain or any(os.environ.get(one) == "1" for one in _OFF):
            raise NoProgram("such inputs are left to torch.compile")
        traced = _from_program(self.inner, program, inputs)
        with _compiling:
            self._made = _signature(inputs), traced

    def _traced_for(self, inputs: tuple[Tensor, ...]) -> _Traced | None:
        """What is compiled from a trace, made now where nothing is yet; None where that is for other inputs."""
        signature = _signature(inputs)
        if not self._is_up_to_date(self._made):
            with _compiling:
                if not self._is_up_to_date(self._made):
                    inner = getattr(self.by_torch, "_orig_mod", None)  # None where torch.compile is to do nothing
                    self._made = signature, None if inner is None else _from_trace(self.inner, inputs, self.mode)
        made = self._made
        return made[1] if made is not None and made[0] == signature else None

    @staticmethod
    def _is_up_to_date(made: tuple[tuple[object, ...], _Traced | None] | None) -> bool:
        return made is not None and (made[1] is None or made[1].fits())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Compiled:
        """Weights move: what was compiled for the old ones is dropped."""
        self._forget()
        moved: Compiled = super()._apply(fn, recurse)
        return moved

    def __getstate__(self) -> dict[str, Any]:
        """What is copied: all but what was compiled, which reads these weights."""
        return {**self.__dict__, "_made": None, "_of_torch": []}


_compiling = threading.RLock()
"""Held while a module is compiled from a trace: other threads wait for it."""


def _is_plain(inputs: tuple[Any, ...]) -> bool:
    """Whether a call is one of ordinary tensors alone, without gradients, autocast and what records or replaces calls.

    That is another compiler, a tracer, a transform of torch.func's, or a mode that sees each operator.
    """
    if not inputs or torch.is_grad_enabled() or seen_by_compiler() or torch.jit.is_tracing():
        return False
    if forward_ad._current_level >= 0:  # gradients in this direction need no grad mode
        return False
    if torch._C._is_any_autocast_enabled() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:  # a weight may be one of a batch of them
        return False
    return all(type(one) is Tensor and _is_ordinary(one) for one in inputs)


def _is_ordinary(x: Tensor) -> bool:
    """Whether a tensor is what lies in its memory, where its strides say: not its negative, nor its conjugate."""
    apart = x.layout is not torch.strided or x.is_nested or x.is_neg() or x.is_conj()
    return not apart and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _signature(inputs: tuple[Tensor, ...]) -> tuple[object, ...]:
    """What code is compiled for."""
    return (torch.are_deterministic_algorithms_enabled(), *map(_format, inputs))


def _format(x: Tensor | None) -> tuple[object, ...] | None:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


_Place = tuple[dict[str, Any], str]
"""What holds a parameter or buffer, and by which key."""


class _Traced:
    """A module's call, compiled from a trace of its operators.

    Args:
        made: takes weights and inputs, gives the tensors of the output in order.
        places: of the weights.
        structure: of the output.
        program: that it runs; None where torch's compiler made it.
    """

    def __init__(
        self,
        made: Callable[..., Any],
        places: List[_Place],
        structure: pytree.TreeSpec,
        program: Program | None = None,
    ) -> None:
        self._made, self._places, self._structure, self._program = made, places, structure, program
        self._weights = self._held()

    def _held(self) -> list[Tensor | None]:
        return [held.get(key) for held, key in self._places]

    def fits(self) -> bool:
        """Whether weights are those that it was compiled for, or others of the same formats."""
        before, now = self._weights, self._held()
        if all(map(is_, before, now)):
            return True
        if [_format(one) for one in before] != [_format(one) for one in now]:
            return False
        self._weights = now
        return True

    def __call__(self, *inputs: Tensor) -> Any:
        """The module's output."""
        return pytree.tree_unflatten(self._made(*self._weights, *inputs), self._structure)

    def record(self, names: List[str], inputs: tuple[Tensor, ...]) -> Program:
        """What it runs, as data.

        Raises:
            NoProgram: that cannot be.
        """
        if self._program is not None:
            return self._program
        try:
            structure: str = pytree.treespec_dumps(self._structure)
            known = pytree.treespec_loads(structure) == self._structure
        except Exception as error:  # a type of the user's
            raise NoProgram(f"the output's structure cannot be written: {error}") from error
        if not known:
            raise NoProgram("the output's structure cannot be written")
        weights = [one for one in self._weights if one is not None]
        return recording.record(self._made, names, [*weights, *inputs], structure)


def _from_trace(module: nn.Module, inputs: tuple[Tensor, ...], mode: str) -> _Traced | None:
    """A module's call, compiled from a trace of its operators; None where that cannot be."""
    places = _places(module)
    structures: list[pytree.TreeSpec] = []

    def call(*given: Tensor) -> list[Any]:
        before = _versions(given)
        out = _with_weights(module, given[: len(places)])(*given[len(places) :])
        if before != _versions(given):
            raise ValueError("it changes what it is given: which of that shares memory counts then")
        leaves: list[Any]
        leaves, structure = pytree.tree_flatten(out)
        structures.append(structure)
        return leaves

    try:
        from torch._dynamo.convert_frame import compile_lock
        from torch._inductor import config, list_mode_options, standalone_compile

        if torch._dynamo.config.disable:  # TORCH_COMPILE_DISABLE
            return None

        own = "triton.autotune_at_compile_time"  # else another setting than torch.compile has
        options = {"config_patches": {**list_mode_options(mode), own: config.triton.autotune_at_compile_time}}
        with compile_lock, torch.inference_mode(False), torch.no_grad():
            # Each by itself: of one tensor that is given twice a trace would know one place alone.
            given = [one.detach() for one in (*(held[key] for held, key in places), *inputs)]
            with _traced_for_compiler():
                graph = make_fx(call, tracing_mode="fake")(*given)
            made: Any = standalone_compile(graph, given, dynamic_shapes="from_example_inputs", options=options)
    except Exception:  # torch.compile says what is wrong, where it is not this way alone
        return None
    return _Traced(made, places, structures[-1])


def _from_program(module: nn.Module, program: Program, inputs: tuple[Tensor, ...]) -> _Traced:
    """A module's call by a program.

    Raises:
        NoProgram: it does not fit.
    """
    places = _places(module)
    recipes = [one.number for one in module.modules() if isinstance(getattr(one, "number", None), int)]
    programs.check_fits(program, _names(module), [*(held[key] for held, key in places), *inputs], recipes)
    call, structure = programs.load(program), pytree.treespec_loads(program.structure)
    return _Traced(lambda *given: call(programs.aligned(given)), places, structure, program)


def _versions(tensors: tuple[Tensor, ...]) -> list[int]:
    """How often each was written; one of inference mode refuses to be, outside of it."""
    return [0 if one.is_inference() else one._version for one in tensors]


def _places(module: nn.Module) -> list[_Place]:
    """Where a module and its parts, each once, have parameters and buffers."""
    held = [part for one in module.modules() for part in (one._parameters, one._buffers)]
    return [(part, key) for part in held for key, value in part.items() if value is not None]


def _names(module: nn.Module) -> list[str]:
    """What is at these places."""
    named = [(name, part) for name, one in module.named_modules() for part in (one._parameters, one._buffers)]
    return [f"{name}.{key}" for name, part in named for key, value in part.items() if value is not None]


def _with_weights(module: nn.Module, values: tuple[Tensor, ...]) -> nn.Module:
    """A copy of a module with other values at its places; the module may be called meanwhile."""
    own = [held[key] for held, key in _places(module)]
    made = copy.deepcopy(module, {id(one): one for one in own})
    for (held, key), value in zip(_places(made), values, strict=True):
        held[key] = value
    return made
