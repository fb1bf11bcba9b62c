"""Compiles the kernels that a benchmark will try, by several processes and before it holds a GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from multiprocessing import get_context

import torch

from joulemark.merged.cost import How
from joulemark.merged.families import known_families
from joulemark.merged.graph import trace
from joulemark.merged.kernels import Kernel, KernelError
from joulemark.merged.kernels.compile import build_text, full_source
from joulemark.merged.kernels.description import STORED, Format
from joulemark.merged.kernels.seconds import fitted
from joulemark.merged.plan import Planner, Setting
from joulemark.merged_bench.subjects import Subject

_SCHEDULES: tuple[How, ...] = ("padded", "rows", "memoized")


def prebuild(subjects: Sequence[Subject], form: Format, most: int, architecture: str) -> list[str]:
    """Fill the cache of kernels; what was built of which subject, and what failed, in lines.

    Args:
        subjects: to be measured.
        form: number format.
        most: kernels for a range that a schedule tries.
        architecture: as in ``sm_90a``.
    """
    begin = time.perf_counter()
    tasks: dict[str, tuple[str, str, str]] = {}
    lines = []
    for subject in subjects:
        named = {one.name: one for one in wanted(subject, form, most)}
        lines.append(f"{subject.name}: {len(named)} kernels")
        tasks.update((name, (name, full_source(one, "prelude.cuh"), architecture)) for name, one in named.items())
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        for done in as_completed([pool.submit(_build, *task) for task in tasks.values()]):
            said = done.result()
            if said is not None:
                lines.append(said)
    return [*lines, f"{len(tasks)} kernels built in {time.perf_counter() - begin:.1f} s"]


def wanted(subject: Subject, form: Format, most: int) -> Iterator[Kernel]:
    """Kernels that the schedules, merging and the layers alone will try on the GPU that seconds were fitted on."""
    x = torch.empty(subject.shape, device="meta", dtype=STORED[form])
    graph = trace(deepcopy(subject.build()).eval().to(device="meta", dtype=x.dtype), (x,))
    for how in _SCHEDULES:
        families = tuple(one for one in known_families() if one.how == how)
        planner = Planner(Setting(x.device, form, None, families, True, gpu=fitted().gpu), forced=True, most=most)
        yield from planner.wanted(graph)


def _build(name: str, source: str, architecture: str) -> str | None:
    """None, or why there is no kernel."""
    try:
        build_text(name, source, architecture)
    except KernelError as error:
        return f"{error}"[:300]
    return None
