"""What a campaign is held to, said for a campaign that holds it and for others that do not."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from bench_energy import bars
from joulemark.report.formats import render

WANTED = tuple(f"w{i}" for i in range(20))


def line(r2, n=3):
    return {"benchmark": "fp32", "operands": "zero", "n": n, "levels": n, "r2": r2, "reason": None if r2 else "too few"}


def row(name, error, capped=False, residual=-0.02):
    split = {"residual_share": residual}
    return {"workload": name, "error": error, "capped": capped, "split": split, "notes": {}}


@pytest.fixture
def campaign():
    """A calibration, a validation and its splits that hold everything."""
    calibration = SimpleNamespace(
        goodness={"lines": [line(0.999)], "orderings": [{"statement": "a", "holds": True}], "condition_number": 14.0},
        coefficients=[SimpleNamespace(unit="fp32", part="control", at_bound=False, reason=None)],
    )
    errors = {"n": 18, "mean_absolute": 0.03, "worst": 0.1}
    capped = {"n": 2, "mean_absolute": 0.03, "worst": 0.07}
    summary = {
        "uncapped": errors, "uncapped_dynamic": errors, "networks": errors, "capped": capped,
        "baselines": {"constant power": {"mean_absolute": 0.3}, "tensor + HBM": {"mean_absolute": 0.07}},
        "power": {"lowest_w": 140.0, "below_70_percent_of_limit": 10, "n": 20}, "without_prediction": [],
    }  # fmt: skip
    validation = {"summary": summary, "rows": [row(name, 0.01, capped=name in WANTED[-2:]) for name in WANTED]}
    splits = {"rows": [row("resnet50-train-bf16-b8", None, residual=0.08)]}
    return copy.deepcopy((calibration, validation, splits))


def judged(campaign, failed=None):
    return {bar.what: bar for bar in bars.bars(*campaign, WANTED, {"failed": failed or {}})}


def test_a_campaign_that_holds_everything(campaign):
    found = judged(campaign)
    assert all(bar.holds for bar in found.values())
    assert found["residual: resnet50-train-bf16-b8"].seen == "+8.0%"
    assert found["beaten: tensor + HBM"].seen == "2.3×"
    assert f"what must hold: {len(found)} of {len(found)} do" in render([bars.table(list(found.values()))])


def test_each_bar_that_is_missed_says_what_misses_it(campaign):
    calibration, validation, splits = campaign
    calibration.goodness["lines"] += [line(0.95), line(None, 2)]
    calibration.goodness["orderings"].append({"statement": "l1 cheaper than l2", "holds": False})
    validation["summary"]["uncapped"] = {"n": 19, "mean_absolute": 0.06, "worst": 0.2}
    validation["rows"][3]["error"] = -0.2
    validation["summary"]["capped"]["worst"] = 0.09
    validation["rows"][-1]["error"] = 0.09
    splits["rows"][0]["split"]["residual_share"] = 0.11
    found = judged(campaign)
    missed = {what for what, bar in found.items() if not bar.holds}
    assert missed == {
        "lines with R² of dynamic energy", "orderings (zeros, levels)", "mean error, uncapped", "worst error, uncapped",
        "worst error, capped, per item", "beaten: tensor + HBM", "residual: resnet50-train-bf16-b8",
    }  # fmt: skip
    assert found["lines with R² of dynamic energy"].why == (
        "fp32 zero, 3 windows at 3 rates, 0.9500",
        "fp32 zero, 2 windows at 2 rates",
    )
    assert found["worst error, uncapped"].why == ("w3 -20.0%",)
    assert found["worst error, capped, per item"].why == ("w19 +9.0%",)
    assert "NO" in render([bars.table(list(found.values()))])


def test_a_coefficient_at_its_bound_needs_its_reason(campaign):
    campaign[0].coefficients[0].at_bound = True
    assert not judged(campaign)["coefficients at their bound"].holds
    campaign[0].coefficients[0].reason = "at 0: no more than its noise"
    assert judged(campaign)["coefficients at their bound"].why == ("fp32 control: at 0: no more than its noise",)


def test_workloads_that_are_missing_need_their_reason(campaign):
    del campaign[1]["rows"][0]
    found = judged(campaign)["held-out workloads"]
    assert (found.holds, found.seen, found.why) == (False, "19 of 20", ("w0: not measured",))
    campaign[1]["rows"] = campaign[1]["rows"][:1]
    assert not judged(campaign, dict.fromkeys(WANTED, "out of memory"))["held-out workloads"].holds  # too few


def test_what_was_not_measured_holds_nothing(campaign):
    campaign[1]["summary"]["capped"] = {"n": 0, "mean_absolute": None, "worst": None}
    found = judged(campaign)["mean error, capped, per item"]
    assert (found.holds, found.seen) == (None, "n/a")
    assert "not measured" in render([bars.table([found])])
