"""What merging costs in new processes: who gets ready and has the GPU when, what is kept, and the whole on a CPU."""

from __future__ import annotations

import json
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "merged_restarts.py"
RESTARTS = runpy.run_path(str(SCRIPT))
CHILD = runpy.run_path(str(ROOT / "tests" / "gpu" / "merged_restart.py"))
CASES = [RESTARTS["Case"](name, 32) for name in ("unet", "vgg16")]
GLOBALS = RESTARTS["Turns"].run.__globals__


def process(merge_s=30.0, **more):
    facts = {"cached": False, "variant": "graph", "captured": "graph", "problems": {}, "missing": {}}
    figures = {"first_call_s": 0.1, "call_s": 0.02, "relative_error": 1e-3, "peak_bytes": 1}
    return {"merge_s": merge_s, "spent_s": {"tracing": 1.0, "judging": 2.0}, **facts, **figures, **more}


def restarted(**more):
    return process(**{"merge_s": 5.0, "cached": True, "again": process(0.5, cached=True), **more})


class Clock:
    """Time passes where somebody waits."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += max(seconds, 0.5)


class Played:
    """A process of a stand-in: ready some time after it was begun, and at work for some time."""

    def __init__(self, clock, told, name, ready_s=20.0, works_s=30.0, found=None, why=""):
        self.clock, self.told_to, self.name, self.found = clock, told, name, found
        self.ready_at, self.works_s, self.over_at, self.why = clock.now + ready_s, works_s, None, why
        self.alone = False
        self.told_to.append(("begun", name, clock.now))

    @property
    def ready(self):
        return self.clock.now >= self.ready_at

    @property
    def over(self):
        return self.over_at is not None and self.clock.now >= self.over_at and (self.alone or bool(self.why))

    def go(self):
        self.told_to.append(("goes", self.name, self.clock.now))
        self.over_at = min(self.over_at or 1e9, max(self.clock.now, self.ready_at) + self.works_s)

    def quiet(self):
        self.alone = True
        self.told_to.append(("quiet", self.name, self.clock.now))

    def end(self, why=""):
        self.why = self.why or why
        if not self.over:
            self.told_to.append(("ended", self.name, self.clock.now))
        self.over_at = min(self.over_at or 1e9, self.clock.now)

    def told(self):
        return CHILD["nothing"](self.why) if self.why or self.found is None else self.found


@pytest.fixture
def turns(monkeypatch):
    """Runs two cases with processes of a stand-in; what these were told, and what was kept."""
    clock = Clock()
    monkeypatch.setitem(GLOBALS, "time", clock)

    def run(limit=1000.0, profile=False, cases=CASES, **processes):
        told, kept = [], {}

        def begin(case, role):
            found = {"first": process(), "restarted": restarted(), "profiled": CHILD["nothing"]("a profile")}[role]
            return Played(clock, told, f"{case.name} {role}", **{"found": found, **processes.get(role, {})})

        one = RESTARTS["Turns"](
            cases, begin, lambda case, found: kept.update({case.name: found}), 55.0, clock.now + limit, profile
        )
        one.run()
        return told, kept, one

    return run


def when(told, what, name):
    return next(at for did, one, at in told if (did, one) == (what, name))


def test_the_next_processes_get_ready_while_a_first_one_merges_and_never_beside_a_second(turns):
    told, kept, _ = turns()
    assert [name for did, name, _ in told if did == "goes"] == [
        f"{network}-b32 {role}" for network in ("unet", "vgg16") for role in ("first", "restarted")
    ]
    goes = when(told, "goes", "unet-b32 first")
    for later in ("unet-b32 restarted", "vgg16-b32 first"):
        assert when(told, "begun", later) == goes
    # A second one has the machine for itself: whoever was begun is ready by then.
    assert when(told, "goes", "unet-b32 restarted") >= goes + 30.0
    assert [kept[name]["restarted"]["merge_s"] for name in ("unet-b32", "vgg16-b32")] == [5.0, 5.0]
    assert kept["unet-b32"]["took_s"] >= 80.0


def test_a_second_one_waits_until_the_next_first_one_is_ready_and_so_do_calls_of_the_first(turns):
    told, _, _ = turns(first={"works_s": 1.0}, restarted={"ready_s": 5.0})
    ready = when(told, "begun", "vgg16-b32 first") + 20.0
    assert when(told, "quiet", "unet-b32 first") >= ready
    assert when(told, "goes", "unet-b32 restarted") >= ready
    assert when(told, "quiet", "unet-b32 restarted") == when(told, "goes", "unet-b32 restarted")


def test_a_first_one_that_dies_early_is_not_waited_for(turns):
    told, kept, _ = turns(first={"works_s": 1.0, "why": "it died"}, restarted={"ready_s": 1e6})
    assert kept["unet-b32"]["first"]["missing"]["all"] == "it died"
    assert when(told, "ended", "unet-b32 restarted") <= when(told, "goes", "unet-b32 first") + 2.0


def test_with_a_profile_a_third_one_merges_from_the_disk(turns):
    told, kept, _ = turns(profile=True)
    assert [name for did, name, _ in told if did == "goes"][:3] == [
        f"unet-b32 {role}" for role in ("first", "restarted", "profiled")
    ]
    assert kept["unet-b32"]["profiled"]["missing"]["all"] == "a profile"


def test_a_process_that_hangs_costs_its_case_alone(turns):
    told, kept, _ = turns(first={"works_s": 1e6})
    assert "did not end within 155 s" in kept["unet-b32"]["first"]["missing"]["all"]
    assert kept["unet-b32"]["restarted"]["merge_s"] is None
    assert kept["unet-b32"]["restarted"]["missing"]["all"] == "the first process has merged nothing"
    assert ("ended", "unet-b32 restarted") in [(did, name) for did, name, _ in told]
    assert "vgg16-b32" in kept
    assert "new process" not in RESTARTS["problem_of"](kept["unet-b32"])


def test_a_process_that_does_not_get_ready_is_ended(turns):
    _, kept, _ = turns(restarted={"ready_s": 1e6})
    assert kept["unet-b32"]["first"]["merge_s"] == 30.0
    assert "not ready within 150 s" in kept["unet-b32"]["restarted"]["missing"]["all"]
    assert RESTARTS["lacks_figures"](kept["unet-b32"])


def test_no_case_begins_without_time_and_what_time_cuts_is_not_kept(turns):
    assert turns(limit=95.0)[:2] == ([], {})
    told, kept, _ = turns(limit=180.0)
    assert list(kept) == ["unet-b32"]
    assert "vgg16-b32 first" not in [name for _, name, _ in told]  # nobody gets ready in vain
    _, kept, left = turns(limit=150.0, first={"works_s": 140.0})
    assert kept == {}
    assert [one.name for one in left.waiting] == ["vgg16-b32"]


MEASURED = {
    "at": "2026-12-01T03:07:58+00:00",
    "joulemark": "0.1.0",
    "commit": "af6bedb5b327",
    "dirty": False,
    "merged_code": "d5470df184db",
    "missing": {},
}


def found(first=None, second=None, **measured):
    known = {**MEASURED, **measured}
    return {"first": first or process(), "restarted": second or restarted(), "took_s": 80.0, "measured": known}


def test_cases_that_lack_figures_come_last_and_findings_stay():
    nothing = CHILD["nothing"]("it died")
    done = {
        "unet-b32": found(nothing, nothing),
        "unet-b128": found(second=restarted(cached=False, again={"merge_s": None, "missing": {"all": "no"}})),
        "vgg16-b32": found(second=restarted(again={"merge_s": None, "missing": {"all": "no"}})),
    }
    every = [RESTARTS["Case"](name, batch) for batch in (32, 128) for name in ("unet", "vgg16", "resnet50")]
    left = [one.name for one in RESTARTS["left_of"](every, done)]
    assert left == ["resnet50-b32", "vgg16-b128", "resnet50-b128", "unet-b32", "vgg16-b32"]


def test_a_plan_that_is_not_from_the_disk_is_never_told_as_one():
    again = process(0.5, cached=False)
    document = {
        "gpu": "G",
        "software": {"torch": "2"},
        "budget_s": 55.0,
        "tiny": False,
        "cases": {
            "unet-b32": found(),
            "vgg16-b32": found(second=restarted(merge_s=31.0, cached=False, again=again)),
            "vgg16-b128": found(second=CHILD["nothing"]("it died")),
        },
    }
    table = RESTARTS["table_of"](document)
    parts, call = "judging 2 s, tracing 1 s", "20 ms, 1.00 ×"
    assert table.rows == (
        ("unet-b32", "30 s", "5 s", "500 ms", "100 ms", "20 ms, 1.00 ×", "graph", parts),
        ("vgg16-b32", "30 s", "not from the disk: 31 s", "not from the disk: 500 ms", "100 ms", call, "graph", parts),
        ("vgg16-b128", "30 s", "–", "–", "–", "–", "–", "–"),
    )
    assert "From the disk, 1 cases: median 5 s, most 5 s." in table.notes
    assert "vgg16-b32: new process: its plan is not from the disk" in table.notes
    assert "vgg16-b128: new process: it died" in table.notes


def test_calls_with_a_plan_from_the_disk_are_told_beside_those_of_the_process_that_measured_it():
    cases = {
        "unet-b32": found(second=restarted(call_s=0.021)),
        "vgg16-b32": found(second=restarted(call_s=0.026)),
        "resnet50-b32": found(second=restarted(call_s=0.02)),
        "deepcam-b32": found(second=restarted(call_s=0.2, cached=False)),  # another plan, which tells nothing
        "drn_26-b32": found(second=restarted(call_s=None, missing={"call_s": "OutOfMemoryError: none left"})),
    }
    assert RESTARTS["call_of"](cases["unet-b32"]) == "21 ms, 1.05 ×"
    assert RESTARTS["call_of"](cases["drn_26-b32"]) == "–"
    assert RESTARTS["call_of"](found(process(call_s=None))) == "20 ms"
    assert RESTARTS["calls_note"](cases) == [
        "Calls with a plan from the disk over the first process's, 3 cases: median 1.05 ×, largest 1.30 × (vgg16-b32)."
    ]
    assert RESTARTS["calls_note"]({"drn_26-b32": cases["drn_26-b32"]}) == []


def test_steady_calls_are_many_of_a_short_one_and_few_of_a_long_one():
    asked = []
    took = CHILD["call_seconds"](lambda: asked.append(time.sleep(2e-3)), "cpu")
    assert 2e-3 <= took < 20e-3
    assert len(asked) > 40
    asked.clear()
    begin = time.perf_counter()
    assert CHILD["call_seconds"](lambda: asked.append(time.sleep(0.2)), "cpu") >= 0.2
    assert len(asked) == 5
    assert time.perf_counter() - begin < 2.0


def test_the_first_call_is_none_of_the_steady_ones_and_calls_that_fail_cost_their_figure_alone(monkeypatch):
    model, x = torch.nn.Identity(), torch.ones(2, 3)
    merged = SimpleNamespace(**dict.fromkeys(CHILD["FACTS"]))
    did = []

    class Merged:
        def __getattr__(self, name):
            return getattr(merged, name)

        def __call__(self, x):
            did.append("call")
            if "quiet" in did:
                raise RuntimeError("no memory is left")
            time.sleep(0.05)
            return x

    monkeypatch.setitem(CHILD["measured"].__globals__, "merged_in", lambda *_: Merged())
    beside = CHILD["Spent"]()
    found = CHILD["measured"](model, x, "cpu", 1.0, beside, lambda: did.append("quiet"))
    assert did == ["call", "quiet", "call"]
    assert beside.seconds.keys() == {"waiting", "calls", "checking"}
    assert found["first_call_s"] >= 0.05
    assert (found["call_s"], found["relative_error"]) == (None, 0.0)
    assert found["missing"]["call_s"] == "RuntimeError: no memory is left"


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"commit": "f76d7812aaaa"}, "commit f76d7812; merged d5470df1"),
        ({"dirty": True}, "commit af6bedb5, changed; merged d5470df1"),
        ({"merged_code": "0123456789"}, "commit af6bedb5; merged 01234567"),
        ({"commit": None}, "without git; merged d5470df1"),
    ],
)
def test_cases_of_several_states_of_the_code_are_told_apart(other, told):
    later = {"at": "2026-12-02T03:07:58+00:00"}
    alike = {"unet-b32": found(), "vgg16-b32": found(**later)}
    assert RESTARTS["code_notes"](alike) == []
    assert RESTARTS["code_notes"]({}) == []
    document = {"gpu": "G", "software": {"torch": "2"}, "budget_s": 55.0, "tiny": False}
    table = RESTARTS["table_of"]({**document, "cases": {**alike, "deepcam-b32": found(**later, **other)}})
    assert f"Measured 2026-12-02 by joulemark 0.1.0 ({told}): deepcam-b32." in table.notes
    known = "by joulemark 0.1.0 (commit af6bedb5; merged d5470df1)"
    assert f"Measured 2026-12-01 {known}: unet-b32." in table.notes
    assert f"Measured 2026-12-02 {known}: vgg16-b32." in table.notes


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"relative_error": 0.5}, "new process: its output is wrong or unknown: off by 0.5"),
        ({"relative_error": None, "missing": {"relative_error": "not finite"}}, "wrong or unknown: not finite"),
        ({"call_s": None, "missing": {"call_s": "no memory"}}, "new process: no seconds of a call: no memory"),
        ({"again": {"merge_s": None, "missing": {"all": "no memory"}}}, "same process again: no memory"),
        ({"again": process(cached=False)}, "same process again: its plan is not from the disk"),
    ],
)
def test_what_is_not_as_it_should_be_is_told(more, why):
    assert RESTARTS["problem_of"](found()) is None
    assert RESTARTS["problem_of"](found(second=restarted(**more))).endswith(why)


def test_a_file_of_something_else_is_not_gone_on_with(tmp_path):
    facts = {"gpu": "G", "budget_s": 55.0, "tiny": False, "software": {"torch": "2.11.0"}}
    path = tmp_path / "out.json"
    document = RESTARTS["document_in"](path, facts)
    assert document == {"schema": RESTARTS["SCHEMA"], **facts, "cases": {}}
    path.write_text(json.dumps(document))
    assert RESTARTS["document_in"](path, facts) == document
    error = GLOBALS["ConfigurationError"]
    with pytest.raises(error, match=r"was begun with budget_s 55\.0, now 5\.0"):
        RESTARTS["document_in"](path, {**facts, "budget_s": 5.0})
    half = ({"cases": []}, {"cases": {"unet-b32": {}}}, {"cases": {"unet-b32": {"first": process(), "restarted": {}}}})
    cut = [json.dumps({**document, **one}) for one in half]
    for text in (
        "{",
        "[]",
        "[" * 100_000,
        '{"schema": "joulemark/merged-outputs/1"}',
        json.dumps({**document, "schema": "joulemark/merged-restarts/1"}),  # it knows nothing of calls
        *cut,
        json.dumps({"schema": document["schema"]}),
    ):
        path.write_text(text)
        with pytest.raises(error, match="written"):
            RESTARTS["read"](path)


@pytest.mark.parametrize(
    "words", [("--networks", "nonesuch"), ("--networks", ""), ("--batches", "0"), ("--batches", ""), ("--show",)]
)
def test_wrong_use_is_told(words, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        RESTARTS["main"]([str(tmp_path / "out.json"), "--device", "cpu", *words])
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err


def test_what_is_named_twice_is_measured_once(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setitem(GLOBALS, "measure_all", lambda options, cases, *_: asked.extend(one.name for one in cases))
    words = ("--networks", "unet,unet", "--batches", "2 1 2", "--device", "cpu", "--tiny")
    assert RESTARTS["main"]([str(tmp_path / "out.json"), *words]) == 3
    assert asked == ["unet-b2", "unet-b1"]


def test_cases_are_named_one_by_one_in_their_order(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setitem(GLOBALS, "measure_all", lambda options, cases, *_: asked.extend(one.name for one in cases))
    out = [str(tmp_path / "out.json"), "--device", "cpu", "--tiny"]
    assert RESTARTS["main"]([*out, "--cases", "deepcam-b128, unet-b2,deepcam-b128"]) == 3
    assert asked == ["deepcam-b128", "unet-b2"]
    asked.clear()
    assert RESTARTS["main"](out) == 3
    assert (len(asked), asked[0], asked[-1]) == (22, "resnet50-b32", "unet-b128")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--cases", "unet-b128,nonesuch-b1"), "nonesuch"),
        (("--cases", "unet-b128,unet"), "'unet' is no case"),
        (("--cases", "unet-b0"), "'unet-b0' is no case"),
        (("--cases", ""), "'' is no case"),
        (("--cases", "unet-b1", "--networks", "unet"), "leave out --networks and --batches"),
        (("--cases", "unet-b1", "--batches", "32"), "leave out --networks and --batches"),
    ],
)
def test_wrong_cases_are_told(words, why, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        RESTARTS["main"]([str(tmp_path / "out.json"), "--device", "cpu", "--tiny", *words])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def child_of(tmp_path, script, monkeypatch):
    path = tmp_path / "script.py"
    path.write_text(script)
    monkeypatch.setitem(GLOBALS, "SCRIPT", path)
    return RESTARTS["Children"](tmp_path, ["--tiny"], None)(CASES[0], "first")


def over(child):
    deadline = time.monotonic() + 60
    while not child.over and time.monotonic() < deadline:
        time.sleep(0.01)
    return child.over


def test_a_process_that_dies_tells_its_last_words(tmp_path, monkeypatch):
    child = child_of(tmp_path, "input()\nprint('first')\nraise SystemExit('no such kernel')", monkeypatch)
    child.go()
    assert over(child)
    child.end()
    assert child.told()["missing"] == {"all": "its process ended with exit code 1: no such kernel"}
    assert child.told()["merge_s"] is None


def test_a_process_that_was_ended_may_be_told_to_go_all_the_same(tmp_path, monkeypatch):
    child = child_of(tmp_path, "input()", monkeypatch)
    child.end("the first process has merged nothing")
    child.go()
    assert child.told()["missing"] == {"all": "the first process has merged nothing"}


def test_a_process_ends_with_what_it_has_started(tmp_path, monkeypatch):
    mark = tmp_path / "started"
    text = f"""import subprocess, sys, time
started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
open({str(mark)!r} + '.part', 'w').write(str(started.pid))
import os; os.replace({str(mark)!r} + '.part', {str(mark)!r})
time.sleep(60)"""
    child = child_of(tmp_path, text, monkeypatch)
    deadline = time.monotonic() + 30
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    child.end("time was up")
    assert child.told()["missing"]["all"].startswith("time was up")
    state = Path(f"/proc/{mark.read_text()}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_each_case_has_caches_of_its_own(tmp_path, monkeypatch):
    text = "import json, os\njson.dump(dict(os.environ), open('{}', 'w'))"
    seen = []
    for number, (case, role) in enumerate([(CASES[0], "first"), (CASES[0], "restarted"), (CASES[1], "first")]):
        path = tmp_path / "script.py"
        path.write_text(text.format(tmp_path / f"{number}.json"))
        monkeypatch.setitem(GLOBALS, "SCRIPT", path)
        child = RESTARTS["Children"](tmp_path, [], None)(case, role)
        assert over(child)
        child.end()
        seen.append(json.loads((tmp_path / f"{number}.json").read_text()))
    for name in RESTARTS["caches_in"](tmp_path):
        first, restarted, other = (one[name] for one in seen)
        assert first == restarted
        assert first != other
        assert all(str(tmp_path) in one for one in (first, other))
    assert {"JOULEMARK_MERGED_CACHE", "JOULEMARK_KERNEL_CACHE", "TRITON_CACHE_DIR"} <= RESTARTS["caches_in"](
        tmp_path
    ).keys()


def test_a_process_waits_for_nobody_at_its_end(tmp_path):
    pytest.importorskip("torchvision")
    script, ready = ROOT / "tests" / "gpu" / "merged_restart.py", tmp_path / "f.ready"
    text = f"""import atexit, runpy, sys, time
atexit.register(time.sleep, 600)  # as torch's compiler waits for its processes
sys.path.insert(0, {str(script.parent)!r})
runpy.run_path({str(script)!r}, run_name="__main__")"""
    words = ("mobilenet_v2", "1", "--ready", str(ready), "--out", str(tmp_path / "f.json"), "--device", "cpu", "--tiny")
    command, variables = [sys.executable, "-c", text, *words], RESTARTS["environment"](OMP_NUM_THREADS="1")
    ended = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, timeout=120, check=False)
    assert ended.returncode == 0
    assert ready.exists()


def test_a_process_without_a_plan_on_the_disk_does_not_merge_again():
    again = CHILD["once_more"](None, None, "cpu", 55.0, False)
    assert (again["merge_s"], again["cached"]) == (None, None)
    assert again["missing"] == {"all": "its plan was not from the disk before"}
    failed = CHILD["once_more"](None, None, "cpu", 55.0, True)  # no model: whatever is raised is its reason
    assert failed["merge_s"] is None
    assert failed["missing"]["all"].startswith("TypeError: merge got a NoneType")


def test_a_model_that_runs_as_it_is_was_not_merged():
    class Torn(torch.nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(RuntimeError, match=r"torch\.fx cannot trace it"):
        CHILD["measured"](Torn(), torch.ones(2, 3), "cpu", 1.0, CHILD["Spent"](), lambda: None)


def test_a_profile_is_written_by_both_orders(tmp_path, monkeypatch):
    text = tmp_path / "profiles" / "unet-b32.txt"
    CHILD["profiled"](lambda: sorted(range(10)), text)
    told = text.read_text()
    assert "Ordered by: cumulative time" in told
    assert "Ordered by: internal time" in told
    assert told.count("{built-in method builtins.sorted}") == 2
    words = []
    monkeypatch.setitem(GLOBALS, "Child", lambda given, *_: words.append(given) or SimpleNamespace(over=True))
    begin = RESTARTS["Children"](tmp_path, [], text.parent)
    for role in ("first", "restarted", "profiled"):
        begin(CASES[0], role)
    assert [("--again" in one, "--profile" in one) for one in words] == [(False, False), (True, False), (False, True)]
    assert words[2][-1] == str(text)


def words_of(out):
    """The script's words for two small networks."""
    chosen = ("--networks", "mobilenet_v2,efficientnet_b0", "--batches", "32")
    return [str(out), *chosen, "--device", "cpu", "--tiny", "--budget", "1"]


def script(out):
    """The script's own process."""
    variables = {**RESTARTS["environment"](), "OMP_NUM_THREADS": "1"}  # threads of several wait for each other here
    command = [sys.executable, str(SCRIPT), *words_of(out)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_all_of_it_on_a_cpu(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torchvision")
    out = tmp_path / "out.json"
    process = script(out)
    said = process.communicate(timeout=300)[0].decode()
    assert process.returncode == 0, said
    document = json.loads(out.read_text())
    schema = json.loads((ROOT / "docs" / "schema" / "merged-restarts.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(document, schema)
    for name in ("mobilenet_v2-b32", "efficientnet_b0-b32"):
        first, second = document["cases"][name]["first"], document["cases"][name]["restarted"]
        assert (first["cached"], second["cached"], second["again"]["cached"]) == (False, True, True)
        assert first["variant"] == second["variant"]
        assert sum(second["spent_s"].values()) == pytest.approx(second["merge_s"], rel=0.1)
        assert 0 <= second["relative_error"] < 0.02
        assert all(0 < one["call_s"] < 10 for one in (first, second))
        for one in (first, second):
            assert {*one["beside_s"]} == {"getting ready", "moving", "waiting", "calls", "checking", "ending"}
            assert one["beside_s"]["ending"] < 10
        parts = sum(sum(one["beside_s"].values()) - one["beside_s"]["getting ready"] for one in (first, second))
        merges = first["merge_s"] + second["merge_s"] + second["again"]["merge_s"]
        assert parts + merges < document["cases"][name]["took_s"]
        assert second["missing"].keys() == {"peak_bytes"}
        assert f"| {name} |" in said
    # What the file holds is not measured again, and is shown by itself.
    monkeypatch.setitem(GLOBALS, "Child", lambda *_: pytest.fail("a process was started"))
    assert RESTARTS["main"](words_of(out)) == 0
    assert RESTARTS["main"](["--show", str(out)]) == 0
    assert capsys.readouterr().out == 2 * said[said.index("###") :]


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_end_it_ends_its_processes(asked, code, tmp_path):
    process = script(tmp_path / "out.json")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    while not (started := children.read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(asked)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert started
    assert not any(Path(f"/proc/{one}").exists() for one in started)


def said_in(*path):
    return " ".join(ROOT.joinpath(*path).read_text(encoding="utf-8").split())


def test_the_docs_hold_the_table_and_the_seconds_of_the_committed_cases(capsys):
    path = ROOT / "results" / "nvidia-h200" / "merged-restarts.json"
    assert runpy.run_path(str(SCRIPT))["main"](["--show", str(path)]) == 0
    text = (ROOT / "docs" / "merged.md").read_text(encoding="utf-8")
    between = text.partition("<!-- restarts -->")[2].partition("<!-- end of restarts -->")[0]
    assert between.strip() == capsys.readouterr().out.partition("\n\n")[2].strip()
    cases = list(json.loads(path.read_text(encoding="utf-8"))["cases"].values())
    assert len({one["network"] for one in cases}) == 11
    first = sorted(one["first"]["merge_s"] for one in cases)
    new = sorted(one["restarted"]["merge_s"] for one in cases)
    assert (first[-1] < 60, new[-1] < 5, all(one["restarted"]["cached"] for one in cases)) == (True, True, True)
    assert f"from the disk {new[0]:.1f} to {new[-1]:.1f} s in" in said_in("docs", "merged.md")
    from_disk = f"merging from the disk {new[0]:.1f} to {new[-1]:.1f} s, {new[len(new) // 2]:.1f} s in the median"
    told = f"First merges took {first[0]:.1f} to {first[-1]:.1f} s, {from_disk}"
    assert told in said_in("results", "nvidia-h200", "README-merged.md")
    assert not any("compiler's start" in one["restarted"]["spent_s"] for one in cases)
    earlier = json.loads(path.with_name("merged-restarts-before.json").read_text(encoding="utf-8"))["cases"]
    before = sorted(one["restarted"]["merge_s"] for one in earlier.values())
    slowest = earlier["inception_v4-b32"]["restarted"]
    assert slowest["merge_s"] == before[-1]
    assert f"of these cases took {before[0]:.1f} to {before[-1]:.1f} s from the disk" in said_in("docs", "merged.md")
    imports_s, tracing_s = (slowest["spent_s"][part] for part in ("compiler's start", "tracing"))
    assert f"took {imports_s:.1f} and running the model to trace it {tracing_s:.1f}." in said_in("docs", "merged.md")
