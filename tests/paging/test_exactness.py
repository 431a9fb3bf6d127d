"""The demonstration model as shipped: its text does not depend on arena, threads, read-ahead or resizes."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from disks import BY, read_by, slow
from mlx_moe import load, stream_generate
from mlx_moe.models.qwen4_exp import Model

PROMPTS = (
    "Once upon a time there was a small",
    "def fibonacci(n):\n",
    "The capital of France is",
    "Question: what is seven times eight?\nAnswer:",
    "It was raining when Tom opened the door and saw that the garden " * 4,
)
TOKENS = 64


def texts(model: Model, tokenizer, prompts: tuple[str, ...] = PROMPTS, tokens: int = TOKENS) -> list[bytes]:
    """What follows the prompts, greedily."""
    parts = ([r.text for r in stream_generate(model, tokenizer, p, max_tokens=tokens)] for p in prompts)
    return ["".join(text).encode() for text in parts]


def logits(model: Model, tokenizer) -> np.ndarray:
    """[T, V] of a prompt, single tokens and windows."""
    ids = tokenizer.encode(PROMPTS[-1])
    cache, parts, start = model.make_cache(), [], 0
    for piece in (20, 1, 1, 2, 8, 5):
        parts.append(np.array(model(mx.array([ids[start : start + piece]]), cache=cache)[0]))
        start += piece
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def resident() -> list[bytes]:
    model, tokenizer = load(dtype=mx.float32, resident=True)
    with model:
        return texts(model, tokenizer)


@pytest.fixture(scope="module")
def resident_logits() -> np.ndarray:
    model, tokenizer = load(dtype=mx.float32, resident=True)
    with model:
        return logits(model, tokenizer)


@pytest.mark.full
@pytest.mark.parametrize("read_ahead", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("slots", [8, 12, 20, 40])
def test_output_of_every_arena(resident, resident_logits, monkeypatch, slots, by, threads, read_ahead):
    """Text and every bit of logits; also after resizes, down to what a token uses, up to all, and back."""
    read_by(monkeypatch, by)
    model, tokenizer = load(dtype=mx.float32, expert_slots=slots, io_threads=threads, read_ahead=read_ahead)
    with model:
        assert texts(model, tokenizer) == resident
        assert np.array_equal(logits(model, tokenizer), resident_logits)
        stats = model.experts_stats
        assert stats.slots == slots and (stats.misses > 0) == (slots < 40)
        assert (stats.ahead_useful > 0) == (read_ahead and slots < 40)
        for other in (6, 40, slots):
            model.resize_experts(other)
            assert texts(model, tokenizer, PROMPTS[:1]) == resident[:1]
            assert np.array_equal(logits(model, tokenizer), resident_logits)


@pytest.mark.full
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(("slots", "threads"), [(8, 8), (12, 2), (20, 1)])
def test_output_under_slow_reads(resident, resident_logits, monkeypatch, slots, threads, by):
    """0 to 20 ms more for each."""
    read_by(monkeypatch, by)
    model, tokenizer = load(dtype=mx.float32, expert_slots=slots, io_threads=threads)
    with model:
        slow(monkeypatch, 0.02)
        assert texts(model, tokenizer, PROMPTS[1:3]) == resident[1:3]
        assert np.array_equal(logits(model, tokenizer), resident_logits)


@pytest.mark.full
def test_a_prompt_of_2048_tokens_reads_each_expert_once():
    """Of the demonstration model, 10 of 40 in memory: bytes are misses times records, and no expert misses twice."""
    model, tokenizer = load(dtype=mx.float32, expert_slots=10, usage=False, read_ahead=False)
    with model:
        ids = (tokenizer.encode(Path(__file__).read_text()) * 2)[:2048]
        assert len(ids) == 2048
        mx.eval(model.streams(mx.array([ids])))
        stats, records = model.experts_stats, model._experts.records
        layers = range(model.config.num_hidden_layers)
        assert all(stats.layer_misses[i] <= 40 for i in layers) and sum(stats.layer_misses) > 8 * 30
        assert stats.bytes_read == sum(stats.layer_misses[i] * records[i][1] for i in layers)


@pytest.mark.sample(1)
@pytest.mark.parametrize("prompt", PROMPTS[1:3])
def test_text_of_a_small_arena(prompt):
    model, tokenizer = load(dtype=mx.float32)
    with model:
        assert model.experts_stats.slots == 40, "all of a small model by default"
        whole = texts(model, tokenizer, (prompt,), 16)
        model.resize_experts(12)
        assert texts(model, tokenizer, (prompt,), 16) == whole and model.experts_stats.misses > 0
