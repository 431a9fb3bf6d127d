"""A row source that leaves the n-gram table in its file and reads the rows of the tokens at hand."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from custom_kernels.dequant_gemv import block_dequantize
from custom_kernels.ggml_blocks import format_by_name
from mlx_moe.config import ModelConfig
from mlx_moe.paging.index import RowIndex
from mlx_moe.paging.ngram import NgramHash
from mlx_moe.paging.reader import Files


class FileRows:
    """A row source (models.qwen4_exp.sources.RowSource) for models with one PLE layer."""

    def __init__(self, config: ModelConfig, table: RowIndex, dtype: mx.Dtype) -> None:
        """dtype: of the rows.

        Raises ValueError for a table that the configuration does not give.
        """
        self._hash, self._table, self._dtype = NgramHash.from_config(config, 0), table, dtype
        self._format, self._files = format_by_name(table.format), Files()
        if table.rows != self._hash.rows:
            raise ValueError(f"{table.file}: the n-gram table has {table.rows} rows; needed: {self._hash.rows}")

    @property
    def kernels(self) -> frozenset[tuple[str, str]]:
        """See RowSource."""
        return frozenset({("block_dequantize", self._format.name)})

    def prepare(self, index: int, history: mx.array, count: int) -> None:
        """Nothing is read ahead."""

    def rows(self, index: int, history: mx.array, count: int) -> mx.array:
        """See RowSource. Waits for the token ids; raises OSError when the file cannot be read."""
        ids = np.array(self._hash.row_ids(history, count))
        needed, places = np.unique(ids, return_inverse=True)
        blocks = mx.array(np.stack([self._read(int(row)) for row in needed]))
        rows = block_dequantize(blocks[mx.array(places.reshape(-1))], self._format, self._dtype)
        return rows.reshape(*ids.shape[:2], -1)

    def _read(self, row: int) -> np.ndarray:
        target = np.empty(self._table.row_bytes, dtype=np.uint8)
        self._files.read(self._table.file, self._table.offset + row * target.nbytes, target, f"n-gram row {row}")
        return target
