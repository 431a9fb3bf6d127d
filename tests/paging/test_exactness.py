"""The demonstration model as shipped: its text does not depend on arena, threads, read-ahead or resizes."""

from __future__ import annotations

import os

import mlx.core as mx
import pytest

from mlx_moe import load, stream_generate
from mlx_moe.models.qwen4_exp import Model
from paging.streamed import delayed

PROMPTS = (
    "Once upon a time there was a small",
    "def fibonacci(n):\n",
    "The capital of France is",
    "Question: what is seven times eight?\nAnswer:",
    "It was raining when Tom opened the door and saw that the garden " * 4,
)
TOKENS = 64
THREADS = (1, 2, 8)


def texts(model: Model, tokenizer, prompts: tuple[str, ...] = PROMPTS, tokens: int = TOKENS) -> list[bytes]:
    """What follows the prompts, greedily."""
    parts = ([r.text for r in stream_generate(model, tokenizer, p, max_tokens=tokens)] for p in prompts)
    return ["".join(text).encode() for text in parts]


@pytest.fixture(scope="module")
def resident() -> list[bytes]:
    model, tokenizer = load(dtype=mx.float32, resident=True)
    with model:
        return texts(model, tokenizer)


@pytest.mark.full
@pytest.mark.parametrize("read_ahead", [True, False])
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("slots", [8, 12, 20, 40])
def test_text_of_every_arena(resident, slots, threads, read_ahead):
    """Also after resizes, down to what a token uses, up to all, and back."""
    model, tokenizer = load(dtype=mx.float32, expert_slots=slots, io_threads=threads, read_ahead=read_ahead)
    with model:
        assert texts(model, tokenizer) == resident
        stats = model.experts_stats
        assert stats.slots == slots and (stats.misses > 0) == (slots < 40)
        assert (stats.ahead_useful > 0) == (read_ahead and slots < 40)
        for other in (6, 40, slots):
            model.resize_experts(other)
            assert texts(model, tokenizer, PROMPTS[:1]) == resident[:1]


@pytest.mark.full
@pytest.mark.parametrize(("slots", "threads"), [(8, 8), (12, 2), (20, 1)])
def test_text_under_slow_reads(resident, monkeypatch, slots, threads):
    """0 to 20 ms more for each."""
    model, tokenizer = load(dtype=mx.float32, expert_slots=slots, io_threads=threads)
    with model:
        monkeypatch.setattr(os, "preadv", delayed(0.02))
        assert texts(model, tokenizer, PROMPTS[1:3]) == resident[1:3]


@pytest.mark.sample(1)
@pytest.mark.parametrize("prompt", PROMPTS[1:3])
def test_text_of_a_small_arena(prompt):
    model, tokenizer = load(dtype=mx.float32)
    with model:
        assert model.experts_stats.slots == 40, "all of a small model by default"
        whole = texts(model, tokenizer, (prompt,), 16)
        model.resize_experts(12)
        assert texts(model, tokenizer, (prompt,), 16) == whole and model.experts_stats.misses > 0
