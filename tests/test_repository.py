"""The repository keeps its promises about itself."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def functions_that_take_bench(campaigns=True):
    """``bench_x/bench_y.py::bench_z`` of every function in the bench folders with an argument ``bench``."""
    for path in sorted(ROOT.glob("bench_*/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "bench" in [one.arg for one in node.args.args]:
                if not campaigns and any("campaign=" in ast.unparse(one) for one in node.decorator_list):
                    continue
                yield f"{path.relative_to(ROOT)}::{node.name}"


def collected(*arguments, **variables):
    """Ids of the cases of this repository that ``pytest --bench`` collects, and pytest's last line."""
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--bench", *arguments, "--collect-only", "-q"],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.returncode == 0, listed.stdout + listed.stderr
    lines = listed.stdout.splitlines()
    return [line for line in lines if "::" in line], lines[-1]


def test_every_function_that_takes_bench_is_collected():
    expected = set(functions_that_take_bench())
    assert len(expected) >= 3
    cases, _ = collected("--bench-all", "--bench-gpus", "cpu")
    assert {one.split("[")[0] for one in cases} == expected


def test_a_first_look_asks_each_question_in_few_cases():
    cases, said = collected(JOULEMARK_FAKE_GPUS=str(ROOT / "tests/data/nvml/steady_300w.json"))
    assert {one.split("[")[0] for one in cases} == set(functions_that_take_bench(campaigns=False))
    assert {one.partition("/")[0] for one in cases} == {"bench_inference", "bench_training", "bench_energy"}
    assert len(cases) <= 50
    few, whole = re.findall(r"\d+", said)[:2]
    assert f"{few} of the suite's {whole} cases" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_workers_of_the_tests_have_no_more_threads_than_there_are_cores():
    torch = pytest.importorskip("torch")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    assert torch.get_num_threads() * workers <= max(workers, len(os.sched_getaffinity(0)))


def test_the_test_command_of_the_readme_is_the_one_that_ci_runs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- tests -->\n```sh\n(.+?)\n```", readme, re.DOTALL)
    assert block is not None
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (extract,) = re.findall(r"test_command=\$\((.+)\)", script)
    found = subprocess.run(["bash", "-c", extract], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found.strip() == block.group(1).strip()
    assert found.strip().endswith("pytest -n 2")
    assert 'bash -c "$test_command"' in script


def test_the_root_conftest_names_plugins_and_nothing_else():
    body = ast.parse((ROOT / "conftest.py").read_text(encoding="utf-8")).body
    assert [type(one).__name__ for one in body] == ["Expr", "Assign"]
    docstring, assignment = body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(docstring.value, ast.Constant)
    assert isinstance(assignment, ast.Assign)
    assert ast.unparse(assignment.targets[0]) == "pytest_plugins"
    plugins = ast.literal_eval(assignment.value)
    for path in (ROOT / "fixtures").glob("*.py"):
        assert f"fixtures.{path.stem}" in plugins


def test_pytest_settings_have_one_home():
    assert "[tool.pytest" not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert not (ROOT / "pytest.ini").exists()
    assert "[pytest]" in (ROOT / "tox.ini").read_text(encoding="utf-8")
