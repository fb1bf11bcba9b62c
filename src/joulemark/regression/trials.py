"""How often the gate cries wolf, and what it finds: verdicts on disjoint processes of the same binary (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from joulemark.errors import ConfigurationError
from joulemark.records import Json, Run, of_simulated
from joulemark.regression.machines import machine_of
from joulemark.regression.processes import METRICS, Cell, cells_of
from joulemark.regression.rivals import RIVALS
from joulemark.regression.simulate import Components, Rate, rate, regressions, simulate, wilson
from joulemark.regression.verdicts import Rule

SCHEMA = "joulemark/aa/1"
OURS = "joulemark"
_PER_SIDE = 3
_SIMULATED_SLOWDOWNS = (0.0, 0.03, 0.05)
_GRID = tuple(round(0.0025 * step, 4) for step in (*range(1, 41), *range(44, 161, 4)))
"""Slowdowns that are tried for the smallest that is found, as fractions: 0.25 % to 10 %, and by 1 % to 40 %."""

_HEAVY_TAILS = 4.0
_APART = "normal, with the cells' components; a share of processes stands apart as those of the cell do"
_HEAVY = f"the same with heavy tails: Student's distribution with {_HEAVY_TAILS:.0f} degrees of freedom"
_NORMAL = "normal, with each cell's whole scatter"

Index = NDArray[np.intp]


def evaluate(
    runs: Sequence[Run],
    metric: str | None = None,
    rule: Rule | None = None,
    pairs: int = 1000,
    simulated_rows: int = 20_000,
    seed: int = 0,
) -> Json:
    """Judge the gate on stored processes of the same binary; a document of ``docs/schema/aa.schema.json``.

    Processes are split at random into disjoint triples, triples paired, and the gate judges all cells of a pair as
    one comparison of two runs; this is repeated with new splits. Every triple takes the same processes of all cells.
    For arms with added work the triple on the new side comes from that arm, of other processes than the base's.

    Pairs of different splits share processes, so their verdicts are not independent: an interval counts as many
    rows as one split has (disjoint pairs times cells). It is conservative, since averaging over splits only helps.

    Args:
        runs: with at least six processes per case; cases whose parameter ``added_work`` is 0.03 hold 3 % more work.
        metric: what is judged; see :func:`joulemark.regression.processes.cells_of`.
        rule: of the gate.
        pairs: at least so many, in whole splits.
        simulated_rows: at least so many for each simulated rate.
        seed: of all random choices.

    Raises:
        UnreadableInput: too few processes.
        ConfigurationError: a metric that cannot be judged, or no pairs.
    """
    rule = rule or Rule()
    _check(metric, pairs, simulated_rows)
    name, cells, left_out = cells_of(runs, metric)
    base, new, splits = draw_pairs(len(cells[0].logs[0.0]), pairs, np.random.default_rng(seed))
    components = [cell.components for cell in cells]
    return {
        "schema": SCHEMA,
        "metric": name,
        "sources": [Path(run.path).name for run in runs],
        "gpu_models": sorted({record.case.gpu_model for run in runs for record in run.records}),
        "machine": machine_of(runs[0]),
        "rule": _rule(rule),
        "resampling": _resampling(cells, len(base), splits, seed),
        "cells": [_cell(cell, one) for cell, one in zip(cells, components, strict=True)],
        "rates": _rates(cells, base, new, splits, rule),
        "smallest_slowdown": _smallest(cells, base, new, rule),
        "simulated": _simulated(cells, components, simulated_rows, rule, seed),
        "notes": [*of_simulated(runs), *left_out],
    }


def _check(metric: str | None, pairs: int, simulated_rows: int) -> None:
    if metric is not None and metric not in METRICS:
        raise ConfigurationError(f"the gate is not judged on {metric!r}", f"choose from {', '.join(METRICS)}")
    if pairs < 1 or simulated_rows < 1:
        raise ConfigurationError(f"pairs and rows must be positive, got {pairs} and {simulated_rows}", "give more")


def draw_pairs(processes: int, pairs: int, generator: np.random.Generator) -> tuple[Index, Index, int]:
    """Pairs of disjoint triples of processes.

    Args:
        processes: to choose from, at least six.
        pairs: at least so many.
        generator: of random numbers.

    Returns:
        base and new indices, each (pairs, 3), and the number of splits that they come from.
    """
    per_split = processes // (2 * _PER_SIDE)
    splits = math.ceil(pairs / per_split)
    order = generator.permuted(np.tile(np.arange(processes), (splits, 1)), axis=1)
    triples = order[:, : per_split * 2 * _PER_SIDE].reshape(-1, 2, _PER_SIDE)
    return triples[:, 0], triples[:, 1], splits


def _rule(rule: Rule) -> Json:
    return {
        "processes_per_side": _PER_SIDE,
        "threshold": rule.threshold,
        "min_effect": rule.min_effect,
        "false_discovery_rate": rule.fdr,
        "false_alarms_per_row": rule.alpha,
    }


def _resampling(cells: Sequence[Cell], pairs: int, splits: int, seed: int) -> Json:
    processes = len(cells[0].logs[0.0])
    per_split = pairs // splits
    return {
        "processes": processes,
        "cells": len(cells),
        "splits": splits,
        "pairs": pairs,
        "independent_rows": per_split * len(cells),
        "seed": seed,
        "statement": (
            f"{splits} random splits of {processes} processes into disjoint triples, {per_split} pair(s) of triples "
            f"each; a pair is one comparison of all {len(cells)} cells; intervals count {per_split * len(cells)} "
            "independent rows, those of one split"
        ),
    }


def _cell(cell: Cell, components: Components) -> Json:
    return {
        "key": cell.key,
        "median": math.exp(float(np.median(cell.logs[0.0]))),
        "between_processes": components.between,
        "within_process": components.within,
        "standing_apart": [math.exp(one) for one in components.apart],
        "sm_clock_scatter": float(np.std(components.clocks, ddof=1)) if components.clocks else None,
        "arms": [
            {
                "added_work": added,
                "processes": len(logs),
                "ratio": math.exp(float(np.median(logs) - np.median(cell.logs[0.0]))),
            }
            for added, logs in cell.logs.items()
        ],
    }


def _rates(cells: Sequence[Cell], base: Index, new: Index, splits: int, rule: Rule) -> Json:
    """Per rule and arm: the share of rows and of comparisons with an alarm."""
    arms = sorted(set.intersection(*(set(cell.logs) for cell in cells)))
    out = []
    for added in arms:
        found = {OURS: _ours(cells, added, base, new, rule)}
        for name, rival in RIVALS.items():
            verdicts = [rival(cell.samples[0.0], cell.samples[added], base, new) for cell in cells]
            found[name] = np.stack(verdicts, axis=1)
        out += [_rate_row(name, added, verdicts, len(base) // splits) for name, verdicts in found.items()]
    return out


def _ours(
    cells: Sequence[Cell], added: float, base: Index, new: Index, rule: Rule, slowdown: float = 0.0
) -> NDArray[np.bool_]:
    """Verdicts of the gate; ``slowdown`` makes the figures of the new side so much larger."""
    sides = ((0.0, base), (added, new))
    old, now = (np.stack([cell.logs[arm][index] for cell in cells], axis=1) for arm, index in sides)
    clocks = [np.stack([cell.clocks[arm][index] for cell in cells], axis=1) for arm, index in sides]
    return regressions(old, now + math.log1p(slowdown), rule, (clocks[0], clocks[1]))


def _rate_row(name: str, added: float, verdicts: NDArray[np.bool_], per_split: int) -> Json:
    failed = np.asarray(verdicts.any(axis=1))
    return {
        "rule": name,
        "added_work": added,
        "rows": verdicts.size,
        "regressed": int(verdicts.sum()),
        "rate": float(verdicts.mean()),
        "interval": list(wilson(float(verdicts.mean()), per_split * verdicts.shape[1])),
        "comparisons": verdicts.shape[0],
        "failed": int(failed.sum()),
        "failed_rate": float(failed.mean()),
        "failed_interval": list(wilson(float(failed.mean()), per_split)),
    }


def _smallest(cells: Sequence[Cell], base: Index, new: Index, rule: Rule) -> Json:
    """The smallest slowdown found in 95 % of the pairs, when the plain figures of the new side are that much slower."""
    lone = Rule(**{**vars(rule), "family": len(cells)})  # as strict as towards a row that is slow alone
    found: dict[str, float | None] = {cell.key: None for cell in cells}
    overall = None
    for slowdown in _GRID:
        shares = _ours(cells, 0.0, base, new, lone, slowdown).mean(axis=0)
        if overall is None and shares.mean() >= rule.power:
            overall = slowdown
        for cell, share in zip(cells, shares, strict=True):
            if found[cell.key] is None and share >= rule.power:
                found[cell.key] = slowdown
        if overall is not None and None not in found.values():
            break
    return {"share": rule.power, "of_all_rows": overall, "by_cell": found}


def _simulated(cells: Sequence[Cell], components: Sequence[Components], rows: int, rule: Rule, seed: int) -> Json:
    """Rates of rows with the cells' components: normal and with heavy tails, and with what stands apart as scatter."""
    models = {_APART: components, _HEAVY: [replace(one, tails=_HEAVY_TAILS) for one in components]}
    if any(one.apart for one in components):
        models[_NORMAL] = [
            Components(float(cell.logs[0.0].std(ddof=1)), clocks=one.clocks)
            for cell, one in zip(cells, components, strict=True)
        ]
    return {
        "seed": seed,
        "rates": [
            {
                "model": model,
                "slowdown": slowdown,
                **_as_json(_rate_of(simulate(found, slowdown, rows, rule, _PER_SIDE, seed))),
            }
            for model, found in models.items()
            for slowdown in _SIMULATED_SLOWDOWNS
        ],
    }


def _rate_of(verdicts: NDArray[np.bool_]) -> Rate:
    return rate(int(verdicts.sum()), verdicts.size)


def _as_json(found: Rate) -> Mapping[str, Json]:
    return {
        "rows": found.trials,
        "regressed": found.events,
        "rate": found.value,
        "interval": list(found.interval),
    }
