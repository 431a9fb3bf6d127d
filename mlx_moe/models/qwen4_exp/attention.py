"""QSA: attention over the blocks that the indexer picks, with a sigmoid output gate."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_moe.cache import SparseCache
from mlx_moe.config import ModelConfig
from mlx_moe.models.layers import WINDOW, Linear, RMSNorm, Rotary
from mlx_moe.models.qwen4_exp.indexer import Indexer

TILE_BYTES = 64 << 20
"""Workspace for the gathered keys and values, or the block scores, of one tile of queries."""
MAX_TILE = 64
TILES_IN_FLIGHT = 4
"""Tiles of a prompt that are queued before the first of them must be done: MLX queues faster than devices compute, and
would hold all tiles at once."""


class SparseAttention(nn.Module):
    """Grouped-query attention; all heads of a query see the same selected tokens.

    With at most budget + ratio - 1 visible tokens nothing is left out and this is ordinary attention. Beyond that,
    queries go through in tiles that gather their own keys: memory does not grow with prompt length times itself.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self._heads, self._kv_heads, self._dim = config.num_attention_heads, config.num_key_value_heads, dim
        self._selected = config.indexer_budget + config.indexer_compress_ratio - 1
        self._scale = dim**-0.5
        self._rotary = Rotary(config.rotary_dim, config.rope_theta)
        self.q_proj = Linear(hidden, self._heads * 2 * dim)  # per head: query, then gate
        self.k_proj = Linear(hidden, self._kv_heads * dim)
        self.v_proj = Linear(hidden, self._kv_heads * dim)
        self.o_proj = Linear(self._heads * dim, hidden)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)
        self.indexer = Indexer(config, self._rotary)

    def __call__(self, x: mx.array, cache: SparseCache) -> mx.array:
        """x [B, T, H] -> [B, T, H]; advances the cache by T tokens."""
        B, T, _ = x.shape
        start = cache.offset
        q, gate = mx.split(self.q_proj(x).reshape(B, T, self._heads, 2 * self._dim), 2, axis=-1)
        q = self._rotary(self.q_norm(q).swapaxes(1, 2), start)
        k = self.k_norm(self.k_proj(x).reshape(B, T, self._kv_heads, self._dim)).swapaxes(1, 2)
        v = self.v_proj(x).reshape(B, T, self._kv_heads, self._dim).swapaxes(1, 2)
        index_q, blocks = self.indexer(x, cache)
        keys, values = cache.update(self._rotary(k, start), v)
        dense = min(max(self.indexer.dense_until() - start, 0), T)
        parts = []
        if dense:
            parts.append(self._dense(q[:, :, :dense], keys, values, start))
        if dense < T:
            parts.append(self._sparse(q[:, :, dense:], index_q[:, :, dense:], keys, values, blocks, start + dense))
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)  # [B, heads, T, D]
        out = out.swapaxes(1, 2) * mx.sigmoid(gate)
        return self.o_proj(out.reshape(B, T, -1))

    def _dense(self, q: mx.array, keys: mx.array, values: mx.array, start: int) -> mx.array:
        """Causal attention of q [B, heads, T, D], the first at position ``start``, over the first start + T keys."""
        T = q.shape[2]
        if T > WINDOW:
            end = start + T
            return self._attend(q, keys[:, :, :end], values[:, :, :end], "causal")
        ends = range(start + 1, start + T + 1)
        rows = [self._attend(q[:, :, t : t + 1], keys[:, :, :end], values[:, :, :end]) for t, end in enumerate(ends)]
        return rows[0] if T == 1 else mx.concatenate(rows, axis=2)

    def _attend(self, q: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None = None) -> mx.array:
        """Attention of q [B, heads, T, D]; of a window, one query at a time."""
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=self._scale, mask=mask)

    def _sparse(
        self, q: mx.array, index_q: mx.array, keys: mx.array, values: mx.array, blocks: mx.array, start: int
    ) -> mx.array:
        """Attention of queries [B, heads, T, D] over their selected tokens -> [B, heads, T, D]."""
        if q.shape[0] > 1 and q.shape[2] == 1:
            return self._sparse_step(q, index_q, keys, values, blocks, start)
        rows = zip(q, index_q, keys, values, blocks, strict=True)
        return mx.stack([self._sparse_row(*row, start) for row in rows])

    def _sparse_row(
        self, q: mx.array, index_q: mx.array, keys: mx.array, values: mx.array, blocks: mx.array, start: int
    ) -> mx.array:
        """Those of one sequence, [heads, T, D] -> [heads, T, D]: a window's one by one, a prompt's in tiles.

        A window's query sees the same kernels as a single step does. In a tile the queries of one KV head and position
        are rows of one product, since they see the same tokens; kernels for one query would read them for each head.
        """
        T = q.shape[1]
        if T == 1:
            return self._step(q, index_q, keys, values, blocks, start)
        if T <= WINDOW:
            steps = ((slice(t, t + 1), start + t) for t in range(T))
            return mx.concatenate([self._step(q[:, r], index_q[:, r], keys, values, blocks, at) for r, at in steps], 1)
        grouped, tile, parts = q.reshape(self._kv_heads, -1, T, self._dim).swapaxes(1, 2), self._tile(keys, blocks), []
        for t in range(0, T, tile):
            rows = slice(t, t + tile)
            tokens, counts = self.indexer.select(index_q[:, rows], blocks, start + t)
            k, v = (mx.take(source, tokens, axis=1) for source in (keys, values))  # [Hkv, t, n, D]
            parts.append(self._attend(grouped[:, rows], k, v, counts[:, None]))
            mx.async_eval(parts[-1])
            mx.eval(parts[-1 - TILES_IN_FLIGHT : -TILES_IN_FLIGHT])
        return mx.concatenate(parts, axis=1).swapaxes(1, 2).reshape(q.shape)

    def _step(
        self, q: mx.array, index_q: mx.array, keys: mx.array, values: mx.array, blocks: mx.array, start: int
    ) -> mx.array:
        """One query [heads, 1, D] at position ``start`` -> [heads, 1, D]."""
        tokens, counts = self.indexer.select(index_q, blocks, start)
        k, v = (mx.take(source, tokens[0], axis=1)[None] for source in (keys, values))  # [1, Hkv, n, D]
        return self._attend(q[None], k, v, counts)[0]

    def _sparse_step(
        self, q: mx.array, index_q: mx.array, keys: mx.array, values: mx.array, blocks: mx.array, start: int
    ) -> mx.array:
        """The next token of each of several sequences, [B, heads, 1, D] -> [B, heads, 1, D], all in the same ops."""
        tokens, counts = self.indexer.select_each(index_q, blocks, start)  # [B, 1, n], [1, n]
        sequence, head = mx.arange(q.shape[0])[:, None, None], mx.arange(self._kv_heads)[:, None]
        k, v = (source[sequence, head, tokens] for source in (keys, values))  # [B, Hkv, n, D]
        return self._attend(q, k, v, counts[None, None])

    def _tile(self, keys: mx.array, blocks: mx.array) -> int:
        """Queries per tile so that neither gathered keys and values nor block scores exceed TILE_BYTES."""
        gathered = 2 * self._selected * self._kv_heads * self._dim * keys.itemsize
        scored = blocks.shape[0] * (4 * self.indexer._heads + 16)
        return max(1, min(MAX_TILE, TILE_BYTES // max(gathered, scored)))
