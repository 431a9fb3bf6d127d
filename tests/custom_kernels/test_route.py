"""The plain router: order, ties, normalisation."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from custom_kernels.moce_route import moce_route


@pytest.mark.parametrize(("experts", "k"), [(1, 1), (8, 3), (512, 10), (1024, 32)])
@pytest.mark.parametrize("normalize", [True, False])
def test_best_k_in_order(experts, k, normalize):
    logits = np.random.default_rng(experts).standard_normal((7, experts)).astype(np.float32) * 3
    ids, weights = moce_route(mx.array(logits), k, normalize)
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    want = np.argsort(-probs, axis=1, kind="stable")[:, :k]
    assert np.array_equal(np.array(ids), want)
    picked = np.take_along_axis(probs, want, axis=1)
    picked = picked / picked.sum(axis=1, keepdims=True) if normalize else picked
    assert np.allclose(np.array(weights), picked, atol=1e-6)


def test_ties_go_to_the_lower_id():
    ids, weights = moce_route(mx.zeros((2, 16), dtype=mx.bfloat16), 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert np.allclose(np.array(weights), 0.2)
    logits = np.zeros((1, 16), dtype=np.float32)
    logits[0, [3, 9, 12]] = 4
    assert moce_route(mx.array(logits), 5)[0].tolist() == [[3, 9, 12, 0, 1]]
