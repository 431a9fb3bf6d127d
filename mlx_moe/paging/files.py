"""Reads from files that stay open: whole or an error that names the file and what was read. Knows no MLX.

Python repeats reads that a signal interrupts; reads that come short go on where they stopped. A file that was changed
or replaced since it was first seen is refused, since an index of the old one says nothing about the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

logger = logging.getLogger(__name__)

_CHANGED = "the file is not what it was when it was loaded; load it again"


class Direct(NamedTuple):
    """How reads go past the page cache.

    Attributes:
        open: a path -> a descriptor, or an OSError where the file system cannot.
        alignment: of offsets, lengths and addresses, in bytes; a power of two.
        level: of the log, when a file has to be read through the page cache after all.
    """

    open: Callable[[Path], int]
    alignment: int
    level: int = logging.INFO


class Read(NamedTuple):
    """One read, by whoever calls it; what can be done before it was.

    Attributes:
        target: contiguous uint8, to be filled from byte ``offset`` of the file on.
    """

    descriptor: int
    offset: int
    target: np.ndarray
    path: Path
    what: str

    def __call__(self) -> None:
        """Read all of it. Raises OSError as ``Files.fill``.

        Between the system's calls hardly anything is done, since it holds Python's lock.
        """
        try:
            done = os.preadv(self.descriptor, [self.target], self.offset)
            while done < self.target.nbytes:
                count = os.preadv(self.descriptor, [memoryview(self.target)[done:]], self.offset + done)
                if not count:
                    raise ends_early(self.offset + done, self.target.nbytes - done)
                done += count
        except OSError as error:
            raise named(self.path, self.what, error) from None


class Files:
    """Files opened when they are first read, and kept open until this is closed or forgotten; any thread may read."""

    def __init__(self, direct: Direct | None = None) -> None:
        """direct: None reads through the page cache."""
        self._direct = direct
        self._open: dict[tuple[Path, bool], int] = {}
        self._seen: dict[Path, tuple[int, int, int, int]] = {}  # stays when files are closed
        self._buffered: set[Path] = set()  # of which it was said that they are not read directly
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close, self._open)

    @property
    def alignment(self) -> int:
        """Of direct reads, in bytes."""
        return 1 if self._direct is None else self._direct.alignment

    def note(self, paths: Iterable[Path]) -> None:
        """Remember files as they are now. Raises OSError, in one line, for one that is not there."""
        for path in paths:
            try:
                self._seen.setdefault(path, _identity(os.stat(path)))
            except OSError as error:
                raise OSError(f"{path}: cannot be read ({error.strerror})") from None

    def fill(self, path: Path, offset: int, target: np.ndarray, what: str) -> None:
        """Fill ``target``, contiguous uint8, from byte ``offset`` of a file on; ``check`` must follow the last one.

        Raises OSError, in one line that names the file and ``what``, when it cannot be read or ends before.
        """
        try:
            read = self._read(path, offset, target, what)
        except OSError as error:
            raise named(path, what, error) from None
        read()

    def piece(self, path: Path, offset: int, target: np.ndarray, what: str) -> Callable[[], None]:
        """``fill``, for any thread to call before this is closed; what can be done before is done now."""
        try:
            return self._read(path, offset, target, what)
        except OSError:
            return partial(self.fill, path, offset, target, what)  # which says why, unless it is open by then

    def descriptors(self, path: Path, offset: int, target: np.ndarray) -> tuple[int, int]:
        """Open a file for reads such as that of ``target`` from ``offset`` on: through the page cache, and directly.

        -1 for a way that none of them takes. Raises OSError.
        """
        self._is_direct(path, offset, target)  # says why not
        direct = through = -1
        if self._direct is not None and path not in self._buffered:
            direct = self._descriptor(path, True)
            if path in self._buffered:
                direct = -1
        if direct < 0 or self._direct.alignment > 1:  # tails are not read directly
            through = self._descriptor(path, False)
        return through, direct

    def check(self, paths: Iterable[Path], what: str) -> None:
        """Raises OSError, in one line, for the first file that is not what it was when it was first seen."""
        for path in paths:
            try:
                descriptor = self._open.get((path, False))
                if descriptor is None:
                    descriptor = self._open.get((path, True))
                status = os.stat(path) if descriptor is None else os.fstat(descriptor)
                if _identity(status) != self._seen.get(path):
                    raise OSError(_CHANGED)
            except OSError as error:
                raise named(path, what, error) from None

    def close(self) -> None:
        """Close all; a later read opens again."""
        with self._lock:
            _close(self._open)

    def _read(self, path: Path, offset: int, target: np.ndarray, what: str) -> Read:
        direct = self._is_direct(path, offset, target)
        descriptor = self._open.get((path, direct))
        if descriptor is None:
            descriptor = self._descriptor(path, direct)
        return Read(descriptor, offset, target, path, what)

    def _is_direct(self, path: Path, offset: int, target: np.ndarray) -> bool:
        if self._direct is None or path in self._buffered:
            return False
        unit = self._direct.alignment
        if target.nbytes % unit:  # the tail of a record
            return False
        if unit > 1 and (offset % unit or target.ctypes.data % unit):
            self._say(path, f"its offsets or the memory for them are no multiples of {unit}")
            return False
        return True

    def _say(self, path: Path, why: str) -> None:
        with self._lock:
            new = path not in self._buffered
            self._buffered.add(path)
        if new:
            logger.log(self._direct.level, "%s: read through the page cache, since %s", path, why)

    def _descriptor(self, path: Path, direct: bool) -> int:
        """The open file; directly if asked and possible."""
        if direct:
            try:
                return self._opened(path, True, self._direct.open)
            except OSError as error:
                if error.errno is None:  # it is another file
                    raise
                self._say(path, f"its file system says: {error.strerror}")
        return self._opened(path, False, _open_buffered)

    def _opened(self, path: Path, direct: bool, open: Callable[[Path], int]) -> int:
        with self._lock:
            if (path, direct) not in self._open:
                descriptor = open(path)
                found = _identity(os.fstat(descriptor))
                if found != self._seen.setdefault(path, found):
                    os.close(descriptor)
                    raise OSError(_CHANGED)
                self._open[path, direct] = descriptor  # last, since threads look there without the lock
            return self._open[path, direct]


def ends_early(at: int, left: int) -> OSError:
    """Of a file that ends at a byte, with so many still to be read."""
    return OSError(f"the file ends at byte {at}, {left} bytes early")


def named(path: Path, what: str, error: OSError) -> OSError:
    """In one line, that of a read that failed."""
    return OSError(f"{path}: {what} cannot be read ({error.strerror or error})")


def _open_buffered(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    with contextlib.suppress(OSError):  # it is advice
        _read_what_is_asked(descriptor)
    return descriptor


def _read_what_is_asked(descriptor: int) -> None:
    """Records lie anywhere, so what a system reads ahead of a read by itself is mostly not needed."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    elif hasattr(fcntl, "F_RDAHEAD"):
        fcntl.fcntl(descriptor, fcntl.F_RDAHEAD, 0)


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _close(descriptors: dict[tuple[Path, bool], int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
