"""Products with packed matrices in mx ops: dense rows, and the two halves of an expert's MLP out of the arena.

A matrix W is stored row by row in one of ggml's block formats; ``ggml_blocks.naive_dequantize`` says what its bytes
mean. Sums are float32. A row of activations is multiplied by itself, in products whose sizes do not depend on how many
rows there are, so its result has the same bits in every window.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from custom_kernels.ggml_blocks import BlockFormat, naive_dequantize
from custom_kernels.slots import NO_SLOT, PAGE_BYTES

MAX_CHUNKS = 4
ALIGNMENT = 16
"""Of records in memory, in bytes: kernels read words, not bytes."""


@dataclass(frozen=True)
class Matrix:
    """A packed matrix [rows, columns] inside an expert's record, ``offset`` bytes after the record's start."""

    format: BlockFormat
    rows: int
    columns: int
    offset: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return self.format.row_bytes(self.columns)


@dataclass(frozen=True, eq=False)
class Arena:
    """Where records are: one to four chunks, and the first record byte in each.

    A slot word is chunk << 28 | page: the record starts at byte bases[chunk] + page * PAGE_BYTES of that chunk.
    """

    chunks: tuple[mx.array, ...]  # uint8 [bytes], of at least one page each
    bases: tuple[int, ...] = (0, 0, 0, 0)  # bytes, multiples of ALIGNMENT

    def __post_init__(self) -> None:
        if not 1 <= len(self.chunks) <= MAX_CHUNKS:
            raise ValueError(f"an arena has {len(self.chunks)} chunks; allowed: 1 to {MAX_CHUNKS}")
        if not len(self.chunks) <= len(self.bases) <= MAX_CHUNKS:
            raise ValueError(f"{len(self.bases)} bases for {len(self.chunks)} chunks; at most {MAX_CHUNKS}")
        for i, (chunk, base) in enumerate(zip(self.chunks, self.bases, strict=False)):
            if chunk.dtype != mx.uint8 or chunk.ndim != 1 or chunk.size < base + PAGE_BYTES or base < 0:
                raise ValueError(f"chunk {i} is {chunk.dtype} {chunk.shape}; needed: flat uint8, a page after {base}")
            if base % ALIGNMENT:
                raise ValueError(f"chunk {i} has its base at byte {base}; allowed: multiples of {ALIGNMENT}")

    @cached_property
    def base_array(self) -> mx.array:
        """``bases`` for kernels: [8] uint32, of which the first four count."""
        return mx.array([*self.bases, *[0] * (8 - len(self.bases))], dtype=mx.uint32)


def naive_block_dequantize(blocks: mx.array, format: BlockFormat, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    """Packed rows [..., row_bytes] uint8 -> weights [..., n], rounded once from float32 to ``dtype``."""
    return naive_dequantize(blocks, format).astype(dtype)


def naive_block_gemv(x: mx.array, w: mx.array, format: BlockFormat, dtype: mx.Dtype | None = None) -> mx.array:
    """y = x W^T.

    Args:
        x: [T, K], any float type.
        w: [N, row_bytes] uint8, rows of K weights.
        format: what the bytes are.
        dtype: of the result; x's by default.

    Returns:
        [T, N].
    """
    weights = naive_dequantize(w, format)
    rows = [(weights @ row[:, None])[:, 0] for row in x.astype(mx.float32)]
    return mx.stack(rows).astype(dtype or x.dtype)


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
        g, u = (_weights(arena, row_words, matrix) @ row[:, None] for matrix in (gate, up))
        tokens.append((g * mx.sigmoid(g) * u)[..., 0])
    return mx.where((words == NO_SLOT)[..., None], 0.0, mx.stack(tokens))


def naive_expert_down(h: mx.array, words: mx.array, arena: Arena, down: Matrix) -> mx.array:
    """What each expert adds to its token, not yet weighted: partials [T, k, N] float32.

    Args:
        h: [T, k, I] float32. words, arena: as for ``naive_expert_gate_up``. down: [N, I].
    """
    tokens = [
        (_weights(arena, row_words, down) @ row[..., None])[..., 0]
        for row, row_words in zip(h.astype(mx.float32), words, strict=True)
    ]
    return mx.where((words == NO_SLOT)[..., None], 0.0, mx.stack(tokens))


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


def _weights(arena: Arena, words: mx.array, matrix: Matrix) -> mx.array:
    """The matrices of experts with these slot words [k]: [k, rows, columns] float32; anything for NO_SLOT."""
    first, start = divmod(matrix.offset, PAGE_BYTES)
    size = matrix.rows * matrix.row_bytes
    places = mx.arange(first, first + -(-(start + size) // PAGE_BYTES), dtype=mx.uint32)
    rows = (words & 0x0FFFFFFF)[:, None] + places
    pages = mx.zeros((*rows.shape, PAGE_BYTES), dtype=mx.uint8)
    for c, (chunk, base) in enumerate(zip(arena.chunks, arena.bases, strict=False)):
        here = (words >> 28 == c)[:, None]  # of no chunk where NO_SLOT
        whole = chunk[base : base + (chunk.size - base) // PAGE_BYTES * PAGE_BYTES].reshape(-1, PAGE_BYTES)
        pages = mx.where(here[..., None], whole[mx.where(here, rows, 0)], pages)
    record = pages.reshape(words.size, -1)[:, start : start + size]
    return naive_dequantize(record.reshape(-1, matrix.rows, matrix.row_bytes), matrix.format)
