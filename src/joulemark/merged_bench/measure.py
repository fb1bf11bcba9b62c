"""One subject with all its rivals, in one process: a row of a document; and documents that are resumed."""

from __future__ import annotations

import copy
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import exp, inf, isfinite, log
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from joulemark.collect.timing import first_line, is_out_of_memory, is_poisoned
from joulemark.errors import ConfigurationError, JoulemarkError, Unsupported
from joulemark.merged.executor import BUDGET_S
from joulemark.merged.questions import relative_error
from joulemark.merged_bench import rivals
from joulemark.merged_bench.floors import floors_of
from joulemark.merged_bench.limits import TooLong, within
from joulemark.merged_bench.rows import check_writable, holds_figures, is_whole, read, write
from joulemark.merged_bench.stage import Act, Poisoned, Stage, over_best
from joulemark.merged_bench.subjects import Shape, Subject
from joulemark.workloads import precision

SCHEMA = "joulemark.merged/1"
_ROTATED_BYTES = 300 * 2**20
_BURST_S, _SETTLED_S, _COUNTED_S = 0.01, 0.5, 1.0
"""Of a row's seconds, about: a burst, what a steady window takes beside itself, counters of one rival."""
_FIRST_S = 20.0
"""What the first row of a process takes longer: compilers start (12 to 23 s on an H200's host)."""
_CHECKED = 2
"""Images whose output is compared with an fp32 reference."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}


@dataclass(frozen=True)
class Options:
    """How long a subject is measured.

    Args:
        dtype: bf16, fp16, tf32 or fp32.
        names: of rivals.
        rounds: bursts of each.
        sustain_s: of each sustained window; 0 leaves them out.
        turns: sustained windows of each rival.
        most_inputs: that rotate.
        limit_s: after which no further rival of a subject is built.
        rival_s: of building one rival.
        ends_s: on ``time.perf_counter``, when the last row is to be there: rivals are built until they can still be
            measured by then.
        merge_s: budget of merging.
        kernels: of a range that a forced schedule measures.
        sustain_best: rivals that get sustained windows beside our own, the fastest in bursts; None for all.
        steady_unmerged: whether our unmerged kernels get sustained windows too.
        tiny: the subject's size for tests.
        by_schedule: subjects and groups of which schedules other than padded are measured by themselves; None for all.
    """

    dtype: str = "bf16"
    names: tuple[str, ...] = rivals.EVERY
    rounds: int = 25
    sustain_s: float = 2.2
    turns: int = 1
    most_inputs: int = 16
    limit_s: float = 400.0
    rival_s: float = 200.0
    ends_s: float = inf
    merge_s: float = BUDGET_S
    kernels: int = rivals.EVERY_KERNEL
    sustain_best: int | None = None
    steady_unmerged: bool = True
    tiny: bool = False
    by_schedule: frozenset[str] | None = None

    @property
    def measuring_s(self) -> float:
        """What measuring a subject's rivals takes, about; its counters are not counted for each rival."""
        steady = len(self.names) if self.sustain_best is None else self.sustain_best + 1 + self.steady_unmerged
        bursts_s = self.rounds * len(self.names) * _BURST_S
        return bursts_s + steady * (self.turns * (self.sustain_s + _SETTLED_S) + _COUNTED_S)

    def of(self, subject: Subject) -> Options:
        """With the rivals that this subject gets."""
        if self.by_schedule is None or {subject.name, subject.group} & self.by_schedule:
            return self
        return replace(self, names=tuple(one for one in self.names if one not in rivals.OTHER_SCHEDULES))


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
    torch.manual_seed(1)
    shape = subject.tiny if options.tiny else subject.shape
    stage.share_memory()
    reference = subject.build().eval()
    xs = _inputs(shape, options, stage.device)
    model = _arranged(reference, options.dtype, stage.device)
    precision.set_fp32(tf32=False)
    expected = _reference(reference, xs[0], stage.device)
    precision.set_fp32(tf32=options.dtype == "tf32")
    del reference
    found, acts, late = _prepare_all(model, xs, expected, stage, options, end, tell, watch or _Nobody())
    spent = {"built": time.perf_counter() - begin}
    with torch.no_grad():
        spent |= _perform(stage, acts, options)
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
        "dtype": options.dtype,
        "calls_per_round": len(xs),
        "rivals": found,
        "gains": _gains(found),
        "floors": None if stage.rates is None else floors_of(model, xs[0], stage.rates),
        "cut": bool(late) and end < begin + options.limit_s,
        "took_s": time.perf_counter() - begin,
        "spent_s": spent,
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
            found[name], act = _prepare(name, task, xs, expected, stage, min(options.rival_s, left_s))
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
    stronger = rivals.INSTEAD.get(name)
    return f"{stronger} was built, which is stronger" if any(one.name == stronger for one in acts) else None


def step_of(subject: Subject, rival: str, device: str, dtype: str = "bf16") -> tuple[Callable[[], object], int]:
    """One rival's step over rotating inputs, for a benchmark of its own, and the images of a step; tiny on a CPU.

    Raises:
        Unsupported: the rival is not for this subject or device.
    """
    options = Options(dtype, tiny=device == "cpu")
    torch.manual_seed(1)
    xs = _inputs(subject.tiny if options.tiny else subject.shape, options, device)
    built = rivals.build(rival, rivals.Task(_arranged(subject.build().eval(), dtype, device), xs[0]))
    turns = itertools.cycle(built.inputs(xs))

    def run() -> object:
        with torch.no_grad():
            return built.call(next(turns))

    return run, len(xs[0])


def _perform(stage: Stage, acts: Sequence[Act], options: Options) -> dict[str, float]:
    """Bursts of all, steady windows and counters of some; the seconds that each took."""
    begin = time.perf_counter()
    acts = stage.standing(acts)
    if not acts:
        return {}
    stage.bursts(acts, options.rounds)
    steady = _steady(acts, options.sustain_best, options.steady_unmerged)
    counted = _steady(acts, options.sustain_best)
    for act in acts:
        figures = [] if act in steady else ["sustained_s", "energy_j"]
        figures += [] if act in counted else ["dram_read_bytes", "dram_write_bytes", "l2_bytes", "l1_bytes"]
        act.missing.update(dict.fromkeys(figures, "for the fastest alone was time"))
    spent, done = {"bursts": time.perf_counter() - begin}, time.perf_counter()
    if options.sustain_s > 0:
        stage.sustained(steady, options.sustain_s, options.turns)
        spent["sustained"], done = time.perf_counter() - done, time.perf_counter()
    stage.count(counted)
    return spent | {"counted": time.perf_counter() - done}


def _steady(acts: Sequence[Act], best: int | None, unmerged: bool = True) -> list[Act]:
    """Who gets steady windows and counters: merged and unmerged, and of the rivals the fastest in bursts."""
    if best is None:
        return [one for one in acts if unmerged or one.name != "own_unmerged"]
    others = sorted((one for one in acts if one.name not in rivals.OURS), key=lambda one: one.figures["burst_s"])
    chosen = {"merged", *(("own_unmerged",) if unmerged else ()), *(one.name for one in others[:best])}
    return [one for one in acts if one.name in chosen]


def _gains(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Best rival over merged, for time, energy and DRAM bytes; unmerged over merged."""
    others = [name for name in found if name not in rivals.OURS]
    dram = {
        name: {"dram_bytes": row["dram_read_bytes"] + row["dram_write_bytes"]}
        for name, row in found.items()
        if row.get("dram_read_bytes") is not None and row.get("dram_write_bytes") is not None
    }
    timed = [name for name in others if found[name].get("burst_s") is not None]
    return {
        "best_rival": min(timed, key=lambda name: found[name]["burst_s"]) if timed else None,
        "burst": over_best(found, "merged", others, "burst_s"),
        "sustained": over_best(found, "merged", others, "sustained_s"),
        "energy": over_best(found, "merged", others, "energy_j"),
        "dram_bytes": over_best(dram, "merged", others, "dram_bytes"),
        "over_own_unmerged": over_best(found, "merged", ["own_unmerged"], "burst_s"),
    }


def _prepare(
    name: str, task: rivals.Task, xs: Sequence[Tensor], expected: Tensor | None, stage: Stage, limit_s: float
) -> tuple[dict[str, Any], Act | None]:
    """A rival built, checked and captured, or why it is not."""
    on_gpu = stage.device.startswith("cuda")
    before = _allocated(on_gpu)
    try:
        with within(limit_s):
            built = rivals.build(name, task)
        _allocated(on_gpu)
        with torch.no_grad():
            out = built.call(*built.inputs(xs[:1]))
            out = out if built.restore is None else built.restore(out)
        error = None if expected is None else _error(out, expected)
        peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
        del out
        act = stage.act(name, built.call, built.inputs(xs), built.wait)
    except Unsupported as reason:
        return {"missing": {"all": str(reason)}}, None
    except TooLong:
        return {"missing": {"all": f"it was not built within {limit_s:.3g} s"}}, None
    except Exception as reason:  # a compiler or CUDA may raise anything; one rival of many is lost
        if is_poisoned(reason):
            raise Poisoned(name, first_line(reason)) from reason
        what = "out of memory" if is_out_of_memory(reason) else type(reason).__name__
        return {"missing": {"all": f"{what}: {first_line(reason)}"[:400]}}, None
    missing = {}
    if error is not None and not isfinite(error):  # which JSON cannot say
        error, missing["relative_error"] = None, "its output, or the reference, is not finite"
    row = {"build_s": built.build_s, "relative_error": error, "peak_bytes": peak, "missing": missing, **built.facts}
    return row, act


def _allocated(on_gpu: bool) -> int:
    """Bytes that tensors hold, once nothing is left of what was given up; the peak is counted from here."""
    if not on_gpu:
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _error(out: Any, expected: Tensor) -> float | None:
    first = out[0] if isinstance(out, (tuple, list)) else out
    return relative_error(first[:_CHECKED], expected) if isinstance(first, Tensor) else None


def _inputs(shape: Shape, options: Options, device: str) -> list[Tensor]:
    """Random inputs that together exceed the L2, channels-last."""
    dtype = _DTYPES[options.dtype]
    size = 2 * dtype.itemsize
    for one in shape:
        size *= one
    count = max(1, min(options.most_inputs, -(-_ROTATED_BYTES // size))) if not options.tiny else 2
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape), torch.contiguous_format)
    return [torch.randn(shape, device=device).to(dtype).contiguous(memory_format=layout) for _ in range(count)]


def _arranged(model: nn.Module, dtype: str, device: str) -> nn.Module:
    """A copy in its number format, channels-last, on the device."""
    made = copy.deepcopy(model).to(device=device, dtype=_DTYPES[dtype]).requires_grad_(False)
    dimensions = {one.dim() for one in made.parameters()}
    layout = torch.channels_last_3d if 5 in dimensions else torch.channels_last
    arranged: nn.Module = made.to(memory_format=layout)
    return arranged


def _reference(model: nn.Module, x: Tensor, device: str) -> Tensor | None:
    """The output in fp32 of the model with weights and input as rounded to the number format."""
    rounded = copy.deepcopy(model).to(device=device, dtype=x.dtype).float()
    with torch.no_grad():
        out = rounded(x[:_CHECKED].float())
    return out if isinstance(out, Tensor) else None


class Document:
    """A file of rows that is resumed: a subject that it holds is not measured again.

    Args:
        path: of the file.
        kind: what it holds: ``blocks`` or ``networks``.
        facts: of GPU and software; another GPU's file is refused.

    Raises:
        ConfigurationError: the file is no such document, or of another GPU, or cannot be written.
    """

    def __init__(self, path: Path, kind: str, facts: Mapping[str, Any]) -> None:
        self.path, self.gpu_uuid = path, facts.get("gpu_uuid")
        self.content: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": kind,
            **facts,
            "rates": None,
            "model": None,
            "rows": [],
            "failed": {},
        }
        check_writable(path)
        if not path.exists():
            return
        found = read(path)
        if (found.get("schema"), found.get("kind"), found.get("gpu")) != (SCHEMA, kind, facts["gpu"]):
            raise ConfigurationError(
                f"{path} is no document of merged {kind} on {facts['gpu']}", "choose another --out"
            )
        found["rows"] = [row for row in found["rows"] if holds_figures(row)]
        self.content = found

    def lacks(self, subject: Subject, dtype: str) -> bool:
        """Whether the subject is still to be measured; once more where time was up before all its rivals were built."""
        return not any(_is_of(row, subject.name, dtype) and is_whole(row) for row in self.content["rows"])

    def expected_s(self, subject: Subject) -> float:
        """What a subject may take: as the shorter of the last two of its kind, or of all; 0 before the first.

        One of the two may have been the first of its process, which takes :data:`_FIRST_S` longer.
        """
        kind = _kind(subject.group)
        took_s = [(_kind(row["group"]) == kind, row["took_s"]) for row in self.content["rows"] if not row.get("cut")]
        alike = [seconds for same, seconds in took_s if same] or [seconds for _, seconds in took_s]
        return float(min(alike[-2:], default=0.0))

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row in the place of an earlier one, and write the file; a row that was cut replaces no other."""
        rows, failed = self.content["rows"], self.content["failed"]
        if row.get("cut") and any(_is_of(one, row["subject"], row["dtype"]) and not one.get("cut") for one in rows):
            return
        rows[:] = [one for one in rows if not _is_of(one, row["subject"], row["dtype"])]
        for name in [one for one in failed if one.partition(":")[0] == row["subject"]]:
            del failed[name]
        other = self.gpu_uuid != self.content.get("gpu_uuid")  # than the one that the file was begun on
        rows.append(dict(row) | ({"gpu_uuid": self.gpu_uuid} if other else {}))
        self.write()

    def fail(self, subject: Subject, why: str) -> None:
        """Keep why a subject has no row; it is tried again next time."""
        self.content["failed"][subject.name] = why
        self.write()

    def write(self) -> None:
        """Write the file whole."""
        write(self.path, self.content)


def _is_of(row: Mapping[str, Any], subject: str, dtype: str) -> bool:
    return (row["subject"], row["dtype"]) == (subject, dtype)


def _kind(group: str) -> str:
    """Of a group the kind of its sequences: ``inverted`` of ``inverted-s2-b1``."""
    return group.partition("-")[0]


class _Attempts:
    """Keeps in the file which rival is being built: one that has ended the process twice is left out.

    A kernel that never returns would else meet every new start. One that is known to have left CUDA unusable is left
    out at once.
    """

    most = 2

    def __init__(self, document: Document, subject: Subject) -> None:
        self.document, self.subject = document, subject

    def _key(self, rival: str) -> str:
        return f"{self.subject.name}:{rival}"

    def _broken(self, rival: str) -> str:
        return f"{self._key(rival)}, left CUDA unusable"

    def broke(self, error: Poisoned) -> None:
        """It ended the process."""
        self.document.content["failed"][self._broken(error.rival)] = str(error)
        self.document.write()

    def begins(self, rival: str) -> str | None:
        failed = self.document.content["failed"]
        if self._broken(rival) in failed:
            return str(failed[self._broken(rival)])
        count = int(failed.get(self._key(rival), "0").partition(" ")[0])
        if count >= self.most:
            return f"{count} times its process ended while it was built"
        failed[self._key(rival)] = f"{count + 1} times begun and not ended"
        self.document.write()
        return None

    def ends(self, rival: str) -> None:
        # At once: what ends the process later was not this rival's building.
        self.document.content["failed"].pop(self._key(rival), None)
        self.document.write()


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
    cut, first_s = False, _FIRST_S
    failed = set(document.content["failed"])
    for subject in sorted(subjects, key=lambda one: one.name in failed):
        if not document.lacks(subject, options.dtype):
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
    attempts = _Attempts(document, subject)
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


def group_gains(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Per group the geometric means of the gains over the best rival, and of how many rows."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row["gains"])
    found = {}
    for group, gains in groups.items():
        found[group] = {"rows": float(len(gains))}
        for name in ("burst", "sustained", "energy", "dram_bytes"):
            known = [log(one[name]) for one in gains if one[name]]
            if known:
                found[group][name] = exp(sum(known) / len(known))
    return found


def line_of(row: Mapping[str, Any]) -> str:
    """A row in one line for a terminal."""
    gains = row["gains"]
    told = [
        f"{name} {gains[name]:.2f}×"
        for name in ("burst", "sustained", "energy", "dram_bytes", "over_own_unmerged")
        if gains[name] is not None
    ]
    merged = row["rivals"].get("merged", {}).get("burst_s")
    mine = "not measured" if merged is None else f"{merged * 1e3:.4g} ms"
    return f"  merged {mine} against {gains['best_rival']}: {', '.join(told) or 'no gain known'}"


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
