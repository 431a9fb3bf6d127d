"""Reads by threads of the C library (POSIX aio of glibc), which need no turn at Python between two reads.

A read is one control block, which says how far it is, and which the library uses until then. glibc runs reads of one
descriptor one after another, so those that are to run side by side need descriptors of their own. Linux with glibc
only: macOS takes 16 reads of a process and gives them four threads. Elsewhere Python's threads read (``queue.py``).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import sys
from collections.abc import Sequence

from mlx_moe.paging.files import Read
from mlx_moe.paging.queue import Cancelled, Job, Piece

_READ, _DO_NOT_WAIT, _NO_SIGNAL = 0, 1, 1  # LIO_READ, LIO_NOWAIT, SIGEV_NONE
_NOT_BEGUN = errno.ECANCELED


class _Control(ctypes.Structure):
    """glibc's ``struct aiocb`` of 64-bit systems (aio.h, bits/types/sigevent_t.h)."""

    _fields_ = (
        ("descriptor", ctypes.c_int),
        ("opcode", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("signal_value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("signal_rest", ctypes.c_char * 48),
        ("next", ctypes.c_void_p),
        ("absolute_priority", ctypes.c_int),
        ("policy", ctypes.c_int),
        ("error", ctypes.c_int),
        ("result", ctypes.c_ssize_t),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_char * 32),
    )


class _Library:
    """The C library's functions. Calls that return at once keep Python's lock, the one that waits gives it up."""

    def __init__(self) -> None:
        at_once = ctypes.PyDLL(None)
        self._list, self.error, self.result = at_once.lio_listio, at_once.aio_error, at_once.aio_return
        self._suspend = ctypes.CDLL(None).aio_suspend
        for function in (self.error, self.result):
            function.argtypes = (ctypes.POINTER(_Control),)
        self.result.restype = ctypes.c_ssize_t
        self._list.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        self._suspend.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)

    def begin(self, controls: Sequence[_Control]) -> None:
        """Start these reads; those that cannot start stay as they are."""
        self._list(_DO_NOT_WAIT, _addresses(controls), len(controls), None)

    def suspend(self, control: _Control) -> None:
        """Until this read has ended, or a signal has come."""
        self._suspend(_addresses([control]), 1, None)


def _addresses(controls: Sequence[_Control]) -> ctypes.Array:
    return (ctypes.c_void_p * len(controls))(*map(ctypes.addressof, controls))


@functools.cache
def _library() -> _Library | None:
    """None where there is none that is known here."""
    glibc = sys.platform == "linux" and sys.maxsize > 1 << 32 and platform.libc_ver()[0] == "glibc"
    try:
        return _Library() if glibc else None
    except (OSError, AttributeError):  # before 2.34 these are in a library of their own
        return None


def available() -> bool:
    """Whether ``SystemJob`` can be used here."""
    return _library() is not None


class SystemJob(Job):
    """Reads for ``begin``, which must be drained or waited for before the memory that they write goes.

    What came short, failed or was not begun is read once more by who waits, which ends it or says why.
    """

    def __init__(self, reads: Sequence[Read], descriptors: Sequence[int], check: Piece | None = None) -> None:
        """descriptors: to read from, in place of the reads' own."""
        super().__init__((), check)
        self._reads = [(read, _control(read, number)) for read, number in zip(reads, descriptors, strict=True)]
        self._begun = False

    @property
    def ended(self) -> bool:
        """Whether it was begun, and nothing is read any more."""
        error = _library().error
        return self._begun and all(error(control) != errno.EINPROGRESS for _, control in self._reads)

    def wait(self) -> None:
        """See Job; for one thread at a time."""
        self.drain()
        try:
            for read, control in self._reads:
                done = _bytes_read(control)
                if done < control.nbytes:
                    read(done)
        except OSError as failed:
            self._fail(failed)
        self._reads.clear()
        super().wait()

    def drain(self) -> None:
        """Until it has ended; if a signal's handler raises, another call goes on."""
        library = _library()
        for _, control in reversed(self._reads):  # when the last has ended, mostly all have: fewer wake-ups
            while library.error(control) == errno.EINPROGRESS:
                library.suspend(control)

    def stop(self) -> None:
        """Until it has ended; what was not begun will not be."""
        self.drain()
        if any(_library().error(control) == _NOT_BEGUN for _, control in self._reads):
            self._fail(Cancelled())
            self._reads.clear()
        self._begun = True


def begin(jobs: Sequence[SystemJob]) -> None:
    """Start their reads at once; whoever calls this holds the jobs until they have ended."""
    for job in jobs:
        job._begun = True
    _library().begin([control for job in jobs for _, control in job._reads])


def _control(read: Read, descriptor: int) -> _Control:
    return _Control(
        descriptor=descriptor,
        opcode=_READ,
        buffer=ctypes.addressof(ctypes.c_char.from_buffer(read.target)),
        nbytes=read.target.nbytes,
        notify=_NO_SIGNAL,
        error=_NOT_BEGUN,
        offset=read.offset,
    )


def _bytes_read(control: _Control) -> int:
    """Of a read that has ended."""
    library = _library()
    return 0 if library.error(control) else library.result(control)
