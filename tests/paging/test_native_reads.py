"""Reads by the library's threads: every byte, or an error that names file and expert; nothing is left under way."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from disks import needs_library, read_with
from mlx_moe.paging import native_reads
from mlx_moe.paging.files import Direct, Files
from mlx_moe.paging.native_reads import LIBRARY, Library, NativeJob, NativeQueue, OpenFiles, Parts
from mlx_moe.paging.queue import SPECULATIVE_THREADS, Cancelled
from paging.streamed import readers
from waiting import soon

pytestmark = needs_library

DATA = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)
SOURCE = LIBRARY.with_name("reads.c")


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "x").write_bytes(DATA.tobytes())
    return tmp_path / "x"


class Disk:
    """A file, and a queue that reads it."""

    def __init__(self, path: Path, threads: int = 4, direct: Direct | None = None):
        self.files, self.path = Files(direct), path
        self.open, self.queue = OpenFiles(self.files, [path]), NativeQueue(native_reads.library(), threads)

    def parts(self, *reads: tuple[int, int], most: int = 1 << 20) -> Parts:
        """Of (offset, length)s, one after the other in the target."""
        offsets, lengths = np.array(reads, dtype=np.int64).reshape(-1, 2).T
        places = np.cumsum(lengths) - lengths
        table = np.stack((np.zeros_like(offsets), offsets, lengths, places), axis=-1)
        return Parts(self.open, table.copy(), np.zeros(lengths.sum(), np.uint8), most, lambda _, at: f"byte {at}")

    def read(self, offset: int, length: int = 100, **options) -> tuple[NativeJob, Parts]:
        parts = self.parts((offset, length))
        return self.queue.submit(parts, **options), parts

    def close(self) -> None:
        self.queue.stop()
        self.files.close()


@pytest.fixture
def disk(path):
    disk = Disk(path)
    yield disk
    disk.close()


def whole(parts: Parts) -> bool:
    want = [DATA[offset : offset + length] for _, offset, length, _ in parts.table.tolist()]
    return np.array_equal(parts.target, np.concatenate(want))


class Gates:
    """Reads that have begun, by offset, and that wait until they may go on."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.begun, self.done, self._real, self.open = [], [], os.preadv, threading.Event()
        read_with(patch, self._read)

    def _read(self, descriptor, views, at):
        self.begun.append(at)
        assert self.open.wait(10)
        self.done.append(at)
        return self._real(descriptor, views, at)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_every_byte(path, threads):
    """Also of many more reads than threads, at any offset, in pieces of any size."""
    disk, rng, jobs = Disk(path, threads), random.Random(threads), []
    for _ in range(300):
        reads = [(rng.randrange(2 << 20), rng.choice((1, 500, 1 << 16))) for _ in range(rng.randint(1, 5))]
        parts = disk.parts(*reads, most=rng.choice((100, 4096, 1 << 20)))
        jobs.append((disk.queue.submit(parts, rng.random() < 0.7), parts))
    for job, parts in jobs:
        job.wait()
        assert job.ended and whole(parts)
    disk.close()
    assert not readers()


def test_jobs_without_parts_have_ended(disk):
    job = disk.queue.submit(disk.parts())
    assert job.ended
    job.wait()


def test_short_and_interrupted_reads_go_on(disk, monkeypatch):
    real, answers = os.preadv, iter([1, 1000, -errno.EINTR, 3, 2] * 1000)

    def some(descriptor, views, at):
        count = next(answers)
        if count < 0:
            raise OSError(-count, os.strerror(-count))
        return real(descriptor, [views[0][:count]], at)

    read_with(monkeypatch, some)
    jobs = [disk.read(i * 5000, 3000) for i in range(20)]
    for job, parts in jobs:
        job.wait()
        assert whole(parts)


def test_a_file_that_ends_early(disk, path):
    """Whoever waits is told, again and again; what else there is of the job is not read any more, or ends too."""
    job = disk.queue.submit(disk.parts((0, 1000), (len(DATA) - 100, 120), (1 << 20, 1000)))
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            job.wait()
        want = f"{path}: byte {len(DATA)} cannot be read (the file ends at byte {len(DATA)}, 20 bytes early)"
        assert str(caught.value) == want
    assert job.ended
    job, parts = disk.read(5)
    job.wait()
    assert whole(parts), "the threads go on"


@pytest.mark.parametrize("code", [errno.EIO, errno.ENXIO])
def test_a_disk_that_fails(disk, path, monkeypatch, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    read_with(monkeypatch, fail)
    job, _ = disk.read(7)
    with pytest.raises(OSError) as caught:
        job.wait()
    assert str(caught.value) == f"{path}: byte 7 cannot be read ({os.strerror(code)})"


def test_after_an_error_nothing_of_the_job_begins(path, monkeypatch):
    disk, gates = Disk(path, 1), Gates(monkeypatch)
    gates.open.set()
    job = disk.queue.submit(disk.parts((len(DATA), 10), *((i, 10) for i in range(20))))
    with pytest.raises(OSError, match="10 bytes early"):
        job.wait()
    assert gates.begun == [len(DATA)]
    disk.close()


def test_a_file_that_cannot_be_opened(disk, path):
    path.unlink()
    job, _ = disk.read(7)
    assert job.ended
    with pytest.raises(OSError, match=r"x: byte 7 cannot be read \(No such file or directory\)"):
        job.wait()


def test_the_check_comes_last(disk):
    def check():
        raise OSError("another file")

    job, _ = disk.read(7, check=check)
    assert soon(lambda: job.ended)
    with pytest.raises(OSError, match="another file"):
        job.wait()


def test_demanded_jobs_come_first(path, monkeypatch):
    """In their order; then speculative ones in theirs, unless one has become a demanded one."""
    disk, gates = Disk(path, 1), Gates(monkeypatch)
    jobs = [disk.read(0)[0]]
    assert soon(lambda: gates.begun)
    speculative = [disk.read(at, demanded=False)[0] for at in (100, 200, 300, 400)]
    jobs += [disk.read(at)[0] for at in (500, 600)]
    disk.queue.promote(speculative[2])
    disk.queue.cancel(speculative[1])
    assert speculative[1].ended and not speculative[2].ended
    with pytest.raises(Cancelled):
        speculative[1].wait()
    gates.open.set()
    for job in (*jobs, speculative[0], *speculative[2:]):
        job.wait()
    assert gates.begun == [0, 500, 600, 300, 100, 400]
    for job in jobs:  # which have ended
        disk.queue.promote(job)
        disk.queue.cancel(job)
        job.wait()
    disk.close()


@pytest.mark.parametrize(("count", "speculative"), [(1, 1), (4, 3), (8, 6), (20, SPECULATIVE_THREADS)])
def test_threads_for_demanded_jobs_alone(path, monkeypatch, count, speculative):
    """All others may be busy with speculative ones; every thread takes demanded ones."""
    disk, gates = Disk(path, count), Gates(monkeypatch)
    jobs = [disk.read(i, demanded=False)[0] for i in range(2 * count)]
    assert soon(lambda: len(gates.begun) == speculative)
    jobs += [disk.read(1000 + i)[0] for i in range(count)]
    assert soon(lambda: len(gates.begun) == count)
    time.sleep(0.02)
    assert len(gates.begun) == count and sum(at < 1000 for at in gates.begun) == speculative
    gates.open.set()
    for job in jobs:
        job.wait()
    disk.close()


@pytest.mark.parametrize("count", [1, 3, 40])
def test_jobs_that_start_together(disk, count):
    """All are read; those that were never started are dropped when the queue stops, or read before."""
    together, later = disk.queue.together(), disk.queue.together()
    jobs = [disk.read(i * 100, together=together) for i in range(count)]
    disk.queue.go(together)
    for job, parts in jobs:
        job.wait()
        assert whole(parts)
    late = [disk.read(i * 100, together=later) for i in range(count)]
    disk.queue.stop()
    disk.queue.go(later)
    for job, parts in late:
        assert job.ended
        try:
            job.wait()
        except Cancelled:
            continue
        assert whole(parts)


def test_stopping_drops_what_waits_and_waits_for_what_runs(path, monkeypatch):
    disk, gates = Disk(path, 2), Gates(monkeypatch)
    jobs = [disk.read(i * 100) for i in range(6)]
    assert soon(lambda: len(gates.begun) == 2)
    threading.Timer(0.1, gates.open.set).start()
    disk.queue.stop()
    assert all(job.ended for job, _ in jobs) and sorted(gates.done) == [0, 100] and not readers()
    for job, parts in jobs[:2]:
        job.wait()
        assert whole(parts)
    for job, parts in jobs[2:]:
        with pytest.raises(Cancelled):
            job.wait()
        assert not parts.target.any()
    disk.queue.stop()
    job, parts = disk.read(5)
    job.wait()
    assert whole(parts), "a later job starts threads again"
    disk.close()


def test_an_interrupted_stop_goes_on_with_the_next_job(path, monkeypatch):
    """No read begins while those of before are under way."""
    disk, gates, stop = Disk(path, 2), Gates(monkeypatch), native_reads.library().stop
    disk.read(100)
    assert soon(lambda: gates.begun)

    def interrupted(*arguments):
        stop(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(native_reads.library(), "stop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            disk.queue.stop()
    threading.Timer(0.1, gates.open.set).start()
    disk.read(200)[0].wait()
    assert gates.begun == [100, 200] and gates.done == [100, 200]
    disk.close()


def test_a_forgotten_queue_waits_for_what_is_under_way(path, monkeypatch):
    """Memory that nobody else holds stays until then, too."""
    gates, disk = Gates(monkeypatch), Disk(path)
    target = disk.read(7)[1].target
    assert soon(lambda: gates.begun)
    threading.Timer(0.1, gates.open.set).start()
    del disk
    gc.collect()
    assert np.array_equal(target, DATA[7:107]) and not readers()


def test_a_queue_that_one_of_its_threads_forgets(path, monkeypatch):
    """The thread cannot wait for itself; it only ends. What it writes to stays."""
    real, box, ended = os.preadv, [], threading.Event()

    def read(descriptor, views, at):
        disk = box.pop()
        assert soon(lambda: len(readers()) == 4)
        del disk  # the last that knows it
        count = real(descriptor, views, at)
        ended.set()
        return count

    read_with(monkeypatch, read)
    disk = Disk(path)
    parts = disk.parts((7, 100))
    box.append(disk)
    disk.queue.submit(parts)
    del disk
    assert ended.wait(10) and soon(lambda: not readers()) and whole(parts)
    native_reads._left.clear()


def test_what_was_read_is_forgotten(disk):
    """A job that its owner keeps holds no memory, nor does a queue whose jobs nobody waited for."""
    job, parts = disk.read(7)
    gone = weakref.ref(parts.target)
    job.wait()
    del parts
    assert gone() is None
    for i in range(500):
        job, _ = disk.read(i)
        assert soon(lambda job=job: job.ended)
    assert len(disk.queue._now[0].jobs) <= 1


def test_errors_hold_nothing_of_what_failed(disk):
    job, parts = disk.read(len(DATA))
    gone = weakref.ref(parts.target)
    with pytest.raises(OSError, match="ends at byte"):
        job.wait()
    del parts
    assert gone() is None


@pytest.mark.parametrize(("offset", "shift", "direct"), [(8192, 0, True), (100, 0, False), (8192, 16, False)])
def test_direct_reads_and_their_tails(path, caplog, monkeypatch, offset, shift, direct):
    """What is no multiple of the alignment is read through the page cache: tails quietly, the rest is said once."""
    opened, seen, real = [], [], os.preadv

    def opener(path: Path) -> int:
        opened.append(os.open(path, os.O_RDONLY))
        return opened[-1]

    read_with(monkeypatch, lambda fd, views, at: seen.append((at - offset, fd in opened)) or real(fd, views, at))
    memory = np.zeros(3 * 4096, np.uint8)
    start = -memory.ctypes.data % 4096 + shift
    disk = Disk(path, direct=Direct(opener, 4096, logging.WARNING))
    parts = disk.parts((offset, 4196))._replace(target=memory[start : start + 4196], most=4096)
    for _ in range(2):
        for _ in range(2):
            memory[:] = 0
            disk.queue.submit(parts).wait()
            assert whole(parts)
        disk.close()
        disk.open.forget()  # and open again
    assert sorted(seen) == [(0, direct)] * 4 + [(4096, False)] * 4 and len(opened) == 2 * direct
    assert caplog.text.count("no multiples of 4096") == (not direct)


def test_an_interrupt_while_waiting(disk, monkeypatch):
    """It comes out soon, and whoever waits again gets every byte."""
    gates = Gates(monkeypatch)
    job, parts = disk.read(7)

    def interrupt(*_):
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGALRM, interrupt)
    try:
        start = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(KeyboardInterrupt):
            job.wait()
        assert time.monotonic() - start < 5
    finally:
        signal.signal(signal.SIGALRM, earlier)
    gates.open.set()
    job.wait()
    assert whole(parts)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
def test_interrupts_at_any_moment(path, seed):
    """As by Ctrl-C: after ``stop`` nothing is under way, and whoever waited without one has every byte."""
    disk, rng = Disk(path, 1 + 3 * seed), random.Random(seed)

    def interrupt(*_):
        raise KeyboardInterrupt

    earlier, interrupted, done = signal.signal(signal.SIGALRM, interrupt), 0, 0
    try:
        end = time.monotonic() + (10 if seed else 3)
        while time.monotonic() < end:
            every = [
                disk.parts(*((rng.randrange(2 << 20), rng.choice((10, 5000, 1 << 19))) for _ in range(4)))
                for _ in range(3)
            ]
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 4e-3))
                jobs = [disk.queue.submit(parts, rng.random() < 0.7) for parts in every]
                for job in jobs:
                    job.wait()
                if rng.random() < 0.2:
                    disk.queue.stop()
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert all(map(whole, every))
                done += 1
            except KeyboardInterrupt:
                interrupted += 1
                if rng.random() < 0.5:
                    continue  # the next ones are as good, and nobody looks at the memory of these
                while True:
                    with contextlib.suppress(KeyboardInterrupt):
                        disk.queue.stop()
                        break
                before = [parts.target.copy() for parts in every]
                assert not readers()
                time.sleep(0.002)
                assert all(np.array_equal(parts.target, old) for parts, old in zip(every, before, strict=True))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
    disk.close()
    assert interrupted > 20 and done > 20 and not readers()


# The library


def test_no_library_is_said_and_python_reads(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(native_reads, "LIBRARY", tmp_path / "none.so")
    assert native_reads.library.__wrapped__() is None
    assert "Python's threads read, since the package was installed without its reader" in caplog.text


@pytest.mark.full
def test_a_library_of_another_version_is_not_used(tmp_path):
    """As after an update of a checkout that was not installed again."""
    text = SOURCE.read_text()
    assert f"#define VERSION {native_reads.VERSION}\n" in text
    (tmp_path / "reads.c").write_text(text.replace(f"#define VERSION {native_reads.VERSION}", "#define VERSION 999"))
    out = tmp_path / "other.so"
    zig(["-shared", "-fPIC", "-o", str(out), str(tmp_path / "reads.c")])
    with pytest.raises(OSError, match=rf"other.so is of version 999; needed: {native_reads.VERSION}"):
        Library(out)
    with pytest.raises(OSError):
        Library(tmp_path / "none.so")


@pytest.mark.full
@pytest.mark.parametrize("target", ["aarch64-macos.14.0", "aarch64-linux-gnu.2.17"])
def test_the_source_compiles_elsewhere(tmp_path, target):
    """It is run on this machine only."""
    flags = ["-target", target, "-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC"]
    zig([*flags, "-o", str(tmp_path / "out.so"), str(SOURCE)])
    assert (tmp_path / "out.so").read_bytes()[:4] in (b"\xcf\xfa\xed\xfe", b"\x7fELF")


def zig(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "ziglang", "cc", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers_find_nothing(tmp_path, sanitizer):
    """Random jobs, promotions, cancels and stops, from C, where the system's compiler has sanitizers."""
    program = tmp_path / "stress"
    source = Path(__file__).with_name("stress_reads.c")
    command = ["cc", "-g", "-O1", f"-fsanitize={sanitizer}", "-o", str(program), str(source), "-lpthread"]
    try:
        built = subprocess.run([*command, f'-DSOURCE="{SOURCE}"'], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no C compiler")
    if built.returncode:
        pytest.skip(f"the compiler has no {sanitizer} sanitizer")
    (tmp_path / "x").write_bytes(DATA.tobytes())
    done = subprocess.run([str(program), str(tmp_path / "x"), "20"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 1000
