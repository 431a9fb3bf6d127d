"""Exact dequantisers of packed weights in mx ops: the definition that device decoders are tested against.

Each decoder below states its block as ``offset field``; fields are little-endian, ``u`` unsigned, ``i`` signed, and
bit fields count from the lowest bit. Formulas and layouts are facts of ggml (ggml-common.h, ggml-quants.c, and the
``gguf`` package's quants.py, with which all of these but Q2_0 are bit-equal); the code is our own.

In every quantised format a weight is (fp16 scale) * (small whole or dyadic numbers) plus at most one more such term.
The products have at most 23 significant bits, so float32 holds them exactly in any order and only that last sum rounds:
a decoder that reorders or fuses gets the same bits. The one exception is the sign of a zero weight, which here follows
the factors' signs (MLX's affine forms give +0). F8_E4M3 has one product too, which with float32 scales may round.

Decoders take ``b`` [N, block_bytes] uint32, one byte per element, N > 0, and return [N, ...] float32 whose last axes
hold the block's weights in order. Words are put together from bytes, never viewed, since blocks are not aligned.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from custom_kernels.ggml_blocks.formats import BlockFormat
from custom_kernels.ggml_blocks.tables import IQ4_VALUES, grid_array

SCALE_DTYPES = (mx.bfloat16, mx.float32)
"""Of scales that lie apart from the rows."""


def naive_dequantize(blocks: mx.array, format: BlockFormat, scales: mx.array | None = None) -> mx.array:
    """The weights of packed rows, in float32.

    Args:
        blocks: [..., row_bytes] uint8, rows of whole blocks; any leading axes, any strides.
        format: what the bytes are.
        scales: for F8_E4M3, where w[n, k] = code[n, k] scales[n / 128, k / 128]: with blocks [..., N, row_bytes]
            [..., ceil(N / 128), ceil(n / 128)] bfloat16 or float32. None for other formats.

    Returns:
        [..., n] float32, a new array, n = ``format.row_weights(row_bytes)``.

    Raises:
        ValueError: the array is not of bytes, its rows are not whole blocks, or the scales do not fit.
    """
    if blocks.dtype != mx.uint8 or blocks.ndim == 0:
        raise ValueError(f"{format.name}: blocks must be [..., row_bytes] uint8, not {blocks.shape} {blocks.dtype}")
    shape = (*blocks.shape[:-1], format.row_weights(blocks.shape[-1]))
    check_scales(format, shape, scales)
    if blocks.size == 0:
        return mx.zeros(shape, dtype=mx.float32)
    weights = _DECODERS[format.name](blocks.reshape(-1, format.block_bytes).astype(mx.uint32))
    weights = weights.reshape(shape)
    return weights if scales is None else weights * _spread(scales, format.tile, shape)


def check_scales(format: BlockFormat, shape: tuple[int, ...], scales: mx.array | None) -> None:
    """Raises ValueError unless weights [..., N, K] of this format go with these scales, which may be None."""
    if not format.tile:
        if scales is not None:
            raise ValueError(f"{format.name} takes no scales: they are in its blocks")
        return
    if len(shape) < 2:
        raise ValueError(f"{format.name}: blocks must be [..., rows, row_bytes], since rows share scales")
    needed = (*shape[:-2], *format.scale_shape(*shape[-2:]))
    if scales is None or scales.shape != needed or scales.dtype not in SCALE_DTYPES:
        given = "missing" if scales is None else f"{scales.dtype} {scales.shape}"
        raise ValueError(f"{format.name}: the scales are {given}; needed: bfloat16 or float32 {needed}")


def _spread(scales: mx.array, tile: int, shape: tuple[int, ...]) -> mx.array:
    """Each scale over its tile: [..., N, K] float32."""
    wide = mx.repeat(scales.astype(mx.float32), tile, axis=-1)[..., : shape[-1]]
    return mx.repeat(wide, tile, axis=-2)[..., : shape[-2], :]


# Fields


def _u16(b: mx.array) -> mx.array:
    """Bytes [..., 2 m] -> words [..., m] uint32."""
    b = b.reshape(*b.shape[:-1], -1, 2)
    return b[..., 0] | (b[..., 1] << 8)


def _u32(b: mx.array) -> mx.array:
    """Bytes [..., 4 m] -> words [..., m] uint32."""
    halves = _u16(b)
    return halves[..., 0::2] | (halves[..., 1::2] << 16)


def _half(word: mx.array) -> mx.array:
    """The bits of fp16 values, uint32 -> the values, float32."""
    return word.astype(mx.uint16).view(mx.float16).astype(mx.float32)


def _d(b: mx.array) -> mx.array:
    """The fp16 at offset 0, where most formats keep the block's scale: [N, 1] float32."""
    return _half(_u16(b[:, :2]))


def _i8(b: mx.array) -> mx.array:
    """The bits of int8 values, uint32 -> the values, float32."""
    return (b ^ 128).astype(mx.float32) - 128


def _fields(x: mx.array, width: int, count: int) -> mx.array:
    """The lowest ``count`` fields of ``width`` bits of each word: [...] -> [..., count]."""
    return (x[..., None] >> (mx.arange(count, dtype=mx.uint32) * width)) & ((1 << width) - 1)


def _planes(x: mx.array, width: int, count: int) -> mx.array:
    """The same fields, plane by plane: [..., m] -> [..., count, m], first the lowest field of all m words."""
    return _fields(x, width, count).swapaxes(-1, -2)


def _flat(x: mx.array) -> mx.array:
    """[N, ...] -> [N, k]."""
    return x.reshape(x.shape[0], -1)


def _scaled(scale: mx.array, values: mx.array) -> mx.array:
    """scale [N, S] times values [N, ...], each scale over an equal run -> [N, S, run]."""
    return scale[..., None] * values.astype(mx.float32).reshape(*scale.shape, -1)


# Whole numbers and plain codes


def _f32(b: mx.array) -> mx.array:
    """0 float32."""
    return _u32(b).view(mx.float32)


def _f16(b: mx.array) -> mx.array:
    """0 fp16."""
    return _half(_u16(b))


def _bf16(b: mx.array) -> mx.array:
    """0 bfloat16, the upper half of a float32."""
    return (_u16(b) << 16).view(mx.float32)


def _f8_e4m3(b: mx.array) -> mx.array:
    """0 float8_e4m3fn: u3 mantissa, u4 exponent (bias 7, subnormals at 0), u1 sign; 0x7F and 0xFF are NaN."""
    return mx.from_fp8(b.astype(mx.uint8), dtype=mx.float32)


def _q2_0(b: mx.array) -> mx.array:
    """0 fp16 d; 2 u2 code[64].   w = d (code - 1)"""
    return _scaled(_d(b), _fields(b[:, 2:], 2, 4).astype(mx.float32) - 1)


def _q5_1(b: mx.array) -> mx.array:
    """0 fp16 d; 2 fp16 m; 4 u1 high[32]; 8 u8 qs[16], the low nibbles of weights 0-15, the high ones of 16-31.

    w = d (nibble + 16 high) + m
    """
    scales = _half(_u16(b[:, :4]))
    codes = _flat(_planes(b[:, 8:], 4, 2)) + 16 * _flat(_fields(b[:, 4:8], 1, 8))
    return scales[:, :1] * codes.astype(mx.float32) + scales[:, 1:]


def _q8_0(b: mx.array) -> mx.array:
    """0 fp16 d; 2 i8 code[32].   w = d code"""
    return _scaled(_d(b), _i8(b[:, 2:]))


# K formats: 256 weights in runs, each with its own small scale


def _k_scales(b: mx.array) -> tuple[mx.array, mx.array]:
    """The head of Q4_K and Q5_K: the scale and the minimum of each run of 32 weights, [N, 8] float32 both.

    0 fp16 d; 2 fp16 dmin; 4 u8 x[12]. Runs 0-3: scale = low 6 bits of x[j], min = low 6 bits of x[4 + j]; runs 4-7:
    scale = low nibble of x[8 + j] + 16 (top 2 bits of x[j]), min = high nibble + 16 (top 2 bits of x[4 + j]).
    """
    d = _half(_u16(b[:, :4]))
    first, last = b[:, 4:12].reshape(-1, 2, 4), _planes(b[:, 12:16], 4, 2)  # [N, (scale, min), 4]
    small = mx.concatenate([first & 63, last | (first >> 6 << 4)], axis=-1)
    scales = d[..., None] * small.astype(mx.float32)
    return scales[:, 0], scales[:, 1]


def _q4_k(b: mx.array) -> mx.array:
    """0 head (``_k_scales``); 16 u8 qs[4][32], run 2 i in the low nibbles of qs[i], run 2 i + 1 in the high ones.

    w = (d scale) nibble - dmin min
    """
    scale, minimum = _k_scales(b)
    return _scaled(scale, _planes(b[:, 16:].reshape(-1, 4, 32), 4, 2)) - minimum[..., None]


def _q5_k(b: mx.array) -> mx.array:
    """0 head (``_k_scales``); 16 u8 qh[32], bit r of qh[l] for weight l of run r; 48 u8 qs[4][32] as in Q4_K.

    w = (d scale) (nibble + 16 high) - dmin min
    """
    scale, minimum = _k_scales(b)
    codes = _flat(_planes(b[:, 48:].reshape(-1, 4, 32), 4, 2)) + 16 * _flat(_planes(b[:, 16:48], 1, 8))
    return _scaled(scale, codes) - minimum[..., None]


def _q6_k(b: mx.array) -> mx.array:
    """0 u8 ql[2][64]; 128 u8 qh[2][32]; 192 i8 scale[16], one per 16 weights; 208 fp16 d.

    Half h: weights 0-63 in the low nibbles of ql[h], 64-127 in the high ones; of qh[h], bits 2 r and 2 r + 1 of byte l
    are for weight 32 r + l.   w = (d scale) (nibble + 16 high - 32)
    """
    low = _flat(_planes(b[:, :128].reshape(-1, 2, 64), 4, 2))
    codes = low + 16 * _flat(_planes(b[:, 128:192].reshape(-1, 2, 32), 2, 4))
    return _scaled(_half(_u16(b[:, 208:])) * _i8(b[:, 192:208]), codes.astype(mx.float32) - 32)


# IQ formats: codebooks of values, or of vectors (grids)


def _iq4_nl(b: mx.array) -> mx.array:
    """0 fp16 d; 2 u8 qs[16], the low nibbles of weights 0-15, the high ones of 16-31.   w = d IQ4_VALUES[nibble]"""
    return _scaled(_d(b), mx.array(IQ4_VALUES)[_planes(b[:, 2:], 4, 2)])


def _iq4_xs(b: mx.array) -> mx.array:
    """0 fp16 d; 2 u2 high[8]; 4 u4 low[8]; 8 u8 qs[8][16], each run of 32 as in IQ4_NL.

    w = d (low + 16 high - 32) IQ4_VALUES[nibble]
    """
    scale = _flat(_fields(b[:, 4:8], 4, 2)) + 16 * _flat(_fields(b[:, 2:4], 2, 4))
    scale = _d(b) * (scale.astype(mx.float32) - 32)
    return _scaled(scale, mx.array(IQ4_VALUES)[_planes(b[:, 8:].reshape(-1, 8, 16), 4, 2)])


def _vectors(grid: str, index: mx.array) -> mx.array:
    """Rows of a grid: index [...] -> [..., width] float32."""
    return mx.array(grid_array(grid))[index].astype(mx.float32)


def _signs(bits: mx.array) -> mx.array:
    """Eight sign bits per word, lowest first: [...] -> [..., 8], +1 for a clear bit, -1 for a set one, float32."""
    return 1 - 2 * _fields(bits, 1, 8).astype(mx.float32)


def _parity_signs(bits: mx.array) -> mx.array:
    """As ``_signs`` from 7 stored bits; the eighth makes the number of set bits even."""
    return _signs(bits | (_fields(bits, 1, 7).sum(axis=-1) % 2 << 7))


def _signed(scale: mx.array, vectors: mx.array, signs: mx.array) -> mx.array:
    """scale [N, S] * vectors * signs, of any shapes [N, ...] that hold the block's weights in order."""
    return _scaled(scale, _flat(vectors) * _flat(signs))


def _iq2_xxs(b: mx.array) -> mx.array:
    """0 fp16 d; 2 per 32 weights: u8 index[4], u7 sign[4] (``_parity_signs``), u4 scale.

    w = d (scale + 1/2) / 4 grid[index] sign
    """
    groups = b[:, 2:].reshape(-1, 8, 8)
    word = _u32(groups[..., 4:])[..., 0]
    scale = _d(b) * ((word >> 28).astype(mx.float32) + 0.5) * 0.25
    return _signed(scale, _vectors("IQ2_XXS", groups[..., :4]), _parity_signs(_fields(word, 7, 4)))


def _nibble_scales(b: mx.array, d: mx.array) -> mx.array:
    """d [N, 1], u4 scale[2 m] in b [N, m] -> d (scale + 1/2) / 4, [N, 2 m] float32, one per 16 weights."""
    return d * (_flat(_fields(b, 4, 2)).astype(mx.float32) + 0.5) * 0.25


def _iq2_xs(b: mx.array) -> mx.array:
    """0 fp16 d; 2 per 8 weights: u9 index, u7 sign (``_parity_signs``); 66 u4 scale[16].

    w = d (scale + 1/2) / 4 grid[index] sign
    """
    words = _u16(b[:, 2:66])
    scale = _nibble_scales(b[:, 66:], _d(b))
    return _signed(scale, _vectors("IQ2_XS", words & 511), _parity_signs(words >> 9))


def _iq2_s(b: mx.array) -> mx.array:
    """0 fp16 d; 2 u8 low[32]; 34 u8 sign[32], 8 bits each; 66 u2 high[32]; 74 u4 scale[16].

    w = d (scale + 1/2) / 4 grid[low + 256 high] sign
    """
    index = b[:, 2:34] + 256 * _flat(_fields(b[:, 66:74], 2, 4))
    scale = _nibble_scales(b[:, 74:], _d(b))
    return _signed(scale, _vectors("IQ2_S", index), _signs(b[:, 34:66]))


def _iq3_xxs(b: mx.array) -> mx.array:
    """0 fp16 d; 2 u8 index[64]; 66 per 32 weights: u7 sign[4] (``_parity_signs``), u4 scale.

    w = d (scale + 1/2) / 2 grid[index] sign
    """
    words = _u32(b[:, 66:])
    scale = _d(b) * ((words >> 28).astype(mx.float32) + 0.5) * 0.5
    return _signed(scale, _vectors("IQ3_XXS", b[:, 2:66]), _parity_signs(_fields(words, 7, 4)))


def _iq3_s(b: mx.array) -> mx.array:
    """0 fp16 d; 2 u8 low[64]; 66 u1 high[64]; 74 u8 sign[32], 8 bits each; 106 u4 scale[8], one per 32 weights.

    w = d (2 scale + 1) grid[low + 256 high] sign
    """
    index = b[:, 2:66] + 256 * _flat(_fields(b[:, 66:74], 1, 8))
    scale = _d(b) * (2 * _flat(_fields(b[:, 106:], 4, 2)) + 1)
    return _signed(scale, _vectors("IQ3_S", index), _signs(b[:, 74:106]))


def _shifted(scale: mx.array, index: mx.array, negative: mx.array) -> mx.array:
    """The IQ1 formula, scale (grid[index] + 1/8 or - 1/8): scale [N, S], index and negative (0 or 1) [N, 32]."""
    shift = 0.125 - 0.25 * negative.astype(mx.float32)
    return _scaled(scale, _vectors("IQ1_S", index) + shift[..., None])


def _iq1_s(b: mx.array) -> mx.array:
    """0 fp16 d; 2 u8 low[32]; 34 per 32 weights: u3 high[4], u3 scale, u1 negative.

    w = d (2 scale + 1) (grid[low + 256 high] + (negative ? -1/8 : 1/8))
    """
    words = _u16(b[:, 34:])
    scale = _d(b) * (2 * (words >> 12 & 7) + 1)
    index = b[:, 2:34] + 256 * _flat(_fields(words, 3, 4))
    return _shifted(scale, index, mx.repeat(words >> 15, 4, axis=1))


def _iq1_m(b: mx.array) -> mx.array:
    """0 u8 low[32]; 32 per 8 weights: u3 high, u1 negative; 48 u16 x[4], each u3 scale[4] (one per 16 weights) and a
    nibble of the fp16 d, lowest nibble first.

    w = d (2 scale + 1) (grid[low + 256 high] + (negative ? -1/8 : 1/8))
    """
    words, nibbles = _u16(b[:, 48:]), _flat(_fields(b[:, 32:48], 4, 2))
    d = _half(((words >> 12) << mx.array([0, 4, 8, 12], dtype=mx.uint32)).sum(axis=1, keepdims=True))
    scale = d * (2 * _flat(_fields(words, 3, 4)) + 1)
    return _shifted(scale, b[:, :32] + 256 * (nibbles & 7), nibbles >> 3)


_DECODERS: dict[str, Callable[[mx.array], mx.array]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "F8_E4M3": _f8_e4m3,
    "Q2_0": _q2_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}
