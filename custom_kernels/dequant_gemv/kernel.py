"""The dense kernels, block_dequantize and block_gemv, and their launches.

block_dequantize: one thread per group of 8 weights. Bit-equal to the reference, rounded once.

block_gemv: y [T, N] = x [T, K] W^T, T from 1 to 8. ``LPR`` lanes (32, 16 or 8, whichever K's groups fill best) share
``ROWS`` rows of W; 4 simdgroups per threadgroup, no barriers but the one after codebooks are copied. Lane l takes
groups l, l + LPR, … of 8 weights: it decodes a group of each row once, and for every token adds the 8 products one by
one with fma, scales the sum, and adds it to that row's and token's own; the sums of the lanes are added as a tree. So
the bits of y[t, n] depend on x[t] and W[n] alone, neither on T nor on ROWS. K is a multiple of 8 (and of the block), N
anything: rows past the end are computed as the last one and not written. Reads W once, N * row_bytes, which is nearly
all of the traffic; x comes from the cache. Formats whose scales lie apart have them as one more input, ``scales``; a
group of 8 has one scale.

Differs from the reference in the order of the sums and in not rounding the products.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from custom_kernels.ggml_blocks import BlockFormat, check_scales
from custom_kernels.ggml_blocks.device import (
    GROUP,
    decoder_header,
    has_decoder,
    table_arrays,
    table_names,
    table_staging,
)
from custom_kernels.portable import MAX_THREADS, Geometry, Launch, PortableKernel, aligned_or_not

MAX_TOKENS = 8
THREADS = 128
"""Per threadgroup."""
ROWS = 2
"""Rows of W per lane."""
MAX_GROUPS_OF_8 = 1 << 31
"""In a matrix: its groups are numbered in 32 bits."""

DOT = r"""
FN float dot_(Group w, F4 a, F4 b) {
  float sum = w.m[0] * a.v[0];
  UNROLL for (int i = 1; i < 4; ++i) sum = fma(w.m[i], a.v[i], sum);
  UNROLL for (int i = 0; i < 4; ++i) sum = fma(w.m[4 + i], b.v[i], sum);
  return sum;
}
FN float total_(F4 a, F4 b) { return a.v[0] + a.v[1] + a.v[2] + a.v[3] + b.v[0] + b.v[1] + b.v[2] + b.v[3]; }
"""

_DEQUANTIZE = r"""
  const uint row = gid.x / (K / 8), group = gid.x % (K / 8);
  if (row < N) {
    const Group q = scaled_w(decode_w(w + size_t(row) * ROW_BYTES, group), float(scales[tile_(row, group, K)]));
    for (uint i = 0; i < 8; ++i) {
      const uint column = i < 4 ? first_w(group) + i : second_w(group) + i - 4;
      out[size_t(row) * K + column] = T(q.scale * q.m[i] - q.least);
    }
  }
"""

_GEMV = (
    r"""
  const uint first = (gid.x / LPR) * ROWS, sub = lane % LPR;   // the lane's rows of W, and its place among their lanes
  float acc[ROWS][TOKENS];
  UNROLL for (uint r = 0; r < ROWS; ++r)
    UNROLL for (uint t = 0; t < TOKENS; ++t) acc[r][t] = 0.0f;
"""
    + aligned_or_not(
        "x",
        r"""
  UNROLL_BY(1) for (uint base = 0; base < K / 8; base += LPR) {
    const uint group = base + sub;
    if ((K / 8) % LPR == 0 || group < K / 8) {
      Group q[ROWS];
      UNROLL for (uint r = 0; r < ROWS; ++r) {
        const uint row = first + r < N ? first + r : N - 1;
        q[r] = scaled_w(decode_w(w + size_t(row) * ROW_BYTES, group), float(scales[tile_(row, group, K)]));
      }
      UNROLL for (uint t = 0; t < TOKENS; ++t) {
        const F4 a = load4(x + t * K + first_w(group)), b = load4(x + t * K + second_w(group));
        UNROLL for (uint r = 0; r < ROWS; ++r) {
          acc[r][t] = fma(q[r].scale, dot_(q[r], a, b), acc[r][t]);
          if (HAS_LEAST_w) acc[r][t] = fma(-q[r].least, total_(a, b), acc[r][t]);
        }
      }
    }
  }
""",
    )
    + r"""  UNROLL for (uint r = 0; r < ROWS; ++r)
    UNROLL for (uint t = 0; t < TOKENS; ++t) {
      const float sum = lane_sum_of<LPR>(acc[r][t]);
      if (sub == 0 && first + r < N) y[size_t(t) * N + first + r] = T(sum);
    }
"""
)


@cache
def dequantize_kernel(format: BlockFormat) -> PortableKernel:
    """block_dequantize for one format."""
    body = table_staging(format) + _DEQUANTIZE
    name = f"block_dequantize_{format.name}"
    return PortableKernel(name, ["w", *_names(format)], ["out"], body, decoder_header(w=format))


@cache
def gemv_kernel(format: BlockFormat) -> PortableKernel:
    """block_gemv for one format."""
    body, header = table_staging(format) + _GEMV, decoder_header(w=format) + DOT
    return PortableKernel(f"block_gemv_{format.name}", ["x", "w", *_names(format)], ["y"], body, header)


def _names(format: BlockFormat) -> list[str]:
    """Of the inputs beside w that hold what it takes to decode it."""
    return [*table_names(format), *(["scales"] if format.tile else [])]


def _arrays(format: BlockFormat, shape: tuple[int, int], scales: mx.array | None) -> list[mx.array]:
    """What goes in for ``_names`` with a matrix of this shape."""
    check_scales(format, shape, scales)
    return [*table_arrays(format), *([] if scales is None else [scales])]


def supports(format: BlockFormat, columns: int, rows: int) -> bool:
    """Whether the kernels take matrices of this size; the reference takes any."""
    whole = columns >= GROUP and columns % GROUP == 0
    return has_decoder(format) and whole and rows >= 1 and rows * (columns // GROUP) < MAX_GROUPS_OF_8


def lanes_per_row(columns: int) -> int:
    """How many lanes share a row: 32, 16 or 8, the one that leaves the fewest idle, the larger of equals."""
    groups = columns // GROUP
    return min((32, 16, 8), key=lambda lanes: -(-groups // lanes) * lanes)


def threadgroups(rows: int, rows_per_lane: int, columns: int) -> int:
    """Threadgroups of ``THREADS`` threads that cover these rows."""
    return -(-rows * lanes_per_row(columns) // (THREADS * rows_per_lane))


def block_dequantize_launch(
    blocks: mx.array, format: BlockFormat, dtype: mx.Dtype = mx.bfloat16, scales: mx.array | None = None
) -> Launch:
    """The launch for ``naive_block_dequantize`` with blocks [N, row_bytes]."""
    N, row_bytes = blocks.shape
    K = format.row_weights(row_bytes)
    return Launch(
        kernel=dequantize_kernel(format),
        inputs=[blocks, *_arrays(format, (N, K), scales)],
        template=[("T", dtype), ("N", N), ("K", K), ("ROW_BYTES", row_bytes), ("THREADS", MAX_THREADS)],
        geometry=Geometry.of_groups((-(-N * (K // GROUP) // MAX_THREADS), 1, 1)),
        output_shapes=[(N, K)],
        output_dtypes=[dtype],
    )


def block_gemv_launch(
    x: mx.array,
    w: mx.array,
    format: BlockFormat,
    dtype: mx.Dtype | None = None,
    scales: mx.array | None = None,
    rows: int = ROWS,
) -> Launch:
    """The launch for ``naive_block_gemv``'s arguments; ``rows`` of W per lane, which changes no bit."""
    (T, K), (N, row_bytes) = x.shape, w.shape
    if not 1 <= T <= MAX_TOKENS:
        raise ValueError(f"block_gemv takes 1 to {MAX_TOKENS} rows of x, not {T}; use block_dequantize and matmul")
    if row_bytes != format.row_bytes(K):
        raise ValueError(f"rows of w have {row_bytes} bytes; {K} weights of {format.name} have {format.row_bytes(K)}")
    dtype = dtype or x.dtype
    template = {
        "T": dtype,
        "TOKENS": T,
        "N": N,
        "K": K,
        "ROW_BYTES": row_bytes,
        "ROWS": rows,
        "LPR": lanes_per_row(K),
        "THREADS": THREADS,
    }
    return Launch(
        kernel=gemv_kernel(format),
        inputs=[x, w, *_arrays(format, (N, K), scales)],
        template=list(template.items()),
        geometry=Geometry.of_groups((threadgroups(N, rows, K), 1, 1), THREADS),
        output_shapes=[(T, N)],
        output_dtypes=[dtype],
    )
