import os
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from joulemark.history.index import Index, default_path
from joulemark.records import Case, Environment, Record, Value
from joulemark.report.foreign import read_result
from joulemark.store import RunWriter, result_files
from tests.history.simulated import DRIVERS, drivers_by_run, levels, write_store

RUNS = Path(__file__).parents[1] / "data" / "runs"


def everything(case):
    return True


def run_file(path, values, driver="580.65.06", run_id="ab" * 16, started=1.7e9, outcome="ok", metric="device_time_s"):
    environment = Environment({"driver": driver})
    with RunWriter(path, run_id, environment, started) as out:
        for batch, value in values.items():
            figures = {metric: Value(value, "s")}
            case = Case("lenet5", "train", "eager", "fp32", batch, gpu_model="nvidia-h200")
            out.write(Record(case, run_id, outcome, environment.environment_id, metrics=figures))
        out.end(completed=True, wall_s=1.0, measured_s=1.0)
    return path


def test_an_index_holds_what_the_files_hold(tmp_path, looked_at):
    times = levels(np.random.default_rng(1), 20, 6)
    write_store(tmp_path / "store", times, drivers_by_run(6, (2, 4)))
    index, read = looked_at(tmp_path / "store")
    figures = index.figures(tmp_path / "store", "device_time_s", everything)
    assert len(read) == 6
    np.testing.assert_allclose(np.sort(figures.values, axis=0), np.sort(times, axis=0), rtol=1e-8)
    assert [run.driver for run in figures.runs] == [DRIVERS[0]] * 2 + [DRIVERS[1]] * 2 + [DRIVERS[2]] * 2
    assert [case.batch_size for case in figures.cases[:8]] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert index.metrics() == ["device_time_s", "throughput_per_s"]
    assert figures.runs[0].setup["torch"] == "2.14.0"


def test_only_new_and_changed_files_are_read(tmp_path, looked_at):
    store = tmp_path / "store"
    write_store(store, levels(np.random.default_rng(1), 3, 4), [DRIVERS[0]] * 4)
    index, read = looked_at(store)
    assert len(read) == 4
    first = index.figures(store, "device_time_s", everything)
    index, read = looked_at(store)
    assert read == []
    again = index.figures(store, "device_time_s", everything)
    assert again.runs == first.runs
    np.testing.assert_array_equal(again.values, first.values)

    run_file(store / "sweep-00002.jsonl", {64: 0.5}, run_id=f"{2:032x}")  # appended to
    run_file(store / "later.jsonl", {64: 0.25}, started=2e9)
    (store / "sweep-00000.jsonl").unlink()
    index, read = looked_at(store)
    assert sorted(read) == ["later.jsonl", "sweep-00002.jsonl"]
    figures = index.figures(store, "device_time_s", lambda case: case.workload == "lenet5")
    assert figures.values.tolist() == [[0.5, 0.25]]
    names = [Path(run.path).name for run in index.figures(store, "device_time_s", everything).runs]
    assert "sweep-00000.jsonl" not in names


def test_an_index_and_one_made_anew_are_the_same(tmp_path, looked_at):
    store = tmp_path / "store"
    write_store(store, levels(np.random.default_rng(1), 3, 4), [DRIVERS[0]] * 4)
    looked_at(store)
    run_file(store / "later.jsonl", {64: 0.25}, started=2e9)
    grown, _ = looked_at(store)
    anew, read = looked_at(store, path=None)
    assert len(read) == 5
    one, other = (index.figures(store, "device_time_s", everything) for index in (grown, anew))
    assert (one.runs, one.cases) == (other.runs, other.cases)
    np.testing.assert_array_equal(one.values, other.values)
    assert looked_at(store, anew=True)[1] == sorted(path.name for path in store.iterdir())


def broken(path, how):
    if how == "not a database":
        path.write_bytes(b"not a database at all" * 100)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        with sqlite3.connect(path) as database:
            database.execute(
                "UPDATE format SET text = 'of another version'" if how == "version" else "DROP TABLE format"
            )
        database.close()


@pytest.mark.parametrize("how", ["not a database", "cut", "empty", "version", "other tables"])
def test_an_index_that_is_no_good_is_made_anew(tmp_path, looked_at, how):
    store, path = tmp_path / "store", tmp_path / "i.sqlite3"
    write_store(store, levels(np.random.default_rng(1), 30, 4), [DRIVERS[0]] * 4)
    looked_at(store, path=path)[0].__exit__(None)
    broken(path, how)
    index, read = looked_at(store, path=path)
    assert len(read) == 4
    assert index.why_in_memory is None
    assert index.figures(store, "device_time_s", everything).values.shape == (30, 4)


def test_without_a_place_the_index_is_kept_in_memory(tmp_path, looked_at):
    write_store(tmp_path / "store", levels(np.random.default_rng(1), 3, 2), [DRIVERS[0]] * 2)
    (tmp_path / "file").touch()
    index, read = looked_at(tmp_path / "store", path=tmp_path / "file" / "index.sqlite3")
    assert "cannot be kept" in index.why_in_memory
    assert len(read) == 2


def test_bad_files_are_named_and_none_is_changed(tmp_path, looked_at, state_of):
    store = tmp_path / "store"
    shutil.copytree(RUNS / "store", store / "pytest-benchmark")
    run_file(store / "good.jsonl", {1: 0.5, 2: 0.5})
    whole = (store / "good.jsonl").read_bytes()
    (store / "cut.jsonl").write_bytes(whole[: whole.index(b'"end"') - 40].replace(b"abab", b"cdcd"))
    (store / "empty.jsonl").touch()
    (store / "foreign.jsonl").write_text('{"name": "something else"}\n')
    (store / "future.jsonl").write_bytes(whole.replace(b"joulemark/sweep/1", b"joulemark/sweep/2"))
    (store / "binary.jsonl").write_bytes(bytes(range(256)))
    before = state_of(store)
    for _ in range(2):  # from the files, then from the index
        index, _ = looked_at(store)
        sources = {Path(one.path).name: one for one in index.sources(store)}
        assert "is empty" in sources["empty.jsonl"].error
        assert "joulemark/sweep/2" in sources["future.jsonl"].error
        assert "not a result file" in sources["foreign.jsonl"].error
        assert sources["binary.jsonl"].error is not None
        assert sources["cut.jsonl"].error is None
        assert any("cut off" in problem for problem in sources["cut.jsonl"].problems)
        assert sources["good.jsonl"].problems == ()
        assert sum(one.error is not None for one in sources.values()) == 8
        figures = index.figures(store, "device_time_s", everything)
        assert {Path(run.path).name for run in figures.runs} == {"good.jsonl", "cut.jsonl"}
        foreign = index.figures(store, "host_time_s", everything)
        assert {Path(run.path).name[:9] for run in foreign.runs} == {"0001_good", "0004_good"}
    assert state_of(store) == before


def test_a_file_of_two_drivers_is_two_runs(tmp_path, looked_at):
    store = tmp_path / "store"
    run_file(store / "a.jsonl", {1: 0.5}, driver="570.1")
    run_file(store / "a.jsonl", {2: 0.25}, driver="580.1")
    figures = looked_at(store)[0].figures(store, "device_time_s", everything)
    assert [run.driver for run in figures.runs] == ["570.1", "580.1"]
    np.testing.assert_array_equal(figures.values, [[0.5, np.nan], [np.nan, 0.25]])


def test_a_copy_of_a_run_counts_once(tmp_path, looked_at):
    store = tmp_path / "store"
    run_file(store / "a.jsonl", {1: 0.5})
    shutil.copy(store / "a.jsonl", store / "baseline.jsonl")
    figures = looked_at(store)[0].figures(store, "device_time_s", everything)
    assert (len(figures.runs), figures.copies) == (1, 1)


def test_flagged_figures_are_counted_and_missing_ones_are_none(tmp_path, looked_at):
    store = tmp_path / "store"
    run_file(store / "a.jsonl", {1: 0.5, 2: None}, outcome="flagged")
    figures = looked_at(store)[0].figures(store, "device_time_s", everything)
    assert (figures.flagged, figures.values.tolist(), len(figures.cases)) == (1, [[0.5]], 1)


def test_runs_of_unknown_time_come_first_by_name(tmp_path, looked_at):
    store = tmp_path / "store"
    for at, name in enumerate("cab"):
        run_file(store / f"{name}.jsonl", {1: float(at + 1)}, run_id=name * 32, started=0.0 if name != "c" else 5.0)
    figures = looked_at(store)[0].figures(store, "device_time_s", everything)
    assert [Path(run.path).stem for run in figures.runs] == ["a", "b", "c"]


def test_the_index_lies_in_the_users_cache(tmp_path):
    found = default_path([tmp_path], {"XDG_CACHE_HOME": "/somewhere", "HOME": "/home/me"})
    assert found.parent == Path("/somewhere/joulemark")
    assert default_path([tmp_path], {"HOME": "/home/me"}).parent == Path("/home/me/.cache/joulemark")
    assert default_path([tmp_path / "other"], {"HOME": "/home/me"}).name != found.name
    assert default_path([Path(os.path.relpath(tmp_path))], {"HOME": "/home/me"}).name == found.name


def test_two_that_bring_one_index_up_to_date_do_not_clash(tmp_path, looked_at):
    """The second begins while the first reads its files, and ends before it."""
    store, path = tmp_path / "store", tmp_path / "i.sqlite3"
    run_file(store / "a.jsonl", {1: 0.5, 2: 0.25})
    run_file(store / "b.jsonl", {1: 0.5, 2: 0.25}, run_id="cd" * 16)
    others = []

    def beside(_):
        if not others:
            others.append([])
            others[0] += looked_at(store, path=path)[1]

    with Index(path) as index:
        index.update(store, result_files(store, (".jsonl",)), read_result, beside)
        figures = index.figures(store, "device_time_s", everything)
        assert figures.values.tolist() == [[0.5, 0.5], [0.25, 0.25]]
        assert len(index.sources(store)) == 2
    assert others == [["a.jsonl", "b.jsonl"]]


def test_nothing_is_left_open(tmp_path):
    with Index(tmp_path / "i.sqlite3") as index:
        assert index.metrics() == []
    with pytest.raises(sqlite3.ProgrammingError):
        index.metrics()


def test_text_that_is_no_text_is_kept(tmp_path, looked_at):
    store = tmp_path / "store"
    odd = "lone \ud800 surrogate"
    store.mkdir()
    path = run_file(store / os.fsdecode(b"\xff.jsonl"), {1: 0.5}, driver=odd, run_id=odd, metric=odd)
    for _ in range(2):
        index, _ = looked_at(store)
        figures = index.figures(store, odd, everything)
        assert (figures.runs[0].driver, figures.runs[0].run_id, figures.runs[0].path) == (odd, odd, str(path))
        assert index.metrics() == [odd]
        assert index.sources(store)[0].path == str(path)
