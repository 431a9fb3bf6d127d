"""Expert routing in mx ops: the plain top-k router, and the cache-aware one (MoCE) that defines the kernel.

Mixture of Cache-conditional Experts (arXiv 2412.00099): experts that are in memory get a bonus on their logit, so that
near-equal choices fall on them. Here the first ``keep_top`` ranks stand as they are, only residents within the true
best ``max_rank`` may be promoted, and mixing weights are the true probabilities of what was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from custom_kernels.slots import NO_SLOT


@dataclass(frozen=True)
class Policy:
    """How residents are preferred. A bonus of 0 is the plain router."""

    bonus: float = 0.0
    keep_top: int = 3
    max_rank: int = 24

    def check(self, top_k: int, experts: int) -> None:
        """Raises ValueError naming the setting that does not fit."""
        if self.bonus < 0:
            raise ValueError(f"bonus is {self.bonus}; allowed: 0 or more")
        if self.keep_top < 0:
            raise ValueError(f"keep_top is {self.keep_top}; allowed: 0 or more")
        if not top_k <= self.max_rank:
            raise ValueError(f"max_rank is {self.max_rank}; allowed: at least top_k = {top_k}")
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k is {top_k}; allowed: 1 to {experts} experts")


class Routing(NamedTuple):
    """What a cache-aware router decides for T tokens."""

    ids: mx.array  # [T, k] uint32, in rank order
    weights: mx.array  # [T, k] float32, true probabilities, renormalised if asked
    words: mx.array  # [T, k] uint32, slot words of the chosen
    misses: mx.array  # [T * k] uint32, chosen experts without a slot, each once, in order of first use; then NO_SLOT
    counts: mx.array  # [2] uint32: how many misses; how many picks are not in the true top k


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
    logits = logits.astype(mx.float32)
    ids = mx.argsort(_best_first(logits), axis=-1)[..., :top_k]
    return ids, _weights(logits, ids, normalize)


def naive_moce_route(logits: mx.array, words: mx.array, top_k: int, policy: Policy, normalize: bool = True) -> Routing:
    """The cache-aware router.

    Args:
        logits: [T, E], any float type.
        words: [E] uint32, the slot word of every expert, NO_SLOT for those not in memory.
        top_k, normalize: as for ``naive_route``.
        policy: bonus, keep_top, max_rank.
    """
    policy.check(top_k, logits.shape[1])
    logits = logits.astype(mx.float32)
    order = mx.argsort(_best_first(logits), axis=-1)[:, : policy.max_rank]
    resident = words[order] != NO_SLOT
    rank = mx.arange(order.shape[1])
    kept = rank < policy.keep_top
    adjusted = mx.take_along_axis(logits, order, axis=-1) + mx.where(resident, policy.bonus, 0.0)
    adjusted = mx.where(kept, mx.inf, adjusted)  # ahead of all others, among themselves in the true order
    ids = mx.take_along_axis(order, mx.argsort(_best_first(adjusted), axis=-1)[:, :top_k], axis=-1)
    changed = (ids[:, :, None] != order[:, None, :top_k]).all(axis=-1).sum()
    misses, count = _misses(ids, words)
    counts = mx.stack([count, changed.astype(mx.uint32)])
    return Routing(ids, _weights(logits, ids, normalize), words[ids], misses, counts)


def _weights(logits: mx.array, ids: mx.array, normalize: bool) -> mx.array:
    weights = mx.take_along_axis(mx.softmax(logits, axis=-1), ids, axis=-1)
    return weights / weights.sum(axis=-1, keepdims=True) if normalize else weights


def _misses(ids: mx.array, words: mx.array) -> tuple[mx.array, mx.array]:
    """Chosen experts without a slot, each once, in order of first use, filled up with NO_SLOT; and their number."""
    flat = ids.reshape(-1)
    place = mx.arange(flat.size)
    earlier = (flat[:, None] == flat[None, :]) & (place[None, :] < place[:, None])
    new = (words[flat] == NO_SLOT) & ~earlier.any(axis=-1)
    order = mx.argsort(mx.where(new, place, place + flat.size))
    return mx.where(new[order], flat[order], NO_SLOT).astype(mx.uint32), new.sum().astype(mx.uint32)


def _best_first(values: mx.array) -> mx.array:
    """int64 keys, all different: ascending order is descending value, then ascending place.

    The bits of a float32 order like the float once the lower 31 of negative ones are flipped.
    """
    bits = mx.view(values + 0.0, mx.int32)  # -0 becomes 0
    ordered = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64)
    return mx.arange(values.shape[-1], dtype=mx.int64) - ordered * (1 << 20)
