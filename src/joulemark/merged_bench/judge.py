"""Judges the performance model by the candidates that were measured: its errors, and what its choices cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median
from typing import Any

from joulemark.merged.cost import Candidate, Point, Rates, fit_reached, predict
from joulemark.merged.sequence import Conv, Sequence, Shape

GOOD = 1.05
"""A choice counts as good when it takes at most this much of the best measured time."""
_Range = tuple[Sequence, Shape, bool | None]
"""Layers, size of their input, whether another tensor is added."""


@dataclass(frozen=True)
class Measured:
    """A measured candidate.

    Args:
        subject: that it was measured on.
        path: that executes it.
        adds: whether it adds a tensor from outside of its layers; None where its document does not say.
    """

    subject: str
    path: str
    point: Point
    adds: bool | None = None


def measured_of(document: Mapping[str, Any]) -> list[Measured]:
    """All candidates that a document's rows hold; each once per subject."""
    found: dict[tuple[Any, ...], Measured] = {}
    for row in document["rows"]:
        for one in timed_of(row):
            point, adds = _point(one), one.get("adds")
            key = (row["subject"], one["path"], point.sequence, point.size, point.batch, point.form, adds)
            found[key] = Measured(row["subject"], one["path"], point, adds)
    return list(found.values())


def timed_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The candidates of a row, of all its rivals, that were measured.

    Ranges of the same layers may differ by whether they add a tensor from outside (``adds``). Where a document does not
    say that, one rival tells such candidates twice: which of both adds is not known, so both are left out.
    """
    found = []
    for rival in row["rivals"].values():
        every = [one for one in rival.get("candidates", ()) if one["candidate"] is not None]
        told = Counter(map(_told, every))
        found += [one for one in every if told[_told(one)] == 1 and one["measured_s"] is not None]
    return found


def _told(one: Mapping[str, Any]) -> str:
    return repr([one.get(name) for name in ("path", "layers", "size", "batch", "form", "adds")])


def _point(one: Mapping[str, Any]) -> Point:
    shapes = ("kernel", "stride", "padding", "dilation")
    layers = tuple(Conv(**{**layer, **{name: tuple(layer[name]) for name in shapes}}) for layer in one["layers"])
    edge = one["candidate"]["edge"]
    candidate = Candidate(**{**one["candidate"], "edge": None if edge is None else tuple(edge)})
    return Point(Sequence(layers), tuple(one["size"]), one["batch"], one["form"], candidate, one["measured_s"], False)


def judge(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """The model's error per family and the share of its good choices, each subject predicted without its own points.

    Returns:
        None where the document holds no rates that a GPU can have, or no candidates. Errors are of predicted over
        measured time: ``bias`` is the median ratio, ``spread`` the median of the factor by which it is missed.
    """
    measured = measured_of(document)
    if document.get("rates") is None or not measured:
        return None
    try:
        rates = replace(Rates.from_json(document["rates"]), reached={})
    except ValueError:
        return None
    ratios: dict[str, list[float]] = {}
    choices: list[dict[str, Any]] = []
    for subject in dict.fromkeys(one.subject for one in measured):
        others = [one.point for one in measured if one.subject != subject]
        fitted = replace(rates, reached=fit_reached(_thinned(others), rates))
        own = [(one, _predicted(one.point, fitted)) for one in measured if one.subject == subject]
        for one, time_s in own:
            if time_s is not None:
                ratios.setdefault(one.point.candidate.family, []).append(time_s / one.point.time_s)
        choices += _choices(subject, own)
    return {
        "reached": fit_reached(_thinned([one.point for one in measured]), rates),
        "errors": {family: _error(values) for family, values in sorted(ratios.items())},
        "choices": choices,
        "good_choices": sum(one["cost"] <= GOOD for one in choices) / len(choices) if choices else None,
    }


def _thinned(points: List[Point], most: int = 40) -> list[Point]:
    """At most so many points of a family, evenly over all: a fit takes a time proportional to them."""
    families: dict[str, list[Point]] = {}
    for one in points:
        families.setdefault(one.candidate.family, []).append(one)
    return [one for members in families.values() for one in members[:: -(-len(members) // most)]]


def _predicted(point: Point, rates: Rates) -> float | None:
    given = (point.sequence, point.size, point.batch, point.form)
    return predict(*given, point.candidate, rates, point.cold).time_s


def _error(ratios: List[float]) -> dict[str, float]:
    misses = sorted(exp(abs(log(one))) for one in ratios)
    worst = misses[min(len(misses) - 1, round(0.9 * (len(misses) - 1)))]
    return {"points": len(ratios), "bias": median(ratios), "spread": median(misses), "spread_90": worst}


def _choices(subject: str, own: Iterable[tuple[Measured, float | None]]) -> list[dict[str, Any]]:
    """Per range of a subject that several candidates were measured for, what the model's choice costs.

    A range of several layers has one candidate more: each layer alone, on the path that is best for it.
    """
    ranges: dict[_Range, list[_Option]] = {}
    for one, time_s in own:
        if time_s is not None:
            option = _Option(one.path, one.point.candidate.how, time_s, one.point.time_s)
            ranges.setdefault((one.point.sequence, one.point.size, one.adds), []).append(option)
    found = []
    for (sequence, size, adds), options in ranges.items():
        apart = _apart(sequence, size, adds, ranges) if len(sequence.layers) > 1 else None
        options = [*options, apart] if apart is not None else options
        if len(options) < 2:
            continue
        chosen = min(options, key=lambda one: one.predicted_s)
        best = min(options, key=lambda one: one.measured_s)
        found.append(
            {
                "subject": subject,
                "layers": len(sequence.layers),
                "candidates": len(options),
                "chosen": chosen.path,
                "chosen_how": chosen.how,
                "best": best.path,
                "best_how": best.how,
                "cost": chosen.measured_s / best.measured_s,
            }
        )
    return found


@dataclass(frozen=True)
class _Option:
    """A way to execute a range, predicted and measured."""

    path: str
    how: str
    predicted_s: float
    measured_s: float


def _apart(
    sequence: Sequence, size: Shape, adds: bool | None, ranges: Mapping[_Range, List[_Option]]
) -> _Option | None:
    """Every layer alone; None where one of them was not measured alone."""
    predicted = measured = 0.0
    for number, (layer, given) in enumerate(zip(sequence.layers, sequence.sizes(size), strict=False), 1):
        alone = Sequence((replace(layer, residual=None, joined=None),))
        outside = layer.residual is not None or (adds is True and number == len(sequence.layers))
        options = ranges.get((alone, given, outside)) or ranges.get((alone, given, None))
        if not options:
            return None
        predicted += min(one.predicted_s for one in options)
        measured += min(one.measured_s for one in options)
    return _Option("apart", "unmerged", predicted, measured)
