from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from joulemark.trace import analyse_files

DATA = Path(__file__).parents[1] / "data" / "trace"


class TraceWriter:
    """Writes small Kineto traces; times in µs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[dict[str, Any]] = []
        self.header: dict[str, Any] = {"schemaVersion": 1}

    def complete(self, cat: str | None, name: str, ts: Any, dur: Any, pid: Any = 1, tid: Any = 1, **args: Any) -> None:
        event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        self.events.append(event if cat is None else {"cat": cat, **event})

    def operator(self, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> None:
        self.complete("cpu_op", name, ts, dur, tid=tid, **args)

    def mark(self, name: str, ts: float, dur: float, tid: int = 1) -> None:
        self.complete("user_annotation", name, ts, dur, tid=tid)

    def call(self, name: str, ts: float, dur: float, correlation: int, tid: int = 1, cat: str = "cuda_runtime") -> None:
        self.complete(cat, name, ts, dur, tid=tid, correlation=correlation)

    def kernel(
        self, ts: float, dur: float, correlation: int, name: str = "k", device: int = 0, stream: int = 7, **args: Any
    ) -> None:
        self.complete(
            "kernel",
            name,
            ts,
            dur,
            pid=device,
            tid=stream,
            device=device,
            stream=stream,
            correlation=correlation,
            **args,
        )

    def copy(self, ts: float, dur: float, correlation: int, size: int = 1000, device: int = 0, stream: int = 7) -> None:
        self.complete(
            "gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", ts, dur, pid=device, tid=stream,
            device=device, stream=stream, correlation=correlation, bytes=size,
        )  # fmt: skip

    def launched(self, ts: float, begin: float, dur: float, correlation: int, call: float = 5, **kernel: Any) -> None:
        """A launch call at ``ts`` and its kernel at ``begin``."""
        self.call("cudaLaunchKernel", ts, call, correlation)
        self.kernel(begin, dur, correlation, **kernel)

    def save(self, name: str = "trace.json") -> Path:
        path = self.folder / name
        path.write_text(json.dumps({**self.header, "traceEvents": self.events}))
        return path

    def document(self) -> dict[str, Any]:
        return analyse_files([self.save()])

    def entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = self.document()["files"][0]
        assert entry["error"] is None
        return entry


@pytest.fixture
def writer(tmp_path: Path) -> TraceWriter:
    return TraceWriter(tmp_path)


@pytest.fixture
def data() -> Path:
    return DATA


@pytest.fixture
def known() -> Callable[[str], dict[str, Any]]:
    """The entry of a trace of the test data."""

    def entry(name: str) -> dict[str, Any]:
        found: dict[str, Any] = analyse_files([DATA / name])["files"][0]
        return found

    return entry
