"""CUDA C++ → machine code by NVRTC; run as a program it compiles one text in a process of its own.

NVRTC compiles one text at a time in a process, whatever the number of its threads: two of 1.0 s took two threads 2.0 s.
This module imports nothing but NVRTC, so that a process for each text costs a tenth of a second.

    python nvrtc.py NAME ARCHITECTURE < TEXT > CUBIN 2> LOG
"""

from __future__ import annotations

import sys
from typing import Any

REFUSED = 3
"""Exit code of a text that does not compile."""
_KEEPS = (12, 9)
"""Version from which NVRTC keeps what it compiled on disk: of that it has no log, and the log tells the registers."""


class Refused(RuntimeError):
    """NVRTC's own words."""


def machine_code(name: str, text: str, architecture: str) -> tuple[bytes, str]:
    """A text's cubin and the compilers' log.

    Raises:
        Refused: it does not compile.
        ImportError: cuda-bindings are not there.
    """
    from cuda.bindings import nvrtc

    program = _done(nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), f"{name}.cu".encode(), 0, [], []))
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"--ptxas-options=-v"]
    options += [b"--no-cache"] if nvrtc.nvrtcVersion()[1:] >= _KEEPS else []
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytearray(_done(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
    _done(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
    told = log.rstrip(b"\0").decode(errors="replace")
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise Refused(f"{result.name}: {told}")
    code = bytearray(_done(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
    _done(nvrtc, nvrtc.nvrtcGetCUBIN(program, code))
    _done(nvrtc, nvrtc.nvrtcDestroyProgram(program))
    return bytes(code), told


def _done(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    """What a call gives beside its result."""
    if answer[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise Refused(answer[0].name)
    return answer[1] if len(answer) > 1 else None


def main() -> int:
    """Compile one text; where it is refused, the reason takes the place of the log."""
    try:
        code, log = machine_code(sys.argv[1], sys.stdin.buffer.read().decode(), sys.argv[2])
    except Refused as error:
        print(error, file=sys.stderr)
        return REFUSED
    sys.stdout.buffer.write(code)
    print(log, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
