"""Products with packed matrices: dense rows, and experts in the arena. The references define every op."""

from __future__ import annotations

import mlx.core as mx

from custom_kernels.dequant_gemv import kernel, reference
from custom_kernels.dequant_gemv.expert_kernel import (
    MAX_PAIRS,
    expert_combine_launch,
    expert_dequantize_launch,
    expert_down_launch,
    expert_gate_up_launch,
    supports_experts,
)
from custom_kernels.dequant_gemv.reference import NO_SLOT, PAGE_BYTES, Arena, Matrix, Scales
from custom_kernels.dispatch import choose
from custom_kernels.ggml_blocks import BlockFormat

__all__ = [
    "NO_SLOT",
    "PAGE_BYTES",
    "Arena",
    "Matrix",
    "Scales",
    "block_dequantize",
    "block_gemv",
    "expert_combine",
    "expert_dequantize",
    "expert_down",
    "expert_gate_up",
]


def block_dequantize(
    blocks: mx.array, format: BlockFormat, dtype: mx.Dtype = mx.bfloat16, scales: mx.array | None = None
) -> mx.array:
    """Packed rows [..., row_bytes] uint8 -> weights [..., n] in ``dtype``; see ``naive_block_dequantize``.

    scales: of F8_E4M3, [..., ceil(N / 128), ceil(n / 128)] bfloat16 or float32; stacks go to the reference.
    """
    backend = choose("block_dequantize", format.name).backend
    columns = format.row_weights(blocks.shape[-1])
    rows = blocks.size // max(blocks.shape[-1], 1)
    one = blocks.ndim == 2 or not format.tile  # rows of several matrices share no scales
    if backend == "reference" or not one or not kernel.supports(format, columns, rows):
        return reference.naive_block_dequantize(blocks, format, dtype, scales)
    launch = kernel.block_dequantize_launch(blocks.reshape(rows, -1), format, dtype, scales)
    return launch.run(backend)[0].reshape(*blocks.shape[:-1], columns)


def block_gemv(
    x: mx.array,
    w: mx.array,
    format: BlockFormat,
    dtype: mx.Dtype | None = None,
    scales: mx.array | None = None,
) -> mx.array:
    """y [T, N] = x [T, K] W^T for 1 to 8 rows of x; see ``naive_block_gemv``, which defines it.

    Args:
        x: [T, K], any float type. w: [N, row_bytes] uint8, packed rows of K weights. format: what the bytes are.
        dtype: of the result; x's by default. scales: of F8_E4M3, [ceil(N / 128), ceil(K / 128)] bfloat16 or float32.
    """
    backend = choose("block_gemv", format.name).backend
    if backend == "reference" or not kernel.supports(format, x.shape[1], w.shape[0]):
        return reference.naive_block_gemv(x, w, format, dtype, scales)
    return kernel.block_gemv_launch(x, w, format, dtype, scales).run(backend)[0]


def expert_gate_up(x: mx.array, words: mx.array, arena: Arena, gate: Matrix, up: Matrix) -> mx.array:
    """h [T, k, I] = silu(gate x) * (up x), float32; see ``naive_expert_gate_up``, which defines it.

    Args:
        x: [T, K], any float type. words: [T, k] uint32 slot words, NO_SLOT for none. gate, up: [I, K] in the record.
    """
    backend = choose("expert_gate_up", f"{gate.format.name}+{up.format.name}").backend
    if backend == "reference" or not supports_experts(words, gate, up):
        return reference.naive_expert_gate_up(x, words, arena, gate, up)
    return expert_gate_up_launch(x, words, arena, gate, up).run(backend)[0]


def expert_down(h: mx.array, words: mx.array, arena: Arena, down: Matrix) -> mx.array:
    """Partials [T, k, N], float32, one per token and rank; see ``naive_expert_down``, which defines it.

    Args:
        h: [T, k, I] float32. words: [T, k] uint32 slot words, NO_SLOT for none. down: [N, I] in the record.
    """
    backend = choose("expert_down", down.format.name).backend
    if backend == "reference" or not supports_experts(words, down):
        return reference.naive_expert_down(h, words, arena, down)
    return expert_down_launch(h, words, arena, down).run(backend)[0]


def expert_dequantize(words: mx.array, arena: Arena, matrix: Matrix, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    """The matrices of experts, [n, rows, columns] in ``dtype``; see ``naive_expert_dequantize``, which defines it.

    Args:
        words: [n] uint32 slot words, NO_SLOT for none.
    """
    backend = choose("expert_dequantize", matrix.format.name).backend
    if backend == "reference" or not supports_experts(words, matrix):
        return reference.naive_expert_dequantize(words, arena, matrix, dtype)
    return expert_dequantize_launch(words, arena, matrix, dtype).run(backend)[0]


def expert_combine(partials: mx.array, weights: mx.array, shared: mx.array, dtype: mx.Dtype | None = None) -> mx.array:
    """Weighted partials added in rank order, then the shared expert: [T, N]; see ``naive_expert_combine``.

    Args:
        partials: [T, k, N] float32. weights: [T, k]. shared: [T, N]. dtype: of the result, ``shared``'s by default.
    """
    backend = choose("expert_combine").backend
    if backend == "reference" or not 1 <= weights.size <= MAX_PAIRS or not partials.size:
        return reference.naive_expert_combine(partials, weights, shared, dtype)
    return expert_combine_launch(partials, weights, shared, dtype).run(backend)[0]
