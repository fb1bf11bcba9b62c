"""Stored runs as one strict JSON document, described by ``docs/schema/report.schema.json``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from joulemark.errors import UnreadableInput
from joulemark.records import OUTCOMES, Json, Record, Run
from joulemark.report.tables import efficiency_of

SCHEMA = "joulemark/report/1"


def dumps(document: Json) -> str:
    """Strict JSON: ASCII, no NaN, a line break at its end.

    Raises:
        UnreadableInput: NaN or an infinity is inside: figures that were read are so absurd that ratios overflow.
    """
    try:
        return json.dumps(document, indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        raise UnreadableInput(
            f"a figure of the document is no number ({error})", "look for absurd figures in the files that were given"
        ) from error


def render(runs: Sequence[Run]) -> str:
    """The document of some runs as text."""
    return dumps(document(runs))


def document(runs: Sequence[Run]) -> Json:
    """Runs with everything but the raw samples, which stay in the result files."""
    return {"schema": SCHEMA, "runs": [_run(run) for run in runs]}


def _run(run: Run) -> Json:
    counts = Counter(record.outcome for record in run.records)
    return {
        "path": run.path,
        "run_id": run.run_id,
        "source": run.source,
        "started_utc": run.started_utc,
        "completed": run.completed,
        "reason": run.reason,
        "wall_s": run.wall_s,
        "measured_s": run.measured_s,
        "efficiency": efficiency_of(run),
        "outcomes": {outcome: counts[outcome] for outcome in OUTCOMES},
        "problems": list(run.problems),
        "environments": {
            key: {"facts": dict(one.facts), "tiers": dict(one.tiers), "notes": dict(one.notes)}
            for key, one in run.environments.items()
        },
        "rows": [_row(record) for record in run.records],
    }


def _row(record: Record) -> Json:
    left_out = ("kind", "schema", "run_id", "samples", "sample_counts")
    return {"label": record.case.label, **{k: v for k, v in record.to_json().items() if k not in left_out}}
