"""From markers and options to the cells of a sweep, one pytest item each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from joulemark.errors import ConfigurationError
from joulemark.plugin.options import DTYPES, INPUTS, MODES
from joulemark.records import Case

if TYPE_CHECKING:
    import pytest

    from joulemark.plugin.options import BenchOptions
    from joulemark.workloads.base import Workload

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_ALLOWED = {
    "phases": ("inference", "train", "prefill", "decode"),
    "dtypes": DTYPES,
    "modes": MODES,
    "inputs": INPUTS,
}
_BATCH_NAMES = ("batch_size", "batch")
_FIELDS = {
    "models": "workload",
    "phases": "phase",
    "batch_sizes": "batch_size",
    "dtypes": "dtype",
    "modes": "mode",
    "inputs": "input",
    "world_sizes": "world_size",
}
"""Axis of a marker → the field of a case."""


@dataclass(frozen=True)
class Target:
    """Where cases run: a GPU by UUID, or the CPU.

    Args:
        uuid: None for the CPU.
        slug: ``nvidia-h200``, ``cpu``; with the UUID's first digits where several GPUs of one model are swept.
        model: the slug without them.
        name: NVML's name.
        note: why its identity is not certain; None when it is.
        no_gpu: why it is the CPU where a GPU was wanted.
        world_size: ranks that work together; ``uuid`` is the GPU of rank 0.
        peers: UUIDs of the GPUs of the further ranks; empty on the CPU.
        lacks: why so many ranks cannot work together here.
    """

    uuid: str | None
    slug: str
    model: str
    name: str
    note: str | None = None
    no_gpu: str | None = None
    world_size: int = 1
    peers: tuple[str, ...] = ()
    lacks: str | None = None

    @property
    def on_gpu(self) -> bool:
        return self.uuid is not None

    @property
    def uuids(self) -> tuple[str, ...]:
        """The GPUs of all ranks, in order of rank."""
        return () if self.uuid is None else (self.uuid, *self.peers)

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> Target:
        """A target as ``asdict`` and JSON have left it."""
        return cls(**{**described, "peers": tuple(described["peers"])})

    def of_rank(self, rank: int) -> Target:
        """What one rank measures on."""
        return replace(self, uuid=self.uuids[rank]) if self.uuids else self

    def spread(self, world_size: int, pool: Mapping[str, Sequence[str]]) -> Target:
        """This target with more of its model.

        Args:
            world_size: number of ranks.
            pool: UUIDs of the GPUs that may be used, by model.
        """
        if world_size == 1:
            return self
        whole = replace(self, slug=self.model, world_size=world_size)
        if not self.on_gpu:
            return whole
        others = [uuid for uuid in pool.get(self.model, ()) if uuid != self.uuid]
        if len(others) < world_size - 1:
            found = f"{world_size} GPUs of the model {self.model} are needed and {len(others) + 1} can be used here"
            return replace(whole, lacks=f"{found} (--bench-gpus, CUDA_VISIBLE_DEVICES, -n)")
        return replace(whole, peers=tuple(others[: world_size - 1]))


CPU = Target(None, "cpu", "cpu", "CPU")
CASE = pytest.StashKey[tuple[Case, Target]]()
"""Of an item: what it measures, and where."""


@dataclass(frozen=True)
class SweepMarker:
    """The arguments of ``@pytest.mark.bench(…)``: what a benchmark sweeps unless the options say otherwise.

    Args:
        models: zoo names or ``pkg.mod:factory``.
        phases: of ``inference``, ``train``, ``prefill``, ``decode``; a model takes part in those it has.
        batch_sizes: of all models, or model → its own, with those of any other model under ``*``.
        dtypes, modes, inputs: axes.
        layout: ``contiguous`` or ``channels_last`` (of models with images).
        cpu: axes to use instead on a machine without a GPU.
        requires: instruments without which the case is skipped, with the reason.
        world_sizes: numbers of GPUs that train together; only training takes more than one.
        needs_gpu: why the cases say nothing without a GPU; on a machine without one they are left out, unless they
            are asked for.
        first_look: of some axes the values that a sweep takes which names nothing, and under ``collect`` what such a
            sweep collects beside timing and power. On a CPU that has axes of its own it says nothing.
        campaign: what the cases are, where only a sweep that names them is to take them.
    """

    models: tuple[str, ...] = ("resnet18",)
    phases: tuple[str, ...] = ("inference",)
    batch_sizes: tuple[int, ...] | Mapping[str, tuple[int, ...]] = (1, 8, 64)
    dtypes: tuple[str, ...] = ("fp32",)
    modes: tuple[str, ...] = ("eager",)
    inputs: tuple[str, ...] = ("device",)
    layout: str = "channels_last"
    cpu: Mapping[str, Any] | None = None
    requires: tuple[str, ...] = ()
    world_sizes: tuple[int, ...] = (1,)
    needs_gpu: str = ""
    first_look: Mapping[str, Any] | None = None
    campaign: str = ""

    @classmethod
    def read(cls, marks: Iterable[pytest.Mark]) -> SweepMarker:
        """Join the markers of an item, the closest first.

        Raises:
            ConfigurationError: a positional or an unknown argument, by name.
        """
        known = {one.name for one in fields(cls)}
        joined: dict[str, Any] = {}
        for mark in marks:
            if mark.args:
                raise ConfigurationError(f"@pytest.mark.bench got {mark.args[0]!r}", "it takes keyword arguments only")
            for name, value in mark.kwargs.items():
                if name not in known:
                    raise ConfigurationError(
                        f"@pytest.mark.bench got the argument {name!r}", f"it takes {', '.join(sorted(known))}"
                    )
                joined.setdefault(name, value)
        for axis in joined.get("first_look") or ():
            if axis not in (*_FIELDS, "collect"):
                raise ConfigurationError(
                    f"@pytest.mark.bench got first_look with {axis!r}", f"it takes {', '.join(_FIELDS)}, collect"
                )
        values = {name: _as_tuple(name, value) for name, value in joined.items()}
        for name, allowed in _ALLOWED.items():
            wrong = [one for one in values.get(name, ()) if one not in allowed]
            if wrong:
                raise ConfigurationError(
                    f"@pytest.mark.bench got {name}={wrong[0]!r}", f"it takes {', '.join(allowed)}"
                )
        return cls(**values)

    def on(self, target: Target) -> SweepMarker:
        """The marker as it holds on a target."""
        if target.on_gpu or not self.cpu:
            return self
        merged = {one.name: getattr(self, one.name) for one in fields(self)} | {
            name: _as_tuple(name, value) for name, value in self.cpu.items()
        }
        return SweepMarker(**merged)

    def takes_first(self, case: Case) -> bool:
        """Whether a sweep that names nothing takes a cell."""
        axes = {name: values for name, values in self._first_look_at(case).items() if name in _FIELDS}
        return all(getattr(case, _FIELDS[name]) in _as_tuple(name, values) for name, values in axes.items())

    def first_instruments(self, case: Case) -> tuple[str, ...]:
        """What a sweep that names nothing collects of a cell beside timing and power."""
        chosen = self._first_look_at(case).get("collect", ()) if self.takes_first(case) else ()
        return cast("tuple[str, ...]", _as_tuple("collect", chosen))

    def _first_look_at(self, case: Case) -> Mapping[str, Any]:
        """The first look, which says nothing of the axes for a CPU."""
        return {} if self.first_look is None or (case.gpu_model == CPU.model and self.cpu) else self.first_look

    def batches(self, model: str) -> tuple[int, ...]:
        """The batch sizes of a model.

        Raises:
            ConfigurationError: the marker lists batch sizes by model, and none for this one.
        """
        if not isinstance(self.batch_sizes, Mapping):
            return self.batch_sizes
        sizes = self.batch_sizes.get(model, self.batch_sizes.get("*"))
        if sizes is None:
            raise ConfigurationError(
                f"@pytest.mark.bench has no batch_sizes for {model!r}", "add them under its name or under '*'"
            )
        return tuple(sizes)


def _as_tuple(name: str, value: Any) -> Any:
    if name in ("layout", "cpu", "needs_gpu", "first_look", "campaign") or (
        name == "batch_sizes" and isinstance(value, Mapping)
    ):
        return value
    return (value,) if isinstance(value, (str, int)) else tuple(value)


def cells(
    benchmark: str,
    marker: SweepMarker,
    options: BenchOptions,
    targets: Iterable[Target],
    own: Mapping[str, Workload],
    pool: Mapping[str, Sequence[str]] | None = None,
) -> list[tuple[Case, Target]]:
    """The cells of a sweep, series by series, batches rising within each.

    Args:
        pool: UUIDs of the GPUs that may work together, by model.

    Raises:
        ConfigurationError: a model that does not exist.
    """
    out: list[tuple[Case, Target]] = []
    for target in _spread(marker, options, targets, pool or {}):
        policy = marker.on(target)
        models = options.models or policy.models
        axes = product(
            models,
            policy.phases,
            options.inputs or policy.inputs,
            options.dtypes or policy.dtypes,
            options.modes or policy.modes,
        )
        for model, phase, source, dtype, mode in axes:
            name, phases, images = describe(model, own, options.rootdir)
            if phase not in phases or (target.world_size > 1 and phase != "train"):
                continue
            layout = policy.layout if images else "contiguous"
            for batch in sorted(options.batch_sizes or policy.batches(name)):
                case = Case(
                    name, phase, mode, dtype, batch, layout, source, target.slug, target.world_size, benchmark=benchmark
                )
                out.append((case, target))
    return out


def _spread(
    marker: SweepMarker, options: BenchOptions, targets: Iterable[Target], pool: Mapping[str, Sequence[str]]
) -> Iterator[Target]:
    """Targets by rising number of ranks; several GPUs of one model work together once."""
    together: set[tuple[str, int]] = set()
    for target in targets:
        for size in sorted(options.world_sizes or marker.on(target).world_sizes):
            if size == 1:
                yield target
            elif (target.model, size) not in together:
                together.add((target.model, size))
                yield target.spread(size, pool)


def describe(model: str, own: Mapping[str, Workload], rootdir: Path | None = None) -> tuple[str, tuple[str, ...], bool]:
    """Canonical name of a model, the phases it has, and whether its input is images; without importing torch.

    Raises:
        ConfigurationError: no such model.
    """
    from joulemark.workloads import loader, zoo

    if model in own:
        return model, tuple(own[model].phases), False
    if ":" in model:
        loader.check(model, rootdir)
        return model, ("inference", "train"), False
    name = zoo.canonical(model)
    return name, zoo.phases(name), zoo.takes_images(name)


def import_models(options: BenchOptions, own: Mapping[str, Workload]) -> None:
    """Import the modules of the ``pkg.mod:factory`` that are named, in the process that will call the factories.

    Raises:
        ConfigurationError: importing raised, or there is no such factory.
    """
    from joulemark.workloads import loader

    for model in options.models or ():
        if ":" in model and model not in own:
            loader.resolve(model, options.rootdir)


def workload_of(case: Case, own: Mapping[str, Workload], rootpath: Path) -> Workload:
    """The workload that a case names: the project's own, a ``pkg.mod:factory``, or the zoo's."""
    from joulemark.workloads import loader, zoo

    if case.workload in own:
        return own[case.workload]
    if ":" in case.workload:
        return loader.load(case.workload, rootpath)
    return zoo.find(case.workload)


def case_of_function(item: pytest.Function, target: Target) -> Case:
    """The case of a benchmark that takes no ``workload``: its file's and its own name, and its own parameters.

    Raises:
        ConfigurationError: the item's id holds a memory address, so no later run could find it again.
    """
    if _ADDRESS.search(item.name):
        raise ConfigurationError(
            f"the id {item.name!r} holds a memory address", "give the parameters ids: pytest.param(…, id='name')"
        )
    params = dict(_plain_params(item))
    batch = next((params.pop(name) for name in _BATCH_NAMES if _is_whole(params.get(name))), None)
    function = getattr(item, "originalname", None) or item.name
    prefix = f"{item.cls.__name__}." if item.cls else ""
    return Case(f"{item.path.stem}.{prefix}{function}", batch_size=batch, gpu_model=target.slug, params=params)  # type: ignore[arg-type]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _plain_params(item: pytest.Function) -> Iterator[tuple[str, str | int | float | bool | None]]:
    """The user's own parameters as JSON scalars; anything else by its pytest id."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return
    for name, value in callspec.params.items():
        if name.startswith("joulemark_"):
            continue
        if value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
            yield name, value
        else:
            yield name, callspec.id
