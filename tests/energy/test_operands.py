"""Operands are native to their format, and the recurrences keep toggling, or keep still, as they should."""

from __future__ import annotations

import numpy as np
import pytest

from joulemark.energy.microbench.operands import _FORMATS, BLOCK_BYTES, CONSTANTS, constant_block, operand_block


@pytest.mark.parametrize("kind", ["zero", "constant", "random", "normal"])
@pytest.mark.parametrize("format_", sorted(_FORMATS))
def test_blocks_have_the_size_that_kernels_read(format_, kind):
    block = operand_block(format_, kind)
    assert block.nbytes == BLOCK_BYTES
    assert constant_block(format_, kind).size >= CONSTANTS // 2
    if kind == "zero":
        assert not block.any()
    if kind == "constant":
        wide = block.view(np.uint64) if "fp64" in format_ else block
        assert (wide == wide[0]).all()
    if kind == "random":
        assert len(np.unique(block[:8192])) > 1000


def test_random_operands_are_reproducible_and_differ_by_seed():
    assert (operand_block("word", "random", 1) == operand_block("word", "random", 1)).all()
    assert (operand_block("word", "random", 1) != operand_block("word", "random", 2)).any()


def test_doubles_are_doubles():
    values = operand_block("fp64", "random").view(np.float64)
    assert values.min() >= 0.5
    assert values.max() <= 1.8
    assert np.count_nonzero(values.view(np.uint64) & 0xFFFFFFFF) > 0.99 * values.size


@pytest.mark.parametrize(
    ("format_", "view"), [("fp16", np.float16), ("tf32", np.float32), ("mma_fp64", np.float64), ("fp32", np.float32)]
)
def test_random_floats_are_finite_and_of_moderate_size(format_, view):
    values = operand_block(format_, "random").view(view).astype(np.float64)
    assert np.isfinite(values).all()
    assert np.abs(values).min() > 0.3
    assert np.abs(values).max() < 4.01


def test_eight_bit_floats_are_e4m3():
    codes = operand_block("fp8", "random").view(np.uint8)
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7).astype(int)
    magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    assert magnitude.min() >= 0.5
    assert magnitude.max() < 4
    normal = operand_block("fp8", "normal").view(np.uint8)
    assert not ((normal & 0x7F) == 0x7F).any()  # E4M3's NaN
    assert 0.4 < np.mean(normal >> 7) < 0.6


def iterate(format_: str, kind: str, steps: int, n: int = 4096) -> np.ndarray:
    """Trajectories of x² + k, rounded once per step as a fused multiply-add is, shape [steps, n]."""
    types = {"fp16x2": np.float16, "fp32": np.float32, "fp64": np.float64}
    dtype = types[format_]
    x = operand_block(format_, kind).view(dtype)[:n]
    k = constant_block(format_, kind).view(dtype)[0]
    wide = np.longdouble if format_ == "fp64" else np.float64
    seen = []
    for _ in range(steps):
        x = (x.astype(wide) ** 2 + wide(k)).astype(dtype)
        seen.append(x)
    return np.array(seen)


@pytest.mark.parametrize(("format_", "stuck"), [("fp16x2", 0.01), ("fp32", 0.001), ("fp64", 0.0)])
def test_random_chains_stay_bounded_and_do_not_stick(format_, stuck):
    seen = iterate(format_, "random", 3000, 1024)
    assert np.abs(seen.astype(np.float64)).max() <= 2
    fixed = (seen[-1] == seen[-2]) | (seen[-1] == seen[-3])
    assert fixed.mean() <= stuck


def test_with_two_instead_of_1_99_chains_stick():
    """The reason for the constant: x² - 2 runs into its fixed points."""
    x = operand_block("fp16x2", "random").view(np.float16)[:4096]
    for _ in range(3000):
        last, x = x, (x.astype(np.float64) ** 2 - 2).astype(np.float16)
    assert (x == last).mean() > 0.1


@pytest.mark.parametrize("format_", ["fp16x2", "fp32", "fp64"])
@pytest.mark.parametrize("kind", ["zero", "constant"])
def test_zero_and_constant_chains_never_move(format_, kind):
    seen = iterate(format_, kind, 5, 64)
    assert (seen == operand_block(format_, kind).view(seen.dtype)[:64]).all()


def toggles(seen: np.ndarray) -> float:
    """Mean number of bits that change per step, of 32."""
    flips = seen[1:] ^ seen[:-1]
    return float(np.bitwise_count(flips).mean())


def test_integer_logic_and_special_chains_toggle_about_half_their_bits_or_none():
    for kind, low, high in (("random", 8.0, 20.0), ("zero", 0.0, 0.0), ("constant", 0.0, 0.0)):
        for format_ in ("integer", "logic", "special"):
            x = operand_block(format_, kind)[:4096].copy()
            lanes = np.arange(4096) % 32
            block = constant_block(format_, kind)
            k, m = block[lanes], block[32 + lanes]
            seen = [x]
            for _ in range(400):
                if format_ == "integer":
                    x = x * m + k
                elif format_ == "logic":
                    x = ((x << np.uint32(8)) | (x >> np.uint32(24))) ^ m ^ k
                else:
                    x = (np.sqrt(x.view(np.float32)).view(np.uint32) & m) ^ k
                seen.append(x)
            assert low <= toggles(np.array(seen[200:])) <= high, (format_, kind)


def test_unknown_format():
    with pytest.raises(KeyError, match="int4"):
        operand_block("int4", "random")
