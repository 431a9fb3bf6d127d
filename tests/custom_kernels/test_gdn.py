"""The delta rule: stepped against plain NumPy, chunked against stepped, logs against states."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from custom_kernels.gdn_step import gdn_commit, gdn_prefill, gdn_step


def _inputs(B: int, T: int, H: int, Dk: int, Dv: int, seed: int = 0, same_keys: bool = False):
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


def _naive(q, k, v, g, beta, state):
    """One head and token at a time, float64."""
    q, k, v, g, beta, state = (x.astype(np.float64) for x in (q, k, v, g, beta, state))
    out = np.zeros_like(v)
    for b, t, h in np.ndindex(*g.shape):
        S = state[b, h] * np.exp(g[b, t, h])
        S = S + np.outer(beta[b, t, h] * (v[b, t, h] - S @ k[b, t, h]), k[b, t, h])
        state[b, h], out[b, t, h] = S, S @ q[b, t, h]
    return out, state


@pytest.mark.parametrize("shape", [(1, 1, 1, 8, 8), (2, 8, 3, 16, 24), (1, 5, 4, 24, 8)])
def test_step_is_the_formula(shape):
    arrays = _inputs(*shape)
    want, last = _naive(*arrays)
    out, state, _ = gdn_step(*map(mx.array, arrays))
    assert np.allclose(np.array(out), want, atol=1e-5)
    assert np.allclose(np.array(state), last, atol=1e-5)


@pytest.mark.parametrize("T", [1, 9, 63, 64, 65, 200])
@pytest.mark.parametrize("same_keys", [False, True])
def test_chunks_are_the_formula(T, same_keys):
    """Also with one key throughout, no decay and full writes, where a power series of the inverse would explode."""
    arrays = _inputs(2, T, 3, 16, 24, seed=T, same_keys=same_keys)
    want, last = _naive(*arrays)
    out, state = gdn_prefill(*map(mx.array, arrays))
    scale = np.abs(want).max()
    assert np.abs(np.array(out) - want).max() < 2e-5 * scale, f"outputs, {T} tokens"
    assert np.abs(np.array(state) - last).max() < 2e-5 * np.abs(last).max(), f"state, {T} tokens"


def test_strong_decay_does_not_overflow():
    q, k, v, g, beta, state = _inputs(1, 130, 2, 8, 8)
    out, last = gdn_prefill(*map(mx.array, (q, k, v, g * 200, beta, state)))
    assert np.isfinite(np.array(out)).all() and np.isfinite(np.array(last)).all()


@pytest.mark.parametrize("keep", range(9))
def test_commit_is_bit_equal_to_stepping(keep):
    q, k, v, g, beta, state = map(mx.array, _inputs(2, 8, 3, 16, 24))
    _, _, log = gdn_step(q, k, v, g, beta, state)
    want = state
    for t in range(keep):
        one = slice(t, t + 1)
        _, want, _ = gdn_step(q[:, one], k[:, one], v[:, one], g[:, one], beta[:, one], want)
    assert mx.array_equal(gdn_commit(state, log, keep), want)
