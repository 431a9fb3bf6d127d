"""The router's arithmetic in NumPy against the op that defines it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from custom_kernels.moce_route import NO_SLOT, Policy, plain_route
from custom_kernels.moce_route.reference import naive_moce_route
from mlx_moe.paging.moce import MoceConfig
from mlx_moe.paging.ranks import choose, mixture_error, ranked, weights


def values(rng: np.random.Generator, tokens: int, experts: int, kind: str) -> np.ndarray:
    """Logits [T, E]: apart, tied, with both zeros, or extreme."""
    out = rng.standard_normal((tokens, experts)).astype(np.float32)
    if kind == "tied":
        out = np.round(2 * out) / 2
    elif kind == "zeros":
        out = np.where(out > 0, np.float32(0.0), np.float32(-0.0))
    elif kind == "extreme":
        out[:, ::3] = 3e38
        out[:, 1::5] = -np.inf
    return out.astype(np.float32)


@pytest.mark.parametrize("kind", ["apart", "tied", "zeros", "extreme"])
@pytest.mark.parametrize(("experts", "k", "kept"), [(40, 6, 64), (512, 10, 64), (7, 7, 7), (65, 3, 64)])
def test_ranks_are_the_plain_routers(kind, experts, k, kept):
    logits = values(np.random.default_rng(experts), 9, experts, kind)
    ids, best, total = ranked(logits, kept)
    want, mixed = plain_route(mx.array(logits), min(kept, experts))
    assert np.array_equal(ids, np.array(want)) and np.array_equal(best, np.take_along_axis(logits, ids.astype(int), 1))
    if kind in ("apart", "tied"):
        picked = np.broadcast_to(np.arange(k), (9, k))
        _, mixed = plain_route(mx.array(logits), k)
        assert np.allclose(weights(best, picked, total, True), np.array(mixed), atol=1e-6)
        _, mixed = plain_route(mx.array(logits), k, False)
        assert np.allclose(weights(best, picked, total, False), np.array(mixed), atol=1e-6)


@pytest.mark.parametrize("kind", ["apart", "tied", "zeros", "extreme"])
@pytest.mark.parametrize(
    "moce", [(0.85, 3, 24), (0.5, 0, 12), (3.0, 6, None), (0.1, 2, 10), (1e-8, 1, 30), (0.5, 40, 9)]
)
def test_picks_are_the_cache_aware_routers(kind, moce):
    """Bonuses that meet other logits exactly among them (0.5 on multiples of it), and one below their last bit."""
    rng, (bonus, keep, cap) = np.random.default_rng(7), moce
    logits, k = values(rng, 64, 40, kind), 6
    words = np.where(rng.random(40) < 0.4, 5, NO_SLOT).astype(np.uint32)
    routed = naive_moce_route(mx.array(logits), mx.array(words), k, Policy(bonus, keep, cap or 40))
    ids, best, total = ranked(logits, 64)
    picked = choose(ids, best, words != NO_SLOT, k, MoceConfig(bonus, keep, cap))
    assert np.array_equal(np.take_along_axis(ids, picked, 1), np.array(routed.ids))
    assert (picked >= k).sum() == np.array(routed.counts)[1]
    if kind in ("apart", "tied"):
        assert np.allclose(weights(best, picked, total, True), np.array(routed.weights), atol=1e-6)


def test_the_error_of_mixtures():
    """By hand: two of three equal weights the same."""
    logits = np.array([[1.0, 1.0, 1.0, 1.0]], dtype=np.float32)
    total = np.array([1.0 + np.log(4)], dtype=np.float32)
    error, norm = mixture_error(logits, np.array([[0, 1, 3]]), total, True)
    assert error[0] == pytest.approx(2 / 9) and norm[0] == pytest.approx(1 / 3)
    error, _ = mixture_error(logits, np.array([[0, 1, 2]]), total, True)
    assert error[0] == 0
