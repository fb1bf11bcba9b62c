"""The attribution pass: what a case's record gets of the document, and what costs it."""

from __future__ import annotations

import json
import tempfile
import time

import pytest

from joulemark.attribution.recording import FILE, Recording
from joulemark.attribution.stored import POOLED, check, folder_beside
from joulemark.collect.memory import ProcessMemoryPeak
from joulemark.collect.timing import HostTimer
from joulemark.errors import CountersBusy, UnreadableInput
from joulemark.measure.attribution_pass import Attributing, attribute_step, measurement_of
from joulemark.measure.plan import Pass, Plan
from joulemark.measure.runner import Runner
from joulemark.metrics import ATTRIBUTION
from joulemark.records import Finding
from joulemark.synthetic_run import SyntheticBench, SyntheticKernel, SyntheticRun
from joulemark.workloads.base import Step

GEMM = SyntheticKernel("sm90_xmma_gemm_bf16bf16", 110e-6, {"pipe_tensor": 0.6, "dram_read_bytes": 1e12})
ADD = SyntheticKernel("vectorized_elementwise_kernel", 70e-6, {"pipe_tensor": 0.0, "dram_read_bytes": 2e12})
TINY = SyntheticKernel("Memset (Device)", 1.5e-6, {"pipe_tensor": 0.0, "dram_read_bytes": 0.0})
ONE = Pass("attribution", 20.0, min_samples=6)


def bench(**given):
    return SyntheticBench(SyntheticRun((GEMM, ADD, TINY), interval_s=10e-6, seed=3), **given)


def attributed(folder, one=ONE, step=None, **given):
    step = step or Step(lambda: time.sleep(1e-3))
    return attribute_step(Attributing(bench(**given)), one, step, folder, folder / "one.json", "a case", None)


def passed(step=None, **given):
    """What the runner says of the pass: whatever befalls it costs its own figures."""
    runner = Runner(HostTimer(), ProcessMemoryPeak(), label="a case", **given)
    *_, last = runner.measure(step or Step(lambda: time.sleep(1e-3)), Plan((ONE,)))
    return last


def test_the_record_holds_key_figures_of_the_document(tmp_path):
    found = attributed(tmp_path)
    document = json.loads((tmp_path / "one.json").read_text())
    check(document)
    assert document["label"] == "a case"
    overhead = found.values["attribution_overhead"]
    assert (overhead.value, list(overhead.interval)) == (
        document["steps"]["slowdown"], document["steps"]["slowdown_interval"],
    )  # fmt: skip
    assert (overhead.n, len(found.samples["attribution_plain_step_s"])) == (6, 7)
    assert overhead.confidence >= 0.95
    share = {one["class"]: one["time_share"] for one in document["classes"]}
    assert found.values["attributed_fraction"].value == pytest.approx(1 - share[POOLED])
    assert 0 < share[POOLED] < 0.03
    rows = {row["class"]: row for row in found.tables["attribution"]}
    assert rows["tensor_gemm"]["uses_tensor_cores"]
    assert rows["tensor_gemm"]["tensor_active_fraction"] == pytest.approx(0.6, abs=0.01)
    assert rows["tensor_gemm"]["dram_read_bytes"] == pytest.approx(110e6, rel=0.03)
    assert rows["tensor_gemm"]["dram_write_bytes"] is None
    assert found.missing == {}


def test_findings_flag_the_record_and_what_is_missing_is_said(tmp_path):
    differ = Finding("attribution_totals_differ", "kernels are given 0.9 of what was counted", flags=True)
    document = {"steps": {"recorded": 2}, "classes": [], "findings": [differ.to_json()]}
    found = measurement_of("attribution", document, Recording("a case", ()))
    assert found.findings == (differ,)
    assert found.missing == {
        "attribution_overhead": "no stretch without the instruments stands beside a window of the recording"
    }


def test_a_recording_that_cannot_be_attributed_says_how_to_keep_it(tmp_path, monkeypatch):
    monkeypatch.setattr(SyntheticRun, "device_events", lambda self, launches, beacons: [])
    with pytest.raises(UnreadableInput, match=r"cannot be attributed: .*: .*; --bench-keep-traces keeps"):
        attributed(tmp_path)
    assert not (tmp_path / "one.json").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "this process has opened no instruments for it"),
        ({"attributing": Attributing(None, "pm_sampling: refused: ask an administrator")}, "ask an administrator"),
        ({"attributing": Attributing(bench(fails=CountersBusy("held", "dcgmi profile --pause")))}, "profile --pause"),
    ],
)
def test_what_is_missing_has_its_reason_and_the_remedy(given, said):
    found = passed(**given)
    assert found.values == {}
    assert set(found.missing) == set(ATTRIBUTION)
    assert all(said in why for why in found.missing.values())


def test_a_setup_between_steps_is_refused():
    found = passed(Step(lambda: None, setup=lambda: None), attributing=Attributing(bench()))
    assert "a setup runs between the steps" in found.missing["attributed_fraction"]


@pytest.mark.parametrize("kept", [None, "kept"])
def test_the_recording_stays_where_that_is_asked_for(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = passed(attributing=Attributing(bench()), keep_trace=kept and tmp_path / kept)
    assert found.values
    assert [str(one.relative_to(tmp_path)) for one in tmp_path.rglob(FILE)] == ([f"kept/{FILE}"] if kept else [])


def test_documents_stand_beside_the_records(tmp_path):
    assert folder_beside(tmp_path / "sweep-1.jsonl") == tmp_path / "sweep-1-attribution"
