"""From the profiler's traces of all ranks to the Measurement of their communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from joulemark.errors import UnreadableInput
from joulemark.measure.value import value_of
from joulemark.metrics import COMMUNICATION, format_value
from joulemark.records import Finding, Measurement, Value
from joulemark.stats import summarize
from joulemark.trace.analyse import analyse
from joulemark.trace.communication import DEVICE, Communication, RankCommunication, across, rank_communication

NAME = "communication"
_TIERS = {"device": "torch_profiler", "host": "torch_profiler_host"}


def communication_measurement(traces: Sequence[Path]) -> Measurement:
    """Medians over the iterations that all ranks recorded; each rank's own iterations are the samples.

    The tier says where collectives were seen: ``torch_profiler`` as kernels of the GPUs, ``torch_profiler_host`` as
    ranges of gloo's threads beside operators of the framework.

    Args:
        traces: one per rank, in order of rank.
    """
    ranks: list[RankCommunication] = []
    for place, path in enumerate(traces):
        try:
            found = rank_communication(analyse(path), place)
        except UnreadableInput as error:
            return Measurement(NAME, missing=dict.fromkeys(COMMUNICATION, f"rank {place} left no trace: {error}"))
        if found is None:
            why = f"the trace of rank {place} holds no marked iteration"
            return Measurement(NAME, missing=dict.fromkeys(COMMUNICATION, why))
        ranks.append(found)
    return measurement_of(across(ranks))


def measurement_of(seen: Communication) -> Measurement:
    """The figures of all ranks together."""
    values: dict[str, Value] = {}
    tier = _TIERS[seen.ranks[0].source]
    for name, figures in (
        ("communication_s", seen.communication_s),
        ("exposed_communication_s", seen.exposed_s),
        ("overlap_fraction", seen.overlap_s),
        ("straggler_wait_s", seen.wait_s),
    ):
        if figures and any(seen.communication_s):
            values[name] = value_of(figures, name, tier)
    if seen.straggler is not None:
        values["straggler_rank"] = Value(float(seen.straggler.rank), "1", n=seen.straggler.iterations, tier=tier)
    return Measurement(NAME, values, _samples(seen), _missing(seen, values), tuple(_findings(seen)))


def _samples(seen: Communication) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    for one in seen.ranks:
        samples[f"rank{one.rank}_communication_s"] = one.communication_s
        samples[f"rank{one.rank}_exposed_communication_s"] = one.exposed_s
        samples[f"rank{one.rank}_compute_s"] = one.compute_s
    return samples


def _missing(seen: Communication, values: dict[str, Value]) -> dict[str, str]:
    where = "kernel of a communication library" if seen.ranks[0].source == DEVICE else "range of gloo"
    why = dict.fromkeys(COMMUNICATION, f"the traces hold no {where}")
    if values:
        why["straggler_rank"] = "no rank comes last more often than chance would have it"
    return {name: reason for name, reason in why.items() if name not in values}


def _findings(seen: Communication) -> Iterator[Finding]:
    if seen.straggler is not None:
        late = seen.straggler
        wait = format_value(summarize(seen.wait_s).median, "s")
        yield Finding(
            "straggler",
            f"rank {late.rank} reaches the collectives last in {late.last_in} of {late.iterations} profiled steps; "
            f"the others wait for it, up to {wait} per step",
            "look at its GPU's clocks and temperature, its input and its share of the host's cores",
        )
