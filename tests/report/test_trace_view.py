"""Traces as text: complete figures, and names that cannot steer a terminal or a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from joulemark.report import formats, trace_view
from joulemark.trace import analyse_files, diff

DATA = Path(__file__).parents[1] / "data" / "trace"
HOSTILE = "evil|name\x1b[31m\n| injected | <img src=x onerror=alert(1)> `code` \u202e [a](javascript:x) \u2028"


def render(document: dict[str, Any], form: str = "terminal") -> str:
    return formats.render(trace_view.tables(document), form)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def hostile(folder: Path, name: str = HOSTILE) -> dict[str, Any]:
    args = {"device": 0, "correlation": 1}
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": 0, "dur": 100},
        {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "pid": 1,
            "tid": 1,
            "ts": 5,
            "dur": 5,
            "args": args,
        },
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 20, "dur": 5, "args": args},
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 50, "dur": 5, "args": args},
    ]
    path = folder / "t|race`<b>.json"
    path.write_text(json.dumps({"traceEvents": events, "WARNING": [f"dropped {name}"]}))
    return analyse_files([path])


@pytest.mark.parametrize("file", ["overlap_streams.json", "torch_profiler_resnet18_b8_h200.json.gz"])
def test_sum_and_busy_have_their_own_labels(file: str) -> None:
    text = render(analyse_files([DATA / file]))
    for label in ("kernel time (sum)", "kernel busy (union)", "device busy (union, with copies)"):
        assert label in text


def test_bytes_have_the_units_of_memory(tmp_path: Path) -> None:
    args = {"device": 0, "correlation": 1, "bytes": 512205160}
    name = "Memcpy DtoD (Device -> Device)"
    event = {"ph": "X", "cat": "gpu_memcpy", "name": name, "pid": 0, "tid": 7, "ts": 20, "dur": 3715, "args": args}
    (tmp_path / "copy.json").write_text(json.dumps({"traceEvents": [event]}))
    (row,) = (line for line in render(analyse_files([tmp_path / "copy.json"])).splitlines() if line.startswith(name))
    assert row.endswith("1  3.715 ms  488.5 MiB  137.9 GB/s")


def test_figures_of_a_known_trace() -> None:
    text = render(analyse_files([DATA / "overlap_streams.json"]))
    for figure in (
        "1.65 ms",
        "1 ms",
        "90.91 %",
        "1.04 ms",
        "94.55 %",
        "1.1 ms",
        "record_param_comms",
        "ProfilerStep#3",
    ):
        assert figure in text
    assert "INCOMPLETE" not in text


def test_incomplete_and_unreadable_files_say_so() -> None:
    document = analyse_files([DATA / "cut_mid_event.json", DATA / "empty.json", DATA / "half_zero_timestamps.json"])
    for kind in ("terminal", "markdown"):
        text = " ".join(render(document, kind).split())
        assert text.count("(INCOMPLETE)") == 2
        assert "ends in the middle of an event at byte 21548" in text
        assert "not read: the trace" in text
        assert "6 kernels with invalid timestamps" in text


def test_what_was_not_measured_is_no_number() -> None:
    text = render(analyse_files([DATA / "cpu_only.json"]))
    rows = {line[:32].strip(): line[32:].strip() for line in text.splitlines()}
    assert rows["device busy (union, with copies)"] == "n/a"
    assert "no GPU events" in text


@pytest.mark.parametrize("kind", ["terminal", "markdown"])
def test_hostile_names_are_shown_and_do_nothing(tmp_path: Path, kind: Any) -> None:
    document = hostile(tmp_path)
    for text in (render(document, kind), render(diff(document, document), kind)):
        assert "evil" in text
        assert not {"\x1b", "\u202e", "\u2028"} & set(text)
        assert not [line for line in text.splitlines() if line.strip().startswith("| injected")]
        if kind == "markdown":
            assert "<img" not in text
            assert "<b>" not in text
            assert "](javascript" not in text.replace("\\]", "")
            cells = {
                line.replace("\\|", "").count("|") for line in text.splitlines() if "evil" in line and line[0] == "|"
            }
            assert cells <= {4, 6}


def test_long_traces_are_cut_and_say_so(tmp_path: Path) -> None:
    text = render(analyse_files([DATA / "hta" / "ns_resolution_trace.json.gz"]))
    assert "more (--json has them all)" in text


def test_a_host_that_was_not_recorded_was_nowhere() -> None:
    text = render(analyse_files([DATA / "kernels_only.json"]))
    assert "host not recorded" in text
    assert "outside operators" not in text


def test_diff_shows_missing_sides_as_missing() -> None:
    kernels, host = analyse_files([DATA / "kernels_only.json"]), analyse_files([DATA / "cpu_only.json"])
    text = render(diff(kernels, host))
    busy = next(line for line in text.splitlines() if line.startswith("busy_s"))
    assert busy.split()[1:] == ["180", "µs", "n/a", "n/a", "n/a"]
    assert "-100" not in text
    assert "no GPU events" in text


def test_diff_of_incomplete_traces_says_so() -> None:
    whole, cut = analyse_files([DATA / "full.json"]), analyse_files([DATA / "cut.json.gz"])
    for kind in ("terminal", "markdown"):
        assert "(INCOMPLETE)" in render(diff(whole, cut), kind)
