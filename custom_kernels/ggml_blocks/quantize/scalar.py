"""Quantisers of the formats with one code per weight: Q8_0, Q2_0 and IQ4_NL.

Q8_0 is a rounding. Q2_0 and IQ4_NL, w = d level[code], search the scale: a candidate c takes the levels v nearest to
x / c, and the best scale for these is the least-squares one,

    d = sum(h x v) / sum(h v v),   which takes sum(h x v)^2 / sum(h v v) off the error sum(h (x - d v)^2).

The candidate that takes most wins; h are the importances. Levels are not symmetric, so candidates have both signs.

Encoders take x [N, block] float32 within the format's range, h [N, block] float32 > 0, and give [N, block_bytes] uint8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx
import numpy as np

from custom_kernels.ggml_blocks.quantize.fit import fit, half, half_bytes, join, reciprocal
from custom_kernels.ggml_blocks.tables import IQ4_VALUES

_MARGIN = 1 + 1e-5
"""A later candidate must be better by this factor, so that rounding does not choose between equal ones."""


def encode_q8_0(x: mx.array, h: mx.array) -> mx.array:
    """ggml's rounding, d = max|x| / 127 and codes x / d, halves away from zero; importances change nothing.

    As in ggml the codes are those of d before it is rounded to fp16; but where fp16 has it as a subnormal, d is rounded
    up, so that no code saturates, and the codes are those of the rounded d.
    """
    exact = mx.abs(x).max(axis=-1, keepdims=True) / 127
    d = half(exact)
    rough = d < 2.0**-14
    d = mx.where(rough & (d < exact), d + 2.0**-24, d)
    scaled = x * reciprocal(mx.where(rough, d, exact))
    size = mx.abs(scaled)
    whole = mx.floor(size)
    codes = mx.minimum(whole + (size - whole >= 0.5), 127) * mx.sign(scaled)
    return mx.concatenate([half_bytes(d), codes.astype(mx.int8).view(mx.uint8)], axis=-1)


def encode_q2_0(x: mx.array, h: mx.array) -> mx.array:
    """w = d (code - 1), 64 weights."""
    d = _search(x, h, _Q2_CANDIDATES, _q2_levels)
    codes = (_q2_levels(x * reciprocal(d)) + 1).astype(mx.uint32)
    return mx.concatenate([half_bytes(d), join(codes, 2, 4).astype(mx.uint8)], axis=-1)


def encode_iq4_nl(x: mx.array, h: mx.array) -> mx.array:
    """w = d IQ4_VALUES[code], 32 weights."""
    d = _search(x, h, _IQ4_CANDIDATES, _iq4_levels)
    codes = _iq4_table("codes")[_iq4_cell(x * reciprocal(d))].reshape(-1, 2, 16)
    return mx.concatenate([half_bytes(d), (codes[:, 0] | (codes[:, 1] << 4)).astype(mx.uint8)], axis=-1)


def _search(x: mx.array, h: mx.array, candidates: list[float], levels: Callable[[mx.array], mx.array]) -> mx.array:
    """The scale of each block: [N, 1] float32, which fp16 holds.

    Candidates are in units of levels per largest weight: with c, the weight that is largest in magnitude becomes c.
    """
    at = mx.argmax(mx.abs(x), axis=-1, keepdims=True)
    peak = mx.take_along_axis(x, at, axis=-1)
    unit = x * reciprocal(peak)
    hx = h * unit
    best, gain = mx.zeros_like(peak), mx.zeros_like(peak)
    for c in candidates:
        scale, found, _ = fit(hx, h, levels(unit * c))
        better = found > gain * _MARGIN
        best, gain = mx.where(better, scale, best), mx.where(better, found, gain)
    d = half(best * peak)
    return half(fit(h * x, h, levels(x * reciprocal(d)))[0])


def _q2_levels(scaled: mx.array) -> mx.array:
    return mx.clip(mx.round(scaled), -1, 2)


def _iq4_levels(scaled: mx.array) -> mx.array:
    return _iq4_table("levels")[_iq4_cell(scaled)]


def _iq4_cell(scaled: mx.array) -> mx.array:
    """All the levels' midpoints are whole or half, so cells of 1/2 decide which is nearest: 0 to 511, uint32."""
    return mx.clip(2 * scaled + 256, 0, 511).astype(mx.uint32)


@cache
def _iq4_table(kind: str) -> mx.array:
    """By cell: the nearest level (float32) or its code (uint32)."""
    values = np.array(IQ4_VALUES, dtype=np.float32)
    codes = np.abs((np.arange(512) - 255.5)[:, None] / 2 - values).argmin(axis=1)
    return mx.array(values[codes]) if kind == "levels" else mx.array(codes.astype(np.uint32))


# What decoded blocks hold is found exactly, as the largest weight of a block is one of the levels (all but the smallest
# of IQ4_NL are here); the others lie where Gaussian and heavy-tailed blocks have their best scales.
_Q2_CANDIDATES = [sign * c for c in (1.0, 2.0, 1.5, 2.5, 3.0, 3.6, 4.5, 6.5, 10.0) for sign in (1, -1)]
_IQ4_CANDIDATES = [*(float(v) for v in IQ4_VALUES if abs(v) >= 38), -94.0, -115.0, -138.0, 79.0, 101.0, 123.0]
