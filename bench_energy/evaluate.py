"""From raw windows and measured workloads to everything that is committed of them; needs no GPU.

python bench_energy/evaluate.py WINDOWS.jsonl MEASUREMENTS.json --out results

Writes OUT/calibration/<gpu>.json with the windows beside it, and OUT/<gpu>/validation.json (the held-out workloads),
energy-split.json (the splits), each with its picture (.svg). Prints the calibration, every prediction and every split,
and at last what must hold and whether it does.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_energy import bars
from bench_energy.held_out import HELD_OUT
from bench_energy.splits import SPLITS
from joulemark.device.gpu import slug
from joulemark.energy import trends, validation
from joulemark.energy.calibration import Calibration, refit, write_calibration
from joulemark.energy.windows import read_windows
from joulemark.errors import JoulemarkError
from joulemark.report import energy_plot, energy_view, formats, jsonout, output

PUBLISHED = Path(__file__).parents[1] / "results" / "published"
LISTS = {"validation": HELD_OUT, "energy-split": SPLITS}


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, predict, split, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("windows", type=Path, metavar="WINDOWS", help="by joulemark calibrate")
    parser.add_argument("measurements", type=Path, metavar="MEASUREMENTS", help="by measure_workloads.py")
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR")
    args = parser.parse_args(argv)
    try:
        _write(args.windows, args.measurements, args.out)
    except JoulemarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _write(windows: Path, measurements: Path, out: Path) -> None:
    calibration = _calibration(windows, out)
    beside = trends.beside(calibration, trends.read_published(PUBLISHED.glob("*.json")))
    source, rows = validation.read_measurements(measurements)
    folder = out / slug(str(calibration.gpu.get("gpu")))
    folder.mkdir(parents=True, exist_ok=True)
    documents = {}
    for name, workloads in LISTS.items():
        wanted = {one.name for one in workloads}
        outcomes = validation.evaluate(calibration, [row for row in rows if row.workload in wanted])
        document = documents[name] = validation.document(
            calibration, source, outcomes, {"what_if": [], "trends": beside}
        )
        output.write_text(jsonout.dumps(document), folder / f"{name}.json")
        energy_plot.draw(document, folder / f"{name}.svg")
        sys.stdout.write(formats.render(energy_view.workload_tables(document)))
    found = bars.bars(calibration, *documents.values(), [one.name for one in HELD_OUT], source)
    sys.stdout.write(formats.render([bars.table(found)]))


def _calibration(windows: Path, out: Path) -> Calibration:
    """The fit of the windows, which come to stand beside it."""
    gpu = slug(str(read_windows(windows).header.get("gpu")))
    kept = out / "calibration" / f"{gpu}-windows.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    if not kept.exists() or not kept.samefile(windows):
        shutil.copyfile(windows, kept)
    calibration = refit(kept)
    write_calibration(calibration, kept.with_name(f"{gpu}.json"))
    sys.stdout.write(formats.render(energy_view.calibration_tables(calibration)))
    return calibration


if __name__ == "__main__":
    sys.exit(main())
