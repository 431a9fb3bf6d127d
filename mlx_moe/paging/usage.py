"""How often experts are used: what a layer learns from accepted tokens, and what a model starts with.

Pure functions of the calls, in NumPy: no MLX, no disk, no clock. Two memories per layer fade with the tokens that it
sees: a long one, which is what is remembered from one run to the next, and a short one, which follows the text at hand.

Every accepted token counts one per expert that it uses, of prompts as much as of generated text: a text goes on as it
began, so its prompt says more about the next tokens than anything else does. Rejected tokens never count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

HALF_LIFE = 2000
"""Tokens after which a use counts half. Replays of the demonstration model hit alike from 500 to 16,000 while the kind
of text stays, and the better after a change the shorter it is; more experts than its 40 take more tokens to tell apart.
"""
RECENT_HALF_LIFE = 16
"""Of the short memory, in tokens."""
RECENT_WEIGHT = 2.0
"""Of the short memory beside the long one; both are shares of tokens. Replays differ little from 1 to 4."""
SMOOTHING = 32
"""Tokens without any preference that the long memory starts with, so that the first few do not decide alone."""
PROFILE_TOKENS = 512
"""A static profile counts as so many tokens: with as many of its own behind it, usage weighs the same."""
MOST_TOKENS = 1 << 62
"""That are counted."""
_KEEP, _KEEP_RECENT = 0.5 ** (1 / HALF_LIFE), 0.5 ** (1 / RECENT_HALF_LIFE)  # of a use, at every token
MAX_COUNT = 1.01 / (1 - _KEEP)
"""The long memory of an expert that every token used, for ever; a remembered count above it is not ours."""


@dataclass(frozen=True)
class Usage:
    """What is remembered of a model; also what a static profile holds.

    Attributes:
        counts: [layers, experts] float32, uses that fade with ``HALF_LIFE``; of a profile they do not.
        order: per layer the experts that stood in memory, the one used last at the end.
        tokens: seen in all, faded or not.
    """

    counts: np.ndarray
    order: tuple[tuple[int, ...], ...]
    tokens: int

    def __post_init__(self) -> None:
        counts = self.counts
        if counts.ndim != 2 or counts.dtype != np.float32 or len(self.order) != len(counts):
            raise ValueError(f"counts are {counts.dtype} {counts.shape} with orders of {len(self.order)} layers")
        if not np.isfinite(counts).all() or (counts < 0).any():
            raise ValueError("a count is negative, or not a number")
        for layer, row in enumerate(self.order):
            if len(set(row)) != len(row) or not all(0 <= expert < counts.shape[1] for expert in row):
                raise ValueError(f"layer {layer}: its order names an expert twice, or one that is not there")
        if self.tokens < 0:
            raise ValueError(f"{self.tokens} tokens; allowed: 0 or more")

    @classmethod
    def none(cls, layers: int, experts: int) -> Usage:
        """Nothing seen so far."""
        return cls(np.zeros((layers, experts), dtype=np.float32), ((),) * layers, 0)

    def layers(self, count: int) -> Usage:
        """Of the first ``count`` layers; those beyond what is known (a draft layer's) are empty."""
        missing = max(0, count - len(self.counts))
        counts = np.concatenate([self.counts, np.zeros((missing, self.counts.shape[1]), dtype=np.float32)])[:count]
        return Usage(counts, (*self.order, *((),) * missing)[:count], self.tokens)


@dataclass(frozen=True)
class Seed:
    """What a model starts with.

    Attributes:
        kind: "usage", "profile", "blend" of both, or "empty".
        counts: [layers, experts] float64, uses that the start is worth.
        order: as of Usage; decides where counts are equal.
    """

    kind: str
    counts: np.ndarray
    order: tuple[tuple[int, ...], ...]

    @property
    def digest(self) -> str | None:
        """The first 16 hexadecimal digits of SHA-256 over all that the start depends on; None of an empty one."""
        if self.kind == "empty":
            return None
        order = repr([list(row) for row in self.order])
        return hashlib.sha256(np.ascontiguousarray(self.counts, dtype="<f8").tobytes() + order.encode()).hexdigest()[
            :16
        ]

    def ranking(self, layer: int, most: int) -> list[int]:
        """The ``most`` experts to read first, the best last; none that was never used, unless there is room for all.

        Where counts are equal the one used later is better, then the one with the lower number.
        """
        counts, place = self.counts[layer], {expert: i for i, expert in enumerate(self.order[layer])}
        chosen = range(counts.size) if most >= counts.size else np.flatnonzero(counts > 0).tolist()
        return sorted(chosen, key=lambda e: (counts[e], place.get(e, -1), -e))[-most:] if most else []


def blend(usage: Usage | None, profile: Usage | None, layers: int, experts: int, top_k: int) -> Seed:
    """A start out of what was learned and of a static profile, either or both of which may be missing.

    A layer's profile, as shares that add up to ``top_k``, counts as ``PROFILE_TOKENS`` tokens; so usage outweighs it
    once it has seen as many.
    """
    counts, order, kinds = np.zeros((layers, experts)), ((),) * layers, []
    if usage is not None and usage.counts.any():
        fitted = usage.layers(layers)
        counts, order, kinds = counts + fitted.counts, fitted.order, ["usage"]
    if profile is not None and profile.counts.any():
        shares = profile.layers(layers).counts.astype(np.float64)
        counts += PROFILE_TOKENS * top_k * shares / np.maximum(shares.sum(axis=1, keepdims=True), 1e-30)
        kinds.append("profile")
    return Seed({0: "empty", 1: "".join(kinds), 2: "blend"}[len(kinds)], counts, order)


class LayerUsage:
    """What one layer learns while it runs.

    Memories are shares of tokens: ``worth`` estimates how probable an expert's next use is.
    """

    def __init__(self, experts: int, start: np.ndarray | None = None, top_k: int = 1) -> None:
        """start: [experts], uses to begin with. top_k: experts that a token uses."""
        self._start = np.zeros(experts) if start is None else np.asarray(start, dtype=np.float64)
        self._start_tokens = self._start.sum() / top_k
        self._own, self._recent = np.zeros(experts), np.zeros(experts)
        self._own_tokens, self._fade = 0.0, 1.0
        self.tokens = 0  # seen since the start, not faded

    @property
    def own(self) -> np.ndarray:
        """[experts] float64, uses since the start, faded."""
        return self._own.copy()

    @property
    def fade(self) -> float:
        """What is left of a use that was counted before the start."""
        return self._fade

    def add(self, ids: np.ndarray) -> None:
        """Accepted tokens used the experts ``ids`` [n, k], in the order of the tokens."""
        n, k = ids.shape
        ages, flat = np.arange(n - 1, -1, -1.0), ids.reshape(-1)
        for memory, keep in ((self._own, _KEEP), (self._recent, _KEEP_RECENT)):
            memory *= keep**n
            if n == 1:  # every token of a text that is being written: its experts differ
                memory[flat] += 1
            else:
                memory += np.bincount(flat, np.repeat(keep**ages, k), memory.size)
        self._own_tokens = self._own_tokens * _KEEP**n + float((_KEEP**ages).sum())
        self._fade *= _KEEP**n
        self.tokens += n

    def worth(self, experts: Sequence[int]) -> np.ndarray:
        """[len(experts)] float64: the share of tokens that will use each, as far as it is known."""
        at = np.asarray(experts, dtype=np.intp)
        tokens = self._start_tokens * self._fade + self._own_tokens + SMOOTHING
        recent = RECENT_WEIGHT * (1 - _KEEP_RECENT)
        return (self._start[at] * self._fade + self._own[at]) / tokens + recent * self._recent[at]

    def leaving(self, experts: list[int]) -> list[int]:
        """Who is worth least first, and of equals in the order given; a LayerPolicy's ``rank``."""
        return [experts[i] for i in np.argsort(self.worth(experts), kind="stable").tolist()]


def learned(before: Usage, layers: Sequence[LayerUsage], order: Sequence[Sequence[int]], tokens: int) -> Usage:
    """What to remember: what was known before the start, faded, and what was learned since.

    Args:
        before: of at least as many layers as ``layers``, or fewer.
        order: per layer of ``layers``, the experts in memory, the one used last at the end.
        tokens: seen since the start.
    """
    whole = before.layers(max(len(layers), len(before.counts)))
    counts, rows = whole.counts.astype(np.float64), list(whole.order)
    for i, (layer, row) in enumerate(zip(layers, order, strict=True)):
        counts[i] = counts[i] * layer.fade + layer.own
        rows[i] = tuple(row)
    return Usage(counts.astype(np.float32), tuple(rows), min(before.tokens + tokens, MOST_TOKENS))
