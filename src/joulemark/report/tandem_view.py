"""The tandem of CPU and GPU as text for a terminal or in Markdown: a table per model and mode over batch sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from joulemark.metrics import batch_text, format_value
from joulemark.records import Json, Table
from joulemark.report.formats import percent, table_of
from joulemark.report.names import made_of, series_titles

_COLUMNS = (
    "batch", "step", "GPU busy", "host issue", "exposed", "of step", "hidden", "issue/operator", "kernels", "launches",
    "profiler cost", "peak memory",
)  # fmt: skip
_ANSWERS = ("crossover", "below", "above", "too_few_batches")
"""Verdicts, the one that says most first."""
_INPUT_COLUMNS = ("cell", "step", "GPU busy", "idle: input", "idle: copy call", "copy only", "exposed (profiled)")


def tables(document: Mapping[str, Json]) -> Iterator[Table]:
    """The crossovers, a table per series, those with one first, modes against eager, cells without a batch size."""
    series = sorted(document["series"], key=lambda one: _ANSWERS.index(one["crossover"]["verdict"]))
    titles = series_titles(series)
    if series:
        yield _crossovers(series, titles, document["runs"])
    yield from map(_series, series, titles)
    if document["against_eager"]:
        yield _against_eager(document["against_eager"])
    if document["cells"]:
        yield _cells(document["cells"])


def _crossovers(
    series: Sequence[Mapping[str, Json]], titles: Sequence[str], runs: Sequence[Mapping[str, Json]]
) -> Table:
    """The answer of each series: its crossover, and how much of a step is exposed at its smallest and largest batch."""
    rows = []
    for one, name in zip(series, titles, strict=True):
        known = [row for row in one["rows"] if row["exposed_share"] is not None]
        if one["crossover"]["verdict"] == "too_few_batches" or not known:
            continue
        first, last = known[0], known[-1]
        batches = f"{first['batch_size']} … {last['batch_size']}"
        exposed = f"{percent(first['exposed_share'])} … {percent(last['exposed_share'])}"
        rows.append((name, batches, one["crossover"]["text"], exposed))
    columns = ("series", "batches", "crossover", "exposed")
    notes = [
        "crossover: the batch from which on the GPU is busy for as long as the host needs to issue a step",
        "exposed: share of an unprofiled step in which nothing runs on the GPU, at the smallest and largest batch",
        "below, step and host issue: without the profiler; GPU busy: of a profiled step; exposed: step minus GPU busy",
    ]
    notes.append(made_of(runs))
    if len(rows) < len(series):
        notes.append(f"without an answer, below: {len(series) - len(rows)} series of too few batch sizes")
    return table_of("from which batch on the kernels hide the framework", columns, rows, notes, frozenset())


def _series(series: Mapping[str, Json], name: str) -> Table:
    rows = [_row(row) for row in series["rows"]]
    on = "" if name.endswith(series["gpu_model"]) else f" on {series['gpu_model']}"
    title = f"{name}{on}: crossover {series['crossover']['text']}"
    return table_of(title, _COLUMNS, rows, tuple(_notes(series)), frozenset(range(len(_COLUMNS))))


def _row(row: Mapping[str, Json]) -> tuple[str, ...]:
    def metric(name: str, digits: int = 3) -> str:
        value = row["metrics"][name]
        return format_value(value["value"], value["unit"], digits)

    kernels = metric("kernels_per_step", 4)
    return (
        str(row["batch_size"]),
        metric("device_time_s"),
        metric("gpu_busy_s"),
        metric("host_issue_unprofiled_s"),
        metric("exposed_overhead_unprofiled_s"),
        percent(row["exposed_share"]),
        format_value(row["hidden_ratio_unprofiled"], "1", 2),
        metric("host_issue_per_operator_s"),
        f"{kernels} (!)" if row["kernels_reconciled"] is False else kernels,
        metric("launches_per_step", 4),
        percent(row["metrics"]["profiler_distortion"]["value"]),
        metric("peak_memory_bytes"),
    )


def _notes(series: Mapping[str, Json]) -> Iterator[str]:
    memory, beyond = series["memory"], series["exposed_from_twice_the_crossover"]
    yield f"crossover with the host's issue time beside the profiler: {series['crossover_profiled']['text']}"
    if memory["ratio"] is not None:
        at = format_value(memory["at_crossover_bytes"], "B")
        yield f"memory at the crossover: {at}, {memory['ratio']:.3g} times that of batch {memory['smallest_batch']}"
    if beyond["largest_share"] is not None:
        yield (
            f"exposed from batch {batch_text(beyond['from_batch'])} on (twice the crossover): "
            f"at most {percent(beyond['largest_share'])} of the step"
        )
    yield from _issue_per_operator(series)
    yield from _exposed_in_turns(series)
    yield from _causes(series["rows"])
    for finding in series["crossover"]["findings"]:
        yield f"{finding['message']}: {finding['remedy']}"
    if any(row["kernels_reconciled"] is False for row in series["rows"]):
        yield "(!): the profile lost records; launches and kernels do not agree"


def _issue_per_operator(series: Mapping[str, Json]) -> Iterator[str]:
    """How even the host's issue time is over the batches: in turns, else at one speed of the host, else as it is."""
    turns = series["host_issue_per_operator_in_turns"]
    if turns["median_s"] is not None:
        low, high = turns["interval"]
        yield (
            f"host issue time per operator, batches in turns: {format_value(turns['median_s'], 's')}, furthest from it "
            f"by {turns['largest_deviation']:+.1%} [{low:+.1%}, {high:+.1%}] (batch {turns['batch']}, "
            f"{turns['rounds']} rounds){_other_launches(turns)}"
        )
    scaled, profiled = series["host_issue_per_operator_at_one_speed"], series["host_issue_per_operator"]
    even, how = (scaled, " at one speed of the host") if scaled["median_s"] is not None else (profiled, "")
    if even["median_s"] is not None and turns["median_s"] is None:
        yield (
            f"host issue time per operator{how}: {format_value(even['median_s'], 's')}, "
            f"furthest from it by {even['largest_deviation']:+.1%} (batch {even['batch']})"
        )
    if scaled["median_s"] is not None:
        yield f"crossover at that speed: {series['crossover_at_one_speed']['text']}"


def _other_launches(turns: Mapping[str, Json]) -> str:
    """That the batch which is furthest away is other work: its step has another number of launches."""
    counts = {one["batch_size"]: one["launches_per_step"] for one in turns["batches"]}
    own = counts.pop(turns["batch"])
    others = sorted({f"{one:g}" for one in counts.values() if one is not None})
    if turns["even"] or own is None or not others or f"{own:g}" in others:
        return ""
    return f"; a step of it has {own:g} launches, of the others {' or '.join(others)}"


def _exposed_in_turns(series: Mapping[str, Json]) -> Iterator[str]:
    """How the exposed overhead changes over batches that were timed in turns."""
    turns = series["exposed_in_turns"]
    if turns["rises"] is None:
        return
    first, last = turns["batches"][0], turns["batches"][-1]
    ends = " to ".join(f"{format_value(one['exposed_s'], 's')} (batch {one['batch_size']})" for one in (first, last))
    rises = ", ".join(map(_rise, turns["rises"]))
    yield f"exposed, batches in turns: {ends}; " + (f"rises {rises}" if rises else "never rises")
    if turns["note"] is not None:
        yield f"exposed, batches in turns: {turns['note']}"


def _rise(rise: Mapping[str, Json]) -> str:
    low, high = rise["batch_sizes"]
    share = "" if rise["share_rises"] else ", no larger share of the step"
    doubt = ", in doubt" if rise["in_doubt"] else ""
    return f"from {low} to {high} ({rise['where']}{share}{doubt})"


def _causes(rows: Sequence[Mapping[str, Json]]) -> Iterator[str]:
    """Why the GPU waits in a profiled step at the smallest batch, the longest first."""
    known = next(((row["batch_size"], row["idle_s"]) for row in rows if any(row["idle_s"].values())), None)
    if known is None:
        return
    longest = sorted(((value, cause) for cause, value in known[1].items() if value), reverse=True)[:4]
    listed = ", ".join(f"{cause} {format_value(value, 's')}" for value, cause in longest)
    yield f"idle in a profiled step of batch {known[0]}: {listed}"


def _against_eager(entries: Sequence[Mapping[str, Json]]) -> Table:
    rows = [
        (
            name,
            str(one["batch_size"]),
            format_value(one["eager_s"], "s"),
            format_value(one["mode_s"], "s"),
            format_value(one["ratio"], "1"),
        )
        for one, name in zip(entries, series_titles([{**one, "params": {}} for one in entries]), strict=True)
    ]
    columns = ("series", "batch", "exposed in eager", "exposed in mode", "ratio")
    return table_of("exposed overhead against eager", columns, rows)


def _cells(rows: Sequence[Mapping[str, Json]]) -> Table:
    def cells() -> Iterable[tuple[str, ...]]:
        for row in rows:
            metrics, idle = row["metrics"], row["idle_s"]
            profiled = metrics["gpu_busy_s"]["value"] is not None
            known = {cause: idle.get(cause, 0.0 if profiled else None) for cause in ("input", "copy")}
            yield (
                row["label"],
                _seconds(metrics["device_time_s"]["value"]),
                _seconds(metrics["gpu_busy_s"]["value"]),
                _seconds(known["input"]),
                _seconds(known["copy"]),
                _seconds(metrics["copy_only_s"]["value"]),
                _seconds(metrics["exposed_overhead_s"]["value"]),
            )

    note = "idle: of a profiled step, by cause; copy only: data moved and no kernel ran"
    return table_of("inputs of a step", _INPUT_COLUMNS, cells(), (note,))


def _seconds(value: float | None) -> str:
    return format_value(value, "s")
