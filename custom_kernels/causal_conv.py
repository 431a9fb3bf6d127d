"""The depthwise causal convolution that recurrent blocks share, in mx ops."""

from __future__ import annotations

import mlx.core as mx


def causal_conv(x: mx.array, history: mx.array, weight: mx.array, dilation: int = 1) -> mx.array:
    """Convolve along time.

    Args:
        x: [B, T, C]. history: [B, (K - 1) * dilation, C], the positions before x (zeros at the start).
        weight: [C, K]; weight[:, K - 1] multiplies the present position.

    Returns:
        [B, T, C] float32, summed from the oldest tap to the present one.
    """
    padded = mx.concatenate([history, x], axis=1).astype(mx.float32)
    taps = weight.astype(mx.float32)
    T = x.shape[1]
    out = padded[:, :T] * taps[:, 0]
    for i in range(1, weight.shape[1]):
        out = out + padded[:, i * dilation : i * dilation + T] * taps[:, i]
    return out
