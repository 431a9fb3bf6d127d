"""A row source that leaves the n-gram table in its file: it reads the rows of the tokens at hand, and keeps some.

Rows are read by the threads that read experts, from ``prepare`` on, so that they are there when their layer comes.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from custom_kernels.dequant_gemv import block_dequantize
from custom_kernels.ggml_blocks import format_by_name
from mlx_moe.config import ModelConfig
from mlx_moe.models.layers import WINDOW
from mlx_moe.paging.index import JoinedRows, RowIndex
from mlx_moe.paging.native_reads import Parts
from mlx_moe.paging.ngram import NgramHash
from mlx_moe.paging.queue import Job
from mlx_moe.paging.reader import ExpertReader

CACHE_BYTES = 8 << 20
"""Rows that are kept, without their index."""


class RowCache:
    """The rows used last, in NumPy; a fixed number of them."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self._data = np.empty((rows, row_bytes), dtype=np.uint8)
        self._places: OrderedDict[int, int] = OrderedDict()  # oldest first

    def take(self, ids: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Put the rows ``ids`` [n] that are here into ``out`` [n, row_bytes]; returns the places [m] of the others."""
        absent = []
        for at, row in enumerate(ids.tolist()):
            place = self._places.get(row)
            if place is None:
                absent.append(at)
            else:
                self._places.move_to_end(row)
                out[at] = self._data[place]
        return np.array(absent, dtype=np.intp)

    def put(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Keep ``rows`` [n, row_bytes], which are not here, as the newest; of more than there is room for the last."""
        kept = ids.tolist()[-len(self._data) :] if len(self._data) else []
        for row, data in zip(kept, rows[len(rows) - len(kept) :], strict=True):
            full = len(self._places) == len(self._data)
            place = self._places.popitem(last=False)[1] if full else len(self._places)
            self._places[row] = place
            self._data[place] = data


class _Reads(NamedTuple):
    """Rows under way for one pass."""

    history: mx.array  # whose rows they are
    ids: np.ndarray  # [B, T, heads]
    needed: np.ndarray  # [n], each id once
    places: np.ndarray  # of every id among those
    rows: np.ndarray  # [n, row_bytes]; the job's until it has ended
    absent: np.ndarray  # [m], places of those that are read
    job: Job


class FileRows:
    """A row source (models.qwen4_exp.sources.RowSource) for models with one PLE layer."""

    def __init__(
        self,
        config: ModelConfig,
        table: RowIndex | JoinedRows,
        dtype: mx.Dtype,
        reader: ExpertReader,
        early: bool = False,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """
        Args:
            dtype: of the rows.
            reader: whose files and threads are used.
            early: reads for windows start in ``prepare`` too, which then waits for the token ids. That costs nothing
                where every layer waits for the device; elsewhere the device would run dry.
            cache_bytes: of rows that are kept.

        Raises ValueError for a table that the configuration does not give, OSError when a file of it is not there.
        """
        self._hash, self._table, self._dtype = NgramHash.from_config(config, 0), table, dtype
        self._format, self._reader, self._early = format_by_name(table.format), reader, early
        self._cache = RowCache(cache_bytes // table.row_bytes, table.row_bytes)
        self._reads: _Reads | None = None
        if table.rows != self._hash.rows:
            raise ValueError(f"{table.file}: the n-gram table has {table.rows} rows; needed: {self._hash.rows}")
        reader.files.note(table.files)
        self._files = reader.file_set(table.files)

    @property
    def kernels(self) -> frozenset[tuple[str, str]]:
        """See RowSource."""
        return frozenset({("block_dequantize", self._format.name)})

    def prepare(self, index: int, history: mx.array, count: int) -> None:
        """See RowSource."""
        if self._early or count > WINDOW:
            self._reads = self._start(history, count)

    def rows(self, index: int, history: mx.array, count: int) -> mx.array:
        """See RowSource. Waits for the token ids; raises OSError when the file cannot be read."""
        reads, self._reads = self._reads, None
        if reads is None or reads.history is not history:
            reads = self._start(history, count)
        with self._reader.waits.on_disk():
            reads.job.wait()
        self._cache.put(reads.needed[reads.absent], reads.rows[reads.absent])
        blocks = mx.array(reads.rows)
        blocks = blocks[mx.array(reads.places)]
        rows = block_dequantize(blocks, self._format, self._dtype, self._scales(len(blocks)))
        return rows.reshape(*reads.ids.shape[:2], -1)

    def abort(self) -> None:
        """See RowSource."""
        reads, self._reads = self._reads, None
        if reads is not None:
            self._reader.queue.cancel(reads.job)

    def close(self) -> None:
        """See RowSource."""
        self.abort()
        self._reader.close()

    def _scales(self, rows: int) -> mx.array | None:
        """Of so many rows of a format whose scales lie apart: the table's one number, for each tile."""
        if self._table.scale is None:
            return None
        return mx.full(self._format.scale_shape(rows, self._table.width), self._table.scale, dtype=mx.float32)

    def _start(self, history: mx.array, count: int) -> _Reads:
        ids = self._reader.waits.values(self._hash.row_ids(history, count))
        needed, places = np.unique(ids, return_inverse=True)
        rows = np.empty((needed.size, self._table.row_bytes), dtype=np.uint8)
        absent = self._cache.take(needed, rows)
        parts = np.empty((absent.size, 4), dtype=np.int64)
        parts[:, 0], parts[:, 1] = self._table.places(needed[absent])
        parts[:, 2], parts[:, 3] = self._table.row_bytes, absent * self._table.row_bytes
        files, table = self._reader.files, self._table
        check = partial(files.check, table.files, "the n-gram table") if absent.size else None
        target = rows.reshape(-1)
        job = self._reader.submit(
            Parts(self._files, parts, target, table.row_bytes, partial(_name, table)), check=check
        )
        return _Reads(history, ids, needed, places.reshape(-1), rows, absent, job)


def _name(table: RowIndex | JoinedRows, number: int, at: int) -> str:
    return f"n-gram row {table.row(number, at)}"
