"""The mixture-of-experts block: router, shared expert, and routed experts through the expert source."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_moe.config import ModelConfig
from mlx_moe.models.layers import WINDOW, Linear
from mlx_moe.models.qwen4_exp.sources import ExpertSource


class SharedExpert(nn.Module):
    """down(silu(gate x) * (up x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, width = config.hidden_size, config.shared_expert_intermediate_size
        self.gate_proj = Linear(hidden, width)
        self.up_proj = Linear(hidden, width)
        self.down_proj = Linear(width, hidden)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Routed experts plus a shared expert that has a sigmoid gate."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self._layer = layer
        self.gate = Linear(config.hidden_size, config.num_experts)
        self.shared_expert = SharedExpert(config)
        self.shared_expert_gate = Linear(config.hidden_size, 1)

    def __call__(self, x: mx.array, experts: ExpertSource) -> mx.array:
        """x [B, T, H] -> [B, T, H]."""
        B, T, H = x.shape
        logits = self.gate(x).astype(mx.float32).reshape(B * T, -1)
        shared = mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        phase = "decode" if T <= WINDOW else "prefill"
        y = experts.moe(self._layer, x.reshape(B * T, H), logits, shared.reshape(B * T, H), phase)
        return y.reshape(B, T, H)
