"""Asking the framework for its devices, with a stand-in for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from joulemark.collect.framework import device_uuid, framework_uuids
from joulemark.device.gpu import Gpu, visible_gpus

TORCH = """
import os
from types import SimpleNamespace as Space
print("a warning of the framework")
UUIDS = {uuids!r}
cuda = Space(
    is_available=lambda: bool(UUIDS),
    device_count=lambda: len(UUIDS),
    get_device_properties=lambda i: Space(uuid=UUIDS[i]) if UUIDS[i] else Space(),
)
"""


def environ_with(folder: Path, text: str) -> dict[str, str]:
    (folder / "torch.py").write_text(text, encoding="utf-8")
    return {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("uuids", "expected"),
    [
        (["1-2", "3-4"], ["GPU-1-2", "GPU-3-4"]),
        (["GPU-1-2", "MIG-3"], ["GPU-1-2", "MIG-3"]),
        ([], []),
        (["1-2", None], None),
    ],
)
def test_uuids_come_in_the_order_of_ordinals(tmp_path: Path, uuids: list[str], expected: list[str] | None) -> None:
    assert framework_uuids(environ_with(tmp_path, TORCH.format(uuids=uuids))) == expected


@pytest.mark.parametrize("text", ["raise ImportError('none')", "import os; os._exit(7)", "x = 1"])
def test_a_framework_that_fails_tells_nothing(tmp_path: Path, text: str) -> None:
    assert framework_uuids(environ_with(tmp_path, text)) is None


def test_a_framework_that_hangs_is_given_up(tmp_path: Path) -> None:
    assert framework_uuids(environ_with(tmp_path, "import time; time.sleep(60)"), timeout_s=0.5) is None


def test_it_serves_as_the_probe(tmp_path: Path) -> None:
    gpus = [Gpu("GPU-1-2", "L4", "00000000:1B:00.0"), Gpu("GPU-3-4", "H100", "00000000:2B:00.0")]
    environ = environ_with(tmp_path, TORCH.format(uuids=["3-4", "1-2"]))
    rows = visible_gpus(gpus, environ, framework_uuids)
    assert [(row.gpu.name, row.verified) for row in rows] == [("H100", True), ("L4", True)]


def test_a_device_of_this_process_has_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        get_device_properties=lambda device: SimpleNamespace(uuid="9-9") if device == "cuda:1" else SimpleNamespace()
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert device_uuid("cuda:1") == "GPU-9-9"
    assert device_uuid("cuda:0") is None
    assert device_uuid("cpu") is None
