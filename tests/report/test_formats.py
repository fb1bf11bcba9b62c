import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulemark.errors import ConfigurationError, UnreadableInput
from joulemark.records import Finding, Table
from joulemark.report import check_report_path, escape, markdown, render, terminal, write_report
from joulemark.report.jsonout import dumps
from joulemark.report.output import FORMATS

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schema/report.schema.json").read_text())
HOSTILE = [
    "org/model:v1|fp16",
    "a" * 300,
    "模型-β\U0001f680",
    "x[y]::z",
    "line1\nline2",
    "",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202egnp.exe",
    "<img src=x onerror=alert(1)>",
    "`code` *bold* [link](http://a) ~~gone~~",
    '=HYPERLINK("http://a")',
    "+33",
    "-2+3",
    "@sum",
    "\tx",
    '"quoted", comma',
    "lone \ud800 surrogate",
    "nul\0l",
]
IDENTIFIERS = ["1234567e8", "0005747", "9e99999", "nan", "550.90", "550.900", "470.0", "007", "1e3", "inf", "0x10"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_one_row_that_steers_nothing(make_record, make_run, form, name):
    record = make_record(
        workload=name,
        figures={"host_time_s": 1e-3},
        params={"tag": name, "n": -3},
        outcome="flagged",
        findings=(Finding("warning", name, name),),
        notes={"power_w": name},
    )
    text = render([make_run(record, path=f"{name[:20]}.jsonl")], form, width=120)
    text.encode("utf-8")
    assert not any(char in text for char in "\x1b\x07\0")
    assert form == "csv" or "\u202e" not in text
    lines = text.replace("\r\n", "\n").split("\n")
    if form == "terminal":
        assert max(map(escape.display_width, lines)) <= 120 or len(name) == 300
        assert sum("1 ms" in line and line.endswith("flagged [1]") for line in lines) == 1
    if form == "markdown":
        row = next(line for line in lines if "1 ms ±1.0%" in line)
        header = next(line for line in lines if "workload" in line)
        assert row.replace("\\|", "").count("|") == header.count("|")
        assert "<img" not in text
        assert not re.search(r"(?<!\\)\]\(", text)
    if form == "json":
        assert json.loads(text)["runs"][0]["rows"][0]["case"]["workload"] == name


@pytest.mark.parametrize("form", FORMATS)
def test_identifiers_are_printed_character_for_character(make_record, make_run, form):
    records = [make_record(params={"commit": text}, figures={"host_time_s": 1e-3}) for text in IDENTIFIERS]
    text = render([make_run(*records)], form, width=200)
    words = re.split(r"""[,"=\s]+""", text)
    assert set(IDENTIFIERS) <= set(words)


def read_csv(text):
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.mark.parametrize("name", ['=HYPERLINK("http://a")', "+33", "-2+3", "@sum", "\tx", "\rx"])
def test_no_text_cell_of_csv_is_a_formula(make_record, make_run, name):
    record = make_record(workload=name, params={"tag": name, "n": -3}, outcome="failed", reason=name)
    (row,) = read_csv(render([make_run(record)], "csv"))
    assert (row["workload"], row["param_tag"], row["reason"]) == ("'" + name,) * 3
    assert row["param_n"] == "-3"


def test_csv_holds_every_metric_in_base_units_with_its_interval(make_record, make_run):
    record = make_record(figures={"host_time_s": 1.25e-3, "sampler_slowdown": 0.001, "own_thing": 7.0})
    (row,) = read_csv(render([make_run(record)], "csv"))
    assert float(row["host_time_s"]) == 1.25e-3
    assert [float(row[f"host_time_s_{end}"]) for end in ("lo", "hi")] == pytest.approx([1.2375e-3, 1.2625e-3])
    assert float(row["own_thing"]) == 7.0
    assert row["outcome"] == "ok"


def test_csv_leaves_empty_what_was_not_measured_and_says_why(make_record, make_run):
    record = make_record(figures={"power_w": None}, notes={"power_w": "no sensor"})
    (row,) = read_csv(render([make_run(record)], "csv"))
    assert (row["power_w"], row["power_w_lo"], row["notes"]) == ("", "", "power_w: no sensor")


def test_csv_lines_end_as_the_standard_says(make_record, make_run):
    text = render([make_run(make_record(), make_record(batch=2))], "csv")
    assert text.count("\r\n") == 3
    assert text.count("\n") == 3


def test_json_is_strict_and_of_its_schema(make_record, make_run):
    records = [
        make_record(figures={"host_time_s": 1e-3, "power_w": None}, notes={"power_w": "no sensor"}),
        make_record(batch=9, outcome="failed", reason="killed", samples={"host_time_s": [1.0]}),
    ]
    text = render([make_run(*records), make_run(completed=False, wall_s=None, measured_s=None)], "json")
    document = json.loads(text, parse_constant=pytest.fail)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert document["runs"][0]["outcomes"]["failed"] == 1
    assert document["runs"][0]["efficiency"] == pytest.approx(0.7)
    assert "samples" not in document["runs"][0]["rows"][0]


def test_json_never_holds_nan():
    with pytest.raises(UnreadableInput, match="not JSON compliant"):
        dumps({"value": float("nan")})


def test_markdown_underscores_within_words_stay_as_they_are():
    assert escape.markdown("vit_b_16-8 and _this_") == "vit_b_16-8 and \\_this\\_"


@given(st.text(max_size=40), st.integers(4, 30))
def test_shortened_text_fits_and_keeps_its_ends(text, width):
    plain = escape.printable(text)
    short = escape.shorten(plain, width)
    assert escape.display_width(short) <= width
    if short != plain:
        assert "…" in short
        head, _, tail = short.partition("…")
        assert plain.startswith(head)
        assert plain.endswith(tail) or "…" in plain


@given(st.lists(st.text("ab-8é漢", max_size=30), max_size=6), st.integers(4, 30))
def test_texts_shortened_together_fit(texts, width):
    short = escape.shorten_apart(texts, width)
    assert set(short) == set(texts)
    assert all(escape.display_width(one) <= width for one in short.values())


def test_names_that_differ_in_their_middle_stay_apart():
    batches = [f"vgg16-train-fp32-eager-b{batch}-channels_last-nvidia-h200" for batch in (8, 64, 128)]
    short = escape.shorten_apart([*batches, "lenet5"], 30)
    assert list(short.values()) == [
        "vgg16-train-f…b8…t-nvidia-h200", "vgg16-train-…b64…t-nvidia-h200", "vgg16-train-…b128…-nvidia-h200", "lenet5",
    ]  # fmt: skip
    table = Table(("case", "ratio", "verdict"), tuple((name, "1.0x", "same") for name in batches), frozenset({1}))
    for width in (80, 60, 45, 40):
        text = terminal.render_table(table, width)
        assert all(f"b{batch}" in text for batch in (8, 64, 128)), text


def test_a_title_goes_on_in_the_next_line():
    title = "resnet50 train bf16 eager on nvidia-h200: crossover 12.5 [8.1, 19.2], and more words than fit"
    text = terminal.render_table(replace(TABLE, title=title), 60)
    assert " ".join(text.split()).startswith(title)
    assert max(map(len, text.splitlines())) <= 60


@given(st.text(max_size=60))
def test_printable_text_is_one_line_without_control_characters(text):
    plain = escape.printable(text)
    assert len(plain.splitlines()) <= 1
    assert escape.printable(plain) == plain


TABLE = Table(
    columns=("workload", "tag", "time", "power", "outcome"),
    rows=(("w" * 60, "t" * 30, "1 ms", "300 W", "ok"), ("v", "u", "2 ms", "n/a", "OOM")),
    numeric=frozenset({2, 3}),
    notes=("a note that is somewhat longer than the terminal is wide, so it goes on",),
)


@pytest.mark.parametrize("width", [200, 100, 70, 50, 44])
def test_tables_keep_to_the_width(width):
    lines = terminal.render_table(TABLE, width).splitlines()
    assert max(map(len, lines)) <= width
    assert "time" in lines[0]
    assert lines[-1].endswith("so it goes on") or width < 80
    assert "outcome" in lines[0]


def test_what_all_rows_have_in_common_is_said_once():
    rows = tuple((name, "same", "", "1 ms", "ok") for name in ("v" * 30, "w" * 30))
    text = terminal.render_table(replace(TABLE, columns=("workload", "tag", "mark", "time", "outcome"), rows=rows), 50)
    assert text.splitlines()[0] == "in all rows: tag same"  # nothing of a mark that no row has


def test_dropped_columns_are_named():
    text = terminal.render_table(TABLE, 36)
    assert "power" not in text.splitlines()[0]
    assert "not shown for want of width: power" in text


def test_titles_and_notes_stand_around_the_table():
    text = markdown.render([replace(TABLE, title="a | b")])
    assert text.startswith("### a \\| b\n\n| workload |")
    assert text.rstrip().endswith("so it goes on")
    assert "| :--- | :--- | ---: | ---: | :--- |" in text


@pytest.mark.parametrize("name", ["r.md", "deep/er/r.csv", "r.JSON"])
def test_the_suffix_chooses_the_format(tmp_path, make_record, make_run, name):
    path = tmp_path / name
    check_report_path(path)
    assert not path.parent.exists() or list(tmp_path.iterdir()) == []
    run = make_run(make_record())
    write_report([run], path)
    form = {"r.md": "markdown", "r.csv": "csv", "r.JSON": "json"}[path.name]
    assert path.read_bytes().decode() == render([run], form, width=200)
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    write_report([run], path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("r.pdf", "no report format"),
        ("r", "no report format"),
        ("r.jsonl", "no report"),
    ],
)
def test_unknown_suffixes_are_refused_with_the_way_out(tmp_path, name, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        check_report_path(tmp_path / name)
    assert ".html, .md, .csv or .json" in str(caught.value)


def test_a_place_that_cannot_be_written_is_refused_beforehand(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.md").mkdir()
    for path in (tmp_path / "file" / "r.md", tmp_path / "folder.md"):
        with pytest.raises(ConfigurationError):
            check_report_path(path)


def test_a_stored_result_is_never_overwritten(tmp_path, make_record, make_run):
    path = tmp_path / "saved.json"
    path.write_text('{"benchmarks": []}')
    for form in (None, "json"):
        with pytest.raises(ConfigurationError, match="is not a joulemark report"):
            write_report([make_run(make_record())], path, form)
    assert path.read_text() == '{"benchmarks": []}'


@pytest.mark.parametrize("name", ["run.jsonl", "run.md", "run"])
def test_no_report_replaces_a_stored_run_whatever_its_name(tmp_path, make_record, make_run, name):
    path = tmp_path / name
    path.write_text('{"kind":"environment","schema":"joulemark/sweep/1"}\n')
    with pytest.raises(ConfigurationError, match="is not a joulemark report"):
        write_report([make_run(make_record())], path, "csv")
    assert path.read_text().startswith('{"kind"')
