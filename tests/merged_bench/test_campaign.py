"""The campaign on a GPU, run by a stand-in: order, limits, what is repeated, what is told."""

from __future__ import annotations

import json
import math
import queue
import re
import runpy
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from joulemark.errors import ConfigurationError
from joulemark.merged.families import known_families
from joulemark.merged_bench.rivals import SPARED

SCRIPTS = Path(__file__).parents[1] / "gpu"
CAMPAIGN = runpy.run_path(str(SCRIPTS / "merged_campaign.py"))


def stages(out, gpus=1):
    return CAMPAIGN["stages"](out, 3, gpus)


def go(out, codes=None, seconds=360.0, gpus=1):
    """The commands that were run; ``codes``: exit codes per command, 0 where it says nothing."""
    ran = []
    codes = {name: list(found) for name, found in (codes or {}).items()}

    def run(name, command, gpu, left):
        ran.append((name, command, left))
        return codes[name].pop(0) if codes.get(name) else 0

    CAMPAIGN["Campaign"](out, seconds, run).go(stages(out, gpus))
    return ran


def test_blocks_come_first_and_every_limit_is_told(tmp_path):
    ran = go(tmp_path)
    names = [name for name, *_ in ran]
    names.remove("build blocks")  # beside the others, in a thread of its own
    assert names[:3] == ["blocks", "build numerics", "numerics"]
    assert {"build blocks", "blocks"} <= set(json.loads((tmp_path / "campaign.json").read_text()))
    for _, command, left in ran:
        assert not any("{" in part and "left" in part for part in command)
        assert 0 < left <= 360
    _, command, left = next(one for one in ran if one[0] == "blocks")
    assert 340 < left < 350  # all but what the fit takes
    assert float(command[command.index("--limit") + 1]) == pytest.approx(left - 4, abs=1)


def test_a_second_run_repeats_what_failed_and_goes_on_with_blocks(tmp_path):
    go(tmp_path, {"numerics": [None], "blocks": [3]})
    kept = json.loads((tmp_path / "campaign.json").read_text())
    assert kept["numerics"]["missing"] == "it was ended"
    assert kept["blocks"]["code"] == 3
    again = [name for name, *_ in go(tmp_path)]
    assert again[:3] == ["blocks", "numerics", "variants"]
    assert "build blocks" not in again


def test_blocks_are_asked_for_again_once_and_come_first(tmp_path):
    measured = tmp_path / "measured.json"
    measured.write_text('{"rows": []}')
    out = tmp_path / "out"
    out.mkdir()
    CAMPAIGN["begin_parts"](out, 1, measured)
    assert (out / "merged-blocks.json").read_text() == measured.read_text()
    ran = []
    for _ in range(2):  # the second time, blocks go on, and no row is marked once more
        campaign = CAMPAIGN["Campaign"](out, 360.0, lambda name, command, *_: ran.append((name, command)) or 0)
        campaign.go([one for one in CAMPAIGN["stages"](out, 3, 1, "b,a") if "build" not in one.name])
    names = [name for name, _ in ran if name.startswith(("again", "blocks"))]
    assert names == ["again b,a", "blocks", "blocks"]
    told = [dict(pairwise(command)) for _, command in ran[:2]]
    assert told[0]["--again"] == "b,a"
    assert told[0]["--out"] == told[1]["--out"] == str(out / "merged-blocks.json")
    assert told[1]["--first"].startswith("b,a," + CAMPAIGN["TABLE"][0])
    (out / "merged-blocks.json").write_text("{}")
    CAMPAIGN["begin_parts"](out, 1, measured)
    assert (out / "merged-blocks.json").read_text() == "{}"


@pytest.mark.parametrize(("codes", "starts"), [([4, 0], 2), ([4, 4, 3], 3), ([4] * 9, 4), ([None], 1), ([1], 1)])
def test_blocks_are_begun_again_after_a_cuda_error_alone(codes, starts, tmp_path):
    assert [name for name, *_ in go(tmp_path, {"blocks": codes})].count("blocks") == starts


def test_every_gpu_takes_its_share_of_the_blocks_into_a_file_of_its_own(tmp_path):
    ran = [one for one in go(tmp_path, {"blocks 1": [4, 3]}, gpus=2) if one[0].startswith("blocks")]
    assert sorted(name for name, *_ in ran) == ["blocks 0", "blocks 1", "blocks 1"]
    told = {
        name: (command[command.index("--share") + 1], command[command.index("--out") + 1]) for name, command, _ in ran
    }
    assert told["blocks 0"] == ("1/2", str(tmp_path / "parts" / "blocks-1of2.json"))
    assert told["blocks 1"] == ("2/2", str(tmp_path / "parts" / "blocks-2of2.json"))
    assert json.loads((tmp_path / "campaign.json").read_text())["blocks"]["code"] == 3


def test_what_one_gpu_has_measured_is_not_measured_again_by_two(tmp_path):
    (tmp_path / "merged-blocks.json").write_text('{"rows": []}')
    CAMPAIGN["begin_parts"](tmp_path, 2)
    for number in (1, 2):
        assert (tmp_path / "parts" / f"blocks-{number}of2.json").read_text() == '{"rows": []}'


def test_the_first_blocks_are_blocks_and_groups_and_those_with_a_bar_are_among_them():
    from joulemark.merged_bench.command import chosen_of
    from joulemark.merged_bench.subjects import BLOCKS

    ordered = chosen_of(BLOCKS, first=",".join((*CAMPAIGN["TABLE"], *CAMPAIGN["FIRST"])))
    table = ordered[: len(CAMPAIGN["TABLE"])]
    assert [one.name for one in table] == list(CAMPAIGN["TABLE"])
    assert sum(one.group.startswith("chain-") for one in table) >= 4  # bricks in memory beside channels-last
    assert sorted(one.name for one in ordered) == sorted(one.name for one in BLOCKS)
    kinds = [one.group.partition("-")[0] for one in ordered[:5]]
    assert kinds == ["inverted", "chain", "chain", "bottleneck", "chain3d"]
    last = max(n for n, one in enumerate(ordered) if one.group in ("inverted", "inverted-s2"))
    assert last < 31


@pytest.mark.parametrize(("code", "left"), [(0, False), (1, False), (3, True), (4, True), (None, True)])
def test_blocks_are_left_after_a_cut_and_after_a_cuda_error(code, left, tmp_path):
    campaign = CAMPAIGN["Campaign"](tmp_path, 360.0, lambda *_: code)
    stage = next(one for one in stages(tmp_path) if one.name == "blocks")
    campaign.go([stage])
    assert campaign.is_left(stage) == left


def test_without_time_nothing_begins(tmp_path):
    assert go(tmp_path, seconds=10.0) == []
    assert json.loads((tmp_path / "campaign.json").read_text())["blocks"] == {"missing": "time was up"}


def test_stages_that_were_cut_or_met_a_cuda_error_are_left(tmp_path):
    codes = {"numerics": 3, "variants": 1, "blocks": 4}
    planned = stages(tmp_path)
    campaign = CAMPAIGN["Campaign"](tmp_path, 360.0, lambda name, *_: codes.get(name, 0))
    campaign.go(planned)
    assert [one.name for one in planned if campaign.is_left(one)] == ["blocks", "numerics"]


@pytest.fixture(scope="module")
def kernels():
    return runpy.run_path(str(SCRIPTS / "merged_kernels.py"))


@pytest.fixture(scope="module")
def numerics(kernels):
    """All checks of numerics; to choose their plans takes seconds."""
    return kernels["everything"]("^numerics")


def test_every_check_of_numerics_has_a_plan_that_fits(numerics):
    """A kernel that cannot be made is one that no GPU ever checks."""
    families = {one.variant.family for one in numerics if one.variant.make().source}
    assert families == {one.name for one in known_families()}


def test_numerics_go_on_behind_the_records_that_are_there(kernels, numerics, tmp_path):
    items = [one for one in numerics if re.search("^numerics wide .*bf16", kernels["label"](one))]
    path = tmp_path / "merged-kernels.json"
    assert kernels["kept"](path, items) == []
    records = [{"label": kernels["label"](one)} for one in items]
    path.write_text(json.dumps({"records": records[:1]}))
    assert kernels["kept"](path, items) == records[:1]
    assert kernels["kept"](path, items[1:]) == []
    late = time.monotonic() - 1
    assert kernels["run_all"](items, "", late, print, records) is True
    assert kernels["run_all"](items, "", late, print, records[:1]) is False


MODELS = runpy.run_path(str(SCRIPTS / "merged_models.py"))


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    """A case of whole networks on a CPU, by kernels that run there."""
    pytest.importorskip("torchvision")
    from joulemark.merged import cache
    from tests.merged.fakes import RATES, fake_family, run_fakes

    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    run_fakes(monkeypatch)

    def run(budget_s=0.0, **kernels):
        families = (fake_family(edges=(16,), **kernels), fake_family(edges=(24,), name="other"))
        shape = (3, 65, 57)
        return MODELS["measure"]("mobilenet_v2", 3, shape, "bf16", "cpu", budget_s, rates=RATES, families=families)

    return run


def test_outputs_are_those_of_kernels_whatever_is_faster(outputs):
    found = outputs(budget_s=1.0)
    assert MODELS["is_right"]("mobilenet_v2-b3-3x65x57-bf16", found)
    assert found["relative_error"] <= 2e-2
    assert found["kernels"]["merged_ranges"] > 10
    assert set(found["kernels"]["paths"]) == {"fake", "library"}
    assert "ranges of" in MODELS["line_of"](found)
    assert found["auto"]["variant"] == "launches"  # nothing is timed here: no folded rival


def test_a_wrong_kernel_is_refused_by_name_and_another_takes_its_place(outputs):
    found = outputs(wrong=True)
    assert not MODELS["is_right"]("mobilenet_v2-b3-3x65x57-bf16", found)
    assert found["relative_error"] <= 2e-2
    assert set(found["kernels"]["paths"]) == {"other", "library"}
    assert "its output is wrong" in found["kernels"]["refused"][0]
    assert "by fake/fake_" in MODELS["line_of"](found)


def test_kernels_of_single_warps_have_a_batch_of_their_own():
    without, every = MODELS["families_for"](5, "cuda"), MODELS["families_for"](1, "cuda")
    assert every is None
    names = {one.name for one in without}
    assert {"chain", "stream", "planes", "inverted_residual", "expand_depthwise", "bottleneck", "memoized"} == names


def test_a_case_that_failed_is_not_right_and_says_why():
    found = {"failed": "RuntimeError: no"}
    assert not MODELS["is_right"]("vgg16-b1-3x224x224-bf16", found)
    assert MODELS["line_of"](found) == "failed: RuntimeError: no"


def test_an_error_of_nan_is_wrong_wherever_it_stands():
    assert math.isnan(MODELS["worst"]([0.1, math.nan, 0.2]))
    assert MODELS["worst"]([0.1, 0.3, 0.2]) == 0.3
    pytest.importorskip("cuda.bindings")
    is_right = runpy.run_path(str(SCRIPTS / "merged_blocks_probe.py"))["is_right"]
    right = {"error": 1e-3, "odd_error": 1e-3, "unwritten": 0}
    assert is_right(right)
    for wrong in ({"odd_error": math.nan}, {"error": math.nan}, {"unwritten": 1}, {"error": 0.1}):
        assert not is_right(right | wrong)


def test_a_probe_that_time_has_cut_says_so(tmp_path):
    pytest.importorskip("cuda.bindings")
    probe = runpy.run_path(str(SCRIPTS / "merged_blocks_probe.py"))
    is_left, block = probe["is_left"], probe["blocks"]("^ir32-192-32s1@56b1$")
    ways = [SimpleNamespace(kernel=SimpleNamespace(name=one)) for one in ("a", "b")]
    is_left.__globals__["ways_of"] = lambda *_: ways
    rows = [{"block": block[0].name, "what": what, "state": "begun"} for what in ("a", "b")]
    for count, left in ((0, True), (1, True), (2, False)):
        (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows[:count]))
        assert is_left(tmp_path, 8, block) is left


def test_the_samples_match_checks_of_every_family(kernels, numerics):
    labels = [kernels["label"](one) for one in numerics]
    assert len(set(labels)) == len(labels), "a record is found again by its label"
    for pattern, families in (("SAMPLE", 13), ("SANITIZED", 13), ("RACED", 12)):
        found = [one for one in labels if re.search(CAMPAIGN[pattern], one)]
        assert len({one.split()[1] for one in found}) == families, pattern
        assert len(found) < len(labels)
    raced = [one for one in labels if re.search(CAMPAIGN["RACED"], one)]
    sanitized = [one for one in labels if re.search(CAMPAIGN["SANITIZED"], one)]
    assert set(raced) <= set(sanitized)
    assert (len(raced), len(sanitized)) == (17, 29)


def test_the_summary_names_what_is_wrong(tmp_path):
    (tmp_path / "numerics").mkdir()
    records = [{"label": "good", "ok": True}, {"label": "bad", "ok": False, "error": 0.5}]
    (tmp_path / "numerics" / "merged-kernels.json").write_text(json.dumps({"records": records}))
    gains = {"best_rival": "compile", "burst": 2.345, "energy": None}
    (tmp_path / "merged-blocks.json").write_text(
        json.dumps({"rows": [{"subject": "s", "gains": gains, "took_s": 12.0}]})
    )
    said = "\n".join(CAMPAIGN["summary"](tmp_path))
    assert "1 of 2 within limits" in said
    assert "bad: 0.5" in said
    assert "s: over compile {'burst': 2.35}" in said or "{'burst': 2.34}" in said


@pytest.mark.parametrize("name", ["build blocks", "blocks"])
def test_the_benchmark_knows_the_options(name, tmp_path, capsys):
    stage = next(one for one in stages(tmp_path) if one.name == name)
    given = stage.commands[0][1:] if stage.beside else stage.commands[0]  # behind "nice"
    command = [part.replace("{left}", "1") for part in given[2:]]
    main = runpy.run_path(given[1])["main"]
    assert main([*command, "--only", "no such block", "--device", "cpu"]) == 2
    assert "no subject is left" in capsys.readouterr().err, "all else that it is given is understood"


CHILDREN = runpy.run_path(str(SCRIPTS / "children.py"))


def test_compilers_share_their_caches(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    variables = CHILDREN["compilers"]()
    assert variables["TRITON_CACHE_DIR"] == "mine"
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == "/var/tmp/joulemark-inductor"


NETWORKS = runpy.run_path(str(SCRIPTS / "merged_networks.py"))


class Played:
    """A job's command of a stand-in, which ends with a code; None: it does not end."""

    def __init__(self, told, name, code):
        self.told, self.name, self.ends_with, self.looks = told, name, code, 0

    def go(self, limits):
        self.told.append((self.name, "goes", limits))

    def code(self, seconds):
        self.looks += 1
        self.told.append((self.name, "waited for", seconds))
        return self.ends_with if self.looks > 1 else None  # it is at work while the next gets ready

    def end(self):
        self.told.append((self.name, "ended", None))


def work(out, codes, seconds=600.0, groups="32 1", gpus=1, names=("unet", "vgg16")):
    """What the commands of one GPU of a stand-in were told, and the words that they were started with."""
    told, commands = [], []

    def begin(job, command, gpu):
        assert gpu == 3
        commands.append(command)
        told.append((job.name, "begun", None))
        return Played(told, job.name, codes.pop(0) if codes else 0)

    waiting = queue.Queue()
    for job in NETWORKS["jobs"](names, groups):
        if not NETWORKS["done"](job, out):
            waiting.put(job)
    end = time.monotonic() + seconds
    NETWORKS["Lane"](3, waiting, out, end, begin, ("--no-counters",), gpus).run()
    return told, commands


def all_that(did, told):
    return [name for name, what, _ in told if what == did]


def test_networks_wait_in_order_and_a_cuda_error_is_tried_once_more(tmp_path):
    # Whose command meets a CUDA error is begun behind the next one, which got ready beside it.
    told, commands = work(tmp_path, [4, 0, 0, None, 4, 4])
    assert all_that("goes", told) == ["unet-b32", "unet-b32", "vgg16-b32", "unet-b1", "vgg16-b1", "vgg16-b1"]
    assert all_that("ended", told) == ["unet-b1"]
    (limits,) = (one for name, what, one in told if what == "goes" and name == "unet-b1")
    assert limits[0] == "--limit"
    assert 500 < float(limits[1]) < 600
    assert commands[0][commands[0].index("--out") + 1] == str(tmp_path / "parts" / "unet-b32.json")
    assert commands[0][-2:] == ("--no-counters", "--wait")


def test_the_next_job_gets_ready_beside_the_one_that_has_the_gpu(tmp_path):
    told, _ = work(tmp_path, [], groups="32")
    assert [one[:2] for one in told if one[1] != "waited for"] == [
        *(("unet-b32", "begun"), ("unet-b32", "goes"), ("vgg16-b32", "begun"), ("vgg16-b32", "goes")),
    ]  # fmt: skip
    # The first has its time of getting ready too; each has the processors for itself until it has merged.
    waits = [round(seconds) for name, what, seconds in told if what == "waited for"]
    assert waits[::2] == [71, 45]
    # What comes last is left to the GPU that is free first; without time for another row nothing gets ready.
    for alone in ({"gpus": 2}, {"seconds": 290.0}):
        told, _ = work(tmp_path, [], groups="32", **alone)
        at_work = [n for n, one in enumerate(told) if one[:2] == ("unet-b32", "waited for")]
        assert told.index(("vgg16-b32", "begun", None)) > max(at_work)


def test_what_got_ready_in_vain_is_ended(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        Played, "code", lambda one, seconds: now.__setitem__(0, now[0] + seconds)
    )  # none ends by itself
    told, _ = work(tmp_path, [], groups="32")
    assert all_that("goes", told) == ["unet-b32"]
    assert all_that("ended", told) == ["unet-b32", "vgg16-b32"]


def test_networks_with_a_bar_go_first_through_all_batches_and_what_may_fail_comes_last():
    jobs = NETWORKS["jobs"](["unet", "resnet50", "vgg16", "mobilenet_v2"], "32,128 1")
    assert [one.name for one in jobs] == [
        *("unet-b32", "resnet50-b32-128", "vgg16-b32-128", "mobilenet_v2-b32-128"),
        *("resnet50-b1", "mobilenet_v2-b1", "unet-b1", "vgg16-b1", "unet-b128"),
    ]  # fmt: skip


@pytest.mark.parametrize(("seconds", "tuning"), [(600, "180"), (200, "110"), (150, "60")])
def test_a_compiler_may_tune_for_what_the_others_do_not_need(tmp_path, seconds, tuning):
    for name, xla in (("resnet50", True), ("unet", False)):
        (job,) = NETWORKS["jobs"]([name], "32")
        command = NETWORKS["command_of"](job, tmp_path, ())
        assert NETWORKS["limits_of"](seconds)[2:] == ("--rival-limit", tuning)
        assert ("xla" in command[command.index("--rivals") + 1].split(",")) is xla


@pytest.mark.parametrize("name", ["resnet50", "unet"])
def test_what_a_row_can_spare_is_built_behind_all_that_it_cannot(tmp_path, name):
    for job in NETWORKS["jobs"]([name], "32,128"):
        command = NETWORKS["command_of"](job, tmp_path, ())
        rivals = command[command.index("--rivals") + 1].split(",")
        assert [one in SPARED for one in rivals] == [False] * (len(rivals) - 1) + [True]


def test_where_memory_is_short_the_compiler_tunes_before_the_others_take_it(tmp_path):
    def rivals_of(batches):
        return [
            command[command.index("--rivals") + 1].split(",")
            for command in (NETWORKS["command_of"](job, tmp_path, ()) for job in NETWORKS["jobs"](["unet"], batches))
        ]

    usual, large = rivals_of("32,128")
    assert (usual[:2], large[:3]) == (["merged", "eager"], ["merged", "compile", "compile_default"])
    assert sorted(usual) == sorted(large)


def test_no_job_begins_without_time_for_a_row(tmp_path):
    told, _ = work(tmp_path, [], seconds=155.0)
    assert all_that("goes", told) == ["unet-b32", "vgg16-b32", "unet-b1", "vgg16-b1"]
    assert work(tmp_path, [], seconds=145.0) == ([], [])


def commands_of(out, gpus=2):
    (out / "logs").mkdir(exist_ok=True)
    return NETWORKS["Commands"](out, gpus), NETWORKS["jobs"](["unet"], "1")[0]


def test_a_command_is_told_its_limits_when_the_gpu_is_free(tmp_path):
    begin, job = commands_of(tmp_path)
    child = begin(job, (sys.executable, "-c", "print('told', input()); raise SystemExit(3)"), 1)
    assert child.code(0.0) is None
    child.go(("--limit", "30"))
    assert child.code(60.0) == 3
    child.end()
    ended = begin(job, (sys.executable, "-c", "raise SystemExit(2)"), 0)
    assert ended.code(60.0) == 2
    ended.go(("--limit", "30"))  # to nobody
    assert ended.code(0.0) == 2
    assert (tmp_path / "logs" / "unet-b1.log").read_text() == "told --limit 30\n"


def test_commands_end_when_they_are_asked_to_and_none_goes_on_behind_them(tmp_path):
    begin, job = commands_of(tmp_path)
    sleeps = (sys.executable, "-c", "import time; time.sleep(60)")
    begun = time.monotonic()
    children = [begin(job, sleeps, gpu) for gpu in (0, 1)]
    begin.end()
    assert [one.code(30.0) for one in children] == [-15, -15]
    assert begin(job, sleeps, 0).code(30.0) == -15
    assert time.monotonic() - begun < 30


def test_jobs_whose_rows_are_there_are_not_begun_again(tmp_path):
    (tmp_path / "parts").mkdir()
    measured = {"rivals": {"eager": {"burst_s": 1e-3}}}
    rows = {"rows": [{"subject": "unet-b32", **measured}, {"subject": "unet-b1", **measured}]}
    (tmp_path / "parts" / "unet-b32-1.json").write_text(json.dumps(rows))
    (tmp_path / "parts" / "vgg16-b32-1.json").write_text(json.dumps({"rows": [{"subject": "vgg16-b32", **measured}]}))
    told, _ = work(tmp_path, [], groups="32,1")
    assert all_that("begun", told) == ["vgg16-b32-1"]


def test_rows_of_an_earlier_file_are_not_measured_again(tmp_path):
    def row(name, **more):
        return {"subject": name, "dtype": "bf16", "rivals": {"eager": {"burst_s": 1e-3}}, **more}

    rows = [row("unet-b32"), row("unet-b1", cut=True), row("vgg16-b32", gpu_uuid="other"), row("vgg16-b1"), row("x-b1")]
    earlier = tmp_path / "merged.json"
    facts = {"kind": "networks", "gpu_uuid": "first", "failed": {"unet-b1": "why"}}
    earlier.write_text(json.dumps({**facts, "rows": rows}))
    out = tmp_path / "out"
    planned = NETWORKS["jobs"](["unet", "vgg16"], "32,1")
    for _ in range(2):  # whoever begins again with the same words changes nothing
        NETWORKS["begin_parts"](planned, out, earlier, ["vgg16-b1"])
        parts = {one.stem: json.loads(one.read_text()) for one in (out / "parts").glob("*.json")}
        assert parts["unet-b32-1"] == {**facts, "failed": {}, "rows": [row("unet-b32", gpu_uuid="first")]}
        assert parts["vgg16-b32-1"]["rows"] == [row("vgg16-b32", gpu_uuid="other")]
    NETWORKS["begin_parts"](planned, out, earlier, [])
    told, _ = work(out, [], groups="32,1")
    assert all_that("begun", told) == ["unet-b32-1"]  # of which a row was cut
    with pytest.raises(ConfigurationError, match=r"no row of 'unet-b7'"):
        NETWORKS["begin_parts"](planned, out, earlier, ["unet-b7"])


def networks(monkeypatch, out, *arguments):
    """The script's exit code, with nothing shown."""
    main = NETWORKS["main"]
    monkeypatch.setitem(main.__globals__, "show", lambda out: None)
    monkeypatch.setattr(sys, "argv", ["merged_networks.py", str(out), "--gpus", "1", "--networks", "unet", *arguments])
    before = signal.getsignal(signal.SIGTERM)
    try:
        return main()
    except SystemExit as ended:
        return ended.code
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_script_starts_nothing_where_every_row_is_there(tmp_path, monkeypatch, capsys):
    earlier = tmp_path / "merged.json"
    rows = [{"subject": f"unet-b{n}", "rivals": {"eager": {"burst_s": 1e-3}}} for n in (32, 1)]
    earlier.write_text(json.dumps({"gpu_uuid": "u", "rows": rows}))
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    begun = ("--begin", str(earlier), "--batches", "32 1")
    assert networks(monkeypatch, tmp_path / "out", *begun) == 0
    assert networks(monkeypatch, tmp_path / "again", *begun, "--again", "unet-b1", "--seconds", "100") == 3
    assert networks(monkeypatch, tmp_path / "wrong", *begun, "--again", "unet-b7") == 2
    assert "no row of 'unet-b7' to measure again" in capsys.readouterr().err
    assert networks(monkeypatch, tmp_path / "wrong", "--again", "unet-b1") == 2
    assert "name it by --begin" in capsys.readouterr().err


def test_what_a_part_has_measured_stays_and_what_was_cut_there_gives_way(tmp_path):
    def row(name, seconds, **more):
        return {"subject": name, "rivals": {"eager": {"burst_s": seconds}}, "gpu_uuid": "u", **more}

    (tmp_path / "parts").mkdir()
    part, earlier = tmp_path / "parts" / "unet-b32-1.json", tmp_path / "merged.json"
    part.write_text(json.dumps({"rows": [row("unet-b32", 1e-3), row("unet-b1", 1e-3, cut=True)]}))
    earlier.write_text(json.dumps({"gpu_uuid": "u", "rows": [row("unet-b32", 2e-3), row("unet-b1", 2e-3)]}))
    NETWORKS["begin_parts"](NETWORKS["jobs"](["unet"], "32,1"), tmp_path, earlier, [])
    assert json.loads(part.read_text())["rows"] == [row("unet-b32", 1e-3), row("unet-b1", 2e-3)]


@pytest.mark.parametrize("script", ["merged_networks.py", "merged_models.py"])
def test_without_a_gpu_whole_networks_are_refused_in_words(script, tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / script))["main"]()
    assert ended.value.code == 2
    assert "no GPU is visible: see joulemark env" in capsys.readouterr().err


def test_all_networks_of_the_bench_are_in_the_order():
    from joulemark.merged_bench.subjects import NETWORKS as named

    assert set(NETWORKS["ORDER"]) == set(named)
