"""Users' own models by name: ``pkg.mod:factory``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulemark.errors import ConfigurationError, JoulemarkError
from joulemark.records import Case
from joulemark.workloads.base import Step, Workload
from joulemark.workloads.source_names import names_of
from joulemark.workloads.spec import ModelSpec, as_tensors
from joulemark.workloads.steps import TorchWorkload, seed_of

if TYPE_CHECKING:
    import torch
    from torch import nn

PHASES = ("inference", "train")
"""What a module without a :class:`ModelSpec` can be measured in."""

_WANTED = "return a Workload, a ModelSpec, a pair (nn.Module, inputs), or a module with example_inputs(batch_size)"


def check(name: str, rootdir: Path | None = None) -> None:
    """Whether a name has the form ``pkg.mod:factory`` and its module exists; the module itself is not imported.

    Where the module's text says all names that it has, the factory is looked for among them; :func:`resolve` has the
    last word.

    Args:
        name: as given to ``--bench-models``.
        rootdir: the project's root; modules are looked for there too, and in the working directory.

    Raises:
        ConfigurationError: the form is wrong, there is no such module, or its text is no Python or has no such name.
    """
    module, attribute = _parts(name)
    _extend_path(rootdir)
    if not _exists(module):
        raise _no_module(name, module)
    if module not in sys.modules:
        _check_text(name, module, attribute.partition(".")[0])


def resolve(name: str, rootdir: Path | None = None) -> Callable[[], Any]:
    """The factory that a name stands for; its module is imported, and the factory not called.

    Args:
        name: ``pkg.mod:factory``.
        rootdir: as for :func:`check`.

    Raises:
        ConfigurationError: as of :func:`check`; importing raised, or what is there cannot be called.
    """
    module, attribute = _parts(name)
    _extend_path(rootdir)
    return _attribute(name, _import(name, module), attribute)


def load(name: str, rootdir: Path | None = None) -> Workload:
    """The workload that a user's factory makes; it is called here, once, and again for each further case.

    Args:
        name: ``pkg.mod:factory``, which becomes the workload's name.
        rootdir: as for :func:`check`.

    Raises:
        ConfigurationError: the form is wrong; there is no such module or attribute; importing or calling raised;
            what came back is not a workload. The user's own exception is chained.
    """
    factory = resolve(name, rootdir)
    made = _call(name, factory)
    if isinstance(made, ModelSpec):
        return TorchWorkload(replace(made, name=name))
    if _is_module(made) or (isinstance(made, tuple) and len(made) == 2 and _is_module(made[0])):
        return TorchWorkload(_spec_of(name, factory, made))
    if isinstance(made, Workload) and not isinstance(made, type):
        return made if made.name == name else _Named(name, made)
    raise _not_a_workload(name, made)


@dataclass(frozen=True)
class _Named:
    """A workload under the name by which the user asked for it."""

    name: str
    inner: Workload

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(self.inner.phases)

    def build(self, case: Case, device: str) -> Step:
        return self.inner.build(case, device)


def _parts(name: str) -> tuple[str, str]:
    """Module and attribute of a name."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigurationError(
            f"{name!r} names no factory", "write pkg.mod:factory, with a colon before the function"
        )
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise ConfigurationError(
            f"{name!r} is not a module and a function", "write pkg.mod:factory, a module, not a file"
        )
    return module, attribute


def _extend_path(rootdir: Path | None) -> None:
    """Let the project's own modules be found, after everything that is installed."""
    for folder in (Path.cwd(), rootdir):
        if folder is not None and str(folder) not in sys.path and not ("" in sys.path and folder == Path.cwd()):
            sys.path.append(str(folder))
            importlib.invalidate_caches()


def _exists(module: str) -> bool:
    """Whether a module can be found, its parent packages left unimported where they can be."""
    return module in sys.modules or _spec_of_module(module) is not None or ("." in module and _exists_by_import(module))


def _spec_of_module(module: str) -> Any:
    """What importing a module would start from, without importing its parents; None where none is found so."""
    name, spec, path = "", None, None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = _find(name, path)
        if spec is None:
            return None
        path = spec.submodule_search_locations or ()
    return spec


def _check_text(name: str, module: str, attribute: str) -> None:
    """Refuse a name that cannot be in a module, as its text tells; of a module without a text nothing is told."""
    spec = _spec_of_module(module)
    get_source = getattr(getattr(spec, "loader", None), "get_source", None)
    try:
        text = None if get_source is None else get_source(spec.name)
        names = None if text is None else names_of(text)
    except SyntaxError as error:
        raise _raised(name, f"importing {module}", error) from error
    except (ImportError, OSError, ValueError, RecursionError):
        return  # importing it has the last word
    if names is None or attribute in names or attribute.startswith("__"):
        return
    folders = spec.submodule_search_locations
    if not folders or _find(f"{module}.{attribute}", folders) is None:
        raise _no_attribute(name, module, attribute, attribute, names)


def _find(name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None


def _exists_by_import(module: str) -> bool:
    """The last word, for packages that make up their submodules as they are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    except Exception:
        # A package that exists and fails is for `load` to report, with its own error.
        return True


def _no_module(name: str, module: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name!r}: there is no module {module!r}",
        f"looked on sys.path, the working directory ({Path.cwd()}) and the project's root; "
        "install the package, start pytest in its folder, or set PYTHONPATH",
    )


def _import(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise _no_module(name, module) from error
        raise _raised(name, f"importing {module}", error) from error
    except JoulemarkError:
        raise
    except Exception as error:
        raise _raised(name, f"importing {module}", error) from error


def _attribute(name: str, module: Any, attribute: str) -> Callable[[], Any]:
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise _no_attribute(name, module.__name__, attribute, part, dir(found))
        found = getattr(found, part)
    if not callable(found):
        raise ConfigurationError(
            f"{name!r} is a {type(found).__name__}, not a function", f"name a function; it may {_WANTED}"
        )
    return found  # type: ignore[no-any-return]


def _no_attribute(name: str, module: str, attribute: str, part: str, names: Iterable[str]) -> ConfigurationError:
    close = difflib.get_close_matches(part, sorted(one for one in names if not one.startswith("_")), n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "define it there"
    return ConfigurationError(f"{name!r}: {module} has no attribute {attribute!r}", hint)


def _call(name: str, factory: Callable[[], Any]) -> Any:
    """What the factory makes, on the CPU unless it says otherwise, from a seed that is the name's.

    Raises:
        ConfigurationError: it raised; its exception is chained. An out-of-memory error passes as it is.
    """
    torch: Any = sys.modules.get("torch")
    try:
        if torch is None:
            return factory()
        torch.manual_seed(seed_of(name))
        with torch.device("cpu"):
            return factory()
    except (JoulemarkError, MemoryError):
        raise
    except Exception as error:
        if torch is not None and isinstance(error, torch.OutOfMemoryError):
            raise
        raise _raised(name, "the factory", error) from error


def _raised(name: str, what: str, error: Exception) -> ConfigurationError:
    text = str(error).strip() or "no message"
    return ConfigurationError(
        f"{name!r}: {what} raised {type(error).__name__}: {text}", "fix it, or name another factory"
    )


def _is_module(made: object) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(made, torch.nn.Module)


def _not_a_workload(name: str, made: object) -> ConfigurationError:
    what = f"the class {made.__name__}" if isinstance(made, type) else f"a {type(made).__name__}"
    if isinstance(made, tuple):
        what += f" of ({', '.join(type(one).__name__ for one in made)})"
    if inspect.iscoroutine(made):
        made.close()
    return ConfigurationError(f"{name!r}: the factory returned {what}", _WANTED)


def _spec_of(name: str, factory: Callable[[], Any], made: Any) -> ModelSpec:
    """The spec of a module that came with its inputs."""
    module, inputs = made if isinstance(made, tuple) else (made, getattr(made, "example_inputs", None))
    if inputs is None:
        raise ConfigurationError(f"{name!r}: {type(module).__name__} has no method example_inputs(batch_size)", _WANTED)
    return ModelSpec(name, _Modules(name, factory, module), _draw(name, inputs), phases=PHASES)


class _Modules:
    """Gives the module that exists for the first case, and a new one from the factory for each further case.

    Training changes weights: no case may see what another one left.
    """

    def __init__(self, name: str, factory: Callable[[], Any], first: nn.Module) -> None:
        self._name, self._factory = name, factory
        self._first: nn.Module | None = first

    def __call__(self) -> nn.Module:
        module, self._first = self._first, None
        if module is None:
            made = _call(self._name, self._factory)
            module = made[0] if isinstance(made, tuple) else made
        return module


def _draw(name: str, inputs: Any) -> Callable[[int, torch.Generator, str], tuple[torch.Tensor, ...]]:
    """A ``Draw`` from a function of the batch size, or from example tensors repeated up to it.

    Raises:
        ConfigurationError: ``inputs`` is neither.
    """
    if callable(inputs):
        return lambda batch_size, _generator, _device: _called(name, inputs, batch_size)
    try:
        examples = as_tensors(inputs)
    except TypeError as error:
        raise ConfigurationError(f"{name!r}: {error}", "give tensors, or a function batch_size -> tensors") from error
    if not examples or any(one.dim() == 0 or one.shape[0] == 0 for one in examples):
        raise ConfigurationError(
            f"{name!r}: an example input has no samples (shapes {[tuple(one.shape) for one in examples]})",
            "give tensors whose first dimension counts samples",
        )
    return lambda batch_size, _generator, _device: tuple(_repeated(one, batch_size) for one in examples)


def _called(name: str, inputs: Callable[[int], Any], batch_size: int) -> tuple[torch.Tensor, ...]:
    try:
        return as_tensors(inputs(batch_size))
    except TypeError as error:
        raise ConfigurationError(
            f"{name!r}: {error}", "inputs(batch_size) gives a tensor or a tuple of them"
        ) from error


def _repeated(example: torch.Tensor, batch_size: int) -> torch.Tensor:
    """An example's samples, in turn, up to the batch size; a copy of its own, never a view of stride 0."""
    import torch

    rows = torch.arange(batch_size, device=example.device) % example.shape[0]
    return example.detach().index_select(0, rows)
