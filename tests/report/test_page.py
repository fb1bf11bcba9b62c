"""The HTML report: what it says, what it lacks and why, and that nothing from outside acts in it."""

from __future__ import annotations

import csv
import html
import json
import os
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest

from joulemark.cli import main
from joulemark.energy import stored as energy
from joulemark.environment import anonymous
from joulemark.errors import ConfigurationError, UnreadableInput
from joulemark.records import Environment, Finding, Value
from joulemark.report import answers, documents, page, render, sides
from joulemark.report.answers import answers_of
from joulemark.report.evidence import Document, gather
from joulemark.report.page import pictures
from joulemark.report.page.energy import energy as energy_section
from joulemark.report.page.parts import Section
from joulemark.report.page.records import table_data
from tests.report.conftest import ENVIRONMENT
from tests.report.many import many_records

ROOT = Path(__file__).parents[2]
H200 = ROOT / "results" / "nvidia-h200"
HOSTILE = [
    "<script>document.title='owned'</script>", "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>",
    "a|b|c", "\"quoted' & 'both\"", "two\nlines\r\n", "n" * 300, "\u202egnp.exe\u2066", "\x1b[31mred\x1b]0;t\x07",
    '=HYPERLINK("http://a")', "{{ 7*7 }}", "$\\frac{1}{2}$ _x_", "]]>--><!--", "javascript:alert(1)", "${1+1}`",
]  # fmt: skip


class Elements(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def sweep(make_record, batches=(1, 2, 4, 8, 16, 32), knee=8, **more):
    """A series whose throughput stops growing at a batch."""
    return [
        make_record(
            batch=batch,
            figures={"throughput_per_s": 100.0 * min(batch, knee), "device_time_s": batch / (100 * min(batch, knee)),
                     "device_time_graph_s": 0.004, "energy_per_item_j": 0.2 / min(batch, knee), "power_w": 300.0},
            samples={"host_time_s": [0.01, 0.011, 0.012, 0.011, 0.01, 0.013]},
            **more,
        )
        for batch in batches
    ]  # fmt: skip


@pytest.fixture(scope="module")
def committed():
    runs, found, _ = documents.read_all([H200])
    return gather(runs, found)


def test_the_first_card_answers_the_four_questions_of_resnet50_training(committed):
    first = committed.workloads[0]
    assert (first.main.case.workload, first.main.case.phase) == ("resnet50", "train")
    waits, works, plateau, joules = answers_of(first, committed)
    assert waits.verdict == "No, from batch 128 on"
    assert "framework code on the host" in waits.text
    assert re.match(r"From batch \d+ \[.*\] on", plateau.verdict)
    assert "mJ" in joules.text
    assert works.verdict == "DRAM 47 %, issue slots 30 %, tensor pipe 15 %"
    assert works.text.startswith("At batch 256 SMs have work in 91 % of the time; of peak: DRAM 47 %, ")
    assert "tensor pipe 15 %; kernels without tensor cores fill" in works.text
    assert works.source == "pm_sampling"


@pytest.mark.parametrize(("highest", "tone"), [(0.7, "good"), (0.3, "bad")])
def test_how_much_of_a_busy_gpu_works_is_told_at_the_counted_batch_next_to_the_knee(
    make_record, make_run, highest, tone
):
    records = sweep(make_record, batches=(16, 64, 256, 1024), knee=256)
    level = Value(highest, "1", (highest - 0.04, highest + 0.04), tier="gpm")
    counted = [
        replace(one, metrics={**one.metrics, "issue_slot_fraction": level}) if one.case.batch_size in (16, 64) else one
        for one in records
    ]
    (workload,) = gather([make_run(*counted)]).workloads
    found = answers.works(workload.main)
    share = f"{100 * highest:.0f} %"
    assert (found.verdict, found.tone, found.source) == (f"Issue slots {share}", tone, "gpm")
    assert f"At batch 64 of peak: issue slots {share} [{100 * highest - 4:.0f}, {100 * highest + 4:.0f}]." in found.text
    (workload,) = gather([make_run(*records)]).workloads
    found = answers.works(workload.main)
    assert (found.verdict, found.tone) == ("Not measured", "unknown")
    assert found.text == "--bench-collect timing,profiler,counters tells."


def test_the_plateau_is_that_of_the_committed_utilization(committed):
    document = json.loads((H200 / "utilization.json").read_text())
    known = {(one["workload"], one["phase"], one["dtype"]): one["throughput_plateau"] for one in document["series"]}
    for workload in committed.shown:
        case = workload.main.case
        stored = known.get((case.workload, case.phase, case.dtype))
        if stored is not None:
            assert workload.main.plateau.knee == pytest.approx(stored["knee"], rel=1e-6)


def test_every_figure_names_its_instrument_or_its_uncertainty(committed):
    figures = list(page.figures_of(page.sections_of(committed)))
    assert len(figures) > 40
    for figure in figures:
        assert re.search(r"cuda_events|host_clock|torch_profiler|pm_sampling|nvml_|Uncertainty", figure.caption)
        assert figure.rows
    assert len({figure.key for figure in figures}) == len(figures)


def test_identifiers_of_inline_figures_are_unique_and_all_there(committed):
    sections = page.sections_of(committed)[:2]
    text = "".join(map(pictures.inline, page.figures_of(sections)))
    names = re.findall(r' id="([^"]+)"', text)
    assert len(names) == len(set(names))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(names)
    assert "var(--s0)" in text
    assert not re.search(r"#[0-9a-f]{6}\b", text), "a colour that does not follow the page"


def test_what_was_not_measured_says_why(committed, make_record, make_run):
    sections = {one.key: one for one in page.sections_of(committed)}
    if not committed.of_kind("energy"):
        assert any("joulemark calibrate" in why for why in sections["energy"].missing)
    assert any("counters" in why for why in sections["waterfall"].missing)
    run = make_run(make_record(figures={"throughput_per_s": 5.0, "power_w": None}, notes={"power_w": "no sensor here"}))
    assert "no sensor here" in render([run], "html")


def test_no_record_has_no_figures_and_says_nothing_false(make_run, make_record):
    run = make_run(make_record(outcome="failed", reason="killed"))
    text = render([run], "html")
    assert "killed" in text
    assert "<svg" not in text


@pytest.fixture(scope="module")
def split(energy_document):
    return energy_document(
        "resnet50-train-bf16-b64", "resnet50-train-bf16-b256", "vgg16-train-bf16-b32", "gemm-bf16-8192"
    )


def test_an_energy_split_is_shown_when_it_is_given(committed, split, tmp_path):
    schema = json.loads((ROOT / "docs/schema/energy.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(split)
    evidence = gather(committed.runs, [Document(tmp_path / "energy-split.json", "energy", split)])
    joules = answers_of(evidence.workloads[0], evidence)[3]
    expected = answers.group_shares(split["rows"][1]["split"])
    largest = max(expected, key=lambda one: expected[one])
    said = f"{answers.GROUP_TITLES[largest]} {100 * expected[largest]:.0f} %"
    assert joules.verdict.lower().startswith(said.lower())
    lo, hi = split["rows"][1]["split"]["share_intervals"][largest]
    assert f"{said} [{100 * lo:.0f}, {100 * hi:.0f}], " in joules.text
    assert "At batch 256, 130 mJ" in joules.text
    section = next(one for one in page.sections_of(evidence) if one.key == "energy")
    (figure,) = [one for one in section.figures if one.key.startswith("split-")]
    assert all(row["lo"] <= row["hi"] for row in figure.rows)
    for name in ("resnet50-train-bf16-b64", "vgg16-train-bf16-b32"):
        assert sum(row["share"] for row in figure.rows if row["workload"] == name) == pytest.approx(1)
    assert "gemm-bf16-8192" in {row[0] for row in section.tables[0].rows}
    assert not any("joulemark calibrate" in why for why in section.missing)


@pytest.mark.parametrize("apart", [True, False])
def test_parts_that_cannot_be_told_apart_are_not_ranked(committed, split, tmp_path, apart):
    close = json.loads(json.dumps(split))
    shares = answers.group_shares(close["rows"][1]["split"])
    first, second = sorted(shares, key=lambda one: -shares[one])[:2]
    middle = (shares[first] + shares[second]) / 2
    half = 0.001 if apart else shares[first] - middle + 0.01
    for part in (first, second):
        close["rows"][1]["split"]["share_intervals"][part] = [shares[part] - half, shares[part] + half]
    evidence = gather(committed.runs, [Document(tmp_path / "e.json", "energy", close)])
    joules = answers_of(evidence.workloads[0], evidence)[3]
    assert (", then " if apart else " or ") in joules.verdict
    assert apart or joules.tone == "unsure"


def test_a_split_of_another_gpu_is_not_this_ones(committed, energy_document, tmp_path):
    other = energy_document("resnet50-train-bf16-b64", gpu_name="NVIDIA A100")
    evidence = gather(committed.runs, [Document(tmp_path / "e.json", "energy", other)])
    assert "not split" in answers_of(evidence.workloads[0], evidence)[3].verdict


@pytest.mark.parametrize(
    ("board", "elsewhere"), [("GPU-11111111-aaaa", False), ("GPU-22222222-bbbb", True), (None, False)]
)
@pytest.mark.parametrize("kept", [lambda uuid: uuid, anonymous])
def test_a_split_of_another_board_is_said_to_be_one(make_record, make_run, split, board, elsewhere, kept):
    figures = {"device_time_s": 1e-3, "throughput_per_s": 8e3, "energy_per_item_j": 0.1}
    uuid = kept("GPU-11111111-aaaa")
    run = make_run(*(make_record(batch=size, figures=figures, gpu_uuid=uuid) for size in (64, 256)))
    evidence = gather([run], [Document(Path("e.json"), "energy", {**split, "gpu_uuid": board})])
    joules = answers_of(evidence.workloads[0], evidence)[3]
    assert ("The shares are of another board of this model." in joules.text) == elsewhere
    assert ("another board" in joules.source) == elsewhere


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_inert_in_the_page(make_record, make_run, name):
    records = sweep(make_record, workload=name, params={"tag": name}, outcome="flagged",
                    findings=(Finding("warning", name, name),), notes={"sm_active_fraction": name})  # fmt: skip
    text = render([make_run(*records, path=f"{name[:20]}.jsonl", problems=(name,))], "html")
    plain = render([make_run(*sweep(make_record, workload="w", params={"tag": "w"}, outcome="flagged",
                    findings=(Finding("warning", "w", "w"),), notes={"sm_active_fraction": "w"}),
                    path="w.jsonl", problems=("w",))], "html")  # fmt: skip
    found, expected = Elements(text), Elements(plain)
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in expected.tags]
    assert not any(key.startswith("on") for _, attributes in found.tags for key in attributes)
    assert not any(char in text for char in "\x1b\x07\u202e\u2066")
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data[1])["rows"]
    assert "{{" not in name or name in html.unescape(text)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_axes_are_inert_in_the_page(make_run, make_record, name):
    def text(word):
        records = [
            replace(one, case=replace(one.case, phase=word, dtype=word, mode=word, input=word, gpu_model=word))
            for one in sweep(make_record)
        ]
        return render([make_run(*records)], "html")

    assert [tag for tag, _ in Elements(text(name)).tags] == [tag for tag, _ in Elements(text("w")).tags]


def test_a_terminal_says_why_there_is_no_answer(make_record, make_run):
    from joulemark.report import answers_view

    figures = {"device_time_s": 1e-3, "throughput_per_s": 8e3}
    records = [make_record(batch=size, figures={**figures, "energy_per_item_j": 1.0}) for size in (8, 16)]
    lines = answers_view.render(gather([make_run(*records)], []), 120)
    assert "  GPU waits? Not measured: --bench-collect timing,profiler tells" in lines
    assert "  plateau    Not known: 2 batch sizes were measured; four over two doublings are needed" in lines
    why = {"energy_per_item_j": "the GPU has no sensor"}
    records = [make_record(batch=size, figures=figures, notes=why) for size in (8, 16, 32, 64)]
    assert "  joules     Not measured: the GPU has no sensor" in answers_view.render(
        gather([make_run(*records)], []), 120
    )


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("form", ["terminal", "markdown", "csv"])
def test_hostile_names_are_inert_in_the_answers(make_record, make_run, form, name):
    text = render([make_run(*sweep(make_record, workload=name))], form, width=80)
    assert not any(char in text for char in "\x1b\x07")
    assert form == "csv" or "\u202e" not in text
    assert form != "markdown" or not re.search(r"<(script|img)", text)
    if form == "csv":
        assert not any(cell.startswith("=") for row in csv.reader(text.splitlines()) for cell in row)


def test_simulated_gpus_stand_apart_and_say_so(make_record, make_run):
    simulated = Environment({"driver": "580.65.06", "gpus": [], "host": {"name": "a"}, "simulated": True})
    records = [replace(one, environment_id=simulated.environment_id) for one in sweep(make_record, knee=16)]
    runs = [make_run(*sweep(make_record)), make_run(*records, path="fake.jsonl", environment=simulated)]
    evidence = gather(runs)
    titles = [one.full_title for one in evidence.workloads]
    assert len(titles) == 2
    assert sorted("simulated GPU" in title for title in titles) == [False, True]
    ours = next(one for one in evidence.workloads if "simulated" not in one.title)
    assert {record.environment_id for row in ours.main.records.values() for record in row} == {
        ENVIRONMENT.environment_id
    }
    for form in ("terminal", "markdown"):
        assert "simulated GPU" in render(runs, form, width=100)
    text = page.render(evidence)
    assert "<title>joulemark: nvidia-h200, simulated GPUs</title>" in text
    assert "<li>simulated GPUs in 1 of 2 runs: no figure of power or energy is real</li>" in text
    assert "nvidia-h200 (simulated)" in text
    rows = [row for row in table_data(evidence)["rows"] if row[-1].startswith("simulated GPU: no figure of power")]
    assert [row[-3] for row in rows] == ["fake (simulated)"] * len(records)
    assert "simulated" not in page.render(gather(runs[:1]))


def test_hostile_names_make_no_paths_of_plots(make_record, make_run, tmp_path):
    records = [one for name in ("../../etc/passwd", "con\0:*?", "a" * 300) for one in sweep(make_record, workload=name)]
    figures = list(page.figures_of(page.sections_of(gather([make_run(*records)]))))
    written = pictures.save_all(figures, tmp_path / "plots")
    assert len(set(written)) == 3 * len(figures)
    assert {path.parent for path in written} == {tmp_path / "plots"}
    assert all(path.stat().st_size > 0 for path in written)


def test_ten_thousand_records_take_less_than_ten_seconds():
    """Of one process's CPU: other programs on the machine do not count."""
    begin = time.process_time()
    text = render([many_records(10_000)], "html")
    assert time.process_time() - begin < 10
    assert '"rows":[[' in text


def test_without_jinja2_or_matplotlib_a_page_is_refused_with_the_way_out(monkeypatch, tmp_path):
    import sys

    for module in ("jinja2", "matplotlib"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, module, None)
            with pytest.raises(ConfigurationError, match=r"pip install 'joulemark\[html\]'"):
                page.check_installed()


def test_a_section_is_a_function_and_a_line(committed, monkeypatch):
    monkeypatch.setattr(page, "SECTIONS", (lambda evidence: Section("own", "My own", "Lead.", notes=("a note",)),))
    text = page.render(committed)
    assert 'href="#own">My own</a>' in text
    assert "a note" in text


def test_documents_are_found_and_wrong_ones_refused(split, tmp_path):
    (tmp_path / "energy-split.json").write_text(json.dumps(split))
    broken = {**split, "rows": [{"workload": "x"}]}
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    _, found, unusable = documents.read_all([tmp_path])
    assert [one.path.name for one in found] == ["energy-split.json"]
    assert any("broken.json is no whole document" in line for line in unusable)
    with pytest.raises(UnreadableInput, match="no whole document"):
        documents.read_all([tmp_path / "broken.json"])
    with pytest.raises(ConfigurationError, match="which no report shows"):
        documents.read_all([H200 / "tandem.json"])
    for path, shows in (
        (H200 / "merged.json", "bench_merged.py table {}, in a clone, shows it"),
        (H200 / "merged-restarts.json", "merged_restarts.py --show {}, in a clone, shows it"),
        (ROOT / "results" / "calibration" / "nvidia-h200.json", "joulemark energy --calibration {} shows it"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(shows.format(path))):
            documents.read_all([path])


def run_command(capsys, *arguments):
    code = main([str(one) for one in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def test_the_command_writes_the_page_and_the_plots(capsys, tmp_path, split):
    (tmp_path / "energy-split.json").write_text(json.dumps(split))
    source = next(H200.glob("*148770.jsonl"))
    place = tmp_path / "r.html"
    code, out, err = run_command(
        capsys, "report", source, tmp_path / "energy-split.json", "--out", place, "--plots", tmp_path / "p"
    )
    assert (code, out) == (0, "")
    assert "wrote" in err
    assert place.read_text().startswith("<!doctype html>")
    with (tmp_path / "p" / "throughput-resnet50-train.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["batch_size"]) for row in rows] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert {row["unit"] for row in rows} == {"1/s"}
    assert all(float(row["lo"]) <= float(row["value"]) <= float(row["hi"]) for row in rows)
    assert (tmp_path / "p" / "split-train.csv").exists()
    for suffix in ("svg", "png"):
        assert (tmp_path / "p" / f"throughput-resnet50-train.{suffix}").stat().st_size > 2000


def test_the_picture_of_the_readme_is_made_by_its_command(capsys, tmp_path):
    """Same verdicts: run the command again where this fails. Pixels may differ with matplotlib and its fonts."""
    image = pytest.importorskip("PIL.Image")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.search(r"!\[[^\]]*\]\(([^)]+)\)", readme)
    assert first is not None
    stored = ROOT / first[1]
    command = f"joulemark report results/nvidia-h200/ --picture {first[1]}"
    assert command in readme
    code, _, err = run_command(capsys, "report", H200, "--picture", tmp_path / "again.png")
    assert code == 0
    assert "wrote" in err
    with image.open(stored) as old, image.open(tmp_path / "again.png") as new:
        assert old.size == new.size
        said = [re.sub(r"\[.*?\]", "", one.info["Description"]) for one in (old, new)]
    assert said[0] == said[1]
    assert "resnet50 train" in said[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plateaus", "--format", "html"), "table of its own"),
        (("--side-by-side", "--format", "csv"), "has no csv form"),
        (("--side-by-side", "gpu"), "no two sides"),
        (("--picture", "x.docx"), "--picture got 'x.docx'"),
        (("--plots", "README.md"), "is a file"),
    ],
)
def test_what_does_not_go_together_is_refused(capsys, arguments, words):
    code, out, err = run_command(capsys, "report", next(H200.glob("*148770.jsonl")), *arguments)
    assert (code, out) == (2, "")
    assert words in err


@pytest.mark.parametrize("width", [40, 80])
def test_answers_keep_to_the_terminal_and_need_no_colour(committed, width):
    from joulemark.report import answers_view

    for blocks in (True, False):
        text = answers_view.render(committed, width, blocks)
        assert max(map(len, text.splitlines())) <= width
        assert "\x1b" not in text
        assert blocks or not set(text) & set("▁▂▃▄▅▆▇█")
        assert len(text.splitlines()) <= 12 * len(committed.shown) * (1 if width == 80 else 2)


def test_what_a_step_is_made_of_adds_up_with_what_it_gained(committed):
    """Of bars below 2 % of the step, which are not told, there are at most four; the others are rounded."""
    from joulemark.report import answers_view

    text = answers_view.render(committed, 300)
    steps = [line for line in text.splitlines() if line.startswith("  step ")]
    assert any("gained: clock" in line for line in steps)
    for line in steps:
        spent, _, gained = line.partition("gained:")
        shares = [sum(map(int, re.findall(r" (\d+) %", part))) for part in (spent, gained)]
        assert shares[0] - shares[1] == pytest.approx(100, abs=4), line


def test_small_plots_rise_with_the_values():
    from joulemark.report.answers_view import spark

    assert spark([1, 2, 4, 8]) == "▁▂▄█"
    assert spark([5, 5]) == "▁▁"
    assert spark([0, 1], blocks=False) == "_#"


def test_two_runs_side_by_side_hold_plateaus_and_splits(capsys, tmp_path, energy_document):
    first, second = tmp_path / "old", tmp_path / "new"
    source = next(H200.glob("*148770.jsonl"))
    for folder, dram in ((first, 1.0), (second, 0.5)):
        folder.mkdir()
        (folder / source.name).write_bytes(source.read_bytes())
        (folder / "e.json").write_text(json.dumps(energy_document("resnet50-train-bf16-b64", dram=dram)))
    code, out, _ = run_command(capsys, "report", first, second, "--side-by-side", "--format", "markdown")
    assert code == 0
    table = out[out.index("### side by side") :]
    header, cells = table.splitlines()[2], table.splitlines()[4]
    assert [cell.strip() for cell in header.split("|")[3:5]] == ["old", "new"]
    assert cells.count("218") == 2
    assert r"1.000x \[0.9" in table
    split_rows = [line for line in table.splitlines() if line.startswith("| resnet50-train-bf16-b64 ")]
    assert len(split_rows) == 2
    assert split_rows[0] != split_rows[1]
    code, out, _ = run_command(capsys, "report", first, second, "--side-by-side", "--format", "html")
    assert code == 0
    assert "Side by side: old, new" in out
    assert out.count("<svg") > 5


def test_a_side_of_simulated_gpus_is_named(make_record, make_run):
    simulated = Environment({"driver": "580.65.06", "gpus": [], "host": {"name": "a"}, "simulated": True})
    records = [replace(one, environment_id=simulated.environment_id) for one in sweep(make_record)]
    runs = [
        make_run(*sweep(make_record), path="old.jsonl"),
        make_run(*records, path="new.jsonl", environment=simulated),
    ]
    found = sides.sides_of([(Path(run.path), [run], []) for run in runs], "run")
    note = "simulated GPUs in new: no figure of power or energy is real"
    assert sides.tables_of(found, "run")[0].notes[0] == note
    assert not any("simulated" in one for one in sides.tables_of([found[0], found[0]], "run")[0].notes)


def test_boards_of_one_model_are_one_model_in_the_heading(make_record, make_run):
    """A sweep over two boards tells them apart by the UUID's first digits; a reader reads the model, and two boards."""
    uuids = ("GPU-336f5171-d808-d9e0-f3ce-45b66e3a83f3", "GPU-5d86eefd-00a6-9458-a99f-4f6a2780f7fd")
    records = [one for uuid in uuids for one in sweep(make_record, gpu=f"nvidia-h200-{uuid[4:12]}", gpu_uuid=uuid)]
    evidence = gather([make_run(*records)])
    assert [one.title for one in evidence.workloads] == [
        "resnet50 train on nvidia-h200, board 336f5171", "resnet50 train on nvidia-h200, board 5d86eefd",
    ]  # fmt: skip
    text = page.render(evidence)
    assert "<h1>joulemark: nvidia-h200</h1>" in text
    assert "<li>2 boards</li>" in text


def test_drivers_are_never_mixed(make_record, make_run):
    from joulemark.records import Environment

    runs = []
    for driver, factor in (("570.1", 1.0), ("580.1", 2.0)):
        environment = Environment({"driver": driver, "gpus": []})
        records = [
            make_record(batch=batch, figures={"throughput_per_s": factor * 100 * min(batch, 8)})
            for batch in (1, 2, 4, 8, 16, 32)
        ]
        moved = [one.__class__(**{**one.__dict__, "environment_id": environment.environment_id}) for one in records]
        runs.append(make_run(*moved, environment=environment, path=f"{driver}.jsonl"))
    evidence = gather(runs)
    assert sorted(one.title for one in evidence.workloads) == [
        "resnet50 train, driver 570.1", "resnet50 train, driver 580.1",
    ]  # fmt: skip
    levels = {one.title[-5:]: one.main.plateau.level for one in evidence.workloads}
    assert levels["580.1"] == pytest.approx(2 * levels["570.1"])


def test_a_figure_of_an_older_run_fills_what_the_newest_lacks(committed):
    main_curve = committed.workloads[0].main
    assert main_curve.value(64, "energy_per_item_j") is not None
    assert main_curve.value(64, "sm_active_fraction") is not None


@pytest.mark.parametrize(
    "figures",
    [
        {"throughput_per_s": 0.0, "device_time_s": 0.0, "device_time_graph_s": 0.0, "energy_per_item_j": 0.0},
        {"throughput_per_s": 10.0, "device_time_s": -1.0, "host_time_s": 0.0},
        {"throughput_per_s": 10.0, "device_time_s": 1e-9, "exposed_overhead_unprofiled_s": 1.0, "power_w": None},
        {"gpu_busy_s": 0.0, "host_issue_unprofiled_s": 0.0, "sm_active_fraction": 7.0},
    ],
)
@pytest.mark.parametrize("batches", [(1,), (0, -4, 8), (1, 2, 4, 8, 16)])
@pytest.mark.parametrize("form", ["html", "terminal", "markdown"])
def test_figures_that_cannot_be_are_reported_all_the_same(make_record, make_run, form, batches, figures):
    """Files come from anyone: zeros, negative times and strange batches draw no plot and break none."""
    samples = {"host_time_s": [0.0, -1.0, 0.0, 1.0, 2.0], "gpu_busy_s": [0.0], "host_issue_unprofiled_s": []}
    records = [make_record(batch=batch, figures=figures, half=None, samples=samples) for batch in batches]
    text = render([make_run(*records)], form)
    assert "resnet50" in text
    assert "nan" not in re.sub(r"[a-z-]*nan[a-z-]+", "", text.lower())


def test_pytest_benchmarks_files_make_a_page(capsys):
    source = ROOT / "tests" / "data" / "runs" / "gpu_a100.json"
    code, out, _ = run_command(capsys, "report", source, "--format", "html")
    assert (code, out[:15]) == (0, "<!doctype html>")
    assert '"rows":[["' in out


def test_work_on_several_gpus_has_its_table(committed):
    section = next(one for one in page.sections_of(committed) if one.key == "several-gpus")
    cells = [cell for table in section.tables for row in table.rows for cell in row]
    assert any(cell.startswith("0.947 [") for cell in cells)


def test_a_function_of_ones_own_on_a_cpu_is_named_once_and_asked_nothing_of_a_gpu(make_record, make_run):
    own = [
        replace(
            one, case=replace(one.case, workload="bench_own.mine", phase=None, dtype=None, mode=None, gpu_model="cpu")
        )
        for one in sweep(make_record)
    ]
    evidence = gather([make_run(*own)])
    (workload,) = evidence.workloads
    assert (workload.full_title, workload.configuration) == ("bench_own.mine", "")
    assert [one.verdict for one in answers_of(workload, evidence)[:2]] == ["No GPU", "No GPU"]
    text = page.render(evidence)
    assert "<h2>bench_own.mine</h2>" in text
    assert "bench_own.mine, bench_own.mine" not in text


def put(document, path, value):
    """A copy of a document with another value at a place; none at all for ``...``."""
    changed = json.loads(json.dumps(document))
    one = changed
    for key in path[:-1]:
        one = one[key]
    if value is ...:
        del one[path[-1]]
    else:
        one[path[-1]] = value
    return changed


def places(value, path=()):
    """Where a document holds something, the first of each list."""
    entries = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from places(inner, (*path, key))


def test_damaged_energy_documents_are_read_whole_or_not_at_all(split, make_record, make_run):
    """Any part of a row missing or of another type: left out when read, or of no matter to any form."""
    runs = [make_run(*sweep(make_record, batches=(16, 64, 256, 1024)))]
    small = {**split, "rows": split["rows"][:1]}
    refused = 0
    for place in [("gain",), ("gpu",), ("driver",), *places({"rows": small["rows"]})]:
        for value in (..., None, "x", -1, [], {}, 1e999, float("nan")):
            content = put(small, place, value)
            try:
                energy.check(content)
            except ValueError:
                refused += 1
                continue
            evidence = gather(runs, [Document(Path("e.json"), "energy", content)])
            answers_of(evidence.workloads[0], evidence)
            section = energy_section(evidence)
            assert all(figure.rows for figure in section.figures)
    assert refused > 50


def test_a_file_that_is_named_twice_counts_once(capsys, tmp_path):
    source = next(H200.glob("*148770.jsonl"))
    (tmp_path / source.name).write_bytes(source.read_bytes())
    once = run_command(capsys, "report", tmp_path)[1]
    again = run_command(capsys, "report", tmp_path, tmp_path / source.name, tmp_path / "." / source.name)[1]
    assert again == once


def test_what_is_no_file_in_a_folder_is_passed_over(tmp_path, capsys):
    source = next(H200.glob("*148770.jsonl"))
    (tmp_path / source.name).write_bytes(source.read_bytes())
    os.mkfifo(tmp_path / "pipe.json")
    assert run_command(capsys, "report", tmp_path)[0] == 0
