"""From a profiler's trace of a few steps to the Measurement of the profiler pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from joulemark.collect.torch_profiler import Recording
from joulemark.errors import UnreadableInput
from joulemark.measure.value import value_of
from joulemark.metrics import PROFILER
from joulemark.records import Finding, Json, Measurement, Value

TIER = "torch_profiler"
_KEYS = {
    "gpu_busy_s": "busy_s",
    "copy_only_s": "copy_only_s",
    "exposed_overhead_s": "exposed_overhead_s",
    "host_issue_s": "host_issue_s",
    "operators_per_step": "operators",
    "host_issue_per_operator_s": "host_issue_per_operator_s",
    "hidden_ratio": "hidden_ratio",
    "kernels_per_step": "kernels",
    "launches_per_step": "launches",
}
"""Metric → key of an iteration in the trace's document."""
_COUNTS = ("kernels", "launches", "operators")
_LOOK = "keep the trace (--bench-keep-traces) and look at it with joulemark trace"


def measurement_of(recording: Recording, trace: Path, name: str = "profiler") -> Measurement:
    """Medians over the recorded iterations; the iterations' own figures and causes of idle are its samples.

    A figure that the trace does not give is missing with the trace's own reason. Where nothing was recorded of a
    device, its kernels are missing, not 0.

    Args:
        trace: the file that the recording wrote.
    """
    # every measuring process would pay for these imports
    from joulemark.trace.analyse import analyse, file_document
    from joulemark.utilization.kernel_table import tables_of

    distortion = {"profiler_distortion": Value(recording.distortion, "1", n=1, tier="host_clock")}
    try:
        document = file_document(analyse(trace))
    except UnreadableInput as error:
        return Measurement(name, distortion, _steps_of(recording), _missing(distortion, {}, str(error)))
    samples = {**_samples(document), **_steps_of(recording)}
    values = dict(distortion)
    for metric in PROFILER:
        if samples.get(metric):
            values[metric] = value_of(samples[metric], metric, TIER)
    found_in_trace = [Finding.from_json(one) for one in document["findings"] if one["code"] != "no_gpu_events"]
    return Measurement(
        name,
        values,
        samples,
        _missing(values, document["notes"], "the trace holds no marked iteration"),
        (*found_in_trace, *_reconcile(document, recording)),
        tables=tables_of(document, recording.steps, recording.plain_s, recording.profiled_s),
    )


def _steps_of(recording: Recording) -> dict[str, list[float]]:
    """Step times of this process without and with the profiler, in s."""
    return {"plain_step_s": list(recording.plain_s), "profiled_step_s": [recording.profiled_s]}


def _samples(document: Mapping[str, Json]) -> dict[str, list[float]]:
    """Per metric, and per cause of idle time, one entry for each iteration in which it is known."""
    iterations = document["iterations"]
    has_device = bool(document["devices"])
    out: dict[str, list[float]] = {}
    for metric, key in _KEYS.items():
        known = [float(one[key]) for one in iterations if one[key] is not None]
        if known and (has_device or key not in _COUNTS):
            out[metric] = known
    if has_device:
        busy = [one["busy_s"] / one["wall_s"] / len(document["devices"]) for one in iterations if one["wall_s"]]
        out["gpu_busy_fraction"] = busy
        for cause, total in document["idle_s"].items():
            spent = [one["idle_s"][cause] for one in iterations]
            if total or any(spent):
                out[f"idle_{cause}_s"] = spent
    return {name: values for name, values in out.items() if values}


def _missing(values: Mapping[str, Value], notes: Mapping[str, str], otherwise: str) -> dict[str, str]:
    """Why each metric of this pass without a value has none."""
    no_device = notes.get("no_gpu_events", otherwise)
    return {
        metric: notes.get(f"iterations.{_KEYS.get(metric, '')}", no_device)
        for metric in PROFILER
        if metric not in values
    }


def _reconcile(document: Mapping[str, Json], recording: Recording) -> Iterator[Finding]:
    """Marks against steps; kernels against launches, or, where graphs launch many at once, against each other.

    A step does the same work each time: under graphs a shortfall shows as an iteration unlike the others.
    """
    iterations = document["iterations"]
    if len(iterations) != recording.steps or document["iteration_source"] != "marks":
        yield Finding(
            "profiler_steps_lost",
            f"{recording.steps} steps were recorded and the trace marks {len(iterations)}",
            _LOOK,
            flags=True,
        )
    if not document["devices"] or document["launches"] is None:
        return
    if document["graph_launches"]:
        yield from _unlike(iterations)
        return
    differ = [one for one in iterations if one["kernels"] != one["launches"]]
    if differ:
        yield Finding(
            "kernels_and_launches_differ",
            f"{differ[0]['name']} has {differ[0]['kernels']} kernels for {differ[0]['launches']} launches",
            _LOOK,
            flags=True,
        )


def _unlike(iterations: Sequence[Mapping[str, Json]]) -> Iterator[Finding]:
    """Iterations whose kernels or launches are not those of most."""
    counts = Counter((one["kernels"], one["launches"]) for one in iterations)
    if len(counts) < 2:
        return
    (kernels, launches), _ = counts.most_common(1)[0]
    odd = next(one for one in iterations if (one["kernels"], one["launches"]) != (kernels, launches))
    yield Finding(
        "kernels_differ_between_iterations",
        f"{odd['name']} has {odd['kernels']} kernels for {odd['launches']} launches, "
        f"most iterations have {kernels} for {launches}",
        _LOOK,
        flags=True,
    )
