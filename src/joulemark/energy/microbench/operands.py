"""Operands in each kernel's own number format: zero, constant, random and normal values (pure).

A buffer of doubles read as floats is half zeros: every format is filled natively.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from joulemark.energy.microbench.suite import Operands

BLOCK_BYTES = 1 << 22
"""Size of the operand block: 2^18 values of up to 16 bytes."""
CONSTANTS = 64
"""Values in the block of constants: 32 addends, one per lane, then 32 multipliers."""

_CHAOTIC, _FIXED = -1.99, -0.75
_MANTISSA_MASK, _ONE = 0x007FFFFF, 0x3F800000


def operand_block(format_: str, kind: Operands, seed: int = 0) -> NDArray[np.uint32]:
    """Values for a kernel, as :data:`BLOCK_BYTES` bytes of 32-bit words.

    Args:
        format_: a vector kernel's name (``fp32``, ``fp64``, ``fp16x2``, ``integer``, ``logic``, ``special``), a tensor
            format (``fp16``, ``bf16``, ``tf32``, ``int8``, ``fp8``) or ``word``. Vector kernels of floats iterate
            x² + k, so their random values lie in [0.5, 1.8]; tensor formats have random signs and mantissas.
        kind: ``normal`` is the standard normal where the format is of floats; of a ``word``, in bf16, and
            ``normal_fp32`` in FP32.
        seed: of the random values.

    Raises:
        KeyError: an unknown format.
    """
    rng = np.random.default_rng([seed, *format_.encode(), *kind.encode()])
    if format_ not in _FORMATS:
        raise KeyError(f"no operands are defined for {format_!r}")
    if kind == "zero":
        return np.zeros(BLOCK_BYTES // 4, dtype=np.uint32)
    return np.ascontiguousarray(_FORMATS[format_](kind, rng)).view(np.uint32)


def constant_block(format_: str, kind: Operands, seed: int = 0) -> NDArray[np.uint32]:
    """Addends and multipliers of the vector kernels, as words; zeros for other formats."""
    rng = np.random.default_rng([seed, 1, *format_.encode(), *kind.encode()])
    if format_ in ("fp32", "fp64", "fp16x2"):
        addend = {"zero": 0.0, "constant": _FIXED}.get(kind, _CHAOTIC)
        return _floats(format_, np.full(CONSTANTS, addend)).view(np.uint32)
    add, multiply = _integer_constants(format_, kind, rng)
    return np.concatenate([add, multiply]).astype(np.uint32)


def _integer_constants(
    format_: str, kind: Operands, rng: np.random.Generator
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    half = CONSTANTS // 2
    zeros = np.zeros(half, dtype=np.uint32)
    words = rng.integers(0, 2**32, (2, half), dtype=np.uint32)
    if format_ == "integer":
        if kind == "random":  # full period: odd addend, multiplier 1 mod 4 (Knuth, TAOCP 2, theorem 3.2.1.2 A)
            return words[0] | 1, (words[1] & ~np.uint32(3)) | 1
        return zeros, zeros + (kind == "constant")
    if format_ == "logic" and kind == "random":
        return words[0], words[1]
    if format_ == "special":
        mask = zeros + _MANTISSA_MASK
        if kind == "random":
            return (words[0] & _MANTISSA_MASK) | _ONE, mask
        return zeros + (_ONE if kind == "constant" else 0), mask
    return zeros, zeros


def _floats(format_: str, values: NDArray[np.float64]) -> NDArray[np.generic]:
    types: dict[str, type[np.generic]] = {"fp32": np.float32, "fp64": np.float64, "fp16x2": np.float16}
    native: NDArray[np.generic] = values.astype(types[format_])
    return native


def _vector_floats(format_: str, item_bytes: int, kind: Operands, rng: np.random.Generator) -> NDArray[np.generic]:
    n = BLOCK_BYTES // item_bytes
    if kind == "normal":
        return _floats(format_, rng.standard_normal(n))
    values = rng.uniform(0.5, 1.8, n) if kind == "random" else np.full(n, 1.5)
    return _floats(format_, values)


def _tensor_floats(kind: Operands, rng: np.random.Generator, n: int) -> NDArray[np.float32]:
    if kind == "normal":
        return rng.standard_normal(n, dtype=np.float32)
    if kind == "constant":
        return np.full(n, 1.5, dtype=np.float32)
    sign = rng.integers(0, 2, n, dtype=np.uint32) << 31
    exponent = (rng.integers(126, 129, n, dtype=np.uint32)) << 23
    return (sign | exponent | rng.integers(0, 1 << 23, n, dtype=np.uint32)).view(np.float32)


def _fp16(kind: Operands, rng: np.random.Generator) -> NDArray[np.generic]:
    return _tensor_floats(kind, rng, BLOCK_BYTES // 2).astype(np.float16)


def _bf16(kind: Operands, rng: np.random.Generator) -> NDArray[np.generic]:
    words = _tensor_floats(kind, rng, BLOCK_BYTES // 2).view(np.uint32)
    return (words >> 16).astype(np.uint16)


def _tf32(kind: Operands, rng: np.random.Generator) -> NDArray[np.generic]:
    """TF32 keeps ten bits of the mantissa."""
    return _tensor_floats(kind, rng, BLOCK_BYTES // 4).view(np.uint32) & np.uint32(0xFFFFE000)


def _mma_fp64(kind: Operands, rng: np.random.Generator) -> NDArray[np.generic]:
    n = BLOCK_BYTES // 8
    if kind == "random":
        return np.where(rng.random(n) < 0.5, -1.0, 1.0) * rng.uniform(0.5, 1.8, n)
    return rng.standard_normal(n) if kind == "normal" else np.full(n, 1.5)


def _fp8(kind: Operands, rng: np.random.Generator) -> NDArray[np.generic]:
    """E4M3: sign, four bits of exponent (bias 7), three of mantissa; 1.5 is 0x3C. Normals are cut to that form."""
    n = BLOCK_BYTES
    if kind == "constant":
        return np.full(n, 0x3C, dtype=np.uint8)
    if kind == "random":
        exponent = rng.integers(6, 9, n, dtype=np.uint8)
        return (rng.integers(0, 2, n, dtype=np.uint8) << 7) | (exponent << 3) | rng.integers(0, 8, n, dtype=np.uint8)
    bits = rng.standard_normal(n, dtype=np.float32).view(np.uint32)
    exponent = np.clip((bits >> 23 & 0xFF).astype(np.int32) - 120, 0, 15).astype(np.uint8)
    return (bits >> 31 << 7).astype(np.uint8) | (exponent << 3) | (bits >> 20 & 7).astype(np.uint8)


def _int8(kind: Operands, rng: np.random.Generator) -> NDArray[np.generic]:
    n = BLOCK_BYTES
    if kind == "constant":
        return np.full(n, 0x55, dtype=np.uint8)
    if kind == "normal":
        return np.clip(np.rint(32 * rng.standard_normal(n, dtype=np.float32)), -127, 127).astype(np.int8)
    return rng.integers(0, 256, n, dtype=np.uint8)


def _words(kind: Operands, rng: np.random.Generator) -> NDArray[np.generic]:
    if kind == "constant":
        return np.full(BLOCK_BYTES // 4, 0x5A5A5A5A, dtype=np.uint32)
    if kind == "normal":  # what a network's activations and weights look like in memory
        return _bf16(kind, rng)
    if kind == "normal_fp32":
        return _tensor_floats("normal", rng, BLOCK_BYTES // 4)
    return rng.integers(0, 2**32, BLOCK_BYTES // 4, dtype=np.uint32)


def _special(kind: Operands, rng: np.random.Generator) -> NDArray[np.generic]:
    words = rng.integers(0, 1 << 23, BLOCK_BYTES // 4, dtype=np.uint32) if kind == "random" else 0
    return np.full(BLOCK_BYTES // 4, _ONE, dtype=np.uint32) | words


_FORMATS = {
    "fp32": lambda kind, rng: _vector_floats("fp32", 4, kind, rng),
    "fp64": lambda kind, rng: _vector_floats("fp64", 8, kind, rng),
    "fp16x2": lambda kind, rng: _vector_floats("fp16x2", 2, kind, rng),
    "integer": _words,
    "logic": _words,
    "special": _special,
    "word": _words,
    "fp16": _fp16,
    "bf16": _bf16,
    "tf32": _tf32,
    "mma_fp64": _mma_fp64,
    "int8": _int8,
    "fp8": _fp8,
}
