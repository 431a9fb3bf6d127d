"""Reads by the C library's threads: every byte, or an error that names file and expert; nothing is left under way."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import random
import signal
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from disks import begin_late, read_by_threads
from mlx_moe.paging import system_reads
from mlx_moe.paging.files import Files, Read
from mlx_moe.paging.queue import Cancelled, Job
from mlx_moe.paging.reader import ReadQueue
from mlx_moe.paging.system_reads import SystemJob
from waiting import soon

pytestmark = pytest.mark.skipif(not system_reads.available(), reason="needs glibc")

DATA = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "x").write_bytes(DATA.tobytes())
    return tmp_path / "x"


class Disk:
    """A file, and a queue that reads it."""

    def __init__(self, path: Path, threads: int = 4):
        self.files, self.path = Files(), path
        self.queue = ReadQueue(threads, "queue", self.files)
        self.files.read(path, 0, np.zeros(1, np.uint8), "first byte")  # so that it is open

    def read(self, offset: int, length: int) -> Read:
        return self.files.piece(self.path, offset, np.zeros(length, np.uint8), f"expert {offset}")

    def submit(self, *reads: Read) -> Job:
        job = self.queue.submit(reads)
        assert type(job) is SystemJob
        return job


@pytest.fixture
def disk(path):
    disk = Disk(path)
    yield disk
    disk.queue.stop()
    disk.files.close()


def whole(read: Read) -> bool:
    return np.array_equal(read.target, DATA[read.offset : read.offset + read.target.size])


def test_the_control_block_is_the_library_s():
    assert ctypes.sizeof(system_reads._Control) == 168 and system_reads._Control.offset.offset == 128


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_every_byte(path, threads):
    """Also of many more reads than threads, of one file at any offset."""
    disk, rng = Disk(path, threads), random.Random(threads)
    jobs = []
    for _ in range(200):
        reads = [disk.read(rng.randrange(2 << 20), rng.choice((1, 500, 1 << 16))) for _ in range(rng.randint(1, 5))]
        jobs.append((disk.submit(*reads), reads))
    for job, reads in jobs:
        job.wait()
        assert job.ended and all(map(whole, reads))
    assert len(disk.files._lanes) == threads - 1, "no more reads of a file run side by side"
    disk.files.close()


def test_only_demanded_reads_are_the_library_s(disk, monkeypatch):
    read = disk.read(5, 10)
    others = [disk.queue.submit([read], demanded=False), disk.queue.submit([read, int]), disk.queue.submit([])]
    read_by_threads(monkeypatch)
    others.append(disk.queue.submit([read]))
    for job in others:
        assert type(job) is Job
        job.wait()
    assert whole(read)


def test_a_file_that_ends_early(disk, path):
    """What came before is not read twice; the other reads of the job end too."""
    reads = [disk.read(0, 1000), disk.read(len(DATA) - 100, 120), disk.read(1 << 20, 1000)]
    job = disk.submit(*reads)
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            job.wait()
        want = f"{path}: expert {len(DATA) - 100} cannot be read (the file ends at byte {len(DATA)}, 20 bytes early)"
        assert str(caught.value) == want
    assert whole(reads[0]) and whole(reads[2]) and job.ended


def test_a_descriptor_that_cannot_be_read(disk, path):
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        read = Read(descriptor, 0, np.zeros(10, np.uint8), path, "expert 7 of layer 2")
        with pytest.raises(OSError, match=r"x: expert 7 of layer 2 cannot be read \(Is a directory\)"):
            disk.submit(read).wait()
    finally:
        os.close(descriptor)


def test_reads_that_cannot_begin_are_read_by_who_waits(disk, monkeypatch):
    monkeypatch.setattr(system_reads._library(), "begin", lambda controls: None)
    read = disk.read(100, 5000)
    job = disk.submit(read)
    assert job.ended and not read.target.any()
    job.wait()
    assert whole(read)


def test_jobs_that_start_together(disk):
    """Nothing is read before ``go``; what was stopped before is never read."""
    together, later = disk.queue.together(), disk.queue.together()
    reads = [disk.read(i * 5000, 5000) for i in range(20)]
    jobs = [disk.queue.submit([read], together=together) for read in reads[:10]]
    late = [disk.queue.submit([read], together=later) for read in reads[10:]]
    time.sleep(0.02)
    assert not any(read.target.any() for read in reads)
    disk.queue.go(together)
    for job in jobs:
        job.wait()
    disk.queue.stop()
    for job in late:
        with pytest.raises(Cancelled):
            job.wait()
    assert [whole(read) for read in reads] == [True] * 10 + [False] * 10 and not any(r.target.any() for r in reads[10:])


def test_without_more_descriptors(disk, monkeypatch):
    def none(descriptor):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", none)
    reads = [disk.read(i * 5000, 5000) for i in range(20)]
    disk.submit(*reads).wait()
    assert all(map(whole, reads)) and not disk.files._lanes


def test_stopping_waits_for_what_is_under_way(disk, monkeypatch):
    begin_late(monkeypatch, 0.05)
    reads = [disk.read(i * 5000, 5000) for i in range(20)]
    jobs = [disk.submit(read) for read in reads]
    assert not all(job.ended for job in jobs)
    disk.queue.stop()
    assert all(job.ended for job in jobs) and all(map(whole, reads))
    for job in jobs:
        job.wait()


def test_a_forgotten_queue_waits_for_what_is_under_way(path, monkeypatch):
    """Memory that nobody else holds stays until then, too."""
    begin_late(monkeypatch, 0.05)
    disk = Disk(path)
    read = disk.read(7, 5000)
    disk.submit(read)
    target, descriptor = read.target, read.descriptor
    gone = weakref.ref(read.target)
    del disk, read
    gc.collect()
    assert np.array_equal(target, DATA[7:5007])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    del target
    assert soon(lambda: gone() is None)


def test_what_was_read_is_forgotten(disk):
    """A job that its owner keeps holds no memory, nor does a queue whose jobs nobody waited for."""
    read = disk.read(7, 5000)
    gone, job = weakref.ref(read.target), disk.submit(read)
    job.wait()
    del read
    assert gone() is None
    for i in range(500):
        job = disk.submit(disk.read(i, 10))
        assert soon(lambda job=job: job.ended)
    assert len(disk.queue._begun) <= 1


@pytest.mark.parametrize("at", ["begin", "wait"])
def test_interrupts(disk, monkeypatch, at):
    """One while reads begin leaves what has begun to ``stop``; one that waits can wait again."""
    begin_late(monkeypatch, 0.1)
    library, reads = system_reads._library(), [disk.read(i * 5000, 5000) for i in range(8)]
    begin, suspend, calls = library.begin, library.suspend, []

    def some_begin(controls):
        begin(controls[:3])
        raise KeyboardInterrupt

    def interrupted(control):
        calls.append(control)
        if len(calls) == 4:
            raise KeyboardInterrupt
        suspend(control)

    monkeypatch.setattr(library, "begin", some_begin if at == "begin" else begin)
    monkeypatch.setattr(library, "suspend", interrupted if at == "wait" else suspend)
    with pytest.raises(KeyboardInterrupt):
        disk.submit(*reads).wait()
    if at == "begin":
        (job,) = disk.queue._begun
        disk.queue.stop()
        assert [whole(read) for read in reads] == [True] * 3 + [False] * 5
        with pytest.raises(Cancelled):
            job.wait()
    else:
        (job,) = disk.queue._begun
        job.wait()
        assert all(map(whole, reads))
    assert not disk.queue._begun or disk.queue._begun[0].ended


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_interrupts_at_any_moment(path, seed):
    """As by Ctrl-C: after ``stop`` nothing is under way, and whoever waited without one has every byte."""
    disk, rng = Disk(path, 1 + 3 * seed), random.Random(seed)

    def interrupt(*_):
        raise KeyboardInterrupt

    earlier, interrupted, done = signal.signal(signal.SIGALRM, interrupt), 0, 0
    try:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            reads = [disk.read(rng.randrange(2 << 20), rng.choice((10, 5000, 1 << 19))) for _ in range(12)]
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 4e-3))
                jobs = [disk.submit(*reads[i : i + 4]) for i in range(0, 12, 4)]
                for job in jobs:
                    job.wait()
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert all(map(whole, reads))
                done += 1
            except KeyboardInterrupt:
                interrupted += 1
                while True:
                    with contextlib.suppress(KeyboardInterrupt):
                        disk.queue.stop()
                        break
                before = [read.target.copy() for read in reads]
                assert all(job.ended for job in disk.queue._begun)
                time.sleep(0.002)
                assert all(np.array_equal(read.target, old) for read, old in zip(reads, before, strict=True))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
    assert interrupted > 20 and done > 20
    disk.files.close()
