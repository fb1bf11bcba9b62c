"""The knee over batch size: on synthetic curves with noise, where the truth is known."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from joulemark.utilization.plateau import Plateau, Point, find_plateau

BATCHES = 2.0 ** np.arange(3, 11)
KNEE = 64.0
DRAWS, PROCESSES, SAMPLES = 1000, 3, 9

CURVES = {
    "rising": BATCHES**0.9,
    "knee": np.minimum(BATCHES / KNEE, 1),
    "knee between batches": np.minimum(BATCHES / 90, 1),
    "smooth": BATCHES / (BATCHES + 8),
    "declining": np.where(BATCHES < KNEE, BATCHES / KNEE, (KNEE / BATCHES) ** 0.15),
    "two slopes": np.where(BATCHES < KNEE, BATCHES / KNEE, (BATCHES / KNEE) ** 0.03),
    "two steep slopes": np.where(BATCHES < KNEE, BATCHES / KNEE, (BATCHES / KNEE) ** 0.4),
    "too few": BATCHES[:3] / KNEE,
}


def begin(corner: float, slope: float) -> float:
    """Where a doubling gains 5 % on the curve itself: log level rises by 1 per doubling, beyond the corner by slope."""
    return corner * 2 ** (-(math.log2(1.05) - slope) / (1 - slope))


TRUTH = {
    "knee": begin(KNEE, 0),
    "knee between batches": begin(90, 0),
    "smooth": 9.5 * 8,  # a doubling of B / (B + k) gains k / (2 B + k)
    "declining": begin(KNEE, -0.15),
    "two slopes": begin(KNEE, 0.03),
}
VERDICT = {
    "rising": "not_reached",
    "declining": "declines",
    "two steep slopes": "not_reached",
    "too few": "too_few_points",
}


def measured(curve: Any, rng: np.random.Generator) -> list[Point]:
    """Medians of processes: 1 % between processes, 2 % noise of each sample."""
    shift = 1 + rng.normal(0, 0.01, (PROCESSES, curve.size))
    noise = np.median(1 + rng.normal(0, 0.02, (SAMPLES, PROCESSES, curve.size)), axis=0)
    levels = curve * shift * noise
    return [Point(float(batch), tuple(levels[:, i])) for i, batch in enumerate(BATCHES[: curve.size])]


@pytest.mark.parametrize("name", CURVES)
def test_a_thousand_draws(name: str) -> None:
    rng = np.random.default_rng(20)
    found = [find_plateau(measured(CURVES[name], rng), draws=200, seed=draw) for draw in range(DRAWS)]
    verdicts = Counter(one.verdict for one in found)
    assert verdicts[VERDICT.get(name, "plateau")] >= 0.95 * DRAWS, verdicts  # type: ignore[index]
    if name in TRUTH:
        near = sum(one.knee is not None and abs(math.log2(one.knee / TRUTH[name])) <= 1 for one in found)
        covered = sum(one.interval is not None and one.interval[0] <= TRUTH[name] <= one.interval[1] for one in found)
        widths = [math.log2(one.interval[1] / one.interval[0]) for one in found if one.interval]
        assert near >= 0.95 * DRAWS
        assert covered >= 0.85 * DRAWS
        assert np.median(widths) < 2  # doublings: an interval over everything would cover too
    else:
        assert all(one.knee is None for one in found if one.verdict == VERDICT[name])


@pytest.mark.parametrize("name", ["knee", "knee between batches", "declining"])
def test_the_interval_covers_the_corner_too(name: str) -> None:
    rng = np.random.default_rng(21)
    corner = 90 if "between" in name else KNEE
    found = [find_plateau(measured(CURVES[name], rng), draws=200) for _ in range(200)]
    assert sum(one.interval is not None and one.interval[0] <= corner <= one.interval[1] for one in found) >= 170
    assert sum(one.corner is not None and abs(math.log2(one.corner / corner)) < 0.2 for one in found) >= 190


def exact(curve: Any, batches: Any = BATCHES, **options: Any) -> Plateau:
    points = [Point(float(b), (float(v),) * 3) for b, v in zip(batches, curve, strict=True)]
    return find_plateau(points, **options)


def test_without_noise_the_knee_is_where_a_doubling_gains_5_percent() -> None:
    found = exact(CURVES["knee"])
    assert found.knee == pytest.approx(KNEE / 1.05, rel=0.01)
    assert found.corner == pytest.approx(KNEE, rel=0.01)
    assert found.level == pytest.approx(1)
    assert (found.verdict, found.support, found.findings) == ("plateau", 1.0, ())
    assert found.describe().startswith("plateau from 6")


def test_verdicts_in_words() -> None:
    assert (
        exact(CURVES["rising"], limited_by="memory").describe() == "not reached (largest batch 1024, limited by memory)"
    )
    declining = exact(CURVES["declining"])
    assert declining.declines_from == pytest.approx(KNEE * 2 ** (math.log2(1.05) / 0.15), rel=0.02)
    assert declining.describe() == "declines past 88.6"
    assert exact(CURVES["too few"], BATCHES[:3]).describe().startswith("too few points")
    assert exact(np.ones(8)).describe() == "plateau from 8 [≤ 8, 8]"


def test_no_argmax_the_highest_point_of_a_plateau_is_not_its_begin() -> None:
    curve = CURVES["knee"].copy()
    curve[-1] *= 1.02
    assert exact(curve).knee == pytest.approx(KNEE, rel=0.1)


def test_estimators_that_disagree_are_a_finding() -> None:
    steep = exact(CURVES["two steep slopes"])
    assert [one.code for one in steep.findings] == ["plateau_estimators_disagree"]
    assert "no knee within the batches" in steep.findings[0].message
    slow = exact(BATCHES / (BATCHES + 30))
    assert "plateau_estimators_disagree" in [one.code for one in slow.findings]


def test_a_late_jump_is_no_plateau_before_it() -> None:
    curve = np.array([1, 2, 2, 2, 2, 2, 3, 3.0])
    assert exact(curve).knee == pytest.approx(512, rel=0.5)
    assert exact(curve).interval is not None


def test_a_dip_of_one_batch_is_no_decline() -> None:
    curve = np.array([1, 2, 4, 8, 8, 6, 8, 8.0])
    found = exact(curve)
    assert found.verdict == "plateau"
    assert found.knee is not None
    assert found.knee > 200  # beyond the dip a doubling gains again


def test_one_process_has_an_assumed_spread() -> None:
    points = [Point(float(b), (float(v),)) for b, v in zip(BATCHES, CURVES["knee"], strict=True)]
    found = find_plateau(points)
    assert "spread_assumed" in [one.code for one in found.findings]
    assert found.interval is not None
    assert found.interval[0] < found.interval[1]


def test_noise_that_hides_the_verdict_is_said() -> None:
    rng = np.random.default_rng(3)
    points = [
        Point(float(b), tuple(v * (1 + rng.normal(0, 0.3, 3)))) for b, v in zip(BATCHES, BATCHES**0.08, strict=True)
    ]
    assert "plateau_uncertain" in [one.code for one in find_plateau(points).findings]


def test_other_spacings_and_orders() -> None:
    batches = np.array([512, 8, 12, 16, 24, 384, 32, 48, 64, 96, 128, 192, 256.0])
    found = exact(np.minimum(batches / 100, 1), batches)
    assert found.knee == pytest.approx(100 / 1.05, rel=0.1)
    assert found.largest_batch == pytest.approx(512)


def test_levels_that_are_not_above_zero_are_left_out() -> None:
    points = [
        Point(1, (0.0,)),
        *(Point(float(b), (float(v),) * 2) for b, v in zip(BATCHES, CURVES["knee"], strict=True)),
    ]
    found = find_plateau(points)
    assert found.findings[0].code == "level_not_positive"
    assert found.verdict == "plateau"
    assert find_plateau([Point(b, (0.0,)) for b in BATCHES]).verdict == "too_few_points"
    assert find_plateau([]).verdict == "too_few_points"


@pytest.mark.parametrize("points", [[Point(8, ())], [Point(8, (1.0,)), Point(8, (2.0,))], [Point(0, (1.0,))]])
def test_points_that_make_no_sense(points: list[Point]) -> None:
    with pytest.raises(ValueError, match="batch size"):
        find_plateau(points)


def test_json_is_strict_and_repeatable() -> None:
    rng = np.random.default_rng(1)
    for name, curve in CURVES.items():
        points = measured(curve, rng)
        document = find_plateau(points).to_json()
        assert json.loads(json.dumps(document, allow_nan=False)) == find_plateau(points).to_json(), name
        assert document["text"]
