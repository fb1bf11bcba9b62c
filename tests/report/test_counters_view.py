"""Counters as text: figures with their units, missing ones as missing, names that cannot steer a terminal or a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from joulemark.report import counters_view, formats
from joulemark.utilization import read_files

DATA = Path(__file__).parents[1] / "data" / "counters"
HOSTILE = "evil|name\x1b[31m | injected | <img src=x onerror=alert(1)> `code` \u202e [a](javascript:x)"


def render(document: dict[str, Any], form: str = "terminal") -> str:
    return formats.render(counters_view.tables(document), form)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "180")


def test_figures_of_a_real_export() -> None:
    text = render(read_files([DATA / "ncu_resnet18_b64_fp16_h200.csv"]))
    for figure in (
        "NVIDIA H200",
        "1.683 ms",
        "485,341,995",
        "62.34 %",
        "1.192 GiB",
        "17.00 %",
        "by counters",
        "and 6 more (--json",
    ):
        assert figure in text
    assert "GEMM and convolution on tensor cores" in text
    assert "replayed, serialized" in text


def test_what_was_not_measured_is_no_number() -> None:
    text = render(read_files([DATA / "mixed_units.txt"]))
    rows = {line[:40].strip(): line[40:].strip() for line in text.splitlines()}
    assert "dram_write_bytes: dram__bytes_write.sum was not collected" in text
    assert next(value for key, value in rows.items() if key.startswith("DRAM written")).endswith("n/a")
    assert "(by name)" in text


def test_files_that_were_not_read(tmp_path: Path) -> None:
    text = render(read_files([tmp_path / "absent.csv"]))
    assert "unreadable" in text
    assert "not read: cannot read the counters" in " ".join(text.split())
    assert "totals" not in text


def test_classes_by_counters_are_marked(tmp_path: Path) -> None:
    path = tmp_path / "ncu.csv"
    pipe = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
    path.write_text(f"ID,Process ID,Kernel Name,gpu__time_duration.sum,{pipe}\n,,,us,%\n0,7,gemm_f16,10,0\n")
    text = render(read_files([path]))
    assert "gemm*" in text
    assert "*: the class is by the tensor counters" in text


@pytest.mark.parametrize("kind", ["terminal", "markdown"])
def test_hostile_names_are_shown_and_do_nothing(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "a|b`<b>.csv"
    path.write_text(f'ID,Process ID,Kernel Name,gpu__time_duration.sum\n,,,us\n0,7,"{HOSTILE}",1\n')
    text = render(read_files([path]), kind)
    assert "evil" in text
    assert not {"\x1b", "\u202e"} & set(text)
    if kind == "markdown":
        assert "<img" not in text
        assert "<b>" not in text
