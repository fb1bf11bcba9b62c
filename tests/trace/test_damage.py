"""Traces damaged at random: always one strict document, never a traceback, never whole without its kernels."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulemark.report import formats, trace_view
from joulemark.trace import analyse_files

DATA = Path(__file__).parents[1] / "data" / "trace"
SOURCES = (
    "overlap_streams.json",
    "cuda_graph_replays.json",
    "driver_launch_and_orphan.json",
    "legacy_top_level_list.json",
)
PIECES = (
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b"\\",
    b"\xff",
    b"\x00",
    b"NaN",
    b"-inf",
    b"1e999",
    b"null",
    b"-",
    b"9" * 40,
)


def damaged(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        length = rng.choice((0, 1, 1, 5, 50, 500))
        data = data[:at] + rng.choice((b"", *PIECES)) + data[at + length :]
        if not data:
            break
    return data


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SOURCES), st.integers(min_value=0, max_value=2**32), st.booleans())
def test_random_damage(name: str, seed: int, compress: bool) -> None:
    data = damaged(random.Random(seed), (DATA / name).read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_bytes(gzip.compress(data, 1) if compress else data)
        document = analyse_files([path])
    entry = document["files"][0]
    assert json.loads(json.dumps(document, allow_nan=False).encode(), parse_constant=pytest.fail) == document
    assert formats.render(trace_view.tables(document)).strip()
    assert entry["error"] is None or entry["kernels"] is None
    if entry["idle_s"] is not None:
        assert sum(entry["idle_s"].values()) == pytest.approx(entry["span_s"] - entry["busy_s"], rel=1e-9, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_random_damage_of_gzip(seed: int) -> None:
    data = damaged(random.Random(seed), gzip.compress((DATA / "overlap_streams.json").read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        path.write_bytes(data)
        entry = analyse_files([path])["files"][0]
    assert entry["error"] or not entry["complete"] or entry["kernels"] == 4
