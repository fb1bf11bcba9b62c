"""This GPU beside the published ones, and what would change if a part cost less or a limit were lower (pure)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from joulemark.energy.counters import Counts
from joulemark.energy.model import Model, Prediction
from joulemark.energy.units import UNITS, Group
from joulemark.errors import ConfigurationError, UnreadableInput, in_words
from joulemark.records import Amount, Json, converted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from joulemark.energy.calibration import Calibration

PUBLISHED_SCHEMA = "joulemark/published-energies/1"
_LARGEST_FACTOR = 1e6
"""Of a what-if question: nothing that is built costs a million times as much."""


@dataclass(frozen=True)
class Published:
    """A published energy.

    Args:
        gpu, process: as in ``NVIDIA A100``, ``N7``.
        quantity: key of :data:`QUANTITIES`.
        value_j: in J per ``per``.
        per: ``bit``, ``FLOP`` or ``B``.
        control_j, datapath_j: its parts, where published.
        citation: where it stands, and how it was read.
    """

    gpu: str
    process: str
    quantity: str
    value_j: Amount
    per: str
    citation: str
    control_j: Amount | None = None
    datapath_j: Amount | None = None


QUANTITIES: Mapping[str, tuple[str, float]] = {
    "hbm": ("hbm_read", 1 / 8),
    "l2": ("l2_read", 1 / 8),
    "l1": ("l1_read", 1 / 8),
    "vector_fp64": ("fp64", 1 / 2),
    "matrix_fp16": ("wgmma_fp16", 1.0),
    "load_shared": ("shared_read", 1.0),
    "load_l1": ("l1_read", 1.0),
    "load_l2": ("l2_read", 1.0),
    "load_hbm": ("hbm_read", 1.0),
}
"""Published quantity → benchmark whose path it is, and the factor from its count to the published one (per bit, per
byte, per FLOP). On GPUs without ``wgmma``, ``matrix_fp16`` is ``mma_fp16``."""


def read_published(paths: Iterable[Path]) -> list[Published]:
    """Read files of published energies (``results/published``).

    Raises:
        UnreadableInput: a file is none of this schema.
    """
    found = []
    for path in sorted(paths):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] != PUBLISHED_SCHEMA:
                raise ValueError(f"schema {data['schema']!r}")
            found += [converted({**row, "citation": data["citation"]}, Published) for row in data["rows"]]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            what = f"{path} holds no published energies ({in_words(error)})"
            raise UnreadableInput(what, "write it as those in results/published are") from error
    return found


def beside(calibration: Calibration, published: Sequence[Published]) -> list[dict[str, Json]]:
    """Each published quantity over GPUs, this one with random and zero operands beside them.

    Scopes differ between publications by factors of 1.6 to 3.8: order and trend say more than absolute values.
    """
    rows: list[dict[str, Json]] = []
    for quantity, (benchmark, factor) in QUANTITIES.items():
        name = _own_benchmark(calibration, benchmark)
        own = {
            row["operands"]: float(row["measured_j"]) * factor for row in calibration.paths if row["benchmark"] == name
        }
        others = [one for one in published if one.quantity == quantity]
        rows.append(
            {
                "quantity": quantity,
                "per": others[0].per if others else None,
                "this_gpu": calibration.gpu.get("gpu"),
                "benchmark": name,
                "this_random_j": own.get("random"),
                "this_zero_j": own.get("zero"),
                "published": [
                    {"gpu": one.gpu, "process": one.process, "value_j": one.value_j, "control_j": one.control_j,
                     "datapath_j": one.datapath_j, "citation": one.citation}
                    for one in others
                ],
            }
        )  # fmt: skip
    return rows


def _own_benchmark(calibration: Calibration, name: str) -> str:
    measured = {row["benchmark"] for row in calibration.paths}
    return name if name in measured else name.replace("wgmma", "mma")


def scale_of(texts: Iterable[str]) -> dict[str, float]:
    """``hbm=0.5`` or ``fp64=0.8`` → unit → factor; a group names all its units.

    Raises:
        ConfigurationError: an unknown name or a factor that is no number from 0 to a million.
    """
    groups = {unit.group for unit in UNITS.values()}
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = -1.0
        if not 0 <= factor <= _LARGEST_FACTOR or (name not in groups and name not in UNITS):
            raise ConfigurationError(
                f"--scale {text!r} is no factor of a unit",
                f"give NAME=FACTOR with one of {', '.join(sorted(groups))} or a unit: {', '.join(UNITS)}",
            )
        names = [unit.name for unit in UNITS.values() if unit.group == name] or [name]
        found |= dict.fromkeys(names, factor)
    return found


@dataclass(frozen=True)
class WhatIf:
    """A workload as it is and as it would be.

    Args:
        energy_j, new_energy_j: predicted.
        time_s, new_time_s: longer where a limit slows it down.
        largest, new_largest: group that spends most.
        clock: SM clock over its highest, under the limit.
    """

    energy_j: float
    new_energy_j: float
    time_s: float
    new_time_s: float
    largest: Group
    new_largest: Group
    clock: float


def limited(
    model: Model, counts: Counts, time_s: float, limit_w: float, clock: float = 1.0, core_share: float = 1.0
) -> WhatIf:
    """The same work under a power limit, by the model: no limit is ever set.

    Args:
        model: of the GPU.
        counts: of the work.
        time_s: of the work, at ``clock``.
        limit_w: power limit.
        clock: SM clock over its highest when the work was measured.
        core_share: of the time, that follows the SM clock.

    Raises:
        MeasurementError: the calibration has no frequency law.
    """
    return what_if(model.predict(counts, time_s, clock), model.under_limit(counts, time_s, limit_w, clock, core_share))


def what_if(before: Prediction, after: Prediction) -> WhatIf:
    """The same work by two predictions."""
    return WhatIf(
        before.energy_j, after.energy_j, before.time_s, after.time_s, largest(before), largest(after), after.clock
    )


def largest(prediction: Prediction) -> Group:
    """The group of units that spends most."""
    sums: dict[Group, float] = {}
    for (unit, _), energy in prediction.parts.items():
        group = UNITS[unit].group
        sums[group] = sums.get(group, 0.0) + energy
    return max(sums, key=sums.__getitem__)
