"""Counts per launch by hand, and what the suite promises of itself."""

from __future__ import annotations

import pytest

from joulemark.energy.microbench.operands import _FORMATS, BLOCK_BYTES
from joulemark.energy.microbench.suite import SUITE, TILE_BYTES, benchmarks_for, tiles_for
from joulemark.energy.units import UNITS, columns


def test_counts_of_a_vector_launch():
    counts = SUITE["fp32"].counts_per_launch("sm_90a", blocks=132, iterations=10, instructions=132)
    threads = 132 * 1024
    assert counts == {"instruction": 132 * 10 * threads / 32, "fp32": 128 * 10 * threads}


def test_counts_of_a_tensor_launch_follow_the_shape_of_the_architecture():
    new = SUITE["mma_fp16"].counts_per_launch("sm_80", 1, 1, 38)
    old = SUITE["mma_fp16"].counts_per_launch("sm_75", 1, 1, 38)
    warps = 512 / 32
    assert new["mma_fp16"] == warps * 32 * 2 * 16 * 8 * 16
    assert old["mma_fp16"] == warps * 32 * 2 * 16 * 8 * 8


def test_a_warpgroup_product_is_counted_once():
    counts = SUITE["wgmma_bf16"].counts_per_launch("sm_90a", blocks=1, iterations=1, instructions=45)
    assert counts["wgmma_bf16"] == 2 * 8 * (2 * 64 * 256 * 16)  # two warpgroups, eight products each


def test_levels_are_nested():
    hbm = SUITE["hbm_read"].counts_per_launch("sm_90a", 1, 1, 34)
    assert hbm["hbm_read"] == hbm["l2_read"] == hbm["l1"] == TILE_BYTES
    write = SUITE["hbm_write"].counts_per_launch("sm_90a", 1, 1, 19)
    assert write["hbm_write"] == write["l2_write"] == write["l1"] == TILE_BYTES
    assert "l2_read" not in write
    assert "l2_read" not in SUITE["l1_read"].counts_per_launch("sm_90a", 1, 1, 108)


def test_strided_loads_move_a_sector_per_lane():
    counts = SUITE["l2_read_strided"].counts_per_launch("sm_90a", 1, 1, 21)
    assert counts["l2_read"] == 8 * 1024 * 32
    assert counts["logic"] == 4 * 1024
    assert counts["memory_access"] == 8 * 1024 / 32


def test_a_request_to_the_l2_is_of_a_line_at_most():
    """Whole lines, half lines of strided sectors, and a line per lane."""
    counts = {name: one.counts_per_launch("sm_90a", 1, 1, 1) for name, one in SUITE.items() if one.runs_on("sm_90a")}
    warps = 1024 / 32
    for name, requests in (("l2_read", 4), ("l2_read_strided", 8), ("l2_read_scattered", 32), ("l2_write", 4)):
        assert counts[name]["l2_request"] == 8 * warps * requests
        assert counts[name]["l1_request"] == 8 * warps
    assert counts["hbm_read"]["l2_request"] == counts["l2_read"]["l2_request"]
    assert "l2_request" not in counts["l1_read"]
    assert "l1_request" not in counts["shared_read"]


def test_a_sector_written_in_pieces_is_counted_each_time_and_reaches_hbm_once():
    halves = SUITE["hbm_write_strided"].counts_per_launch("sm_90a", 1, 1, 1)
    assert halves["l2_write"] == halves["l1"] == 2 * halves["hbm_write"] == 8 * 1024 * 32
    words = SUITE["l2_write_scattered"].counts_per_launch("sm_90a", 1, 1, 1)
    assert words["l2_write"] == words["l1"] == 8 * 1024 * 32


def test_products_on_tiles_read_three_registers_per_multiply_add():
    fp32 = SUITE["fp32_tile"].counts_per_launch("sm_90a", 1, 1, 1)
    assert fp32["fp32"] == fp32["fp32_operands"] == 144 * 1024
    shared = SUITE["fp32_shared"].counts_per_launch("sm_90a", 1, 1, 1)
    assert shared["fp32"] == 144 * 1024
    assert shared["shared_read"] == 18 * 1024 * 16


def test_narrow_accesses_move_a_quarter_of_the_bytes_per_instruction():
    for name, unit in (("shared_read", "shared_read"), ("l1_read", "l1")):
        one, other = (SUITE[wide].counts_per_launch("sm_90a", 1, 1, 1) for wide in (name, f"{name}_narrow"))
        assert one["memory_access"] == other["memory_access"] == 32 * 1024 / 32
        assert one[unit] == 4 * other[unit] == 32 * 1024 * 16


MEMORY = 80 << 30


@pytest.mark.parametrize("l2_mib", [4, 30, 50, 126])
def test_footprints_are_pinned_to_their_level(l2_mib):
    l2 = l2_mib << 20
    for name in ("l2_read", "l2_read_strided", "l2_write", "l2_write_strided"):
        tile = TILE_BYTES * (2 if name == "l2_read_strided" else 1)
        tiles = tiles_for(SUITE[name], l2, 132, MEMORY)
        assert tiles * tile <= 0.75 * l2 or tiles == 1
        assert tiles == 132 or (tiles + 1) * tile > 0.75 * l2
    for name in ("hbm_read", "hbm_write"):
        footprint = tiles_for(SUITE[name], l2, 132, MEMORY) * TILE_BYTES
        assert footprint == pytest.approx(min(640 * l2, MEMORY / 8), rel=0.01)
    assert tiles_for(SUITE["l1_read"], l2, 132, MEMORY) == 256
    assert tiles_for(SUITE["fp32"], l2, 132, MEMORY) == 1


def test_every_count_is_of_a_unit_and_every_unit_has_a_benchmark_that_fits_it():
    for benchmark in SUITE.values():
        for variant in benchmark.variants:
            assert set(variant.counts) <= set(UNITS)
        assert benchmark.unit in UNITS
        assert benchmark.format in _FORMATS
        if benchmark.role == "fit" and UNITS[benchmark.unit].has_datapath:
            assert {"zero", "random"} <= set(benchmark.operands)
    fitted = {unit for one in SUITE.values() if one.role != "check" for unit in (one.unit, *one.variants[-1].counts)}
    assert fitted == set(UNITS) - {"supply", "sm_supply", "hbm_active"}  # of all of them together; of time


def test_time_holds_sms_and_keeps_the_memory_in_use():
    assert SUITE["hbm_read"].counts_over(66, 2.0) == {"sm_active": 132.0, "hbm_active": 2.0}
    assert SUITE["l2_read"].counts_over(66, 2.0) == {"sm_active": 132.0}
    assert SUITE["idle"].counts_over(0, 2.0) == {}
    assert SUITE["empty"].counts_over(132, 2.0) == {}


def test_what_runs_where():
    names = {
        arch: {one.name for one in benchmarks_for(arch)} for arch in ("sm_75", "sm_80", "sm_89", "sm_90a", "sm_100")
    }
    assert "mma_bf16" not in names["sm_75"]
    assert {"mma_bf16", "mma_fp64"} <= names["sm_80"]
    assert [arch for arch, found in names.items() if "mma_fp8" in found] == ["sm_89"]
    assert [arch for arch, found in names.items() if "wgmma_fp8" in found] == ["sm_90a"]
    with pytest.raises(KeyError, match="does not run"):
        SUITE["wgmma_bf16"].work("sm_100")


def test_columns_stand_in_the_units_order():
    assert columns({"fp32": 1, "static": 1, "hbm_read": 1}) == [
        ("static", "static"),
        ("fp32", "control"),
        ("fp32", "datapath"),
        ("hbm_read", "control"),
        ("hbm_read", "datapath"),
    ]
    with pytest.raises(KeyError):
        columns({"fp31": 1})


def test_a_block_of_operands_holds_what_the_kernels_read():
    assert BLOCK_BYTES == (1 << 18) * 16
