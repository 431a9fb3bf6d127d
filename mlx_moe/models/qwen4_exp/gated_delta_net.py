"""Gated DeltaNet: the linear-attention mixer. The layer between its projections is the op ``gdn_step``."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from custom_kernels.gdn_step import Inputs, Spec, Weights, gdn_prefill, gdn_step
from mlx_moe.cache import WINDOW, LinearCache
from mlx_moe.config import ModelConfig
from mlx_moe.models.layers import Linear


def gdn_spec(config: ModelConfig) -> Spec:
    """The op's sizes and choices."""
    return Spec(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        dk=config.linear_key_head_dim,
        dv=config.linear_value_head_dim,
        gate=config.output_gate_type,
        eps=config.rms_norm_eps,
        tiled=config.linear_value_heads_tiled,
    )


class GatedDeltaNet(nn.Module):
    """Projections in, a causal convolution and the gated delta rule in float32, a gated norm, a projection out."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self._spec = gdn_spec(config)
        hidden, heads = config.hidden_size, config.linear_num_value_heads
        self.in_proj_qkv = Linear(hidden, config.conv_dim)
        self.in_proj_z = Linear(hidden, heads * config.linear_value_head_dim)
        self.in_proj_b = Linear(hidden, heads)
        self.in_proj_a = Linear(hidden, heads)
        self.conv1d = nn.Module()
        self.conv1d.weight = mx.zeros((config.conv_dim, config.linear_conv_kernel_dim))
        self.A_log = mx.zeros((heads,))
        self.dt_bias = mx.zeros((heads,))
        self.norm = nn.Module()
        self.norm.weight = mx.ones((config.linear_value_head_dim,))  # the only norm that files store as it is
        self.out_proj = Linear(heads * config.linear_value_head_dim, hidden)

    def __call__(self, x: mx.array, cache: LinearCache) -> mx.array:
        """x [B, T, H] -> [B, T, H]; advances the cache by T tokens."""
        qkv = self.in_proj_qkv(x)
        history, state = cache.start(qkv, (self._spec.value_heads, self._spec.dv, self._spec.dk))
        inputs = Inputs(qkv, self.in_proj_z(x), self.in_proj_a(x), self.in_proj_b(x), history, state)
        weights = Weights(self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight)
        if x.shape[1] <= WINDOW:
            out, state, log = gdn_step(inputs, weights, self._spec)
            cache.advance(qkv, state, log)
        else:
            out, state = gdn_prefill(inputs, weights, self._spec)
            cache.advance(qkv, state)
        return self.out_proj(out)
