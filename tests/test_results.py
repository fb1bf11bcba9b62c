"""What is committed under results/ is what the schemas say, and what the reader reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from joulemark.regression.trials import evaluate
from joulemark.report.documents import read_all
from joulemark.store import kind_of, read_run
from joulemark.tandem import tandem_document
from joulemark.utilization.summary import document_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
RUNS = sorted((ROOT / "results").glob("nvidia-*/*-*Z-*.jsonl"))
TRIALS = sorted((ROOT / "results").glob("nvidia-*/aa.json"))
UTILIZATIONS = sorted((ROOT / "results").glob("nvidia-*/utilization.json"))
DOCUMENTS = sorted((ROOT / "results").glob("*/*.json"))
TANDEMS = sorted((ROOT / "results").glob("nvidia-*/tandem.json"))
INDEX = (RESULTS / "README.md").read_text(encoding="utf-8")
INDEX_ROWS = [line for line in INDEX.splitlines() if line.startswith("| `")]
CAMPAIGNS = sorted((RESULTS / "nvidia-h200").glob("README-*.md"))


def test_there_are_runs_on_real_gpus():
    assert RUNS


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_line_of_a_committed_run_is_valid(path):
    schema = json.loads((ROOT / "docs" / "schema" / "sweep.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    for line in path.read_text(encoding="utf-8").splitlines():
        validator.validate(json.loads(line))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_a_committed_run_is_complete_and_real(path):
    run = read_run(path)
    assert run.completed
    assert not run.problems
    assert run.wall_s is not None
    assert run.measured_s is not None
    assert 0 < run.measured_s < run.wall_s
    facts = next(iter(run.environments.values())).facts
    assert not facts["simulated"]
    uuids = {gpu["uuid"] for gpu in facts["gpus"]}
    assert {record.gpu_uuid for record in run.records} <= uuids


@pytest.mark.parametrize("path", TANDEMS, ids=lambda path: path.parent.name)
def test_a_committed_tandem_is_made_of_committed_runs(path):
    """Its figures are those that the committed sweeps give today; random numbers may change with numpy."""
    document = json.loads(path.read_text(encoding="utf-8"))
    runs = [read_run(path.parent / one["file"]) for one in document["runs"]]
    assert_alike(tandem_document(runs), document)


def assert_alike(one, other, drawn=False):
    """Equal but for rounding; ``drawn``: figures of a bootstrap, equal but for its noise."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            if key != "text":
                assert_alike(one[key], other[key], drawn or key in ("crossover", "crossover_profiled"))
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_alike(a, b, drawn)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=0.05 if drawn else 1e-9)
    else:
        assert one == other


@pytest.mark.parametrize("path", TANDEMS, ids=lambda path: path.parent.name)
def test_a_committed_stall_and_a_committed_copy_have_the_right_seconds(path):
    """The loader's sleep is idle time by input; the copy costs what it costs alone, as far as host memory is steady."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert_right_seconds({one["label"].split("-nvidia")[0]: one for one in cells})


def assert_right_seconds(cells):
    sleep_s = 20e-3
    stall = cells["bench_input.bench_slow_loader-sleep_ms=20"]
    assert sleep_s <= stall["idle_s"]["input"] < 1.05 * sleep_s
    copied = cells["bench_input.bench_host_input-memory=pageable-mib=256"]
    alone = cells["bench_input.bench_host_copy-memory=pageable-mib=256"]["metrics"]["device_time_s"]["value"]
    waited = copied["idle_s"]["copy"] + copied["metrics"]["copy_only_s"]["value"]
    assert waited == pytest.approx(alone, rel=0.2)
    pinned = cells["bench_input.bench_host_input-memory=pinned-mib=256"]
    assert pinned["idle_s"].get("copy", 0) < 0.02 * pinned["metrics"]["copy_only_s"]["value"]


@pytest.mark.parametrize("path", UTILIZATIONS, ids=lambda path: path.parent.name)
def test_a_committed_utilization_is_made_of_committed_runs(path):
    """Its figures are those that the committed sweeps give today, and its waterfalls add up."""
    document = json.loads(path.read_text(encoding="utf-8"))
    assert_alike(document_of([read_run(path.parent / one["file"]) for one in document["runs"]]), document)
    cells = [cell for series in document["series"] for cell in series["cells"]]
    waterfalls = [cell["waterfall"] for cell in cells if cell["waterfall"] is not None]
    assert waterfalls
    for one in waterfalls:
        assert sum(bar["time_s"] for bar in one["bars"]) == pytest.approx(one["step_s"])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_committed_document_is_what_the_schema_of_its_kind_says(path):
    kind = kind_of(path)
    assert kind is not None, "it names no schema"
    schema = json.loads((ROOT / "docs" / "schema" / f"{kind}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(json.loads(path.read_text(encoding="utf-8")))


def test_reading_a_folder_of_results_leaves_nothing_out():
    unusable = [line for folder in sorted((ROOT / "results").glob("nvidia-*")) for line in read_all([folder])[2]]
    assert unusable == []


def test_committed_trials_of_the_gate_are_made_of_committed_records():
    """Their figures are those that the records give today; random numbers may change with numpy."""
    for path in TRIALS:
        trials = json.loads(path.read_text(encoding="utf-8"))
        runs = [read_run(path.parent / source) for source in trials["sources"]]
        today = evaluate(runs, trials["metric"], pairs=300, simulated_rows=4000)
        assert_alike(today["cells"], trials["cells"])
        assert [(one["rule"], one["added_work"]) for one in today["rates"]] == [
            (one["rule"], one["added_work"]) for one in trials["rates"]
        ]
        for part in (lambda document: document["rates"], lambda document: document["simulated"]["rates"]):
            found, committed = ([one["rate"] for one in part(document)] for document in (today, trials))
            assert found == pytest.approx(committed, abs=0.04)  # fewer pairs and rows


def test_the_readme_says_how_far_other_instruments_agree():
    """Each figure of its table that a committed document holds, rounded as there."""
    said = {line.split("|")[1].split(",")[0].strip(): line.split("|")[3] for line in readme_table()}
    found = committed("agreement.json")
    errors = [max(abs(one["over_torch"] - 1), abs(one["over_events"] - 1)) for one in found["time"]]
    limited = [abs(one["over_events"] - 1) for one in found["time"] if not one["ok"]]
    loaded = [max(abs(one["over_torch"] - 1), abs(one["over_events"] - 1)) for one in found["time_after_load"]]
    calm = [error for error, one in zip(errors, found["time"], strict=True) if one["ok"]]
    assert percents(said["device time"]) == [rounded(max(group)) for group in (calm, limited, loaded)]
    assert percents(said["energy"])[0] == rounded(max(abs(one["ratio"] - 1) for one in found["energy"]))
    rates = {(one["rule"], one["added_work"]): one["rate"] for one in committed("aa.json")["rates"]}
    other = "--benchmark-compare-fail=mean:5%"
    alarms, caught, others, others_caught = percents(said["`compare`"].replace(other, ""))
    assert (alarms, caught) == (f"{rates['joulemark', 0]:.2%}"[:-1], rounded(rates["joulemark", 0.05]))
    assert (others, others_caught) == (rounded(rates[other, 0]), f"{rates[other, 0.05]:.0%}"[:-1])


def readme_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## How far to trust it")[2]
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


def committed(name):
    return json.loads((ROOT / "results" / "nvidia-h200" / name).read_text(encoding="utf-8"))


def percents(text):
    return re.findall(r"([\d.]+) %", text)


def rounded(share):
    return f"{share:.1%}"[:-1]


def test_the_index_has_a_short_line_for_every_file():
    named = [(RESULTS / "nvidia-h200" / row.split("`")[1]).resolve() for row in INDEX_ROWS]
    folders = ("nvidia-h200", "calibration")
    files = [one for folder in folders for one in (RESULTS / folder).iterdir() if one.suffix != ".md"]
    assert sorted(named) == sorted(one.resolve() for one in files)
    assert max(len(row.split()) for row in INDEX_ROWS) <= 30


def test_a_page_of_each_campaign_has_its_files_and_more_to_say():
    sections = dict(re.findall(r"^### \[.*?\]\(nvidia-h200/(README-\w+\.md)\)\n(.*?)(?=^##|\Z)", INDEX, re.M | re.S))
    assert sorted(sections) == [page.name for page in CAMPAIGNS]
    for page in CAMPAIGNS:
        text = page.read_text(encoding="utf-8")
        listed = re.findall(r"^\| `(.*?)`", sections[page.name], re.M)
        headings = " ".join(re.findall(r"^(`[^:]*`):$", text, re.M | re.S))
        assert sorted(listed) == sorted(re.findall(r"`(.*?)`", headings))
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert (page.parent / target).is_file()
