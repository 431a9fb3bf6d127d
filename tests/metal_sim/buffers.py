"""Buffers that notice every access outside them.

A buffer lies between two inaccessible pages. It touches the second one (`Place.END`), so a read or write past its
end faults at once, or the first (`Place.START`), for accesses before it. The bytes between the buffer and the other
page hold the same poison as unwritten outputs and are checked after the run.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
from functools import lru_cache

_PAGE = mmap.PAGESIZE
_PROT_NONE, _PROT_READ, _PROT_READ_WRITE = 0, 1, 3
_MAP_SHARED_ANONYMOUS = 0x21  # shared, because the kernel runs in a child process


@lru_cache
def _libc() -> ctypes.CDLL:
    """Loaded at the first buffer, so that this module can be imported anywhere."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class Place(enum.Enum):
    """Which guard page a buffer touches."""

    END = "end"
    START = "start"


class GuardedBuffer:
    """`nbytes` of memory at a multiple of `alignment`, shared with child processes."""

    def __init__(
        self,
        nbytes: int,
        *,
        data: bytes | None = None,
        readonly: bool = False,
        alignment: int = 16,
        place: Place = Place.END,
        poison: int = 0xFF,
    ) -> None:
        self.nbytes = nbytes
        self._poison = poison
        self._body = -(-max(nbytes, 1) // _PAGE) * _PAGE
        mapped = _libc().mmap(None, self._body + 2 * _PAGE, _PROT_READ_WRITE, _MAP_SHARED_ANONYMOUS, -1, 0)
        if mapped in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"mmap of {self._body} bytes failed")
        self._mapped = mapped
        self._start = mapped + _PAGE
        offset = 0 if place is Place.START else (self._body - nbytes) // alignment * alignment
        self.address = self._start + offset
        ctypes.memset(self._start, poison, self._body)
        if data is not None:
            ctypes.memmove(self.address, data, nbytes)
        self._protect(mapped, _PAGE, _PROT_NONE)
        self._protect(self._start + self._body, _PAGE, _PROT_NONE)
        if readonly:
            self._protect(self._start, self._body, _PROT_READ)

    def read(self) -> bytes:
        """The buffer's bytes."""
        return ctypes.string_at(self.address, self.nbytes)

    def overrun(self) -> int | None:
        """Where a byte outside the buffer was written, relative to the buffer's start; None where none was."""
        body = ctypes.string_at(self._start, self._body)
        first = self.address - self._start
        expected = bytes([self._poison])
        before = body[:first].lstrip(expected)
        if before:
            return -len(before)
        after = body[first + self.nbytes :]
        return self.nbytes + len(after) - len(after.lstrip(expected)) if after.strip(expected) else None

    def offset(self, address: int) -> int | None:
        """`address` relative to the buffer's start, where it lies in the buffer's pages or its guards."""
        inside = self._mapped <= address < self._mapped + self._body + 2 * _PAGE
        return address - self.address if inside else None

    def _protect(self, address: int, nbytes: int, protection: int) -> None:
        if _libc().mprotect(address, nbytes, protection):
            raise OSError(ctypes.get_errno(), "mprotect failed")

    def __del__(self) -> None:
        if hasattr(self, "_mapped"):
            _libc().munmap(self._mapped, self._body + 2 * _PAGE)
