"""gdn_step's and gdn_commit's kernels against the reference and against each other."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from custom_kernels.gdn_step import Inputs, Spec, StepLog
from custom_kernels.gdn_step.kernel import gdn_commit_launch, gdn_step_launch
from custom_kernels.gdn_step.reference import naive_gdn_step
from proof import EVERYWHERE, outputs
from test_gdn import SPECS, op_inputs, plain_op

NAMES = ("outputs", "state", "log k", "log delta", "log g")


def _step(inputs, weights, spec, where):
    return outputs(gdn_step_launch(inputs, weights, spec), where)


WINDOWS = [(1, mx.float32), (8, mx.float32), (3, mx.bfloat16), (2, mx.float16)]
CASES = [pytest.param(spec, *window, id=f"{spec}-{window}") for spec in SPECS for window in WINDOWS]


@pytest.mark.sample(3)
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize(("spec", "T", "dtype"), CASES)
def test_same_as_the_reference(where, spec, T, dtype):
    inputs, weights = op_inputs(spec, 2 if spec.dk < 100 else 1, T, taps=3 if T == 2 else 4, dtype=dtype)
    out, state, log = naive_gdn_step(inputs, weights, spec)
    got = _step(inputs, weights, spec, where)
    limit = 1e-5 if dtype == mx.float32 else 1e-2
    for name, a, b in zip(NAMES, got, (out, state, *log), strict=True):
        a, b = (np.array(x.astype(mx.float32)) for x in (a, b))
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error < (limit if name == "outputs" else 1e-5), f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("where", EVERYWHERE)
def test_against_float64(where):
    spec = SPECS[3]
    inputs, weights = op_inputs(spec, 1, 8)
    want, last = plain_op(inputs, weights, spec)
    got = _step(inputs, weights, spec, where)
    assert np.abs(np.array(got[0]) - want).max() < 1e-5 * np.abs(want).max()
    assert np.abs(np.array(got[1]) - last).max() < 1e-5 * np.abs(last).max()


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_windows_steps_and_commits_are_bit_equal(where, dtype):
    """Rows of a window of 8 equal 8 single steps; every prefix replayed from the log equals having stepped it."""
    spec = Spec(key_heads=2, value_heads=4, dk=40, dv=24, tiled=True)
    inputs, weights = op_inputs(spec, 2, 8, dtype=dtype)
    window = _step(inputs, weights, spec, where)
    log, state, history = StepLog(*window[2:]), inputs.state, inputs.history
    for t in range(9):
        (replayed,) = outputs(gdn_commit_launch(inputs.state, log, t), where)
        assert mx.array_equal(replayed, state), f"replay of {t} tokens"
        if t == 8:
            break
        one = slice(t, t + 1)
        step = _step(Inputs(*(part[:, one] for part in inputs[:4]), history, state), weights, spec, where)
        assert mx.array_equal(step[0][:, 0], window[0][:, t]), f"outputs of token {t}"
        state, history = step[1], mx.concatenate([history, inputs.qkv[:, one]], axis=1)[:, 1:]
    assert mx.array_equal(state, window[1])


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="1 to 8 tokens, not 9"):
        gdn_step_launch(*op_inputs(SPECS[0], 1, 9), SPECS[0])
