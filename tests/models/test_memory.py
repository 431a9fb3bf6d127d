"""Memory of long prompts beyond the attention budget: linear in the prompt, in one pass and in pieces."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import checkpoints
from mlx_moe.generation import process_prompt
from mlx_moe.runtime import load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    raw = checkpoints.tiny_config(num_hidden_layers=4, max_position_embeddings=1 << 17)
    return load_model(checkpoints.write(tmp_path_factory.mktemp("m"), raw, checkpoints.random_weights(raw)))[0]


def _peak(model, length: int, step: int) -> int:
    """Bytes above what was in use before, while a prompt runs."""
    ids = np.random.default_rng(length).integers(0, 120, length).tolist()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    process_prompt(ids, model, model.make_cache(), step)
    return mx.get_peak_memory() - before


def _check_linear(model, lengths: list[int], step: int | None) -> None:
    peaks = [_peak(model, n, step or n) for n in lengths]
    for i in range(2, len(lengths)):
        grown, earlier = peaks[i] - peaks[i - 1], peaks[i - 1] - peaks[i - 2]
        allowed = (
            2.6 * max(earlier, 0) + 4e6
        )  # doubling lengths: 2 is linear (with room for buffers' steps), 4 quadratic
        assert grown < allowed, f"peaks {[round(p / 1e6, 1) for p in peaks]} MB for {lengths} tokens"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("lengths", "step"), [([1024, 2048, 4096], 512), ([512, 1024, 2048], None)])
def test_linear_in_the_prompt(model, lengths, step):
    """In pieces and in one pass."""
    _check_linear(model, lengths, step)


@pytest.mark.full
@pytest.mark.parametrize("step", [2048, None])
def test_up_to_16k(model, step):
    _check_linear(model, [1024, 2048, 4096, 8192, 16384], step)


def test_no_square_of_the_prompt(model):
    """A square of 4,096 tokens alone would take 64 MB in float32; the whole pass stays far below one per head."""
    assert _peak(model, 4096, 2048) < 64e6
