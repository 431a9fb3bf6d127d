"""Where the kernels find an expert's matrices in its record, from what the index says of the layer."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from custom_kernels.dequant_gemv import Matrix
from custom_kernels.ggml_blocks import format_by_name
from mlx_moe.paging.index import LayerIndex, PartIndex


class Matrices(NamedTuple):
    """Where the matrices of a layer's experts are in their records."""

    gate: Matrix
    up: Matrix
    down: Matrix

    @classmethod
    def of(cls, layer: LayerIndex) -> Matrices:
        """Those of a layer. Raises ValueError for a part whose length is not that of its rows."""
        return cls(*(_matrix(part, at) for part, at in zip(layer.parts, layer.places, strict=True)))

    def unpacked_bytes(self, dtype: mx.Dtype) -> int:
        """Bytes of one expert's numbers."""
        return sum(matrix.rows * matrix.columns for matrix in self) * dtype.size


def _matrix(part: PartIndex, at: int) -> Matrix:
    rows, columns = part.shape
    matrix = Matrix(format_by_name(part.format), rows, columns, at)
    if part.length != rows * matrix.row_bytes:
        raise ValueError(f"{part.length} bytes for {part.shape} weights of {part.format}; needed: whole rows")
    return matrix
