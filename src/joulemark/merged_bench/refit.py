"""Fits the seconds of kernels to measured ones, and says how well they predict kernels that they have not seen.

``python -m joulemark.merged_bench.refit results/nvidia-h200/merged-probe.json [--out F.json] [--write]``

Non-negative least squares of the relative error, per family over the terms of its counts
(:mod:`joulemark.merged.kernels.seconds`); a kernel counts the less, the farther it is from the best of its block. Of
several files the last one that measured a kernel tells its time. For the table of errors each block is predicted
without its own points.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from importlib import resources
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from joulemark.merged.kernels import Description, Kernel
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.seconds import BESIDE, DRAM, Counts, fitted, time_of
from joulemark.merged.sequence import Conv, Sequence
from joulemark.merged.trials import worth_measuring
from joulemark.merged_bench.judge import GOOD, timed_of

SCHEMA = "joulemark.merged-model/1"
_SHARED = "launch"
"""A term whose seconds are the same for all families."""
_LEAST_BLOCKS = 3
"""On which a family that borrows another's seconds must have been measured to have its own."""
_NEAR = 2
"""Order in which a kernel's error counts less the farther it is from the best of its block."""
_STEPS = 6
"""Of the fit, each half of the way."""
_ROUNDING = 1e-9
"""Share of a kernel's time that is no term's but rounding."""
_TRIED = 3
"""Best predicted kernels of a block of which one should be the best: what a short measured pass would find."""


@dataclass(frozen=True)
class Timed:
    """A measured kernel.

    Args:
        block: that it was measured on.
        family: of it.
        name: that tells it from the others of its block.
        counts: of what it does.
        time_s: measured.
        shared: bytes of shared memory of a block: of what counts cannot tell apart the smaller is taken.
        problem: what it computes; blocks of the same one are one block, whatever files call them.
    """

    block: str
    family: str
    name: str
    counts: Counts
    time_s: float
    shared: int
    problem: str = ""


def points_of(document: Mapping[str, Any]) -> list[Timed]:
    """The measured kernels of a document.

    They are counted as this version's families count; candidates of a ``merged-blocks.json`` that tell no plan bring
    their counts along. In a ``merged-probe.json`` a kernel of fewer layers than its block was launched once for each
    part of it.

    Raises:
        KeyError: the document holds neither.
    """
    if "rows" in document:
        return _candidates_of(document)
    found = []
    for block in document["blocks"]:
        layers = tuple(_layer(one) for one in block["layers"])
        for one in block["kernels"]:
            depth = one.get("depth", len(layers))
            kernel = _made(one["family"], Description(Sequence(layers[:depth]), block["format"]), one["plan"])
            counts = _counted(kernel, block["size"], block["batch"])
            launches = len(layers) // depth
            whole = {term: count * launches for term, count in counts.items()}
            name = kernel.name if launches == 1 else f"{launches} x {kernel.name}"
            problem = _problem(layers, block["size"], block["batch"], block["format"])
            found.append(Timed(block["name"], one["family"], name, whole, one["time_s"], kernel.shared, problem))
    return found


def _problem(layers: List[Conv], size: Iterable[int], batch: int, form: str) -> str:
    return repr((tuple(layers), tuple(size), batch, form))


def _made(family: str, description: Description, plan: Mapping[str, Any]) -> Kernel:
    module: Any = importlib.import_module(f"joulemark.merged.kernels.{family}")
    kernel: Kernel = getattr(module, family)(description, module.Plan(**{k: _tupled(v) for k, v in plan.items()}))
    return kernel


def _counted(kernel: Kernel, size: Iterable[int], batch: int) -> Counts:
    assert kernel.counts is not None, f"{kernel.name} was measured and counts nothing"
    return kernel.counts(tuple(size), batch, Device())


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def latest(found: Iterable[List[Timed]]) -> list[Timed]:
    """All points of several files; a kernel that several have measured as the last of them did."""
    names: dict[str, str] = {}
    kept: dict[tuple[str, str, str], Timed] = {}
    for one in (one for points in found for one in points):
        block = names.setdefault(one.problem or one.block, one.block)  # as the first file calls it
        kept[block, one.family, one.name] = replace(one, block=block)
    return list(kept.values())


def _candidates_of(document: Mapping[str, Any]) -> list[Timed]:
    """Each range of a row is a block of its own: its candidates were measured beside each other.

    What is added from outside no family counts: kernels that do are left out.
    """
    found: dict[tuple[str, str], Timed] = {}
    for row in document["rows"]:
        for one in timed_of(row):
            block = f"{row['subject']}/{len(one['layers'])}x{'x'.join(map(str, one['size']))}"
            made = None if one.get("adds") else _candidate(block, one)
            if made is not None:
                found[block, one["path"]] = made
    return list(found.values())


def _candidate(block: str, one: Mapping[str, Any]) -> Timed | None:
    """Counted as this version counts where its plan is known, else as the version that measured it did; or not."""
    family, shared = one["candidate"]["family"], one["candidate"]["shared"]
    name = one["path"].partition("/")[2]
    if one.get("plan") is None:
        return Timed(block, family, name, one["counts"], one["measured_s"], shared) if one.get("counts") else None
    layers = [Conv(**{key: _tupled(value) for key, value in layer.items()}) for layer in one["layers"]]
    kernel = _made(family, Description(Sequence(tuple(layers)), one["form"]), one["plan"])
    if kernel.counts is None:
        return None
    counts = _counted(kernel, one["size"], one["batch"])
    problem = _problem(layers, one["size"], one["batch"], one["form"])
    return Timed(block, family, name, counts, one["measured_s"], shared, problem)


def _layer(one: Mapping[str, Any]) -> Conv:
    kernel, stride = one["kernel"], one.get("stride", 1)
    shape = ((kernel,) * 2, (stride,) * 2, (kernel // 2,) * 2, (1, 1))
    return Conv(one["in"], one["out"], *shape, one.get("groups", 1), one["activation"], one.get("residual"))


def fit(points: Iterable[Timed]) -> dict[str, dict[str, float]]:
    """Family → term → seconds; terms that explain nothing are left out.

    What a launch costs all families share: a family that was measured in long calls alone could not tell it from them.
    One that borrows another's seconds goes on with them while it was measured on too few blocks for its own.
    """
    members = _enough(points)
    if not members:
        return {}
    terms: dict[str, set[str]] = {}
    for one in members:
        terms.setdefault(one.family, set()).update(one.counts)
    columns = sorted({_column(family, term) for family, counted in terms.items() for term in counted})
    number = {column: n for n, column in enumerate(columns)}
    matrix = np.zeros((len(members), len(columns)))
    for row, one in zip(matrix, members, strict=True):
        for term, count in one.counts.items():
            row[number[_column(one.family, term)]] = count / one.time_s
    solution = _solved(matrix, _weights(members), np.array([term == DRAM for _, term in columns]))
    found: dict[str, dict[str, float]] = {}
    for family in dict.fromkeys(one.family for one in members):
        own = ((term, solution[number[_column(family, term)]]) for term in sorted(terms[family]))
        found[family] = {term: float(f"{seconds:.4g}") for term, seconds in own if seconds > 0}
    return found


def _weights(members: List[Timed]) -> NDArray[np.float64]:
    """Of each kernel's relative error: a choice depends on those that are nearly the best of their block."""
    best: dict[str, float] = {}
    for one in members:
        best[one.block] = min(best.get(one.block, one.time_s), one.time_s)
    return np.array([(best[one.block] / one.time_s) ** _NEAR for one in members])


def _solved(matrix: NDArray[np.float64], weights: NDArray[np.float64], moved: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Seconds that are least wrong, none negative, by Gauss-Newton steps: the norm is linear in what it grows by.

    Args:
        matrix: counts over measured time, a row for each kernel.
        weights: of the rows' errors.
        moved: which columns are bytes through DRAM. They begin at the highest rate that any kernel reached.
    """
    scale = np.maximum(matrix.max(axis=0), 1e-300)  # in these units the fastest bytes through DRAM take 1
    matrix, wanted, solution = matrix / scale, weights[:, None], np.where(moved, 1.0, 0.0)
    solution[~moved] = _not_negative(_triangle(matrix[:, ~moved] * wanted, weights))
    through = matrix[:, moved].any(axis=1)
    others = _triangle(matrix[~through] * wanted[~through], weights[~through])  # of these the sum is the norm
    matrix, wanted, weights = matrix[through], wanted[through], weights[through]
    for _ in range(_STEPS if through.any() else 0):
        added, beside = matrix[:, ~moved] @ solution[~moved], matrix[:, moved] @ solution[moved]
        told = np.maximum((added**BESIDE + beside**BESIDE) ** (1 / BESIDE), 1e-300)
        slopes = np.where(moved, (beside / told)[:, None], (added / told)[:, None]) ** (BESIDE - 1)
        rows = np.column_stack([slopes * matrix * wanted, weights])
        solution = (solution + _not_negative(np.vstack([others, rows]))) / 2
    seconds: NDArray[np.float64] = np.where(solution > _ROUNDING, solution, 0.0) / scale
    return seconds


def _triangle(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """What has the same least squares as a matrix and a vector, with as many rows as columns at most; that one last."""
    return np.asarray(np.linalg.qr(np.column_stack([matrix, wanted]), mode="r"), dtype=np.float64)


def _not_negative(system: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-negative least squares of a matrix and, as its last column, a vector."""
    solution: NDArray[np.float64] = nnls(system[:, :-1], system[:, -1])[0]
    return solution


def _enough(points: Iterable[Timed]) -> list[Timed]:
    members = list(points)
    blocks: dict[str, set[str]] = {}
    for one in members:
        blocks.setdefault(one.family, set()).add(one.block)
    borrow = {family for family in fitted().borrowed if len(blocks.get(family, ())) < _LEAST_BLOCKS}
    return [one for one in members if one.family not in borrow]


def _column(family: str, term: str) -> tuple[str, str]:
    return ("", term) if term == _SHARED else (family, term)


def predicted_s(point: Timed, seconds: Mapping[str, Mapping[str, float]]) -> float:
    """The time of a kernel by fitted seconds, borrowed ones where there are; not a number where its family has none."""
    found = seconds.get(point.family, seconds.get(fitted().borrowed.get(point.family, "")))
    return float("nan") if found is None else time_of(point.counts, found)


def errors_of(points: List[Timed]) -> dict[str, Any]:
    """Each block predicted by the others: errors per family, and what the choice by prediction costs per block.

    Errors are of predicted over measured time: ``bias`` is the median ratio, ``spread`` and ``spread_90`` the median
    and the 90th percentile of the factor by which it is missed.
    """
    ratios: dict[str, list[float]] = {}
    blocks = []
    for name in dict.fromkeys(one.block for one in points):
        seconds = fit(one for one in points if one.block != name)
        own = [(one, predicted_s(one, seconds)) for one in points if one.block == name]
        known = [(one, time_s) for one, time_s in own if time_s == time_s]
        if not known:
            continue
        for one, time_s in known:
            ratios.setdefault(one.family, []).append(time_s / one.time_s)
        blocks.append(_choice(name, known))
    return {
        "families": {family: _error(values) for family, values in sorted(ratios.items())},
        "blocks": blocks,
        "good_choices": _share(blocks, "cost"),
        "good_of_three": _share(blocks, "cost_of_three"),
        "good_of_tried": _share(blocks, "cost_of_tried"),
        "right_schedules": _told_right(blocks),
    }


def _share(blocks: List[Mapping[str, Any]], cost: str) -> float | None:
    """Of the blocks, of those whose choice was good; None where no block could be predicted by others."""
    return sum(one[cost] <= GOOD for one in blocks) / len(blocks) if blocks else None


def _told_right(blocks: List[Mapping[str, Any]]) -> float | None:
    """Of the blocks that both padded and memoized bricks were measured on, where the faster ones were told."""
    both = [one["memoized_over_padded"] for one in blocks if one["memoized_over_padded"] is not None]
    return sum((one["measured"] < 1) == (one["predicted"] < 1) for one in both) / len(both) if both else None


def _memoized_over_padded(known: List[tuple[Timed, float]]) -> dict[str, float] | None:
    """The fastest kernel of memoized bricks over that of padded ones, by measured and by predicted times.

    Both compute their intermediates once or with a halo by the same instructions; what takes several launches is out.
    """
    found = [[(one.time_s, time_s) for one, time_s in known if one.family == family and " x " not in one.name]
             for family in ("memoized", "chain")]  # fmt: skip
    if not all(found):
        return None
    (memoized, told), (padded, padded_told) = [tuple(map(min, zip(*each, strict=True))) for each in found]
    return {"measured": round(memoized / padded, 3), "predicted": round(told / padded_told, 3)}


def _choice(name: str, known: List[tuple[Timed, float]]) -> dict[str, Any]:
    best = min(one.time_s for one, _ in known)
    ranked = sorted(known, key=lambda one: (one[1], one[0].shared))
    chosen = ranked[0][0]
    tried = worth_measuring([(one.family, time_s, True) for one, time_s in ranked])
    return {
        "block": name,
        "kernels": len(known),
        "predicted_over_measured": round(median(time_s / one.time_s for one, time_s in known), 3),
        "chosen": chosen.name,
        "best": next(one.name for one, _ in known if one.time_s == best),
        "cost": round(chosen.time_s / best, 3),
        "cost_of_three": round(min(one.time_s for one, _ in ranked[:_TRIED]) / best, 3),
        "tried": len(tried),
        "cost_of_tried": round(min(ranked[number][0].time_s for number in tried) / best, 3),
        "memoized_over_padded": _memoized_over_padded(known),
    }


def _error(ratios: List[float]) -> dict[str, float]:
    misses = sorted(exp(abs(log(one))) for one in ratios)
    worst = misses[round(0.9 * (len(misses) - 1))]
    told = {"bias": median(ratios), "spread": median(misses), "spread_90": worst}
    return {"points": len(ratios), **{name: round(value, 3) for name, value in told.items()}}


def table(errors: Mapping[str, Any]) -> str:
    """The errors for a terminal."""
    lines = [f"{'family':20} {'points':>6} {'bias':>7} {'spread':>7} {'90 %':>7}"]
    lines += [
        f"{family:20} {one['points']:6} {one['bias']:7.3f} {one['spread']:7.3f} {one['spread_90']:7.3f}"
        for family, one in errors["families"].items()
    ]
    if not errors["blocks"]:
        return "\n".join([*lines, "", "no block can be predicted by others: one block alone was measured"])
    titles = ("predicted", "cost", "of three", "of tried", "tried")
    lines += ["", f"{'block, without its own points':30} {'{:>9} {:>6} {:>8} {:>8} {:>5}'.format(*titles)}"]
    lines += [
        f"{one['block']:30} {one['predicted_over_measured']:9.3f} {one['cost']:6.3f} {one['cost_of_three']:8.3f} "
        f"{one['cost_of_tried']:8.3f} {one['tried']:5}"
        for one in errors["blocks"]
    ]
    count = len(errors["blocks"])
    good, three, tried = (round(errors[f"good_{name}"] * count) for name in ("choices", "of_three", "of_tried"))
    lines.append(
        f"within 5 % of the best: {good} of {count} choices, {three} with three tried, {tried} with those tried that "
        "merging measures"
    )
    lines += _schedules(errors["blocks"])
    return "\n".join(lines)


def _schedules(blocks: List[Mapping[str, Any]]) -> list[str]:
    """Padded against memoized bricks, in a line each for how often the winner is told and where memoized ones win."""
    both = [(one["block"], one["memoized_over_padded"]) for one in blocks if one["memoized_over_padded"] is not None]
    if not both:
        return []
    right = round((_told_right(blocks) or 0) * len(both))
    won = [f"{name} ({one['measured']:.3f} of its time)" for name, one in both if one["measured"] < 1]
    return [
        f"padded or memoized bricks, whichever is faster, told in {right} of {len(both)}; memoized faster than padded: "
        + (", ".join(won) or "nowhere")
    ]


def main(argv: List[str] | None = None) -> int:
    """Fit, print, and write where that is asked for; 0 done, 2 the files cannot be fitted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="F.json", help="merged-probe.json, merged-blocks.json, of one GPU"
    )
    parser.add_argument("--out", type=Path, metavar="F.json", help="where errors and seconds go")
    parser.add_argument("--write", action="store_true", help="put the seconds into this installation")
    args = parser.parse_args(argv)
    try:
        documents = [json.loads(path.read_text(encoding="utf-8")) for path in args.files]
        points = latest([points_of(one) for one in documents])
        (gpu,) = {one["gpu"] for one in documents}
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error!r}: give merged-probe.json or merged-blocks.json files of one GPU", file=sys.stderr)
        return 2
    errors, seconds = errors_of(points), fit(points)
    print(table(errors))
    origin = "; ".join(_origin(path, one) for path, one in zip(args.files, documents, strict=True))
    derived = _not_measured(points)
    derived_from = fitted().derived_from if derived else ""
    made = replace(fitted(), gpu=gpu, origin=origin, seconds=seconds, derived=derived, derived_from=derived_from)
    if args.out is not None:
        _write(args.out, {"schema": SCHEMA, **vars(made), "errors": errors})
    if args.write:
        with resources.as_file(resources.files("joulemark.merged.kernels") / "seconds.json") as path:
            _write(path, vars(made))
    return 0


def _not_measured(points: List[Timed]) -> dict[str, dict[str, float]]:
    """The derived seconds of terms that no point counts."""
    counted = {(one.family, term) for one in points for term, count in one.counts.items() if count}
    kept = {
        family: {term: seconds for term, seconds in terms.items() if (family, term) not in counted}
        for family, terms in fitted().derived.items()
    }
    return {family: terms for family, terms in kept.items() if terms}


def _origin(path: Path, document: Mapping[str, Any]) -> str:
    if "kernels_of_commits" not in document:
        return f"{path.name}, its candidates"
    commits = ", ".join(f"{family} {commit}" for family, commit in document["kernels_of_commits"].items())
    return f"{path.name}, kernels of {commits}"


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
