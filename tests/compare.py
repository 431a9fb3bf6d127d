"""Comparing logits with a reference, where the block selection of sparse attention may tie.

Index scores are sums of relus, so several blocks can score exactly 0 at the cut, and two right implementations may pick
different ones. Such a row may differ, and so may later rows that a recurrent layer carries the difference to.
``assert_same_up_to_ties`` accepts that only if another choice among the tied blocks reproduces the reference.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_moe.models.qwen4_exp.indexer import Indexer

TIE = 1e-6
"""Scores closer than this tie: two implementations' rounding may order them either way."""
MAX_TRIES = 300

Place = tuple[int, int]
"""A QSA layer, counted in the order in which it is first used, and a position."""


@dataclass
class Selections:
    """What the indexer of a model decides while ``watched`` is open."""

    tied: dict[Place, tuple[tuple[int, ...], int]] = field(default_factory=dict)  # tied blocks, how many are chosen
    chosen: dict[Place, tuple[int, ...]] = field(default_factory=dict)  # which of them to choose, if not the default
    layers: list[int] = field(default_factory=list)
    rows: int = 0  # rows for which anything was left out


@contextlib.contextmanager
def watched() -> Iterator[Selections]:
    """Record every tie at the cut, and decide it as ``chosen`` says."""
    seen = Selections()
    original = Indexer.select

    def select(self, q, blocks, start):
        tokens, counts = original(self, q, blocks, start)
        if id(self) not in seen.layers:
            seen.layers.append(id(self))
        scores = np.array(mx.maximum(q.astype(mx.float32) @ blocks.astype(mx.float32).T, 0).sum(0) * self._dim**-0.5)
        rows = np.array(tokens)
        seen.rows += len(rows)
        for t, row in enumerate(scores):
            place = (seen.layers.index(id(self)), start + t)
            row = row[: (start + t + 1) // self._ratio]
            cut = np.sort(row)[::-1][self._blocks - 1]
            above, tied = np.flatnonzero(row > cut + TIE), np.flatnonzero(np.abs(row - cut) <= TIE)
            needed = self._blocks - len(above)
            if len(tied) > needed:
                seen.tied[place] = tuple(tied.tolist()), needed
            if place in seen.chosen:
                picked = np.sort(np.concatenate([above, seen.chosen[place]])).astype(rows.dtype)
                within = np.arange(self._ratio, dtype=rows.dtype)
                rows[t, : self._blocks * self._ratio] = (picked[:, None] * self._ratio + within).reshape(-1)
        return mx.array(rows), counts

    Indexer.select = select
    try:
        yield seen
    finally:
        Indexer.select = original


def run_in_pieces(model, ids: np.ndarray, piece: int) -> np.ndarray:
    """Logits [T, V] of one sequence fed in pieces through a cache."""
    cache = model.make_cache()
    parts = [model(mx.array(ids[None, i : i + piece]), cache=cache)[0] for i in range(0, len(ids), piece)]
    return np.array(mx.concatenate(parts).astype(mx.float32))


def assert_same_up_to_ties(
    run: Callable[[int], np.ndarray], want: np.ndarray, limit: float, what: str
) -> dict[Place, tuple[int, ...]]:
    """Every row of ``run(T)`` within ``limit`` of ``want`` [T, V], for some choice among tied blocks.

    ``run(n)`` gives logits of the first n rows. Returns the blocks to choose where our own choice was another.
    """
    with watched() as seen:
        while True:
            rows = np.abs(run(len(want)) - want).max(axis=1)
            wrong = np.flatnonzero(rows > limit)
            if not len(wrong):
                break
            first = int(wrong[0])
            message = f"{what}: row {first} differs by {rows[first]:.1e} (limit {limit:.0e}); rows {wrong[:5]}"
            _decide(run, want, limit, first, seen, message)
    assert seen.rows, f"{what}: the budget was never exceeded, so nothing was selected"
    assert np.median(rows) < limit / 30, f"{what}: median row difference {np.median(rows):.1e}"
    return seen.chosen


def _decide(run, want: np.ndarray, limit: float, row: int, seen: Selections, message: str) -> None:
    """Find tied blocks for a row that reproduce the reference there."""
    places = [place for place in seen.tied if place[1] == row and place not in seen.chosen]
    assert places, f"{message}, and no tie explains it"
    options = [itertools.combinations(seen.tied[place][0][::-1], seen.tied[place][1]) for place in places]
    for choice in itertools.islice(itertools.product(*options), MAX_TRIES):
        seen.chosen.update(zip(places, choice, strict=True))
        if np.abs(run(row + 1)[row] - want[row]).max() <= limit:
            return
    raise AssertionError(f"{message}, and no choice among the tied blocks reproduces it")
