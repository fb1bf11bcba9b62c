"""Where the classes of a step's kernels stand under the GPU's roofs, from documents of ``joulemark attribution``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from joulemark.attribution.roofline import ends_of
from joulemark.metrics import format_value
from joulemark.records import Json
from joulemark.report import attribution_plot
from joulemark.report.attribution_view import class_title, overview_table, placed, unplaced
from joulemark.report.evidence import CPU, MOST_SHOWN, Document, Evidence, same_gpu, slug, untaken
from joulemark.report.page import axes as drawing
from joulemark.report.page.parts import Figure, Mark, Number, Section, Seen

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REMEDY = "pytest --bench --bench-collect timing,power,attribution"
_READING = "± half the 95 % interval; of its roof: FLOP/s over the lower roof at the class's FLOP per byte"
_TIERS = "Counters by pm_sampling on the clock of torch_profiler"


def roofline(evidence: Evidence) -> Section:
    """A roofline per document, its classes with their counters, and what it could not show."""
    shown = evidence.of_kind("attribution")[:MOST_SHOWN]
    named = [(_name(one, shown), one.content) for one in shown]
    figures, missing, seen, taken = [], [], [], set[str]()
    for name, content in named:
        if placed(content):
            figures.append(
                _figure(name, content, untaken(f"roofline-{slug(name)}", taken), _workload(evidence, content))
            )
        missing += [f"{name}: {line}" for line in unplaced(content)]
        seen += [Seen(one["code"], one["message"], one["remedy"], one["flags"], (name,)) for one in content["findings"]]
    if not shown and any(one.main.case.gpu_model != CPU for one in evidence.shown):
        missing.append(f"which kernels reach their roof: no document of joulemark attribution was given ({_REMEDY})")
    notes = [_READING] if shown else []
    if more := len(evidence.of_kind("attribution")) - len(shown):
        notes.append(f"{more} more documents of joulemark attribution are not shown: name fewer files")
    return Section(
        "roofline",
        "Which kernels reach their roof",
        "Each class of kernels at the work it does per byte of DRAM, under what this GPU reached in a large product "
        "(flat) and in reading and writing a large array (slope). A class under the slope waits for memory; one far "
        "below both roofs for something else. Areas are shares of the kernels' time.",
        tuple(figures),
        tuple(overview_table(name, content) for name, content in named),
        tuple(seen),
        notes=tuple(notes),
        missing=tuple(missing),
        short="Roofline",
    )


def _name(document: Document, among: list[Document]) -> str:
    """Its label, with its file where several have the same."""
    label = str(document.content["label"])
    same = Counter(str(one.content["label"]) for one in among)[label]
    return label if same == 1 else f"{label} ({document.path.parent.name}/{document.path.name})"


def _workload(evidence: Evidence, content: Mapping[str, Json]) -> str:
    """Key of the workload whose cases are labelled like it, on the same GPU; empty where there is none."""
    for one in evidence.shown:
        case = one.main.case
        like = f"{case.workload}-{case.phase}-" if case.phase else f"{case.workload}-"
        if str(content["label"]).startswith(like) and same_gpu(content["facts"].get("gpu"), case.gpu_model):
            return one.key
    return ""


def _figure(name: str, content: Mapping[str, Json], key: str, workload: str) -> Figure:
    entries, roofs, gpu = placed(content), content["roofline"], content["facts"].get("gpu")
    colours = attribution_plot.class_colours(entries)
    best = max(entries, key=lambda one: one["roofline"]["of_roof"] or 0.0)
    peaks = format_value(roofs["flop_per_s"], "FLOP/s"), format_value(roofs["bytes_per_s"], "B/s")
    return Figure(
        key,
        name,
        "FLOP/s",
        f"Roofs: {peaks[0]} and {peaks[1]}, both measured{f' on {gpu}' if gpu else ''}. Nearest to its roof: "
        f"{class_title(best)}, {100 * (best['roofline']['of_roof'] or 0.0):.0f} %. {_TIERS}, over "
        f"{content['steps']['recorded']} steps; bars are {100 * content['confidence']:.0f} % intervals. FLOP outside "
        "of tensor cores are the most that the FMA pipe can have done.",
        partial(_draw, content=content),
        [_row(entry, content) for entry in entries],
        tuple(Mark(class_title(one), colour, "bar") for one, colour in zip(entries, colours, strict=True)),
        workload,
        left=0.2,
    )


def _row(entry: Mapping[str, Json], content: Mapping[str, Json]) -> dict[str, Number]:
    point, ends = entry["roofline"], ends_of(entry)
    row: dict[str, Number] = {"class": class_title(entry), "time_s": entry["time_s"], "time_share": entry["time_share"]}
    for name in ("flop_per_byte", "flop_per_s"):
        lo, hi = ends.get(name, (None, None))
        row |= {name: point[name], f"{name}_lo": lo, f"{name}_hi": hi}
    return row | {
        "bytes_per_s": point["bytes_per_s"], "roof_flop_per_s": point["roof_flop_per_s"], "of_roof": point["of_roof"],
        "bound_by": point["bound_by"], "peak_flop_per_s": content["roofline"]["flop_per_s"],
        "peak_bytes_per_s": content["roofline"]["bytes_per_s"], "confidence": content["confidence"],
        "tier": "pm_sampling",
    }  # fmt: skip


def _draw(axes: Axes, content: Mapping[str, Json]) -> None:
    attribution_plot.draw_roofline(axes, content)
    drawing.value_axis(axes, "FLOP/s", log=True)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set_xticks([], minor=True)
