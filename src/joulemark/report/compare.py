"""Two runs, row by row: ratios with intervals, and a verdict that says when the data cannot tell."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from joulemark.errors import ConfigurationError
from joulemark.metrics import Better, all_metrics, find
from joulemark.records import Case, Json, Outcome, Record, Run, Value
from joulemark.report.names import namer

SCHEMA = "joulemark/compare/1"
DEFAULT_METRICS = (
    "device_time_s",
    "host_time_s",
    "throughput_per_s",
    "energy_per_item_j",
    "peak_memory_bytes",
)
DEFAULT_SPREAD = 0.02
"""Two runs of the same thing differ by less than 2 % in 95 % of cases: assumed, since single files do not show it."""
DEFAULT_THRESHOLD = 0.05
"""Smallest worsening that counts."""

Verdict = Literal["improved", "same", "regressed", "inconclusive"]
VERDICTS: tuple[Verdict, ...] = ("regressed", "inconclusive", "improved", "same")

EXIT_OK, EXIT_REGRESSED, EXIT_INCONCLUSIVE = 0, 1, 3

OUTCOME = "outcome"
"""Stands for a metric where a side ran out of memory, failed or could not be done."""
_MEASURED: frozenset[Outcome] = frozenset({"ok", "flagged"})
_ENVIRONMENT = ("driver", "cuda", "cudnn", "python", "joulemark")


@dataclass(frozen=True)
class Row:
    """One figure of one case on both sides.

    Args:
        key: the case in words; its GPU model is not part of it where the two sides differ in that, and the
            function that swept it is where several swept the same.
        case_id: of the case, in the new run.
        metric: its name, or ``outcome`` where one side has no figures at all.
        base, new: figures in base units, or the two outcomes; None when not measured.
        unit: of both.
        ratio: new / base; None without two positive figures.
        interval: of the ratio, (lo, hi).
        verdict: see :func:`compare`.
        gated: whether the verdict counts for the exit code.
        notes: what a reader must know.
    """

    key: str
    case_id: str
    metric: str
    base: float | str | None
    new: float | str | None
    unit: str
    ratio: float | None
    interval: tuple[float, float] | None
    verdict: Verdict
    gated: bool = True
    notes: tuple[str, ...] = ()

    def to_json(self) -> Json:
        return {
            "key": self.key,
            "case_id": self.case_id,
            "metric": self.metric,
            "base": self.base,
            "new": self.new,
            "unit": self.unit,
            "ratio": self.ratio,
            "interval": None if self.interval is None else list(self.interval),
            "verdict": self.verdict,
            "gated": self.gated,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found.

    Args:
        base, new: paths of the two files.
        rows: in the order of the new run, then by metric.
        only_in_base, only_in_new: cases that one side does not have.
        compared: number of cases on both sides.
        environment: fact → (base, new), where they differ.
        messages: about the runs as a whole.
        spread, threshold: as given.
    """

    base: str
    new: str
    rows: tuple[Row, ...]
    only_in_base: tuple[str, ...]
    only_in_new: tuple[str, ...]
    compared: int
    environment: Mapping[str, tuple[Json, Json]] = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    spread: float = DEFAULT_SPREAD
    threshold: float = DEFAULT_THRESHOLD

    @property
    def verdict(self) -> Verdict:
        """The worst of the rows that count; ``inconclusive`` when there is nothing in common."""
        found = {row.verdict for row in self.rows if row.gated}
        if not found:
            return "inconclusive" if not self.rows else "same"
        return next(verdict for verdict in VERDICTS if verdict in found)

    def geometric_means(self) -> dict[str, float]:
        """Per metric the geometric mean of the ratios of its rows that count and have one."""
        logs: dict[str, list[float]] = defaultdict(list)
        for row in self.rows:
            if row.gated and row.ratio is not None:
                logs[row.metric].append(math.log(row.ratio))
        return {metric: math.exp(sum(values) / len(values)) for metric, values in logs.items()}

    def to_json(self) -> Json:
        counts = Counter(row.verdict for row in self.rows)
        return {
            "schema": SCHEMA,
            "base": self.base,
            "new": self.new,
            "rows": [row.to_json() for row in self.rows],
            "only_in_new": list(self.only_in_new),
            "only_in_base": list(self.only_in_base),
            "summary": {
                "compared": self.compared,
                "rows": len(self.rows),
                "not_gated": sum(not row.gated for row in self.rows),
                **{verdict: counts[verdict] for verdict in VERDICTS},
                "only_in_new": len(self.only_in_new),
                "only_in_base": len(self.only_in_base),
                "geometric_mean": self.geometric_means(),
            },
            "verdict": self.verdict,
            "spread": {"value": self.spread, "source": "assumed"},
            "threshold": self.threshold,
            "environment": {name: {"base": pair[0], "new": pair[1]} for name, pair in self.environment.items()},
            "messages": list(self.messages),
        }


def exit_code(comparison: Comparison, fail_on_missing: bool = False) -> int:
    """The exit code of the command line for a comparison.

    Args:
        comparison: of two runs.
        fail_on_missing: whether cases and figures that NEW lacks fail.

    Returns:
        0 nothing worse; 1 regressed, or missing where that fails; 3 inconclusive or nothing in common.
    """
    if comparison.verdict == "regressed":
        return EXIT_REGRESSED
    if fail_on_missing and (comparison.only_in_base or any(_went_missing(row) for row in comparison.rows)):
        return EXIT_REGRESSED
    return EXIT_INCONCLUSIVE if comparison.verdict == "inconclusive" else EXIT_OK


def _went_missing(row: Row) -> bool:
    return row.metric != OUTCOME and row.new is None


def compare(
    base: Run,
    new: Run,
    metrics: Sequence[str] = DEFAULT_METRICS,
    spread: float = DEFAULT_SPREAD,
    threshold: float = DEFAULT_THRESHOLD,
) -> Comparison:
    """Compare two stored runs.

    Cases are paired by what they are (never by an id, an address or the order of parameters). A row is
    ``regressed`` or ``improved`` when the whole interval of its ratio lies beyond ``1 + threshold`` in that
    direction, ``inconclusive`` when the interval straddles this limit on the worse side, and else ``same``:
    a worsening beyond the limit is excluded. The interval joins, on a log scale, those of the two medians and
    the spread between processes, which single files do not show and which is therefore assumed. An
    out-of-memory that is new is a regression. Rows on GPUs of different models are shown and do not count.

    Args:
        base, new: runs.
        metrics: names, in the order of the rows.
        spread: what two runs of the same thing are assumed to differ by (95 %), as a fraction.
        threshold: the smallest worsening that counts, as a fraction.

    Raises:
        ConfigurationError: a metric, the spread or the threshold makes no sense.
    """
    _check(metrics, spread, threshold)
    pairs, only_base, only_new, messages = _pair(base, new)
    skipped = [pair.key for pair in pairs if pair.base.outcome == pair.new.outcome == "unsupported"]
    pairs = [pair for pair in pairs if not pair.base.outcome == pair.new.outcome == "unsupported"]
    if skipped:
        messages.append(f"unsupported on both sides ({len(skipped)}): {', '.join(skipped)}")
    rows = [row for pair in pairs for row in _rows(pair, metrics, spread, threshold)]
    for side, run in (("BASE", base), ("NEW", new)):
        if not run.completed:
            messages.append(f"{side} is incomplete ({run.reason or 'its file has problems'}): {run.path}")
        messages += [f"{side}: {problem}" for problem in run.problems]
    if not pairs and not skipped:
        messages.append("nothing in common: no case is in both files")
    return Comparison(
        base.path,
        new.path,
        tuple(rows),
        tuple(only_base),
        tuple(only_new),
        len(pairs),
        _environment_changes(base, new),
        tuple(messages),
        spread,
        threshold,
    )


def _check(metrics: Sequence[str], spread: float, threshold: float) -> None:
    known = {metric.name: metric.better for metric in all_metrics()}
    for name in metrics:
        if known.get(name, "neither") == "neither":
            choices = ", ".join(key for key, better in known.items() if better != "neither")
            what = "is unknown" if name not in known else "has no better direction"
            raise ConfigurationError(f"the metric {name!r} {what}", f"choose from {choices}")
    for what, value in (("spread", spread), ("threshold", threshold)):
        if not 0 <= value < 1:
            raise ConfigurationError(f"the {what} {value!r} is not a fraction", "give a number such as 0.02")


@dataclass(frozen=True)
class _Pair:
    key: str
    base: Record
    new: Record
    gated: bool = True
    notes: tuple[str, ...] = ()


def _pair(base: Run, new: Run) -> tuple[list[_Pair], list[str], list[str], list[str]]:
    """Records of the same case; then, of what is left, records that differ in the GPU model alone."""
    messages: list[str] = []
    old_by_case = _unambiguous(base, "BASE", messages)
    new_by_case = _unambiguous(new, "NEW", messages)
    left_base = {case: record for case, record in old_by_case.items() if case not in new_by_case}
    by_series: dict[str, list[Record]] = defaultdict(list)
    for record in left_base.values():
        by_series[_without_gpu(record.case)].append(record)
    ours_by_series = Counter(
        _without_gpu(record.case) for case, record in new_by_case.items() if case not in old_by_case
    )
    name = namer(record.case for record in (*old_by_case.values(), *new_by_case.values()))
    pairs: list[_Pair] = []
    only_new: list[Record] = []
    for case_id, record in new_by_case.items():
        if case_id in old_by_case:
            pairs.append(_Pair(name(record.case), old_by_case[case_id], record))
            continue
        series = _without_gpu(record.case)
        others = by_series[series]
        if len(others) == 1 and ours_by_series[series] == 1:
            pairs.append(_other_gpu(name, others[0], record))
            del left_base[others[0].case_id]
        else:
            only_new.append(record)
    messages += _hints(left_base.values(), only_new)
    messages += sorted({note for pair in pairs for note in pair.notes})
    return pairs, [name(one.case) for one in left_base.values()], [name(one.case) for one in only_new], messages


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


def _other_gpu(name: Callable[[Case], str], base: Record, new: Record) -> _Pair:
    models = (base.case.gpu_model, new.case.gpu_model)
    note = (
        f"GPU unknown on one side ({models[0]} → {models[1]}): shown, not gated"
        if "unknown" in models
        else f"different GPU models ({models[0]} → {models[1]}): shown, not gated"
    )
    key = name(replace(new.case, gpu_model=""))
    return _Pair(key, base, new, gated=False, notes=(note,))


def _rows(pair: _Pair, metrics: Sequence[str], spread: float, threshold: float) -> Iterable[Row]:
    base, new = pair.base, pair.new
    if base.outcome not in _MEASURED or new.outcome not in _MEASURED:
        yield _outcome_row(pair)
        return
    marks = tuple(_flag_notes(pair))
    for name in metrics:
        old, current = base.metrics.get(name), new.metrics.get(name)
        if _is_missing(old) and _is_missing(current):
            continue
        if old is None or _is_missing(old):
            note = f"not measured in BASE: {base.notes.get(name, 'no reason given')}"
            yield _one_sided(pair, name, None, current, note)
        elif current is None or _is_missing(current):
            note = f"not measured in NEW: {new.notes.get(name, 'no reason given')}"
            yield _one_sided(pair, name, old, None, note)
        else:
            yield _metric_row(pair, name, old, current, marks, spread, threshold)


def _is_missing(value: Value | None) -> bool:
    return value is None or value.value is None


def _flag_notes(pair: _Pair) -> Iterable[str]:
    for side, record in (("BASE", pair.base), ("NEW", pair.new)):
        if record.outcome == "flagged":
            codes = sorted({one.code for one in record.findings if one.flags})
            yield f"flagged in {side}: {', '.join(codes) or 'no reason given'}"


def _one_sided(pair: _Pair, name: str, base: Value | None, new: Value | None, note: str) -> Row:
    return Row(
        pair.key,
        pair.new.case_id,
        name,
        None if base is None else base.value,
        None if new is None else new.value,
        find(name).unit,
        None,
        None,
        "inconclusive",
        gated=False,
        notes=(*pair.notes, note),
    )


def _outcome_row(pair: _Pair) -> Row:
    """The verdict where a side has no figures: it ran out of memory, failed or could not be done."""
    base, new = pair.base.outcome, pair.new.outcome
    verdict: Verdict = "inconclusive"
    gated = pair.gated
    if base == new == "oom":
        verdict, note = "same", "OOM on both sides"
    elif new == "oom" and base in _MEASURED:
        verdict, note = "regressed", "now OOM"
    elif base == "oom" and new in _MEASURED:
        verdict, note = "improved", "no longer OOM"
    else:
        note = f"{base} → {new}" + (f": {pair.new.reason}" if pair.new.reason and new not in _MEASURED else "")
        # What base could not do either is no news; what it could is.
        gated = gated and base in (*_MEASURED, "oom") and new != "oom"
    return Row(pair.key, pair.new.case_id, OUTCOME, base, new, "", None, None, verdict, gated, (*pair.notes, note))


def _metric_row(
    pair: _Pair, name: str, base: Value, new: Value, marks: tuple[str, ...], spread: float, threshold: float
) -> Row:
    metric = find(name)
    notes = [*pair.notes, *marks]
    ratio, interval = ratio_of(base, new, spread)
    if ratio is None:
        verdict: Verdict = "same" if base.value == new.value else "inconclusive"
        notes.append("no ratio: a figure is zero, below what the clock resolves")
    elif interval is None:
        verdict = "inconclusive"
        notes.append("an interval reaches zero: too close to what the clock resolves")
    else:
        verdict = judge(interval, metric.better, threshold)
    sides = (("BASE", base), ("NEW", new))
    alone = [side for side, value in sides if value.interval is None and metric.unit != "B"]
    if alone and ratio is not None:
        notes.append(f"no interval in {' and '.join(alone)}: its own spread is unknown")
    return Row(
        pair.key,
        pair.new.case_id,
        name,
        base.value,
        new.value,
        metric.unit,
        ratio,
        interval,
        verdict,
        pair.gated,
        tuple(notes),
    )


def ratio_of(base: Value, new: Value, spread: float) -> tuple[float | None, tuple[float, float] | None]:
    """New / base, and its interval from those of the two figures and the spread between processes.

    Half-widths add in quadrature on the log scale, each side of the interval by itself. A figure without an
    interval brings nothing of its own.

    Args:
        base, new: figures.
        spread: between two runs of the same thing, as a fraction.
    """
    if not base.value or not new.value or base.value < 0 or new.value < 0:
        return None, None
    below, above = [math.log1p(spread)], [math.log1p(spread)]
    for value, lower, upper in ((new, below, above), (base, above, below)):
        if value.interval is not None:
            if value.interval[0] <= 0:
                return new.value / base.value, None
            # The upper end of base is the lower end of the ratio.
            lower.append(math.log(value.value / value.interval[0]) if value.value else 0.0)
            upper.append(math.log(value.interval[1] / value.value) if value.value else 0.0)
    ratio = new.value / base.value
    return ratio, (ratio * math.exp(-math.hypot(*below)), ratio * math.exp(math.hypot(*above)))


def judge(interval: tuple[float, float], better: Better, threshold: float) -> Verdict:
    """The verdict of a ratio's interval; see :func:`compare`.

    Args:
        interval: (lo, hi) of new / base.
        better: direction in which the metric improves.
        threshold: the smallest worsening that counts, as a fraction.
    """
    lo, hi = interval if better == "lower" else (1 / interval[1], 1 / interval[0])
    limit = 1 + threshold
    if lo > limit:
        return "regressed"
    if hi < 1 / limit:
        return "improved"
    return "inconclusive" if hi > limit else "same"


def _environment_changes(base: Run, new: Run) -> dict[str, tuple[Json, Json]]:
    """Versions in which the two runs differ; other hosts of the same kind are no difference."""
    old, current = _versions(base), _versions(new)
    names = dict.fromkeys((*old, *current))
    return {name: (old.get(name), current.get(name)) for name in names if old.get(name) != current.get(name)}


def _versions(run: Run) -> dict[str, Json]:
    facts = next(iter(run.environments.values())).facts if run.environments else {}
    found: dict[str, Json] = {name: facts.get(name) for name in _ENVIRONMENT}
    packages = facts.get("packages")
    if isinstance(packages, Mapping):
        found.update({name: packages.get(name) for name in ("torch", "triton", "torchvision")})
    gpus = facts.get("gpus")
    for gpu in gpus if isinstance(gpus, list) else ():
        if isinstance(gpu, Mapping):
            for name in ("vbios", "power_limit_w", "ecc", "mig", "persistence"):
                if gpu.get(name) is not None:
                    found.setdefault(name, gpu[name])
    return {name: value for name, value in found.items() if value is not None}
