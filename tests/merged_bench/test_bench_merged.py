"""The command ``bench_merged.py`` on files and options that are not what it takes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from statistics import geometric_mean

import pytest

pytest.importorskip("torch", exc_type=ImportError)

from joulemark.merged_bench import rivals

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench_inference" / "bench_merged.py"


@pytest.fixture(scope="module")
def main():
    return runpy.run_path(str(SCRIPT))["main"]


ROWS = {"schema": 1, "kind": "networks", "gpu": "a GPU", "rows": []}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: "),
        ("", "cannot be read: Expecting value"),
        ('{"rows": [', "cannot be read: Expecting value"),
        ("[" * 100_000, "cannot be read: "),
        ("[]", "holds no rows"),
        ("{}", "holds no rows"),
        ('{"rows": 3}', "holds no rows"),
        ('{"rows": [3]}', "is no document of merged execution ("),
        ('{"rows": []}', "is no document of merged execution ("),
    ],
)
@pytest.mark.parametrize("what", ["table", "join"])
def test_wrong_files_are_told_in_a_line_and_replace_nothing(main, what, text, said, tmp_path, capsys):
    wrong, out = tmp_path / "wrong.json", tmp_path / "out.json"
    out.write_text("kept")
    if text is not None:
        wrong.write_text(text)
    assert main([what, str(wrong)] if what == "table" else [what, str(out), str(wrong), str(wrong)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {wrong}")
    assert said in told
    assert told.count("\n") == 1
    assert out.read_text() == "kept"


def test_joined_files_go_where_they_can_be_written(main, tmp_path, capsys):
    part = tmp_path / "part.json"
    part.write_text(json.dumps({**ROWS, "driver": None, "software": {}, "gpu_uuid": None, "failed": {"unet:x": "why"}}))
    assert main(["join", str(tmp_path / "none" / "out.json"), str(part)]) == 2
    assert "out.json cannot be written: No such file or directory" in capsys.readouterr().err
    assert main(["join", str(tmp_path / "out.json"), str(part)]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["failed"] == {"unet:x": "why"}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.json", "part.json"]


@pytest.mark.parametrize(
    "given",
    [
        ["table"],
        ["table", "a", "b"],
        ["table", "a", "--plot"],
        ["table", "--plot"],
        ["table", "a", "--plot", "--plot"],
        ["table", "--plot", "b.svg", "a"],
        ["join"],
        ["join", "out"],
        ["join", "out", "--plot", "part"],
    ],
)
def test_too_few_and_too_many_files_are_refused(main, given, capsys):
    assert main(given) == 2
    assert "give table FILE, table FILE --plot PICTURE, or join OUT PART…" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["table", "join"])
def test_help_of_what_files_are_taken_for(main, what, capsys):
    assert main([what, "--help"]) == 0
    assert f"bench_merged.py {what} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "own"),
    [
        (
            "bench_merged",
            {"--merge-budget": "55.0", "--batches": "1,32,128", "--rivals": ",".join(rivals.FOR_NETWORKS)},
        ),
        ("bench_merged_micro", {"--merge-budget": "15.0", "--rivals": ",".join(rivals.FOR_BLOCKS)}),
    ],
)
def test_help_says_the_default_of_every_option_that_has_one(script, own, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")  # nothing is broken within a word
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / "bench_inference" / f"{script}.py"))["main"](["--help"])
    entries = capsys.readouterr().out.partition("options:\n")[2].split("\n  --")[1:]
    said = {f"--{entry.split()[0]}": " ".join(entry.split()) for entry in entries}
    defaults = {
        "--only": "all", "--without": "none", "--dtype": "bf16", "--limit": "540.0", "--subject-limit": "300.0",
        "--rival-limit": "200.0", "--rounds": "25", "--sustain": "2.2", "--turns": "1", "--sustain-best": "for all",
        "--first": "none", "--by-schedule": "all", "--share": "1/1", "--kernels": "16", "--device": "cuda:0", **own,
    }  # fmt: skip
    assert [name for name, value in defaults.items() if f"by default {value}" not in said[name]] == []
    told = {name for name, entry in said.items() if "by default" in entry}
    assert told == {*defaults, *(["--network"] if script == "bench_merged" else [])}


@pytest.mark.parametrize("batches", ["", "x", "0", "-1", "1,", "1.5"])
def test_batch_sizes_are_numbers_from_one(main, batches, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([f"--batches={batches}", "--out", str(tmp_path / "out.json"), "--device", "cpu", "--tiny"])
    assert f"{batches!r} are no batch sizes: give numbers from 1" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "asked"), [("merged.json", True), ("merged-blocks.json", False)])
def test_a_table_is_drawn_too(main, name, asked, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    committed, picture = ROOT / "results" / "nvidia-h200" / name, tmp_path / "gains.svg"
    assert main(["table", str(committed), "--plot", str(picture)]) == 0
    drawn = picture.read_text(encoding="utf-8")
    rows = json.loads(committed.read_text(encoding="utf-8"))["rows"]
    assert all(f"<!-- {row['subject']} -->" in drawn for row in rows)
    assert ("<!-- asked for -->" in drawn) is asked
    assert main(["table", str(committed), "--plot", str(tmp_path / "gains.txt")]) == 2
    assert "use a name that ends in .svg" in capsys.readouterr().err


def test_the_docs_hold_the_tables_of_the_committed_networks(main, capsys):
    assert main(["table", str(ROOT / "results" / "nvidia-h200" / "merged.json")]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| ", "- "))]
    text = (ROOT / "docs" / "merged.md").read_text(encoding="utf-8")
    between = text.partition("<!-- gains -->")[2].partition("<!-- end of gains -->")[0]
    assert [line for line in between.splitlines() if line.startswith(("| ", "- "))] == printed


def said_in(*path):
    return " ".join(ROOT.joinpath(*path).read_text(encoding="utf-8").split())


@pytest.fixture
def mean_gains(main, capsys):
    """Batch → the geometric means of the committed networks, by the table's columns."""
    assert main(["table", str(ROOT / "results" / "nvidia-h200" / "merged.json")]) == 0
    rows = [one.split(" | ") for one in capsys.readouterr().out.splitlines()]
    names = next(one for one in rows if one[0] == "| network")
    means = [one for one in rows if one[0].startswith("| geometric mean, batch ") and len(one) == len(names)]
    return {int(one[0].split(", ")[1].removeprefix("batch ")): dict(zip(names, one, strict=True)) for one in means}


def test_the_readme_says_what_the_committed_networks_gain(mean_gains):
    time, energy = (mean_gains[32][name] for name in ("burst gain", "energy gain"))
    told = f"over eleven networks at batch 32 on an H200 {time} in time and {energy} in energy"
    assert told in said_in("README.md")


def test_docs_and_results_say_what_the_committed_networks_gain(mean_gains):
    one, small, large = (mean_gains[batch]["burst gain"].replace(" ", "") for batch in (1, 32, 128))
    docs = said_in("docs", "merged.md")
    assert f"over eleven whole networks at batch 32 {small} in the geometric mean" in docs
    assert f"at batch 128 {large}, at batch 1 {one}." in docs
    assert f"over the eleven at batch 32 the geometric mean is {small}, at 128 {large}, where 1.25× is asked" in docs
    told = said_in("results", "nvidia-h200", "README-merged.md")
    assert f"Geometric means over the eleven: at batch 32 {small}, from" in told
    assert f"At 128 {large}, from" in told
    assert f"At batch 1 {one}, from" in told


def test_docs_say_how_many_networks_merge_nothing_and_what_is_gained_over_the_faster_of_rival_and_unmerged():
    rows = json.loads((ROOT / "results" / "nvidia-h200" / "merged.json").read_text(encoding="utf-8"))["rows"]
    none = [one for one in rows if "its layers one by one" not in "".join(one["rivals"]["merged"]["explain"])]
    docs = said_in("docs", "merged.md")
    assert f"In {len(none)} of the {len(rows)} rows no range of layers is merged" in docs
    means = []
    for batch in (1, 32, 128):
        gains = [one["gains"] for one in rows if one["shape"][0] == batch]
        means.append(geometric_mean(min(one["burst"], one["over_unmerged_variants"]) for one in gains))
    told = "{:.2f}×, {:.2f}× and {:.2f}×".format(*means)
    assert f"Over the faster of both, row by row, the means are {told} at 1, 32 and 128." in docs
