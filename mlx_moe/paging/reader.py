"""Bytes of experts and rows from files into memory that others own. Knows no MLX.

A read either fills its target or raises an OSError that names the file and what was read. Python repeats reads that a
signal interrupts; reads that come short go on where they stopped.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlx_moe.paging.index import ExpertIndex

THREADS = 8


class Fill(NamedTuple):
    """One expert to read: which, and the uint8 [record_bytes] that it goes to."""

    layer: int
    expert: int
    target: np.ndarray


class Files:
    """Files opened when they are first read, and kept open until this is closed or forgotten."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close, self._open)

    def read(self, path: Path, offset: int, target: np.ndarray, what: str) -> None:
        """Fill ``target``, contiguous uint8, from byte ``offset`` of a file on; any thread may.

        Raises OSError, in one line that names the file and ``what``, when it cannot be read or ends before.
        """
        view = memoryview(target)
        done = 0
        try:
            descriptor = self._descriptor(path)
            while done < len(view):
                count = os.preadv(descriptor, [view[done:]], offset + done)
                if not count:
                    end = offset + done
                    raise OSError(f"the file ends at byte {end}, {len(view) - done} bytes early")
                done += count
        except OSError as error:
            raise OSError(f"{path}: {what} cannot be read ({error.strerror or error})") from None

    def close(self) -> None:
        """Close all; a later read opens again."""
        with self._lock:
            _close(self._open)

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            return self._open[path]


class ExpertReader:
    """Reads experts by layer and number, as an index says where they are."""

    def __init__(self, index: ExpertIndex, threads: int = THREADS) -> None:
        self._index, self._threads, self._files = index, threads, Files()

    def read(self, layer: int, expert: int, target: np.ndarray) -> None:
        """Put one expert's record into ``target``, uint8 [record_bytes]; raises OSError naming file and expert."""
        for part in self._index.reads(layer, expert):
            what = f"expert {expert} of layer {layer}"
            self._files.read(part.file, part.offset, target[part.at : part.at + part.length], what)

    def fill(self, fills: Iterable[Fill]) -> Iterator[int]:
        """Read many with several threads; yields the bytes of each when it is there.

        After an error, or when the caller stops early, running reads end, no further one starts, and the error is
        raised.
        """
        todo = iter(fills)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="experts") as pool:
            running: set[Future[int]] = set()
            try:
                while True:
                    while len(running) < 2 * self._threads and (fill := next(todo, None)):
                        running.add(pool.submit(self._filled, fill))
                    if not running:
                        return
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
            finally:
                for future in running:
                    future.cancel()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _filled(self, fill: Fill) -> int:
        self.read(*fill)
        return fill.target.nbytes


def _close(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
