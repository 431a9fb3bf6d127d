"""When what a model learned about its experts is saved: now and then between passes, and at its end. Knows no files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_moe.paging.usage import LayerUsage, Seed, Usage, learned

SAVE_EVERY = 256
"""Tokens from one save to the next."""


@dataclass(frozen=True)
class Learning:
    """What a model that streams starts with, and where what it learns goes.

    Attributes:
        seed: its first experts in memory.
        before: what was remembered so far, whether or not the start follows from it.
        save: takes what is remembered from now on; None does not remember.
        by_worth: the experts that are worth least leave memory first, not those used longest ago.
    """

    seed: Seed
    before: Usage
    save: Callable[[Usage], None] | None
    by_worth: bool

    def layers(self, top_k: int) -> list[LayerUsage]:
        """What each layer learns with, from the seed on. top_k: experts that a token uses."""
        return [LayerUsage(row.size, row, top_k) for row in self.seed.counts]


class Keeper:
    """Saves what the layers of one model have learned."""

    def __init__(self, learning: Learning, layers: Sequence[LayerUsage], order: Callable[[], list[list[int]]]) -> None:
        """order: asked for what stands in memory now, per layer, the one used last at the end."""
        self._learning, self._layers, self._order = learning, layers, order
        self._saved = 0

    def tick(self) -> None:
        """Between passes: save if enough was learned since the last time."""
        if self._tokens() - self._saved >= SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Save if anything was learned since the last time."""
        tokens, learning = self._tokens(), self._learning
        if learning.save is not None and tokens > self._saved:
            self._saved = tokens
            order = self._order() or [[]] * len(self._layers)  # nothing of a model that lost its arena
            learning.save(learned(learning.before, self._layers, order, tokens))

    def _tokens(self) -> int:
        return max((layer.tokens for layer in self._layers), default=0)
