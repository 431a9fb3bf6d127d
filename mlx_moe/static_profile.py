"""A model's static profile: how often its exact router picks each expert over text, whoever runs the experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from custom_kernels.moce_route import plain_route
from mlx_moe.models.qwen4_exp import Model
from mlx_moe.models.qwen4_exp.sources import ExpertSource
from mlx_moe.paging.usage import Usage


class CountedRouting:
    """An expert source that counts what the exact router picks and has another source do everything.

    Attributes:
        counts: [layers, experts] int64, the draft layer's last.
    """

    def __init__(self, source: ExpertSource, layers: int, experts: int, top_k: int) -> None:
        self._source, self._top_k = source, top_k
        self.counts = np.zeros((layers, experts), dtype=np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def moe(self, layer: int, x: mx.array, logits: mx.array, shared: mx.array, phase: str = "decode") -> mx.array:
        """See ExpertSource; waits for the device."""
        ids = np.array(plain_route(logits, self._top_k)[0]).reshape(-1)
        self.counts[layer] += np.bincount(ids, minlength=self.counts.shape[1])
        return self._source.moe(layer, x, logits, shared, phase)


def profile(
    model: Model,
    texts: Sequence[Sequence[int]],
    context: int = 2048,
    progress: Callable[[int, int], None] | None = None,
) -> Usage:
    """Run texts, token ids each, through a model, ``context`` tokens at a time and each piece from an empty cache.

    Args:
        progress: called with the number of tokens done and to do.

    Returns:
        Counts of the trunk's layers, as a profile has them; text does not run through the draft layer.

    Raises ValueError for texts without a token, or a context that is not positive.
    """
    total, done = sum(map(len, texts)), 0
    if not total or context < 1:
        raise ValueError(f"{total} tokens, {context} at a time; needed: at least 1 of both")
    config, source = model.config, model._experts
    counted = CountedRouting(source, config.num_hidden_layers + 1, config.num_experts, config.num_experts_per_tok)
    model._experts = counted
    try:
        for text in texts:
            for start in range(0, len(text), context):
                piece = text[start : start + context]
                mx.eval(model.streams(mx.array([piece])))
                mx.clear_cache()
                done += len(piece)
                if progress is not None:
                    progress(done, total)
    finally:
        model._experts = source
    counts = counted.counts[: config.num_hidden_layers].astype(np.float32)
    return Usage(counts, ((),) * len(counts), total)
