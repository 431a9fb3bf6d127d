"""The model with its kernels, on the Metal simulator: every decode window runs the text that a Mac would run."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx

import checkpoints
from custom_kernels import dispatch
from custom_kernels.portable import Launch
from metal_sim import needs_simulator, verify
from mlx_moe.runtime import load_model

PROMPT, STEPS = 12, 2


def _decode(model) -> tuple[list[int], mx.array]:
    """Greedy tokens and the logits behind them: single steps, a window of 3 of which 2 are dropped, a step after it."""
    cache = model.make_cache()
    row = model(mx.array(checkpoints.tokens(PROMPT)[None]), cache=cache)[:, -1:]
    rows, ids = [row], [int(row.argmax())]

    def take(token: int) -> None:
        rows.append(model(mx.array([[token]]), cache=cache))
        ids.append(int(rows[-1].argmax()))

    for _ in range(STEPS):
        take(ids[-1])
    model.begin(cache)
    rows.append(model(mx.array([[ids[-1], 5, 6]]), cache=cache))
    ids.append(int(rows[-1][:, 0].argmax()))
    model.rollback(cache, 2)
    take(ids[-1])
    return ids, mx.concatenate(rows, axis=1)


@needs_simulator
def test_greedy_tokens_and_logits_are_those_of_the_references(tmp_path, monkeypatch):
    raw = checkpoints.tiny_config()
    model = load_model(checkpoints.write(tmp_path, raw, checkpoints.random_weights(raw, 3)), dtype=mx.float32)[0]
    with dispatch.forced("reference"):
        want_ids, want = _decode(model)
    launched: Counter[str] = Counter()

    def simulated(launch: Launch, backend: str) -> list[mx.array]:
        launched[launch.kernel.name] += 1
        return verify(launch.kernel.metal, **launch.arguments)

    monkeypatch.setattr(Launch, "run", simulated)
    with dispatch.forced("metal"):
        ids, logits = _decode(model)
    assert ids == want_ids
    error = (mx.abs(logits - want).max() / mx.abs(want).max()).item()
    assert error < 1e-5, f"logits: relative error {error:.1e}"
    passes, linear = STEPS + 2, checkpoints.layer_types(raw["text_config"]).count("linear_attention")
    layers = raw["text_config"]["num_hidden_layers"]
    assert launched == {"gdn_step": passes * linear, "gdn_commit": linear, "moce_route": passes * layers}
