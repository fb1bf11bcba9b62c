"""What is expensive to make is made once for the same inputs."""

from __future__ import annotations

import pytest

from joulemark.energy.microbench.compile import compile_family
from joulemark.energy.microbench.kept import folder, kept
from joulemark.errors import Unsupported


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JOULEMARK_KERNEL_CACHE", str(tmp_path / "kernels"))


def counting():
    made = []
    return made, lambda: made.append(1) or b"code"


def test_it_is_made_once_and_found_again():
    made, make = counting()
    assert [kept("cubin", ("sm_90a", b"source"), make) for _ in range(3)] == [b"code"] * 3
    assert len(made) == 1
    assert [path.suffix for path in folder().iterdir()] == [".cubin"]


@pytest.mark.parametrize(
    "inputs", [("sm_80", b"source"), ("sm_90a", b"sourc"), ("sm_90asource",), ("sm_90", b"asource")]
)
def test_other_inputs_are_another_thing(inputs):
    made, make = counting()
    kept("cubin", ("sm_90a", b"source"), make)
    kept("cubin", inputs, make)
    assert len(made) == 2


def test_a_folder_that_cannot_be_written_costs_time_alone(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JOULEMARK_KERNEL_CACHE", str(tmp_path / "file" / "kernels"))
    made, make = counting()
    assert [kept("cubin", ("one",), make) for _ in range(2)] == [b"code"] * 2
    assert len(made) == 2


def test_what_cannot_be_made_is_not_kept():
    def refuse():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        kept("cubin", ("one",), refuse)
    assert kept("cubin", ("one",), lambda: b"code") == b"code"


def test_the_users_cache_is_the_place(monkeypatch, tmp_path):
    monkeypatch.delenv("JOULEMARK_KERNEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "joulemark" / "kernels"


def test_a_missing_nvrtc_is_told_as_what_is_not_installed(monkeypatch):
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
    pytest.importorskip("cuda.core", exc_type=ImportError)

    def missing():
        raise RuntimeError("Failure finding libnvrtc.so")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    with pytest.raises(Unsupported, match="libnvrtc"):
        compile_family.__wrapped__("control", "sm_90a")
