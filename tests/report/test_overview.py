"""Many runs in a terminal: short, and nothing left out without a word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from joulemark.cli import main
from joulemark.records import Environment
from joulemark.report import overview

RESULTS = Path(__file__).parents[2] / "results" / "nvidia-h200"


@pytest.fixture(scope="module")
def committed():
    from joulemark.report import documents

    runs, found, _ = documents.read_all([RESULTS])
    return runs, found


@pytest.mark.parametrize("width", [80, 120])
def test_the_committed_folder_fits_two_screens(committed, width):
    runs, documents = committed
    text = overview.render(runs, documents, width)
    lines = text.splitlines()
    assert len(lines) <= overview.MOST_LINES
    assert max(map(len, lines)) <= width
    assert text.startswith("resnet50 train, bf16 eager")
    for run in runs:
        assert Path(run.path).stem in text
    listed = " ".join(text.split())
    assert "trials of the gate, no sweeps: aa-20261130T043939Z-ed6335.jsonl, aa-" in listed
    assert "(read by joulemark aa)" in listed
    assert lines[-1] == "every case in its table: --tables; as a page: --out report.html"


def test_tables_have_every_case_of_a_sweep_and_name_trials(committed):
    runs, documents = committed
    text = overview.render_whole(runs, documents, 200)
    assert len(text.splitlines()) > 5 * overview.MOST_LINES
    titles = [line for line in text.splitlines() if ".jsonl | nvidia-h200" in line]
    assert not any(line.startswith("aa-") for line in titles)
    assert {line.partition(" |")[0] for line in titles} == {Path(run.path).name for run in runs} - {
        path.name for path in RESULTS.glob("aa-*")
    }
    assert text.rstrip().endswith("(read by joulemark aa)")


def test_what_fits_two_screens_is_whole(make_record, make_run):
    runs = [make_run(make_record(figures={"device_time_s": 1e-3}))]
    assert overview.render(runs, (), 80) == overview.render_whole(runs, (), 80)


def test_one_long_run_is_a_line_per_series(make_record, make_run):
    records = [
        make_record(f"model{kind}", batch=2**n, figures={"device_time_s": 1e-3 * 2**n}, outcome=outcome)
        for kind in range(12)
        for n in range(8)
        for outcome in ["flagged" if n == 0 else "ok"]
    ]
    fake = Environment({"simulated": True})
    run = make_run(*(replace(one, environment_id=fake.environment_id) for one in records), environment=fake,
                   completed=False, problems=("line 3: not JSON",))  # fmt: skip
    text = overview.render([run], (), 120)
    rows = [line.split("  ") for line in text.splitlines() if line.startswith("model")]
    assert len(rows) == 12
    assert "run.jsonl | simulated GPUs | 96 cases" in text
    assert "1 … 128" in text
    assert "1 ms … 128 ms" in text
    assert text.count("7 ok, 1 flagged") == 12
    assert "INCOMPLETE" in text
    assert "file: line 3: not JSON" in text


def test_of_hundreds_of_runs_the_newest_are_listed(make_record, make_run):
    runs = [
        make_run(make_record(figures={"device_time_s": 1e-3}), path=f"sweep-{n:03}.jsonl", started_utc=1e9 + n)
        for n in range(100)
    ]
    text = overview.render(runs[::-1], (), 80)
    assert len(text.splitlines()) <= overview.MOST_LINES
    assert "60 older runs are not listed" in text
    assert "sweep-099" in text
    assert "sweep-059" not in text


def test_the_command_is_short_and_tables_are_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = str(RESULTS / "sweep-20261129T145039Z-4b96b6.jsonl")
    assert main(["report", path]) == 0
    short = capsys.readouterr().out
    assert "--tables" in short
    assert main(["report", path, "--tables"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 128 > len(short.splitlines())
    assert main(["report", path, "--tables", "--format", "json"]) == 2
    assert "--tables is for a report in the terminal" in capsys.readouterr().err
