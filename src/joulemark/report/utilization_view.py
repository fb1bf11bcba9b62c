"""Utilization of training as text for a terminal or in Markdown: plateaus, levels, waterfalls and kernel classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from joulemark.metrics import LEVELS, batch_text, find, format_value
from joulemark.records import Json, Table
from joulemark.report.formats import percent, table_of
from joulemark.report.names import first_of, made_of, series_titles
from joulemark.utilization.waterfall import TITLES

_MAIN = (
    "gpu_busy_fraction", "sm_active_fraction", "issue_slot_fraction", "tensor_active_fraction", "dram_fraction",
)  # fmt: skip
BARS: Mapping[str, str] = {
    "ideal": "ideal",
    "clock": "clock",
    "other_work": "other work",
    "below_peak": "below peak",
    "no_matrix_kernels": "no tensor core",
    "untold_kernels": "untold",
    "overlap": "overlap",
    "gpu_idle": "GPU idle",
    "unexplained": "unexplained",
}
"""Bar of a waterfall → heading."""


def tables(document: Mapping[str, Json]) -> Iterator[Table]:
    """The plateaus of all series, then per series its levels, its phases and its waterfalls."""
    series = list(zip(series_titles(document["series"]), document["series"], strict=True))
    yield _plateaus(series, document["runs"])
    yield _beside_published(series, document["published"])
    for name, one in series:
        yield _levels(name, one)
        phases = _phases(name, one)
        if phases.rows:
            yield phases
        yield _waterfalls(name, one)


def _plateaus(series: Sequence[tuple[str, Mapping[str, Json]]], runs: Sequence[Mapping[str, Json]]) -> Table:
    rows = []
    for name, one in series:
        rows.append((name, "throughput", _verdict(one["throughput_plateau"])))
        if (one["throughput_plateau"] or {}).get("verdict") == "too_few_points":
            continue
        rows += [("", find(level).title, _verdict(one["level_plateaus"].get(level))) for level in _MAIN]
    found = dict.fromkeys(
        f"{name}: {finding['message']}"
        for name, one in series
        for finding in (one["throughput_plateau"] or {"findings": ()})["findings"]
    )
    note = "plateau: the batch beyond which no doubling gains more than 5 %, with a bootstrap interval"
    notes = (note, made_of(runs), *found)
    return table_of("where a bigger batch stops helping", ("series", "what", "plateau"), rows, notes, frozenset())


def _verdict(plateau: Mapping[str, Json] | None) -> str:
    if plateau is None:
        return "n/a"
    if plateau["verdict"] == "too_few_points":
        return "too few batches"
    text = str(plateau["text"])
    if plateau["verdict"] == "plateau":
        text = text.removeprefix("plateau ")
    elif plateau["verdict"] == "not_reached":
        end = ": larger ones did not fit" if plateau["limited_by"] == "memory" else ""
        text = f"not reached by {batch_text(plateau['largest_batch'])}{end}"
    confident = plateau["support"] is None or plateau["support"] >= plateau["confidence"]
    return text if confident else f"{text} ({plateau['support']:.0%} of draws)"


def _beside_published(series: Sequence[tuple[str, Mapping[str, Json]]], published: Mapping[str, Json]) -> Table:
    columns = ("series", "batch sizes", "tensor pipe", "issue slots", "no tensor core, of the step")
    rows = [
        (
            name,
            _batches(one["at_plateau"]),
            *(percent(one["at_plateau"][level]) for level in (_TENSOR, _ISSUE, "no_tensor_share")),
        )
        for name, one in series
    ]
    rows.append(("published, at most", "", percent(published[_TENSOR]), percent(published[_ISSUE]), "n/a"))
    notes = (f"published: {published['source']}", *_missing(series))
    return table_of("means at and beyond the throughput's plateau", columns, rows, notes, frozenset({2, 3, 4}))


def _missing(series: Sequence[tuple[str, Mapping[str, Json]]]) -> Iterator[str]:
    """Each reason for a missing figure once, with the series that it holds for."""
    lacking: dict[str, list[str]] = {}
    for name, one in series:
        for level, why in one["at_plateau"]["notes"].items():
            if level in (_TENSOR, _ISSUE, "no_tensor_share") and name not in lacking.setdefault(why, []):
                lacking[why].append(name)
    for why, names in lacking.items():
        yield f"n/a of {first_of(names)}: {why}"


_TENSOR, _ISSUE = "tensor_active_fraction", "issue_slot_fraction"


def _batches(entry: Mapping[str, Json]) -> str:
    sizes = entry["batch_sizes"]
    if not entry["reached"]:
        return f"{sizes[-1]} (no plateau reached)"
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} … {sizes[-1]}"


def _levels(name: str, series: Mapping[str, Json]) -> Table:
    shown = [level for level in LEVELS if any(cell["levels"].get(level) for cell in series["cells"])]
    columns = (
        "batch",
        "step",
        "items/s",
        "memory",
        "elasticity",
        "of peak",
        "GPU busy",
        *(find(one).title for one in shown),
    )
    elastic = _elasticities(series)
    rows = [
        (
            str(cell["batch_size"]),
            format_value(cell["step_s"]["timing"], "s"),
            format_value(cell["throughput_per_s"], "1/s"),
            format_value(cell["peak_memory_bytes"], "B"),
            format_value(elastic.get(cell["batch_size"]), "1", 2),
            percent(cell["work"]["peak_fraction"]),
            *(percent(cell["levels"].get(level)) for level in ("gpu_busy_fraction", *shown)),
        )
        for cell in series["cells"]
    ]
    return table_of(f"{name}: levels", columns, rows, tuple(_level_notes(series)), _all(columns))


_COST_UNTOLD = frozenset({"host_bound", "counters_cost_untold"})
"""Findings of a step of which a few windows do not tell what counting costs."""
_GROWTH = 1.01
"""Of memory from one batch to the next, under which its elasticity is noise over next to nothing."""


def _elasticities(series: Mapping[str, Json]) -> dict[int, float | None]:
    """Batch → elasticity from the batch before, where memory grew."""
    memory = {cell["batch_size"]: cell["peak_memory_bytes"] for cell in series["cells"]}
    return {
        one["to_batch"]: one["value"]
        for one in series["elasticity"]
        if one["value"] is not None and memory[one["to_batch"]] >= _GROWTH * memory[one["from_batch"]]
    }


def _level_notes(series: Mapping[str, Json]) -> Iterator[str]:
    used = {tier for cell in series["cells"] for level, tier in cell["tiers"].items() if level in LEVELS and tier}
    yield f"levels by {', '.join(sorted(used)) or 'no instrument'}; GPU busy by torch's profiler, in a profiled step"
    counted = [cell for cell in series["cells"] if cell["counters_overhead"] is not None]
    costs = [cell["counters_overhead"] for cell in counted if _COST_UNTOLD.isdisjoint(cell["findings"])]
    if costs:
        yield f"beside the counters steps change by {min(costs):+.1%} to {max(costs):+.1%}"
    if untold := [str(cell["batch_size"]) for cell in counted if not _COST_UNTOLD.isdisjoint(cell["findings"])]:
        yield f"a few windows do not tell what counting costs at batch {', '.join(untold)}"
    yield "elasticity: d ln(items/s) / d ln(memory) from the batch before; n/a where memory grows by less than 1 %"
    if series["did_not_fit"] is not None:
        yield f"batch {series['did_not_fit']} did not fit into memory"


def _phases(name: str, series: Mapping[str, Json]) -> Table:
    """Of the largest batch size that has them."""
    cell = next((one for one in reversed(series["cells"]) if one["phases"]), None)
    if cell is None:
        return table_of("", (), ())
    shown = [level for level in LEVELS if any(found.get(level) for found in cell["phases"].values())]
    columns = ("phase", "time", *(find(level).title for level in shown))
    rows = [
        (
            phase,
            format_value(found.get("phase_time_s"), "s"),
            *(percent(found.get(level)) for level in shown),
        )
        for phase, found in cell["phases"].items()
    ]
    return table_of(f"{name}: phases at batch {cell['batch_size']}", columns, rows)


def _waterfalls(name: str, series: Mapping[str, Json]) -> Table:
    known = [cell for cell in series["cells"] if cell["waterfall"] is not None]
    present = {bar["name"] for cell in known for bar in cell["waterfall"]["bars"]}
    bars = [bar for bar in TITLES if bar in present]
    columns = ("batch", "step", *(BARS[bar] for bar in bars))
    rows = [
        (
            str(cell["batch_size"]),
            format_value(cell["waterfall"]["step_s"], "s"),
            *(percent(_share(cell["waterfall"], bar)) for bar in bars),
        )
        for cell in known
    ]
    notes = [f"{BARS[bar]}: {TITLES[bar]}" for bar in bars]
    replayed = [str(cell["batch_size"]) for cell in known if cell["waterfall"]["idle_source"] == "cuda_graph"]
    if known:
        notes.append(f"idle by replay as a CUDA graph at batch {', '.join(replayed) or 'none'}, else by the profiler")
    notes += [
        f"batch {cell['batch_size']}: DRAM at its peak needs {percent(bound['time_s'] / cell['waterfall']['step_s'])} "
        f"of the step for the bytes under '{BARS[bar]}' (counters of {percent(bound['seen'])} of their time)"
        for cell in known
        if cell["per_kernel"] is not None
        for bar, bound in cell["per_kernel"]["dram_bound"].items()
    ]
    without: dict[str, list[str]] = {}
    for cell in series["cells"]:
        if cell["waterfall"] is None:
            without.setdefault(cell["notes"]["waterfall"], []).append(str(cell["batch_size"]))
    notes += [f"no waterfall for batch {', '.join(batches)}: {why}" for why, batches in without.items()]
    return table_of(f"{name}: from the ideal to the step", columns, rows, tuple(notes), _all(columns))


def _share(waterfall: Mapping[str, Json], name: str) -> float | None:
    return next((bar["share"] for bar in waterfall["bars"] if bar["name"] == name), None)


def _all(columns: Sequence[str]) -> frozenset[int]:
    return frozenset(range(len(columns)))
