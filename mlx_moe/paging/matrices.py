"""Where the kernels find an expert's matrices in its record, from what the index says of the layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx

from custom_kernels.dequant_gemv import Matrix, Scales
from custom_kernels.ggml_blocks import format_by_name
from mlx_moe.paging.index import LayerIndex, PartIndex

_SCALE_DTYPES = {"F32": mx.float32, "BF16": mx.bfloat16}


class Matrices(NamedTuple):
    """Where the matrices of a layer's experts are in their records."""

    gate: Matrix
    up: Matrix
    down: Matrix

    @classmethod
    def of(cls, layer: LayerIndex) -> Matrices:
        """Those of a layer. Raises ValueError for a part whose length is not that of its rows."""
        return cls(*map(_matrix, layer.parts, layer.places, layer.scale_places))

    def unpacked_bytes(self, dtype: mx.Dtype) -> int:
        """Bytes of one expert's numbers."""
        return sum(matrix.rows * matrix.columns for matrix in self) * dtype.size


def _matrix(part: PartIndex, at: int, scales_at: int | None) -> Matrix:
    rows, columns = part.shape
    format = format_by_name(part.format)
    scales = None
    if part.scales is not None and scales_at is not None:
        dtype = _SCALE_DTYPES.get(part.scales.format)
        if dtype is None or part.scales.length != math.prod(format.scale_shape(rows, columns)) * dtype.size:
            found = f"{part.scales.length} bytes of {part.scales.format} as scales"
            raise ValueError(f"{found} of {part.shape} weights of {part.format}; needed: F32 or BF16, one per tile")
        scales = Scales(scales_at, dtype)
    matrix = Matrix(format, rows, columns, at, scales)
    if part.length != rows * matrix.row_bytes:
        raise ValueError(f"{part.length} bytes for {part.shape} weights of {part.format}; needed: whole rows")
    return matrix
