"""Every call that differs by system or device."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

DIRECT_ALIGNMENT = 1 if sys.platform == "darwin" else 4096
"""Of offsets, lengths and addresses of reads from a file that ``open_direct`` opened."""


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


@contextlib.contextmanager
def wired_memory() -> Iterator[None]:
    """Keep the weights resident while generating (macOS); the earlier limit comes back afterwards."""
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
