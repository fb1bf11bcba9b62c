"""Events of a Chrome trace from blocks of bytes: strict and fast where the file is, tolerant where it is not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from joulemark.errors import UnreadableInput
from joulemark.trace.source import TraceBytes

Scalar = int | float | str | None


class Args(msgspec.Struct, gc=False):
    """The entries of an event's ``args`` that the analysis reads; older profilers wrote ``external id``."""

    correlation: Scalar = None
    device: Scalar = None
    bytes: Scalar = None
    external: Scalar = msgspec.field(name="External id", default=None)
    external_old: Scalar = msgspec.field(name="external id", default=None)


class Event(msgspec.Struct, gc=False):
    """One event, with types as loose as writers are."""

    ph: Scalar = None
    cat: Scalar = None
    name: Scalar = None
    pid: Scalar = None
    tid: Scalar = None
    ts: Scalar = None
    dur: Scalar = None
    id: Scalar = None
    args: Args | None = None


_decode_list = msgspec.json.Decoder(list[Event]).decode
_decode_one = msgspec.json.Decoder(Event).decode

_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # of all versions of msgspec
_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_TOKEN = re.compile(_STRING + rb'|[{}\[\]"]', re.DOTALL)
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_BLANK = re.compile(rb"[\s,]*")
_OPENS_LIST = re.compile(rb"\s*:\s*\[")
_BARE = re.compile(_STRING.decode() + r"|(?<![\w.])[-+]?(?:infinity|inf|nan|n/a)(?![\w/])", re.DOTALL | re.IGNORECASE)

_LARGEST_EVENT = 8 << 20
_LARGEST_HEADER = 64 << 20
_KEPT_TRAILER = 1 << 20


class EventStream:
    """Iterates over lists of events of one file.

    Attributes:
        header: top-level entries beside the events, as far as they could be read; complete after the iteration.
        cut: where the file ends early, None when its list of events is closed.
        trailer_cut: the file ends early behind its events.
        skipped, repaired: events that could not be decoded, or only after a repair.
    """

    def __init__(self, source: TraceBytes) -> None:
        self.source = source
        self.header: dict[str, Any] = {}
        self.cut: str | None = None
        self.trailer_cut = False
        self.skipped = 0
        self.repaired = 0
        self._closed_at: int | None = None
        self._bare_list = False

    def __iter__(self) -> Iterator[list[Event]]:
        """Lists of events, in the order of the file.

        Raises:
            UnreadableInput: the file cannot be read, is empty or holds no list of events.
        """
        blocks = iter(self.source)
        rest = self._open(blocks)
        more = True
        while more:
            events, consumed = self._take(rest)
            yield events
            if self._closed_at is not None:
                self._read_trailer(rest[consumed + 1 :], blocks)
                return
            rest = rest[consumed:]
            block = next(blocks, b"")
            more = bool(block)
            rest += block
        yield from self._finish(rest)

    def _take(self, data: bytes) -> tuple[list[Event], int]:
        """Events before the last separator in ``data``, and the number of bytes that they took."""
        separator = _last_separator(data)
        if separator is None:
            return [], 0
        chunk = data[: separator.start() + 1]
        try:
            return _decode_list(b"[" + chunk + b"]"), separator.end()
        except _UNDECODABLE:
            return self._walk(data, separator.end())

    def _walk(self, data: bytes, stop: int) -> tuple[list[Event], int]:
        """Events one at a time up to ``stop``; ends early at the list's end or at an event that needs more data."""
        events: list[Event] = []
        at = 0
        while at < stop:
            at = _skip_blank(data, at)
            if data[at : at + 1] == b"]":
                self._closed_at = at
                break
            if at >= stop:
                break
            separator = _BETWEEN.search(data, at)
            after = separator.end() if separator else stop
            event, end = self._one(data, at, separator.start() + 1 if separator else len(data))
            if event is not None:
                events.append(event)
                at = end
            elif end < 0 and len(data) - at < _LARGEST_EVENT and not _event_at(data, separator):
                break
            else:
                self.skipped += 1
                at = after
        return events, at

    def _one(self, data: bytes, at: int, stop: int) -> tuple[Event | None, int]:
        """The event that begins at ``at``: up to the next separator or, if that lies inside it, to its own end.

        Returns the event and the byte behind it, or None with -1 when the data ends inside it.
        """
        event = self._decode(data[at:stop])
        if event is not None:
            return event, stop
        end = _balanced_end(data, at)
        return (None, -1) if end is None else (self._decode(data[at:end]), end)

    def _decode(self, raw: bytes) -> Event | None:
        try:
            return _decode_one(raw)
        except _UNDECODABLE:
            value = _loads_tolerant(raw)
        if not isinstance(value, Mapping):
            return None
        self.repaired += 1
        return _event_of(value)

    def _finish(self, rest: bytes) -> Iterator[list[Event]]:
        """The last events of a file, and how it ends."""
        events, consumed = self._walk(rest, len(rest))
        if events:
            yield events
        if self._closed_at is not None:
            self._read_trailer(rest[consumed + 1 :], iter(()))
            return
        inside = rest[consumed:].strip(b" \t\r\n,")
        where = "in the middle of an event" if inside else "before its list of events is closed"
        position = self.source.position - len(rest[consumed:]) if inside else self.source.position
        damage = f"; {self.source.damage}" if self.source.damage else ""
        self.cut = f"the file ends {where} at byte {position}{damage}"

    def _open(self, blocks: Iterator[bytes]) -> bytes:
        """Reads up to the list of events; returns what was read behind its bracket."""
        data, looked_at = b"", 0
        while len(data) < _LARGEST_HEADER:
            block = next(blocks, b"")
            data = (data + block).removeprefix(b"\xef\xbb\xbf") if len(data) < 3 else data + block
            first = data.lstrip()[:1]
            if first == b"[":
                self._bare_list = True
                return data[data.index(b"[") + 1 :]
            if first not in (b"{", b""):
                break
            if block and len(data) < 2 * looked_at:
                continue  # looking again at every block would take quadratic time
            looked_at, found = len(data), _events_key(data)
            if found is not None:
                self.header.update(_loads_mapping(data[: found[0]].rstrip().rstrip(b",") + b"}"))
                return data[found[1] :]
            if not block:
                break
        raise self._no_events(data)

    def _no_events(self, data: bytes) -> UnreadableInput:
        path, damage = self.source.path, f" ({self.source.damage})" if self.source.damage else ""
        if not data.strip():
            what = f"the trace {path} is empty: 0 bytes of JSON in it{damage}"
        elif data.lstrip()[:1] != b"{":
            what = f"{path} is no Chrome trace: it begins with {data.lstrip()[:16]!r}"
        else:
            what = f"{path} is no Chrome trace: no list 'traceEvents' in its {len(data)} bytes{damage}"
        return UnreadableInput(what, "give a file that torch.profiler's export_chrome_trace wrote")

    def _read_trailer(self, begin: bytes, blocks: Iterator[bytes]) -> None:
        """Entries behind the events; a file that ends in them has lost no event."""
        kept, last = begin[:_KEPT_TRAILER], begin.rstrip()[-1:]
        for block in blocks:
            if len(kept) < _KEPT_TRAILER:
                kept += block
            last = block.rstrip()[-1:] or last
        if self._bare_list:
            return
        self.trailer_cut = last != b"}"
        body = kept.strip().removeprefix(b",").strip()
        if body != b"}":
            self.header.update(_loads_mapping(b"{" + body))


def _event_at(data: bytes, separator: re.Match[bytes] | None) -> bool:
    """Whether a whole event follows a separator: then what stands before it is broken, not unfinished."""
    if separator is None:
        return False
    following = _BETWEEN.search(data, separator.end())
    stop = following.start() + 1 if following else _balanced_end(data, separator.end())
    try:
        return stop is not None and _decode_one(data[separator.end() : stop]).ph is not None
    except _UNDECODABLE:
        return False


def _skip_blank(data: bytes, at: int) -> int:
    blank = _BLANK.match(data, at)
    return at if blank is None else blank.end()


def _last_separator(data: bytes) -> re.Match[bytes] | None:
    """The last place where an object may end and the next begin."""
    window = 1 << 16
    while True:
        begin = max(0, len(data) - window)
        found = None
        for found in _BETWEEN.finditer(data, begin):  # noqa: B007 - the last match is wanted
            pass
        if found is not None or begin == 0:
            return found
        window <<= 4


def _balanced_end(data: bytes, at: int) -> int | None:
    """The byte behind the object that begins at ``at``; None when the data ends inside it."""
    depth = 0
    for token in _TOKEN.finditer(data, at):
        text = token.group()
        if text in (b"{", b"["):
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
            if depth <= 0:
                return token.end()
        elif text == b'"':
            return None
    return None


def _events_key(data: bytes) -> tuple[int, int] | None:
    """Where the key ``traceEvents`` of the top-level object begins, and the byte behind its opening bracket."""
    depth = 0
    for token in _TOKEN.finditer(data):
        text = token.group()
        if text in (b"{", b"["):
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and text == b'"traceEvents"':
            opening = _OPENS_LIST.match(data, token.end())
            if opening is not None:
                return token.start(), opening.end()
    return None


def _loads_tolerant(raw: bytes) -> Any:
    """JSON with bare ``inf``, ``NaN`` or ``N/A`` (read as null), control characters or broken UTF-8; None if none."""
    text = raw.decode("utf-8", "replace")
    repaired = _BARE.sub(lambda match: match.group() if match.group().startswith('"') else "null", text)
    try:
        return json.loads(repaired, strict=False)
    except (ValueError, RecursionError):
        return None


def _loads_mapping(raw: bytes) -> dict[str, Any]:
    value = _loads_tolerant(raw)
    return value if isinstance(value, dict) else {}


def _scalar(value: Any) -> Scalar:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return value if isinstance(value, int | float) else None


def _event_of(value: Mapping[str, Any]) -> Event:
    """An event from JSON of any types."""
    args = value.get("args")
    args = args if isinstance(args, Mapping) else {}
    kept = Args(*(_scalar(args.get(key)) for key in ("correlation", "device", "bytes", "External id", "external id")))
    keys = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "id")
    scalars: list[Any] = [_scalar(value.get(key)) for key in keys]
    event = Event(*scalars)
    event.args = kept
    return event
