"""Reads what Nsight Compute printed with ``--csv``: per launch its counters, in base units."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from joulemark.errors import NotPermitted, UnreadableInput
from joulemark.records import Finding

Number = int | float

_EXPORT = "export it with `ncu --import FILE.ncu-rep --csv --page raw --print-units base`"
_NO_PERMISSION = re.compile(r"ERR_NVGPUCTRPERM|does not have permission to access NVIDIA GPU Performance Counters")
_REFUSED = "no permission (ERR_NVGPUCTRPERM): Nsight Compute was refused the GPU's performance counters"
_PERMISSION_REMEDY = (
    "run as root, or let the administrator load the driver with NVreg_RestrictProfilingToAdminUsers=0 "
    "(https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
)
_NO_KERNELS = re.compile(r"No kernels were profiled")

_PLAIN = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_GROUPED = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?")
_COMMA_DECIMAL = re.compile(r"[-+]?\d{1,3}(?:\.\d{3})*,\d+|[-+]?\d+,\d+")
_INSTANCES = re.compile(r"^(\S+) \([^()]*;[^()]*\)$")
_NOT_A_NUMBER = frozenset({"", "n/a", "nan", "-nan", "nan(ind)", "-nan(ind)", "inf", "-inf", "no data", "(!) n/a"})

_PREFIXES = {"": 0, "n": -9, "u": -6, "m": -3, "K": 3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_DESCRIPTION = frozenset(
    {"ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Kernel Time", "Context", "Stream", "Block Size",
     "Grid Size", "Device", "CC", "Section Name"}
)  # fmt: skip
_UNITS = {
    "s": "s", "sec": "s", "second": "s", "seconds": "s", "byte": "B", "bytes": "B", "B": "B", "hz": "Hz", "Hz": "Hz",
    "cycle": "cycle", "inst": "inst", "warp": "warp", "thread": "thread", "sector": "sector", "request": "request",
    "block": "block", "register": "register", "%": "%", "bit": "bit", "FLOP": "FLOP", "W": "W", "J": "J",
}  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """One counter of one launch.

    Args:
        value: in ``unit``; None where Nsight Compute printed ``n/a``.
        unit: base unit: ``s``, ``B``, ``B/s``, ``Hz``, ``inst``, ``%`` …; empty for a bare number.
    """

    value: Number | None
    unit: str


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Args:
        number: Nsight Compute's ``ID``: its order within the export.
        process: id of the process; None where the export lacks it.
        kernel: name as printed.
        device: the GPU's number, as printed.
        readings: by counter name, in the order of the export.
        texts: counters whose values are words (``device__attribute_display_name``).
    """

    number: int
    process: int | None
    kernel: str
    device: str = ""
    readings: Mapping[str, Reading] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def value(self, counter: str) -> Number | None:
        """The counter's value; None where it was not collected or is ``n/a``."""
        found = self.readings.get(counter)
        return None if found is None else found.value


@dataclass(frozen=True)
class Export:
    """A file of Nsight Compute, read.

    Args:
        launches: in the order of the file.
        findings: what is wrong with the file although it can be read.
    """

    launches: tuple[Launch, ...]
    findings: tuple[Finding, ...] = ()


def read_export(path: Path) -> Export:
    """Reads a file that holds the standard output of ``ncu --csv`` or its ``--log-file``.

    Raises:
        NotPermitted: Nsight Compute was refused the counters.
        UnreadableInput: the file cannot be read, or holds no counters.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableInput(
            f"cannot read the counters {path}: {error.strerror or error}", "check the path and its rights"
        ) from error
    if data.startswith((b"NVR\0", b"NVR")) and b"\0" in data[:64]:
        raise UnreadableInput(f"{path} is Nsight Compute's own report, not CSV", _EXPORT)
    return parse(_decoded(data), str(path))


def _decoded(data: bytes) -> str:
    """Text of the file: UTF-8, or UTF-16 with its mark, which a redirection in PowerShell writes."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace")
    return data.decode("utf-8-sig", "replace")


def parse(text: str, source: str = "the output of ncu") -> Export:
    """The launches in the output of ``ncu --csv``.

    Banner lines and the program's own output may stand before, between and behind the rows. Both forms are read:
    one row per launch with a line of units (``--page raw``), and one row per counter with its unit (``--page
    details``, or ``--metrics``). Values have thousands separators; units differ from row to row.

    Args:
        text: standard output and standard error of ncu, in any order.
        source: named in errors.

    Raises:
        NotPermitted: Nsight Compute was refused the counters.
        UnreadableInput: no counters are inside, or the numbers are of another locale.
    """
    tables, others, broken = _tables(text)
    launches = [launch for table in tables for launch in table.launches()]
    refused = any(_NO_PERMISSION.search(line) for line in others)
    if not launches:
        raise _nothing(source, refused, tables, others)
    findings = []
    if refused:
        findings.append(Finding("counters_not_permitted", f"for a part of the launches {_REFUSED}", _PERMISSION_REMEDY))
    if broken:
        message = (
            f"{broken} row{'s' if broken > 1 else ''} with missing or surplus fields left out: the file is damaged"
        )
        findings.append(Finding("rows_damaged", message, "export it again", flags=True))
    return Export(tuple(launches), tuple(findings))


def _nothing(source: str, refused: bool, tables: Sequence[_Table], others: Sequence[str]) -> Exception:
    if refused:
        return NotPermitted(_REFUSED, _PERMISSION_REMEDY)
    if tables or any(_NO_KERNELS.search(line) for line in others):
        return UnreadableInput(
            f"no kernels were profiled in {source}",
            "check --kernel-name and --launch-skip; under --profile-from-start off, call cudaProfilerStart",
        )
    return UnreadableInput(f"{source} holds no table of Nsight Compute (no line with ID and Kernel Name)", _EXPORT)


def _tables(text: str) -> tuple[list[_Table], list[str], int]:
    """The tables of a text, the lines that belong to none, and how many rows are damaged."""
    tables: list[_Table] = []
    others: list[str] = []
    broken = 0
    for line in _records(text):
        if tables and _ROW_START.match(line) and (line.count('"') % 2 or line.rstrip()[-1] != '"'):
            broken += 1  # cut within a field or before it: what stands there is not its value
            continue
        cells = _cells(line)
        if _is_header(cells):
            tables.append(_table(cells))
        elif not tables or not tables[-1].looks_like_row(cells):
            others.append(line)
        elif not tables[-1].add(cells):
            broken += 1
    return tables, others, broken


_ROW_START = re.compile(r'"\d+","\d+","|"","","",|"ID","')


def _records(text: str) -> Iterator[str]:
    """Lines; a row begins where its quotes do, even behind output without a line break, and may hold line breaks."""
    held = ""
    for line in text.replace("\r\n", "\n").split("\n"):
        start = _ROW_START.search(line)
        if held and start:  # the held row was cut
            yield held
            held = ""
        row = f"{held}\n{line}" if held else line[start.start() :] if start else line
        if start and start.start():
            yield line[: start.start()]
        held = row if (held or start) and row.count('"') % 2 else ""
        if not held:
            yield row
    if held:
        yield from held.split("\n")


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=False), [])
    except csv.Error:
        return [line]


def _is_header(cells: Sequence[str]) -> bool:
    return "ID" in cells[:1] and "Kernel Name" in cells


def _table(header: Sequence[str]) -> _Table:
    missing = {"Metric Name", "Metric Unit", "Metric Value"} - set(header)
    if not missing:
        return _LongTable(header)
    if len(missing) < 3 or "Invocations" in header:
        raise UnreadableInput("the table of Nsight Compute sums over launches (--print-summary)", _EXPORT)
    return _WideTable(header)


class _Table:
    """Rows of one table of Nsight Compute; both forms name the launch in the same columns."""

    def __init__(self, header: Sequence[str]) -> None:
        self.header = list(header)
        self._column = {name: index for index, name in reversed(list(enumerate(header)))}
        self._rows: list[list[str]] = []

    def looks_like_row(self, cells: Sequence[str]) -> bool:
        """Whether the cells begin as those of a launch do: two numbers, unless the columns say otherwise."""
        if len(cells) < 3 or not cells[0].isdecimal():
            return False
        return self.header[1] != "Process ID" or cells[1].isdecimal()

    def add(self, cells: list[str]) -> bool:
        """Takes a row; False when its fields are not those of the header."""
        if len(cells) != len(self.header):
            return False
        self._rows.append(cells)
        return True

    def _named(self, row: Sequence[str], name: str) -> str:
        index = self._column.get(name)
        return "" if index is None else row[index]

    def _launch(self, row: Sequence[str], readings: Mapping[str, Reading], texts: Mapping[str, str]) -> Launch:
        process = self._named(row, "Process ID")
        kernel, device = self._named(row, "Kernel Name"), self._named(row, "Device")
        return Launch(int(row[0]), int(process) if process.isdecimal() else None, kernel, device, readings, texts)

    def launches(self) -> Iterator[Launch]:
        """The launches, in the order of their first rows."""
        raise NotImplementedError


class _WideTable(_Table):
    """One row per launch, one column per counter; the line under the header holds the units."""

    def __init__(self, header: Sequence[str]) -> None:
        super().__init__(header)
        self._units: list[str] | None = None
        # Columns of NVTX ranges have colons in their names.
        self._counters = [i for i, name in enumerate(header) if name not in _DESCRIPTION and ":" not in name]

    def looks_like_row(self, cells: Sequence[str]) -> bool:
        return self._names_units(cells) or super().looks_like_row(cells)

    def _names_units(self, cells: Sequence[str]) -> bool:
        if self._rows or len(cells) != len(self.header):
            return False
        return not any(cell for name, cell in zip(self.header, cells, strict=True) if name in _DESCRIPTION)

    def add(self, cells: list[str]) -> bool:
        if self._names_units(cells):
            self._units = cells
            return True
        if self._units is None:
            raise UnreadableInput("the table of Nsight Compute has no line of units under its header", _EXPORT)
        return super().add(cells)

    def launches(self) -> Iterator[Launch]:
        units = self._units or []
        for row in self._rows:
            readings: dict[str, Reading] = {}
            texts: dict[str, str] = {}
            for index in self._counters:
                _take(self.header[index], row[index], units[index], readings, texts)
            yield self._launch(row, readings, texts)


class _LongTable(_Table):
    """One row per counter of a launch, with the counter's own unit."""

    def launches(self) -> Iterator[Launch]:
        grouped: dict[tuple[str, str], list[list[str]]] = {}
        for row in self._rows:
            grouped.setdefault((row[0], self._named(row, "Process ID")), []).append(row)
        for rows in grouped.values():
            readings: dict[str, Reading] = {}
            texts: dict[str, str] = {}
            for row in rows:
                name = self._named(row, "Metric Name")
                # A counter that stands in two sections has one value; a row without a name is a rule's advice.
                if name and name not in readings:
                    _take(name, self._named(row, "Metric Value"), self._named(row, "Metric Unit"), readings, texts)
            yield self._launch(rows[0], readings, texts)


def _take(name: str, text: str, unit: str, readings: dict[str, Reading], texts: dict[str, str]) -> None:
    exponent, base = base_unit(unit)
    value = _number(text.strip(), exponent, name)
    if isinstance(value, str):
        texts[name] = value
    else:
        readings[name] = Reading(value, base)


def base_unit(unit: str) -> tuple[int, str]:
    """A unit of Nsight Compute as (exponent of ten, base unit): ``Kbyte`` is (3, ``B``), ``cycle/nsecond`` (9, ``Hz``).

    Its prefixes are decimal, for bytes too. A unit that is not known stays as it is.
    """
    parts = [_scaled(part) for part in unit.strip().split("/")]
    if len(parts) > 2 or any(part is None for part in parts):
        return 0, unit.strip()
    (exponent, name), *under = [part for part in parts if part is not None]
    for down, other in under:
        exponent, name = exponent - down, f"{name}/{other}"
    return exponent, "Hz" if name == "cycle/s" else name


def _scaled(part: str) -> tuple[int, str] | None:
    if part in ("", *_UNITS):
        return 0, _UNITS.get(part, "")
    if part[0] in _PREFIXES and part[1:] in _UNITS:
        return _PREFIXES[part[0]], _UNITS[part[1:]]
    return None


def _number(text: str, exponent: int, name: str) -> Number | str | None:
    """A printed value in base units: exact for integers, None for ``n/a``, words as they are.

    Raises:
        UnreadableInput: the number has a decimal comma.
    """
    instances = _INSTANCES.match(text)
    plain = re.sub("(?<=\\d)['\u00a0\u202f](?=\\d{3})", ",", instances.group(1) if instances else text)
    if plain.lower() in _NOT_A_NUMBER:
        return None
    if _GROUPED.fullmatch(plain):
        plain = plain.replace(",", "")
    elif _COMMA_DECIMAL.fullmatch(plain):
        raise UnreadableInput(
            f"the counters have a decimal comma ({name} is {text!r})", "export them with LC_ALL=C in the environment"
        )
    elif not _PLAIN.fullmatch(plain):
        return text
    return _exact(plain, exponent)


def _exact(plain: str, exponent: int) -> Number | None:
    """The number times ten to the exponent, rounded once: ``9.6`` and -6 give the float nearest to 9.6e-6."""
    if exponent >= 0 and len(plain) < 400 and plain.lstrip("+-").isdecimal():
        return int(f"{plain}{'0' * exponent}")
    mantissa, _, own = plain.lower().partition("e")
    value = float(f"{mantissa}e{int(own or 0) + exponent}")
    return value if abs(value) != float("inf") else None
