"""Every call that differs by system or device."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

DIRECT_ALIGNMENT = 1 if sys.platform == "darwin" else 4096
"""Of offsets, lengths and addresses of reads from a file that ``open_direct`` opened."""

CPU_CACHE_BYTES = 256 << 20
"""That MLX's CPU allocator may keep for further use: it does so beyond its memory limit, which GPUs' count into it."""
LOW_SHARE = 0.04
"""Of a Linux machine's memory: with less available it is about to swap."""
CONSTANT_BYTES = 64 << 20
"""Arrays of this many bytes in all are constants and results, for which a plan's share of the process has room."""


def open_direct(path: Path) -> int:
    """A descriptor whose reads go past the page cache. Raises OSError where the system cannot."""
    if sys.platform == "darwin":
        import fcntl

        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
        fcntl.fcntl(descriptor, fcntl.F_RDAHEAD, 0)
        return descriptor
    if not hasattr(os, "O_DIRECT"):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)


@dataclass(frozen=True)
class Device:
    """MLX's default device; ``working_set_bytes`` is what macOS recommends as its most, None elsewhere."""

    name: str
    architecture: str
    memory_bytes: int
    working_set_bytes: int | None


def device() -> Device:
    """The default device, and its memory or, of a CPU, the machine's."""
    info = mx.device_info()
    memory = info.get("memory_size") or info.get("total_memory") or _machine_bytes()
    working_set = info.get("max_recommended_working_set_size")
    name, architecture = (str(info.get(key, "unknown")) for key in ("device_name", "architecture"))
    return Device(name, architecture, memory, working_set)


def max_buffer_bytes() -> int:
    """The most that one array may take: what Metal allows, or all memory."""
    return mx.device_info().get("max_buffer_length") or device().memory_bytes


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def under_pressure() -> bool:
    """Whether the system is short of memory: macOS says so, or Linux has less than ``LOW_SHARE`` of it available."""
    if sys.platform == "darwin":
        level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        name = b"kern.memorystatus_vm_pressure_level"  # 1 normal, 2 warning, 4 critical
        failed = ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, 0)
        return not failed and level.value > 1
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {key: int(rest.split()[0]) for key, rest in (line.split(":") for line in lines)}
        return sizes["MemAvailable"] < LOW_SHARE * sizes["MemTotal"]
    except (OSError, ValueError, KeyError):
        return False


def system() -> str:
    """Operating system and processor architecture."""
    mac = platform.mac_ver()[0]
    name = f"macOS {mac}" if mac else f"{platform.system()} {platform.release()}"
    return f"{name}, {platform.machine()}"


def python_version() -> str:
    """Python's, as 3.11.9."""
    return platform.python_version()


def wait_us(waits: int = 48, repeats: int = 5) -> float:
    """The price of one wait on the device in microseconds.

    ``waits`` tiny ops in a chain, each evaluated before the next is queued, as when a layer waits for its expert ids;
    per wait, the median of ``repeats`` chains.
    """
    times = []
    for _ in range(repeats):
        x = mx.zeros((8,))
        mx.eval(x)
        start = time.perf_counter()
        for _ in range(waits):
            x = x + 1
            mx.eval(x)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / waits * 1e6


class MemoryLimits:
    """MLX's limits for one model's plan. Those of several models add up; the last to go brings the earlier ones back.

    On macOS what the plans take is wired too, as far as Metal recommends.
    """

    _lock = threading.RLock()  # a finalizer may run while another limit is set
    _held: ClassVar[dict[int, tuple[int, int, int]]] = {}  # (in all, cache, spare) in bytes, by id of what holds them
    _earlier: ClassVar[tuple[int, int, int | None] | None] = None

    def __init__(self, beside_bytes: int, cache_bytes: int, spare_bytes: int = 0, elastic: bool = False) -> None:
        """
        Args:
            beside_bytes: of MLX's memory, all but the arena.
            cache_bytes: that MLX may keep for further use.
            spare_bytes: of ``beside_bytes``, what sequences and passes will take and weights do not.
            elastic: the arena may shrink where the system is short of memory.
        """
        self._elastic = elastic
        self._beside_bytes, self._cache_bytes, self._spare_bytes = beside_bytes, cache_bytes, spare_bytes

    @classmethod
    def are_set(cls) -> bool:
        """Whether some model holds limits."""
        return bool(cls._held)

    @classmethod
    def held_bytes(cls) -> tuple[int, int]:
        """Of MLX's memory, what the models' plans take, and what of it weights do not."""
        with cls._lock:
            held = list(cls._held.values())
        return sum(memory for memory, _, _ in held), sum(spare for _, _, spare in held)

    def hold(self, arena_bytes: int) -> None:
        """From now on, with an arena of this size."""
        with self._lock:
            self._held[id(self)] = self._beside_bytes + arena_bytes, self._cache_bytes, self._spare_bytes
            self._apply()

    def release(self) -> None:
        """The model takes nothing any more."""
        with self._lock:
            if self._held.pop(id(self), None) is not None:
                self._apply()

    def pressed(self) -> bool:
        """Whether the arena should shrink now."""
        return self._elastic and under_pressure()

    @classmethod
    def _apply(cls) -> None:
        held = list(cls._held.values())
        if held:
            total = sum(memory for memory, _, _ in held)
            found = _set_limits(total, _cache_limit(max(cache for _, cache, _ in held)), _wired_limit(total))
            cls._earlier = cls._earlier or found
        elif cls._earlier is not None:
            _set_limits(*cls._earlier)
            cls._earlier = None


def taken_bytes() -> int:
    """Of MLX's memory, what a further model cannot have: plans of models that are loaded, and arrays of others.

    Whichever is more: what the plans take, or what MLX's arrays take now and those models will still need. Of arrays
    ``CONSTANT_BYTES`` are not counted, which are no model. Models that nobody refers to any more are let go first.
    """
    if MemoryLimits.are_set() or mx.get_active_memory() > CONSTANT_BYTES:
        gc.collect()
    held, spare = MemoryLimits.held_bytes()
    arrays = mx.get_active_memory() - CONSTANT_BYTES
    return max(held, arrays + spare if arrays > 0 else 0)


def _set_limits(memory_bytes: int, cache_bytes: int, wired_bytes: int | None) -> tuple[int, int, int | None]:
    """Returns what they were; wired_bytes None leaves that limit alone."""
    wired = None if wired_bytes is None else mx.set_wired_limit(wired_bytes)
    return mx.set_memory_limit(memory_bytes), mx.set_cache_limit(cache_bytes), wired


def _cache_limit(cache_bytes: int) -> int:
    on_gpu = mx.metal.is_available() or mx.cuda.is_available()
    return cache_bytes if on_gpu else min(cache_bytes, CPU_CACHE_BYTES)


def _wired_limit(memory_bytes: int) -> int | None:
    if not mx.metal.is_available():
        return None
    return min(memory_bytes, device().working_set_bytes or memory_bytes)


@contextlib.contextmanager
def wired_memory() -> Iterator[None]:
    """Keep the weights resident while generating (macOS); the earlier limit comes back afterwards.

    Where a model's plan holds limits, those stay.
    """
    if MemoryLimits.are_set():
        yield
        return
    earlier = maybe_set_recommended_wired_limit()
    try:
        yield
    finally:
        if earlier is not None:
            mx.synchronize()
            mx.set_wired_limit(earlier)


def peak_memory_gb() -> float:
    """Peak memory of MLX's arrays so far, in GB."""
    return mx.get_peak_memory() / 1e9
