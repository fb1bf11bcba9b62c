"""The example workflow, executed step by step on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOW = yaml.safe_load((ROOT / "docs" / "examples" / "gpu-benchmarks.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in WORKFLOW["jobs"]["bench"]["steps"] if "run" in step}
IDLE_GPU = {"name": "NVIDIA H200", "uuid": "GPU-5b1f0c2e-0000-4a10-9000-0000000000a1", "pci": "00000000:1B:00.0",
            "util": 0}  # fmt: skip
BENCHMARK = "import time\n\ndef bench_wait(bench):\n    bench(time.sleep, {seconds})\n"

# The command `gh` of a repository whose last good run is kept in $ARTIFACT, or which has none.
GH = """\
#!/bin/bash
case "$1 $2" in
  "run list") if [ -d "$ARTIFACT" ]; then echo 17; fi ;;
  "run download") [ "$3" = 17 ] && cp -r "$ARTIFACT" "${!#}" ;;
  *) exit 64 ;;
esac
"""


class Job:
    """A runner's workspace in which jobs of the workflow run, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.workspace, self.artifact = folder, folder / "work", folder / "artifact"
        self.workspace.mkdir()
        (folder / "bin").mkdir()
        (folder / "bin" / "python3").symlink_to(sys.executable)
        (folder / "bin" / "gh").write_text(GH)
        (folder / "bin" / "gh").chmod(0o755)
        source = folder / "source"
        for name in ("src", "docs"):
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        self.gpus = folder / "gpus.json"
        self.environ = {
            **{
                key: value
                for key, value in os.environ.items()
                if not key.startswith(("PYTEST", "PYTHON", "JOULEMARK", "CUDA_VISIBLE"))
            },
            **{key: str(value) for key, value in WORKFLOW["env"].items()},
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            # Packages that are installed here stand for those that pip would fetch.
            "PYTHONPATH": sysconfig.get_paths()["purelib"],
            "JOULEMARK": str(source),
            "PIP_OPTIONS": "--no-deps --no-build-isolation --no-index",
            "BENCH_GPUS": "cpu",
            "BENCH_PROCESSES": "2",
            "BENCH_STORE": str(folder / "store"),
            "ARTIFACT": str(self.artifact),
            "JOULEMARK_FAKE_GPUS": str(self.gpus),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PYTEST_ADDOPTS": "-p no:hypothesispytest -p no:cacheprovider",
        }

    def step(self, name: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a step as the runner does: bash, ended by the first command that fails."""
        own = {key: value for key, value in STEPS[name].get("env", {}).items() if "${{" not in str(value)}
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[name]["run"]],
            cwd=self.workspace,
            env={**self.environ, "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"), **own, **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def fresh_checkout(self, seconds: float) -> None:
        """What checkout leaves: the repository, and nothing of the job before but its installed environment."""
        for path in self.workspace.iterdir():
            if path.name != ".venv":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.folder / "summary.md").unlink(missing_ok=True)
        (self.workspace / "bench_wait.py").write_text(BENCHMARK.format(seconds=seconds))

    def idle_gpu(self, **sensors: object) -> None:
        """Put a simulated GPU in place of the machine's."""
        self.gpus.write_text(json.dumps({"gpus": [{**IDLE_GPU, **sensors}]}))


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def done(result, code=0):
    assert result.returncode == code, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


def test_every_step_does_what_the_page_says_from_install_to_summary(job):
    job.fresh_checkout(0.02)
    done(job.step("Install"))
    assert (job.workspace / ".venv" / "bin" / "joulemark").exists()

    job.gpus.write_text('{"gpus": []}')
    assert "refused: no GPU" in done(job.step("Preflight"), 1).stderr
    job.idle_gpu(processes=[4242])
    assert "refused: NVIDIA H200" in done(job.step("Preflight"), 1).stderr
    job.idle_gpu()
    assert done(job.step("Preflight")).stderr == ""

    done(job.step("Sweep"))  # on the main branch, the first time
    (result,) = job.workspace.glob("ci-results/cpu/sweep-*.jsonl")
    properties = ElementTree.parse(job.workspace / "ci-junit.xml").iter("property")
    assert {"outcome", "host_time_s"} <= {one.get("name") for one in properties}
    done(job.step("Fetch the baseline", BASE_BRANCH="main"))
    assert "No baseline yet" in done(job.step("Compare")).stdout
    done(job.step("Keep and look back"))
    assert (job.folder / "store" / "cpu" / result.name).exists()
    done(job.step("Summary"))
    summary = (job.folder / "summary.md").read_text()
    assert "No baseline yet" in summary
    assert summary.count("### ") >= 3
    assert re.search(r"\| .*bench_wait.* \|", summary)
    shutil.copytree(job.workspace / "ci-results", job.artifact / "ci-results")

    job.fresh_checkout(0.02)  # a pull request that changes nothing
    done(job.step("Sweep"))
    done(job.step("Fetch the baseline", BASE_BRANCH="main"))
    assert list(job.workspace.glob("ci-baseline/ci-results/cpu/sweep-*.jsonl"))
    same = done(job.step("Compare"))
    assert "verdict" in same.stdout

    job.fresh_checkout(0.04)  # one that doubles the time
    done(job.step("Sweep"))
    done(job.step("Fetch the baseline", BASE_BRANCH="main"))
    assert "regressed" in done(job.step("Compare"), 1).stdout
    done(job.step("Summary"))
    assert "regressed" in (job.folder / "summary.md").read_text()


def test_a_comparison_that_cannot_be_read_or_decided_is_no_success(job):
    for name in ("ci-results", "ci-baseline"):
        (job.workspace / name).mkdir()
        (job.workspace / name / "sweep-1.jsonl").touch()
    scripts = job.workspace / ".venv" / "bin"
    scripts.mkdir(parents=True)
    for code, expected in ((2, 2), (3, 0), (1, 1), (0, 0)):
        (scripts / "joulemark").write_text(f"#!/bin/bash\nexit {code}\n")
        (scripts / "joulemark").chmod(0o755)
        result = done(job.step("Compare"), expected)
        assert ("::warning::" in result.stdout) == (code == 3)


def test_the_page_knows_every_step_and_no_step_more():
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| ([A-Z][\w ]+) \|", page, re.MULTILINE) == list(STEPS)


def test_strangers_forks_are_not_run_and_nothing_is_run_twice_at_once():
    job = WORKFLOW["jobs"]["bench"]
    assert "head.repo.full_name == github.repository" in job["if"]
    assert WORKFLOW["concurrency"]["cancel-in-progress"] is False
    assert "self-hosted" in job["runs-on"]
    assert WORKFLOW["permissions"] == {"contents": "read", "actions": "read"}
    # What GitHub fills in by text replacement reaches scripts by their environment alone.
    assert not any("${{" in step["run"] for step in STEPS.values())
    assert [step["name"] for step in STEPS.values() if step.get("if") == "always()"] == ["Summary"]
