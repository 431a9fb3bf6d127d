"""Reading experts and rows: whole or an error that names file and expert, whatever the system does."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from mlx_moe.paging import reader as module
from mlx_moe.paging.index import ExpertIndex, LayerIndex, PartIndex
from mlx_moe.paging.reader import ExpertReader, Files, Fill

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
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][: next(sizes)]], at))
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

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError) as caught:
        list(ExpertReader(index).fill(fills(index)))
    assert re.fullmatch(
        rf"{tmp_path / 'a'}: expert \d of layer \d cannot be read \({os.strerror(code)}\)", message(caught)
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
            raise OSError(errno.EIO, "bad sector")
        return real(fd, views, at)

    monkeypatch.setattr(os, "preadv", third_fails)
    with pytest.raises(OSError, match="bad sector"):
        list(ExpertReader(index, threads=2).fill(jobs))
    assert len(done) < 20 and not [t for t in threading.enumerate() if t.name.startswith("experts")]


def test_stopping_early_ends_the_threads(index):
    for _ in ExpertReader(index, threads=2).fill(fills(index) * 50):
        break
    assert not [t for t in threading.enumerate() if t.name.startswith("experts")]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux lists a process's descriptors so")
def test_descriptors_are_shared_and_closed(index):
    before = _descriptors()
    reader = ExpertReader(index)
    list(reader.fill(fills(index)))
    assert _descriptors() == before + 2
    reader.close()
    assert _descriptors() == before
    reader.read(0, 0, np.zeros(index.layers[0].record_bytes, np.uint8))
    del reader
    assert _descriptors() == before, "forgotten, it closes its files"


def test_interrupted_reads_are_repeated(tmp_path):
    """Signals that arrive meanwhile lose nothing."""
    (tmp_path / "x").write_bytes(bytes(range(256)))
    files, target = Files(), np.zeros(256, np.uint8)
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for _ in range(2000):
            target[:] = 0
            files.read(tmp_path / "x", 0, target, "row 1")
            assert target[255] == 255
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def test_the_reader_loads_no_mlx():
    code = f"import sys, {module.__name__}; assert 'mlx.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
