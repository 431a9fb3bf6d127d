"""The router's arithmetic in NumPy, for recorded logits: the same picks as custom_kernels.moce_route, ties included.

Knows no MLX. Rows are tokens; ``ids`` and ``logits`` of a token stand in order of rank, the true best first.
"""

from __future__ import annotations

import numpy as np

from mlx_moe.paging.moce import MoceConfig


def best_first(values: np.ndarray) -> np.ndarray:
    """int64 keys [..., n] of float32 values, all different: ascending is descending value, then ascending place.

    The bits of a float32 order like the float once the lower 31 of negative ones are flipped.
    """
    bits = (values.astype(np.float32) + np.float32(0)).view(np.int32)  # -0 becomes 0
    ordered = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)
    return np.arange(values.shape[-1], dtype=np.int64) - ordered * (1 << 20)


def ranked(logits: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ``most`` best of every row.

    Args:
        logits: [T, E] float32, up to 65,535 experts.

    Returns:
        ids [T, most] uint16 and logits [T, most] float32 by rank; [T] float32, ln of the sum of exp over all experts.
    """
    keys, most = best_first(logits), min(most, logits.shape[1])
    if most < logits.shape[1]:
        some = np.argpartition(keys, most - 1, axis=1)[:, :most]
        ids = np.take_along_axis(some, np.argsort(np.take_along_axis(keys, some, 1), axis=1), 1)
    else:
        ids = np.argsort(keys, axis=1)
    best = np.take_along_axis(logits, ids, 1)
    total = best[:, 0] + np.log(np.exp(logits - best[:, :1], dtype=np.float32).sum(axis=1, dtype=np.float64))
    return ids.astype(np.uint16), best, total.astype(np.float32)


def choose(ids: np.ndarray, logits: np.ndarray, resident: np.ndarray, top_k: int, moce: MoceConfig) -> np.ndarray:
    """Ranks [T, k] that the cache-aware router takes, in the order of its choice; see custom_kernels.moce_route.

    Args:
        ids, logits: [T, M] by rank. Of M below ``moce.max_rank`` only those M can be promoted.
        resident: [E] bool, which experts stand in memory.
    """
    most = ids.shape[1] if moce.max_rank is None else min(moce.max_rank, ids.shape[1])
    adjusted = logits[:, :most] + np.where(resident[ids[:, :most]], np.float32(moce.bonus), np.float32(0))
    adjusted[:, : moce.keep_top] = np.inf  # ahead of all others, among themselves in the true order
    return np.argsort(best_first(adjusted), axis=1)[:, :top_k]


def weights(logits: np.ndarray, ranks: np.ndarray, total: np.ndarray, normalize: bool) -> np.ndarray:
    """Mixing weights [T, k] float64 of the experts at ``ranks``: true probabilities, renormalised if asked.

    total: [T], ln of the sum of exp over all experts.
    """
    found = np.exp(np.take_along_axis(logits, ranks, 1).astype(np.float64) - total[:, None])
    return found / found.sum(axis=1, keepdims=True) if normalize else found


def mixture_error(
    logits: np.ndarray, ranks: np.ndarray, total: np.ndarray, normalize: bool
) -> tuple[np.ndarray, np.ndarray]:
    """How far the mixtures of the experts at ``ranks`` [T, k] are from the true best ones, from weights alone.

    Returns:
        Per token the sum of squared differences of weights, and the sum of squared true weights. Their ratio is the
        relative squared error of the routed output if experts' outputs were orthogonal and of equal norm: a guess made
        without any output, to compare settings with each other.
    """
    k = ranks.shape[1]
    true = np.zeros(logits.shape)
    true[:, :k] = weights(logits, np.broadcast_to(np.arange(k), ranks.shape), total, normalize)
    used = np.zeros(logits.shape)
    np.put_along_axis(used, ranks, weights(logits, ranks, total, normalize), 1)
    return ((used - true) ** 2).sum(axis=1), (true**2).sum(axis=1)
