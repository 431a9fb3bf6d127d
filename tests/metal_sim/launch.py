"""Launch rules, and one run of a compiled kernel in a child process.

The child is forked: a kernel that hits a guard page, divides by zero or never ends takes down the child alone, which
leaves a report in shared memory.
"""

from __future__ import annotations

import ctypes
import enum
import math
import os
import signal
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .buffers import GuardedBuffer, Place
from .errors import MetalError
from .source import Trace

Size = tuple[int, int, int]

MAX_THREADS = 256  # of a threadgroup: older chips reject kernels with many registers above it, some silently
MAX_THREADGROUPS = 1 << 25
_METAL_MAX_THREADS = 1024


class Schedule(enum.IntEnum):
    """In which order lanes, SIMD-groups and threadgroups run between two meeting points."""

    FORWARD = 0
    BACKWARD = 1
    SHUFFLED = 2

    @property
    def poison(self) -> int:
        """The byte that unwritten memory holds: another one in each schedule."""
        return (0xFF, 0x5A, 0xA5)[self]

    @property
    def place(self) -> Place:
        """Which end of a buffer is watched by a guard page."""
        return Place.START if self is Schedule.BACKWARD else Place.END


@dataclass
class Buffer:
    """A buffer of the launch: `guarded` is read-only memory for inputs and shape infos."""

    name: str
    guarded: GuardedBuffer
    is_output: bool = False


class _Launch(ctypes.Structure):
    _fields_ = [
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("schedule", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("poison", ctypes.c_uint32),
        ("limit_s", ctypes.c_uint32),
        ("report", ctypes.c_void_p),
    ]


class _Report(ctypes.Structure):
    _fields_ = [
        ("finished", ctypes.c_uint32),
        ("line", ctypes.c_uint32),
        ("fault_address", ctypes.c_uint64),
        ("has_fault", ctypes.c_uint32),
        ("has_thread", ctypes.c_uint32),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("what", ctypes.c_char * 160),
    ]


def check_launch(grid: Sequence[int], threadgroup: Sequence[int], *, strict: bool) -> None:
    """Refuse launches that Metal rejects and, if `strict`, those that this project does not make."""
    if len(grid) != 3 or len(threadgroup) != 3 or min(*grid, *threadgroup) < 1:
        raise MetalError(f"grid {tuple(grid)} and threadgroup {tuple(threadgroup)} need three sizes of at least 1")
    threads = math.prod(threadgroup)
    limit = MAX_THREADS if strict else _METAL_MAX_THREADS
    if threads > limit:
        raise MetalError(f"threadgroup {tuple(threadgroup)} has {threads} threads; at most {limit} are allowed")
    if not strict:
        return
    for axis, g, t in zip("xyz", grid, threadgroup, strict=True):
        if g < t:
            raise MetalError(
                f"grid.{axis} = {g} is smaller than threadgroup.{axis} = {t}: MLX would cut the threadgroup"
            )
        if g % t:
            raise MetalError(
                f"grid.{axis} = {g} is no multiple of threadgroup.{axis} = {t}: the last threadgroup is cut"
            )
    groups = math.prod(g // t for g, t in zip(grid, threadgroup, strict=True))
    if groups >= MAX_THREADGROUPS:
        raise MetalError(f"{groups} threadgroups; a launch has fewer than {MAX_THREADGROUPS}")


@lru_cache(maxsize=256)
def _load(library: Path) -> ctypes.CDLL:
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)  # the kernel's own library names none
    return ctypes.CDLL(str(library))


def run(
    library: Path,
    buffers: Sequence[Buffer],
    *,
    grid: Sequence[int],
    threadgroup: Sequence[int],
    schedule: Schedule,
    limit_s: int,
    trace: Trace,
) -> None:
    """Run a compiled kernel on `buffers`; outputs are written in place."""
    loaded = _load(library)
    shared = GuardedBuffer(ctypes.sizeof(_Report), data=bytes(ctypes.sizeof(_Report)))
    launch = _Launch(
        buffers=(ctypes.c_void_p * len(buffers))(*(b.guarded.address for b in buffers)),
        grid=(ctypes.c_uint32 * 3)(*grid),
        # MLX cuts the threadgroup to the grid before it dispatches
        threadgroup=(ctypes.c_uint32 * 3)(*(min(t, g) for t, g in zip(threadgroup, grid, strict=True))),
        schedule=schedule,
        seed=1,
        poison=schedule.poison,
        limit_s=limit_s,
        report=shared.address,
    )
    status = _in_child(loaded, launch)
    report = _Report.from_buffer_copy(shared.read())
    if not report.finished or status:
        raise MetalError(_explain(report, status, buffers, trace))
    for buffer in buffers:
        if (at := buffer.guarded.overrun()) is not None:
            raise MetalError(f"out-of-bounds write at byte {at} of {_describe(buffer)}")


def _in_child(loaded: ctypes.CDLL, launch: _Launch) -> int:
    """Call msl_run in a forked process and return its wait status."""
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads. The child calls one C function that takes no lock, and exits.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            loaded.msl_run(ctypes.byref(launch))
            os._exit(0)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1]


def _explain(report: _Report, status: int, buffers: Sequence[Buffer], trace: Trace) -> str:
    what = report.what.decode(errors="replace")
    if not what:
        how = signal.Signals(status & 127).name if status & 127 else f"status {status >> 8}"
        return f"the kernel's process ended with {how}"
    if report.has_fault:
        what = _explain_fault(report.fault_address, buffers)
    where = f"kernel.metal:{report.line}: " if report.line else ""
    thread = f" (threadgroup {tuple(report.threadgroup)}, thread {tuple(report.thread)})" if report.has_thread else ""
    return f"{where}{what}{thread}{trace.line(report.line)}"


def _explain_fault(address: int, buffers: Sequence[Buffer]) -> str:
    for buffer in buffers:
        offset = buffer.guarded.offset(address)
        if offset is not None:
            inside = 0 <= offset < buffer.guarded.nbytes
            return f"{'write to' if inside else 'out-of-bounds access at'} byte {offset} of {_describe(buffer)}"
    return f"out-of-bounds access at {address:#x}, in no buffer: a wild pointer, or the stack overflows"


def _describe(buffer: Buffer) -> str:
    kind = "output" if buffer.is_output else "input"
    return f"{kind} {buffer.name!r} ({buffer.guarded.nbytes} bytes)"
