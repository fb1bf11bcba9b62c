"""Where kernel classes stand under the roofs of this GPU: its tensor pipe's peak and its DRAM's, both measured (pure).

Source: Williams, Waterman and Patterson, *Roofline: An Insightful Visual Performance Model for Multicore
Architectures*, Communications of the ACM 52 (4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from joulemark.counter_series import CounterSeries
from joulemark.records import Json

FLOP_PER_FMA_INSTRUCTION = 64.0
"""A warp's 32 threads multiply and add; not every instruction of that pipe is such a one, so that is the most."""
_DRAM = ("dram_read_bytes", "dram_write_bytes")


@dataclass(frozen=True)
class Roofs:
    """Peaks that this GPU reached.

    Args:
        flop_per_s: of the large product.
        flop_per_tensor_cycle: FLOP of the product over the tensor pipes' cycles in it.
        tensor_share: of the tensor pipe's peak in it.
        bytes_per_s: of DRAM, reading and writing a large array.
        dram_share: of the DRAM's peak meanwhile; None where that was not counted.
    """

    flop_per_s: float
    flop_per_tensor_cycle: float
    tensor_share: float | None
    bytes_per_s: float
    dram_share: float | None

    def to_json(self) -> dict[str, Json]:
        """Strict JSON, in SI units."""
        return {
            "flop_per_s": self.flop_per_s,
            "flop_per_tensor_cycle": self.flop_per_tensor_cycle,
            "tensor_share": self.tensor_share,
            "bytes_per_s": self.bytes_per_s,
            "dram_share": self.dram_share,
            "ridge_flop_per_byte": self.flop_per_s / self.bytes_per_s,
        }


def roofs_of(
    product: CounterSeries, flop: float, product_s: float, stream: CounterSeries, stream_s: float
) -> Roofs | str:
    """The roofs, or why there are none.

    Args:
        product: samples of large products.
        flop: of all of them.
        product_s: that they took.
        stream: samples of reading and writing a large array.
        stream_s: that it took.
    """
    if "pipe_tensor_cycles" not in product.values or any(name not in stream.values for name in _DRAM):
        return "the references were recorded without tensor cycles or DRAM bytes"
    cycles = product.total("pipe_tensor_cycles")
    moved = sum(stream.total(name) or 0.0 for name in _DRAM)
    if not cycles or not moved:
        return "the references show no tensor cycles, or no DRAM bytes"
    return Roofs(
        flop_per_s=flop / product_s,
        flop_per_tensor_cycle=flop / cycles,
        tensor_share=_share(product, "pipe_tensor"),
        bytes_per_s=moved / stream_s,
        dram_share=_share(stream, "dram_throughput"),
    )


def _share(series: CounterSeries, name: str) -> float | None:
    return series.at_work().mean(name) if name in series.values else None


def point(roofs: Roofs, entry: Mapping[str, Json]) -> dict[str, Json] | None:
    """Where a class stands; None where its bytes or its tensor cycles were not counted, or it moved no byte.

    A class that uses no tensor core has no tensor FLOP: a thousandth of a neighbour's would be more than all its own.

    Args:
        roofs: of this GPU.
        entry: of the class in the document.
    """
    time_s, counters = entry["time_s"], entry["counters"]
    if any(name not in counters for name in (*_DRAM, "pipe_tensor_cycles")) or not time_s:
        return None
    moved = sum(counters[name]["value"] for name in _DRAM)
    cycles = 0.0 if entry["uses_tensor_cores"] is False else counters["pipe_tensor_cycles"]["value"]
    tensor = cycles * roofs.flop_per_tensor_cycle
    vector = counters.get("pipe_fma_instructions", {"value": 0.0})["value"] * FLOP_PER_FMA_INSTRUCTION
    if not moved:
        return None
    intensity, reached = (tensor + vector) / moved, (tensor + vector) / time_s
    roof = min(roofs.flop_per_s, intensity * roofs.bytes_per_s)
    return {
        "tensor_flop": tensor,
        "vector_flop_at_most": vector,
        "dram_bytes": moved,
        "flop_per_byte": intensity,
        "flop_per_s": reached,
        "bytes_per_s": moved / time_s,
        "roof_flop_per_s": roof,
        "of_roof": reached / roof if roof else None,
        "bound_by": "dram" if intensity * roofs.bytes_per_s < roofs.flop_per_s else "tensor",
    }


def ends_of(entry: Mapping[str, Json]) -> dict[str, tuple[float, float]]:
    """Intervals of where a class stands: of ``flop_per_byte`` and ``flop_per_s``.

    They hold where the intervals of all counters behind them hold; the roofs are taken as they are. FLOP per byte have
    no upper end where no byte may have moved. Empty where the class stands nowhere, or a counter behind it has no
    interval.

    Args:
        entry: of the class in the document.
    """
    place = entry["roofline"]
    if place is None:
        return {}
    counters = entry["counters"]
    flop = _ends([(place["tensor_flop"], counters.get("pipe_tensor_cycles")),
                  (place["vector_flop_at_most"], counters.get("pipe_fma_instructions"))])  # fmt: skip
    moved = _ends([(cell["value"], cell) for cell in (counters.get(name) for name in _DRAM) if cell is not None])
    if flop is None or moved is None or not moved[1] > 0 or not entry["time_s"] > 0:
        return {}
    return {
        "flop_per_byte": (flop[0] / moved[1], flop[1] / moved[0] if moved[0] > 0 else math.inf),
        "flop_per_s": (flop[0] / entry["time_s"], flop[1] / entry["time_s"]),
    }


def _ends(amounts: Sequence[tuple[float, Mapping[str, Json] | None]]) -> tuple[float, float] | None:
    """Interval of a sum of amounts, each proportional to its counter; None where one has none."""
    low = high = 0.0
    for amount, cell in amounts:
        if not amount:
            continue
        if cell is None or cell["interval"] is None or not cell["value"] > 0:
            return None
        low += amount * cell["interval"][0] / cell["value"]
        high += amount * cell["interval"][1] / cell["value"]
    return low, high
