"""The format of what remembers usage or is a static profile, and what ties it to a model.

Little-endian, without gaps: an 8-byte mark with the version; kind, layers, experts (uint32 each); tokens (uint64); the
model's fingerprint (16 bytes); counts [layers, experts] float32; for every layer the length of its order and the
expert numbers (uint16). Nothing is trusted: size is bounded before it is read (``most_bytes``), and every number is
checked. That bytes are whole is the file's care (``twin_file.py``). Knows bytes only, no folders.
"""

from __future__ import annotations

import hashlib
import json
import struct

import numpy as np

from mlx_moe.config import ModelConfig
from mlx_moe.paging.index import ExpertIndex
from mlx_moe.paging.usage import MAX_COUNT, MOST_TOKENS, Usage

MAGIC = b"MLXMOEU2"
KINDS = ("usage", "profile")
_HEAD = struct.Struct("<8sIIIQ16s")


def fingerprint(config: ModelConfig, index: ExpertIndex) -> str:
    """32 hexadecimal digits that tell models apart: what they route, how their experts lie, names and sizes of files.

    The trunk's alone, so that it is the same with and without a draft layer; and not where the folder is.

    Raises OSError where a file of the index is not there.
    """
    layers = index.layers[: config.num_hidden_layers]
    used = sorted({int(i) for layer in layers for part in layer.parts for i in np.unique(part.files)})
    files = [(index.files[i].name, index.files[i].stat().st_size) for i in used]
    parts = [(p.format, p.shape, p.length, hashlib.sha256(p.offsets).hexdigest()) for x in layers for p in x.parts]
    routing = (config.num_experts, config.num_experts_per_tok, config.hidden_size, config.vocab_size)
    return hashlib.sha256(json.dumps([routing, files, parts]).encode()).hexdigest()[:32]


def most_bytes(layers: int, experts: int) -> int:
    """The most that is remembered of a model."""
    return _HEAD.size + layers * (experts * 6 + 2)


def encode(kind: str, usage: Usage, mark: str) -> bytes:
    """What to save. kind: of KINDS. mark: the model's fingerprint."""
    layers, experts = usage.counts.shape
    head = _HEAD.pack(MAGIC, KINDS.index(kind), layers, experts, usage.tokens, bytes.fromhex(mark))
    orders = (np.array([len(row), *row], dtype="<u2").tobytes() for row in usage.order)
    return head + usage.counts.astype("<f4").tobytes() + b"".join(orders)


def decode(data: bytes, kind: str, experts: int, mark: str) -> Usage:
    """What was saved. Raises ValueError, saying why, for what is not of this format, kind and model."""
    if len(data) < _HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise ValueError("it is not a file of this format, or of another version")
    _, number, layers, width, tokens, owner = _HEAD.unpack_from(data)
    if owner.hex() != mark or width != experts:
        raise ValueError("it belongs to another model")
    if number != KINDS.index(kind):
        raise ValueError(f"it is not a {kind}")
    counts, orders = _counts(data, layers, experts)
    if tokens > MOST_TOKENS:
        raise ValueError("it counts more tokens than can be")
    if kind == "usage" and (counts > MAX_COUNT).any():
        raise ValueError("a count is larger than can be")
    return Usage(counts, _order(orders, layers), tokens)


def _counts(data: bytes, layers: int, experts: int) -> tuple[np.ndarray, bytes]:
    """Counts [layers, experts] float32, and what follows them."""
    end = _HEAD.size + 4 * layers * experts
    if len(data) < end:
        raise ValueError("it is too short")
    counts = np.frombuffer(data, "<f4", layers * experts, _HEAD.size).reshape(layers, experts)
    return counts.astype(np.float32), data[end:]


def _order(data: bytes, layers: int) -> tuple[tuple[int, ...], ...]:
    if len(data) % 2:
        raise ValueError("it has half a number")
    values, at, rows = np.frombuffer(data, "<u2").tolist(), 0, []
    for _ in range(layers):
        if at >= len(values) or at + 1 + values[at] > len(values):
            raise ValueError("it is too short")
        rows.append(tuple(values[at + 1 : at + 1 + values[at]]))
        at += 1 + values[at]
    if at != len(values):
        raise ValueError("it is too long")
    return tuple(rows)
