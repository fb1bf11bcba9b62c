"""How cases are called in notes and comparisons: short, and never two by one name."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from joulemark.records import NOT_REAL, Case, Json
from joulemark.report.escape import printable, shorten_apart

_MOST_FILES = 8
"""That a note names."""
_TELLS_NOTHING = re.compile(r"^void |\(anonymous namespace\)::|\b(?:at::native|at|c10|std)::")
"""Of a kernel's demangled name."""


def namer(cases: Iterable[Case]) -> Callable[[Case], str]:
    """What gives a case its name: its label, with the function that swept it where several swept the same.

    Args:
        cases: all that have to be told apart. Whether a function is named does not depend on the GPU.
    """
    functions: dict[str, set[str | None]] = defaultdict(set)
    for case in cases:
        functions[label_without_gpu(case)].add(case.benchmark)
    several = {label for label, names in functions.items() if len(names) > 1}

    def name(case: Case) -> str:
        return f"{case.benchmark or '-'}:{case.label}" if label_without_gpu(case) in several else case.label

    return name


def label_without_gpu(case: Case) -> str:
    """What a case is called where its GPU stands beside it."""
    return replace(case, gpu_model="").label


def series_titles(series: Sequence[Mapping[str, Json]]) -> list[str]:
    """``resnet50 train bf16 eager``; with layout, GPU and benchmark as far as several would be called the same.

    Args:
        series: entries of a document that begin with :meth:`joulemark.records.Case.series_to_json`.
    """
    titles = [_series_title(one) for one in series]
    for name in ("gpu_model", "layout", "benchmark"):
        same = Counter(titles)
        titles = [
            f"{title} {one[name]}" if same[title] > 1 else title for title, one in zip(titles, series, strict=True)
        ]
    return titles


def _series_title(series: Mapping[str, Json]) -> str:
    parts = [series[name] for name in ("workload", "phase", "dtype", "mode")]
    parts.append(series["input"] if series["input"] not in (None, "device") else None)
    parts.append(f"x{series['world_size']}" if series["world_size"] != 1 else None)
    parts += [f"{key}={value}" for key, value in series["params"].items()]
    return " ".join(str(one) for one in parts if one)


def without_common_parts(keys: Sequence[str]) -> tuple[dict[str, str], str]:
    """Short names of keys that are told apart, and what all of them hold: ``resnet50-b8``, and ``bf16-nvidia-h200``.

    Keys that would become equal keep their full names.
    """
    distinct = list(dict.fromkeys(keys))
    if len(distinct) < 2:
        return {key: key for key in distinct}, ""
    common = set.intersection(*(set(key.split("-")) for key in distinct))
    short = {key: "-".join(part for part in key.split("-") if part not in common) for key in distinct}
    if not common or len(set(short.values())) < len(distinct) or not all(short.values()):
        return {key: key for key in distinct}, ""
    return short, "-".join(part for part in distinct[0].split("-") if part in common)


def made_of(runs: Sequence[Mapping[str, Json]]) -> str:
    """Which files a document of several runs is made of, for a note: ``made of a.jsonl, b.jsonl``."""
    names = [f"{run['file']}{' (simulated GPUs)' if run.get('simulated') else ''}" for run in runs]
    more = f" and {len(names) - _MOST_FILES} more (--json names all)" if len(names) > _MOST_FILES else ""
    fakes = f"; of simulated GPUs {NOT_REAL}" if any(run.get("simulated") for run in runs) else ""
    return f"made of {', '.join(names[:_MOST_FILES])}{more}{fakes}"


def first_of(names: Sequence[str]) -> str:
    """``resnet50-…`` or ``resnet50-… and 4 more``."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def kernel_titles(names: Iterable[str], width: int) -> dict[str, str]:
    """Kernels' names within a number of columns: their outlines, or whole where several have the same.

    Args:
        names: as the profiler has them: untrusted, and up to thousands of characters long.
        width: in columns.
    """
    whole = {name: printable(name) for name in names}
    outlines = {name: _outline(_TELLS_NOTHING.sub("", shown)) for name, shown in whole.items()}
    alike = Counter(outlines.values())
    titles = {name: title if title and alike[title] == 1 else whole[name] for name, title in outlines.items()}
    short = shorten_apart(titles.values(), width)
    return {name: short[title] for name, title in titles.items()}


def _outline(name: str) -> str:
    """``f<8, g>`` of ``f<8, g<int>(int)::{lambda()#1}>(int, int)``: no arguments, and of its own types their names."""
    kept, depth, within = "", 0, False
    for char in name:
        if char in "<({":
            if depth == 0 and char != "<":
                break
            kept += "<" if depth == 0 else ""
            within, depth = depth > 0, depth + 1
        elif char in ">)}":
            depth -= 1
            kept += ">" if depth == 0 else ""
        else:
            within = within and not (char == "," and depth == 1)
            kept += "" if within else char
    return kept.replace(" >", ">").replace(", array>", ">")
