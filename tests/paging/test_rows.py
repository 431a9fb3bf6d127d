"""Rows of the n-gram table: read from ``prepare`` on, kept, bounded, and always the file's."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from checkpoints import EOS, tiny_config
from disks import read_with
from mlx_moe.config import ModelConfig
from mlx_moe.paging.index import ExpertIndex, JoinedRows, RowIndex
from mlx_moe.paging.ngram import NgramHash
from mlx_moe.paging.reader import ExpertReader
from mlx_moe.paging.rows import FileRows, RowCache

CONFIG = ModelConfig.from_dict(tiny_config())
HASH = NgramHash.from_config(CONFIG, 0)
WIDTH = CONFIG.ple_embed_dim // CONFIG.ngram_heads


@pytest.fixture
def table(tmp_path) -> np.ndarray:
    """[rows, width] float32, in the file x from byte 12 on."""
    table = np.random.default_rng(0).standard_normal((HASH.rows, WIDTH)).astype(np.float32)
    (tmp_path / "x").write_bytes(b"x" * 12 + table.tobytes())
    return table


@pytest.fixture
def make(tmp_path, table):
    made = []

    def get(**options) -> FileRows:
        index = RowIndex(tmp_path / "x", 12, HASH.rows, WIDTH, 4 * WIDTH, "F32")
        made.append(FileRows(CONFIG, index, mx.float32, ExpertReader(ExpertIndex((), ())), **options))
        return made[-1]

    yield get
    for source in made:
        source.close()


@pytest.fixture
def reads(monkeypatch) -> list[int]:
    """Offsets of all reads."""
    seen, real = [], os.preadv
    read_with(monkeypatch, lambda fd, views, at: seen.append(at) or real(fd, views, at))
    return seen


def history(*ids: int) -> mx.array:
    return mx.array([[EOS] * (CONFIG.ngram_size - 1) + list(ids)])


def right(table: np.ndarray, got: mx.array, ids: mx.array, count: int) -> bool:
    want = table[np.array(HASH.row_ids(ids, count))].reshape(1, count, -1)
    return np.array_equal(np.array(got), want)


@pytest.mark.parametrize(("count", "early"), [(3, True), (3, False), (30, False)])
def test_rows_are_those_of_the_file(make, table, reads, count, early):
    """Read before they are asked for, where that is allowed; each once."""
    source, ids = make(early=early), history(*range(count))
    source.prepare(0, ids, count)
    started = source._reads is not None
    assert started == (early or count > 8)
    assert right(table, source.rows(0, ids, count), ids, count)
    assert len(reads) == len(set(reads)) == np.unique(np.array(HASH.row_ids(ids, count))).size


def test_rows_that_were_used_are_not_read_again(make, table, reads):
    source = make()
    for _ in range(2):
        assert right(table, source.rows(0, history(5, 6, 7), 3), history(5, 6, 7), 3)
    first = len(reads)
    source.rows(0, history(5, 6, 7, 8), 4)
    assert len(reads) - first <= CONFIG.ngram_heads


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_few_rows_are_kept(make, table, reads, rows):
    source = make(cache_bytes=rows * 4 * WIDTH)
    for ids in (history(5, 6, 7), history(9), history(5, 6, 7)):
        assert right(table, source.rows(0, ids, ids.shape[1] - 2), ids, ids.shape[1] - 2)
    assert len(source._cache._places) == rows


def test_the_oldest_row_goes_first():
    cache, out = RowCache(2, 1), np.zeros((3, 1), np.uint8)
    cache.put(np.array([1, 2]), np.array([[1], [2]], np.uint8))
    assert cache.take(np.array([1]), out).size == 0
    cache.put(np.array([3]), np.array([[3]], np.uint8))
    assert cache.take(np.array([1, 2, 3]), out).tolist() == [1] and out.tolist() == [[1], [0], [3]]
    cache.put(np.array([7, 8, 9]), np.array([[7], [8], [9]], np.uint8))
    assert cache.take(np.array([7, 8, 9]), out).tolist() == [0]


def test_rows_of_another_history_than_announced(make, table):
    source = make(early=True)
    source.prepare(0, history(1, 2), 2)
    assert right(table, source.rows(0, history(3, 4), 2), history(3, 4), 2)


def test_a_fault_is_named_and_nothing_wrong_is_kept(make, table, monkeypatch, tmp_path: Path):
    source, ids = make(early=True), history(1, 2)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        read_with(patch, fail)
        source.prepare(0, ids, 2)
        with pytest.raises(OSError, match=r"x: n-gram row \d+ cannot be read \(Input/output error\)"):
            source.rows(0, ids, 2)
        source.prepare(0, ids, 2)
        source.abort()
    assert right(table, source.rows(0, ids, 2), ids, 2)


def test_rows_of_shards_in_fp8(tmp_path):
    """Codes times the table's one scale, rounded once; a width that no kernel's tile divides."""
    codes = np.random.default_rng(0).integers(0, 126, (HASH.rows, WIDTH)).astype(np.uint8)  # 127 is NaN
    parts, start = [], 0
    for i, rows in enumerate((1, HASH.rows // 2, HASH.rows - HASH.rows // 2 - 1)):
        (tmp_path / str(i)).write_bytes(b"x" * i + codes[start : start + rows].tobytes())
        parts.append(RowIndex(tmp_path / str(i), i, rows, WIDTH, WIDTH, "F8_E4M3", 0.3))
        start += rows
    source, ids = (
        FileRows(CONFIG, JoinedRows(tuple(parts)), mx.float32, ExpertReader(ExpertIndex((), ()))),
        history(5, 6),
    )
    want = np.array(mx.from_fp8(mx.array(codes), dtype=mx.float32)) * np.float32(0.3)
    assert right(want, source.rows(0, ids, 2), ids, 2)
    source.close()
