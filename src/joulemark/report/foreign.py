"""Results as people have them: joulemark's JSON lines and pytest-benchmark's JSON, both read into a Run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from joulemark.errors import UnreadableInput
from joulemark.metrics import all_metrics
from joulemark.records import Case, Environment, Finding, Json, Outcome, Record, Run, Value, canonical_json, digest
from joulemark.stats import summarize
from joulemark.store import find_runs, read_run

UNKNOWN_GPU = "unknown"
"""GPU model of a result whose file does not name one."""

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_SOURCE = "pytest-benchmark"


def read_result(path: Path) -> Run:
    """Read a stored run of either kind, told apart by what the file holds.

    Raises:
        UnreadableInput: nothing in it can be used.
    """
    if path.is_dir():
        raise UnreadableInput(f"{path} is a folder", "give a result file")
    try:
        with path.open("rb") as file:
            first = file.readline().strip()
    except OSError as error:
        raise UnreadableInput(f"cannot read {path} ({error.strerror or error})", "check the path") from error
    # pytest-benchmark's file is one document; a line of ours is whole by itself or carries our schema when cut.
    if path.suffix == ".jsonl" or b'"joulemark/' in first[:4096]:
        return read_run(path)
    return read_pytest_benchmark(path)


def read_pytest_benchmark(path: Path) -> Run:
    """Read what ``pytest --benchmark-json`` or ``--benchmark-save`` wrote (pytest-benchmark 4 and 5).

    Raises:
        UnreadableInput: the file is empty, cut, or holds no ``benchmarks``.
    """
    document = _document(path)
    machine = _mapping(document.get("machine_info"))
    environment = Environment(_facts(machine, _mapping(document.get("commit_info"))))
    run_id = digest([document.get("datetime"), environment.environment_id, path.name])
    records: list[Record] = []
    problems: list[str] = []
    for number, benchmark in enumerate(document["benchmarks"], 1):
        try:
            record = _record(benchmark, _gpu_model(machine), run_id, environment.environment_id)
            Record.from_json(record.to_json())  # holds what came from the file to the types of a record
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            problems.append(f"benchmark {number}: does not hold what it should ({error!r})")
        else:
            records.append(record)
    if not records:
        problems.append("holds no record")
    return Run(
        path=str(path),
        run_id=run_id,
        environments={environment.environment_id: environment},
        records=tuple(records),
        completed=not problems,
        problems=tuple(problems),
        source=_SOURCE,
        started_utc=_seconds(document.get("datetime")),
    )


_WANTED = "give a file of `pytest --bench` or of `pytest --benchmark-json`"
_HEAD, _GZIP = 1 << 16, b"\x1f\x8b"
_KINDS = {list: "list", str: "string", int: "number", float: "number", bool: "truth value", type(None): "null"}


def _document(path: Path) -> Mapping[str, Json]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UnreadableInput(f"cannot read {path} ({error.strerror or error})", _WANTED) from error
    remedy = _remedy(content[:_HEAD], path)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableInput(f"cannot read {path} ({error})", remedy) from error
    if not text.strip():
        raise UnreadableInput(f"{path} is empty", "the run that made it was killed while it wrote")
    try:
        # Old files hold NaN and Infinity in derived figures; they are missing figures here.
        document = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{path} is cut or is not JSON ({error})", remedy) from error
    if not isinstance(document, dict):
        raise UnreadableInput(f"{path} holds a JSON {_KINDS[type(document)]}, not a result", remedy)
    if not isinstance(document.get("benchmarks"), list):
        raise UnreadableInput(f"{path} holds no list of benchmarks", remedy)
    return document


def _remedy(head: bytes, path: Path) -> str:
    """What to do with a file that begins like this and is no result."""
    if head.startswith(_GZIP) or b'"traceEvents"' in head:
        return f"a trace of torch.profiler is read by joulemark trace {path}"
    if b'"Kernel Name"' in head:
        return f"an export of Nsight Compute is read by joulemark counters {path}"
    return _WANTED


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, dict) else {}


def _seconds(text: Json) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _gpus(machine: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    gpus = machine.get("gpus")
    return [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []


def _gpu_model(machine: Mapping[str, Json]) -> str:
    names = {str(gpu["name"]) for gpu in _gpus(machine) if gpu.get("name")}
    return "+".join(sorted(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in names)) or UNKNOWN_GPU


def _facts(machine: Mapping[str, Json], commit: Mapping[str, Json]) -> dict[str, Json]:
    cpu = _mapping(machine.get("cpu"))
    gpus = _gpus(machine)
    driver = machine.get("driver") or next((gpu["driver_version"] for gpu in gpus if gpu.get("driver_version")), None)
    return {
        "host": {
            "name": machine.get("node"),
            "os": machine.get("system"),
            "kernel": machine.get("release"),
            "cpu": cpu.get("brand_raw"),
            "cores": cpu.get("count"),
        },
        "python": machine.get("python_version"),
        "packages": {} if machine.get("torch_version") is None else {"torch": machine["torch_version"]},
        "git": {"hash": commit["id"], "dirty": commit.get("dirty")} if commit.get("id") else None,
        "gpus": gpus,
        "driver": driver,
        "cuda": machine.get("cuda_version"),
        "cudnn": machine.get("cudnn_version"),
    }


def _record(benchmark: Mapping[str, Json], gpu_model: str, run_id: str, environment_id: str) -> Record:
    extra = _mapping(benchmark.get("extra_info"))
    ours = isinstance(extra.get("case"), dict) and "joulemark_case_id" in extra
    findings: tuple[Finding, ...] = ()
    if ours:
        case = Case.from_json(extra["case"])
    else:
        case, findings = _foreign_case(benchmark, extra, gpu_model)
    samples, host_time = _time(_mapping(benchmark["stats"]))
    metrics = {"host_time_s": host_time, **(_figures(extra) if ours else {})}
    outcome: Outcome = extra["outcome"] if ours and isinstance(extra.get("outcome"), str) else "ok"
    return Record(
        case=case,
        run_id=run_id,
        outcome=outcome,
        environment_id=environment_id,
        gpu_uuid=extra.get("gpu_uuid") if ours else None,
        nodeid=str(benchmark["fullname"]),
        metrics=metrics,
        samples={"host_time_s": samples} if samples else {},
        notes={} if host_time.value is not None else {"host_time_s": "the file holds no finite time"},
        findings=findings,
    )


def _foreign_case(
    benchmark: Mapping[str, Json], extra: Mapping[str, Json], gpu_model: str
) -> tuple[Case, tuple[Finding, ...]]:
    """Function and parameters, never the id: its order and the addresses in it change from run to run."""
    workload = str(benchmark["fullname"]).partition("[")[0]
    params = {name: _scalar(value) for name, value in _mapping(benchmark.get("params")).items()}
    unstable = [name for name, value in params.items() if not _is_stable(value)]
    if not unstable:
        if not params and benchmark.get("param") is not None:
            params = {"id": str(benchmark["param"])}
        return Case(workload, gpu_model=gpu_model, params=params), ()
    for name in unstable:
        del params[name]
    named = {name: _scalar(value) for name, value in extra.items() if name not in params}
    params.update({name: value for name, value in named.items() if _is_stable(value)})
    message = f"the id holds what changes from run to run (parameter {', '.join(sorted(unstable))})"
    remedy = "give the parameters ids: pytest.param(…, id='name'); until then it is told apart by its other parameters"
    return Case(workload, gpu_model=gpu_model, params=params), (Finding("unstable_id", message, remedy),)


def _scalar(value: Json) -> str | int | float | bool | None:
    return canonical_json(value) if isinstance(value, (dict, list)) else value


def _is_stable(value: Json) -> bool:
    return not (isinstance(value, str) and _ADDRESS.search(value))


def _time(stats: Mapping[str, Json]) -> tuple[list[float], Value]:
    data = stats.get("data")
    samples = [float(sample) for sample in data if _is_finite(sample)] if isinstance(data, list) else []
    if samples:
        summary = summarize(samples)
        return samples, Value(summary.median, "s", summary.interval, summary.confidence, summary.n, "host_clock")
    median, rounds = stats.get("median"), stats.get("rounds")
    n = rounds if isinstance(rounds, int) and not isinstance(rounds, bool) else 0
    if median is None or not _is_finite(median):
        return [], Value(None, "s")
    return [], Value(float(median), "s", _notch(stats, float(median), n), 0.95, n, "host_clock")


def _notch(stats: Mapping[str, Json], median: float, n: int) -> tuple[float, float] | None:
    """Interval of a median from its quartiles, where the samples were not saved.

    Source: McGill, Tukey and Larsen, *Variations of Box Plots*, The American Statistician 32 (1978).
    """
    iqr = stats.get("iqr")
    if n < 5 or iqr is None or not _is_finite(iqr):
        return None
    half = 1.57 * float(iqr) / math.sqrt(n)
    return median - half, median + half


def _is_finite(value: Json) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _figures(extra: Mapping[str, Json]) -> dict[str, Value]:
    """Our own figures in a file that our plugin let pytest-benchmark write; their intervals stay in the JSON lines."""
    return {
        metric.name: Value(float(extra[metric.name]), metric.unit)
        for metric in all_metrics()
        if metric.name != "host_time_s" and _is_finite(extra.get(metric.name))
    }


def read_results(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Read several stored runs, of a folder all that it holds.

    Returns:
        the runs, those of a folder newest first, and a line for each file of a folder that cannot be used.

    Raises:
        UnreadableInput: a file that is named cannot be used.
    """
    runs: list[Run] = []
    unusable: list[str] = []
    for path in paths:
        if path.is_dir():
            listing = find_runs(path, suffixes=(".jsonl", ".json"), read=read_result)
            runs += listing.runs
            unusable += listing.unusable
        else:
            runs.append(read_result(path))
    return runs, unusable
