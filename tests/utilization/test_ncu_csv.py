"""Output of Nsight Compute: every form of number, unit and clutter, and refusals."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from joulemark.errors import NotPermitted, UnreadableInput
from joulemark.utilization.ncu_csv import base_unit, parse, read_export

DATA = Path(__file__).parents[1] / "data" / "counters"
H200 = DATA / "ncu_resnet18_b64_fp16_h200.csv"
MIXED = (DATA / "mixed_units.txt").read_text()

LONG = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'
TIME = "gpu__time_duration.sum"


def one(value: str, unit: str = "") -> object:
    """The reading of one counter as it is printed."""
    (launch,) = parse(f'{LONG}"0","7","k","s","m","{unit}","{value}"\n').launches
    return launch.texts["m"] if "m" in launch.texts else launch.readings["m"].value


def test_mixed_units_banners_and_program_output() -> None:
    counters = (
        TIME,
        "sm__cycles_elapsed.max",
        "smsp__inst_executed.sum",
        "dram__bytes_read.sum",
        "dram__bytes.sum.per_second",
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    )
    launches = parse(MIXED).launches
    assert [[launch.value(name) for name in counters] for launch in launches] == [
        [1.25e-3, 2312448, 41943040, 5.125e8, 4.1e11, 71.23],
        [9.6e-6, 17801, 998, 1.04858e6, 1.0923e11, None],
        [1.984e-6, 3690, 1024, 0, 0, 0.84],
    ]
    assert [launches[0].readings[name].unit for name in counters] == ["s", "cycle", "inst", "B", "B/s", "%"]
    assert [launch.kernel for launch in launches].count("gemm_f16_tn_128x64") == 2
    assert launches[0].process == 48213


def test_sums_of_a_real_export_are_the_plain_sums_of_its_columns() -> None:
    export = read_export(H200)
    lines = [line for line in H200.read_text().splitlines() if line.startswith('"')]
    header, units, *rows = csv.reader(lines)
    assert (len(export.launches), export.findings) == (len(rows), ()) == (113, ())
    checked = 0
    for index, name in enumerate(header):
        if not name.endswith(".sum") or units[index] not in ("byte", "inst"):
            continue
        plain = sum(int(row[index].replace(",", "")) for row in rows)
        assert sum(launch.readings[name].value or 0 for launch in export.launches) == plain
        checked += 1
    assert checked >= 8
    nanoseconds = sum(int(row[header.index(TIME)].replace(",", "")) for row in rows)
    assert sum(launch.readings[TIME].value or 0 for launch in export.launches) == pytest.approx(nanoseconds / 1e9)
    assert export.launches[0].texts["device__attribute_display_name"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("printed", "unit", "value"),
    [
        ("41,943,040", "inst", 41943040),
        ("1,234.5", "usecond", 1.2345e-3),
        ("9007199254740993", "byte", 9007199254740993),
        ("12", "Gbyte", 12_000_000_000),
        ("1.5", "cycle/nsecond", 1.5e9),
        ("-3", "", -3),
        ("1e3", "", 1000.0),
        ("1'234", "", 1234),
        ("100 (10; 20; 70)", "", 100),
        ("0", "%", 0),
        ("n/a", "%", None),
        ("", "inst", None),
        ("nan", "%", None),
        ("inf", "%", None),
        ("1e999", "", None),
        ("CachePreferNone", "", "CachePreferNone"),
    ],
)
def test_numbers(printed: str, unit: str, value: object) -> None:
    found = one(printed, unit)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("printed", ["1,25", "1.234,56", "0,123", "1234,567"])
def test_a_decimal_comma_is_refused_not_misread(printed: str) -> None:
    with pytest.raises(UnreadableInput, match="LC_ALL=C"):
        one(printed)


@pytest.mark.parametrize(
    ("unit", "base"),
    [
        ("ns", (-9, "s")),
        ("msecond", (-3, "s")),
        ("Kbyte", (3, "B")),
        ("Tbyte/s", (12, "B/s")),
        ("byte/block", (0, "B/block")),
        ("cycle/usecond", (6, "Hz")),
        ("MHz", (6, "Hz")),
        ("register/thread", (0, "register/thread")),
        ("inst/cycle", (0, "inst/cycle")),
        ("%", (0, "%")),
        ("", (0, "")),
        ("furlong", (0, "furlong")),
    ],
)
def test_units(unit: str, base: tuple[int, str]) -> None:
    assert base_unit(unit) == base


def row(number: int, value: str, name: str = TIME, unit: str = "ns", process: int = 7) -> str:
    return f'"{number}","{process}","k<1, 2>(int)","s","{name}","{unit}","{value}"\n'


def times(text: str) -> list[object]:
    return [launch.value(TIME) for launch in parse(text).launches]


def test_output_between_behind_and_glued_to_the_rows() -> None:
    text = (
        "1,2,3,4,5,6,7\n"
        + LONG
        + row(0, "1")
        + '"0","done"\n==PROF== note\n50 %'
        + row(1, "2")
        + "0,a,b,c,d,e,f\nbye\n"
    )
    assert times(text) == [1e-9, 2e-9]


def test_two_tables_and_two_processes_keep_their_launches_apart() -> None:
    assert times(LONG + row(0, "1") + row(0, "2", process=8) + "\n" + LONG + row(0, "3")) == [1e-9, 2e-9, 3e-9]


def test_a_counter_in_two_sections_and_rules_without_a_value() -> None:
    (launch,) = parse(LONG + row(0, "1") + row(0, "1") + row(0, "", name="", unit="")).launches
    assert dict(launch.readings) == {TIME: launch.readings[TIME]}


def test_details_page_with_rules() -> None:
    header = LONG.rstrip() + ',"Rule Name","Rule Type","Rule Description"\n'
    text = (
        header
        + row(0, "1,000", "Duration").rstrip()
        + ',"","",""\n'
        + '"0","7","k<1, 2>(int)","s","","","","R","INF","a ""b"",\nc"\n'
    )
    assert parse(text).launches[0].value("Duration") == 1e-6
    assert parse(text).findings == ()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_and_line_ends(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "ncu.csv"
    path.write_bytes((LONG + row(0, "1")).replace("\n", "\r\n").encode(encoding))
    assert len(read_export(path).launches) == 1


def test_a_spreadsheet_drops_the_quotes() -> None:
    text = 'ID,Process ID,Kernel Name,gpu__time_duration.sum\n,,,ns\n0,7,k,1500\n1,7,"k<1, 2>","2,500"\n'
    assert times(text) == [1.5e-6, 2.5e-6]


def test_damaged_rows_are_left_out_and_said() -> None:
    whole = LONG + row(0, "1") + row(1, "2") + row(2, "3")
    cut = parse(whole[:-20])
    assert [launch.number for launch in cut.launches] == [0, 1]
    assert [(one.code, one.flags) for one in cut.findings] == [("rows_damaged", True)]
    inside = parse(LONG + row(0, "1") + row(1, "2")[:14] + "\n" + row(2, "3"))
    assert [launch.number for launch in inside.launches] == [0, 2]
    assert "1 row " in inside.findings[0].message


def test_wherever_a_file_is_cut_no_value_changes() -> None:
    whole = {launch.number: launch for launch in parse(MIXED).launches}
    begin = MIXED.index('"0","48213"')
    for end in range(begin, len(MIXED), 3):
        try:
            export = parse(MIXED[:end])
        except UnreadableInput as error:
            assert error.remedy  # noqa: PT017 - most cuts can be read
            continue
        for launch in export.launches:
            assert launch.readings.items() <= whole[launch.number].readings.items()


REFUSED = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters\n"


@pytest.mark.parametrize(
    "text",
    [
        "==PROF== Connected to process 9\n"
        + REFUSED
        + "hello\n==PROF== Disconnected\n==WARNING== No kernels were profiled.\n",
        "==PROF== Connected to process 9\nhello\n" + REFUSED,
        LONG + REFUSED,
    ],
)
def test_no_permission_is_its_own_error_with_a_remedy(text: str) -> None:
    with pytest.raises(NotPermitted, match=r"no permission \(ERR_NVGPUCTRPERM\)") as caught:
        parse(text)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in caught.value.remedy


def test_permission_for_a_part_is_a_finding() -> None:
    export = parse(REFUSED + LONG + row(0, "1"))
    assert [one.code for one in export.findings] == ["counters_not_permitted"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no table"),
        ("hello\n1,2,3\n", "holds no table"),
        ("==WARNING== No kernels were profiled.\n", "no kernels were profiled"),
        (LONG, "no kernels were profiled"),
        ('"ID","Kernel Name","Invocations","Metric Name"\n', "sums over launches"),
        (f"ID,Process ID,Kernel Name,{TIME}\n0,7,k,5\n", "no line of units"),
    ],
)
def test_nothing_to_read(text: str, said: str) -> None:
    with pytest.raises(UnreadableInput, match=said) as caught:
        parse(text)
    assert caught.value.remedy


def test_files_that_are_no_text(tmp_path: Path) -> None:
    report = tmp_path / "a.ncu-rep"
    report.write_bytes(b"NVR\0\1\2\3")
    with pytest.raises(UnreadableInput, match="own report, not CSV: export it"):
        read_export(report)
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UnreadableInput, match="cannot read the counters"):
            read_export(path)
