"""moce_route's kernel against its reference: choices exactly, weights to rounding."""

from __future__ import annotations

import mlx.core as mx
import pytest

from custom_kernels.moce_route.kernel import moce_route_launch, supports
from custom_kernels.moce_route.reference import Policy, Routing, naive_moce_route
from proof import EVERYWHERE, outputs
from test_route import CASES, route_inputs


@pytest.mark.sample(4)
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("resident", "normalize"), [(0.4, True), (0.0, False), (1.0, True)])
def test_same_choices(where, case, resident, normalize):
    tokens, experts, k, policy = case
    logits, words = map(mx.array, route_inputs(tokens, experts, seed=experts, resident=resident))
    want = naive_moce_route(logits, words, k, policy, normalize)
    got = Routing(*outputs(moce_route_launch(logits, words, k, policy, normalize), where))
    for name in ("ids", "words", "misses", "counts"):
        assert mx.array_equal(getattr(got, name), getattr(want, name)), f"{name}: {getattr(got, name)}"
    error = mx.abs(got.weights - want.weights).max().item()
    assert error < 1e-6, f"weights differ by {error:.1e}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_row_does_not_depend_on_the_window(where, dtype):
    policy = Policy(0.85, 3, 24)
    logits, words = map(mx.array, route_inputs(8, 64, seed=1))
    logits = logits.astype(dtype)
    whole = Routing(*outputs(moce_route_launch(logits, words, 10, policy), where))
    for t in range(8):
        one = Routing(*outputs(moce_route_launch(logits[t : t + 1], words, 10, policy), where))
        assert mx.array_equal(one.ids[0], whole.ids[t])
        assert mx.array_equal(one.weights[0], whole.weights[t]), f"{dtype}: weights of row {t}"


def test_sizes_that_go_to_the_reference():
    assert supports(8, 1024, 32, Policy(1.0, 3, 64))
    for tokens, experts, k, policy in [(9, 64, 4, Policy()), (1, 1025, 4, Policy()), (1, 64, 4, Policy(1.0, 3, 65))]:
        assert not supports(tokens, experts, k, policy)
