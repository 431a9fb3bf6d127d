"""Gated residual (hyper-connections): residual streams mixed into a block's input, and its output injected back."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_moe.config import ModelConfig
from mlx_moe.models.layers import Linear, RMSNorm


class GatedResidual(nn.Module):
    """x, beta = mix(s): the block's input from the S streams, and how much of its output each stream takes.

    n = RMSNorm of each stream; m = sigmoid(W_up silu(W_down n / S)); x = mean over streams of m * n;
    beta = 2 sigmoid(W_inject n / S). ("Hyper-Connections", arXiv 2409.19606, in this model's low-rank gated form.)
    """

    def __init__(self, config: ModelConfig, inject: bool = True):
        super().__init__()
        width = config.hc_count * config.hidden_size
        self._streams = config.hc_count
        self.hc_norm = RMSNorm(width, config.rms_norm_eps, groups=config.hc_count)
        self.input_mix_weight_down = Linear(width, config.hc_lowrank)
        self.input_mix_weight_up = Linear(config.hc_lowrank, width)
        if inject:
            self.block_inject_weight = Linear(width, config.hc_count)

    def __call__(self, s: mx.array) -> mx.array:
        """s [B, T, S * H] -> the mixed input x [B, T, H]."""
        return self._mix(self.hc_norm(s))

    def split(self, s: mx.array) -> tuple[mx.array, mx.array]:
        """s [B, T, S * H] -> x [B, T, H] and beta [B, T, S]."""
        normed = self.hc_norm(s)
        return self._mix(normed), 2 * mx.sigmoid(self.block_inject_weight(normed) / self._streams)

    def _mix(self, normed: mx.array) -> mx.array:
        gate = nn.silu(self.input_mix_weight_down(normed) / self._streams)
        gated = mx.sigmoid(self.input_mix_weight_up(gate)) * normed
        return gated.reshape(*normed.shape[:-1], self._streams, -1).mean(axis=-2)


def inject(s: mx.array, beta: mx.array, y: mx.array) -> mx.array:
    """s + beta outer y: s [B, T, S * H], beta [B, T, S], y [B, T, H] -> [B, T, S * H]."""
    return s + (beta[..., None] * y[..., None, :]).reshape(s.shape)
