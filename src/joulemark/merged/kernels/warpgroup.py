"""The products of warpgroups (``wgmma``, compute capability 9.0) as text: a function for each number of columns."""

from __future__ import annotations

from collections.abc import Iterable

from joulemark.merged.kernels.compile import device_text
from joulemark.merged.kernels.description import Format

ROWS = 64
"""Of a product."""
FORMATS: dict[Format, str] = {"bf16": "bf16", "fp16": "f16"}
"""Number formats that there are products for, as PTX calls them."""


def vocabulary(
    format_: Format, registers: Iterable[int] = (), shared: Iterable[int] = (), registers_format: Format | None = None
) -> str:
    """What a kernel with such products says first: ``device/hopper.cuh``, its instructions or their emulation.

    Args:
        format_: of both operands.
        registers: numbers of columns of the products whose first operand is in registers.
        shared: of those whose first operand is in shared memory.
        registers_format: of the products with an operand in registers, where it is another one.
    """
    products = [_product(registers_format or format_, columns, False) for columns in sorted(set(registers))]
    products += [_product(format_, columns, True) for columns in sorted(set(shared))]
    instructions = device_text("hopper_instructions.cuh") + "".join(products)
    emulated = device_text("hopper_emulation.hpp")
    return f"{device_text('hopper.cuh')}#ifdef EMULATED\n{emulated}#else\n{instructions}#endif\n"


def _product(format_: Format, columns: int, shared: bool) -> str:
    """wgmma.m64nNk16: d += a · bᵀ, neither turned nor negated."""
    count = columns // 2
    outputs = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i // 4}][{i % 4}])' for i in range(count))
    kind = FORMATS[format_]
    if shared:
        parameter, first, given, turned = "u64 a", f"%{count}", '"l"(a)', "0, 0"
    else:
        parameter, turned = "const u32 (&a)[4]", "0"
        first = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        given = ", ".join(f'"r"(a[{i}])' for i in range(4))
    last = count + (1 if shared else 4)
    return f"""template <> DEVICE void wgmma<{format_}, {columns}>(float (&d)[{columns // 8}][4], {parameter}, u64 b) {{
    asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
                 "{{{outputs}}}, {first}, %{last}, 1, 1, 1, {turned};"
                 : {operands} : {given}, "l"(b));
}}
"""
