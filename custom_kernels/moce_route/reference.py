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


class RowPolicies(NamedTuple):
    """A ``Policy`` of its own for each of B rows; of the plain router: 0, 0 and top_k."""

    bonus: mx.array  # [B] float32
    keep_top: mx.array  # [B] int32
    max_rank: mx.array  # [B] int32, at least top_k


class RowRouting(NamedTuple):
    """What the cache-aware router decides for B rows, each with a residency and a policy of its own."""

    ids: mx.array  # [B, k] uint32, in rank order
    weights: mx.array  # [B, k] float32, true probabilities, renormalised if asked
    substituted: mx.array  # [B] uint32, picks that are not in the row's true top k


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
    rank = mx.arange(order.shape[1])
    ids = _promoted(logits, order, words[order] != NO_SLOT, rank < policy.keep_top, policy.bonus)[:, :top_k]
    changed = _changed(ids, order[:, :top_k]).sum()
    misses, count = _misses(ids, words)
    counts = mx.stack([count, changed.astype(mx.uint32)])
    return Routing(ids, _weights(logits, ids, normalize), words[ids], misses, counts)


def naive_route_rows(
    logits: mx.array, resident: mx.array, top_k: int, policies: RowPolicies, normalize: bool = True
) -> RowRouting:
    """``naive_moce_route`` of B windows of one token at once: row b with its own residency and policy.

    Args:
        logits: [B, E], any float type.
        resident: [B, E] bool, which experts are in memory for the row.
        top_k, normalize: as for ``naive_route``.
        policies: of the rows, checked by the caller.
    """
    logits = logits.astype(mx.float32)
    order = mx.argsort(_best_first(logits), axis=-1)
    rank = mx.arange(order.shape[1])
    kept, open_to = (rank < bound[:, None] for bound in (policies.keep_top, policies.max_rank))
    here = mx.take_along_axis(resident, order, axis=-1)
    ids = _promoted(logits, order, here, kept, policies.bonus[:, None], open_to)[:, :top_k]
    changed = _changed(ids, order[:, :top_k]).sum(axis=-1)
    return RowRouting(ids, _weights(logits, ids, normalize), changed.astype(mx.uint32))


def _promoted(
    logits: mx.array,
    order: mx.array,
    resident: mx.array,
    kept: mx.array,
    bonus: float | mx.array,
    open_to: mx.array | None = None,
) -> mx.array:
    """Ids [T, n] of the true ``order`` with residents moved ahead by their bonus; among equals that order stands.

    kept: ranks that come first. open_to: ranks that do not come last; None is all.
    """
    adjusted = mx.take_along_axis(logits, order, axis=-1) + mx.where(resident, bonus, 0.0)
    adjusted = mx.where(kept, mx.inf, adjusted)  # ahead of all others, among themselves in the true order
    if open_to is not None:
        adjusted = mx.where(open_to, adjusted, -mx.inf)
    return mx.take_along_axis(order, mx.argsort(_best_first(adjusted), axis=-1), axis=-1)


def _changed(ids: mx.array, best: mx.array) -> mx.array:
    """Which of the ids [T, k] are not among the true best [T, k]: [T, k] bool."""
    return (ids[:, :, None] != best[:, None]).all(axis=-1)


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
