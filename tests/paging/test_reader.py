"""Reading experts and rows: whole or an error that names file and expert, whatever the system does."""

from __future__ import annotations

import errno
import gc
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from disks import read_with
from mlx_moe.paging import reader as module
from mlx_moe.paging.index import ExpertIndex, LayerIndex, PartIndex
from mlx_moe.paging.reader import MOST_BYTES, PIECE_BYTES, Direct, ExpertReader, Files, Fill
from mlx_moe.platform import DIRECT_ALIGNMENT, open_direct
from paging.streamed import readers

EXPERTS, LENGTHS = 6, (48, 48, 20)


@pytest.fixture
def index(tmp_path) -> ExpertIndex:
    """Two layers; gate and up in one file, down in another; bytes are random."""
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / name).write_bytes(np.random.default_rng(seed).bytes(4000))
    layers = []
    for layer in range(2):
        parts = [
            PartIndex.strided("X", (2, 3), length, file, 100 + 1000 * layer + 300 * place, length, EXPERTS)
            for place, (length, file) in enumerate(zip(LENGTHS, (0, 0, 1), strict=True))
        ]
        layers.append(LayerIndex(*parts))
    return ExpertIndex((tmp_path / "a", tmp_path / "b"), tuple(layers))


def expected(index: ExpertIndex, layer: int, expert: int) -> np.ndarray:
    out = np.zeros(index.layers[layer].record_bytes, np.uint8)
    for part in index.reads(layer, expert):
        out[part.at : part.at + part.length] = np.frombuffer(part.file.read_bytes(), np.uint8)[part.offset :][
            : part.length
        ]
    return out


def fills(index: ExpertIndex) -> list[Fill]:
    return [
        Fill(layer, expert, np.zeros(entry.record_bytes, np.uint8))
        for layer, entry in enumerate(index.layers)
        for expert in range(entry.experts)
    ]


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_every_record(index, threads):
    jobs = fills(index)
    assert sum(ExpertReader(index, threads).fill(iter(jobs))) == sum(job.target.nbytes for job in jobs)
    for job in jobs:
        assert np.array_equal(job.target, expected(index, job.layer, job.expert)), job[:2]


def test_short_reads_go_on(index, monkeypatch):
    """One byte, then what is asked for less one, in any mixture."""
    real, sizes = os.preadv, iter([1, 1000, 3, 2] * 100)
    read_with(monkeypatch, lambda fd, views, at: real(fd, [views[0][: next(sizes)]], at))
    target = np.zeros(index.layers[1].record_bytes, np.uint8)
    ExpertReader(index).read(1, 4, target)
    assert np.array_equal(target, expected(index, 1, 4))


def message(caught: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_that_became_shorter(index, tmp_path):
    os.truncate(tmp_path / "b", 1700 + 5)
    reader = ExpertReader(index)
    with pytest.raises(OSError) as caught:
        reader.read(1, 0, np.zeros(index.layers[1].record_bytes, np.uint8))
    assert message(caught) == (
        f"{tmp_path / 'b'}: expert 0 of layer 1 cannot be read (the file ends at byte 1705, 15 bytes early)"
    )


@pytest.mark.parametrize("code", [errno.EIO, errno.ENXIO])
def test_a_disk_that_fails(index, tmp_path, monkeypatch, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    read_with(monkeypatch, fail)
    with pytest.raises(OSError) as caught:
        list(ExpertReader(index).fill(fills(index)))
    assert re.fullmatch(
        rf"{tmp_path}/[ab]: expert \d of layer \d cannot be read \({os.strerror(code)}\)", message(caught)
    )


def test_a_file_that_is_gone(index, tmp_path):
    (tmp_path / "a").unlink()
    with pytest.raises(OSError, match=r"a: expert 3 of layer 0 cannot be read \(No such file or directory\)") as caught:
        ExpertReader(index).read(0, 3, np.zeros(index.layers[0].record_bytes, np.uint8))
    message(caught)


def test_after_an_error_no_thread_goes_on(index, monkeypatch):
    jobs, real, done = fills(index) * 50, os.preadv, []

    def third_fails(fd, views, at):
        done.append(at)
        if len(done) > 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, views, at)

    read_with(monkeypatch, third_fails)
    with pytest.raises(OSError, match="Input/output error"):
        list(ExpertReader(index, threads=2).fill(jobs))
    assert len(done) < 20 and not readers()


def test_stopping_early_ends_the_threads(index):
    for _ in ExpertReader(index, threads=2).fill(fills(index) * 50):
        break
    assert not readers()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux lists a process's descriptors so")
def test_descriptors_are_shared_and_closed(index):
    gc.collect()  # tracebacks of other tests hold readers
    before = _descriptors()
    reader = ExpertReader(index)
    list(reader.fill(fills(index)))
    assert _descriptors() == before + 2
    reader.close()
    assert _descriptors() == before
    reader.read(0, 0, np.zeros(index.layers[0].record_bytes, np.uint8))
    del reader
    assert _descriptors() == before, "forgotten, it closes its files"


def read_checked(files: Files, path: Path, offset: int, target: np.ndarray, what: str) -> None:
    files.fill(path, offset, target, what)
    files.check([path], what)


def aligned(nbytes: int, unit: int) -> np.ndarray:
    memory = np.zeros(nbytes + unit, np.uint8)
    start = -memory.ctypes.data % unit
    return memory[start : start + nbytes]


class Opener:
    """Opens files and counts; may refuse."""

    def __init__(self, code: int | None = None):
        self.opened, self._code = [], code

    def __call__(self, path: Path) -> int:
        self.opened.append(path)
        if self._code is not None:
            raise OSError(self._code, os.strerror(self._code))
        return os.open(path, os.O_RDONLY)


def test_aligned_reads_are_direct_and_their_tails_are_not(tmp_path, caplog):
    (tmp_path / "x").write_bytes(bytes(range(256)) * 64)
    opener, target = Opener(), aligned(8192, 4096)
    files = Files(Direct(opener, 4096, logging.WARNING))
    for start, stop in ((0, 4096), (4096, 4196)):
        read_checked(files, tmp_path / "x", 4096 + start, target[start:stop], "expert 0")
    assert opener.opened == [tmp_path / "x"] and not caplog.text
    assert target[:4196].tobytes() == (bytes(range(256)) * 64)[4096:8292] and len(files._open) == 2


@pytest.mark.parametrize(("offset", "shift"), [(100, 0), (4096, 8)])
def test_what_is_not_aligned_goes_through_the_page_cache(tmp_path, caplog, offset, shift):
    """Said once per file."""
    (tmp_path / "x").write_bytes(bytes(range(256)) * 64)
    opener, target = Opener(), aligned(8192, 4096)[shift : shift + 4096]
    files = Files(Direct(opener, 4096, logging.WARNING))
    for _ in range(3):
        read_checked(files, tmp_path / "x", offset, target, "expert 0")
    assert not opener.opened and target.tobytes() == (bytes(range(256)) * 64)[offset : offset + 4096]
    assert caplog.text.count("x: read through the page cache, since its offsets or the memory for them are no") == 1


def test_file_systems_without_direct_reads(tmp_path, caplog):
    (tmp_path / "x").write_bytes(bytes(8192))
    files = Files(Direct(Opener(errno.EINVAL), 4096, logging.WARNING))
    for _ in range(2):
        read_checked(files, tmp_path / "x", 0, aligned(4096, 4096), "expert 0")
    assert caplog.text.count("through the page cache, since its file system says: Invalid argument") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_direct_reads_of_this_machine(tmp_path):
    """Where the file system has them, the bytes are right."""
    data = np.random.default_rng(0).bytes(3 << 20)
    (tmp_path / "x").write_bytes(data)
    target = aligned(1 << 20, 4096)
    read_checked(Files(Direct(open_direct, DIRECT_ALIGNMENT)), tmp_path / "x", 1 << 20, target, "expert 0")
    assert target.tobytes() == data[1 << 20 : 2 << 20]


def test_a_file_replaced_between_two_ways_to_open_it(tmp_path):
    """Both must read the same one."""
    path, other, target = tmp_path / "x", tmp_path / "y", np.zeros(4096, dtype=np.uint8)
    for file in (path, other):
        file.write_bytes(bytes(8192))
    files = Files(Direct(lambda path: os.open(path, os.O_RDONLY), 1, logging.INFO))
    files._direct, direct = None, files._direct
    read_checked(files, path, 0, target, "expert 0")
    os.replace(other, path)
    files._direct = direct
    with pytest.raises(OSError, match=r"expert 1 cannot be read \(the file is not what it was"):
        read_checked(files, path, 0, target, "expert 1")
    files.close()


@pytest.mark.parametrize("how", ["written", "replaced"])
def test_a_file_that_is_another(index, tmp_path, how):
    """Noted when it was loaded, and refused when it is not that file any more."""
    reader = ExpertReader(index)
    reader.files.note(index.files)
    data = (tmp_path / "a").read_bytes()
    if how == "replaced":
        (tmp_path / "a").unlink()
    (tmp_path / "a").write_bytes(data + b"x")
    with pytest.raises(OSError, match=r"a: expert 1 of layer 0 cannot be read \(the file is not what it was"):
        reader.read(0, 1, np.zeros(index.layers[0].record_bytes, np.uint8))


def test_files_that_are_not_there_are_named_at_once(index, tmp_path):
    (tmp_path / "b").unlink()
    with pytest.raises(OSError, match=r"b: cannot be read \(No such file"):
        ExpertReader(index).files.note(index.files)


@pytest.mark.parametrize(
    ("threads", "beside", "length", "want"),
    [
        (8, 1, PIECE_BYTES + 16, [16, PIECE_BYTES]),
        (2, 1, PIECE_BYTES + 16, [PIECE_BYTES + 16]),
        (8, 2, PIECE_BYTES + 16, [16, PIECE_BYTES]),
        (8, 8, PIECE_BYTES + 16, [PIECE_BYTES + 16]),
        (8, 8, 2 * MOST_BYTES + 16, [16, MOST_BYTES, MOST_BYTES]),
    ],
)
def test_large_records_are_read_in_pieces(tmp_path, monkeypatch, threads, beside, length, want):
    """Where threads would have nothing to do otherwise, or the read would be long; the pieces make the record."""
    (tmp_path / "x").write_bytes(np.random.default_rng(0).bytes(length + 4))
    part = PartIndex.strided("X", (2, 3), length, 0, 4, 16, 1)
    index = ExpertIndex((tmp_path / "x",), (LayerIndex(part, part, part),))
    sizes, real = [], os.preadv
    read_with(monkeypatch, lambda fd, views, at: sizes.append(len(views[0])) or real(fd, views, at))
    target = np.zeros(index.layers[0].record_bytes, np.uint8)
    reader = ExpertReader(index, threads)
    reader.start(Fill(0, 0, target), beside=beside).wait()
    reader.close()
    assert np.array_equal(target, expected(index, 0, 0)) and sorted(sizes) == sorted(3 * want)


def test_interrupted_reads_are_repeated(tmp_path):
    """Signals that arrive meanwhile lose nothing."""
    (tmp_path / "x").write_bytes(bytes(range(256)))
    files, target = Files(), np.zeros(256, np.uint8)
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for _ in range(2000):
            target[:] = 0
            read_checked(files, tmp_path / "x", 0, target, "row 1")
            assert target[255] == 255
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def test_the_reader_loads_no_mlx():
    code = f"import sys, {module.__name__}; assert 'mlx.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
