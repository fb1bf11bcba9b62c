import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from joulemark import __version__
from joulemark.cli import COMMANDS, main
from joulemark.records import Case, Environment, Record, Value
from joulemark.store import RunWriter

RUNS = Path(__file__).parent / "data" / "runs"
SCHEMAS = Path(__file__).parents[1] / "docs" / "schema"
UUID = "GPU-5b1f0c2e-0000-4a10-9000-0000000000a1"


def strict(text, schema):
    document = json.loads(text, parse_constant=pytest.fail)
    description = json.loads((SCHEMAS / f"{schema}.schema.json").read_text())
    jsonschema.Draft202012Validator(description).validate(document)
    return document


def run(capsys, *args):
    code = main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "run.jsonl"
    environment = Environment({"driver": None})
    with RunWriter(path, "ab" * 16, environment, 1.7e9) as out:
        for batch in (1, 2):
            figures = {"host_time_s": Value(1e-3 * batch, "s", (0.99e-3 * batch, 1.01e-3 * batch), n=9)}
            case = Case("lenet5", "inference", "eager", "fp32", batch)
            out.write(Record(case, "ab" * 16, "ok", environment.environment_id, metrics=figures))
        out.end(completed=True, wall_s=10.0, measured_s=7.0)
    return path


@pytest.fixture
def fake_gpus(tmp_path, monkeypatch):
    """Puts simulated GPUs of the given sensors in NVML's place."""

    def use(**scenario):
        path = tmp_path / "gpus.json"
        path.write_text(json.dumps({"driver": "580.65.06", **scenario}))
        monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(path))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return use


def gpu(**sensors):
    return {"name": "NVIDIA H200", "uuid": UUID, "pci": "00000000:1B:00.0", "power_mw": 75000, **sensors}


@pytest.mark.parametrize("name", sorted(path.name for path in SCHEMAS.glob("*.schema.json")))
def test_the_schemas_are_schemas(name):
    jsonschema.Draft202012Validator.check_schema(json.loads((SCHEMAS / name).read_text()))


@pytest.mark.parametrize("command", [[], *([module.__name__.rpartition(".")[2]] for module in COMMANDS)])
def test_help_teaches_by_example(capsys, command):
    code, out, err = run(capsys, *command, "--help")
    assert (code, err) == (0, "")
    assert "example" in out
    assert f"joulemark {command[0] if command else 'env'}" in out


def test_the_version_is_told(capsys):
    assert run(capsys, "--version")[:2] == (0, f"joulemark {__version__}\n")


@pytest.mark.parametrize("args", [[], ["fly"], ["report"], ["compare", "a"], ["compare", "a", "b", "--spread", "much"]])
def test_wrong_use_exits_2_with_the_usage(capsys, args):
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert "usage: joulemark" in err


def test_it_runs_as_a_module_of_its_interpreter():
    done = subprocess.run([sys.executable, "-m", "joulemark", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"joulemark {__version__}\n"
    done = subprocess.run([sys.executable, "-m", "joulemark", "fly"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: joulemark ")


def test_help_is_quick_and_imports_nothing_heavy():
    script = (
        "import sys; from joulemark.cli import main; code = main(['--help'])\n"
        "heavy = {'torch', 'numpy', 'scipy', 'pytest', 'pynvml', 'tabulate', 'msgspec'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [["env", "--json"], ["report", "RUN"], ["compare", "RUN", "RUN"]])
def test_no_command_imports_torch(stored, command):
    args = [str(stored) if word == "RUN" else word for word in command]
    script = f"import sys; from joulemark.cli import main; main({args!r}); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_report_shows_a_table(capsys, stored, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    code, out, err = run(capsys, "report", stored)
    assert (code, err) == (0, "")
    assert "1 ms ±1.0%" in out
    assert "2 cases: 2 ok; measured 7.0 s of 10.0 s (70%)" in out


def test_report_in_json_is_one_document(capsys, stored):
    code, out, err = run(capsys, "report", stored, RUNS / "baseline.json", "--format", "json")
    assert (code, err) == (0, "")
    assert [one["source"] for one in strict(out, "report")["runs"]] == ["joulemark", "pytest-benchmark"]


def test_report_of_a_folder_names_what_it_leaves_out(capsys):
    before = {path: path.read_bytes() for path in (RUNS / "store").iterdir()}
    code, out, err = run(capsys, "report", RUNS / "store")
    assert code == 0
    assert out.index("0004_good") < out.index("0001_good")
    assert err.count("joulemark: left out: ") == 4
    assert before == {path: path.read_bytes() for path in (RUNS / "store").iterdir()}


@pytest.mark.parametrize("name", ["r.md", "r.csv", "r.json"])
def test_report_writes_a_file_by_its_suffix(capsys, stored, tmp_path, name):
    code, out, err = run(capsys, "report", stored, "--out", tmp_path / "deep" / name)
    assert (code, out) == (0, "")
    assert f"wrote {tmp_path / 'deep' / name}" in err
    assert "lenet5" in (tmp_path / "deep" / name).read_text()


def test_the_format_may_be_chosen_against_the_suffix(capsys, stored, tmp_path):
    assert run(capsys, "report", stored, "--format", "csv", "--out", tmp_path / "r.txt")[0] == 0
    assert (tmp_path / "r.txt").read_text().startswith("run_id,")


ATTRIBUTION = str(RUNS.parents[2] / "results" / "nvidia-h200" / "attribution-resnet50.json")
TANDEM = str(RUNS.parents[2] / "results" / "nvidia-h200" / "tandem.json")
CALIBRATION = str(RUNS.parents[2] / "results" / "calibration" / "nvidia-h200.json")
RUN_OF_OTHERS = str(RUNS / "baseline.json")
BAD_INPUTS = [
    (["report", "{tmp}/none.jsonl"], "No such file"),
    (["report", "{tmp}/empty.jsonl"], "is empty"),
    (["report", "{tmp}/newer.jsonl"], "joulemark/sweep/2"),
    (["report", "{tmp}/nothing"], "no usable result"),
    (["report", ATTRIBUTION], "only what joulemark attribution wrote: give runs beside it"),
    (["report", "{run}", "--out", "{tmp}/r.pdf"], "no report format has this suffix"),
    (["report", "{run}", "--out", "{tmp}/run.jsonl"], "no report format"),
    (["report", "{run}", "--out", "{tmp}/" + 300 * "a" + ".md"], "File name too long"),
    (["compare", "{run}", "{tmp}/empty.jsonl"], "is empty"),
    (["compare", "{run}", "{run}", "--metrics", "speed"], "the metric 'speed' is unknown"),
    (["attribution", "{tmp}/none"], "no whole recording (No such file or directory)"),
    (["attribution", "{tmp}/nothing"], "no attribution stands in"),
    (["attribution", "{run}"], "run.jsonl: measure with pytest --bench --bench-collect timing,power,attribution"),
    (["attribution", ATTRIBUTION, ATTRIBUTION, "--json"], "--json takes one attribution, and 2 were found: name one"),
    (["attribution", TANDEM], "(its schema is 'joulemark/tandem/1')"),
    (["energy", "--calibration", "{tmp}/none"], "cannot be read (No such file or directory): run joulemark calibrate"),
    (["energy", RUN_OF_OTHERS, "--calibration", CALIBRATION], "holds no measured workloads ('schema' is missing)"),
    (["calibrate", "--refit", "{tmp}/none"], "(No such file or directory): give the .jsonl that joulemark calibrate"),
]


@pytest.mark.parametrize(("args", "says"), BAD_INPUTS)
def test_bad_input_is_one_line_and_exit_2(capsys, stored, tmp_path, args, says):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "newer.jsonl").write_text('{"kind":"record","schema":"joulemark/sweep/2"}\n')
    (tmp_path / "nothing").mkdir()
    code, out, err = run(capsys, *(arg.format(tmp=tmp_path, run=stored) for arg in args))
    assert (code, out) == (2, "")
    assert err.startswith("joulemark: error: ")
    assert len(err.splitlines()) == 1
    assert says in err


@pytest.mark.parametrize(
    ("base", "new", "options", "expected"),
    [
        ("baseline", "baseline", [], 0),
        ("baseline", "candidate", [], 1),
        ("baseline", "disjoint", [], 3),
        ("candidate", "baseline", [], 0),
        ("candidate", "baseline", ["--fail-on-missing"], 1),
        ("baseline", "candidate", ["--threshold", "40%"], 0),
        ("baseline", "candidate", ["--spread", "0.3"], 3),
        ("gpu_h100", "gpu_a100", [], 3),
    ],
)
def test_compare_exits_by_its_verdict(capsys, base, new, options, expected):
    args = ["compare", RUNS / f"{base}.json", RUNS / f"{new}.json", *options]
    code, out, err = run(capsys, *args)
    assert (code, err) == (expected, "")
    assert out.startswith("verdict: ")
    assert f"(exit code {expected}: " in out.split(";")[0]
    code, out, err = run(capsys, *args, "--json")
    assert code == expected
    document = strict(out, "compare")
    assert all(line.startswith("joulemark: ") for line in err.splitlines())
    assert document["spread"]["source"] == "assumed"


@pytest.mark.parametrize("command", [one.__name__.rpartition(".")[2] for one in COMMANDS])
def test_help_teaches_by_an_example_and_says_what_exit_codes_mean(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert "\nexample:\n  " in out
    assert f"joulemark {command}" in out[out.index("\nexample:") :]
    assert re.search(r"\nexit codes: 0 .+, 2 ", out)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("env", "--chekc"), "joulemark env: error: unrecognized arguments: --chekc (did you mean --check?); "),
        (("env", "more"), "joulemark env: error: unrecognized arguments: more; joulemark env --help shows an example"),
        (("compare", "a.jsonl"), "required: NEW; joulemark compare --help shows an example"),
        (("compar", "a", "b"), "; joulemark --help shows an example"),
        ((), "required: COMMAND; joulemark --help shows an example"),
    ],
)
def test_wrong_arguments_lead_to_the_help_of_their_command(capsys, args, says):
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert says in err


def test_compare_in_markdown_is_for_a_jobs_page(capsys, stored):
    code, out, err = run(capsys, "compare", stored, stored, "--format", "markdown")
    assert (code, err) == (0, "")
    assert out.startswith("**verdict: same (exit code 0: nothing is worse); 0 of ")
    assert out.splitlines()[2].startswith("### ")
    assert "| :--- |" in out


def test_compare_looks_at_the_metrics_that_are_named(capsys, stored):
    code, out, _ = run(capsys, "compare", stored, stored, "--json", "--metrics", "host_time_s, warmup_s")
    assert code == 0
    assert {row["metric"] for row in strict(out, "compare")["rows"]} == {"host_time_s"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), 1),
        (("--threshold", "40%"), 0),  # 30 % slower, and only more than 40 % would have to be seen
        (("--spread", "0.2"), 3),
        (("--min-effect", "35%"), 3),
    ],
)
def test_compare_takes_what_counts_as_options(capsys, options, expected):
    args = ("compare", RUNS / "baseline.json", RUNS / "candidate.json", *options)
    assert run(capsys, *args)[0] == expected


@pytest.mark.parametrize(("form", "part"), [("markdown", "| REGRESSED |"), ("csv", ",regressed,True,assumed,1..1,")])
def test_compare_has_formats(capsys, form, part):
    code, out, _ = run(capsys, "compare", RUNS / "baseline.json", RUNS / "candidate.json", "--format", form)
    assert code == 1
    assert part in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("aa",), "aa got no results"),
        (("aa", "gone.jsonl"), "cannot read gone.jsonl"),
        (("aa", "--", "bench_sort.py", "--bench-quick"), "give --processes 24 too, to measure"),
        (("aa", RUNS / "baseline.json"), "nothing to judge the gate on"),
        (("aa", RUNS / "baseline.json", "--out", RUNS / "baseline.json"), "is not a joulemark document of aa"),
        (("aa", RUNS / "baseline.json", "--out", "aa.jsonl"), "ends in .json"),
        (("aa", "--processes", "0"), "'0' is not a positive number; give a whole one, such as 3"),
        (("aa", "--processes", "5", "--", "bench_sort.py"), "--processes 5 are too few to judge the gate on: give 6"),
        (("aa", RUNS / "baseline.json", "--metric", "power_w"), "not judged on 'power_w'"),
        (("ab", "--old", "nowhere"), "--new"),
        (("ab", "--old", "nowhere", "--new", "nowhere"), "nowhere is neither a Python interpreter"),
        (("ab", "--old", "x", "--new", "y", "--metrics", "nothing"), "'nothing' is unknown"),
        (("ab", "--old", "x", "--new", "y", "--spread", "3"), "'3' is not a fraction"),
        (("compare", RUNS / "baseline.json", RUNS / "candidate.json", "--min-effect", "2"), "'2' is not a fraction"),
        (("compare", RUNS / "baseline.json", RUNS / "candidate.json", "--threshold", "nan"), "'nan' is not a fraction"),
        (("history", "--false-alarms=-1%"), "'-1%' is not a fraction"),
    ],
)
def test_wrong_use_of_verdicts_is_one_line(capsys, args, says):
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_env_without_a_gpu_says_why_and_is_no_failure(capsys, fake_gpus):
    fake_gpus(init_error=12)
    code, out, err = run(capsys, "env")
    assert (code, err) == (0, "")
    assert "gpus      none: NVML did not start" in out
    document = strict(run(capsys, "env", "--json")[1], "env")
    assert document["problem"]["cause"] == "library_not_found"
    assert document["tiers"]["timing"] == "host_clock"
    assert document["check"] is None


def test_env_check_refuses_a_machine_without_a_gpu(capsys, fake_gpus):
    fake_gpus(init_error=12)
    code, out, err = run(capsys, "env", "--check", "--json")
    assert code == 1
    assert strict(out, "env")["check"]["passed"] is False
    assert "refused: no GPU" in err


def test_env_shows_a_gpu_and_its_state(capsys, fake_gpus):
    fake_gpus(gpus=[gpu(temp=41, limit_mw=700000, energy={"counter_from_power": True})])
    code, out, _ = run(capsys, "env")
    assert code == 0
    assert f"cuda:0    NVIDIA H200 {UUID}" in out
    assert "power limit 700 W" in out
    assert "41 °C" in out
    assert "nvml_energy_counter" in out
    document = strict(run(capsys, "env", "--json")[1], "env")
    assert document["gpus"][0]["state"]["temperature_c"] == 41.0


@pytest.mark.parametrize(
    ("sensors", "says"),
    [
        ({"util": 50}, "busy: utilization 50%"),
        ({"throttle": 0x40}, "throttled: thermal"),
        ({"util": 0, "processes": [4242]}, "shared: 1 other process(es) hold a context (pid 4242)"),
        ({"util": 0, "mem_used": 20 * 2**30}, "shared: 20 GiB of its memory in use"),
        ({"util": 0, "temp": 87}, "hot: 87 °C, 3 K before it slows down"),
        ({"util": 0, "remap_pending": True}, "faulty memory: bad rows wait to be replaced"),
        ({"util": 0, "uncorrected_errors": 2}, "faulty memory: 2 uncorrected errors"),
        ({"lost_after_calls": 60}, ""),
    ],
)
def test_env_check_refuses_a_gpu_that_is_not_fit(capsys, fake_gpus, sensors, says):
    fake_gpus(gpus=[gpu(**sensors)])
    code, out, err = run(capsys, "env", "--check", "--json")
    assert code == 1
    assert strict(out, "env")["check"]["passed"] is False
    assert says in err


def test_env_check_passes_an_idle_gpu(capsys, fake_gpus):
    fake_gpus(gpus=[gpu(util=0)])
    code, out, _ = run(capsys, "env", "--check", "--json")
    assert code == 0
    assert strict(out, "env")["check"]["passed"] is True


def test_env_check_notes_what_moves_figures(capsys, fake_gpus):
    fake_gpus(gpus=[gpu(util=0, persistence=False)])
    code, out, err = run(capsys, "env", "--check", "--json")
    assert code == 0
    (note,) = strict(out, "env")["check"]["notes"]
    assert err == f"joulemark: note: {note}\n"
    assert "persistence mode is off" in note


def test_env_check_refuses_a_shared_board(capsys, fake_gpus):
    mig = [{"name": "NVIDIA H200 MIG 1g", "uuid": f"MIG-{n}"} for n in (1, 2)]
    fake_gpus(gpus=[gpu(util=0, mig=mig)])
    code, _, err = run(capsys, "env", "--check", "--json")
    assert code == 1
    assert "2 MIG instances draw on one board's power and clocks" in err


def test_env_hides_what_cuda_hides(capsys, fake_gpus, monkeypatch):
    fake_gpus(gpus=[gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = run(capsys, "env", "--check")
    assert code == 1
    assert f"hidden    NVIDIA H200 {UUID}" in out
    assert "no GPU visible" in err


@pytest.fixture
def traces(tmp_path):
    """A trace of one launch and its kernel, and an empty file."""
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 30, "pid": 1, "tid": 1},
        {
            "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 5, "dur": 5, "pid": 1, "tid": 1,
            "args": {"correlation": 7},
        },
        {
            "ph": "X", "cat": "kernel", "name": "gemm", "ts": 20, "dur": 50, "pid": 0, "tid": 7,
            "args": {"correlation": 7, "device": 0, "stream": 7},
        },
    ]  # fmt: skip
    (tmp_path / "good.json").write_text(json.dumps({"traceEvents": events}))
    (tmp_path / "empty.json").touch()
    return tmp_path / "good.json", tmp_path / "empty.json"


def test_trace_shows_where_the_time_went(capsys, traces):
    code, out, err = run(capsys, "trace", traces[0])
    assert (code, err) == (0, "")
    assert "50 µs" in out
    assert "aten::mm" in out


def test_trace_in_json_names_the_file_that_cannot_be_read(capsys, traces):
    code, out, err = run(capsys, "trace", *traces, "--json")
    assert code == 2
    document = json.loads(out, parse_constant=pytest.fail)
    assert document["schema"].startswith("joulemark/trace/")
    assert [bool(one["error"]) for one in document["files"]] == [False, True]
    assert err.startswith("joulemark: error: ")
    assert len(err.splitlines()) == 1


def test_trace_compares_two(capsys, traces):
    code, out, err = run(capsys, "trace", "--diff", traces[0], traces[0])
    assert (code, err) == (0, "")
    assert "aten::mm" in out
    assert json.loads(run(capsys, "trace", "--diff", traces[0], traces[0], "--json")[1])["complete"] is True


@pytest.mark.parametrize("args", [[], ["a.json", "--diff", "b.json", "c.json"]])
def test_trace_takes_files_or_a_diff(capsys, args):
    code, out, err = run(capsys, "trace", *args)
    assert (code, out) == (2, "")
    assert "--diff A B" in err


def test_a_reader_that_stops_early_is_no_error(stored):
    program = [sys.executable, "-c", "import sys; from joulemark.cli import main; sys.exit(main(sys.argv[1:]))"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*program, "report", stored], stdout=write, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_output_survives_a_narrow_encoding(stored):
    program = [sys.executable, "-c", "import sys; from joulemark.cli import main; sys.exit(main(sys.argv[1:]))"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "120"}
    done = subprocess.run([*program, "report", stored], env=env, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"1 ms \\xb11.0%" in done.stdout


def test_a_closed_output_is_one_clear_line(stored, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["report", str(stored)]) == 2
    assert capsys.readouterr().err == (
        "joulemark: error: standard output is closed: leave it open, or redirect it to a file\n"
    )


def test_messages_stay_out_of_the_output_where_stderr_is_closed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["report", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_is_one_clear_line(stored):
    program = [sys.executable, "-c", "import sys; from joulemark.cli import main; sys.exit(main())"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*program, "report", stored], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr == (
        "joulemark: error: the output cannot be written (No space left on device): choose another place\n"
    )
