"""Products with packed matrices in mx ops: dense rows, and the two halves of an expert's MLP out of the arena.

A matrix W is stored row by row in a format of ``ggml_blocks``; its ``naive_dequantize`` says what the bytes mean. Sums
are float32. A row of activations is multiplied by itself, in products whose sizes do not depend on how many rows there
are, so its result has the same bits in every window. Large matrices are unpacked a tile at a time, since unpacking
takes several times a tile's float32 numbers in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from custom_kernels.ggml_blocks import SCALE_DTYPES, BlockFormat, naive_dequantize
from custom_kernels.slots import NO_SLOT, PAGE_BYTES

MAX_CHUNKS = 4
ALIGNMENT = 16
"""Of records in memory, in bytes: kernels read words, not bytes."""
TILE_WEIGHTS = 1 << 20
"""Unpacked at once, unless one row or one expert's matrix is more."""


@dataclass(frozen=True)
class Scales:
    """Where the scales of a matrix in F8_E4M3 are in the record: row by row, [ceil(rows / 128), ceil(columns / 128)].

    Attributes:
        offset: bytes after the record's start.
        dtype: bfloat16 or float32.
    """

    offset: int
    dtype: mx.Dtype = mx.bfloat16


@dataclass(frozen=True)
class Matrix:
    """A packed matrix [rows, columns] inside an expert's record, ``offset`` bytes after the record's start.

    ``scales`` are those of F8_E4M3; every other format has None.
    """

    format: BlockFormat
    rows: int
    columns: int
    offset: int = 0
    scales: Scales | None = None

    def __post_init__(self) -> None:
        if (self.scales is not None) != (self.format.tile > 0):
            raise ValueError(f"a matrix in {self.format.name} with scales {self.scales}; only F8_E4M3 has them apart")
        if self.scales and self.scales.dtype not in SCALE_DTYPES:
            raise ValueError(f"scales in {self.scales.dtype}; allowed: bfloat16 and float32")

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return self.format.row_bytes(self.columns)


@dataclass(frozen=True, eq=False)
class Arena:
    """Where records are: one to four chunks, and the first record byte in each.

    A slot word is chunk << 28 | page: the record starts at byte bases[chunk] + page * PAGE_BYTES of that chunk.
    """

    chunks: tuple[mx.array, ...]  # uint8 [bytes] or, since an axis ends at 2^31, [bytes / 16, 16]; a page or more
    bases: tuple[int, ...] = (0, 0, 0, 0)  # bytes, multiples of ALIGNMENT

    def __post_init__(self) -> None:
        if not 1 <= len(self.chunks) <= MAX_CHUNKS:
            raise ValueError(f"an arena has {len(self.chunks)} chunks; allowed: 1 to {MAX_CHUNKS}")
        if not len(self.chunks) <= len(self.bases) <= MAX_CHUNKS:
            raise ValueError(f"{len(self.bases)} bases for {len(self.chunks)} chunks; at most {MAX_CHUNKS}")
        for i, (chunk, base) in enumerate(zip(self.chunks, self.bases, strict=False)):
            flat = chunk.ndim == 1 or (chunk.ndim == 2 and chunk.shape[1] == ALIGNMENT)
            if chunk.dtype != mx.uint8 or not flat or chunk.size < base + PAGE_BYTES or base < 0:
                raise ValueError(f"chunk {i} is {chunk.dtype} {chunk.shape}; needed: flat uint8, a page after {base}")
            if base % ALIGNMENT:
                raise ValueError(f"chunk {i} has its base at byte {base}; allowed: multiples of {ALIGNMENT}")

    @cached_property
    def base_array(self) -> mx.array:
        """``bases`` for kernels: [8] uint32, of which the first four count."""
        return mx.array([*self.bases, *[0] * (8 - len(self.bases))], dtype=mx.uint32)


def naive_block_dequantize(
    blocks: mx.array, format: BlockFormat, dtype: mx.Dtype = mx.bfloat16, scales: mx.array | None = None
) -> mx.array:
    """Packed rows [..., row_bytes] uint8 -> weights [..., n], rounded once from float32 to ``dtype``.

    scales: as for ``naive_dequantize``.
    """
    if blocks.ndim != 2:
        return naive_dequantize(blocks, format, scales).astype(dtype)
    return _joined([weights.astype(dtype) for weights in _unpacked(blocks, format, scales)])


def naive_block_gemv(
    x: mx.array,
    w: mx.array,
    format: BlockFormat,
    dtype: mx.Dtype | None = None,
    scales: mx.array | None = None,
) -> mx.array:
    """y = x W^T.

    Args:
        x: [T, K], any float type.
        w: [N, row_bytes] uint8, rows of K weights.
        format: what the bytes are.
        dtype: of the result; x's by default.
        scales: of F8_E4M3, [ceil(N / 128), ceil(K / 128)] bfloat16 or float32.

    Returns:
        [T, N].
    """
    rows = [row[:, None] for row in x.astype(mx.float32)]
    tiles = [mx.stack([(weights @ row)[:, 0] for row in rows]) for weights in _unpacked(w, format, scales)]
    return _joined(tiles, axis=1).astype(dtype or x.dtype)


def naive_expert_gate_up(x: mx.array, words: mx.array, arena: Arena, gate: Matrix, up: Matrix) -> mx.array:
    """h = silu(gate x) * (up x) for every token and each of its experts.

    Args:
        x: [T, K], any float type.
        words: [T, k] uint32 slot words; NO_SLOT gives zeros.
        arena: where the records are.
        gate, up: both [I, K].

    Returns:
        [T, k, I] float32.
    """
    tokens = []
    for row, row_words in zip(x.astype(mx.float32), words, strict=True):
        parts = []
        for at in _tiles(row_words.size, gate.rows * gate.columns):
            g, u = (_weights(arena, row_words[at], matrix) @ row[:, None] for matrix in (gate, up))
            parts.append((g * mx.sigmoid(g) * u)[..., 0])
        tokens.append(_joined(parts))
    return mx.where((words == NO_SLOT)[..., None], 0.0, mx.stack(tokens))


def naive_expert_down(h: mx.array, words: mx.array, arena: Arena, down: Matrix) -> mx.array:
    """What each expert adds to its token, not yet weighted: partials [T, k, N] float32.

    Args:
        h: [T, k, I] float32. words, arena: as for ``naive_expert_gate_up``. down: [N, I].
    """
    tokens = []
    for rows, row_words in zip(h.astype(mx.float32)[..., None], words, strict=True):
        tiles = _tiles(row_words.size, down.rows * down.columns)
        tokens.append(_joined([(_weights(arena, row_words[at], down) @ rows[at])[..., 0] for at in tiles]))
    return mx.where((words == NO_SLOT)[..., None], 0.0, mx.stack(tokens))


def naive_expert_dequantize(words: mx.array, arena: Arena, matrix: Matrix, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    """The matrices of experts, for products with many rows.

    Args:
        words: [n] uint32 slot words; NO_SLOT gives zeros.
        arena, matrix: as for ``naive_expert_gate_up``; [rows, columns].

    Returns:
        [n, rows, columns], rounded once from float32 to ``dtype``.
    """
    tiles = (words[at] for at in _tiles(words.size, matrix.rows * matrix.columns))
    parts = [mx.where((part == NO_SLOT)[:, None, None], 0.0, _weights(arena, part, matrix)) for part in tiles]
    return _joined([part.astype(dtype) for part in parts])


def naive_expert_combine(
    partials: mx.array, weights: mx.array, shared: mx.array, dtype: mx.Dtype | None = None
) -> mx.array:
    """((w0 p0 + w1 p1) + …) + shared, in float32 and rank order, then cast.

    Args:
        partials: [T, k, N] float32. weights: [T, k], any float type. shared: [T, N], the shared expert's output.
        dtype: of the result; that of ``shared`` by default.

    Returns:
        [T, N].
    """
    scaled = partials * weights.astype(mx.float32)[..., None]
    total = scaled[:, 0]
    for rank in range(1, scaled.shape[1]):
        total = total + scaled[:, rank]
    return (total + shared.astype(mx.float32)).astype(dtype or shared.dtype)


def _tiles(count: int, weights: int, multiple: int = 1) -> Iterator[slice]:
    """Parts of ``count`` rows or experts of so many ``weights`` each, multiples of ``multiple`` but for the last."""
    step = max(1, TILE_WEIGHTS // weights // multiple) * multiple
    yield from (slice(start, start + step) for start in range(0, max(count, 1), step))


def _unpacked(w: mx.array, format: BlockFormat, scales: mx.array | None) -> Iterator[mx.array]:
    """Rows [N, row_bytes] as float32 weights [n, K], tile by tile."""
    tile = format.tile or 1
    for at in _tiles(len(w), format.row_weights(w.shape[1]), tile):
        part = None if scales is None else scales[at.start // tile : at.stop // tile]
        yield naive_dequantize(w[at], format, part)


def _joined(parts: list[mx.array], axis: int = 0) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def _weights(arena: Arena, words: mx.array, matrix: Matrix) -> mx.array:
    """The matrices of experts with these slot words [k]: [k, rows, columns] float32; anything for NO_SLOT."""
    rows = _bytes(arena, words, matrix.offset, matrix.rows * matrix.row_bytes)
    scales = None
    if matrix.scales:
        shape = matrix.format.scale_shape(matrix.rows, matrix.columns)
        size = math.prod(shape) * matrix.scales.dtype.size
        scales = _bytes(arena, words, matrix.scales.offset, size).view(matrix.scales.dtype).reshape(-1, *shape)
    return naive_dequantize(rows.reshape(-1, matrix.rows, matrix.row_bytes), matrix.format, scales)


def _bytes(arena: Arena, words: mx.array, offset: int, size: int) -> mx.array:
    """``size`` bytes from ``offset`` on of the records with these slot words [k]: [k, size] uint8."""
    first, start = divmod(offset, PAGE_BYTES)
    places = mx.arange(first, first + -(-(start + size) // PAGE_BYTES), dtype=mx.uint32)
    rows = (words & 0x0FFFFFFF)[:, None] + places
    pages = mx.zeros((*rows.shape, PAGE_BYTES), dtype=mx.uint8)
    for c, (chunk, base) in enumerate(zip(arena.chunks, arena.bases, strict=False)):
        here = (words >> 28 == c)[:, None]  # of no chunk where NO_SLOT
        unit = chunk.size // chunk.shape[0]
        end = base + (chunk.size - base) // PAGE_BYTES * PAGE_BYTES
        whole = chunk[base // unit : end // unit].reshape(-1, PAGE_BYTES)
        pages = mx.where(here[..., None], whole[mx.where(here, rows, 0)], pages)
    return pages.reshape(words.size, -1)[:, start : start + size]
