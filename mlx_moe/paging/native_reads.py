"""Reads by the threads of a small C library (``reads.c``), which need no Python between two reads.

The library is built when the package is installed. Where that was not possible, ``library`` says so, and Python's
threads read (``queue.py``), whose queue and jobs have the same methods.

An interrupt may come between any two steps of Python here. So whatever runs is known to a queue before it runs, and
what the library makes or gives up is entered and forgotten by the library itself, in the same step.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import functools
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlx_moe.paging.files import Files, ends_early, named
from mlx_moe.paging.queue import Cancelled, Piece, Restarted, for_any

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("_reads.so")
VERSION = 1
"""Of the library; that of ``reads.c``."""
SLICE_MS = 50
"""The longest that the library waits before Python looks for a Ctrl-C."""

_ENDS_EARLY = -1
_P, _INT = ctypes.c_void_p, ctypes.c_int
_QUICK = {
    "version": (_INT, ()),
    "add": (_INT, (_P, _P, _P, _INT, _P, ctypes.c_int64, _INT, _INT, _P)),
    "wake": (None, (_P,)),
    "promote": (None, (_P, _P)),
    "cancel": (None, (_P, _P)),
    "ended": (_INT, (_P,)),
    "error": (_INT, (_P, _P)),
    "free": (None, (_P,)),
    "inside": (_INT, (_P,)),
}
"""Functions that keep Python's lock: their results and arguments."""
_SLOW = {
    "open": (_INT, (_INT, _INT, _P)),
    "wait": (_INT, (_P, _P, _INT)),
    "stop": (_INT, (_P, _INT)),
    "close": (None, (_P,)),
}
"""Functions that give it up meanwhile."""


class Library:
    """The library's functions, as attributes without their ``reads_``."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or AttributeError for one that cannot be used."""
        for load, functions in ((ctypes.PyDLL, _QUICK), (ctypes.CDLL, _SLOW)):
            loaded = load(str(path))
            for name, (result, arguments) in functions.items():
                function = getattr(loaded, f"reads_{name}")
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)
        if self.version() != VERSION:
            raise OSError(f"{path} is of version {self.version()}; needed: {VERSION}")


@functools.cache
def library() -> Library | None:
    """None, which is logged, where it was not built, or for another version of the package."""
    try:
        return Library(LIBRARY)
    except (OSError, AttributeError) as error:
        logger.info("Python's threads read, since the package was installed without its reader (%s)", error)
        return None


class _Threads:
    """One start of a queue: the library's threads, and the jobs that they may know; of no use after ``stop``."""

    def __init__(self, functions: Library, count: int) -> None:
        self.functions, self._count = functions, count
        self.pointer = _P()
        self.jobs: deque[NativeJob] = deque()  # hold the memory that is written
        self.stopping = False

    def start(self) -> None:
        """Raises OSError when there is no thread."""
        code = self.functions.open(self._count, for_any(self._count), ctypes.addressof(self.pointer))
        if code:
            raise OSError(code, f"no thread that reads can be started ({os.strerror(code)})")

    def stop(self) -> None:
        """Drop what has not started, end the threads; waits for what runs. After an interrupt call it again."""
        self.stopping = True
        if self.pointer and self.functions.inside(self.pointer):  # a finalizer may run in any thread that runs Python
            _left.append(self)
            self.functions.stop(self.pointer, 0)
            return
        while self.pointer and not self.functions.stop(self.pointer, SLICE_MS):
            pass
        if self.pointer:
            self.functions.close(ctypes.addressof(self.pointer))
        self.forget_ended()

    def forget_ended(self) -> None:
        """Jobs that nobody need know any more; the oldest, up to one that runs."""
        while self.jobs and self.jobs[0].ended:
            self.jobs.popleft()


_left: list[_Threads] = []
"""Whose memory nobody may give up any more."""


class OpenFiles(ctypes.Structure):
    """The library's ``files``: descriptors by number, opened when a read needs them."""

    _fields_ = (("_through", _P), ("_direct", _P), ("_unit", ctypes.c_int64))

    def __init__(self, files: Files, paths: Sequence[Path]) -> None:
        self.files, self.paths = files, paths
        self._arrays = [(_INT * len(paths))() for _ in range(2)]
        super().__init__(*map(ctypes.addressof, self._arrays), files.alignment)
        self.forget()

    def open(self, number: int, offset: int, target: np.ndarray) -> None:
        """For reads such as that of ``target`` from ``offset`` on. Raises OSError."""
        found = self.files.descriptors(self.paths[number], offset, target)
        for array, descriptor in zip(self._arrays, found, strict=True):
            array[number] = descriptor

    def forget(self) -> None:
        """They are closed now."""
        for array in self._arrays:
            array[:] = [-1] * len(array)


class Parts(NamedTuple):
    """What a job reads. Nothing of it may lead to a queue, which could never be forgotten then.

    Attributes:
        files: that the parts are in.
        table: int64 [n, 4]: number of the file, offset there, length, place in the target.
        target: contiguous uint8, which holds all places.
        most: bytes of one read.
        name: number of a file and a byte of it -> what is read there.
    """

    files: OpenFiles
    table: np.ndarray
    target: np.ndarray
    most: int
    name: Callable[[int, int], str]


class NativeJob:
    """Reads under way; as ``queue.Job``."""

    def __init__(self, threads: _Threads, parts: Parts, check: Piece | None) -> None:
        self._threads, self._functions, self._check = threads, threads.functions, check
        self._parts: Parts | None = parts  # holds the memory that is written
        self._error: Exception | None = None
        self.pointer = _P()

    @property
    def ended(self) -> bool:
        """Whether no read runs or will run any more; then it holds no memory."""
        if self.pointer:
            if not self._functions.ended(self.pointer):
                return False
            self._end()
        return True

    def wait(self) -> None:
        """See Job."""
        while not self.ended:
            self._functions.wait(self._threads.pointer, self.pointer, SLICE_MS)
        if self._error is not None:
            raise copy.copy(self._error)  # a traceback in the job's own would keep the caller's memory alive
        if self._check is not None:
            self._check()

    def begin(self, demanded: bool, wake: bool) -> None:
        """Queue its reads; it has ended at once where they cannot begin."""
        files, table, target, most, _ = self._parts
        if not len(table):
            self._parts = None
            return
        arguments = (
            self._threads.pointer,
            ctypes.addressof(files),
            _address(table),
            len(table),
            _address(target),
            most,
            demanded,
            wake,
            ctypes.addressof(self.pointer),
        )
        while code := self._functions.add(*arguments):
            if code > 0:
                self._fail(OSError(code, os.strerror(code)))
                return
            number, offset, length, at = table[-code - 1].tolist()
            try:
                files.open(number, offset, target[at : at + min(length, most)])
            except OSError as error:
                self._fail(self._named(number, offset, error))
                return

    def _named(self, number: int, at: int, error: OSError) -> OSError:
        return named(self._parts.files.paths[number], self._parts.name(number, at), error)

    def _fail(self, error: Exception) -> None:
        self._error, self._parts = error.with_traceback(None), None

    def _end(self) -> None:
        where = (ctypes.c_int64 * 3)()
        code = self._functions.error(self.pointer, ctypes.addressof(where))
        if code == errno.ECANCELED:
            self._error = Cancelled()
        elif code:
            number, at, left = where
            error = ends_early(at, left) if code == _ENDS_EARLY else OSError(code, os.strerror(code))
            self._error = self._named(number, at, error)
        self._functions.free(ctypes.addressof(self.pointer))
        self._parts = None


def _address(array: np.ndarray) -> int:
    """Of contiguous memory that may be written."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))


class Together:
    """Demanded jobs that start at once, with ``NativeQueue.go``; the library knows which."""


class NativeQueue(Restarted[_Threads]):
    """As ``queue.JobQueue``, for jobs that read parts of files."""

    def __init__(self, functions: Library, threads: int) -> None:
        super().__init__(partial(_Threads, functions, threads))
        self._functions = functions

    def submit(
        self, parts: Parts, demanded: bool = True, check: Piece | None = None, together: Together | None = None
    ) -> NativeJob:
        """See JobQueue."""
        threads = self._running()
        threads.forget_ended()
        job = NativeJob(threads, parts, check)
        threads.jobs.append(job)
        job.begin(demanded or together is not None, together is None)
        return job

    def together(self) -> Together:
        """For ``submit`` and ``go``."""
        return Together()

    def go(self, together: Together) -> None:
        """Start what was submitted with it."""
        if pointer := self._pointer():
            self._functions.wake(pointer)

    def promote(self, job: NativeJob) -> None:
        """A speculative job is demanded now."""
        if job.pointer and (pointer := self._pointer()):
            self._functions.promote(pointer, job.pointer)

    def cancel(self, job: NativeJob) -> None:
        """No further read of it starts; those that run end first."""
        if job.pointer and (pointer := self._pointer()):
            self._functions.cancel(pointer, job.pointer)

    def _pointer(self) -> ctypes.c_void_p | None:
        return self._now[0].pointer if self._now else None
