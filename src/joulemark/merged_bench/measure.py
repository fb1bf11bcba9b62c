"""Measures subjects with all their rivals in one process: a row for each that a document lacks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from joulemark.collect.timing import first_line, is_out_of_memory, is_poisoned
from joulemark.errors import JoulemarkError
from joulemark.merged_bench import rivals
from joulemark.merged_bench.document import FIRST_S, Attempts, Document
from joulemark.merged_bench.floors import floors_or_reason
from joulemark.merged_bench.gains import gains_of, line_of
from joulemark.merged_bench.options import Options
from joulemark.merged_bench.prepare import arranged, inputs_of, prepare, reference_of, weighted
from joulemark.merged_bench.provenance import measured_now
from joulemark.merged_bench.rows import holds_figures
from joulemark.merged_bench.stage import Act, Poisoned, Stage
from joulemark.merged_bench.subjects import Subject
from joulemark.workloads import precision

_CUDNN = "eager"
"""Whose bytes are counted however fast others are: the published table has them over cuDNN's."""


class Watch(Protocol):
    """Who is told what begins and ends, so that what ends the process is known when it starts again."""

    def begins(self, rival: str) -> str | None:
        """A rival is going to be built; why it had better not be, or None."""

    def ends(self, rival: str) -> None:
        """It was built, or failed alone."""


class _Nobody:
    def begins(self, rival: str) -> str | None:
        del rival
        return None

    def ends(self, rival: str) -> None: ...


def measure_subject(
    subject: Subject,
    stage: Stage,
    options: Options,
    tell: Callable[[str], None] = lambda _: None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """A row: every rival's figures in SI units, what is missing and why, and the gains over the best rival.

    A rival that runs out of memory or fails is missing with its reason.

    Raises:
        RuntimeError: a CUDA error has left the process unusable.
    """
    begin = time.perf_counter()
    end = min(begin + options.limit_s, options.ends_s - options.measuring_s)
    precision.check(options.dtype, stage.device)
    torch.backends.cudnn.benchmark = True
    shape = subject.tiny if options.tiny else subject.shape
    stage.share_memory()
    reference = weighted(subject)
    xs = inputs_of(shape, options, stage.device)
    model = arranged(reference, options.dtype, stage.device)
    precision.set_fp32(tf32=False)
    expected = reference_of(reference, xs[0], stage.device)
    precision.set_fp32(tf32=options.dtype == "tf32")
    del reference
    floors = floors_or_reason(model, xs[0], stage.rates)  # before rivals fill the memory
    found, acts, late = _prepare_all(model, xs, expected, stage, options, end, tell, watch or _Nobody())
    found |= {one: {"missing": {"all": rivals.NOT_ASKED}} for one in rivals.USERS if one not in found}
    spent = {"built": time.perf_counter() - begin}
    with torch.no_grad():
        bursts, performing = _perform(stage, acts, options)
    for act in acts:
        if "all" in act.missing:
            found[act.name] = {"missing": act.missing}
            continue
        found[act.name].update(act.figures, graphed=act.graphed)
        found[act.name]["missing"] |= act.missing
    return {
        "subject": subject.name,
        "group": subject.group,
        "shape": list(shape),
        **({"tiny": True} if options.tiny else {}),
        "dtype": options.dtype,
        "calls_per_round": len(xs),
        "bursts": bursts,
        "rivals": found,
        "gains": gains_of(found),
        **({"floors": None, "floors_missing": floors} if isinstance(floors, str) else {"floors": floors}),
        "cut": bool(set(late) - rivals.SPARED) and end < begin + options.limit_s,
        "measured": measured_now(),
        "took_s": time.perf_counter() - begin,
        "spent_s": spent | performing,
    }


def _prepare_all(
    model: nn.Module,
    xs: Sequence[Tensor],
    expected: Tensor | None,
    stage: Stage,
    options: Options,
    end: float,
    tell: Callable[[str], None],
    watch: Watch,
) -> tuple[dict[str, dict[str, Any]], list[Act], list[str]]:
    """Every rival built, checked and captured until the clock says ``end``, or why it is not; those that were late."""
    found: dict[str, dict[str, Any]] = {}
    acts: list[Act] = []
    late: list[str] = []
    begin = time.perf_counter()
    for name in options.names:
        left_s = end - time.perf_counter()
        why = _needless(name, acts)
        if why is None and left_s <= 0:
            why = f"no time left after {end - begin:.0f} s"
            late.append(name)
        why = why or watch.begins(name)
        if why is not None:
            found[name] = {"missing": {"all": why}}
            continue
        task = rivals.Task(model, xs[0], options.merge_s, options.kernels)
        try:
            found[name], act = prepare(name, task, xs, expected, stage, min(options.rival_s, left_s))
        except SystemExit:  # the process was asked to end: no fault of this rival
            watch.ends(name)
            raise
        watch.ends(name)
        if act is not None:
            acts.append(act)
        elif time.perf_counter() >= end:
            late.append(name)
        took_s = time.perf_counter() - begin
        tell(f"  {name}: {found[name].get('missing', {}).get('all') or 'built'}, {took_s:.0f} s")
    return found, acts, late


def _needless(name: str, acts: Sequence[Act]) -> str | None:
    """Why a rival needs not be built; None where it does."""
    tuned = rivals.INSTEAD.get(name)
    return f"{tuned} was built, the same compiler with tuning" if any(one.name == tuned for one in acts) else None


def _perform(stage: Stage, acts: Sequence[Act], options: Options) -> tuple[int, dict[str, float]]:
    """Bursts of all, steady windows and counters of some; how many bursts of each, and the seconds that each took."""
    begin = time.perf_counter()
    acts = stage.standing(acts)
    if not acts:
        return 0, {}
    bursts = stage.bursts(acts, options.rounds, options.ends_s - options.steady_s)
    steady = _steady(acts, options.sustain_best, options.steady_unmerged)
    counted = _steady(acts, options.sustain_best, also=_CUDNN)
    for act in acts:
        figures = [] if act in steady else ["sustained_s", "energy_j"]
        figures += [] if act in counted else ["dram_read_bytes", "dram_write_bytes", "l2_bytes", "l1_bytes"]
        act.missing.update(dict.fromkeys(figures, "for the fastest alone was time"))
    spent, done = {"bursts": time.perf_counter() - begin}, time.perf_counter()
    if options.sustain_s > 0:
        stage.sustained(steady, options.sustain_s, options.turns)
        spent["sustained"], done = time.perf_counter() - done, time.perf_counter()
    stage.count(counted)
    return bursts, spent | {"counted": time.perf_counter() - done}


def _steady(acts: Sequence[Act], best: int | None, unmerged: bool = True, also: str = "") -> list[Act]:
    """Who gets steady windows and counters: merged, unmerged, one more, and of the rivals the fastest in bursts."""
    if best is None:
        return [one for one in acts if unmerged or one.name != "own_unmerged"]
    others = sorted((one for one in acts if one.name not in rivals.OURS), key=lambda one: one.figures["burst_s"])
    chosen = {"merged", also, *(("own_unmerged",) if unmerged else ()), *(one.name for one in others[:best])}
    return [one for one in acts if one.name in chosen]


def measure_all(
    subjects: Sequence[Subject],
    document: Document,
    stage: Stage,
    options: Options,
    tell: Callable[[str], None] = print,
) -> bool:
    """Measure what the document lacks until ``options.ends_s``; False when time was up first.

    A subject for which no time is left is passed over: a shorter one may still end. No row is kept in which no rival
    was measured.

    Raises:
        RuntimeError: a CUDA error has left the process unusable; start the command again to go on.
    """
    cut, first_s = False, FIRST_S
    failed = set(document.content["failed"])
    for subject in sorted(subjects, key=lambda one: one.name in failed):
        if not document.lacks(subject, options.dtype, options.tiny):
            continue
        known_s, own = document.expected_s(subject), options.of(subject)
        if time.perf_counter() + max(known_s and known_s + first_s, own.measuring_s) > options.ends_s:
            cut = True
            continue
        tell(subject.name)
        first_s = 0.0
        row = _measured(subject, document, stage, own, tell)
        if row is not None and holds_figures(row):
            document.add(row)
            tell(line_of(row))
        elif row is not None and not row["cut"]:
            document.fail(subject, "no rival could be measured: " + _first_reason(row))
        cut |= row is not None and row["cut"]
    return not cut


def _measured(
    subject: Subject, document: Document, stage: Stage, options: Options, tell: Callable[[str], None]
) -> dict[str, Any] | None:
    """A subject's row; None where the document says why there is none."""
    attempts = Attempts(document, subject)
    with _clean():
        try:
            return measure_subject(subject, stage, options, tell, attempts)
        except Poisoned as error:
            attempts.broke(error)
            raise
        except JoulemarkError as error:
            why = str(error)
        except RuntimeError as error:
            if is_poisoned(error) or not is_out_of_memory(error):
                raise
            why = f"out of memory: {first_line(error)}"
    document.fail(subject, why[:400])
    tell(f"  {why}")
    return None


def _first_reason(row: Mapping[str, Any]) -> str:
    """Of one rival, why it is missing."""
    told = (f"{name}: {one['missing']['all']}" for name, one in row["rivals"].items() if "all" in one["missing"])
    return next(told, "none was asked for")


@contextmanager
def _clean() -> Iterator[None]:
    """Nothing of one subject stays for the next."""
    try:
        yield
    finally:
        torch._dynamo.reset()
        gc.collect()
        gc.freeze()  # what compilers keep for good is not gone through again before each rival
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
