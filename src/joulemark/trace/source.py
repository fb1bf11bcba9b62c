"""Bytes of a trace file in bounded blocks: plain or gzip, whole or cut."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from joulemark.errors import UnreadableInput

BLOCK_BYTES = 4 << 20
"""Large enough to amortise a call of the decoder, small enough to keep memory low."""

_READ_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31
Reader = Callable[[int], bytes]


class TraceBytes:
    """Iterates over the decompressed bytes of a file; remembers how the file ended.

    A gzip stream is recognised by its first bytes, not by its name, and may have several members. What a cut or
    damaged stream still holds is handed out before it ends.

    Attributes:
        damage: why the compressed stream ended early, None when it did not.
        position: decompressed bytes handed out so far.
    """

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES) -> None:
        self.path = path
        self.block_bytes = block_bytes
        self.damage: str | None = None
        self.position = 0

    def __iter__(self) -> Iterator[bytes]:
        """Blocks of about ``block_bytes`` bytes.

        Raises:
            UnreadableInput: the file cannot be opened or read.
        """
        try:
            with self.path.open("rb") as file:
                compressed = file.read(2) == _GZIP_MAGIC
                file.seek(0)
                blocks = self._inflate(file.read) if compressed else iter(lambda: file.read(self.block_bytes), b"")
                for block in blocks:
                    self.position += len(block)
                    yield block
        except OSError as error:
            reason = error.strerror or str(error)
            raise UnreadableInput(
                f"cannot read the trace {self.path}: {reason}", "check the path and its rights"
            ) from error

    def _inflate(self, read: Reader) -> Iterator[bytes]:
        """Decompressed blocks of a gzip file, never much more than a block in memory at once."""
        collected, size = [], 0
        for piece in self._pieces(read):
            collected.append(piece)
            size += len(piece)
            if size >= self.block_bytes:
                yield b"".join(collected)
                collected, size = [], 0
        if collected:
            yield b"".join(collected)

    def _pieces(self, read: Reader) -> Iterator[bytes]:
        inflate, pending = zlib.decompressobj(_GZIP_WINDOW), b""
        while data := pending or read(_READ_BYTES):
            if inflate.eof:
                if not data.startswith(_GZIP_MAGIC[:1]):
                    return  # padding behind the last member
                inflate = zlib.decompressobj(_GZIP_WINDOW)
            before = inflate.copy()
            try:
                yield inflate.decompress(data, self.block_bytes)
            except zlib.error as error:
                self.damage = f"the gzip stream is damaged ({error})"
                yield _until_damage(before, data)
                return
            pending = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
        if not inflate.eof:
            yield inflate.flush()
            self.damage = None if inflate.eof else "the gzip stream ends early"


def _until_damage(inflate: zlib._Decompress, data: bytes) -> bytes:
    """What a damaged stream yields before its first bad stretch of 512 bytes."""
    pieces = []
    for offset in range(0, len(data), 512):
        try:
            pieces.append(inflate.decompress(data[offset : offset + 512]))
        except zlib.error:
            break
    return b"".join(pieces)
