"""Documents of joulemark attribution in reports: the roofline of the page, its data, what it lacks, and the answers."""

from __future__ import annotations

import copy
import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from joulemark.attribution.document import document_of
from joulemark.attribution.roofline import ends_of
from joulemark.attribution.stored import check
from joulemark.cli import main
from joulemark.errors import UnreadableInput
from joulemark.report import attribution_plot, documents, page, render
from joulemark.report.attribution_view import class_title, placed, unplaced
from joulemark.report.evidence import Document, gather
from joulemark.report.page import pictures
from joulemark.report.page.roofline import roofline
from joulemark.synthetic_run import SyntheticRun
from joulemark.utilization.kernels import CLASSES
from tests.attribution.conftest import STEP
from tests.attribution.test_document import with_references
from tests.report.test_page import HOSTILE, Elements, sweep

POOLED = "too short to tell apart (pooled)"
LABEL = "resnet50-train-bf16-eager-b128-nvidia-h200"


def attributed(label=LABEL, references=True, **facts):
    def run(kernels=STEP, **options):
        return SyntheticRun(kernels, **{"steps": 15, "seed": 1} | options)

    recording, timeline, series = with_references(run) if references else run().recorded()
    known = replace(recording, label=label, facts={"gpu": "NVIDIA H200", **facts})
    return json.loads(json.dumps(document_of(known, timeline, series)))


@pytest.fixture(scope="module")
def document():
    return attributed()


@pytest.fixture
def evidence(make_record, make_run):
    def make(*contents):
        found = [Document(Path(f"{at}/attribution.json"), "attribution", one) for at, one in enumerate(contents)]
        return gather([make_run(*sweep(make_record))], found)

    return make


def test_classes_stand_under_measured_roofs_with_their_intervals(evidence, document):
    section = roofline(evidence(document))
    (figure,) = section.figures
    rows = {row["class"]: row for row in figure.rows}
    assert list(rows) == ["GEMM and convolution on tensor cores", "elementwise", "reduction, pooling", POOLED]
    assert [row["bound_by"] for row in rows.values()] == ["tensor", "dram", "dram", "dram"]
    for row in rows.values():
        for name in ("flop_per_byte", "flop_per_s"):
            assert 0 < row[f"{name}_lo"] < row[name] < row[f"{name}_hi"]
        assert (row["peak_flop_per_s"], row["tier"]) == (pytest.approx(8e14), "pm_sampling")
    gemm = rows["GEMM and convolution on tensor cores"]
    # 0.6e12 tensor cycles per s of 8000 FLOP and 1e10 FMA instructions per s of 64, in 110 of 111 µs
    true = (0.6e12 * 8000 + 1e10 * 64) * 110 / 111
    assert gemm["flop_per_s_lo"] <= true <= gemm["flop_per_s_hi"]
    assert gemm["flop_per_byte_lo"] <= true / (1.2e12 * 110 / 111) <= gemm["flop_per_byte_hi"]
    assert figure.workload == "resnet50-train"
    assert "pm_sampling" in figure.caption
    assert "800 TFLOP/s and 4 TB/s, both measured on NVIDIA H200" in figure.caption


def test_what_has_no_place_under_a_roof_says_why(evidence, document):
    assert list(unplaced(document)) == []
    some = copy.deepcopy(document)
    some["classes"][1]["counters"]["pipe_fma_instructions"]["interval"][0] = 0.0
    some["classes"][2]["roofline"] = None
    section = roofline(evidence(some, attributed("another", references=False)))
    assert len(section.figures) == 1
    assert f"{LABEL}: elementwise: its FLOP cannot be told from none; its kernels move 3.4" in section.missing[0]
    assert f"{LABEL}: reduction, pooling: its tensor cycles or DRAM bytes were not counted" in section.missing[1]
    assert section.missing[-1] == "another: no roofline: no reference was recorded"
    assert [one.title for one in section.tables] == [LABEL, "another"]
    assert section.tables[1].rows[0][3:7] == ("n/a",) * 4
    without = roofline(evidence())
    assert not without.figures
    assert "no document of joulemark attribution" in without.missing[0]


def test_a_cpu_alone_lacks_no_roofline(make_record, make_run):
    assert roofline(gather([make_run(*sweep(make_record, gpu="cpu"))])).is_empty


def test_a_counter_without_interval_gives_a_place_without_one(document):
    entry = copy.deepcopy(document["classes"][0])
    assert set(ends_of(entry)) == {"flop_per_byte", "flop_per_s"}
    entry["counters"]["dram_read_bytes"]["interval"] = None
    assert ends_of(entry) == {}


def test_a_class_that_may_have_moved_no_byte_has_no_place(document):
    some = copy.deepcopy(document)
    for name in ("dram_read_bytes", "dram_write_bytes"):
        some["classes"][0]["counters"][name]["interval"][0] = 0.0
    assert ends_of(some["classes"][0])["flop_per_byte"][1] == math.inf
    assert placed(some) == some["classes"][1:]
    assert "GEMM and convolution on tensor cores: its DRAM bytes cannot be told from none" in next(unplaced(some))


def test_steps_of_one_name_are_told_apart_by_their_files(evidence, document):
    section = roofline(evidence(document, document))
    assert [one.title for one in section.figures] == [f"{LABEL} ({at}/attribution.json)" for at in (0, 1)]
    assert len({one.key for one in section.figures}) == 2


def test_a_class_has_one_colour_and_no_two_share_one():
    every = [{"class": name, "uses_tensor_cores": None} for name in (*CLASSES, "pooled")]
    colours = dict(zip((one["class"] for one in every), attribution_plot.class_colours(every), strict=True))
    assert len(set(colours.values())) == len(every)
    some = [{"class": "elementwise"}, {"class": "other"}, {"class": "other"}]
    found = attribution_plot.class_colours(some)
    assert found[:2] == [colours["elementwise"], colours["other"]]
    assert len(set(found)) == 3
    assert len(attribution_plot.class_colours(every * 2)) == 2 * len(every)


def test_kernels_with_and_without_tensor_cores_have_different_names():
    assert class_title({"class": "other", "uses_tensor_cores": True}) == "other, on tensor cores"
    assert class_title({"class": "other", "uses_tensor_cores": False}) == "other"
    assert class_title({"class": "other", "uses_tensor_cores": None}) == "other, perhaps on tensor cores"
    assert class_title({"class": "tensor_gemm", "uses_tensor_cores": True}) == "GEMM and convolution on tensor cores"


@pytest.mark.parametrize("form", ["terminal", "markdown"])
def test_the_answers_name_the_top_classes(make_record, make_run, document, form):
    found = [Document(Path("a.json"), "attribution", document)]
    text = render([make_run(*sweep(make_record))], form, width=80, documents=found)
    said = " ".join(text.split())
    first = document["classes"][0]
    share, roof = (f"{100 * one:.0f} %" for one in (first["time_share"], first["roofline"]["of_roof"]))
    assert f"GEMM and convolution on tensor cores {share} ({roof} of the tensor pipe's roof); elementwise" in said
    assert form != "terminal" or max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_in_a_document_are_inert(evidence, document, name):
    def text(word):
        bad = copy.deepcopy(document)
        finding = {"code": word, "message": word, "remedy": word, "flags": True}
        bad.update(label=word, facts={"gpu": word}, findings=[finding], notes={"roofline": word})
        known = evidence(bad)
        return page.render(known, [roofline(known)])

    found = text(name)
    assert [tag for tag, _ in Elements(found).tags] == [tag for tag, _ in Elements(text("w")).tags]
    assert not any(char in found for char in "\x1b\x07\u202e\u2066")


def damages(document):
    """A document whose parts are, one at a time, missing, of another type, or no number."""
    for key in ("label", "facts", "confidence", "steps", "classes", "roofline", "findings", "notes"):
        yield f"no {key}", {name: value for name, value in document.items() if name != key}
        yield f"{key} is text", {**document, key: 7 if key == "label" else "text"}
    for key, value in (("time_s", -1), ("time_share", "much"), ("class", "magic"), ("counters", []), ("roofline", {})):
        yield f"{key} is {value}", {**document, "classes": [{**document["classes"][0], key: value}]}
    for value in (0, -1, "x", None, 1e999, float("nan")):
        yield f"a roof of {value}", {**document, "roofline": {**document["roofline"], "flop_per_s": value}}
    point = {**document["classes"][0]["roofline"], "flop_per_byte": float("nan")}
    yield "nan", {**document, "classes": [{**document["classes"][0], "roofline": point}]}


def test_damaged_documents_are_left_out_with_a_line(document, tmp_path, capsys, make_run):
    check(document)
    for number, (_, bad) in enumerate(damages(document)):
        (tmp_path / f"{number}.json").write_text(json.dumps(bad))
    _, found, unusable = documents.read_all([tmp_path])
    assert [one.path.name for one in found] == []
    assert len([line for line in unusable if "no whole document of joulemark attribution" in line]) == number + 1
    with pytest.raises(UnreadableInput, match="no whole document of joulemark attribution"):
        documents.read_all([tmp_path / "0.json"])


@pytest.mark.parametrize("factor", [1e-80, 1e80])
def test_figures_that_cannot_be_are_drawn_all_the_same(evidence, document, factor):
    bad = copy.deepcopy(document)
    for name in ("flop_per_byte", "flop_per_s"):
        bad["classes"][0]["roofline"][name] *= factor
    check(bad)
    known = evidence(bad)
    assert "<svg" in page.render(known, [roofline(known)])


def test_the_command_shows_a_document_beside_runs(document, tmp_path, capsys):
    (tmp_path / "attribution.json").write_text(json.dumps(document))
    source = next((Path(__file__).parents[2] / "results" / "nvidia-h200").glob("*148770.jsonl"))
    place = tmp_path / "r.html"
    assert main(["report", *map(str, [source, tmp_path, "--out", place, "--plots", tmp_path / "p"])]) == 0
    assert "left out" not in capsys.readouterr().err
    assert place.read_text().count("Which kernels reach their roof") == 1
    with (tmp_path / "p" / f"roofline-{LABEL}.csv").open() as file:
        assert [row["bound_by"] for row in csv.DictReader(file)] == ["tensor", "dram", "dram", "dram"]


def test_text_of_a_plot_is_left_as_it_is(evidence, document):
    """Numbers are cut short in the SVG's coordinates, never in a name or at an axis."""
    (figure,) = roofline(evidence(document)).figures
    name = "#0072b2 v1.23456"
    text = pictures.inline(replace(figure, axis=name))
    assert f">{name}<" in text
