"""How often a case is measured: once per process that was asked for, and once more after a CUDA error."""

from __future__ import annotations

from collections.abc import Callable

from joulemark.records import Finding, Json


def attempts(ask: Callable[[int], Json], restart: Callable[[], None], processes: int, running: bool) -> list[Json]:
    """The replies of all processes; one that is not ``ok`` is the last.

    A CUDA error that makes the context unusable is tried once more in a fresh process.

    Args:
        ask: has the case measured in the process of a number, from 0.
        restart: makes the next ask start a fresh process.
        processes: in how many fresh processes to measure.
        running: whether a process of an earlier case still runs.
    """
    replies: list[Json] = []
    for process in range(processes):
        if process or (processes > 1 and running):
            restart()
        reply = ask(process)
        if reply.get("poisoned"):
            restart()
            first = reply["reason"]
            reply = ask(process)
            if reply.get("poisoned"):
                restart()
                reply["reason"] = f"{reply['reason']} (twice, the second time in a fresh process)"
            else:
                reply["findings"] = [*reply["findings"], _retried(first).to_json()]
        replies.append(reply)
        if reply["outcome"] != "ok":
            break
    return replies


def _retried(first: str | None) -> Finding:
    return Finding("retried", f"a CUDA error ended the first try ({first}); measured in a fresh process", flags=True)
