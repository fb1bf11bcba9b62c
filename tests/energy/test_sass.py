"""Every kernel compiles for every generation without a GPU, and its loop holds what the suite says."""

from __future__ import annotations

import re

import pytest

from joulemark.energy.microbench import sass
from joulemark.energy.microbench.compile import Cubin, architecture_of, families_for, source_of
from joulemark.energy.microbench.sass import Instruction, Loop, measured_loop, problems
from joulemark.energy.microbench.suite import SUITE, Work, benchmarks_for
from joulemark.errors import Unsupported

ARCHITECTURES = ("sm_75", "sm_80", "sm_90a", "sm_100")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_loop_holds_its_work_and_nothing_else(architecture, cubin_of):
    found = [
        problem
        for benchmark in benchmarks_for(architecture)
        if benchmark.kernel
        for problem in problems(benchmark, cubin_of(benchmark.family, architecture))
    ]
    assert found == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_is_there(architecture, cubin_of):
    kernels = set()
    for family in families_for(architecture):
        kernels |= set(sass.disassemble(cubin_of(family, architecture)))
    wanted = {benchmark.kernel for benchmark in benchmarks_for(architecture) if benchmark.kernel}
    assert kernels == wanted | {"chase", "fill"}


def changed(architecture: str, family: str, old: str, new: str) -> Cubin:
    """The machine code of a family after a change of its source."""
    from cuda.core import Program, ProgramOptions

    source = source_of(family)
    assert old in source
    code = Program(source.replace(old, new), "c++", ProgramOptions(arch=architecture, std="c++17")).compile("cubin")
    return Cubin(family, architecture, code.code)


def test_a_vector_load_of_which_one_word_is_used_is_found_narrowed(cubin_of):
    """The assembler made 32-bit loads of these: the check must see it."""
    unused = "z.y = three_way(z.y, v[r].z, v[r].w);"
    cubin = changed("sm_90a", "memory", unused, "")
    (found,) = [one for one in problems(SUITE["shared_read"], cubin) if "declared" in one and "LDS" in one]
    assert re.search(r"0 × LDS.* in the loop, 32 declared", found)
    with pytest.raises(Unsupported, match="do not hold on sm_90a"):
        sass.instructions_per_iteration(SUITE["l1_read"], cubin, paused=False)


def test_work_that_nobody_asked_for_is_found(cubin_of):
    step = 'asm volatile("fma.rn.f32 %0, %0, %0, %1;" : "+f"(x) : "f"(k));'
    cubin = changed("sm_80", "vector", step, f"{step} x = __fsqrt_rn(x) * k;")
    assert any("neither work nor overhead" in one for one in problems(SUITE["fp32"], cubin))


def test_a_loop_without_its_work_is_found(cubin_of):
    cubin = changed("sm_80", "vector", "Op::step(x[c], k, m);", ";")
    assert problems(SUITE["fp64"], cubin) == ["fp64: no loop holds DFMA"]


def test_the_pause_is_counted_only_when_it_is_taken(cubin_of):
    cubin = cubin_of("vector", "sm_90a")
    busy = sass.instructions_per_iteration(SUITE["fp32"], cubin, paused=False)
    paused = sass.instructions_per_iteration(SUITE["fp32"], cubin, paused=True)
    assert 128 < busy < paused < 140


def test_the_innermost_loop_with_the_work_is_the_measured_one():
    body = [Instruction("FFMA"), Instruction("FFMA"), Instruction("BRA", "0x10", "@P0")]
    code = [Instruction("MOV"), *body, Instruction("IADD3"), Instruction("BRA", "0x0", "@P1")]
    loop = measured_loop(code, (Work("FFMA", 2),))
    assert loop == Loop(tuple(body), 0)
    assert measured_loop(code, (Work("DFMA", 2),)) is None


def test_architectures():
    assert architecture_of(9, 0) == "sm_90a"
    assert architecture_of(10, 0) == "sm_100"
    assert "wgmma" in families_for("sm_90a")
    assert "wgmma" not in families_for("sm_100")


def test_an_unknown_architecture_is_refused_with_what_to_do(cubin_of):
    with pytest.raises(Unsupported, match="sm_75 on"):
        cubin_of("control", "sm_35")
