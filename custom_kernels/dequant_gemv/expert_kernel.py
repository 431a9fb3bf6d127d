"""The kernels of routed experts, read in place from the arena, and their launches.

expert_gate_up: h [T, k, I] = silu(gate x) * (up x). Row y of the grid is one (token, rank) pair; in it one simdgroup
takes ``ROWS`` rows of gate and the same rows of up, as block_gemv does (groups of 8 weights over the lanes, fma one by
one, then the tree of lanes), so one read of x serves both and silu needs no second dispatch. expert_down: partials
[T, k, N] likewise, with each pair's own h. A pair looks only at its own word and row: bits depend on nothing else.
A pair whose word is NO_SLOT writes zeros and reads no record.

The slot word says chunk << 28 | page; all four chunks are always bound (missing ones repeat the first), offsets are
64-bit. Both read each pair's matrices once, k * row_bytes * (2 I or N) bytes per token, nearly all of the traffic.

expert_combine: out [T, N], one thread per element, a chain of fma over ranks in order, then the shared expert.

Differs from the reference in the order of the sums inside a product, in fma, and in the rounding of exp.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from custom_kernels.dequant_gemv.kernel import ROWS, simdgroups, supports
from custom_kernels.dequant_gemv.reference import MAX_CHUNKS, Arena, Matrix
from custom_kernels.ggml_blocks import BlockFormat
from custom_kernels.ggml_blocks.device import decoder_header, table_arrays, table_names
from custom_kernels.portable import MAX_THREADS, Geometry, Launch, PortableKernel

MAX_PAIRS = 65535
"""Tokens times ranks, CUDA's limit on the grid's second dimension."""

_ARENA = ["words", *(f"chunk{c}" for c in range(MAX_CHUNKS)), "bases"]

# Needs a word that is not NO_SLOT; defines the record's first byte.
_RECORD = r"""
      const uint c = word >> 28;
      auto chunk = c == 0 ? chunk0 : c == 1 ? chunk1 : c == 2 ? chunk2 : chunk3;
      auto record = chunk + (size_t(bases[c & 3]) + size_t(word & 0x0FFFFFFFu) * 16384);
"""

_GATE_UP = (
    r"""
  const uint pair = gid.y, first = (gid.x >> 5) * ROWS;
  if (first < N) {
    const uint word = words[pair];
    float g[ROWS], u[ROWS];
    for (uint r = 0; r < ROWS; ++r) g[r] = u[r] = 0.0f;
    if (word != 0xFFFFFFFFu) {"""
    + _RECORD
    + r"""
      const size_t token = size_t(pair / RANKS) * K;
      for (uint group = lane; group < K / 8; group += LANES) {
        float v[8];
        for (uint i = 0; i < 8; ++i) v[i] = float(x[token + 8 * group + i]);
        for (uint r = 0; r < ROWS; ++r) {
          const uint row = first + r < N ? first + r : N - 1;
          const W8 gate = decode_gate(row_of(record + (GATE_AT + size_t(row) * GATE_BYTES)), group);
          const W8 up = decode_up(row_of(record + (UP_AT + size_t(row) * UP_BYTES)), group);
          for (uint i = 0; i < 8; ++i) {
            g[r] = fma(gate.v[i], v[i], g[r]);
            u[r] = fma(up.v[i], v[i], u[r]);
          }
        }
      }
    }
    for (uint r = 0; r < ROWS; ++r) {
      const float gate = lane_sum(g[r]), up = lane_sum(u[r]);
      if (lane == 0 && first + r < N) h[size_t(pair) * N + first + r] = gate / (1.0f + exp(-gate)) * up;
    }
  }
"""
)

_DOWN = (
    r"""
  const uint pair = gid.y, first = (gid.x >> 5) * ROWS;
  if (first < N) {
    const uint word = words[pair];
    float acc[ROWS];
    for (uint r = 0; r < ROWS; ++r) acc[r] = 0.0f;
    if (word != 0xFFFFFFFFu) {"""
    + _RECORD
    + r"""
      for (uint group = lane; group < K / 8; group += LANES) {
        float v[8];
        for (uint i = 0; i < 8; ++i) v[i] = float(h[size_t(pair) * K + 8 * group + i]);
        for (uint r = 0; r < ROWS; ++r) {
          const uint row = first + r < N ? first + r : N - 1;
          const W8 values = decode_down(row_of(record + (DOWN_AT + size_t(row) * DOWN_BYTES)), group);
          for (uint i = 0; i < 8; ++i) acc[r] = fma(values.v[i], v[i], acc[r]);
        }
      }
    }
    for (uint r = 0; r < ROWS; ++r) {
      const float sum = lane_sum(acc[r]);
      if (lane == 0 && first + r < N) partials[size_t(pair) * N + first + r] = sum;
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
    name = f"expert_gate_up_{gate.name}_{up.name}"
    return PortableKernel(name, inputs, ["h"], _GATE_UP, decoder_header(gate=gate, up=up))


@cache
def down_kernel(down: BlockFormat) -> PortableKernel:
    """expert_down for one format."""
    inputs = ["h", *_ARENA, *table_names(down)]
    return PortableKernel(f"expert_down_{down.name}", inputs, ["partials"], _DOWN, decoder_header(down=down))


def supports_experts(words: mx.array, *matrices: Matrix) -> bool:
    """Whether the kernels take these sizes; the reference takes any."""
    return 1 <= words.size <= MAX_PAIRS and all(supports(m.format, m.columns, m.rows) for m in matrices)


def expert_gate_up_launch(
    x: mx.array, words: mx.array, arena: Arena, gate: Matrix, up: Matrix, rows: int = ROWS
) -> Launch:
    """The launch for ``naive_expert_gate_up``'s arguments; ``rows`` per simdgroup, which changes no bit."""
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
        "GATE_AT": gate.offset,
        "GATE_BYTES": gate.row_bytes,
        "UP_AT": up.offset,
        "UP_BYTES": up.row_bytes,
        "ROWS": rows,
    }
    return Launch(
        kernel=gate_up_kernel(gate.format, up.format),
        inputs=[x, words, *_arena_inputs(arena), *table_arrays(gate.format, up.format)],
        template=list(template.items()),
        geometry=Geometry.of_groups((simdgroups(I, rows), T * k, 1)),
        output_shapes=[(T, k, I)],
        output_dtypes=[mx.float32],
    )


def expert_down_launch(h: mx.array, words: mx.array, arena: Arena, down: Matrix, rows: int = ROWS) -> Launch:
    """The launch for ``naive_expert_down``'s arguments; ``rows`` per simdgroup, which changes no bit."""
    T, k = words.shape
    _check("h", h, (T, k, down.columns))
    _check("words", words, (T, k), mx.uint32)
    template = {
        "N": down.rows,
        "K": down.columns,
        "DOWN_AT": down.offset,
        "DOWN_BYTES": down.row_bytes,
        "ROWS": rows,
    }
    return Launch(
        kernel=down_kernel(down.format),
        inputs=[h, words, *_arena_inputs(arena), *table_arrays(down.format)],
        template=list(template.items()),
        geometry=Geometry.of_groups((simdgroups(down.rows, rows), T * k, 1)),
        output_shapes=[(T, k, down.rows)],
        output_dtypes=[mx.float32],
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


def _arena_inputs(arena: Arena) -> list[mx.array]:
    """The four chunks and their bases."""
    missing = MAX_CHUNKS - len(arena.chunks)
    return [*arena.chunks, *[arena.chunks[0]] * missing, arena.base_array]


def _check(name: str, array: mx.array, shape: tuple[int, ...], dtype: mx.Dtype | None = None) -> None:
    if array.shape != shape or (dtype and array.dtype != dtype):
        raise ValueError(f"{name} is {array.dtype} {array.shape}; needed: {dtype or 'any float'} {shape}")
