"""An attribution beside Nsight Compute's counters of one step of the same work, launch by launch (pure).

Both see a step's launches in the same order, so the n-th launch of a function here is the n-th there. A function is a
kernel's name without namespaces and template arguments: two tools write the rest of a name differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from joulemark.attribution.timeline import Timeline
from joulemark.records import Json
from joulemark.utilization.ncu_csv import Launch

T = TypeVar("T")
TIME, TENSOR = "gpu__time_duration.sum", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
METRICS = (TIME, TENSOR, *DRAM)
"""What is compared: so few need one pass; a further one would find the kernel's own data in the L2."""
CYCLES, PASSES = "sm__cycles_elapsed.sum.per_second", "profiler__replayer_passes"
ASKED = (*METRICS, CYCLES)
"""What Nsight Compute is asked for; cycles stand behind the share of the tensor pipe's, too, and cost no pass."""
LONG_S = 50e-6
"""A launch that lasts so long is one in which several samples lie wholly."""
_LEAST_TENSOR = 0.01
"""Tensor activity below which a relative error means nothing."""
_OWN = ("dram_read_bytes", "dram_write_bytes", "pipe_tensor")
_CLOSING = {")": "(", ">": "<"}
_COPIES = ("Memcpy", "Memset")
_MANGLED = re.compile(r"_ZN?K?(?=\d)")


def function_of(name: str) -> str:
    """A kernel's function as Nsight Compute's ``--kernel-name-base function`` has it.

    >>> function_of("void at::native::(anonymous namespace)::sum<4, (int)2>(at::Tensor<float>, int)")
    'sum'
    >>> function_of("_ZN7cutlass6KernelINS_4GemmEEEvNT_6ParamsE")
    'Kernel'
    """
    text = name.strip()
    if start := _MANGLED.match(text):
        return _mangled(text, start.end())
    for closing in (")", ">"):
        if text.endswith(closing):
            text = text[: _opened(text)]
    found = re.search(r"[\w$]+$", text.rstrip())
    return found[0] if found else text


def _mangled(text: str, at: int) -> str:
    """The last of the names with their lengths, by which a mangled name begins (Itanium C++ ABI, section 5.1)."""
    name = text
    while number := re.compile(r"\d+").match(text, at):
        at = number.end() + int(number[0])
        name = text[number.end() : at]
    return name


def _opened(text: str) -> int:
    """Where the bracket was opened that closes a text's end; the end where it was not."""
    closing, depth = text[-1], 0
    opening = _CLOSING[closing]
    for at in range(len(text) - 1, -1, -1):
        depth += (text[at] == closing) - (text[at] == opening)
        if not depth:
            return at
    return len(text)


@dataclass(frozen=True)
class Function:
    """Kernels of one function in a step.

    Args:
        name: see :func:`function_of`.
        launches: per step.
        time_s: of them, per step.
        long_s: the part of it in launches of :data:`LONG_S` and more.
    """

    name: str
    launches: float
    time_s: float
    long_s: float


def functions_of(timeline: Timeline) -> list[Function]:
    """The functions of a recorded step, those with most time in long launches first; copies and sets are none."""
    launches, n = timeline.launches, len(timeline.places)
    long_s = np.where(launches.length_s >= LONG_S, launches.length_s, 0.0)
    columns = [np.bincount(launches.place, weights, n) for weights in (None, launches.length_s, long_s)]
    found: dict[str, npt.NDArray[np.float64]] = {}
    for place, sums in enumerate(np.stack(columns, axis=1) / timeline.steps):
        name = timeline.place_name(place)
        if not name.startswith(_COPIES):
            function = function_of(name)
            found[function] = found.get(function, np.zeros(len(columns))) + sums
    functions = [Function(name, *map(float, sums)) for name, sums in found.items()]
    return sorted(functions, key=lambda one: (-one.long_s, -one.time_s))


@dataclass(frozen=True)
class Pair:
    """One launch of a step as both saw it; counts are of this launch, activity is a share of the peak.

    Cycles are those of all SMs per s, working or not; None where one of the two did not count them.
    """

    name: str
    kernel_class: str
    time_s: float
    ncu_time_s: float
    read: float
    ncu_read: float
    written: float
    ncu_written: float
    tensor: float
    ncu_tensor: float
    cycles_per_s: float | None
    ncu_cycles_per_s: float | None


def compare(places: Sequence[Mapping[str, Json]], launches: Iterable[Launch], *, cut: bool = False) -> dict[str, Json]:
    """Errors against Nsight Compute per class and kernel, over launches that both saw.

    Args:
        places: of :meth:`joulemark.attribution.document.Attribution.places`.
        launches: of one step, in their order.
        cut: whether Nsight Compute was let go before the step's end; otherwise a function that it did not see as often
            as the recording is compared nowhere.
    """
    launches = list(launches)
    counted = _by_function(launches, lambda one: one.kernel)
    here = _by_function(places, lambda one: str(one["name"]))
    differing = [
        {"name": name, "launches": len(here.get(name, ())), "ncu_launches": len(seen)}
        for name, seen in counted.items()
        if len(seen) > len(here.get(name, ())) or (len(seen) < len(here.get(name, ())) and not cut)
    ]
    left_out = {one["name"] for one in differing}
    pairs = [
        pair
        for name, seen in counted.items()
        if name not in left_out
        for place, launch in zip(here[name], seen, strict=False)
        if (pair := _pair(place, launch)) is not None
    ]
    whole = sum(one["time_s"] for one in places)
    long = [one for one in pairs if one.time_s >= LONG_S]
    return {
        "launches": len(launches),
        "passes": max((int(passes) for one in launches if (passes := one.value(PASSES))), default=None),
        "launches_of_step": sum(one["launches"] for one in places),
        "compared": len(pairs),
        "time_compared": sum(one.time_s for one in pairs) / whole if whole else 0.0,
        "differing": differing,
        "classes": _sums(pairs, lambda one: one.kernel_class, "class"),
        "classes_of_long_launches": _sums(long, lambda one: one.kernel_class, "class"),
        "kernels": _sums(pairs, lambda one: one.name, "name"),
    }


def _by_function(some: Iterable[T], name: Callable[[T], str]) -> dict[str, list[T]]:
    """By their functions, in order."""
    out: dict[str, list[T]] = {}
    for one in some:
        out.setdefault(function_of(name(one)), []).append(one)
    return out


def _pair(place: Mapping[str, Json], launch: Launch) -> Pair | None:
    """None where one of the two lacks a counter."""
    counters = place["counters"]
    told = [launch.value(name) for name in METRICS]
    if any(name not in counters for name in _OWN) or any(value is None for value in told):
        return None
    time_s, tensor, read, written = (float(value or 0.0) for value in told)
    own = {name: float(counters[name]["value"]) for name in _OWN}
    cycles = launch.value(CYCLES)
    return Pair(
        name=place["name"],
        kernel_class=place["class"],
        time_s=place["time_s"],
        ncu_time_s=time_s,
        read=own["dram_read_bytes"],
        ncu_read=read,
        written=own["dram_write_bytes"],
        ncu_written=written,
        tensor=own["pipe_tensor"],
        ncu_tensor=tensor / 100,
        cycles_per_s=place.get("sm_cycles_per_s"),
        ncu_cycles_per_s=None if cycles is None else float(cycles),
    )


def _sums(pairs: Iterable[Pair], label: Callable[[Pair], str], key: str) -> list[dict[str, Json]]:
    """Sums and relative errors of groups, the longest time first.

    Work of the tensor pipe is activity × time. Its cycles are the kernel's own, so where both are right, work differs
    as the clocks do: Nsight Compute runs each kernel alone.
    """
    groups: dict[str, list[Pair]] = {}
    for one in pairs:
        groups.setdefault(label(one), []).append(one)
    entries = [{key: name, **_entry(members)} for name, members in groups.items()]
    return sorted(entries, key=lambda entry: -entry["time_s"])


def _entry(members: Sequence[Pair]) -> dict[str, Json]:
    time_s, ncu_s = sum(one.time_s for one in members), sum(one.ncu_time_s for one in members)
    read, ncu_read, written, ncu_written = (
        sum(getattr(one, name) for one in members) for name in ("read", "ncu_read", "written", "ncu_written")
    )
    moved, ncu_moved = read + written, ncu_read + ncu_written
    tensor_s = sum(one.tensor * one.time_s for one in members)
    ncu_tensor_s = sum(one.ncu_tensor * one.ncu_time_s for one in members)
    used = ncu_s > 0 and ncu_tensor_s / ncu_s > _LEAST_TENSOR
    return {
        "launches": len(members),
        "time_s": time_s,
        "ncu_time_s": ncu_s,
        "dram_bytes": moved,
        "ncu_dram_bytes": ncu_moved,
        "dram_read_bytes": read,
        "ncu_dram_read_bytes": ncu_read,
        "dram_error": moved / ncu_moved - 1 if ncu_moved else None,
        "tensor": tensor_s / time_s if time_s else None,
        "ncu_tensor": ncu_tensor_s / ncu_s if ncu_s else None,
        "tensor_error": (tensor_s / time_s) / (ncu_tensor_s / ncu_s) - 1 if used and time_s else None,
        "tensor_work_error": tensor_s / ncu_tensor_s - 1 if used else None,
        "sm_cycles_per_s": _mean([(one.cycles_per_s, one.time_s) for one in members]),
        "ncu_sm_cycles_per_s": _mean([(one.ncu_cycles_per_s, one.ncu_time_s) for one in members]),
    }


def _mean(some: Sequence[tuple[float | None, float]]) -> float | None:
    """Over time; None where one is not known."""
    known = [(rate * time_s, time_s) for rate, time_s in some if rate is not None]
    time_s = sum(time_s for _, time_s in known)
    return sum(count for count, _ in known) / time_s if len(known) == len(some) and time_s else None


def largest_error(classes: Iterable[Mapping[str, Json]], error: str) -> float | None:
    """The error of the class that is furthest off; None where no class has one."""
    known = [float(one[error]) for one in classes if one[error] is not None]
    return max(known, key=abs, default=None)
