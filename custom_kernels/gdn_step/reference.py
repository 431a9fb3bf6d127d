"""One Gated DeltaNet layer between its projections, in mx ops: what ``gdn_step`` and ``gdn_prefill`` compute.

Causal convolution and silu over [q | k | v]; q and k divided by their L2 norm, q by sqrt(Dk) too; decay
g = -exp(A_log) softplus(a + dt_bias) and write strength beta = sigmoid(b) in float32; the gated delta rule (rule.py);
RMSNorm over each head, times its weight, times the activation of z.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from custom_kernels.causal_conv import causal_conv
from custom_kernels.gdn_step.rule import chunked_delta_rule, naive_delta_rule, replay

L2_EPS = 1e-6


@dataclass(frozen=True)
class Spec:
    """Sizes and choices of a layer."""

    key_heads: int
    value_heads: int
    dk: int
    dv: int
    gate: str = "sigmoid"  # activation of z: "sigmoid" or "silu"
    tiled: bool = False  # value head j uses key head j mod key_heads (GGUF order) instead of j // (value / key heads)
    eps: float = 1e-6

    @property
    def channels(self) -> int:
        """Width of [q | k | v]."""
        return 2 * self.key_heads * self.dk + self.value_heads * self.dv


class Inputs(NamedTuple):
    """A window's projections and the states before it."""

    qkv: mx.array  # [B, T, channels]
    z: mx.array  # [B, T, Hv * Dv]
    a: mx.array  # [B, T, Hv]
    b: mx.array  # [B, T, Hv]
    history: mx.array  # [B, K - 1, channels], the convolution's inputs before qkv; zeros at the start
    state: mx.array  # [B, Hv, Dv, Dk] float32


class Weights(NamedTuple):
    """A layer's small weights."""

    conv: mx.array  # [channels, K]; the last tap multiplies the present position
    a_log: mx.array  # [Hv]
    dt_bias: mx.array  # [Hv]
    norm: mx.array  # [Dv]


class StepLog(NamedTuple):
    """What replaying a prefix of a window needs, float32."""

    k: mx.array  # [B, T, Hv, Dk], normalised, each value head's own
    delta: mx.array  # [B, T, Hv, Dv]
    g: mx.array  # [B, T, Hv]


def naive_gdn_step(inputs: Inputs, weights: Weights, spec: Spec) -> tuple[mx.array, mx.array, StepLog]:
    """A short window, token by token; a token's result does not depend on the window's length.

    Returns:
        outputs [B, T, Hv * Dv] in z's type, the last state [B, Hv, Dv, Dk] float32, and the log of the window.
    """
    q, k, v, g, beta = _prepare(inputs, weights, spec)
    out, state, deltas = naive_delta_rule(q, k, v, g, beta, inputs.state)
    return _gated_norm(out, inputs.z, weights.norm, spec), state, StepLog(k, deltas, g)


def naive_gdn_commit(state: mx.array, log: StepLog, keep: int) -> mx.array:
    """The state after the first ``keep`` tokens of a logged window, bit-equal to having stepped only those.

    Args:
        state: [B, Hv, Dv, Dk] float32, before the window.
        log: what ``naive_gdn_step`` returned.
        keep: tokens to keep, 0 to T.
    """
    return replay(state, log.k, log.delta, log.g, keep)


def gdn_prefill(inputs: Inputs, weights: Weights, spec: Spec) -> tuple[mx.array, mx.array]:
    """The same for many tokens at once, by chunks; agrees with stepping up to rounding.

    Returns:
        outputs [B, T, Hv * Dv] in z's type and the last state.
    """
    q, k, v, g, beta = _prepare(inputs, weights, spec)
    out, state = chunked_delta_rule(q, k, v, g, beta, inputs.state)
    return _gated_norm(out, inputs.z, weights.norm, spec), state


def _prepare(inputs: Inputs, weights: Weights, spec: Spec) -> tuple[mx.array, ...]:
    """q, k [B, T, Hv, Dk], v [B, T, Hv, Dv], g and beta [B, T, Hv]; float32."""
    B, T, _ = inputs.qkv.shape
    x = causal_conv(inputs.qkv, inputs.history, weights.conv)
    x = x * mx.sigmoid(x)
    keys = spec.key_heads * spec.dk
    q, k, v = mx.split(x, [keys, 2 * keys], axis=-1)
    q, k = (_spread(_unit(part.reshape(B, T, spec.key_heads, spec.dk)), spec) for part in (q, k))
    rate = mx.logaddexp(inputs.a.astype(mx.float32) + weights.dt_bias.astype(mx.float32), 0.0)
    g = -mx.exp(weights.a_log.astype(mx.float32)) * rate
    beta = mx.sigmoid(inputs.b.astype(mx.float32))
    return q * spec.dk**-0.5, k, v.reshape(B, T, spec.value_heads, spec.dv), g, beta


def _unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + L2_EPS)


def _spread(x: mx.array, spec: Spec) -> mx.array:
    """[B, T, Hk, D] -> [B, T, Hv, D]: every value head's key head."""
    ratio = spec.value_heads // spec.key_heads
    return mx.tile(x, (1, 1, ratio, 1)) if spec.tiled else mx.repeat(x, ratio, axis=2)


def _gated_norm(o: mx.array, z: mx.array, weight: mx.array, spec: Spec) -> mx.array:
    """RMSNorm(o) w act(z) per head: o [B, T, Hv, Dv] float32 -> [B, T, Hv * Dv] in z's type."""
    normed = mx.fast.rms_norm(o, weight.astype(mx.float32), spec.eps).reshape(z.shape)
    wide = z.astype(mx.float32)
    gate = mx.sigmoid(wide)
    return (normed * (gate if spec.gate == "sigmoid" else wide * gate)).astype(z.dtype)
