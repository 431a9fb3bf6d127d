"""The plain router: order, ties, normalisation."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from custom_kernels.dispatch import choose
from custom_kernels.moce_route import NO_SLOT, Policy, RowPolicies, moce_route, plain_route, route_rows


@pytest.mark.parametrize(("experts", "k"), [(1, 1), (8, 3), (512, 10), (1024, 32)])
@pytest.mark.parametrize("normalize", [True, False])
def test_best_k_in_order(experts, k, normalize):
    logits = np.random.default_rng(experts).standard_normal((7, experts)).astype(np.float32) * 3
    ids, weights = plain_route(mx.array(logits), k, normalize)
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    want = np.argsort(-probs, axis=1, kind="stable")[:, :k]
    assert np.array_equal(np.array(ids), want)
    picked = np.take_along_axis(probs, want, axis=1)
    picked = picked / picked.sum(axis=1, keepdims=True) if normalize else picked
    assert np.allclose(np.array(weights), picked, atol=1e-6)


def test_ties_go_to_the_lower_id():
    ids, weights = plain_route(mx.zeros((2, 16), dtype=mx.bfloat16), 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert np.allclose(np.array(weights), 0.2)
    logits = np.zeros((1, 16), dtype=np.float32)
    logits[0, [3, 9, 12]] = 4
    assert plain_route(mx.array(logits), 5)[0].tolist() == [[3, 9, 12, 0, 1]]


def _brute_force(logits, words, k, policy, normalize):
    """Token by token in plain Python."""
    ids, misses, changed = [], [], 0
    for row in logits:
        order = sorted(range(len(row)), key=lambda e: (-row[e], e))[: policy.max_rank]
        head, tail = order[: policy.keep_top], order[policy.keep_top :]
        gain = {e: np.float32(row[e]) + np.float32(policy.bonus if words[e] != NO_SLOT else 0) for e in tail}
        tail = sorted(tail, key=lambda e: (-gain[e], order.index(e)))
        picked = (head + tail)[:k]
        changed += len(set(picked) - set(order[:k]))
        misses += [e for e in picked if words[e] == NO_SLOT and e not in misses]
        ids.append(picked)
    ids = np.array(ids)
    probs = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    weights = np.take_along_axis(probs / probs.sum(axis=1, keepdims=True), ids, axis=1)
    weights = weights / weights.sum(axis=1, keepdims=True) if normalize else weights
    return ids, weights, misses, changed


CASES = [
    # tokens, experts, k, policy
    (1, 512, 10, Policy(0.85, 3, 24)),
    (8, 512, 10, Policy(0.85, 3, 16)),
    (3, 1024, 32, Policy(2.0, 0, 64)),
    (5, 40, 6, Policy(0.5, 2, 12)),
    (4, 9, 3, Policy(100.0, 1, 9)),
    (2, 64, 8, Policy(0.0, 3, 24)),
    (2, 16, 4, Policy(1.0, 9, 10)),
]


def route_inputs(tokens: int, experts: int, seed: int, resident: float = 0.4):
    """Logits with ties in them, and slot words of which a part is NO_SLOT."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.standard_normal((tokens, experts)) * 4).astype(np.float32) / 4
    words = rng.integers(0, 1 << 28, experts).astype(np.uint32)
    words[rng.random(experts) > resident] = NO_SLOT
    return logits, words


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("resident", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("normalize", [True, False])
def test_cache_aware_routing(case, resident, normalize):
    tokens, experts, k, policy = case
    logits, words = route_inputs(tokens, experts, seed=experts, resident=resident)
    got = moce_route(mx.array(logits), mx.array(words), k, policy, normalize)
    ids, weights, misses, changed = _brute_force(logits, words, k, policy, normalize)
    assert np.array_equal(np.array(got.ids), ids)
    assert np.allclose(np.array(got.weights), weights, atol=1e-6)
    assert np.array_equal(np.array(got.words), words[ids])
    assert got.counts.tolist() == [len(misses), changed]
    assert got.misses.tolist() == misses + [NO_SLOT] * (tokens * k - len(misses))
    if policy.bonus == 0:
        plain_ids, plain_weights = plain_route(mx.array(logits), k, normalize)
        assert mx.array_equal(plain_ids, got.ids)
        same = choose("moce_route").backend == "reference"  # a kernel rounds exp in its own way
        assert mx.allclose(plain_weights, got.weights, atol=0 if same else 1e-6, rtol=0)


@pytest.mark.parametrize("policy", [Policy(-0.1), Policy(1.0, -1), Policy(1.0, 3, 9)])
def test_bad_policies_are_named(policy):
    with pytest.raises(ValueError, match=r"bonus|keep_top|max_rank"):
        moce_route(mx.zeros((1, 32)), mx.zeros((32,), dtype=mx.uint32), 10, policy)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(40, 6), (64, 3), (9, 9), (512, 10)])
def test_rows_of_their_own(experts, k, normalize):
    """Each row as the op has it alone: ids in order, weights, substitutions; ties, negative zeros, extreme policies."""
    policies = [Policy(bonus, keep, rank) for bonus in (0.0, 0.25, 0.85, 100.0) for keep in (0, 2, k, experts + 1)
                for rank in (k, k + 2, experts, experts + 9)]  # fmt: skip
    rng, rows = np.random.default_rng(experts), len(policies)
    logits = np.round(rng.standard_normal((rows, experts)) * 2).astype(np.float32) / 2
    logits[::3] *= -0.0 if experts == 9 else 1
    words = np.where(rng.random((rows, experts)) < 0.3, 7, NO_SLOT).astype(np.uint32)
    fields = (mx.array([getattr(policy, name) for policy in policies]) for name in ("bonus", "keep_top", "max_rank"))
    got = route_rows(mx.array(logits), mx.array(words != NO_SLOT), k, RowPolicies(*fields), normalize)
    changed = 0
    for i, policy in enumerate(policies):
        want = moce_route(mx.array(logits[i : i + 1]), mx.array(words[i]), k, policy, normalize)
        assert mx.array_equal(got.ids[i], want.ids[0]), policy
        assert mx.allclose(got.weights[i], want.weights[0], atol=1e-6), policy
        assert got.substituted[i].item() == want.counts[1].item(), policy
        changed += want.counts[1].item()
    assert (changed > 0) == (k < experts)
