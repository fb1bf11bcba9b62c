"""The parser: forms of files, damage, numbers, blocks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from joulemark.errors import UnreadableInput
from joulemark.trace import analyse_files
from joulemark.trace.chrome import read_trace
from joulemark.trace.events import Trace


def kernel(ts: Any = 10, dur: Any = 5, **more: Any) -> dict[str, Any]:
    args = {"device": 0, "correlation": 1}
    return {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args} | more


def write(folder: Path, text: str | bytes, name: str = "t.json") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def durations(path: Path, block: int = 1 << 22) -> list[int]:
    trace = read_trace(path, block)
    return [int(ps) for ps in trace.device.end - trace.device.start]


@pytest.mark.parametrize("block", [64, 300, 1 << 22])
@pytest.mark.parametrize(
    "layout",
    [
        lambda events: json.dumps({"traceEvents": events}),
        lambda events: json.dumps({"traceEvents": events}, indent=2),
        lambda events: json.dumps({"traceEvents": events}, separators=(",", ":")),
        lambda events: json.dumps({"a": {"traceEvents": [1]}, "traceEvents": events, "z": [{"b": 1}, {"c": "]}"}]}),
        lambda events: json.dumps(events),
        lambda events: "\ufeff  " + json.dumps({"traceEvents": events}),
        lambda events: json.dumps({"traceEvents": events}, indent=1).replace("\n", "\r\n"),
        lambda events: json.dumps({"traceEvents": events})[:-2] + ",]}",
    ],
    ids=["one line", "indented", "dense", "keys around", "bare list", "byte order mark", "crlf", "trailing comma"],
)
def test_layouts(tmp_path: Path, layout: Any, block: int) -> None:
    events = [kernel(ts=10 * i, dur=i, name=f'k}}, {{{i}\\" [') for i in range(1, 20)]
    path = write(tmp_path, layout(events))
    trace = read_trace(path, block)
    assert durations(path, block) == [i * 1_000_000 for i in range(1, 20)]
    assert trace.names[0] == 'k}, {1\\" ['
    assert (trace.damage.cut, trace.damage.skipped_events, trace.damage.repaired_events) == (None, 0, 0)


def test_objects_inside_args_do_not_split_events(tmp_path: Path) -> None:
    nested = {"list": [{"a": 1}, {"b": [{"c": "}, {"}, {"d": 2}]}]}
    events = [kernel(ts=10 * i, args={"correlation": i, **nested}) for i in range(1, 50)]
    path = write(tmp_path, json.dumps({"traceEvents": events}))
    for block in (100, 500, 1 << 22):
        trace = read_trace(path, block)
        assert trace.device.correlation.tolist() == list(range(1, 50))
        assert trace.damage.skipped_events == 0


def test_gzip_is_recognised_by_content_and_may_have_members(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [kernel(ts=10 * i) for i in range(1, 200)]}).encode()
    members = gzip.compress(text[:5000]) + gzip.compress(text[5000:]) + b"\0" * 16
    assert len(durations(write(tmp_path, members, "no_suffix.json"), 512)) == 199


def test_damaged_gzip_is_read_up_to_the_damage(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    events = [kernel(ts=float(ts)) for ts in rng.uniform(1, 1e9, 5000)]
    damaged = bytearray(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    damaged[-2000:-1900] = b"\xff" * 100
    trace = read_trace(write(tmp_path, bytes(damaged)))
    assert 2000 < len(trace.device) <= 5000
    assert trace.damage.cut is not None
    assert "damaged" in trace.damage.cut


def read_or_error(path: Path) -> Trace | str:
    """The trace, or the one line that says why there is none."""
    try:
        return read_trace(path)
    except UnreadableInput as error:
        return str(error)


def test_cut_anywhere_is_never_whole_and_never_a_traceback(tmp_path: Path) -> None:
    text = json.dumps(
        {"deviceProperties": [{"id": 0}], "traceEvents": [kernel(ts=10 * i) for i in range(1, 4)], "z": 1}
    )
    opened = text.index("[", text.index("traceEvents")) + 1
    closed = text.index("]", opened) + 1
    for length in range(len(text)):
        path = write(tmp_path, text[:length])
        found = read_or_error(path)
        if isinstance(found, str):
            assert str(path) in found
            assert length < opened
        elif length < closed:
            assert found.damage.cut is not None
        else:
            assert len(found.device) == 3
            assert found.damage.trailer_cut


@pytest.mark.parametrize("length", range(0, 400, 7))
def test_cut_gzip(tmp_path: Path, length: int) -> None:
    rng = np.random.default_rng(0)
    events = [kernel(ts=float(ts)) for ts in rng.uniform(1, 1e9, 100)]
    whole = gzip.compress(json.dumps({"traceEvents": events}).encode())
    path = write(tmp_path, whole[:length])
    found = read_or_error(path)
    if isinstance(found, str):
        assert str(path) in found
    else:
        assert found.damage.cut is not None
        assert len(found.device) < 100


@pytest.mark.parametrize(
    "text", ["", "  \n", "null", "{}", '{"a": 1}', '{"traceEvents": null}', "\x00\x01", "PK\x03\x04", "hello"]
)
def test_what_is_no_trace(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UnreadableInput) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_folder_and_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.json"):
        with pytest.raises(UnreadableInput, match="cannot read the trace"):
            read_trace(path)


def test_empty_list_of_events_is_a_trace(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, '{"traceEvents": []}'))
    assert (trace.events, trace.damage.cut) == (0, None)


@pytest.mark.parametrize(
    "bad",
    [
        '"bandwidth": inf', '"bandwidth": -Infinity', '"bandwidth": NaN', '"bandwidth": N/A', '"bandwidth": 1e999',
        '"text": "a\nb\tc"', '"text": "\\ud800"',
    ],
)  # fmt: skip
def test_what_json_forbids_is_repaired(tmp_path: Path, bad: str) -> None:
    row = json.dumps(kernel())
    broken = row.replace('"device": 0', f'"device": 0, {bad}, "note": "inf, NaN and N/A in a string"')
    path = write(tmp_path, f'{{"traceEvents": [{row}, {broken}, {row}]}}')
    assert durations(path) == [5_000_000] * 3
    assert read_trace(path).damage.skipped_events == 0


def test_broken_utf8_and_types_of_all_kinds(tmp_path: Path) -> None:
    events = [
        json.dumps(kernel(ts="10.5", dur="2")).encode(),
        json.dumps(kernel(ts=20)).encode().replace(b'"k"', b'"k\xff"'),
        json.dumps(kernel(ts=30, args=[1, 2])).encode(),
        json.dumps(kernel(ts=40, args={"correlation": "7", "device": "GPU 3", "bytes": None})).encode(),
        json.dumps(kernel(ts=50, args={"correlation": 2**70, "device": 1.0})).encode(),
        json.dumps(kernel(ts=None)).encode(),
        json.dumps(kernel(ts=60, name=5, pid="GPU 2", args={})).encode(),
        b"17",
        b"null",
    ]
    trace = read_trace(write(tmp_path, b'{"traceEvents": [' + b",\n".join(events) + b"]}"))
    assert trace.damage.invalid_kernels == 1
    assert trace.device.device.tolist() == [0, 0, 0, 3, 1, 2]
    assert trace.device.correlation.tolist() == [1, 1, -1, 7, -1, -1]
    assert "k\ufffd" in trace.names


def test_an_event_that_cannot_be_decoded_is_skipped_alone(tmp_path: Path) -> None:
    rows = [json.dumps(kernel(ts=10 * i, name=f"k{i}")) for i in range(1, 30)]
    rows[10] = rows[10].replace('"k11"', '"k"11"')  # a quote that nobody escaped
    path = write(tmp_path, '{"traceEvents": [\n' + ",\n".join(rows) + "\n]}")
    for block in (200, 1 << 22):
        trace = read_trace(path, block)
        assert len(trace.device) == 28
        assert trace.damage.skipped_events == 1
        assert trace.damage.cut is None


@pytest.mark.parametrize("base", [0, 5_093_767_933_842, 1_712_195_495_505_583])
def test_resolution(tmp_path: Path, base: int) -> None:
    path = write(tmp_path, f'{{"traceEvents": [{json.dumps(kernel(ts=base + 1, dur=1.234567))}]}}')
    assert durations(path) == [1_234_567]  # durations to the picosecond, whatever the origin of time
    starts = [f"{base + 1}.25", f"{base + 2}.5"]
    text = ",".join(json.dumps(kernel()).replace('"ts": 10', f'"ts": {ts}') for ts in starts)
    trace = read_trace(write(tmp_path, f'{{"traceEvents": [{text}]}}'))
    assert int(trace.device.start[1] - trace.device.start[0]) == 1_250_000


def test_stamps_in_nanoseconds_since_boot_are_exact(tmp_path: Path) -> None:
    starts = [f"5093767933842.{n:03d}" for n in range(1000)]
    text = ",".join(json.dumps(kernel()).replace('"ts": 10', f'"ts": {ts}') for ts in starts)
    trace = read_trace(write(tmp_path, f'{{"traceEvents": [{text}]}}'))
    assert np.diff(trace.device.start).tolist() == [1000] * 999


@pytest.mark.parametrize(
    ("ts", "dur"), [(0, 0), (-5, 3), (10, -1), (10, None), ("N/A", 3), (1e300, 3), (10, 1e300), (0, 4)]
)
def test_times_that_are_none(tmp_path: Path, ts: Any, dur: Any) -> None:
    good = kernel(ts=1_712_195_495_505_583)
    trace = read_trace(write(tmp_path, json.dumps({"traceEvents": [good, kernel(ts=ts, dur=dur)]})))
    assert trace.damage.invalid_kernels == 1
    assert len(trace.device) == 1


def test_first_kernel_at_time_zero_is_valid(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, json.dumps({"traceEvents": [kernel(ts=0, dur=4), kernel(ts=8, dur=4)]})))
    assert (len(trace.device), trace.damage.invalid_kernels) == (2, 0)


def test_spelling_of_the_first_profilers(tmp_path: Path) -> None:
    rows = [
        ("Operator", "aten::mm", 3, "3 (python)", 1, 20, {"External id": 4}),
        ("Runtime", "cudaLaunchKernel", 3, "3", 5, 5, {"cbid": 211, "correlation": 9, "external id": 4}),
        ("Kernel", "gemm", 0, "stream 7", 30, 5, {"device": 0, "stream": 7, "correlation": 9, "external id": 4}),
        ("Memset", "Memset (Device)", 0, "stream 7", 40, 5, {"bytes": 8}),
    ]
    keys = ("cat", "name", "pid", "tid", "ts", "dur", "args")
    events = [{"ph": "X", **dict(zip(keys, row, strict=True))} for row in rows]
    trace = read_trace(write(tmp_path, json.dumps({"traceEvents": events})))
    assert (len(trace.ranges), len(trace.calls), len(trace.device)) == (1, 1, 2)
    assert trace.calls.external.tolist() == trace.ranges.external.tolist() == [4]
    assert trace.device.size.tolist() == [-1, 8]


def test_nesting_without_end_is_skipped(tmp_path: Path) -> None:
    deep = json.dumps(kernel(ts=20)).replace('"device": 0', '"device": 0, "deep": ' + "[" * 20_000 + "]" * 20_000)
    path = write(tmp_path, f'{{"traceEvents": [{json.dumps(kernel())}, {deep}, {json.dumps(kernel(ts=30))}]}}')
    trace = read_trace(path)
    assert (len(trace.device), trace.damage.skipped_events) == (2, 1)


def test_a_large_file_of_something_else_is_refused_soon(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"rows": [{"a": 1, "b": "x" * 50}] * 60_000}))
    with pytest.raises(UnreadableInput, match="no list 'traceEvents'"):
        read_trace(path, 1 << 14)


def test_marks_of_the_first_profilers_own_no_kernels(tmp_path: Path) -> None:
    mark = {"ph": "X", "cat": "Operator", "name": "ProfilerStep#3", "pid": 1, "tid": 1, "ts": 1, "dur": 50}
    call = {"ph": "X", "cat": "Runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 5, "dur": 2}
    events = [mark, {**call, "args": {"correlation": 1}}, kernel(ts=20)]
    entry = analyse_files([write(tmp_path, json.dumps(events))])["files"][0]
    assert [row["name"] for row in entry["operators"]] == ["outside any operator"]
    assert [row["name"] for row in entry["iterations"]] == ["ProfilerStep#3"]


@pytest.mark.parametrize("wrong", [3, 5e13, 1e40, "9" * 40])
def test_one_wrong_time_at_the_begin_spoils_no_other(tmp_path: Path, wrong: Any) -> None:
    events = [kernel(ts=wrong), *(kernel(ts=1_712_195_495_505_583 + 10 * i) for i in range(5))]
    trace = read_trace(write(tmp_path, json.dumps({"traceEvents": events})))
    assert (len(trace.device), trace.damage.invalid_kernels) == (5, 1)


@pytest.mark.parametrize("block", [150, 1 << 22])
def test_first_times_of_zero(tmp_path: Path, block: int) -> None:
    events = [kernel(ts=0, dur=0), kernel(ts=0, dur=4), *(kernel(ts=10 * i) for i in range(1, 9))]
    trace = read_trace(write(tmp_path, json.dumps({"traceEvents": events})), block)
    assert trace.damage.invalid_kernels == 1
    assert np.diff(trace.device.start).tolist() == [10_000_000] * 8
