"""The entry of the quantisers: checks what comes in and cuts it into tiles, so that temporary memory stays small.

Knows no codes: ``scalar.py`` and ``lattice.py`` choose them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from custom_kernels.ggml_blocks.formats import BlockFormat
from custom_kernels.ggml_blocks.quantize.fit import HALF_MAX
from custom_kernels.ggml_blocks.quantize.lattice import LATTICES, encode
from custom_kernels.ggml_blocks.quantize.scalar import encode_iq4_nl, encode_q2_0, encode_q8_0

_SCALAR = {"Q8_0": (encode_q8_0, 127.0), "Q2_0": (encode_q2_0, 2.0), "IQ4_NL": (encode_iq4_nl, 127.0)}
_LATTICE = {name: (partial(encode, lattice=lattice), lattice.reach) for name, lattice in LATTICES.items()}
_ENCODERS: dict[str, tuple[Callable[[mx.array, mx.array], mx.array], float]] = {**_SCALAR, **_LATTICE}
"""By format: the encoder, and the largest magnitude that the format has, in units of d."""

QUANTIZABLE: tuple[str, ...] = tuple(_ENCODERS)
"""Names of the formats that ``quantize`` writes."""

_TILE = 1 << 18
"""Weights at a time: some 30 MB of temporary memory, and work enough for each kernel of a GPU."""
_LEAST_IMPORTANCE = 1e-6
"""Of the row's largest: what matters less still gets a sensible weight."""


def quantize(weights: mx.array, format: BlockFormat, importance: mx.array | None = None) -> mx.array:
    """Rows of weights as packed blocks, which ``naive_dequantize`` reads.

    The error that is made small is sum(importance * (weight - decoded)^2). Weights beyond the format's range (fp16
    scales end at 65504) saturate; those too small for it become zero, or the format's least magnitude where it has no
    zero. The same rows on the same device give the same bytes, alone or among others. Temporary memory is below 64 MB,
    and as much again as the result; weights that are not contiguous are copied as a whole.

    Args:
        weights: [..., n] float32, float16 or bfloat16; n a multiple of ``format.block_weights``.
        format: one of ``QUANTIZABLE``.
        importance: any float array that broadcasts to the weights, [n] say, of finite numbers >= 0; only ratios within
            a row matter. None: all equal. Q8_0 takes no notice of it.

    Returns:
        [..., format.row_bytes(n)] uint8, a new array, evaluated.

    Raises:
        ValueError: the format is not one of these, or a dtype, a shape or a value is not as said above.
    """
    _check(weights, format, importance)
    shape = (*weights.shape[:-1], format.row_bytes(weights.shape[-1]))
    if weights.size == 0:
        return mx.zeros(shape, dtype=mx.uint8)
    rows = weights.reshape(-1, weights.shape[-1])
    importances = _Importances.of(importance, weights.shape)
    height, width = _tile_shape(rows.shape[1], format)
    bands = []
    for top in range(0, rows.shape[0], height):
        tiles = [(slice(top, top + height), slice(left, left + width)) for left in range(0, rows.shape[1], width)]
        band = [_quantize_tile(rows[at], *importances.tile(*at), format) for at in tiles]
        bands.append(mx.concatenate(band, axis=1))
    packed = mx.concatenate(bands).reshape(shape)
    mx.eval(packed)
    return packed


def _check(weights: mx.array, format: BlockFormat, importance: mx.array | None) -> None:
    if format.name not in _ENCODERS:
        raise ValueError(f"{format.name} cannot be written (supported: {', '.join(QUANTIZABLE)})")
    if weights.ndim == 0 or not mx.issubdtype(weights.dtype, mx.floating):
        raise ValueError(f"{format.name}: weights must be [..., n] of floats, not {weights.shape} {weights.dtype}")
    format.row_bytes(weights.shape[-1])
    if importance is None:
        return
    if not mx.issubdtype(importance.dtype, mx.floating):
        raise ValueError(f"{format.name}: importances must be floats, not {importance.dtype}")
    try:
        fits = mx.broadcast_shapes(importance.shape, weights.shape) == weights.shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{format.name}: importances {importance.shape} do not broadcast to weights {weights.shape}")


def _tile_shape(n: int, format: BlockFormat) -> tuple[int, int]:
    """How many rows and columns of rows of n to do at a time: whole blocks, about ``_TILE`` weights."""
    width = min(n, _TILE - _TILE % format.block_weights)
    return max(1, _TILE // width), width


def _quantize_tile(x: mx.array, importance: mx.array, peak: mx.array, format: BlockFormat) -> mx.array:
    """x [r, c], importance [r or 1, c or 1], both as given, peak its rows' largest -> [r, bytes] uint8, evaluated."""
    encode_blocks, reach = _ENCODERS[format.name]
    x, importance = x.astype(mx.float32), importance.astype(mx.float32)
    _check_values(x, importance, format)
    blocks = mx.clip(x, -HALF_MAX * reach, HALF_MAX * reach).reshape(-1, format.block_weights)
    h = mx.maximum(mx.where(peak > 0, importance / peak, 1), _LEAST_IMPORTANCE)
    packed = encode_blocks(blocks, mx.broadcast_to(h, x.shape).reshape(blocks.shape)).reshape(x.shape[0], -1)
    mx.eval(packed)
    return packed


def _check_values(x: mx.array, importance: mx.array, format: BlockFormat) -> None:
    """Before anything is encoded, since a NaN has no cell in a table."""
    if not mx.isfinite(x).all().item():
        raise ValueError(f"{format.name}: weights hold NaN or infinity")
    if not (mx.isfinite(importance) & (importance >= 0)).all().item():
        raise ValueError(f"{format.name}: importances hold NaN, infinity or a negative number")


@dataclass(frozen=True)
class _Importances:
    """Importances as rows, and which of them each row of weights has, so that they are never spread out as a whole.

    Attributes:
        rows: [I, n or 1], as given.
        peaks: [I, 1] float32, the largest of each row.
        of_row: [R] uint32, by row of weights.
    """

    rows: mx.array
    peaks: mx.array
    of_row: mx.array

    @classmethod
    def of(cls, importance: mx.array | None, shape: tuple[int, ...]) -> _Importances:
        """Of weights of this shape; None counts as all equal."""
        rows = mx.ones((1,)) if importance is None else mx.atleast_1d(importance)
        number = mx.arange(math.prod(rows.shape[:-1]), dtype=mx.uint32).reshape(rows.shape[:-1])
        rows = rows.reshape(-1, rows.shape[-1])
        peaks = rows.max(axis=-1, keepdims=True).astype(mx.float32)
        return cls(rows, peaks, mx.broadcast_to(number, shape[:-1]).reshape(-1))

    def tile(self, down: slice, across: slice) -> tuple[mx.array, mx.array]:
        """The importances of a tile, [r or 1, c or 1], and the peaks of their rows, [r or 1, 1]."""
        rows = self.rows if self.rows.shape[1] == 1 else self.rows[:, across]
        if len(self.rows) == 1:
            return rows, self.peaks
        return rows[self.of_row[down]], self.peaks[self.of_row[down]]
