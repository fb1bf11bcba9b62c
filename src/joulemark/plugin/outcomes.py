"""What a record means for its item: how pytest sees its outcome, and its verdict against the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from joulemark.records import Record

if TYPE_CHECKING:
    from joulemark.plugin.baseline import Baseline


def conclude(record: Record, longrepr: str | None, output: str, strict: bool) -> None:
    """Turn an outcome into pytest's: failed and unsupported raise, so do flagged and oom under strict.

    Args:
        record: of the case.
        longrepr, output: what its process says of a failure, and what it had written.
        strict: as ``--bench-strict``.
    """
    if record.outcome == "unsupported":
        pytest.skip(record.reason or "unsupported")
    if record.outcome == "failed":
        text = "\n".join(part for part in (record.reason, longrepr, output) if part)
        # The child's words may hold anything: what would steer the terminal is spelt out.
        pytest.fail(_printable_lines(text), pytrace=False)
    if strict and record.outcome in ("oom", "flagged"):
        said = record.reason or "; ".join(one.message for one in record.findings if one.flags)
        pytest.fail(f"--bench-strict: {record.outcome}: {said}", pytrace=False)


def hold_against(baseline: Baseline, item: pytest.Item, record: Record) -> None:
    """Fail the item when its case got worse; an out-of-memory that is new counts as worse."""
    from joulemark.plugin.baseline import in_words

    worse = [in_words(row) for row in baseline.judge(record)]
    if worse:
        item.user_properties.append(("regressed", "; ".join(worse)))
        text = "\n".join(["regressed against " + baseline.run.path, *(f"  {one}" for one in worse)])
        pytest.fail(_printable_lines(text), pytrace=False)


def _printable_lines(text: str) -> str:
    """A text of several lines in which nothing steers the terminal."""
    from joulemark.report.escape import printable

    return "\n".join(printable(line) for line in text.splitlines())
