"""When what a model learned about its experts is saved: now and then between passes, and at its end. Knows no files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_moe.paging.token_memory import TokenMemory
from mlx_moe.paging.usage import LayerUsage, Seed, Usage, learned

SAVE_EVERY = 256
"""Tokens from one save of usage to the next."""
SAVE_TOKENS_EVERY = 4096
"""The same of what is remembered by token, which is larger."""


@dataclass(frozen=True)
class Learning:
    """What a model that streams starts with, and where what it learns goes.

    Attributes:
        seed: its first experts in memory.
        before: what was remembered so far, whether or not the start follows from it.
        save: takes what is remembered from now on; None does not remember.
        by_worth: the experts that are worth least leave memory first, not those used longest ago.
        tokens: what is remembered by token, and grows; None reads nothing ahead by token.
        save_tokens: takes it from now on; None does not remember.
    """

    seed: Seed
    before: Usage
    save: Callable[[Usage], None] | None
    by_worth: bool
    tokens: TokenMemory | None = None
    save_tokens: Callable[[TokenMemory], None] | None = None

    @property
    def digest(self) -> str | None:
        """Of all that a run depends on, 16 hexadecimal digits; None where it starts with nothing."""
        known = None if self.tokens is None else self.tokens.digest
        if known is None:
            return self.seed.digest
        return hashlib.sha256(f"{self.seed.digest} {known}".encode()).hexdigest()[:16]

    def layers(self, top_k: int) -> list[LayerUsage]:
        """What each layer learns with, from the seed on. top_k: experts that a token uses."""
        return [LayerUsage(row.size, row, top_k) for row in self.seed.counts]


class Keeper:
    """Saves what the layers of one model have learned."""

    def __init__(self, learning: Learning, layers: Sequence[LayerUsage], order: Callable[[], list[list[int]]]) -> None:
        """order: asked for what stands in memory now, per layer, the one used last at the end."""
        self._learning, self._layers, self._order = learning, layers, order
        self._saved = self._saved_tokens = 0

    def tick(self) -> None:
        """Between passes: save if enough was learned since the last time."""
        tokens = self._tokens()
        if tokens - self._saved >= SAVE_EVERY:
            self._save_usage()
        if tokens - self._saved_tokens >= SAVE_TOKENS_EVERY:
            self._save_by_token()

    def save(self) -> None:
        """Save if anything was learned since the last time."""
        self._save_usage()
        self._save_by_token()

    def _save_by_token(self) -> None:
        tokens, learning = self._tokens(), self._learning
        if learning.save_tokens is not None and tokens > self._saved_tokens:
            self._saved_tokens = tokens
            learning.save_tokens(learning.tokens)

    def _save_usage(self) -> None:
        tokens, learning = self._tokens(), self._learning
        if learning.save is not None and tokens > self._saved:
            self._saved = tokens
            order = self._order() or [[]] * len(self._layers)  # nothing of a model that lost its arena
            learning.save(learned(learning.before, self._layers, order, tokens))

    def _tokens(self) -> int:
        return max((layer.tokens for layer in self._layers), default=0)
