"""CUPTI's structures in ctypes equal those that the C compiler lays out from the shipped headers."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from joulemark.collect.cupti_structs import STRUCTS, parameters, struct_size, structure

HEADERS = ("cupti_target", "cupti_profiler_target", "cupti_profiler_host", "cupti_pmsampling")


def folders_of_headers() -> list[Path]:
    """Include folders of every CUPTI that is installed beside this Python."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    found = [header.parent for root in roots for header in root.glob("*/include/cupti_pmsampling.h")]
    return [folder for folder in found if (folder / "cupti_version.h").exists()]


def api_version(folder: Path) -> int:
    found = re.search(r"#define CUPTI_API_VERSION (\d+)", (folder / "cupti_version.h").read_text())
    assert found
    return int(found[1])


def program(version: int) -> str:
    lines = ["#include <stdbool.h>", *(f"#include <{header}.h>" for header in HEADERS)]  # 13.1 forgets bool
    lines += ["#include <stdio.h>", "int main(void) {"]
    for name in STRUCTS:
        lines.append(f'printf("{name} sizeof %zu\\n", sizeof({name}));')
        lines.append(f'printf("{name} STRUCT_SIZE %zu\\n", (size_t){name}_STRUCT_SIZE);')
        for field in structure(name, version)._fields_:
            lines.append(f'printf("{name} {field[0]} %zu\\n", offsetof({name}, {field[0]}));')
            lines.append(f'printf("{name} {field[0]}_size %zu\\n", sizeof((({name}*)0)->{field[0]}));')
    return "\n".join([*lines, "return 0; }"])


def layout_in_c(folder: Path, tmp_path: Path, compiler: str) -> dict[str, int]:
    (tmp_path / "string").write_text("")  # 13.0's profiler host header includes C++'s <string>, and uses nothing of it
    (tmp_path / "layout.c").write_text(program(api_version(folder)))
    command = [compiler, "-w", f"-I{tmp_path}", f"-I{folder}", "layout.c", "-o", "layout"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    printed = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout
    return {line.rsplit(" ", 1)[0]: int(line.rsplit(" ", 1)[1]) for line in printed.splitlines()}


def layout_in_ctypes(version: int) -> dict[str, int]:
    import ctypes

    found = {}
    for name in STRUCTS:
        kind = structure(name, version)
        found[f"{name} sizeof"] = ctypes.sizeof(kind)
        found[f"{name} STRUCT_SIZE"] = struct_size(kind)
        for field in kind._fields_:
            found[f"{name} {field[0]}"] = getattr(kind, field[0]).offset
            found[f"{name} {field[0]}_size"] = getattr(kind, field[0]).size
    return found


@pytest.mark.parametrize("folder", folders_of_headers() or [None], ids=lambda folder: folder and folder.parent.name)
def test_structures_equal_the_headers(folder, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if folder is None or compiler is None:
        pytest.skip("no CUPTI headers beside this Python" if folder is None else "no C compiler")
    in_c = layout_in_c(folder, tmp_path, compiler)
    assert len(in_c) > 200
    assert layout_in_ctypes(api_version(folder)) == in_c


def test_a_field_is_there_from_its_version_on():
    older = structure("CUpti_Profiler_Host_Initialize_Params", 130101)
    newer = structure("CUpti_Profiler_Host_Initialize_Params", 130202)
    assert struct_size(newer) == struct_size(older) + 8


def test_padding_behind_the_last_field_is_no_part_of_the_size():
    assert struct_size(structure("CUpti_PmSampling_DecodeData_Params", 130001)) == 45


def test_a_field_that_the_version_lacks_is_refused():
    with pytest.raises(TypeError, match="pSinglePassMetricSetName"):
        parameters("CUpti_Profiler_Host_Initialize_Params", 130001, pSinglePassMetricSetName=b"TriageCompute")


if __name__ == "__main__":  # other headers than the installed: python test_cupti_structs.py FOLDER…
    import tempfile

    for one in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as scratch:
            same = layout_in_c(one, Path(scratch), "cc") == layout_in_ctypes(api_version(one))
        sys.stdout.write(f"{one}: CUPTI {api_version(one)} {'equal' if same else 'DIFFERS'}\n")
