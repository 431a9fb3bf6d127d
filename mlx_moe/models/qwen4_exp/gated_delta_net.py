"""Gated DeltaNet: the linear-attention mixer."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from custom_kernels.gdn_step import gdn_prefill, gdn_step
from mlx_moe.cache import LinearCache
from mlx_moe.config import ModelConfig
from mlx_moe.models.layers import WINDOW, Linear, causal_conv

_GATES = {"sigmoid": mx.sigmoid, "silu": nn.silu}
_L2_EPS = 1e-6


class GatedRMSNorm(nn.Module):
    """RMSNorm(o) * w * act(z) over each head; the only norm whose weight is not zero-centred in the files."""

    def __init__(self, dims: int, eps: float, gate: str):
        super().__init__()
        self.weight = mx.ones((dims,))
        self._eps = eps
        self._gate = _GATES[gate]

    def __call__(self, o: mx.array, z: mx.array) -> mx.array:
        """o [B, T, H, Dv] float32, z of the same shape -> z's type."""
        normed = mx.fast.rms_norm(o, self.weight.astype(mx.float32), self._eps)
        return (normed * self._gate(z.astype(mx.float32))).astype(z.dtype)


class GatedDeltaNet(nn.Module):
    """conv4 and silu over [q | k | v], L2-normalised q and k, the gated delta rule in float32, a gated norm.

    Value head j uses key head j // (value heads / key heads).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self._key_heads, self._value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self._dk, self._dv = config.linear_key_head_dim, config.linear_value_head_dim
        hidden, width = config.hidden_size, config.linear_num_value_heads * config.linear_value_head_dim
        self.in_proj_qkv = Linear(hidden, config.conv_dim)
        self.in_proj_z = Linear(hidden, width)
        self.in_proj_b = Linear(hidden, config.linear_num_value_heads)
        self.in_proj_a = Linear(hidden, config.linear_num_value_heads)
        self.conv1d = nn.Module()
        self.conv1d.weight = mx.zeros((config.conv_dim, config.linear_conv_kernel_dim))
        self.A_log = mx.zeros((config.linear_num_value_heads,))
        self.dt_bias = mx.zeros((config.linear_num_value_heads,))
        self.norm = GatedRMSNorm(config.linear_value_head_dim, config.rms_norm_eps, config.output_gate_type)
        self.out_proj = Linear(width, hidden)

    def __call__(self, x: mx.array, cache: LinearCache) -> mx.array:
        """x [B, T, H] -> [B, T, H]; advances the cache by T tokens."""
        B, T, _ = x.shape
        inputs = self.in_proj_qkv(x)
        history, state = cache.start(inputs, (self._value_heads, self._dv, self._dk))
        q, k, v = self._heads(nn.silu(causal_conv(inputs, history, self.conv1d.weight)))
        g, beta = self._gates(x)
        if T <= WINDOW:
            out, state, log = gdn_step(q, k, v, g, beta, state)
            cache.advance(inputs, state, log)
        else:
            out, state = gdn_prefill(q, k, v, g, beta, state)
            cache.advance(inputs, state)
        z = self.in_proj_z(x).reshape(B, T, self._value_heads, self._dv)
        return self.out_proj(self.norm(out, z).reshape(B, T, -1))

    def _heads(self, qkv: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """[B, T, C] -> q, k [B, T, Hv, Dk], normalised and repeated, and v [B, T, Hv, Dv]; float32."""
        B, T, _ = qkv.shape
        keys = self._key_heads * self._dk
        q, k, v = mx.split(qkv.astype(mx.float32), [keys, 2 * keys], axis=-1)
        repeat = self._value_heads // self._key_heads
        q, k = (mx.repeat(_unit(p.reshape(B, T, self._key_heads, self._dk)), repeat, axis=2) for p in (q, k))
        return q * self._dk**-0.5, k, v.reshape(B, T, self._value_heads, self._dv)

    def _gates(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Log decay g and write strength beta, [B, T, Hv] float32."""
        beta = mx.sigmoid(self.in_proj_b(x).astype(mx.float32))
        rate = self.in_proj_a(x).astype(mx.float32) + self.dt_bias.astype(mx.float32)
        return -mx.exp(self.A_log.astype(mx.float32)) * nn.softplus(rate), beta


def _unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + _L2_EPS)
