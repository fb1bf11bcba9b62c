"""How long a window, and which points, give the best calibration in a given time? On synthetic GPUs; needs none.

python bench_energy/window_study.py --seconds 420

Prints the error of dynamic power over random mixtures of the microbenchmarks' own rates, which stand for workloads.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from joulemark.energy.calibrate import SETTLE_S, measure
from joulemark.energy.fit import Fit, design_of, fit
from joulemark.energy.plan import plan
from joulemark.energy.units import LOSSES, STATIC
from joulemark.energy.windows import Point, WindowWriter, read_windows
from joulemark.synthetic_gpu import Noise, SyntheticGpu

OVERHEAD_S = 0.1
"""Loading, sizing and ending of a window, beside settling and the window itself."""
NOISES = {"calm": Noise(drift_w=0.5, edge_s=0.0025), "a step of 8 W": Noise(drift_w=1.0, edge_s=0.0025, step_w=8.0)}
MIXTURES = 200


def main(argv: Sequence[str] | None = None) -> int:
    """A line per noise, order of points and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=420.0, metavar="S", help="for all windows (420)")
    parser.add_argument("--windows", type=float, nargs="+", default=[0.8, 1.0, 1.5, 2.3], metavar="S")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="synthetic GPUs per line (5)")
    args = parser.parse_args(argv)
    print("noise            points     window  windows  workloads  median coefficient  inside the interval")
    for name, noise in NOISES.items():
        for order, points in ORDERS.items():
            for window_s in args.windows:
                count = int(args.seconds / (window_s + SETTLE_S + OVERHEAD_S))
                found = [trial(points()[:count], window_s, noise, seed) for seed in range(args.seeds)]
                error, coefficient, inside = np.mean(found, axis=0)
                begin = f"{name:15}  {order:9}  {window_s:4.1f} s  {count:7}"
                print(f"{begin}  {error:9.2%}  {coefficient:18.1%}  {inside:.0%}", flush=True)
    return 0


def _repeated() -> list[Point]:
    """The short plan again and again."""
    return [replace(point, repeat=n) for n in range(4) for point in plan("sm_90a", quick=True, seed=n)]


ORDERS = {"reference": lambda: plan("sm_90a", repeats=3), "short": _repeated}


def trial(points: Sequence[Point], window_s: float, noise: Noise, seed: int) -> tuple[float, float, float]:
    """Mean relative error of mixtures, median one of coefficients, and the share of mixtures inside their interval."""
    gpu = SyntheticGpu(noise=noise, limit_w=700.0, peak_w=400.0, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "windows.jsonl"
        writer = WindowWriter(path, {"gpu_uuid": gpu.facts.uuid, "architecture": "sm_90a"})
        measure(gpu, gpu.meter, points, None, writer, limit_s=np.inf, window_s=window_s)
        fitted = fit(design_of(read_windows(path).windows), draws=100)
    true = np.array([gpu.coefficients.get(column, 0.0) for column in fitted.design.columns])
    rates = mixtures(fitted, np.random.default_rng(seed))
    wanted, found = (dynamic_w(fitted, rates, values) for values in (true, fitted.values))
    low, high = np.quantile([dynamic_w(fitted, rates, values) for values in fitted.draws], (0.025, 0.975), axis=0)
    known = true > 0
    return (
        float(np.abs(found / wanted - 1).mean()),
        float(np.median(np.abs(fitted.values[known] / true[known] - 1))),
        float(((low <= wanted) & (wanted <= high)).mean()),
    )


def dynamic_w(fitted: Fit, rates: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Power above static by some coefficients, shape [n]."""
    one = replace(fitted, values=values)
    return one.power_w(rates) - one.power_w(np.zeros_like(rates))


def mixtures(fitted: Fit, rng: np.random.Generator) -> np.ndarray:
    """Rates of made-up workloads above static power, shape [n, p]: a few windows each, at random shares."""
    rates = fitted.design.rates.copy()
    rates[:, [unit in (STATIC, *LOSSES) for unit, _ in fitted.design.columns]] = 0.0
    rates = rates[rates.any(axis=1)]
    rows = []
    for _ in range(MIXTURES):
        chosen = rng.choice(len(rates), rng.integers(4, 9), replace=False)
        rows.append(rng.dirichlet(np.ones(len(chosen))) @ rates[chosen])
    return np.array(rows)


if __name__ == "__main__":
    sys.exit(main())
