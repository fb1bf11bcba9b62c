"""The campaign on a GPU, run by a stand-in: order, limits, what is repeated, what is told."""

from __future__ import annotations

import json
import math
import queue
import re
import runpy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from joulemark.merged.families import known_families

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
    from tests.merged.fakes import RATES, fake_family

    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))

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


def work(out, codes, seconds=600.0, groups="32 1"):
    """The jobs that were run on one GPU of a stand-in."""
    ran = []

    def run(job, command, gpu, left):
        ran.append((job.name, command, gpu, left))
        return codes.pop(0) if codes else 0

    waiting = queue.Queue()
    for job in NETWORKS["jobs"](["unet", "vgg16"], groups):
        if not NETWORKS["done"](job, out):
            waiting.put(job)
    NETWORKS["work"](waiting, 3, out, time.monotonic() + seconds, run, ("--no-counters",))
    return ran


def test_networks_wait_in_order_and_a_cuda_error_is_tried_once_more(tmp_path):
    ran = work(tmp_path, [4, 0, None, 4, 4])
    assert [name for name, *_ in ran] == ["unet-b32", "unet-b32", "vgg16-b32", "unet-b1", "unet-b1", "vgg16-b1"]
    _, command, gpu, left = ran[0]
    assert gpu == 3
    assert command[command.index("--out") + 1] == str(tmp_path / "parts" / "unet-b32.json")
    assert float(command[command.index("--limit") + 1]) < left <= 600
    assert command[-1] == "--no-counters"


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
        command = NETWORKS["command_of"](job, tmp_path, seconds, ())
        assert command[command.index("--rival-limit") + 1] == tuning
        assert ("xla" in command[command.index("--rivals") + 1].split(",")) is xla


def test_no_job_begins_without_time_for_a_row(tmp_path):
    assert [name for name, *_ in work(tmp_path, [], seconds=155.0)] == ["unet-b32", "vgg16-b32", "unet-b1", "vgg16-b1"]
    assert work(tmp_path, [], seconds=145.0) == []


def test_commands_end_when_they_are_asked_to_and_none_begins_behind_them(tmp_path):
    (tmp_path / "logs").mkdir()
    run = NETWORKS["Commands"](tmp_path, 2)
    job = NETWORKS["jobs"](["unet"], "1")[0]
    with ThreadPoolExecutor(2) as pool:
        begun = time.monotonic()
        told = [pool.submit(run, job, (sys.executable, "-c", "import time; time.sleep(60)"), gpu, 60) for gpu in (0, 1)]
        while len(run.running) < 2:
            time.sleep(0.01)
        run.end()
        assert [one.result() for one in told] == [-15, -15]
    assert run(job, ("no such command",), 0, 60) is None
    assert time.monotonic() - begun < 30


def test_jobs_whose_rows_are_there_are_not_begun_again(tmp_path):
    (tmp_path / "parts").mkdir()
    measured = {"rivals": {"eager": {"burst_s": 1e-3}}}
    rows = {"rows": [{"subject": "unet-b32", **measured}, {"subject": "unet-b1", **measured}]}
    (tmp_path / "parts" / "unet-b32-1.json").write_text(json.dumps(rows))
    (tmp_path / "parts" / "vgg16-b32-1.json").write_text(json.dumps({"rows": [{"subject": "vgg16-b32", **measured}]}))
    assert [name for name, *_ in work(tmp_path, [], groups="32,1")] == ["vgg16-b32-1"]
    assert work(tmp_path, [], seconds=30.0) == []


def test_all_networks_of_the_bench_are_in_the_order():
    from joulemark.merged_bench.subjects import NETWORKS as named

    assert set(NETWORKS["ORDER"]) == set(named)
