"""The plain router of a mixture of experts, in mx ops: softmax over all experts, then the best k."""

from __future__ import annotations

import mlx.core as mx


def naive_route(logits: mx.array, top_k: int, normalize: bool = True) -> tuple[mx.array, mx.array]:
    """Choose ``top_k`` experts per token.

    p = softmax(logits) in float32 over all experts; the k largest, ties to the lower id, in descending order;
    divided by their sum when ``normalize``.

    Args:
        logits: [T, E], any float type.
        top_k: experts per token, 1 to E.
        normalize: renormalise the k probabilities to sum to one.

    Returns:
        ids [T, k] uint32 and weights [T, k] float32, both in rank order.
    """
    probs = mx.softmax(logits.astype(mx.float32), axis=-1)
    ids = mx.argsort(_descending_keys(probs), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(probs, ids, axis=-1)
    if normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids, weights


def _descending_keys(probs: mx.array) -> mx.array:
    """int64 keys, all different: ascending order is descending probability, then ascending id.

    The bit pattern of a non-negative float32 orders like the float.
    """
    bits = mx.view(probs, mx.int32).astype(mx.int64)
    ids = mx.arange(probs.shape[-1], dtype=mx.int64)
    return ids - bits * (1 << 20)
