"""Per-layer embedding: hashed n-gram rows injected into every residual stream."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from custom_kernels.causal_conv import causal_conv
from mlx_moe.cache import LinearCache
from mlx_moe.config import ModelConfig
from mlx_moe.models.layers import Linear, RMSNorm
from mlx_moe.models.qwen4_exp.sources import RowSource


class PLE(nn.Module):
    """out = v + silu(dilated conv(RMSNorm(v))), v = sigmoid(gate) * W_value e, per stream.

    e are the token's n-gram rows, joined; gate = sign(r) sqrt(max(|r|, 1e-6)) with
    r = RMSNorm(W_key e) . RMSNorm(s) / sqrt(hidden).
    """

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        width = config.hc_count * config.hidden_size
        self.index, self._streams, self._dilation = index, config.hc_count, config.ngram_size
        self._scale = config.hidden_size**-0.5
        self.key_proj = Linear(config.ple_embed_dim, width)
        self.value_proj = Linear(config.ple_embed_dim, config.hidden_size)
        for name in ("norm_key", "norm_query", "norm_conv"):
            setattr(self, name, RMSNorm(width, config.rms_norm_eps, groups=config.hc_count))
        self.conv1d = nn.Module()
        self.conv1d.weight = mx.zeros((width, config.ple_conv_kernel_size))

    def __call__(self, s: mx.array, history: mx.array, cache: LinearCache, rows: RowSource) -> mx.array:
        """What to add to the streams s [B, T, S * H]; history: [B, n - 1 + T] ids, the tokens' own last."""
        e = rows.rows(self.index, history, s.shape[1]).astype(s.dtype)
        parts = (*s.shape[:-1], self._streams, -1)
        key, query = self.norm_key(self.key_proj(e)), self.norm_query(s)
        gate = (key * query).reshape(parts).sum(axis=-1, keepdims=True) * self._scale
        gate = mx.sign(gate) * mx.sqrt(mx.maximum(mx.abs(gate), 1e-6))
        value = (mx.sigmoid(gate) * self.value_proj(e)[..., None, :]).reshape(s.shape)
        normed = self.norm_conv(value)
        mixed = causal_conv(normed, cache.ple_conv_history(normed), self.conv1d.weight, self._dilation)
        return value + nn.silu(mixed.astype(s.dtype))
