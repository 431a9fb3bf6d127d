"""The dense kernels, block_dequantize and block_gemv, and their launches.

block_dequantize: one thread per group of 8 weights. Bit-equal to the reference, rounded once.

block_gemv: y [T, N] = x [T, K] W^T, T from 1 to 8. One simdgroup per ``ROWS`` rows of W, 8 simdgroups per threadgroup,
no barriers. Lane l takes groups l, l + 32, … of 8 weights: it decodes a group of each row once, and for every token
adds the 8 products one by one with fma to that row's and token's own sum; the 32 sums of the lanes are added as a tree.
So the bits of y[t, n] depend on x[t] and W[n] alone, neither on T nor on ROWS. K is a multiple of 8 (and of the block),
N anything: rows past the end are computed as the last one and not written. Reads W once, N * row_bytes, which is nearly
all of the traffic; x comes from the cache.

Differs from the reference in the order of the sums and in not rounding the products.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from custom_kernels.ggml_blocks import BlockFormat
from custom_kernels.ggml_blocks.device import GROUP, decoder_header, has_decoder, table_arrays, table_names
from custom_kernels.portable import MAX_THREADS, Geometry, Launch, PortableKernel

MAX_TOKENS = 8
ROWS = 2
"""Rows of W per simdgroup."""
MAX_GROUPS_OF_8 = 1 << 31
"""In a matrix: its groups are numbered in 32 bits."""

_DEQUANTIZE = r"""
  const uint row = gid.x / (K / 8), group = gid.x % (K / 8);
  if (row < N) {
    const W8 values = decode_w(row_of(w + size_t(row) * ROW_BYTES), group);
    for (uint i = 0; i < 8; ++i) out[size_t(row) * K + 8 * group + i] = T(values.v[i]);
  }
"""

_GEMV = r"""
  const uint first = (gid.x >> 5) * ROWS;   // the simdgroup's rows of W
  if (first < N) {
    float acc[ROWS][TOKENS];
    for (uint r = 0; r < ROWS; ++r)
      for (uint t = 0; t < TOKENS; ++t) acc[r][t] = 0.0f;
    for (uint group = lane; group < K / 8; group += LANES) {
      W8 values[ROWS];
      for (uint r = 0; r < ROWS; ++r) {
        const uint row = first + r < N ? first + r : N - 1;
        values[r] = decode_w(row_of(w + size_t(row) * ROW_BYTES), group);
      }
      for (uint t = 0; t < TOKENS; ++t)
        for (uint i = 0; i < 8; ++i) {
          const float v = float(x[t * K + 8 * group + i]);
          for (uint r = 0; r < ROWS; ++r) acc[r][t] = fma(values[r].v[i], v, acc[r][t]);
        }
    }
    for (uint r = 0; r < ROWS; ++r)
      for (uint t = 0; t < TOKENS; ++t) {
        const float sum = lane_sum(acc[r][t]);
        if (lane == 0 && first + r < N) y[size_t(t) * N + first + r] = T(sum);
      }
  }
"""


@cache
def dequantize_kernel(format: BlockFormat) -> PortableKernel:
    """block_dequantize for one format."""
    name = f"block_dequantize_{format.name}"
    return PortableKernel(name, ["w", *table_names(format)], ["out"], _DEQUANTIZE, decoder_header(w=format))


@cache
def gemv_kernel(format: BlockFormat) -> PortableKernel:
    """block_gemv for one format."""
    return PortableKernel(
        f"block_gemv_{format.name}", ["x", "w", *table_names(format)], ["y"], _GEMV, decoder_header(w=format)
    )


def supports(format: BlockFormat, columns: int, rows: int) -> bool:
    """Whether the kernels take matrices of this size; the reference takes any."""
    whole = columns >= GROUP and columns % GROUP == 0
    return has_decoder(format) and whole and rows >= 1 and rows * (columns // GROUP) < MAX_GROUPS_OF_8


def simdgroups(rows: int, per_simdgroup: int) -> int:
    """Threadgroups of 8 simdgroups that cover these rows."""
    return -(-rows // (8 * per_simdgroup))


def block_dequantize_launch(blocks: mx.array, format: BlockFormat, dtype: mx.Dtype = mx.bfloat16) -> Launch:
    """The launch for ``naive_block_dequantize`` with blocks [N, row_bytes]."""
    N, row_bytes = blocks.shape
    K = format.row_weights(row_bytes)
    return Launch(
        kernel=dequantize_kernel(format),
        inputs=[blocks, *table_arrays(format)],
        template=[("T", dtype), ("N", N), ("K", K), ("ROW_BYTES", row_bytes)],
        geometry=Geometry.of_groups((-(-N * (K // GROUP) // MAX_THREADS), 1, 1)),
        output_shapes=[(N, K)],
        output_dtypes=[dtype],
    )


def block_gemv_launch(
    x: mx.array, w: mx.array, format: BlockFormat, dtype: mx.Dtype | None = None, rows: int = ROWS
) -> Launch:
    """The launch for ``naive_block_gemv``'s arguments; ``rows`` of W per simdgroup, which changes no bit."""
    (T, K), (N, row_bytes) = x.shape, w.shape
    if not 1 <= T <= MAX_TOKENS:
        raise ValueError(f"block_gemv takes 1 to {MAX_TOKENS} rows of x, not {T}; use block_dequantize and matmul")
    if row_bytes != format.row_bytes(K):
        raise ValueError(f"rows of w have {row_bytes} bytes; {K} weights of {format.name} have {format.row_bytes(K)}")
    dtype = dtype or x.dtype
    template = {"T": dtype, "TOKENS": T, "N": N, "K": K, "ROW_BYTES": row_bytes, "ROWS": rows}
    return Launch(
        kernel=gemv_kernel(format),
        inputs=[x, w, *table_arrays(format)],
        template=list(template.items()),
        geometry=Geometry.of_groups((simdgroups(N, rows), 1, 1)),
        output_shapes=[(T, N)],
        output_dtypes=[dtype],
    )
