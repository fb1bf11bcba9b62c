import json
import subprocess
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulemark import store
from joulemark.errors import ConfigurationError, JoulemarkError, UnreadableInput
from joulemark.records import Case, Conditions, Environment, Finding, Record, Value
from joulemark.store import RunWriter, find_runs, finished_case_ids, git_commit, new_path, new_run_id, read_run

SCHEMA = json.loads((Path(__file__).parents[1] / "docs/schema/sweep.schema.json").read_text())
ENVIRONMENT = Environment({"host": {"name": "a"}, "gpus": []}, {"timing": "host_clock"}, {"energy": "no sensor"})


def record(workload="lenet5", batch=1, outcome="ok", time_s=1e-3, **more):
    metrics = {
        "host_time_s": Value(time_s, "s", (time_s * 0.99, time_s * 1.01), 0.95, 9, "host_clock"),
        "power_w": Value(None, "W"),
    }
    return Record(
        case=Case(workload, "inference", "eager", "fp32", batch, "contiguous", "device", params={"beam": 4}),
        run_id="ab" * 16,
        outcome=outcome,
        environment_id=ENVIRONMENT.environment_id,
        metrics=metrics,
        samples={"host_time_s": [time_s] * 3},
        notes={"power_w": "no sensor"},
        findings=(Finding("unstable", "varies", "wait", True),),
        conditions=Conditions(1e9, 2e9, 1.1e9, 60.0, {"thermal": 0.5}, 9),
        window_utc=(1.0, 2.0),
        measured_windows_utc=((1.1, 1.2),),
        processes=({"host_time_s": time_s},),
        **more,
    )


def writer(path, environment=ENVIRONMENT):
    return RunWriter(path, "ab" * 16, environment, 1.7e9)


def written(path, *records, completed=True):
    with writer(path) as out:
        for one in records:
            out.write(one)
        if completed is not None:
            out.end(completed=completed, wall_s=10.0, measured_s=7.0, reason=None if completed else "interrupted")
    return path


def test_a_run_comes_back_as_it_was_written(tmp_path):
    first, second = record(), record(batch=8, outcome="flagged")
    run = read_run(written(tmp_path / "cpu" / "run.jsonl", first, second))
    assert run.records == (first, second)
    assert run.environments == {ENVIRONMENT.environment_id: ENVIRONMENT}
    assert (run.completed, run.wall_s, run.measured_s, run.reason) == (True, 10.0, 7.0, None)
    assert (run.problems, run.started_utc, run.run_id) == ((), 1.7e9, "ab" * 16)


def test_every_line_is_of_the_schema(tmp_path):
    path = written(
        tmp_path / "run.jsonl", record(), record(batch=8, outcome="failed", reason="killed"), completed=False
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["environment", "record", "record", "end"]
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for line in lines:
        validator.validate(line)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("record", {"outcome": "great"}),
        ("record", {"surplus": 1}),
        ("record", {"outcome": "failed", "reason": None}),
        ("end", {"wall_s": None}),
        ("environment", {"schema": "joulemark/sweep/2"}),
    ],
)
def test_the_schema_refuses_what_is_not_a_line(tmp_path, kind, change):
    path = written(tmp_path / "run.jsonl", record())
    line = next(line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == kind)
    assert not jsonschema.Draft202012Validator(SCHEMA).is_valid({**line, **change})


def test_nothing_is_created_before_the_first_record(tmp_path):
    with writer(tmp_path / "cpu" / "run.jsonl") as out:
        out.end(completed=True, wall_s=1.0, measured_s=0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_on_disk_when_write_returns(tmp_path):
    path = tmp_path / "run.jsonl"
    out = writer(path)
    out.write(record())
    assert len(read_run(path).records) == 1
    assert not read_run(path).completed
    out.close()


def test_a_torn_line_is_kept_and_the_next_starts_anew(tmp_path):
    path = written(tmp_path / "run.jsonl", record(), record(batch=2), completed=None)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with writer(path) as out:
        out.write(record(batch=4))
        out.end(completed=True, wall_s=1.0, measured_s=0.5)
    assert path.read_bytes().startswith(whole[:-40])
    run = read_run(path)
    assert [one.case.batch_size for one in run.records] == [1, 4]
    assert run.completed
    assert len(run.problems) == 1
    assert run.problems[0].startswith("line 3: not JSON")


def test_a_cut_last_line_is_named_and_the_rest_is_read(tmp_path):
    path = written(tmp_path / "run.jsonl", record(), record(batch=2), completed=None)
    path.write_bytes(path.read_bytes()[:-40])
    run = read_run(path)
    assert [one.case.batch_size for one in run.records] == [1]
    assert run.problems == ("line 3: cut off (the run was killed here)",)
    assert (run.completed, run.reason) == (False, "killed before its end")


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 4000))
def test_a_file_cut_anywhere_is_read_or_refused(tmp_path_factory, cut):
    path = written(tmp_path_factory.mktemp("cut") / "run.jsonl", record(), record(batch=2))
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole))])
    try:
        run = read_run(path)
    except UnreadableInput:
        assert b"\n" not in whole[:cut]
    else:
        assert len(run.records) <= 2


@settings(max_examples=60, deadline=None)
@given(line=st.binary(max_size=80))
def test_foreign_bytes_never_break_the_reader(tmp_path_factory, line):
    path = written(tmp_path_factory.mktemp("foreign") / "run.jsonl", record())
    path.write_bytes(path.read_bytes() + line)
    assert [one.case.batch_size for one in read_run(path).records] == [1]


def test_a_case_measured_again_counts_by_its_last_line(tmp_path):
    path = written(tmp_path / "run.jsonl", record(outcome="failed", reason="timeout"), record(batch=2), completed=False)
    written(path, record(time_s=2e-3))
    run = read_run(path)
    assert [(one.case.batch_size, one.outcome) for one in run.records] == [(2, "ok"), (1, "ok")]
    assert (run.wall_s, run.measured_s, run.completed) == (20.0, 14.0, True)
    assert path.read_text().count('"kind":"environment"') == 1


def test_records_of_two_devices_stand_under_an_environment_each(tmp_path):
    path = tmp_path / "a.jsonl"
    other = Environment({"device": 2})
    with writer(path) as out:
        out.write(record("a"), ENVIRONMENT)
        out.write(record("b"), other)
        out.write(record("c"), ENVIRONMENT)
    with writer(path, other) as out:
        out.write(record("d"), other)
        out.write(record("e"), ENVIRONMENT)
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["environment", "record", "environment", "record", "record", "record", "record"]
    assert list(read_run(path).environments) == [ENVIRONMENT.environment_id, other.environment_id]


def test_a_run_resumed_elsewhere_holds_both_environments(tmp_path):
    path = written(tmp_path / "run.jsonl", record())
    other = Environment({"host": {"name": "b"}})
    with writer(path, other) as out:
        out.write(record(batch=2))
    run = read_run(path)
    assert list(run.environments) == [ENVIRONMENT.environment_id, other.environment_id]
    assert not run.completed


def test_only_finished_cases_are_not_measured_again(tmp_path):
    outcomes = ("ok", "flagged", "oom", "unsupported", "failed")
    records = [record(batch=n, outcome=outcome, reason="why") for n, outcome in enumerate(outcomes, 1)]
    run = read_run(written(tmp_path / "run.jsonl", *records))
    assert finished_case_ids(run) == {one.case_id for one in records[:4]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("[]\n", "is not a result file"),
        ("hello\nworld\n", "and 1 more"),
        ('{"kind":"record","schema":"joulemark/sweep/2"}\n', "schema 'joulemark/sweep/2'"),
        ('{"kind":"record","schema":"other/1"}\n', "not a line of joulemark"),
        ("[" * 100_000, "is not a result file"),
    ],
)
def test_a_file_of_no_use_is_refused_by_name(tmp_path, content, says):
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(UnreadableInput, match=r"run\.jsonl") as caught:
        read_run(path)
    assert says in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UnreadableInput, match="No such file"):
        read_run(tmp_path / "none.jsonl")


def test_lines_of_a_newer_version_are_named_not_guessed(tmp_path):
    path = written(tmp_path / "run.jsonl", record())
    line = json.loads(path.read_text().splitlines()[1])
    with path.open("a") as file:
        file.write(json.dumps({**line, "schema": "joulemark/sweep/2"}) + "\n")
    run = read_run(path)
    assert len(run.records) == 1
    assert "joulemark/sweep/2" in run.problems[0]
    assert "update joulemark" in run.problems[0]


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": "great"},
        {"case": None},
        {"case": {"workload": 5}},
        {"case": {"workload": "a", "params": {"x": [1]}}},
        {"case": {"workload": "a", "batch_size": "8"}},
        {"metrics": {"host_time_s": {"value": "fast", "unit": "s"}}},
        {"metrics": {"host_time_s": {"value": 10**400, "unit": "s"}}},
        {"metrics": []},
        {"samples": {"host_time_s": ["a"]}},
        {"notes": {"power_w": 3}},
        {"findings": [{"code": 1}]},
        {"kind": "surprise"},
        {"case": {"workload": "a", "batch_size": 0}},
        {"metrics": {"host_time_s": {"value": 1.0, "unit": "s", "interval": [None, 1.0]}}},
        {"metrics": {"host_time_s": {"value": 1.0, "unit": "s", "interval": [0.5]}}},
        {"metrics": {"host_time_s": {"value": 1.0, "unit": "s", "confidence": "high"}}},
        {"metrics": {"host_time_s": {"value": 1.0, "unit": "s", "confidence": 2.0}}},
        {"metrics": {"host_time_s": {"value": 1.0, "unit": "s", "n": -1}}},
        {"metrics": {"host_time_s": {"value": 1e308, "unit": "s"}}},
        {"samples": {"host_time_s": [1e308]}},
        {"samples": None},
        {"window_utc": [1.0]},
        {"conditions": {"reasons": 1}},
        {"processes": [{"host_time_s": None}]},
        {"tables": None},
        {"tables": {"kernel_classes": [5]}},
        {"tables": {"kernel_classes": [{"class": "gemm", "uses_tensor_cores": True, "time_s": None}]}},
        {"tables": {"timeline": [{"busy_s": 1.0}]}},
        {"tables": {"levels": [{"tier": "gpm", "level": "sm_active_fraction", "value": 0.5}]}},
    ],
)
def test_a_line_of_wrong_types_is_a_problem_and_no_crash(tmp_path, change):
    path = written(tmp_path / "run.jsonl", record())
    line = json.loads(path.read_text().splitlines()[1])
    with path.open("a") as file:
        file.write(json.dumps({**line, **change}) + "\n")
    run = read_run(path)
    assert len(run.records) == 1
    assert run.problems[0].startswith("line 4: ")


def test_nan_is_not_accepted(tmp_path):
    path = written(tmp_path / "run.jsonl", record())
    path.write_text(path.read_text().replace('"value":0.001', '"value":NaN'))
    run = read_run(path)
    assert run.records == ()
    assert run.problems[-1] == "holds no record"


def test_a_full_disk_is_said_with_the_way_to_go_on(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    out = writer(path)
    out.write(record())
    real = store.os.write

    def full(fd, data):
        real(fd, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "write", full)
    with pytest.raises(JoulemarkError, match="No space left on device") as caught:
        out.write(record(batch=2))
    assert f"--bench-resume {path}" in str(caught.value)
    monkeypatch.undo()
    out.write(record(batch=4))
    out.close()
    assert [one.case.batch_size for one in read_run(path).records] == [1, 4]


def test_hostile_names_come_back_character_for_character(tmp_path):
    name = "org/model:v1|fp16 \x1b[31m\n\u202e\U0001f680" + "a" * 300
    one = record(workload=name)
    run = read_run(written(tmp_path / "run.jsonl", one))
    assert run.records == (one,)


def test_paths_are_made_of_gpu_time_and_run():
    path = new_path(Path("results"), "nvidia-h200", 1.7e9, "0123456789abcdef")
    assert path == Path("results/nvidia-h200/sweep-20231114T221320Z-012345.jsonl")
    assert new_path(Path("r"), "../../etc", 0.0, "a" * 32).parent == Path("r/etc")


def test_run_ids_are_random_hex():
    one, other = new_run_id(), new_run_id()
    assert one != other
    assert len(one) == 32
    assert int(one, 16) >= 0


def test_only_the_private_folder_hides_itself_from_git(tmp_path):
    written(tmp_path / ".joulemark" / "cpu" / "run.jsonl", record())
    written(tmp_path / "results" / "cpu" / "run.jsonl", record())
    assert "*" in (tmp_path / ".joulemark" / ".gitignore").read_text().splitlines()
    assert not (tmp_path / "results" / ".gitignore").exists()


def test_runs_are_found_newest_first_and_bad_files_named(tmp_path):
    old = tmp_path / "cpu" / "z.jsonl"
    with RunWriter(old, "c" * 32, ENVIRONMENT, 1.0) as out:
        out.write(record())
    new = written(tmp_path / "gpu" / "a.jsonl", record())
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "cut.jsonl.tmp").write_text("{")
    (tmp_path / "foreign.jsonl").write_text("{}\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    listing = find_runs(tmp_path)
    assert [run.path for run in listing.runs] == [str(new), str(old)]
    assert [line.split(" ")[0] for line in listing.unusable] == [
        str(tmp_path / "empty.jsonl"),
        str(tmp_path / "foreign.jsonl"),
    ]
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")}


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="there is no folder"):
        find_runs(tmp_path / "none")


def git(cwd, *args):
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid", *args],
        cwd=cwd,
        check=True,
        capture_output=True,
    )


@pytest.fixture
def outside(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def test_no_commit_without_a_repository_or_in_an_empty_one(outside, capfd):
    assert git_commit(outside) is None
    git(outside, "init", "-q")
    assert git_commit(outside) is None
    assert capfd.readouterr() == ("", "")


def test_no_commit_without_git(outside, monkeypatch, capfd):
    git(outside, "init", "-q")
    monkeypatch.setenv("PATH", str(outside))
    assert git_commit(outside) is None
    assert capfd.readouterr() == ("", "")


def test_a_detached_head_has_its_commit_and_says_whether_the_tree_is_dirty(outside):
    git(outside, "init", "-q")
    (outside / "a").write_text("a")
    git(outside, "add", ".")
    git(outside, "commit", "-qm", "one")
    git(outside, "checkout", "-q", "--detach")
    commit = git_commit(outside)
    assert commit is not None
    assert len(commit["hash"]) == 40
    assert commit["dirty"] is False
    (outside / "bench_new.py").write_text("")
    assert git_commit(outside) == {**commit, "dirty": True}


def test_records_written_together_are_on_disk_when_the_block_ends(tmp_path, monkeypatch):
    syncs = []
    monkeypatch.setattr("joulemark.store.os.fsync", lambda fd: syncs.append(fd))
    path = tmp_path / "r.jsonl"
    with writer(path) as out:
        out.write(record(batch=1))
        before = len(syncs)
        with out.together():
            for batch in (2, 4, 8):
                out.write(record(batch=batch))
            assert len(syncs) == before
            assert len(read_run(path).records) == 4  # another process sees them already
        assert len(syncs) == before + 1
        out.write(record(batch=16))
        assert len(syncs) == before + 2


def test_each_environment_of_a_cluster_stands_once_before_its_records(tmp_path):
    path = tmp_path / "r.jsonl"
    other = Environment({"driver": "other"})
    for _ in range(2):  # the second time the file is continued
        with writer(path) as out:
            for _ in range(2):
                out.write(record(batch=1), other)
                out.write(record(batch=2), ENVIRONMENT)
    kinds = [(one["kind"], one["environment_id"]) for one in map(json.loads, path.read_text().splitlines())]
    assert [one for kind, one in kinds if kind == "environment"] == [ENVIRONMENT.environment_id, other.environment_id]
    assert set(read_run(path).environments) == {ENVIRONMENT.environment_id, other.environment_id}


def test_documents_beside_runs_are_no_runs(tmp_path):
    run = tmp_path / "sweep-1.jsonl"
    with RunWriter(run, new_run_id(), ENVIRONMENT, 1.0) as out:
        out.write(record())
    for name, text in {
        "tandem.json": '{\n  "schema": "joulemark/tandem/1"\n}',
        "energy.json": '{"schema":"joulemark/energy/2"}',
        "sweep.json": '{"schema":"joulemark/sweep/2"}',
        "other.json": '{"schema":"theirs/1"}',
    }.items():
        (tmp_path / name).write_text(text)
    assert [path.name for path in store.result_files(tmp_path, (".json", ".jsonl"))] == [
        "other.json", "sweep-1.jsonl", "sweep.json",
    ]  # fmt: skip
    listing = find_runs(tmp_path, suffixes=(".json", ".jsonl"))
    assert len(listing.runs) == 1
    assert len(listing.unusable) == 2
