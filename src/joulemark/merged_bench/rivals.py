"""The rivals of merged execution: every way to run the same model that a user has, and our own kernels unmerged."""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from joulemark.errors import Unsupported
from joulemark.merged import merge
from joulemark.merged.compiling import compiled, leave_out_grouped_templates
from joulemark.merged.executor import BUDGET_S
from joulemark.merged.families import Family, known_families
from joulemark.merged.graph import find_chains, trace
from joulemark.merged.kernels import run
from joulemark.merged.memory import give_back
from joulemark.merged.merged_model import MergedModel
from joulemark.merged.paths import OWN, Executed, format_of, kind_of_path
from joulemark.merged.plan import Planner
from joulemark.merged.rates import learn, rates_of
from joulemark.merged.replay import for_capture
from joulemark.merged.rewrite import fused_by_cudnn, rewrite
from joulemark.merged.setting import DEPTH, Setting
from joulemark.workloads import modes

Call = Callable[[Tensor], Any]
_PROFILED = 4
"""Calls in which TorchScript looks at shapes before it settles on its fused kernels."""
_AGAIN_S = 90.0
"""Of merging, at most, for being timed again: less than half of a rival's time."""
Made = tuple[Call, Callable[[object], object] | None, dict[str, Any]]
"""A call, what waits for an output that is not on torch's streams, and facts for the row."""
EVERY_KERNEL = 16
"""Kernels of a range that a forced schedule measures: enough to tell whether the model's choice was the best."""


@dataclass(frozen=True)
class Built:
    """A rival, ready to be called.

    Args:
        call: x → output; enqueues on the current stream.
        build_s: until it could be called: tracing, compiling, measuring.
        wait: for an output of work outside of torch's streams; None where it is on them.
        facts: what else is known of it, for its row.
        arrange: an input to what ``call`` takes, outside of what is timed; None where that is the input.
        restore: an output to what the model gives.
    """

    call: Call
    build_s: float = 0.0
    wait: Callable[[object], object] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrange: Callable[[Tensor], Tensor] | None = None
    restore: Callable[[Any], Tensor] | None = None

    def inputs(self, xs: Iterable[Tensor]) -> list[Tensor]:
        """Inputs as ``call`` takes them."""
        return [one if self.arrange is None else self.arrange(one) for one in xs]


@dataclass(frozen=True)
class Task:
    """What rivals are built for.

    Args:
        model: in its number format and layout, on the device, in evaluation mode.
        x: an input like those that will come.
        budget_s: of merging.
        kernels: of a range that a forced schedule measures.
    """

    model: nn.Module
    x: Tensor
    budget_s: float = BUDGET_S
    kernels: int = EVERY_KERNEL

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        device: torch.device = self.x.device
        return device


def build(name: str, task: Task) -> Built:
    """A rival by its name, called once.

    Raises:
        Unsupported: it is not for this model, device or installation, with the reason.
        RuntimeError: what torch or CUDA say.
    """
    begin = time.perf_counter()
    with torch.no_grad():
        made = RIVALS[name](task)
        if not isinstance(made, Built):
            made = Built(made) if callable(made) else Built(made[0], wait=made[1], facts=made[2])
        out = made.call(*made.inputs([task.x]))
        if made.wait is not None:
            made.wait(out)
        if task.device.type == "cuda":
            torch.cuda.synchronize()
    return replace(made, build_s=time.perf_counter() - begin)


def _eager(task: Task) -> Call:
    call: Call = task.model
    return call


def _jit(task: Task) -> Call:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls TorchScript deprecated; it is a rival of the published table
        call = modes.traced(task.model, (task.x,))
        for _ in range(_PROFILED):
            call(task.x)
    return call


def _compiled(mode: str) -> Callable[[Task], Made]:
    def make(task: Task) -> Made:
        modes.check("compile", "inference", str(task.device))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Graphs are ours, over rotating inputs, for every rival alike.
            call: Call = compiled(task.model, mode)
            call(task.x)
        tuned = mode.startswith("max-autotune")
        return call, None, {"grouped_templates_left_out": leave_out_grouped_templates()} if tuned else {}

    return make


def _setting(task: Task, families: tuple[Family, ...], measured: bool) -> Setting:
    on_gpu = task.device.type == "cuda"
    rates = rates_of(torch.device("cuda", torch.cuda.current_device())) if on_gpu else None
    return Setting(task.device, format_of(task.x), rates, families, measured)


def _fused(task: Task) -> Made:
    """Every convolution with ReLU by cuDNN's fused kernels, the others as torch has them.

    Raises:
        Unsupported: no convolution of the model ends in a ReLU, or the device is none of NVIDIA's.
    """
    if task.device.type != "cuda":
        raise Unsupported("cuDNN's fused convolutions need a GPU")
    graph = trace(task.model, (task.x,))
    choices = fused_by_cudnn(graph)
    count = sum(one.path == "fused" for one in choices)
    if not count:
        raise Unsupported("cuDNN fuses convolution, bias, addition and ReLU: no convolution here ends in a ReLU")
    rewrite(graph, choices, _setting(task, (), False))
    return graph, None, {"fused_convolutions": count, "convolutions": len(choices)}


def _own_unmerged(task: Task) -> Made:
    """Every layer alone: by the best of our own kernels for a single layer, by the library where we have none.

    Raises:
        Unsupported: no kernel of our own executes any layer alone.
    """
    if task.device.type != "cuda":
        raise Unsupported("our own kernels need a GPU")
    graph = trace(task.model, (task.x,))
    setting = _setting(task, known_families(), True)
    planner = Planner(setting)
    chains, _ = find_chains(graph)
    choices = []
    for unit in (unit for chain in chains for unit in chain):
        choices.append(planner.own_choice(unit))
    ours = sum("/" in one.path or kind_of_path(one.path) in OWN for one in choices)
    if not ours:
        raise Unsupported("no kernel of our own executes any layer of this model alone")
    rewrite(graph, choices, setting)
    return graph, None, {"paths": [one.path for one in choices], "own_convolutions": ours, "convolutions": len(choices)}


def _merged(task: Task) -> Made:
    """What ``merge`` gives, and how long it takes again from its cache."""
    made, facts = _timed_merge(task, DEPTH)
    return made, None, {**facts, **_merged_again(task, facts["merge_s"])}


def _layerwise(task: Task) -> Made:
    """What ``merge`` gives where no sequence may be one kernel: each layer alone on its best path, all else as ever.

    Raises:
        Unsupported: the model runs as it is, for which nothing of merging's gain is a gain of sequences.
    """
    made, facts = _timed_merge(task, 1)
    if made.failed is not None:
        raise Unsupported(made.failed)
    return made, None, facts


def _timed_merge(task: Task, depth: int) -> tuple[MergedModel, dict[str, Any]]:
    begin = time.perf_counter()
    made = merge(task.model, task.x, budget_s=task.budget_s, depth=depth)
    took_s = time.perf_counter() - begin
    made.inner = for_capture(made.inner)  # graphs are ours, over rotating inputs; its own holds memory for nothing
    sequences = [one.sequence for one in made.modules() if isinstance(one, Executed) and len(one.sequence.layers) > 1]
    return made, {
        "merge_s": took_s,
        "merge_spent_s": made.spent_s,
        "first_was_cached": made.cached,
        "variant": made.variant,
        "captured": made.captured,
        "times": made.times,
        "device_times": made.device_times,
        "problems": made.problems,
        "explain": made.explain().splitlines(),
        "merged_ranges": len(sequences),
        "merged_layers": sum(len(one.layers) for one in sequences),
    }


def _merged_again(task: Task, first_s: float) -> dict[str, Any]:
    """Seconds of merging from the cache, with the memory that a new process would have; None, and why, without.

    Not tried where the first time took long: a rival's time limit, hit there, would lose what was merged.
    """
    why = f"merging took {first_s:.0f} s, more than the {_AGAIN_S:.0f} s up to which there is time for a second"
    if first_s <= _AGAIN_S:
        give_back(task.device)
        begin = time.perf_counter()
        again = merge(task.model, task.x, budget_s=task.budget_s)
        if again.cached:
            return {"merge_cached_s": time.perf_counter() - begin, "merge_cached_spent_s": again.spent_s}
        why = f"a second merge did not take the plan from the disk ({again.failed or 'it was planned anew'})"
    return {"merge_cached_s": None, "merge_cached_spent_s": None, "merge_cached_missing": why}


def _forced(how: str) -> Callable[[Task], Made]:
    """The fastest kernels of one schedule, wherever it has any, whatever the layers one by one would take."""

    def make(task: Task) -> Made:
        families = tuple(one for one in known_families() if one.how == how)
        if task.device.type != "cuda" or not families:
            raise Unsupported(f"no kernels of schedule {how!r} for this device")
        graph = trace(task.model, (task.x,))
        setting = _setting(task, families, True)
        planner = Planner(setting, forced=True, most=task.kernels)
        choices, _ = planner.plan(graph)
        if not any(one.merged for one in choices):
            raise Unsupported(f"no kernel of schedule {how!r} executes two layers or more of this model")
        rewrite(graph, choices, setting)
        assert setting.rates is not None
        learn(planner.ranges.points(), setting.rates, torch.device("cuda", torch.cuda.current_device()))
        facts = {"paths": [one.path for one in choices], "candidates": planner.ranges.table()}
        return graph, None, facts

    return make


def _bricks(task: Task) -> Built:
    """Padded kernels over activations that lie in bricks; turning them into bricks and back is not timed."""
    if task.device.type != "cuda":
        raise Unsupported("our own kernels need a GPU")
    from joulemark.merged_bench.brick_layout import fastest, from_bricks, to_bricks

    kernel, packed, times = fastest(task.model, task.x, task.kernels)
    assert kernel.layout is not None
    return Built(
        partial(run, kernel, weights=packed),
        facts={"paths": [kernel.name], "times": times},
        arrange=partial(to_bricks, edge=kernel.layout),
        restore=from_bricks,
    )


def _xla(task: Task) -> Made:
    if importlib.util.find_spec("jax") is None:
        raise Unsupported("JAX is not installed", "pip install 'jax[cuda12]'")
    xla = importlib.import_module("joulemark.merged_bench.xla")
    call, wait = xla.compiled(task.model, task.x)
    return call, wait, {}


def _tensorrt(task: Task) -> Call:
    if importlib.util.find_spec("torch_tensorrt") is None:
        raise Unsupported("TensorRT for torch is not installed", "pip install torch-tensorrt")
    engine = importlib.import_module("torch_tensorrt")
    call: Call = engine.compile(
        task.model, ir="dynamo", inputs=[task.x], enabled_precisions={task.x.dtype}, min_block_size=1
    )
    return call


RIVALS: Mapping[str, Callable[[Task], Any]] = {
    "eager": _eager,
    "fused": _fused,
    "jit": _jit,
    "compile": _compiled("max-autotune-no-cudagraphs"),
    "compile_default": _compiled("default"),
    "xla": _xla,
    "tensorrt": _tensorrt,
    "own_unmerged": _own_unmerged,
    "layerwise": _layerwise,
    "padded": _forced("padded"),
    "memoized": _forced("memoized"),
    "rows": _forced("rows"),
    "bricks": _bricks,
    "merged": _merged,
}
"""Name → what builds it; each is captured into a CUDA graph over rotating inputs where it can be."""

OURS = ("merged", "own_unmerged", "layerwise", "padded", "memoized", "rows", "bricks")
"""What is no rival."""
SPARED = frozenset({"layerwise"})
"""Without which a row is whole, where time is up first."""
OTHER_SCHEDULES = ("memoized", "rows", "bricks")
"""Schedules beside padded, each by itself: six seconds of a chain's row."""
EVERY = tuple(RIVALS)
FOR_BLOCKS = tuple(one for one in RIVALS if one not in ("compile_default", "layerwise"))
INSTEAD = {"compile_default": "compile"}
"""A rival → the same compiler with tuning: it is built only where that one, if asked for before it, was not."""
USERS = tuple(one for one in RIVALS if one not in OURS and one not in INSTEAD)
"""What a user has besides merging: why one of them was not measured stands in every row."""
NOT_ASKED = "not asked for (--rivals, --without)"
FOR_NETWORKS = ("merged", "eager", "fused", "compile", "compile_default", "jit", "xla", "tensorrt", "layerwise")
"""Merged first: it finds nothing that cuDNN or a compiler has kept of a rival, and is there when time is up. Then those
that are fast to build or to run; at last what is no rival."""
