"""Disks that are slow or fail, for reads by Python's threads and for those by the C library's."""

from __future__ import annotations

import contextlib
import errno
import functools
import heapq
import itertools
import os
import queue
import random
import threading
import time
from collections.abc import Callable

import pytest

from mlx_moe.paging import system_reads

BY = (
    "threads",
    pytest.param("system", marks=pytest.mark.skipif(not system_reads.available(), reason="needs glibc")),
)
"""Who reads."""


def read_by_threads(patch: pytest.MonkeyPatch) -> None:
    """From now on."""
    patch.setattr(system_reads, "available", lambda: False)


def read_with(patch: pytest.MonkeyPatch, preadv: Callable) -> None:
    """Python's threads read, with this in place of os.preadv."""
    read_by_threads(patch)
    patch.setattr(os, "preadv", preadv)


def slow(patch: pytest.MonkeyPatch, most_s: float, seed: int = 0, by: str = "threads") -> None:
    """Every read takes a random time more."""
    if by == "threads":
        read_with(patch, delayed(most_s, seed))
    else:
        begin_late(patch, most_s, seed)


def delayed(most_s: float, seed: int = 0) -> Callable:
    """preadv that takes a random time."""
    real, rng = os.preadv, random.Random(seed)

    def read(descriptor, views, at):
        time.sleep(rng.uniform(0, most_s))
        return real(descriptor, views, at)

    return read


def begin_late(patch: pytest.MonkeyPatch, most_s: float, seed: int = 0) -> None:
    """Reads of the C library begin a random time after they should, so that their bytes come late."""
    library, rng = system_reads._library(), random.Random(seed)
    real, later = library.begin, _later()

    def begin_one(waiting: list) -> None:
        with contextlib.suppress(IndexError):  # it was begun already
            real([waiting.pop()])

    def begin(controls) -> None:
        for control in controls:
            waiting = [control]
            try:
                control.error = errno.EINPROGRESS
                later.put((time.monotonic() + rng.uniform(0, most_s), lambda waiting=waiting: begin_one(waiting)))
            except BaseException:  # an interrupt in here must not lose the read
                begin_one(waiting)
                raise

    patch.setattr(library, "begin", begin)
    patch.setattr(library, "suspend", lambda *_: time.sleep(0.0005))  # the library knows nothing of them yet


@functools.cache
def _later() -> queue.SimpleQueue:
    """Takes times and what to do then. One thread does it all: an interrupt while one starts would leave it locked."""
    given = queue.SimpleQueue()
    threading.Thread(target=_do_later, args=(given,), daemon=True).start()
    return given


def _do_later(given: queue.SimpleQueue) -> None:
    waiting, number = [], itertools.count()
    while True:
        with contextlib.suppress(queue.Empty):
            due, do = given.get(timeout=max(0.0, waiting[0][0] - time.monotonic()) if waiting else None)
            heapq.heappush(waiting, (due, next(number), do))
        while waiting and waiting[0][0] <= time.monotonic():
            heapq.heappop(waiting)[2]()
