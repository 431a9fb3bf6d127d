"""Gated DeltaNet between its projections: decode windows with a log that can be replayed, and chunked prefill."""

from __future__ import annotations

import mlx.core as mx

from custom_kernels.dispatch import choose
from custom_kernels.gdn_step.kernel import MAX_TOKENS, gdn_commit_launch, gdn_step_launch
from custom_kernels.gdn_step.reference import (
    Inputs,
    Spec,
    StepLog,
    Weights,
    gdn_prefill,
    naive_gdn_commit,
    naive_gdn_step,
)

__all__ = ["Inputs", "Spec", "StepLog", "Weights", "gdn_commit", "gdn_prefill", "gdn_step", "supports"]

MAX_HEAD_DIM = 256
"""Dk and Dv that the kernels take: a thread keeps Dk * Dv / 256 numbers of the state."""


def gdn_step(inputs: Inputs, weights: Weights, spec: Spec) -> tuple[mx.array, mx.array, StepLog]:
    """A window of up to 8 tokens; see ``naive_gdn_step``, which defines it and runs longer ones.

    Returns:
        outputs [B, T, Hv * Dv] in z's type, the last state [B, Hv, Dv, Dk] float32, and the log of the window.
    """
    backend = _backend(inputs.state, inputs.qkv.shape[1])
    if backend == "reference":
        return naive_gdn_step(inputs, weights, spec)
    out, state, *log = gdn_step_launch(inputs, weights, spec).run(backend)
    return out, state, StepLog(*log)


def gdn_commit(state: mx.array, log: StepLog, keep: int) -> mx.array:
    """The state after the first ``keep`` tokens of a logged window; see ``naive_gdn_commit``, which defines it.

    Args:
        state: [B, Hv, Dv, Dk] float32, before the window. log: what ``gdn_step`` returned. keep: 0 to T.

    Raises ValueError when the log has fewer tokens.
    """
    tokens = log.g.shape[1]
    if not 0 <= keep <= tokens:
        raise ValueError(f"gdn_commit: keep is {keep}; the log holds {tokens} tokens")
    backend = _backend(state, tokens)
    if backend == "reference" or keep == 0:
        return naive_gdn_commit(state, log, keep)
    return gdn_commit_launch(state, log, keep).run(backend)[0]


def supports(state: mx.array, tokens: int) -> bool:
    """Whether the kernels take a window of ``tokens`` on a state [B, Hv, Dv, Dk]; the reference takes any."""
    return 1 <= tokens <= MAX_TOKENS and state.size > 0 and max(state.shape[2:]) <= MAX_HEAD_DIM


def _backend(state: mx.array, tokens: int) -> str:
    """One answer for both ops, since a replay has the bits of the steps only where both run on the same back end."""
    chosen = {choose("gdn_step").backend, choose("gdn_commit").backend}
    return "reference" if "reference" in chosen or not supports(state, tokens) else chosen.pop()
