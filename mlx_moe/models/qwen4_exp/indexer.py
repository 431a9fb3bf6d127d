"""The QSA indexer: which key blocks a query attends to."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_moe.cache import SparseCache
from mlx_moe.config import ModelConfig
from mlx_moe.models.layers import Linear, RMSNorm, Rotary


class Indexer(nn.Module):
    """Scores complete blocks of ``ratio`` tokens and picks the best ``num_blocks`` per query.

    A block's key is the mean of its raw keys in float32, normed, at the rotary position of its first token.
    score = sum over heads of relu(q . k) / sqrt(d), in float32, so that ties are ties on every machine.
    """

    def __init__(self, config: ModelConfig, rotary: Rotary):
        super().__init__()
        self._heads, self._dim = config.indexer_n_heads, config.indexer_head_dim
        self._ratio, self._blocks = config.indexer_compress_ratio, config.num_blocks
        self._rotary = rotary
        self.index_qk_proj = Linear(config.hidden_size, (self._heads + 1) * self._dim)
        self.q_layernorm = RMSNorm(self._dim, config.rms_norm_eps)
        self.k_layernorm = RMSNorm(self._dim, config.rms_norm_eps)

    def __call__(self, x: mx.array, cache: SparseCache) -> tuple[mx.array, mx.array | None]:
        """Project new tokens and finish the blocks that they complete.

        Args:
            x: [B, T, H].

        Returns:
            index queries [B, heads, T, Di], and the keys of all complete blocks [B, n, Di] (None while there are none).
        """
        B, T, _ = x.shape
        q, raw = mx.split(self.index_qk_proj(x), [self._heads * self._dim], axis=-1)
        q = self.q_layernorm(q.reshape(B, T, self._heads, self._dim)).swapaxes(1, 2)
        q = self._rotary(q, cache.offset)
        pending, before = cache.pending(raw)
        return q, cache.update_blocks(self._finish(pending, before), before)

    def _finish(self, pending: mx.array, before: int) -> mx.array | None:
        """Keys of the complete blocks in pending raw keys [B, P, Di], the first of which starts block ``before``."""
        B, P, _ = pending.shape
        count = P // self._ratio
        if count == 0:
            return None
        groups = pending[:, : count * self._ratio].reshape(B, count, self._ratio, self._dim)
        pooled = groups.astype(mx.float32).mean(axis=2).astype(pending.dtype)
        return self._rotary(self.k_layernorm(pooled)[:, None], before, self._ratio)[:, 0]

    def dense_until(self) -> int:
        """Queries at positions below this see no more blocks than the budget allows: nothing to choose."""
        return (self._blocks + 1) * self._ratio - 1

    def select(self, q: mx.array, blocks: mx.array, start: int) -> tuple[mx.array, mx.array]:
        """The tokens that each query attends to.

        Args:
            q: [heads, T, Di] index queries of one sequence, the first at position ``start`` (``dense_until`` or later).
            blocks: [n, Di] keys of the complete blocks. Those that complete after the last of the queries are not
                read, so a query's scores do not depend on the tokens after it.

        Returns:
            token positions [T, budget + ratio - 1] int32, ascending within the blocks and then within the tail, and
            which of them count (the tail has 0 to ratio - 1 tokens). Equal scores go to the earlier block.
        """
        return self._choose(self._scores(q, blocks[: (start + q.shape[1]) // self._ratio]), start)

    def select_each(self, q: mx.array, blocks: mx.array, start: int) -> tuple[mx.array, mx.array]:
        """``select`` for several sequences of equal length: q [B, heads, T, Di], blocks [B, n, Di].

        Returns:
            token positions [B, T, budget + ratio - 1], and which of them count [T, budget + ratio - 1].
        """
        n = (start + q.shape[2]) // self._ratio
        scores = mx.stack([self._scores(*row) for row in zip(q, blocks[:, :n], strict=True)])
        return self._choose(scores, start)

    def _scores(self, q: mx.array, blocks: mx.array) -> mx.array:
        """[heads, T, Di] and [n, Di] -> [T, n] float32."""
        products = q.astype(mx.float32) @ blocks.astype(mx.float32).T
        return mx.maximum(products, 0).sum(axis=0) * self._dim**-0.5

    def _choose(self, scores: mx.array, start: int) -> tuple[mx.array, mx.array]:
        """Scores [..., T, n] of the blocks that are complete after the last query -> positions, and which count."""
        *lead, T, n = scores.shape
        positions = start + mx.arange(T, dtype=mx.int32)
        complete = (positions + 1) // self._ratio
        ids = mx.arange(n, dtype=mx.int64)
        keys = ids - mx.view(scores, mx.int32).astype(mx.int64) * (1 << 24)  # all different; best first
        keys = mx.where(ids < complete[:, None], keys, 1 << 24)
        chosen = mx.argpartition(keys, self._blocks - 1, axis=-1)[..., : self._blocks].astype(mx.int32)
        within = mx.arange(self._ratio, dtype=mx.int32)
        tokens = (mx.sort(chosen, axis=-1)[..., None] * self._ratio + within).reshape(*lead, T, -1)
        tail = complete[:, None] * self._ratio + within[: self._ratio - 1]
        counts = mx.concatenate([mx.ones((T, tokens.shape[-1]), mx.bool_), tail <= positions[:, None]], axis=-1)
        tail = mx.broadcast_to(mx.minimum(tail, positions[:, None]), (*lead, *tail.shape))
        return mx.concatenate([tokens, tail], axis=-1), counts
