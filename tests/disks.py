"""Disks that are slow or fail, for reads by the library's threads and for those by Python's."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import time
from collections.abc import Callable

import pytest

from mlx_moe.paging import native_reads, reader

needs_library = pytest.mark.skipif(
    native_reads.library() is None, reason="the package was installed without its reader"
)
BY = (pytest.param("library", marks=needs_library), "python")
"""Who reads."""

_READ = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64)
_given: list[ctypes._CFuncPtr] = []  # to the library, which may be in one of them when it is taken back


def read_by(patch: pytest.MonkeyPatch, by: str) -> None:
    """Readers that are made from now on."""
    if by == "python":
        patch.setattr(reader, "library", lambda: None)


def read_with(patch: pytest.MonkeyPatch, preadv: Callable) -> None:
    """Whoever reads does it with this in place of os.preadv."""
    patch.setattr(os, "preadv", preadv)
    if native_reads.library() is None:
        return

    def read(descriptor: int, to: int, length: int, offset: int) -> int:
        try:
            return preadv(descriptor, [memoryview((ctypes.c_char * length).from_address(to)).cast("B")], offset)
        except OSError as error:
            return -error.errno
        except BaseException:  # as of pytest.fail
            return -errno.EIO

    _given.append(_READ(read))
    pointer = ctypes.c_void_p.in_dll(ctypes.PyDLL(str(native_reads.LIBRARY)), "reads_by")
    patch.setattr(pointer, "value", ctypes.cast(_given[-1], ctypes.c_void_p).value)


def slow(patch: pytest.MonkeyPatch, most_s: float, seed: int = 0) -> None:
    """Every read takes a random time more."""
    read_with(patch, delayed(most_s, seed))


def delayed(most_s: float, seed: int = 0) -> Callable:
    """preadv that takes a random time."""
    real, rng = os.preadv, random.Random(seed)

    def read(descriptor, views, at):
        time.sleep(rng.uniform(0, most_s))
        return real(descriptor, views, at)

    return read
