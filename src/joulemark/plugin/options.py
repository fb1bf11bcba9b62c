"""Everything that the command line and the ini file say to joulemark, read once into a frozen record."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark.argument_types import SIZES, sizes
from joulemark.errors import ConfigurationError
from joulemark.measure.plan import ALONE, INSTRUMENTS

if TYPE_CHECKING:
    import pytest

DTYPES = ("fp32", "tf32", "bf16", "fp16")
MODES = ("eager", "jit", "compile", "graph", "merged")
INPUTS = ("device", "pinned", "pageable", "loader")


@dataclass(frozen=True)
class BenchOptions:
    """Options of one session. None means: what the benchmark's own marker says, or its default.

    Args:
        budget_s: wall time of the whole sweep, in s.
        timeout_s: of one case, in s.
        cluster: address of a Ray cluster whose GPUs measure; ``auto`` for the one that this machine is part of.
        worker: (passes, answers file) in a measuring process, None in the parent.
        lease_s: how long to wait for a GPU that another session measures on, in s; 0 refuses, None takes no lease.
        lease_dir: where the locks stand; None for the usual folder.
        power_budget_w: that the GPUs of this machine share, in W.
        isolate: measure in a child process; off under a debugger.
        cupti: a libcupti to load in place of torch's, in the process of the counters pass.
        rootdir: pytest's, where the modules of ``pkg.mod:factory`` are looked for too.
        chose_instruments: whether ``collect`` was given.
    """

    enabled: bool = False
    models: tuple[str, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    inputs: tuple[str, ...] | None = None
    world_sizes: tuple[int, ...] | None = None
    cluster: str | None = None
    gpus: str = "auto"
    collect: tuple[str, ...] = ("timing", "power")
    budget_s: float | None = None
    timeout_s: float | None = 900.0
    quick: bool = False
    processes: int = 1
    results: Path = Path("results")
    resume: Path | None = None
    baseline: str | None = None
    reports: tuple[Path, ...] = ()
    strict: bool = False
    anonymize: bool = False
    all_cases: bool = False
    keep_traces: bool = False
    cupti: Path | None = None
    worker: tuple[str, Path] | None = None
    lease_s: float | None = 3600.0
    lease_dir: Path | None = None
    power_budget_w: float | None = None
    isolate: bool = True
    rootdir: Path | None = None
    chose_instruments: bool = False

    @property
    def chose_cells(self) -> bool:
        """Whether an axis of the sweep was given."""
        axes = (self.models, self.batch_sizes, self.dtypes, self.modes, self.inputs, self.world_sizes)
        return any(one is not None for one in axes)

    @property
    def alone(self) -> str | None:
        """The instrument that this measuring process is for alone; None for any other process."""
        return self.worker[0] if self.worker is not None and self.worker[0] in ALONE else None

    @classmethod
    def from_pytest_config(cls, config: pytest.Config) -> BenchOptions:
        """Read and check all options.

        Raises:
            ConfigurationError: a value that cannot be, with the option, the value and what it takes.
        """
        base = config.invocation_params.dir
        resume = _text(config, "resume")
        worker = _text(config, "worker")
        collect = _choices(config, "collect", INSTRUMENTS)
        return cls(
            rootdir=config.rootpath,
            enabled=bool(config.getoption("joulemark_bench")),
            models=_names(config, "models"),
            batch_sizes=_sizes(config, "batch-sizes"),
            dtypes=_choices(config, "dtypes", DTYPES),
            modes=_choices(config, "modes", MODES),
            inputs=_choices(config, "input", INPUTS),
            world_sizes=_world_sizes(config),
            cluster=_cluster(config),
            gpus=_text(config, "gpus") or "auto",
            collect=collect or cls.collect,
            chose_instruments=collect is not None,
            budget_s=_number(config, "budget"),
            timeout_s=_number(config, "timeout") or cls.timeout_s,
            quick=_flag(config, "quick"),
            processes=int(_number(config, "processes") or 1),
            results=base / (_text(config, "results") or _default_results(config.rootpath)),
            resume=None if resume is None else base / resume,
            baseline=_text(config, "baseline"),
            reports=tuple(base / one for one in _names(config, "report") or ()),
            strict=_flag(config, "strict"),
            anonymize=_flag(config, "anonymize"),
            all_cases=_flag(config, "all"),
            keep_traces=_keep_traces(config),
            cupti=_cupti(config),
            worker=None if worker is None else _worker(worker),
            lease_s=_lease(_text(config, "lease")),
            lease_dir=_lease_dir(config),
            power_budget_w=_number(config, "power-budget"),
            isolate=not (
                _flag(config, "inprocess") or config.getoption("usepdb", False) or config.getoption("trace", False)
            ),
        )


_HELP: dict[str, tuple[str, str]] = {
    "models": (
        "NAMES",
        "models to sweep, comma-separated: zoo names (resnet50, bert_base …; a wrong one lists all) or pkg.mod:factory",
    ),
    "batch-sizes": ("SIZES", "batch sizes, comma-separated; 1:128 means the powers of two from 1 to 128"),
    "dtypes": ("NAMES", f"number formats, of {', '.join(DTYPES)} (fp32 has TF32 off)"),
    "modes": ("NAMES", f"how the framework runs the model, of {', '.join(MODES)}"),
    "gpus": (
        "WHICH",
        "auto (one GPU of each model), all, cpu, or CUDA ordinals, UUIDs or model names, comma-separated",
    ),
    "world-size": (
        "NUMBERS",
        "numbers of GPUs of one model that train together, comma-separated (1,2,4,8); batch sizes are per GPU",
    ),
    "cluster": (
        "ADDRESS",
        "measure on the GPUs of a Ray cluster: ray (the one this machine belongs to) or ray://host:port",
    ),
    "input": ("NAMES", f"where a step's input comes from, of {', '.join(INPUTS)}"),
    "collect": ("NAMES", f"instruments, of {', '.join(INSTRUMENTS)} (the first two are on unless you choose)"),
    "budget": (
        "SECONDS",
        "wall time of the whole sweep; cases share what is left, the last ones are left for --bench-resume",
    ),
    "timeout": ("SECONDS", "a case is killed after it and reported as failed (900 unless you choose)"),
    "processes": ("N", "measure each case in N fresh processes; from 3 on, comparisons measure their spread"),
    "results": (
        "DIR",
        "where records are stored: DIR/<gpu>/sweep-<time>-<run>.jsonl (results/ if there is one, else .joulemark/)",
    ),
    "lease": (
        "HOW",
        "where another session measures on a GPU: wait (an hour, the default), seconds to wait, refuse, or off",
    ),
    "lease-dir": ("DIR", "folder of the GPU leases, shared by all users of the machine (JOULEMARK_LEASE_DIR)"),
    "power-budget": (
        "WATTS",
        "with -n: power that the GPUs of this machine share; cases that would draw more together wait for one another",
    ),
    "resume": ("FILE", "go on with the sweep of this file: finished cases are not measured again"),
    "cupti": (
        "PATH",
        "read hardware counters with this libcupti, or the one in this folder, instead of torch's own",
    ),
    "baseline": (
        "FILE|latest",
        "fail each case that got worse than in this stored result, or than in the newest one of the results folder",
    ),
}
_FLAGS = {
    "quick": "short passes, with wider intervals",
    "all": "leave nothing out: whole grids, campaigns, and on a machine without a GPU the cases that need one, each as "
    "unsupported with its reason",
    "strict": "flagged and out-of-memory cases fail",
    "anonymize": "store no host name, no paths, and digests of the GPUs' UUIDs",
    "keep-traces": "keep the profiler's traces, and the recordings of attribution, in a folder beside the result file",
    "inprocess": "measure in this very process (no timeout, no recovery); what --pdb and --trace do too",
}


def add_options(parser: pytest.Parser) -> None:
    """Declare the options and their ini twins."""
    group = parser.getgroup("joulemark", "joulemark: where a GPU's time and joules go")
    group.addoption(
        "--bench",
        action="store_true",
        dest="joulemark_bench",
        default=False,
        help="run the benchmarks instead of the tests: all of the paths given, or without one a first look at the "
        "bench_* folders; example: pytest --bench --bench-models resnet50 --bench-batch-sizes 1:64",
    )
    for name, (metavar, about) in _HELP.items():
        ini = f"bench_{name.replace('-', '_')}"
        group.addoption(f"--bench-{name}", dest=_dest(name), metavar=metavar, default=None, help=about)
        if name != "resume":
            parser.addini(ini, f"{about} (as --bench-{name})", default=None)
    group.addoption(
        "--bench-report",
        dest=_dest("report"),
        metavar="FILE",
        action="append",
        default=None,
        help="also write a report to FILE.html, FILE.md, FILE.csv or FILE.json; may be given several times",
    )
    parser.addini("bench_report", "also write a report to this file (as --bench-report)", default=None)
    for name, about in _FLAGS.items():
        group.addoption(f"--bench-{name}", dest=_dest(name), action="store_true", default=False, help=about)
        parser.addini(f"bench_{name.replace('-', '_')}", f"{about} (as --bench-{name})", type="bool", default=False)
    group.addoption(
        "--bench-worker",
        dest=_dest("worker"),
        metavar="PASSES:FILE",
        default=None,
        help="internal: measure for a parent process",
    )


def _default_results(root: Path) -> Path:
    """The project's ``results`` folder where it has one, else a hidden folder that git ignores."""
    return root / "results" if (root / "results").is_dir() else root / ".joulemark"


def _dest(name: str) -> str:
    return f"joulemark_{name.replace('-', '_')}"


def _flag(config: pytest.Config, name: str) -> bool:
    return bool(config.getoption(_dest(name)) or config.getini(f"bench_{name.replace('-', '_')}"))


def _keep_traces(config: pytest.Config) -> bool:
    keep = _flag(config, "keep-traces")
    if keep and _flag(config, "anonymize"):
        raise ConfigurationError(
            "--bench-keep-traces got --bench-anonymize: the profiler writes the host's name into its traces",
            "leave one of the two out",
        )
    return keep


def _cupti(config: pytest.Config) -> Path | None:
    """A library that the loader takes: its variable separates names by blanks and colons."""
    text = _text(config, "cupti")
    if text is None:
        return None
    path = config.invocation_params.dir / text
    if path.is_dir():
        path = next(iter(sorted(path.rglob("libcupti.so.*"))), path)
    if not path.is_file():
        raise ConfigurationError(
            f"--bench-cupti got {text!r}, where no libcupti is",
            "pip install --target DIR nvidia-cuda-cupti, then give DIR",
        )
    if set(" :") & set(str(path)):
        raise ConfigurationError(f"--bench-cupti got {text!r}", "its path must hold no blank and no colon")
    return path


def _text(config: pytest.Config, name: str) -> str | None:
    value = config.getoption(_dest(name))
    if value is None and name not in ("worker", "resume"):
        value = config.getini(f"bench_{name.replace('-', '_')}")
    return str(value) if value else None


def _names(config: pytest.Config, name: str) -> tuple[str, ...] | None:
    value = config.getoption(_dest(name))
    if isinstance(value, list):
        value = ",".join(value)
    text = value if value is not None else config.getini(f"bench_{name.replace('-', '_')}")
    if not text:
        return None
    return tuple(dict.fromkeys(part.strip() for part in str(text).split(",") if part.strip()))


def _choices(config: pytest.Config, name: str, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
    names = _names(config, name)
    for one in names or ():
        if one not in allowed:
            raise ConfigurationError(f"--bench-{name} got {one!r}", f"it takes {', '.join(allowed)}")
    return names


def _number(config: pytest.Config, name: str) -> float | None:
    text = _text(config, name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf") or (name == "processes" and value != int(value)):
        raise ConfigurationError(f"--bench-{name} got {text!r}", "it takes a positive number")
    return value


def _world_sizes(config: pytest.Config) -> tuple[int, ...] | None:
    sizes = _sizes(config, "world-size")
    together = sizes is not None and sizes[-1] > 1
    if together and _flag(config, "inprocess"):
        raise ConfigurationError(
            f"--bench-world-size got {_text(config, 'world-size')!r} with --bench-inprocess: each rank is a process",
            "leave one of the two out",
        )
    return sizes


def _cluster(config: pytest.Config) -> str | None:
    """Ray's address, None in a measuring process: it measures where it is."""
    text = _text(config, "cluster")
    if text is None or _text(config, "worker") is not None:
        return None
    if text != "ray" and not (text.startswith("ray://") and len(text) > len("ray://")):
        raise ConfigurationError(f"--bench-cluster got {text!r}", "it takes ray, or ray://host:port")
    sizes = _sizes(config, "world-size")
    if sizes is not None and sizes[-1] > 1:
        raise ConfigurationError(
            f"--bench-cluster got --bench-world-size {_text(config, 'world-size')}: ranks of one case share a host",
            "measure several ranks on their host, without --bench-cluster",
        )
    for flag, why in (
        ("inprocess", "cases run on other machines"),
        ("keep-traces", "traces stay on the nodes' own disks and are removed"),
    ):
        if _flag(config, flag):
            raise ConfigurationError(f"--bench-cluster got --bench-{flag}: {why}", "leave one of the two out")
    if "attribution" in (_names(config, "collect") or ()):
        raise ConfigurationError(
            "--bench-cluster got --bench-collect attribution: its documents would stay on the nodes' own disks",
            "measure it on the node, without --bench-cluster",
        )
    return "auto" if text == "ray" else text


def _lease(text: str | None) -> float | None:
    """Seconds to wait, None for no lease."""
    words = {"wait": BenchOptions.lease_s, "refuse": 0.0, "off": None}
    if text is None or text in words:
        return words[text or "wait"]
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    raise ConfigurationError(f"--bench-lease got {text!r}", "it takes wait, refuse, off or a whole number of seconds")


def _lease_dir(config: pytest.Config) -> Path | None:
    """The option, else the environment's word (which the folder's own default follows), else the ini file's."""
    from joulemark.device.lease import FOLDER_VARIABLE

    option = config.getoption(_dest("lease-dir"))
    if option is None and os.environ.get(FOLDER_VARIABLE):
        return None
    text = _text(config, "lease-dir")
    return None if text is None else config.invocation_params.dir / text


def _sizes(config: pytest.Config, name: str) -> tuple[int, ...] | None:
    found: set[int] = set()
    names = _names(config, name)
    for one in names or ():
        try:
            found |= set(sizes(one))
        except argparse.ArgumentTypeError:
            raise ConfigurationError(f"--bench-{name} got {one!r}", f"it takes {SIZES}") from None
    return None if names is None else tuple(sorted(found))


def _worker(text: str) -> tuple[str, Path]:
    passes, colon, file = text.partition(":")
    if not colon or not file:
        raise ConfigurationError(f"--bench-worker got {text!r}", "it takes PASSES:FILE and is for joulemark itself")
    return passes, Path(file)
