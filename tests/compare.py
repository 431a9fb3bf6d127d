"""Comparing logits with a reference, ties of the block selection apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from mlx_moe.models.qwen4_exp.indexer import Indexer

TIE = 1e-6


@contextlib.contextmanager
def recorded_margins() -> Iterator[dict[int, float]]:
    """position -> smallest score gap, over all layers, between the last block chosen and the best one left out."""
    margins: dict[int, float] = {}
    original = Indexer.select

    def select(self, q, blocks, start):
        scores = np.array(mx.maximum(q.astype(mx.float32) @ blocks.astype(mx.float32).T, 0).sum(0) * self._dim**-0.5)
        for t, row in enumerate(scores):
            seen = np.sort(row[: (start + t + 1) // self._ratio])[::-1]
            gap = float(seen[self._blocks - 1] - seen[self._blocks])
            margins[start + t] = min(gap, margins.get(start + t, np.inf))
        return original(self, q, blocks, start)

    Indexer.select = select
    try:
        yield margins
    finally:
        Indexer.select = original


def run_in_pieces(model, ids: np.ndarray, piece: int) -> np.ndarray:
    """Logits [T, V] of one sequence fed in pieces through a cache."""
    cache = model.make_cache()
    parts = [model(mx.array(ids[None, i : i + piece]), cache=cache)[0] for i in range(0, len(ids), piece)]
    return np.array(mx.concatenate(parts).astype(mx.float32))


def assert_close(got: np.ndarray, want: np.ndarray, margins: dict[int, float], limit: float, what: str) -> None:
    """Every row within ``limit``, except rows at or after which a tie decided; those must be real ties."""
    rows = np.abs(got - want).max(axis=1)
    wrong = [t for t in np.flatnonzero(rows > limit) if margins.get(int(t), np.inf) > TIE]
    assert not wrong, f"{what}: rows {wrong[:5]} differ by up to {rows[wrong].max():.1e} (limit {limit:.0e}), untied"
    assert np.median(rows) < limit / 30, f"{what}: median row difference {np.median(rows):.1e}"
