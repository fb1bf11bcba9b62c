"""Which record of one run stands against which of another: by what a case is, never by an id or a place in a file."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from joulemark.records import Case, Record, Run
from joulemark.report.names import namer


@dataclass(frozen=True)
class Pair:
    """The records of one case in both runs.

    Args:
        key: the case in words; without its GPU model where the two sides differ in that.
        base, new: its records.
        gated: whether its verdicts count.
        notes: why not.
    """

    key: str
    base: Record
    new: Record
    gated: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pairing:
    """What :func:`pair_cases` found.

    Args:
        pairs: in the order of the new run.
        only_base, only_new: records that the other run does not have.
        name: gives a case its name, never the same to two of either run.
        messages: what a reader must know.
    """

    pairs: tuple[Pair, ...]
    only_base: tuple[Record, ...]
    only_new: tuple[Record, ...]
    name: Callable[[Case], str]
    messages: tuple[str, ...]


def pair_cases(base: Run, new: Run) -> Pairing:
    """Records of the same case; then, of what is left, records that differ in the GPU model alone."""
    messages: list[str] = []
    old, current = _unambiguous(base, "BASE", messages), _unambiguous(new, "NEW", messages)
    name = namer(record.case for record in (*old.values(), *current.values()))
    left_base = {case: record for case, record in old.items() if case not in current}
    others = _across_gpus(left_base, {case: record for case, record in current.items() if case not in old})
    pairs, only_new = [], []
    for case_id, record in current.items():
        if case_id in old:
            note = _simulated_on_one_side(base.is_simulated(old[case_id]), new.is_simulated(record))
            pairs.append(Pair(name(record.case), old[case_id], record, gated=not note, notes=note))
        elif case_id in others:
            pairs.append(_other_gpu(name, others[case_id], record))
            del left_base[others[case_id].case_id]
        else:
            only_new.append(record)
    messages += _hints(left_base.values(), only_new)
    messages += sorted({note for pair in pairs for note in pair.notes})
    return Pairing(tuple(pairs), tuple(left_base.values()), tuple(only_new), name, tuple(messages))


def _across_gpus(base: Mapping[str, Record], new: Mapping[str, Record]) -> dict[str, Record]:
    """New case → the one record of the base that differs from it in the GPU model alone."""
    theirs: dict[str, list[Record]] = defaultdict(list)
    for record in base.values():
        theirs[_without_gpu(record.case)].append(record)
    ours = Counter(_without_gpu(record.case) for record in new.values())
    series = {case_id: _without_gpu(record.case) for case_id, record in new.items()}
    return {case_id: theirs[one][0] for case_id, one in series.items() if ours[one] == len(theirs[one]) == 1}


def _hints(base: Iterable[Record], new: Iterable[Record]) -> list[str]:
    """Cases that look like one whose parameters were extended or cut between the runs."""
    candidates: dict[str, list[Case]] = defaultdict(list)
    for record in new:
        candidates[replace(record.case, params={}).case_id].append(record.case)
    found = []
    for record in base:
        old = record.case.params.items()
        for case in candidates.get(replace(record.case, params={}).case_id, ()):
            if old <= case.params.items() or case.params.items() <= old:
                names = ", ".join(sorted(name for name, _ in old ^ case.params.items()))
                found.append(f"not paired, one has the parameter {names} more: {record.case.label} and {case.label}")
    return found


def _unambiguous(run: Run, side: str, messages: list[str]) -> dict[str, Record]:
    """Records by case; a case that several rows claim to be is left out, and named."""
    counts = Counter(record.case_id for record in run.records)
    several = {record.case_id: record.case.label for record in run.records if counts[record.case_id] > 1}
    for case_id, label in several.items():
        messages.append(
            f"{side}: {counts[case_id]} rows cannot be told apart ({label}): their ids are not stable; left out"
        )
    return {record.case_id: record for record in run.records if record.case_id not in several}


def _without_gpu(case: Case) -> str:
    return replace(case, gpu_model="").case_id


def _simulated_on_one_side(base: bool | None, new: bool | None) -> tuple[str, ...]:
    """A note where one side is of a simulated GPU and the other of a real one."""
    if base is None or new is None or base == new:
        return ()
    return (f"the GPU of {'BASE' if base else 'NEW'} is simulated, the other is not: shown, not gated",)


def _other_gpu(name: Callable[[Case], str], base: Record, new: Record) -> Pair:
    models = (base.case.gpu_model, new.case.gpu_model)
    note = (
        f"GPU unknown on one side ({models[0]} → {models[1]}): shown, not gated"
        if "unknown" in models
        else f"different GPU models ({models[0]} → {models[1]}): shown, not gated"
    )
    key = name(replace(new.case, gpu_model=""))
    return Pair(key, base, new, gated=False, notes=(note,))
