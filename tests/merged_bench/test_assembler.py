"""Which assembler Triton uses: torch's where there is one, and never in place of what a user has chosen."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

from joulemark.merged_bench.assembler import VARIABLE, use_torchs_assembler


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(VARIABLE)
    (tmp_path / "bin").mkdir()
    return tmp_path


def test_torchs_assembler_is_taken(root):
    path = root / "bin" / "ptxas"
    assert use_torchs_assembler(root) is None
    path.write_text("")
    path.chmod(0o644)
    assert use_torchs_assembler(root) is None, "one that cannot be run"
    path.chmod(0o755)
    assert use_torchs_assembler(root) == path
    assert os.environ[VARIABLE] == str(path)


def test_a_users_choice_stays(root, monkeypatch):
    (root / "bin" / "ptxas").write_text("")
    (root / "bin" / "ptxas").chmod(0o755)
    monkeypatch.setenv(VARIABLE, "/opt/ptxas")
    assert use_torchs_assembler(root) is None
    assert os.environ[VARIABLE] == "/opt/ptxas"


def test_triton_takes_it_by_that_variable_and_keys_its_cache_by_its_version(root):
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    path = root / "bin" / "ptxas"
    path.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.48 of torch'\n")
    path.chmod(0o755)
    assert use_torchs_assembler(root) == path
    version = compiler.get_ptxas_version.__wrapped__(90)
    assert "V13.0.48 of torch" in version
