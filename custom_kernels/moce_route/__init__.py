"""Expert routing: from router logits to expert ids, mixing weights, slot words and misses."""

from __future__ import annotations

import mlx.core as mx

from custom_kernels.dispatch import choose
from custom_kernels.moce_route.kernel import moce_route_kernel, supports
from custom_kernels.moce_route.reference import (
    NO_SLOT,
    Policy,
    Routing,
    RowPolicies,
    RowRouting,
    naive_moce_route,
)
from custom_kernels.moce_route.reference import naive_route as plain_route
from custom_kernels.moce_route.reference import naive_route_rows as route_rows

__all__ = [
    "NO_SLOT",
    "Policy",
    "Routing",
    "RowPolicies",
    "RowRouting",
    "moce_route",
    "plain_route",
    "route_rows",
]


def moce_route(
    logits: mx.array, words: mx.array, top_k: int, policy: Policy | None = None, normalize: bool = True
) -> Routing:
    """Route a window of tokens with knowledge of what is in memory; see ``naive_moce_route``, which defines it.

    Args:
        logits: [T, E], any float type. words: [E] uint32 slot words, NO_SLOT for experts not in memory.
        top_k: experts per token. policy: default the plain router. normalize: weights sum to one.
    """
    policy = policy or Policy(max_rank=max(top_k, 1))
    backend = choose("moce_route").backend
    if backend == "reference" or not supports(*logits.shape, top_k, policy):
        return naive_moce_route(logits, words, top_k, policy, normalize)
    return moce_route_kernel(backend, logits, words, top_k, policy, normalize)
