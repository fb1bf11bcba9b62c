"""The picture of merged execution beside its best rival."""

from __future__ import annotations

import math
import re

import pytest

from joulemark.errors import ConfigurationError
from joulemark.report.merged_plot import draw

pytest.importorskip("matplotlib")


def row(subject, batch=32, burst=2.0, best="compile", group="a net", **gains):
    rivals = {"merged": {"burst_s": 1e-3}, best: {"burst_s": 2e-3}, "eager": {"missing": {"all": "out of memory"}}}
    gains = {"burst": burst, "best_rival": best, "energy": None, "dram_bytes": None, **gains}
    return {"subject": subject, "group": group, "shape": [batch, 3, 8, 8], "rivals": rivals, "gains": gains}


def drawn(tmp_path, *rows, kind="networks", asked=lambda _: None):
    """Texts of the picture: matplotlib leaves each as a comment beside its outlines."""
    path = tmp_path / "gains.svg"
    draw({"kind": kind, "gpu": "A GPU", "rows": rows}, path, asked)
    return re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"))


def test_each_network_stands_in_the_panel_of_its_batch_with_both_times(tmp_path):
    texts = drawn(tmp_path, row("b-b32"), row("a-b128", batch=128), row("c-b1", batch=1), row("lost", burst=None))
    order = [one for one in texts if one.startswith("batch") or one[1:2] == "-"]
    assert order == ["c-b1", "batch 1, A GPU", "b-b32", "batch 32, A GPU", "a-b128", "batch 128, A GPU"]
    assert texts.count("merged 1 ms, compile 2 ms") == 3
    assert "lost" not in texts


def test_blocks_share_a_panel_in_the_order_of_their_groups(tmp_path):
    texts = drawn(tmp_path, row("z", group="2"), row("y", group="1", batch=64), kind="blocks")
    assert [one for one in texts if one in ("z", "y")] == ["y", "z"]
    assert "blocks, A GPU" in texts


def test_marks_are_of_what_was_measured_and_asked_for(tmp_path):
    legend = {"time", "energy", "DRAM bytes", "asked for"}
    assert legend & {*drawn(tmp_path, row("a"))} == {"time"}
    assert legend & {*drawn(tmp_path, row("a", energy=1.5), asked=lambda _: 1.1)} == {"time", "energy", "asked for"}
    assert legend & {*drawn(tmp_path, row("a", dram_bytes=70.0), row("b"))} == {"time", "DRAM bytes"}


def test_all_that_is_drawn_lies_on_the_axis(tmp_path):
    texts = drawn(tmp_path, row("a", burst=0.4, energy=9.0))
    assert {"0.5×", "1×", "8×"} <= {*texts}
    assert "16×" not in texts


def test_untrusted_names_are_shown_as_they_are(tmp_path):
    texts = drawn(tmp_path, row("$x^2$ <b>_\x1b[31m", best="_evil$"))
    assert any("$x^2$" in one.replace("\\$", "$") for one in texts)
    assert not any("\x1b" in one for one in texts)


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_a_gain_without_a_place_on_the_axis_is_not_drawn(tmp_path, value):
    texts = drawn(tmp_path, row("a", energy=value), row("b", burst=value), row("c", dram_bytes=value))
    assert {"a", "c", "time"} <= {*texts}
    assert not {"b", "energy", "DRAM bytes"} & {*texts}
    with pytest.raises(ConfigurationError, match="no row has a gain"):
        drawn(tmp_path, row("a", burst=value))


def test_nothing_to_draw_is_said_and_leaves_no_file(tmp_path):
    with pytest.raises(ConfigurationError, match="no row has a gain"):
        drawn(tmp_path, row("a", burst=None))
    assert not list(tmp_path.iterdir())
