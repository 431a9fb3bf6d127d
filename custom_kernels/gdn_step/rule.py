"""The gated delta rule itself in mx ops, float32 throughout: token by token, and in chunks.

Per value head, with state S [Dv, Dk], key k, query q [Dk], value v [Dv], decay a = exp(g), write strength beta:

    S <- a S;   d = beta (v - S k);   S <- S + d k^T;   o = S q

("Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464, equation 10; the chunked form follows its
section 3.3.) Shapes here: B rows, T tokens, H value heads; keys and queries are already repeated to H heads.
"""

from __future__ import annotations

import mlx.core as mx

CHUNK = 64
"""Tokens per chunk of the prefill form: a power of two, so that the triangular inverse halves evenly."""


def naive_delta_rule(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Advance the state token by token; a token's result does not depend on how many follow.

    Args:
        q, k: [B, T, H, Dk] float32, normalised and scaled.
        v: [B, T, H, Dv] float32.
        g, beta: [B, T, H] float32; g is the logarithm of the decay.
        state: [B, H, Dv, Dk] float32; left as it is.

    Returns:
        outputs [B, T, H, Dv], the last state, and the deltas d [B, T, H, Dv].
    """
    decay = mx.exp(g)
    outputs, deltas = [], []
    for t in range(q.shape[1]):
        key = k[:, t, :, None]
        state = state * decay[:, t, :, None, None]
        seen = (state * key).sum(axis=-1)
        delta = beta[:, t, :, None] * (v[:, t] - seen)
        state = state + delta[..., None] * key
        outputs.append((state * q[:, t, :, None]).sum(axis=-1))
        deltas.append(delta)
    return mx.stack(outputs, axis=1), state, mx.stack(deltas, axis=1)


def replay(state: mx.array, k: mx.array, deltas: mx.array, g: mx.array, keep: int) -> mx.array:
    """The state after the first ``keep`` tokens of ``naive_delta_rule``, by the same arithmetic."""
    decay = mx.exp(g)
    for t in range(keep):
        state = state * decay[:, t, :, None, None]
        state = state + deltas[:, t, :, :, None] * k[:, t, :, None]
    return state


def chunked_delta_rule(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The same rule for long prompts: matrix products inside chunks of 64 tokens, a short loop over the chunks.

    Arguments as for ``naive_delta_rule``; returns outputs [B, T, H, Dv] and the last state. Agrees with the stepped
    form up to rounding. Within a chunk the deltas solve (I + A) D = beta (V - decayed K S) with A strictly lower
    triangular; (I + A)^-1 is built by halving, which is as stable as substitution and needs no loop over tokens.
    """
    T = v.shape[1]
    chunks = -(-T // CHUNK)
    q, k, v, g, beta = (_to_chunks(x, chunks) for x in (q, k, v, g, beta))
    g = mx.cumsum(g, axis=-1)  # [B, H, N, C]
    lower = mx.tril(mx.ones((CHUNK, CHUNK), dtype=mx.bool_))
    decay = mx.exp(mx.where(lower, g[..., :, None] - g[..., None, :], -mx.inf))
    scaled = k * beta[..., None]
    inverse = _unit_lower_inverse(mx.tril((scaled @ k.swapaxes(-1, -2)) * decay, k=-1))
    writes = inverse @ (v * beta[..., None])
    reads = inverse @ (scaled * mx.exp(g)[..., None])
    scores = (q @ k.swapaxes(-1, -2)) * decay
    q = q * mx.exp(g)[..., None]
    last = g[..., -1:]
    k = k * mx.exp(last - g)[..., None]
    carry = mx.exp(last)[..., None]
    outputs = []
    for n in range(chunks):
        past = state.swapaxes(-1, -2)
        delta = writes[:, :, n] - reads[:, :, n] @ past
        outputs.append(q[:, :, n] @ past + scores[:, :, n] @ delta)
        state = state * carry[:, :, n] + delta.swapaxes(-1, -2) @ k[:, :, n]
    out = mx.concatenate(outputs, axis=2)[:, :, :T]
    return out.transpose(0, 2, 1, 3), state


def _to_chunks(x: mx.array, chunks: int) -> mx.array:
    """[B, T, H, ...] -> [B, H, N, C, ...]; padding is zero, which neither decays nor writes."""
    pad = chunks * CHUNK - x.shape[1]
    x = mx.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2)) if pad else x
    x = x.swapaxes(1, 2)
    return x.reshape(x.shape[0], x.shape[1], chunks, CHUNK, *x.shape[3:])


def _unit_lower_inverse(strict: mx.array) -> mx.array:
    """(I + L)^-1 for strictly lower triangular L [..., C, C], C a power of two.

    [[P, 0], [Q, R]]^-1 = [[P^-1, 0], [-R^-1 Q P^-1, R^-1]], from blocks of one up to C, all blocks of a level at once.
    """
    size = strict.shape[-1]
    lead = strict.shape[:-2]
    blocks = mx.ones((*lead, size, 1, 1), dtype=strict.dtype)  # inverses of the diagonal blocks, [..., number, w, w]
    width = 1
    while width < size:
        pairs = size // (2 * width)
        tiles = strict.reshape(*lead, pairs, 2, width, pairs, 2, width)
        corner = mx.stack([tiles[..., p, 1, :, p, 0, :] for p in range(pairs)], axis=-3)  # Q of every pair
        blocks = blocks.reshape(*lead, pairs, 2, width, width)
        upper, below = blocks[..., 0, :, :], blocks[..., 1, :, :]
        corner = -(below @ corner @ upper)
        top = mx.concatenate([upper, mx.zeros_like(upper)], axis=-1)
        bottom = mx.concatenate([corner, below], axis=-1)
        blocks = mx.concatenate([top, bottom], axis=-2)
        width *= 2
    return blocks.reshape(*lead, size, size)
