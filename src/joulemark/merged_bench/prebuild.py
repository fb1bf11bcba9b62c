"""Compiles the kernels that a benchmark will try, by several processes and before it holds a GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from multiprocessing import get_context

import torch
from torch import fx
from torch.fx.passes.shape_prop import ShapeProp

from joulemark.merged.cost import How
from joulemark.merged.families import Family, known_families
from joulemark.merged.graph import trace
from joulemark.merged.kernels import Kernel, KernelError
from joulemark.merged.kernels.compile import build_text, full_source
from joulemark.merged.kernels.description import STORED, Format
from joulemark.merged.kernels.seconds import fitted
from joulemark.merged.layer_norms import as_channel_norms
from joulemark.merged.linears import as_convolutions
from joulemark.merged.plan import Planner
from joulemark.merged.setting import Setting
from joulemark.merged.squeeze import replace_excitations
from joulemark.merged_bench.subjects import Subject

_SCHEDULES: tuple[How, ...] = ("padded", "rows", "memoized")


def prebuild(subjects: Sequence[Subject], form: Format, most: int, architecture: str, forced: bool = True) -> list[str]:
    """Fill the cache of kernels; what was built of which subject, and what failed, in lines.

    Args:
        subjects: to be measured.
        form: number format.
        most: kernels for a range that a schedule tries.
        architecture: as in ``sm_90a``.
        forced: whether each schedule is tried by itself, beside merging.
    """
    begin = time.perf_counter()
    tasks: dict[tuple[str, str], tuple[str, str, str]] = {}
    lines = []
    for subject in subjects:
        kernels = wanted(subject, form, most) if forced else wanted_by_merge(subject, form)
        texts = {one.text: one for one in kernels}
        lines.append(f"{subject.name}: {len(texts)} kernels")
        tasks.update((text, (one.name, full_source(one, "prelude.cuh"), architecture)) for text, one in texts.items())
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        for done in as_completed([pool.submit(_build, *task) for task in tasks.values()]):
            said = done.result()
            if said is not None:
                lines.append(said)
    return [*lines, f"{len(tasks)} kernels built in {time.perf_counter() - begin:.1f} s"]


def wanted(subject: Subject, form: Format, most: int) -> Iterator[Kernel]:
    """Kernels that the schedules, merging and the layers alone will try on the GPU that seconds were fitted on."""
    graph = _traced(subject, form)
    for how in _SCHEDULES:
        families = tuple(one for one in known_families() if one.how == how)
        planner = Planner(_setting(form, families), forced=True, most=most)
        yield from planner.wanted(graph)


def wanted_by_merge(subject: Subject, form: Format) -> list[Kernel]:
    """Kernels that merging alone may try, as far as is known before anything is measured."""
    graph = _traced(subject, form)
    as_convolutions(graph)
    as_channel_norms(graph)
    replace_excitations(graph)
    x = torch.empty(subject.shape, device="meta", dtype=STORED[form])
    with torch.no_grad():
        ShapeProp(graph).propagate(x)
    return Planner(_setting(form, known_families())).wanted(graph)


def _traced(subject: Subject, form: Format) -> fx.GraphModule:
    x = torch.empty(subject.shape, device="meta", dtype=STORED[form])
    return trace(deepcopy(subject.build()).eval().to(device="meta", dtype=x.dtype), (x,))


def _setting(form: Format, families: tuple[Family, ...]) -> Setting:
    return Setting(torch.device("meta"), form, None, families, True, gpu=fitted().gpu)


def _build(name: str, source: str, architecture: str) -> str | None:
    """None, or why there is no kernel."""
    try:
        build_text(name, source, architecture)
    except KernelError as error:
        return f"{error}"[:300]
    return None
