"""Reads experts ahead that a window's tokens will probably use, in all layers, as soon as the tokens are known.

Follows passes as the pager does: what accepted tokens use is learned when their pass is committed, and nothing else is.
What is read so stands in a layer's row when the pass comes to it, which waits for it if it must; so what stands where
follows from the tokens.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_moe.paging.flow import Flow
from mlx_moe.paging.token_memory import TokenMemory

SHARE = 2 / 3
"""Of a layer's places, at most so many are filled with what tokens will probably use, if tokens use so many."""
NO_REPLAY = "record_routing and read_by_token were both given, and no replay could follow; leave out one of them"


class TokenReads:
    """Of one model. It must see every pass from ``begin`` on, and every layer's ids in order."""

    def __init__(self, memory: TokenMemory, pager: Flow, top_k: int) -> None:
        """top_k: experts that a token uses."""
        self._memory, self._pager, self._top_k = memory, pager, top_k
        self._window: mx.array | None = None
        self._used: list[list[np.ndarray]] = []
        self.abort()

    def begin(self, window_ids: mx.array) -> None:
        """A pass over token ids [B, T] starts; an earlier one that was not committed is kept whole."""
        self.keep_pass()
        self._window = window_ids

    def keep_pass(self) -> None:
        """The last pass is kept whole, unless it was committed already."""
        if self._window is not None:
            self.commit(self._window.shape[1])

    def used(self, layer: int, ids: np.ndarray, window: bool) -> None:
        """The next tokens of the pass use the experts ids [n, k] of a layer; so the pass's tokens are known.

        window: read ahead for later layers, once per pass.
        """
        if self._window is None or layer >= len(self._used):
            return
        first = layer == 0 and not self._used[0]
        self._used[layer].append(ids)
        if first and window:
            self._read_ahead()

    def commit(self, accepted: int) -> None:
        """Of the pass's tokens the first ``accepted`` are kept."""
        window = self._window
        if window is not None and all(sum(map(len, parts)) == window.size for parts in self._used):  # else interrupted
            tokens, ids = np.array(window), np.stack([np.concatenate(parts) for parts in self._used], axis=1)
            kept = ids.reshape(*tokens.shape, *ids.shape[1:])[:, :accepted]
            self._memory.add(tokens[:, :accepted].reshape(-1), kept.reshape(-1, *ids.shape[1:]))
        self.abort()

    def abort(self) -> None:
        """Nothing of the pass is kept."""
        self._window, self._used = None, [[] for _ in range(self._memory.layers)]

    def _read_ahead(self) -> None:
        tokens = np.array(self._window).reshape(-1).tolist()
        for layer, experts in enumerate(self._memory.likely(tokens)):
            if layer and experts:
                most = min(len(tokens) * self._top_k, int(SHARE * self._pager.slots(layer)))
                self._pager.early(layer, experts, most)
