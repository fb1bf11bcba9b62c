import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from joulemark.cli import main
from tests.history.simulated import DRIVERS, drivers_by_run, levels, write_store

SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "schema" / "history.schema.json").read_text())
RUNS = Path(__file__).parent / "data" / "runs"


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")

    def call(*args):
        code = main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


@pytest.fixture
def store(tmp_path):
    times = levels(np.random.default_rng(1), 10, 60, ((20, 1.06, 1.0), (40, 0.95, 0.5)))
    write_store(tmp_path / "store", times, drivers_by_run(60, (20, 40)))
    return tmp_path / "store"


def strict(text):
    document = json.loads(text, parse_constant=pytest.fail)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    return document


def test_both_driver_changes_are_named(run, store):
    code, out, err = run("history", store, "--json")
    assert (code, err) == (0, "")
    changes = strict(out)["changes"]
    assert [(one["run"], one["driver"]["after"]) for one in changes] == [(20, DRIVERS[1]), (40, DRIVERS[2])]
    code, out, err = run("history", store)
    assert (code, err) == (0, "")
    assert "2 changes of device time" in out


@pytest.mark.parametrize("some", [True, False])
def test_runs_on_simulated_gpus_are_named_and_never_stand_beside_others(run, tmp_path, some):
    times = levels(np.random.default_rng(1), 2, 12, ((6, 2.0, 1.0),))
    write_store(tmp_path / "s", times, DRIVERS[:1] * 12, simulated=range(6 if some else 0, 12))
    document = strict(run("history", tmp_path / "s", "--json", "--false-alarms", "0.05")[1])
    assert [one["simulated"] for one in document["runs"]] == ([False] * 6 if some else [True] * 12)
    assert len(document["changes"]) == (0 if some else 1)
    says = "6 runs on simulated GPUs left out" if some else "all runs are on simulated GPUs: no figure of power"
    assert any(note.startswith(says) for note in document["notes"])
    for form in ("terminal", "markdown"):
        text = " ".join(run("history", tmp_path / "s", "--format", form)[1].split())
        assert says in text
        assert ("median over 12 runs on simulated GPUs" in text) != some
    assert run("history", tmp_path / "s", "--html", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert ("<h1>device time over 12 runs on simulated GPUs</h1>" in page) != some
    assert says in page


def test_metric_and_cases_can_be_chosen(run, store):
    document = strict(run("history", store, "--json", "--metric", "throughput_per_s", "-k", "MODEL000")[1])
    assert (document["metric"], document["unit"], len(document["rows"])) == ("throughput_per_s", "1/s", 8)
    assert [one["meaning"] for one in document["changes"]] == ["worse", "better"]
    assert run("history", store, "--format", "markdown", "-k", "b128")[1].startswith("### device time by driver")


def test_a_page_is_written_beside_the_tables(run, store, tmp_path):
    code, out, err = run("history", store, "--html", tmp_path / "deep" / "page.html")
    assert code == 0
    assert "2 changes" in out
    assert err == f"joulemark: wrote {tmp_path / 'deep' / 'page.html'}\n"
    assert (tmp_path / "deep" / "page.html").read_text().startswith("<!doctype html>")


def test_bad_files_are_named_and_the_store_is_left_alone(run, store, tmp_path):
    shutil.copytree(RUNS / "store", store / "foreign")
    (store / "empty.jsonl").touch()
    (store / "newer.jsonl").write_text('{"kind":"record","schema":"joulemark/sweep/2"}\n')
    whole = (store / "sweep-00003.jsonl").read_bytes()
    (store / "sweep-00003.jsonl").write_bytes(whole[:-300])
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in store.rglob("*")}
    for _ in range(2):
        code, out, err = run("history", store, "--json")
        assert code == 0
        assert err.count("left out: ") == 6
        assert "newer.jsonl is of schema 'joulemark/sweep/2'" in err
        assert "sweep-00003.jsonl: line 11: cut off" in err
        assert len(strict(out)["runs"]) == 60
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in store.rglob("*")} == before


def test_pytest_benchmarks_files_are_runs_too(run):
    code, out, _ = run("history", RUNS / "store", "--json")
    document = strict(out)
    assert (code, document["metric"], len(document["runs"])) == (0, "host_time_s", 2)
    assert document["runs"][0]["started_utc"] < document["runs"][1]["started_utc"]


BAD = [
    (["{tmp}/none"], "there is no folder"),
    (["{store}/sweep-00003.jsonl"], "sweep-00003.jsonl is no folder: give the folder of the results"),
    (["{tmp}/nothing"], "no usable result"),
    (["{store}", "--metric", "speed"], "no run has the metric 'speed': choose from device_time_s, throughput_per_s"),
    (["{store}", "-k", "vgg"], "named like 'vgg'"),
    (["{store}", "--html", "{tmp}/a.md"], "use a name that ends in .html"),
    (["{store}", "--false-alarms", "0"], "--false-alarms 0 is out of range"),
]


@pytest.mark.parametrize(("args", "says"), BAD)
def test_bad_input_is_one_line_and_exit_2(run, store, tmp_path, args, says):
    (tmp_path / "nothing").mkdir()
    code, out, err = run("history", *(arg.format(tmp=tmp_path, store=store) for arg in args))
    assert (code, out) == (2, "")
    assert err.startswith("joulemark: error: ")
    assert len(err.splitlines()) == 1
    assert says in err


def test_without_a_folder_it_is_the_projects(run, store, monkeypatch):
    monkeypatch.chdir(store.parent)
    assert "there is no folder .joulemark" in run("history")[2]
    (store.parent / "results").symlink_to(store)
    assert run("history")[0] == 0


def test_an_index_with_a_damaged_page_is_replaced(run, store, tmp_path):
    whole = run("history", store)[1]
    (kept,) = (tmp_path / "cache").rglob("*.sqlite3")
    size = kept.stat().st_size
    with kept.open("r+b") as file:
        file.seek(8192)  # behind the pages of tables' names
        file.write(b"\xff" * (size - 8192))
    code, out, err = run("history", store)
    assert (code, out) == (0, whole)
    assert err.startswith(f"joulemark: the index {kept} failed (")
    assert not kept.exists()
    assert run("history", store) == (0, whole, "")
    assert kept.stat().st_size == size


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_without_a_cache_every_file_is_read_each_time(run, store, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o500)
    code, _, err = run("history", store)
    assert code == 0
    assert "all files are read each time" in err


def test_a_cache_that_is_a_file_is_said_and_no_failure(run, store, tmp_path):
    (tmp_path / "cache").touch()
    code, out, err = run("history", store)
    assert code == 0
    assert "2 changes" in out
    assert "all files are read each time" in err


def test_many_runs_are_fast_with_an_index_and_without(tmp_path):
    """In seconds of the processor; tests/oracle/history_speed.py does it at fifty times the figures."""
    folder = tmp_path / "store"
    write_store(folder, levels(np.random.default_rng(2), 25, 320, ((110, 1.04, 1.0), (220, 0.97, 0.5))),
                drivers_by_run(320, (110, 220)))  # fmt: skip
    script = "import sys; from joulemark.cli import main; sys.exit(main(sys.argv[1:]) or 'torch' in sys.modules)"
    command = [sys.executable, "-c", script, "history", str(folder), "--json"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    seconds = []
    for _ in range(2):
        before = os.times()
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert [one["run"] for one in strict(done.stdout)["changes"]] == [110, 220]
    assert max(seconds) < 5.0
