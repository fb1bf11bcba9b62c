"""The script that measures single layers on a GPU, run on a CPU: rows, and what their schema says."""

from __future__ import annotations

import dataclasses
import json
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
