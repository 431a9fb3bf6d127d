"""Gated DeltaNet: the rule and the whole op against plain NumPy, chunks against steps, logs against states."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from custom_kernels import dispatch
from custom_kernels import gdn_step as entry
from custom_kernels.gdn_step import Inputs, Spec, Weights, gdn_commit, gdn_prefill, gdn_step, supports
from custom_kernels.gdn_step.rule import chunked_delta_rule, naive_delta_rule


def _rule_inputs(B: int, T: int, H: int, Dk: int, Dv: int, seed: int = 0, same_keys: bool = False):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, B, T, H, Dk))
    if same_keys:
        k[:] = k[:, :1]
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((B, T, H, Dv))
    g = -rng.exponential(0.05 if same_keys else 1.0, (B, T, H))
    beta = np.full((B, T, H), 0.99) if same_keys else rng.random((B, T, H))
    state = rng.standard_normal((B, H, Dv, Dk))
    return [x.astype(np.float32) for x in (q, k, v, g, beta, state)]


def _plain_rule(q, k, v, g, beta, state):
    """One head and token at a time, float64."""
    q, k, v, g, beta, state = (x.astype(np.float64) for x in (q, k, v, g, beta, state))
    out = np.zeros_like(v)
    for b, t, h in np.ndindex(*g.shape):
        S = state[b, h] * np.exp(g[b, t, h])
        S = S + np.outer(beta[b, t, h] * (v[b, t, h] - S @ k[b, t, h]), k[b, t, h])
        state[b, h], out[b, t, h] = S, S @ q[b, t, h]
    return out, state


@pytest.mark.parametrize("shape", [(1, 1, 1, 8, 8), (2, 8, 3, 16, 24), (1, 5, 4, 24, 8)])
def test_steps_are_the_formula(shape):
    arrays = _rule_inputs(*shape)
    want, last = _plain_rule(*arrays)
    out, state, _ = naive_delta_rule(*map(mx.array, arrays))
    assert np.allclose(np.array(out), want, atol=1e-5)
    assert np.allclose(np.array(state), last, atol=1e-5)


@pytest.mark.parametrize("T", [1, 9, 63, 64, 65, 200])
@pytest.mark.parametrize("same_keys", [False, True])
def test_chunks_are_the_formula(T, same_keys):
    """Also with one key throughout, no decay and full writes, where a power series of the inverse would explode."""
    arrays = _rule_inputs(2, T, 3, 16, 24, seed=T, same_keys=same_keys)
    want, last = _plain_rule(*arrays)
    out, state = chunked_delta_rule(*map(mx.array, arrays))
    scale = np.abs(want).max()
    assert np.abs(np.array(out) - want).max() < 2e-5 * scale, f"outputs, {T} tokens"
    assert np.abs(np.array(state) - last).max() < 2e-5 * np.abs(last).max(), f"state, {T} tokens"


def test_strong_decay_does_not_overflow():
    q, k, v, g, beta, state = _rule_inputs(1, 130, 2, 8, 8)
    out, last = chunked_delta_rule(*map(mx.array, (q, k, v, g * 200, beta, state)))
    assert np.isfinite(np.array(out)).all() and np.isfinite(np.array(last)).all()


SPECS = [
    Spec(key_heads=2, value_heads=6, dk=32, dv=32),
    Spec(key_heads=2, value_heads=6, dk=32, dv=32, tiled=True),
    Spec(key_heads=1, value_heads=3, dk=24, dv=40, gate="silu"),
    Spec(key_heads=4, value_heads=4, dk=128, dv=128),
    Spec(key_heads=2, value_heads=4, dk=40, dv=16, gate="silu", tiled=True, eps=1e-5),
]


def op_inputs(spec: Spec, B: int, T: int, taps: int = 4, seed: int = 0, dtype: mx.Dtype = mx.float32):
    """Random inputs and weights of the op; activations in ``dtype``."""
    rng = np.random.default_rng(seed)
    hv, width = spec.value_heads, spec.value_heads * spec.dv

    def draw(*shape: int, scale: float = 1.0, kind: mx.Dtype = dtype) -> mx.array:
        return mx.array((scale * rng.standard_normal(shape)).astype(np.float32)).astype(kind)

    inputs = Inputs(
        qkv=draw(B, T, spec.channels),
        z=draw(B, T, width),
        a=draw(B, T, hv),
        b=draw(B, T, hv),
        history=draw(B, taps - 1, spec.channels),
        state=draw(B, hv, spec.dv, spec.dk, kind=mx.float32),
    )
    weights = Weights(
        conv=draw(spec.channels, taps, scale=0.4),
        a_log=draw(hv, kind=mx.float32),
        dt_bias=draw(hv, kind=mx.float32),
        norm=1 + draw(spec.dv, scale=0.2, kind=mx.float32),
    )
    return inputs, weights


def plain_op(inputs: Inputs, weights: Weights, spec: Spec):
    """The op in NumPy, float64: outputs [B, T, Hv * Dv] and the last state."""
    f = {
        k: np.array(v.astype(mx.float32), dtype=np.float64)
        for k, v in {**inputs._asdict(), **weights._asdict()}.items()
    }
    B, T, _ = f["qkv"].shape
    padded = np.concatenate([f["history"], f["qkv"]], axis=1)
    K = f["conv"].shape[1]
    x = sum(padded[:, i : i + T] * f["conv"][:, i] for i in range(K))
    x = x / (1 + np.exp(-x))
    keys = spec.key_heads * spec.dk
    q, k, v = np.split(x, [keys, 2 * keys], axis=-1)
    ratio = spec.value_heads // spec.key_heads
    of = [j % spec.key_heads if spec.tiled else j // ratio for j in range(spec.value_heads)]
    q, k = (p.reshape(B, T, spec.key_heads, spec.dk) for p in (q, k))
    q, k = ((p / np.sqrt((p * p).sum(-1, keepdims=True) + 1e-6))[:, :, of] for p in (q, k))
    g = -np.exp(f["a_log"]) * np.log1p(np.exp(f["a"] + f["dt_bias"]))
    beta = 1 / (1 + np.exp(-f["b"]))
    v = v.reshape(B, T, spec.value_heads, spec.dv)
    o, state = _plain_rule(q / spec.dk**0.5, k, v, g, beta, f["state"])
    o = o / np.sqrt((o * o).mean(-1, keepdims=True) + spec.eps) * f["norm"]
    gate = 1 / (1 + np.exp(-f["z"]))
    gate = gate if spec.gate == "sigmoid" else gate * f["z"]
    return o.reshape(B, T, -1) * gate, state


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("T", [1, 3, 8])
def test_the_whole_step(spec, T):
    inputs, weights = op_inputs(spec, 2, T, taps=4 if T < 8 else 3)
    want, last = plain_op(inputs, weights, spec)
    out, state, _ = gdn_step(inputs, weights, spec)
    assert np.abs(np.array(out) - want).max() < 1e-4 * np.abs(want).max()
    assert np.abs(np.array(state) - last).max() < 1e-5 * np.abs(last).max()


@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
def test_prefill_is_the_same_op(spec):
    inputs, weights = op_inputs(spec, 1, 75)
    want, last = plain_op(inputs, weights, spec)
    out, state = gdn_prefill(inputs, weights, spec)
    assert np.abs(np.array(out) - want).max() < 2e-4 * np.abs(want).max()
    assert np.abs(np.array(state) - last).max() < 2e-5 * np.abs(last).max()


@pytest.mark.parametrize("keep", range(9))
@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
def test_commit_is_bit_equal_to_stepping(spec, keep):
    inputs, weights = op_inputs(spec, 2, 8)
    _, _, log = gdn_step(inputs, weights, spec)
    want, history = inputs.state, inputs.history
    for t in range(keep):
        one = slice(t, t + 1)
        single = Inputs(*(part[:, one] for part in inputs[:4]), history, want)
        _, want, _ = gdn_step(single, weights, spec)
        history = mx.concatenate([history, inputs.qkv[:, one]], axis=1)[:, 1:]
    assert mx.array_equal(gdn_commit(inputs.state, log, keep), want)


@pytest.mark.parametrize("keep", [-1, 4])
def test_commit_refuses_what_the_log_does_not_hold(keep):
    inputs, weights = op_inputs(SPECS[0], 1, 3)
    _, _, log = gdn_step(inputs, weights, SPECS[0])
    with pytest.raises(ValueError, match=f"keep is {keep}; the log holds 3"):
        gdn_commit(inputs.state, log, keep)


def test_sizes_that_go_to_the_reference():
    state = mx.zeros((2, 3, 256, 128))
    assert all(supports(state, tokens) for tokens in range(1, 9))
    for tokens, shape in [(0, state.shape), (9, state.shape), (1, (2, 3, 257, 128)), (1, (2, 3, 128, 257))]:
        assert not supports(mx.zeros(shape), tokens)
    assert not supports(mx.zeros((0, 3, 16, 16)), 1)
    inputs, weights = op_inputs(SPECS[0], 1, 9)
    with dispatch.forced("metal"):
        _, _, log = gdn_step(inputs, weights, SPECS[0])
        assert gdn_commit(inputs.state, log, 9).shape == inputs.state.shape


@pytest.mark.parametrize("disabled", ["gdn_step", "gdn_commit"])
def test_one_back_end_for_steps_and_replays(monkeypatch, disabled):
    """A replay by another back end would not have the bits of the steps."""
    backend = {"gdn_step": "metal", "gdn_commit": "metal", disabled: "reference"}
    monkeypatch.setattr(entry, "choose", lambda op: dispatch.Choice(backend[op], "test"))
    inputs, weights = op_inputs(SPECS[0], 1, 2)
    _, state, log = gdn_step(inputs, weights, SPECS[0])
    assert mx.array_equal(gdn_commit(inputs.state, log, 2), state)
