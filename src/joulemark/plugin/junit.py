"""What a record says in a JUnit file: properties of its test case, which CI systems show and collect."""

from __future__ import annotations

from collections.abc import Iterator

from joulemark.records import Record


def properties_of(record: Record) -> Iterator[tuple[str, str]]:
    """Properties by name, the outcome first.

    A figure is ``<metric>`` with the ends of its interval ``<metric>_lo`` and ``<metric>_hi``, in the units of the
    records (s, J, B …), as in a report's csv; a figure that was not measured has no property.

    Args:
        record: of the test case.
    """
    yield "outcome", record.outcome
    yield "case_id", record.case_id
    yield "gpu_model", record.case.gpu_model
    if record.reason:
        yield "reason", record.reason
    if record.findings:
        yield "findings", " ".join(dict.fromkeys(finding.code for finding in record.findings))
    for name, figure in record.metrics.items():
        if figure.value is None:
            continue
        yield name, repr(figure.value)
        if figure.interval is not None:
            yield f"{name}_lo", repr(figure.interval[0])
            yield f"{name}_hi", repr(figure.interval[1])
