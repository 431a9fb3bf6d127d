"""The kernels of routed experts, read in place from the arena, and their launches.

expert_gate_up: h [T, k, I] = silu(gate x) * (up x). Row y of the grid is one (token, rank) pair; in it ``LPR`` lanes
share ``ROWS`` rows of gate and the same rows of up, as in block_gemv (kernel.py), so one read of x serves both where
the formats agree, and silu needs no second dispatch. expert_down: partials [T, k, N] likewise, with each pair's own h.
A pair looks only at its own word and row: bits depend on nothing else. A pair whose word is NO_SLOT writes zeros and
reads no record. Scales that lie apart (F8_E4M3) are read from the same record.

The slot word says chunk << 28 | page; all four chunks are always bound (missing ones repeat the first), offsets are
64-bit. Both read each pair's matrices once, k * row_bytes * (2 I or N) bytes per token, nearly all of the traffic.

expert_dequantize: out [n, N, K], one thread per group of 8 weights; row y of the grid is one word. Bit-equal to the
reference, rounded once; NO_SLOT gives zeros and reads no record.

expert_combine: out [T, N], one thread per element, a chain of fma over ranks in order, then the shared expert.

Differs from the reference in the order of the sums inside a product, in fma, and in the rounding of exp.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from custom_kernels.dequant_gemv.kernel import DOT, ROWS, THREADS, lanes_per_row, supports, threadgroups
from custom_kernels.dequant_gemv.reference import MAX_CHUNKS, Arena, Matrix
from custom_kernels.ggml_blocks import BlockFormat
from custom_kernels.ggml_blocks.device import GROUP, alignment, decoder_header, table_arrays, table_names, table_staging
from custom_kernels.portable import MAX_THREADS, Geometry, Launch, PortableKernel, aligned_or_not

MAX_PAIRS = 65535
"""Tokens times ranks, CUDA's limit on the grid's second dimension."""

_ARENA = ["words", *(f"chunk{c}" for c in range(MAX_CHUNKS)), "bases"]

# Needs a word that is not NO_SLOT; defines the record's first byte.
_RECORD = r"""
    const uint at = word >> 28;
    const auto chunk = at == 0 ? chunk0 : at == 1 ? chunk1 : at == 2 ? chunk2 : chunk3;
    const auto record = chunk + (size_t(bases[at & 3]) + size_t(word & 0x0FFFFFFFu) * 16384);"""

_GATE_UP = (
    r"""
  const uint pair = gid.y, first = (gid.x / LPR) * ROWS, sub = lane % LPR;
  const uint word = words[pair];
  float g[ROWS], u[ROWS];
  UNROLL for (uint r = 0; r < ROWS; ++r) g[r] = u[r] = 0.0f;
  if (word != 0xFFFFFFFFu) {"""
    + _RECORD
    + r"""
    const auto token = x + size_t(pair / RANKS) * K;
"""
    + aligned_or_not(
        "token",
        r"""
    UNROLL_BY(2) for (uint base = 0; base < K / 8; base += LPR) {
      const uint group = base + sub;
      if ((K / 8) % LPR == 0 || group < K / 8) {
        const F4 a = load4(token + first_gate(group)), b = load4(token + second_gate(group));
        const F4 c = SAME ? a : load4(token + first_up(group)), d = SAME ? b : load4(token + second_up(group));
        UNROLL for (uint r = 0; r < ROWS; ++r) {
          const size_t row = first + r < N ? first + r : N - 1;
          const Group p = scaled_gate(decode_gate(record + (GATE_AT + row * GATE_BYTES), group),
                                      scale_at_<GATE_SCALE_BYTES>(record + GATE_SCALES_AT, tile_(row, group, K)));
          const Group q = scaled_up(decode_up(record + (UP_AT + row * UP_BYTES), group),
                                    scale_at_<UP_SCALE_BYTES>(record + UP_SCALES_AT, tile_(row, group, K)));
          g[r] = fma(p.scale, dot_(p, a, b), g[r]);
          u[r] = fma(q.scale, dot_(q, c, d), u[r]);
          if (HAS_LEAST_gate) g[r] = fma(-p.least, total_(a, b), g[r]);
          if (HAS_LEAST_up) u[r] = fma(-q.least, total_(c, d), u[r]);
        }
      }
    }
""",
    )
    + r"""  }
  UNROLL for (uint r = 0; r < ROWS; ++r) {
    const float gate = lane_sum_of<LPR>(g[r]), up = lane_sum_of<LPR>(u[r]);
    if (sub == 0 && first + r < N) h[size_t(pair) * N + first + r] = gate / (1.0f + exp(-gate)) * up;
  }
"""
)

_DOWN = (
    r"""
  const uint pair = gid.y, first = (gid.x / LPR) * ROWS, sub = lane % LPR;
  const uint word = words[pair];
  float acc[ROWS];
  UNROLL for (uint r = 0; r < ROWS; ++r) acc[r] = 0.0f;
  if (word != 0xFFFFFFFFu) {"""
    + _RECORD
    + r"""
    const auto own = h + size_t(pair) * K;
"""
    + aligned_or_not(
        "own",
        r"""
    UNROLL_BY(5) for (uint base = 0; base < K / 8; base += LPR) {
      const uint group = base + sub;
      if ((K / 8) % LPR == 0 || group < K / 8) {
        const F4 a = load4(own + first_down(group)), b = load4(own + second_down(group));
        UNROLL for (uint r = 0; r < ROWS; ++r) {
          const size_t row = first + r < N ? first + r : N - 1;
          const Group q = scaled_down(decode_down(record + (DOWN_AT + row * DOWN_BYTES), group),
                                      scale_at_<DOWN_SCALE_BYTES>(record + DOWN_SCALES_AT, tile_(row, group, K)));
          acc[r] = fma(q.scale, dot_(q, a, b), acc[r]);
          if (HAS_LEAST_down) acc[r] = fma(-q.least, total_(a, b), acc[r]);
        }
      }
    }
""",
    )
    + r"""  }
  UNROLL for (uint r = 0; r < ROWS; ++r) {
    const float sum = lane_sum_of<LPR>(acc[r]);
    if (sub == 0 && first + r < N) partials[size_t(pair) * N + first + r] = sum;
  }
"""
)

_DEQUANTIZE = (
    r"""
  const uint row = gid.x / (K / 8), group = gid.x % (K / 8);
  const uint word = words[gid.y];
  if (row < N) {
    const auto target = out + (size_t(gid.y) * N + row) * K;
    if (word == 0xFFFFFFFFu) {
      for (uint i = 0; i < 8; ++i) target[8 * group + i] = T(0.0f);
    } else {"""
    + _RECORD
    + r"""
      const Group q = scaled_w(decode_w(record + (W_AT + size_t(row) * W_BYTES), group),
                               scale_at_<W_SCALE_BYTES>(record + W_SCALES_AT, tile_(row, group, K)));
      for (uint i = 0; i < 8; ++i) {
        const uint column = i < 4 ? first_w(group) + i : second_w(group) + i - 4;
        target[column] = T(q.scale * q.m[i] - q.least);
      }
    }
  }
"""
)

_COMBINE = r"""
  const uint n = gid.x, token = gid.y;
  if (n < N) {
    float sum = 0.0f;
    for (uint rank = 0; rank < RANKS; ++rank) {
      const uint pair = token * RANKS + rank;
      sum = fma(float(weights[pair]), partials[size_t(pair) * N + n], sum);
    }
    out[size_t(token) * N + n] = T(sum + float(shared[size_t(token) * N + n]));
  }
"""

EXPERT_COMBINE = PortableKernel("expert_combine", ["partials", "weights", "shared"], ["out"], _COMBINE)


@cache
def gate_up_kernel(gate: BlockFormat, up: BlockFormat) -> PortableKernel:
    """expert_gate_up for one pair of formats."""
    inputs = ["x", *_ARENA, *table_names(gate, up)]
    body, header = table_staging(gate, up) + _GATE_UP, decoder_header(gate=gate, up=up) + DOT
    return PortableKernel(f"expert_gate_up_{gate.name}_{up.name}", inputs, ["h"], body, header)


@cache
def down_kernel(down: BlockFormat) -> PortableKernel:
    """expert_down for one format."""
    inputs = ["h", *_ARENA, *table_names(down)]
    body, header = table_staging(down) + _DOWN, decoder_header(down=down) + DOT
    return PortableKernel(f"expert_down_{down.name}", inputs, ["partials"], body, header)


@cache
def expert_dequantize_kernel(w: BlockFormat) -> PortableKernel:
    """expert_dequantize for one format."""
    inputs = [*_ARENA, *table_names(w)]
    body = table_staging(w) + _DEQUANTIZE
    return PortableKernel(f"expert_dequantize_{w.name}", inputs, ["out"], body, decoder_header(w=w))


def supports_experts(words: mx.array, *matrices: Matrix) -> bool:
    """Whether the kernels take these sizes; the reference takes any."""
    fits = all(supports(m.format, m.columns, m.rows) and m.offset % alignment(m.format) == 0 for m in matrices)
    aligned = all(m.scales.offset % m.scales.dtype.size == 0 for m in matrices if m.scales)
    return 1 <= words.size <= MAX_PAIRS and fits and aligned


def expert_gate_up_launch(
    x: mx.array, words: mx.array, arena: Arena, gate: Matrix, up: Matrix, rows: int = ROWS
) -> Launch:
    """The launch for ``naive_expert_gate_up``'s arguments; ``rows`` per lane, which changes no bit."""
    T, k = words.shape
    I, K = gate.rows, gate.columns
    if (up.rows, up.columns) != (I, K):
        raise ValueError(f"gate is [{I}, {K}] but up is [{up.rows}, {up.columns}]")
    _check("x", x, (T, K))
    _check("words", words, (T, k), mx.uint32)
    template = {
        "RANKS": k,
        "N": I,
        "K": K,
        **_place("GATE", gate),
        **_place("UP", up),
        "SAME": int(gate.format == up.format),
        "ROWS": rows,
        "LPR": lanes_per_row(K),
        "THREADS": THREADS,
    }
    return Launch(
        kernel=gate_up_kernel(gate.format, up.format),
        inputs=[x, words, *_arena_inputs(arena), *table_arrays(gate.format, up.format)],
        template=list(template.items()),
        geometry=Geometry.of_groups((threadgroups(I, rows, K), T * k, 1), THREADS),
        output_shapes=[(T, k, I)],
        output_dtypes=[mx.float32],
    )


def expert_down_launch(h: mx.array, words: mx.array, arena: Arena, down: Matrix, rows: int | None = None) -> Launch:
    """The launch for ``naive_expert_down``'s arguments; ``rows`` per lane, which changes no bit.

    By default more rows where a codebook must be copied first (measured on an H200, NOTES.md).
    """
    rows = rows or (2 * ROWS if table_names(down.format) else ROWS)
    T, k = words.shape
    _check("h", h, (T, k, down.columns))
    _check("words", words, (T, k), mx.uint32)
    template = {
        "N": down.rows,
        "K": down.columns,
        **_place("DOWN", down),
        "ROWS": rows,
        "LPR": lanes_per_row(down.columns),
        "THREADS": THREADS,
    }
    return Launch(
        kernel=down_kernel(down.format),
        inputs=[h, words, *_arena_inputs(arena), *table_arrays(down.format)],
        template=list(template.items()),
        geometry=Geometry.of_groups((threadgroups(down.rows, rows, down.columns), T * k, 1), THREADS),
        output_shapes=[(T, k, down.rows)],
        output_dtypes=[mx.float32],
    )


def expert_dequantize_launch(words: mx.array, arena: Arena, matrix: Matrix, dtype: mx.Dtype = mx.bfloat16) -> Launch:
    """The launch for ``naive_expert_dequantize``'s arguments."""
    N, K = matrix.rows, matrix.columns
    _check("words", words, (words.size,), mx.uint32)
    template = {"T": dtype, "N": N, "K": K, **_place("W", matrix), "THREADS": MAX_THREADS}
    return Launch(
        kernel=expert_dequantize_kernel(matrix.format),
        inputs=[words, *_arena_inputs(arena), *table_arrays(matrix.format)],
        template=list(template.items()),
        geometry=Geometry.of_groups((-(-N * (K // GROUP) // MAX_THREADS), words.size, 1)),
        output_shapes=[(words.size, N, K)],
        output_dtypes=[dtype],
    )


def expert_combine_launch(
    partials: mx.array, weights: mx.array, shared: mx.array, dtype: mx.Dtype | None = None
) -> Launch:
    """The launch for ``naive_expert_combine``'s arguments."""
    T, k, N = partials.shape
    _check("weights", weights, (T, k))
    _check("shared", shared, (T, N))
    dtype = dtype or shared.dtype
    return Launch(
        kernel=EXPERT_COMBINE,
        inputs=[partials, weights, shared],
        template=[("T", dtype), ("RANKS", k), ("N", N)],
        geometry=Geometry.of_groups((-(-N // MAX_THREADS), T, 1)),
        output_shapes=[(T, N)],
        output_dtypes=[dtype],
    )


def _place(role: str, matrix: Matrix) -> dict[str, int]:
    """Template ints that say where a matrix is in the record."""
    place = {f"{role}_AT": matrix.offset, f"{role}_BYTES": matrix.row_bytes}
    if matrix.scales:
        place |= {f"{role}_SCALES_AT": matrix.scales.offset, f"{role}_SCALE_BYTES": matrix.scales.dtype.size}
    return place


def _arena_inputs(arena: Arena) -> list[mx.array]:
    """The four chunks and their bases."""
    missing = MAX_CHUNKS - len(arena.chunks)
    return [*arena.chunks, *[arena.chunks[0]] * missing, arena.base_array]


def _check(name: str, array: mx.array, shape: tuple[int, ...], dtype: mx.Dtype | None = None) -> None:
    if array.shape != shape or (dtype and array.dtype != dtype):
        raise ValueError(f"{name} is {array.dtype} {array.shape}; needed: {dtype or 'any float'} {shape}")
