"""Runs without git, repository or commit work, and say what they know; --bench-anonymize says no more than needed."""

from __future__ import annotations

import getpass
import os
import platform
import subprocess
from pathlib import Path

import pytest

BENCH = {"bench_a.py": "def bench_sum(bench):\n    bench.pedantic(lambda: sum(range(100)), rounds=2)\n"}


def git(project, *args):
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid", *args],
        cwd=project.path,
        check=True,
        capture_output=True,
    )


@pytest.fixture(params=["not a repository", "no git on PATH", "no commit", "detached and dirty"])
def situation(request, project, monkeypatch):
    project.write(BENCH)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(project.path.parent))
    if request.param == "no git on PATH":
        monkeypatch.setenv("PATH", str(project.path / "nothing"))
    if request.param in ("no commit", "detached and dirty"):
        git(project, "init", "-q")
    if request.param == "detached and dirty":
        git(project, "add", ".")
        git(project, "commit", "-qm", "one")
        git(project, "checkout", "-q", "--detach")
        project.write({"more.py": ""})
    return request.param


def test_a_run_needs_no_commit(project, situation):
    result = project.bench("--benchmark-disable")
    assert result.ret == 0
    text = result.stdout.str() + result.stderr.str()
    assert "Traceback" not in text
    assert "fatal:" not in text
    assert "None" not in project.files[0].name
    commit = project.lines[0]["facts"]["git"]
    if situation == "detached and dirty":
        assert len(commit["hash"]) == 40
        assert commit["dirty"] is True
    else:
        assert commit is None
    from joulemark.store import read_run

    assert read_run(project.files[0]).completed


def test_anonymized(project):
    project.write(BENCH)
    project.bench("--bench-anonymize", f"--bench-results={project.path}/kept", f"--rootdir={project.path}")
    assert project.outcomes == {"passed": 1}
    text = project.files[0].read_text()
    for name in (platform.node(), str(project.path), str(Path.home()), os.getcwd()):
        assert len(name) < 4 or name not in text
    assert f'"{getpass.getuser()}"' not in text
    assert "<path>" in text
