"""The script that measures single layers on a GPU, run on a CPU: rows, and what their schema says."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
from pathlib import Path

import jsonschema
import pytest

torch = pytest.importorskip("torch")

from joulemark.merged_bench.provenance import measured_now  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_layers_are_measured_by_every_path_that_there_is():
    script = runpy.run_path(str(ROOT / "tests" / "gpu" / "merged_layers.py"))
    chosen = [one for one in script["LAYERS"] if one.inputs in (3, 32)]
    assert len({one.like for one in chosen}) >= 7
    for layer in chosen[:1] + chosen[-1:]:
        small = dataclasses.replace(layer, size=tuple(min(one, 18) for one in layer.size))
        row = script["row_of"](small, 2, torch.device("cpu"))
        assert [one["path"] for one in row["paths"]] == ["library"]
        assert row["paths"][0]["time_s"] > 0
        assert row["paths"][0]["problem"] is None
    shown = {"schema": script["SCHEMA"], "gpu": "none", "torch": torch.__version__, "measured": measured_now()}
    schema = json.loads((ROOT / "docs" / "schema" / "merged-layers.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate({**shown, "rows": [row]}, schema)


def test_the_tables_of_single_layers_are_those_of_the_committed_file():
    docs = (ROOT / "docs" / "merged.md").read_text(encoding="utf-8")
    file = json.loads((ROOT / "results" / "nvidia-h200" / "merged-layers.json").read_text(encoding="utf-8"))
    of_depthwise = re.findall(r"^\| (\d+)(?: channels)?, (\d)×\d, (stride 2, )?(\d+)² \| (.*) \|$", docs, re.M)
    assert len(of_depthwise) == 9
    for channels, taps, stride, edge, told in of_depthwise:
        layer, size = f"{channels}→{channels} {taps}x{taps}/" + ("2x2" if stride else "1x1"), [int(edge)] * 2
        row = next(one for one in file["rows"] if (one["layer"], one["size"], one["batch"]) == (layer, size, 32))
        assert as_told(told) == [fastest(row, path) for path in ("epilogue", "taps", "slide")]
    first = docs[docs.index("| first convolution of |") :].split("\n\n")[0].splitlines()[2:]
    assert len(first) == 8
    for line in first:
        network, _, told = line.strip("| ").split(" | ", 2)
        network, _, batch = network.partition(", batch ")
        asked = (f"first, {network}", int(batch or 32))
        row = next(one for one in file["rows"] if (one["like"], one["batch"]) == asked)
        known = [fastest(row, path) for path in ("fused", "rows", "gather", "stem_warpgroup")]
        pairs = [pair for pair in zip(as_told(told), known, strict=True) if None not in pair]
        assert len(pairs) >= 2
        assert all(abs(shown - measured) <= 0.51 for shown, measured in pairs), line


def as_told(cells):
    """Figures of the last cells of a row, in µs; None where there is none."""
    told = [one.strip(" *").replace(",", "") for one in cells.strip("| ").split("|")]
    return [float(one) if re.fullmatch(r"[\d.]+", one) else None for one in told][-4:]


def fastest(row, path):
    """The least that a kind of path took, in µs, as tables have it; None where it was not measured."""
    known = [one["time_s"] for one in row["paths"] if one["path"].startswith(path)]
    return round(min(known) * 1e6, 1) if known else None
