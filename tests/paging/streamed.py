"""Tiny models whose experts stream, and what their tests share."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np

from checkpoints import random_weights, tiny_config, tokens
from gguf_models import q8_0_matrices, tiny_metadata, tiny_tensors
from gguf_writer import encode
from mlx_moe import load_model
from mlx_moe.generation import generate_tokens
from mlx_moe.model_sizes import local_sizes
from mlx_moe.models.qwen4_exp import Model
from mlx_moe.paging.plan import Machine, Wanted, default_context, plan_memory
from tiny_tokenizer import gguf_keys

EXPERTS, TOP_K = 40, 4
IDS = tokens(40)
LAYERS = 4
PF_EXITING = 4
"""Linux's flag of a thread that has ended, may be joined, and is still listed for a moment."""


def write_model(path: Path, mtp: bool = False, tokenizer: bool = False, layers: int = LAYERS) -> Path:
    """40 experts per layer, of which a token uses 4; Q8_0. tokenizer: whether the file carries one."""
    raw = tiny_config(num_experts=EXPERTS, num_experts_per_tok=TOP_K, num_hidden_layers=layers)
    tensors = tiny_tensors(raw, random_weights(raw, 3, mtp=mtp), q8_0_matrices)
    path.write_bytes(encode(tiny_metadata(raw, mtp) | (gguf_keys() if tokenizer else {}), tensors))
    return path


def opened(path: Path, slots: int = EXPERTS, **options) -> Model:
    """In float32; without usage, unless it is asked for, so that no test starts with what another one learned."""
    return load_model(path, mx.float32, expert_slots=slots, **{"usage": False} | options)[0]


def logits(model: Model, pieces: tuple[int, ...] = (20, 1, 1, 5, 8, 5)) -> np.ndarray:
    """[T, V] of IDS, run in pieces: a prompt, single tokens, windows."""
    cache, parts, start = model.make_cache(), [], 0
    for piece in pieces:
        parts.append(np.array(model(mx.array(IDS[None, start : start + piece]), cache=cache)[0]))
        start += piece
    return np.concatenate(parts)


def ceiling(path: Path, slots: int, step: int = 2048) -> int:
    """Bytes that this many slots per layer just fit under, in float32, with prompts in pieces of ``step`` tokens."""
    sizes = local_sizes(path, 4)
    wanted = Wanted(expert_slots=slots, context=default_context(sizes.config), prefill_step_size=step, item_bytes=4)
    return plan_memory(sizes, Machine(1 << 40), wanted).total_bytes


def greedy(model: Model, count: int = 10, prompt: np.ndarray = IDS) -> list[int]:
    """Ids after a prompt."""
    return [token for token, _ in generate_tokens(prompt.tolist(), model, max_tokens=count)]


def bits(cache) -> list[np.ndarray]:
    """All that a cache holds."""
    return [
        np.array(value.astype(mx.float32) if isinstance(value, mx.array) else value)
        for layer in cache
        for value in layer.state
        if value is not None
    ]


def readers() -> list[str]:
    """Names of the threads that read experts; where the system does not list a process's threads, only Python's."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("experts")]
    names = []
    for task in tasks.iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        if not int(rest.split()[6]) & PF_EXITING:
            names.append(name)
    names += [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("experts")]


def descriptors(path: Path) -> int:
    """Open descriptors of a file; 0 where the system does not list them."""
    folder = Path("/proc/self/fd")
    if not folder.exists():
        return 0
    count = 0
    for entry in folder.iterdir():
        try:
            count += os.readlink(entry) == str(path)
        except OSError:
            continue  # closed meanwhile
    return count
