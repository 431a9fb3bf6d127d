"""The fields of a GGUF header, each checked against the bytes that are left before it is read.

Everything is little-endian. A string is u64 length and UTF-8 bytes; an array is u32 type of its elements, u64 count and
the elements; a metadata value is u32 type and the value. Knows nothing of what the fields are for.
"""

from __future__ import annotations

import struct
from mmap import mmap
from pathlib import Path
from typing import Any

from mlx_moe.formats.safetensors import FileFormatError

STRING, ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Type numbers of metadata values and their struct codes."""
_SMALLEST = {kind: struct.calcsize(code) for kind, code in _SCALARS.items()} | {STRING: 8, ARRAY: 12}
"""Bytes that a value of each type takes at least."""
_MAX_DEPTH = 3
_LENGTH = struct.Struct("<Q")


class Cursor:
    """Reads one field after the other from the first ``end`` bytes of a file; ``at`` is the next byte."""

    def __init__(self, path: Path, data: mmap, end: int):
        self._path, self._data, self._end = path, data, end
        self.at = 0

    def error(self, reason: str) -> FileFormatError:
        """The exception to raise: the file, the reason, the remedy."""
        return FileFormatError(f"{self._path}: {reason}; truncated or corrupt, download it again")

    def take(self, size: int, what: str) -> int:
        """Step over ``size`` bytes and return where they start."""
        start = self.at
        if size > self._end - start:
            raise self.error(f"{what} takes {size} bytes from byte {start}, but {self._end - start} are left")
        self.at = start + size
        return start

    def number(self, code: str, what: str) -> Any:
        """A number, by its struct code."""
        start = self.take(struct.calcsize(code), what)
        return struct.unpack_from(code, self._data, start)[0]

    def count(self, smallest: int, what: str) -> int:
        """A u64 number of things that take at least ``smallest`` bytes each, all of which must still fit."""
        count = self.number("<Q", what)
        if count > (self._end - self.at) // smallest:
            raise self.error(f"{what} is {count}, but {self._end - self.at} bytes are left")
        return count

    def string(self, what: str, longest: int | None = None) -> str:
        """A string of at most ``longest`` bytes."""
        size = self.number("<Q", what)
        if longest is not None and size > longest:
            raise self.error(f"{what} is {size} bytes long, allowed are {longest}")
        start = self.take(size, what)
        try:
            return str(self._data[start : self.at], "utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8") from None

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """A metadata value: a number, a bool, a str, or a tuple of such."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self._array(what, depth)
        raise self.error(f"{what} has value type {kind}, known are 0 to 12")

    def _array(self, what: str, depth: int) -> tuple[Any, ...]:
        if depth == _MAX_DEPTH:
            raise self.error(f"{what} nests arrays more than {_MAX_DEPTH} deep")
        kind = self.number("<I", what)
        if kind not in _SMALLEST:
            raise self.error(f"{what} has elements of type {kind}, known are 0 to 12")
        count = self.count(_SMALLEST[kind], f"the number of elements of {what}")
        if kind == STRING:
            return self._strings(count, what)
        if kind == ARRAY:
            return tuple(self._array(what, depth + 1) for _ in range(count))
        start = self.take(count * _SMALLEST[kind], what)
        return struct.unpack_from(f"<{count}{_SCALARS[kind][1]}", self._data, start)

    def _strings(self, count: int, what: str) -> tuple[str, ...]:
        """Many strings (a vocabulary has half a million), hence one flat loop."""
        data, end, at, out = self._data, self._end, self.at, []
        unpack = _LENGTH.unpack_from
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(data, at)[0] if start <= end else end + 1
                if at > end:
                    raise self.error(f"string {len(out)} of {what} does not fit into the {end - self.at} bytes left")
                out.append(str(data[start:at], "utf-8"))
        except UnicodeDecodeError:
            raise self.error(f"string {len(out)} of {what} is not UTF-8") from None
        self.at = at
        return tuple(out)
