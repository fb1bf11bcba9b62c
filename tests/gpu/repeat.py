"""Do two identical sweeps agree? Share of rows whose figures differ by less than 2 %; exit 1 below 90 %.

Run: ``python tests/gpu/repeat.py FIRST.jsonl SECOND.jsonl``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from joulemark.store import read_run

LIMIT, SHARE = 0.02, 0.9


def main(first: str, second: str) -> int:
    """Print the share per metric and the worst rows."""
    a, b = ({one.case_id: one for one in read_run(Path(path)).records} for path in (first, second))
    common = [key for key in a if key in b]
    worst_share = 1.0
    for metric in ("device_time_s", "host_time_s", "energy_per_item_j", "power_w"):
        ratios = {
            a[key].case.label: b[key].value(metric) / a[key].value(metric)
            for key in common
            if a[key].value(metric) and b[key].value(metric)
        }
        near = sum(abs(ratio - 1) <= LIMIT for ratio in ratios.values())
        share = near / len(ratios) if ratios else 0.0
        worst = sorted(ratios.items(), key=lambda pair: -abs(pair[1] - 1))[:5]
        print(
            f"{metric}: {near} of {len(ratios)} rows within {LIMIT:.0%} ({share:.1%}); "
            + "; ".join(f"{label} {ratio:.3f}" for label, ratio in worst)
        )
        if metric == "device_time_s":
            worst_share = share
    return 0 if worst_share >= SHARE else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
