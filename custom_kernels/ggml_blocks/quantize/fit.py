"""What the quantisers share: least-squares scales, fp16 scales that are always finite, bytes of words and of fields."""

from __future__ import annotations

import mlx.core as mx

TINY = 2.0**-40
"""Weights below this are zero in every format: the smallest fp16 is 2^-24, and no format divides it further."""
HALF_MAX = 65504.0
"""The largest finite fp16."""


def fit(hx: mx.array, h: mx.array, v: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The scale of levels v that has the least error sum(h (x - scale v)^2) over the last axis.

    Args:
        hx: [N, m] float32, importances times weights.
        h: [N, m] float32, importances.
        v: [N, m] float32.

    Returns:
        sum(h x v) / sum(h v v), then sum(h x v)^2 / sum(h v v), what that scale takes off the error of all zeros, and
        sum(h v v), by which the error grows for each squared unit that the scale is off: [N, 1] float32 each.
    """
    hv = h * v
    over = (hx * v).sum(axis=-1, keepdims=True)
    under = mx.maximum((hv * v).sum(axis=-1, keepdims=True), TINY)
    return over / under, over * over / under, under


def half(scale: mx.array) -> mx.array:
    """The nearest fp16 values that are finite, as float32; any shape."""
    return mx.clip(scale, -HALF_MAX, HALF_MAX).astype(mx.float16).astype(mx.float32)


def half_bytes(scale: mx.array) -> mx.array:
    """[N, 1] float32 that fp16 holds -> [N, 2] uint8, little-endian."""
    return scale.astype(mx.float16).view(mx.uint8)


def word_bytes(words: mx.array, size: int) -> mx.array:
    """The lowest ``size`` bytes of each word: [..., m] uint32 -> [..., m * size] uint8, little-endian."""
    split = (words[..., None] >> (8 * mx.arange(size, dtype=mx.uint32))) & 255
    return split.astype(mx.uint8).reshape(*words.shape[:-1], -1)


def join(fields: mx.array, width: int, count: int) -> mx.array:
    """Each ``count`` fields of ``width`` bits to one word, lowest first: [N, m * count] uint32 -> [N, m] uint32."""
    fields = fields.reshape(fields.shape[0], -1, count)
    return (fields << (width * mx.arange(count, dtype=mx.uint32))).sum(axis=-1)


def reciprocal(x: mx.array) -> mx.array:
    """1 / x where x is at least ``TINY`` in magnitude, else 0."""
    return mx.where(mx.abs(x) >= TINY, 1 / x, 0)
